"""`headstart static`: what it reads from machine code, and what it calls broken."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from headstart.cli.commands import headstart
from headstart.evidence.static import diff, machine_code
from headstart.evidence.static.budgets import BUDGETS, DEVICES, broken, resident_blocks
from headstart.evidence.static.collect import collect, collect_each, kernels, resolve_targets
from headstart.evidence.static.parts import Part
from headstart.runtime.static import TARGETS

ROOT = Path(__file__).parents[2]
PLACE = "tests.evidence.static_kernels:"


@pytest.fixture(autouse=True)
def kernels_of_the_tests(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(*arguments):
    return CliRunner().invoke(headstart, ["static", *arguments], prog_name="headstart")


def by_name(results):
    return {(result["kernel"], result["target"]): result for result in results}


@pytest.fixture(scope="module")
def good():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        # The interpreter may be on in this process; the compiling one has to turn it off.
        patch.setenv("TRITON_INTERPRET", "1")
        return by_name(collect(list(TARGETS), places={"test": PLACE + "good"}))


def test_every_target_has_limits_and_a_budget():
    assert list(TARGETS) == list(DEVICES) == list(BUDGETS)
    assert len(TARGETS) == 8


@pytest.mark.parametrize(
    ("target", "matrix", "load"),
    [
        ("cuda:80", "HMMA", "LDGSTS.128"),
        ("cuda:89", "HMMA", "LDGSTS.128"),
        ("cuda:90", "HGMMA", "LDGSTS.128"),
        ("cuda:100", "UTCHMMA", "LDGSTS.128"),
        ("cuda:120", "HMMA", "LDGSTS.128"),
        ("hip:gfx942", "v_mfma", "global_load.128"),
        ("hip:gfx950", "v_mfma", "global_load.128"),
        ("hip:gfx1151", "v_wmma", "global_load.128"),
    ],
)
def test_a_product_runs_on_matrix_instructions_everywhere(good, target, matrix, load):
    result = good["product", target]
    assert result["error"] == ""
    assert result["broken"] == []
    assert any(opcode.startswith(matrix) for opcode in result["matrix"])
    assert load in result["loads"]
    # A 64 x 64 float32 accumulator over 4 warps takes 32 registers of a thread, or 16 of 64 lanes;
    # on Blackwell it lies in tensor memory, but passes through registers at the end.
    lanes = 4 * TARGETS[target].warp_size
    assert result["threads"] == lanes
    assert 64 * 64 // lanes < result["registers"] < 256
    # Two or three stages of two 64 x 64 bfloat16 tiles.
    assert result["shared"] >= 2 * 2 * 64 * 64 * 2
    assert result["vector_spills"] == 0
    assert result["resident_blocks"] >= 2
    assert (result["scalar_spills"] is None) == target.startswith("cuda")
    assert result["instructions"] == sum(result["opcodes"].values()) > 100


def test_what_is_known_of_arguments_decides_the_width_of_loads(good):
    assert good["copy", "cuda:90"]["loads"] == {"LDG.128": 2}
    assert good["copy-unaligned", "cuda:90"]["loads"] == {"LDG.32": 8}
    assert good["copy", "cuda:90"]["matrix"] == {}
    assert not any(name == "copy-unaligned" and target != "cuda:90" for name, target in good)


@pytest.mark.parametrize("target", TARGETS)
def test_a_feature_that_is_off_leaves_the_instructions_as_they_are(good, target):
    plain = good["product", target]
    assert diff.difference(good["product-scale-off", target], plain) == ""
    assert diff.difference(good["product-bias", target], plain)
    assert diff.difference(good["product-scaled", target], plain)


def test_broken_budgets_are_named():
    targets = ["cuda:89", "hip:gfx942", "hip:gfx1151"]
    found = by_name(collect(targets, places={"test": PLACE + "bad"}))
    assert "spills" in found["spills", "cuda:89"]["broken"][0]
    assert found["spills", "cuda:89"]["vector_spills"] > 100
    assert found["spills", "hip:gfx1151"]["vector_spills"] > 100
    assert found["spills", "hip:gfx942"]["broken"] == []
    shared = found["too-much-shared", "cuda:89"]["broken"]
    assert "allowed 101376" in shared[0]
    assert "does not fit" in shared[1]
    assert found["no-matrix", "hip:gfx1151"]["broken"] == [
        "has a product but no matrix instruction"
    ]
    assert found["no-matrix", "cuda:89"]["broken"] == []


def test_a_kernel_that_kills_the_compiler_does_not_take_the_others_with_it():
    places = {"test": PLACE + "deadly"}
    results = collect(["cuda:90"], places=places)
    assert [result["kernel"] for result in results] == ["before", "deadly", "after"]
    assert [bool(result["error"]) for result in results] == [False, True, False]
    assert "exit 7" in results[1]["broken"][0]


def test_command_prints_a_table_and_writes_a_run(tmp_path):
    file = tmp_path / "static.json"
    arguments = ("--place", PLACE + "good", "--target", "90", "--kernel", "copy*")
    result = run(*arguments, "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = [line.split()[:3] for line in result.stdout.splitlines()]
    assert ["copy", "cuda:90", "18"] in rows
    written = json.loads(file.read_text())
    assert written["kind"] == "static"
    assert [one["kernel"] for one in written["results"]] == ["copy", "copy-unaligned"]

    again = run(*arguments, "--diff", str(file))
    assert again.exit_code == 0, again.output
    assert "2 of 2 identical" in again.stdout

    written["results"][0] |= {"fingerprint": "0", "opcodes": {"HMMA": 99}}
    file.write_text(json.dumps(written))
    differs = run(*arguments, "--diff", str(file))
    assert differs.exit_code == 1
    assert "DIFFERS copy on cuda:90" in differs.stdout
    assert "HMMA 0, was 99" in differs.stdout


def test_kernels_are_listed_uncompiled():
    result = run("--place", PLACE + "good", "--target", "90", "--target", "cuda:90", "--list")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    assert [PLACE + "good", "copy", "cuda:90"] in rows
    assert len(rows) == len({tuple(row) for row in rows})


def test_command_compares_with_another_kernel():
    result = run(
        "--place", PLACE + "good", "--target", "90", "--kernel", "product-*", "--diff", "product"
    )
    assert result.exit_code == 1
    assert "identical product-scale-off beside product on cuda:90" in result.stdout
    assert "DIFFERS product-bias beside product on cuda:90: FADD" in result.stdout


def test_command_exits_with_1_for_a_broken_budget_and_for_what_does_not_compile():
    result = run("--place", PLACE + "broken", "--target", "89")
    assert result.exit_code == 1
    assert "signature: missing ['n'], unknown ['m']" in result.stdout


def test_command_compares_triton_versions(tmp_path):
    link = tmp_path / "python"
    link.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    link.chmod(0o755)
    result = run(
        "--place", PLACE + "good", "--target", "90", "--kernel", "copy", "--triton-python", link
    )
    assert result.exit_code == 0, result.output
    assert "0 differences between Triton versions in spills" in result.stdout


def test_spill_differences_are_listed():
    base = {"operation": "a", "kernel": "scan", "target": "cuda:90", "error": ""}
    ours = base | {"triton": "3.6.0", "vector_spills": 0, "scalar_spills": None}
    ours |= {"instructions": 2776}
    theirs = ours | {"triton": "3.7.0", "vector_spills": 44, "instructions": 2705}
    assert diff.spill_differences([ours], [ours]) == []
    where = "scan", "cuda:90"
    (row,) = diff.spill_differences([ours], [theirs])
    assert row == (*where, "vector spills", "0 in 2,776", "44 in 2,705")
    fails = base | {"triton": "3.7.0", "error": "PassManager::run failed"}
    (row,) = diff.spill_differences([ours], [fails])
    assert row == (*where, "compiles", "yes", "PassManager::run failed")
    assert diff.spill_differences([fails], [fails]) == []


OURS = dict.fromkeys(("registers", "shared", "vector_spills"), 0) | {
    "operation": "a", "kernel": "scan", "target": "cuda:90", "triton": "3.6.0", "error": "",
    "resident_blocks": 1, "instructions": 1000, "scalar_spills": None, "matrix": {}, "loads": {},
    "has_product": False,
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """Runs the command where compilers make what is said of ours and of the other one."""
    from headstart.evidence.static import collect as module

    def runs(ours, theirs, *arguments):
        def collected(targets, *, python=sys.executable, **_):
            result = OURS | (ours if python == sys.executable else {"triton": "3.9.0"} | theirs)
            return [result | {"broken": broken("cuda:90", result)}]

        monkeypatch.setattr(module, "collect", collected)
        return run("--target", "90", "--triton-python", "sh", *arguments)

    return runs


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"vector_spills": 250}, ""),
        (
            {"vector_spills": 251},
            "spills 251 vector words, allowed 250 beside the 0 of Triton 3.6.0",
        ),
        ({"error": "PassManager::run failed"}, "does not compile: PassManager::run failed"),
        ({"resident_blocks": 0}, "does not fit on a multiprocessor"),
        ({"instructions": 3}, "is nothing but a trap of 3 instructions"),
    ],
)
def test_with_another_triton_a_kernel_compiles_and_spills_little_more(compiled, theirs, words):
    result = compiled({}, theirs)
    assert result.exit_code == (1 if words else 0), result.output
    assert (f"BROKEN scan on cuda:90 (Triton 3.9.0): {words}" in result.stdout) == bool(words)
    differences = int(bool(theirs.get("vector_spills") or theirs.get("error")))
    assert f"{differences} differences between Triton versions in spills" in result.stdout


@pytest.mark.parametrize(
    ("ours", "code"),
    [
        ({"vector_spills": 5}, 0),
        ({"error": "no"}, 1),
        ({"resident_blocks": 0}, 1),
        ({"instructions": 3}, 1),
    ],
)
def test_reported_budgets_are_no_errors_but_failures_are(compiled, ours, code):
    theirs = {"vector_spills": 5}
    result = compiled(ours, theirs, "--report-budgets")
    assert result.exit_code == code, result.output
    assert "BROKEN scan on cuda:90 (Triton 3.6.0)" in result.stdout
    passed = "1 kernels break a budget, which --report-budgets lets pass"
    assert (passed in result.stdout) == (code == 0)
    assert compiled(ours, theirs).exit_code == 1


def test_reported_budgets_let_no_spills_of_another_triton_pass(compiled):
    result = compiled({"vector_spills": 5}, {"vector_spills": 256}, "--report-budgets")
    assert result.exit_code == 1
    assert "spills 256 vector words, allowed 255 beside the 5 of Triton 3.6.0" in result.stdout


def test_a_trap_is_no_measure_of_spills(compiled):
    result = compiled({"instructions": 3}, {"vector_spills": 130, "instructions": 4143})
    sentence = "BROKEN scan on cuda:90 (Triton 3.6.0): is nothing but a trap of 3 instructions"
    assert sentence in result.stdout
    assert "spills 130 vector words" not in result.stdout


def test_parts_hold_every_kernel_once():
    everything = kernels(list(TARGETS))
    for count in (1, 2, 3, 17):
        parts = [Part(index + 1, count) for index in range(count)]
        held = [sum(part.holds(*kernel) for kernel in everything) for part in parts]
        assert all(sum(part.holds(*kernel) for part in parts) == 1 for kernel in everything)
        assert max(held) < 1.5 * len(everything) / count


def test_a_part_is_compiled_alone_and_said():
    compiled = []
    for part in ("1/2", "2/2"):
        result = run("--place", PLACE + "good", "--target", "90", "--part", part)
        assert result.exit_code == 0, result.output
        names = [line.split()[0] for line in result.stdout.splitlines() if "cuda:90" in line]
        assert f"part {part}: {len(names)} kernels" in result.stdout
        compiled += names
    assert sorted(compiled) == sorted(
        ["copy", "copy-unaligned", "product", "product-bias", "product-scale-off", "product-scaled"]
    )


def test_of_several_interpreters_one_that_fails_ends_the_others(tmp_path):
    """The first would compile for longer than this test may take."""
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    with pytest.raises(ValueError, match="cannot start /nowhere"):
        collect_each([str(slow), "/nowhere"], ["cuda:90"], places={"test": PLACE + "good"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "gfx906"), "target: expected one of ['cuda:80'"),
        (("--place", "nowhere"), "place: expected MODULE:FUNCTION"),
        (("--part", "0/4"), "part: expected I/N with 1 <= I <= N, got '0/4'"),
        (("--part", "5/4"), "part: expected I/N with 1 <= I <= N, got '5/4'"),
        (("--part", "1"), "part: expected I/N with 1 <= I <= N, got '1'"),
        (("--part", "-1/4"), "part: expected I/N with 1 <= I <= N, got '-1/4'"),
        (
            ("--list", "--target", "90", "--kernel", "norm-D128-silu-bf16", "--part", "1/999"),
            "fits 'norm-D128-silu-bf16' on cuda:90, in part 1/999",
        ),
        (("--place", "no.such.module:kernels"), "No module named 'no'"),
        (("--list", "--kernel", "x*", "--target", "90"), "kernel: nothing registered fits 'x*'"),
        (("--list", "--json", "list.json"), "json: --list compiles nothing"),
        (("--place", PLACE + "nothing"), "listed no kernels: AttributeError"),
        (
            ("--place", PLACE + "good", "--target", "90", "--kernel", "x*"),
            "kernel: nothing registered fits 'x*'",
        ),
        (("--place", PLACE + "good", "--triton-python", "/nowhere"), "cannot start /nowhere"),
        (
            ("--place", PLACE + "good", "--target", "90", "--kernel", "copy", "--diff", "nowhere"),
            "diff: 'nowhere' is no file, no git revision and no registered kernel",
        ),
        (("--place", PLACE + "good", "--json", "/nowhere/a.json"), "json: no folder"),
    ],
)
def test_mistakes_give_one_line(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["not json", '{"schema_version": 99}', "[]"])
def test_another_side_that_is_no_run_gives_one_line(tmp_path, text):
    file = tmp_path / "run.json"
    file.write_text(text)
    result = run("--place", PLACE + "good", "--target", "90", "--diff", str(file))
    assert result.exit_code == 2
    assert str(file) in result.stderr


def test_targets_go_by_their_short_names():
    assert resolve_targets(("120", "gfx942")) == ["cuda:120", "hip:gfx942"]
    assert resolve_targets(()) == list(TARGETS)


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
                                                               /* 0x000e620000000800 */
        /*0010*/              @!P0 STL.64 [R1+0x8], R2 ;       /* 0x00000a00ff017b82 */
        /*0020*/                   LDL.64 R2, [R1+0x8] ;       /* 0x00000a00ff017b82 */
        /*0030*/               @P1 LDG.E.U16 R3, [R2.64] ;     /* 0x00000a00ff017b82 */
        /*0040*/              @UP2 UTMALDG.2D [UR8], [UR6] ;   /* 0x00000a00ff017b82 */
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;  /* 0x0 */
        /*0060*/                   EXIT ;                      /* 0x00000a00ff017b82 */
        /*0070*/                   NOP;                        /* 0x00000a00ff017b82 */
"""


def test_sass_is_read_word_by_word():
    code = machine_code.sass(" REG:96 STACK:8 ", SASS, ".reqntid 128, 1, 1")
    assert (code.registers, code.vector_spills, code.threads) == (96, 2, 128)
    assert code.loads == {"LDG.16": 1, "TMA": 1}
    assert code.matrix == {"HGMMA.64x64x16.F32.BF16": 1}
    assert code.instructions == 7


AMD = """
kernel:
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	buffer_load_dwordx4 v0, s[0:3], 0 offen lds
	global_load_d16_b16 v1, v[2:3], off ; a comment
.LBB0_1:
	v_smfmac_f32_16x16x32_bf16 a[0:3], v[0:1], v[2:5], v6
	s_endpgm
  - .agpr_count:     16
    .max_flat_workgroup_size: 256
    .sgpr_spill_count: 3
    .vgpr_count:     112
    .vgpr_spill_count: 5
"""


def test_amd_assembly_is_read_word_by_word():
    code = machine_code.amdgcn(AMD)
    assert (code.registers, code.vector_spills, code.scalar_spills) == (112, 5, 3)
    assert code.threads == 256
    assert code.loads == {"buffer_load.lds.128": 1, "global_load.16": 1}
    assert list(code.matrix) == ["v_smfmac_f32_16x16x32_bf16"]
    assert code.instructions == 5


def test_code_without_metadata_is_refused():
    with pytest.raises(ValueError, match="registers not found"):
        machine_code.sass("", SASS, ".reqntid 128")


@pytest.mark.parametrize(
    ("target", "registers", "threads", "shared", "blocks"),
    [
        ("cuda:90", 128, 128, 0, 4),
        ("cuda:90", 32, 128, 0, 16),
        ("cuda:90", 64, 128, 110 * 1024, 2),
        ("cuda:89", 64, 128, 99 * 1024, 1),
        ("cuda:89", 32, 128, 0, 12),
        ("hip:gfx942", 112, 256, 0, 4),
        ("hip:gfx942", 376, 256, 0, 1),
        ("hip:gfx1151", 125, 128, 0, 10),
        ("hip:gfx1151", 64, 128, 32 * 1024, 4),
        ("hip:gfx1151", 256, 512, 16 * 1024, 1),
        ("hip:gfx1151", 64, 128, 64 * 1024, 2),
        ("hip:gfx1151", 64, 128, 64 * 1024 + 1, 0),
    ],
)
def test_resident_blocks_follow_from_the_scarcest_resource(
    target, registers, threads, shared, blocks
):
    sizes = {"registers": registers, "threads": threads, "shared": shared}
    assert resident_blocks(target, warp_size=TARGETS[target].warp_size, **sizes) == blocks


def test_a_failure_is_broken_whatever_the_budget():
    assert broken("cuda:90", {"error": "no"}) == ["does not compile: no"]
