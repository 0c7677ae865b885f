"""What a bundle is built for, and building it: alone, twice at once, and where a compile fails."""

import dataclasses
import multiprocessing
import os
import random
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("click")

from tests.implementations import KERNELS
from tests.runtime.bundled import rehearsed

import headstart
from headstart import checkpoints
from headstart.cli import main
from headstart.evidence import runs
from headstart.evidence.bundles.records import Built, Checked, FirstCall
from headstart.evidence.bundles.waiting import CALLS, case_of, first_call
from headstart.evidence.cases import profiles
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.profiles import PROCESSORS, calls, profile, reach
from headstart.ops.extend_attention.triton.config import configuration
from headstart.runtime import tables
from headstart.runtime.bundle import Bundle
from headstart.runtime.bundle_build import build
from headstart.runtime.bundle_programs import Known, Program, programs_of
from headstart.runtime.rehearsal import rehearsing
from headstart.runtime.static import TARGETS
from headstart.runtime.table_files import Device, Key, Row, Table

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")
MOST = 300


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_has_few_programs(target):
    found = reach(TARGETS[target])
    # A row that says anything but what the rule says costs programs of its own.
    assert 150 < len(found.programs) <= MOST
    # New keys in another dtype than cached ones cannot be reproducible.
    assert list(found.declined) == ["catalogue: fp8-cache"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
@pytest.mark.parametrize("model", ["qwen3-next-80b", "gpt-oss-20b", "tiny-qwen3-next"])
def test_no_length_leads_outside_a_profile(target, model):
    known, rng = reach(TARGETS[target], [model]).programs, random.Random(f"{target} {model}")
    seen: Known = {}
    for _ in range(50):
        case = rng.choice(profile(model))
        count = rng.choice([1, 1, 2, 3, 8, 24, 64])
        lengths, before = (
            tuple(rng.randrange(least, rng.choice([4, 64, 700, 9000])) for _ in range(count))
            for least in (1, 0)
        )
        if isinstance(case, AttentionCase):
            drawn = {"lengths": lengths, "prefixes": before if case.prefixes else ()}
        else:
            most = 16 if case.drafts else 9000
            drawn = {
                "lengths": tuple(min(length, most) for length in lengths),
                "starts": before if case.starts else (),
            }
        with rehearsing(TARGETS[target], PROCESSORS[target]) as rehearsal:
            for call in calls(dataclasses.replace(case, **drawn)):
                call()
        assert rehearsal.launches
        assert set(programs_of(rehearsal, seen)) <= set(known), (case.id, drawn)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tiny-qwen3-next", "float32"),
        ("tiny-qwen3-next", "bfloat16"),
        ("tiny-gpt-oss", "bfloat16"),  # its experts' products on meta tensors take no other
    ],
)
def test_what_a_model_calls_is_in_its_profile(name, dtype, monkeypatch):
    """The model itself, on tensors that stand for a device's: its own layers, caches and plans."""
    transformers = pytest.importorskip("transformers")
    from headstart.integrations.transformers import HybridCache, disable, enable

    target = TARGETS["cuda:90"]
    cases = [dataclasses.replace(case, dtype=dtype) for case in profile(name)]
    monkeypatch.setattr(profiles, "profile", lambda _: cases)
    kept = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints.path(name), dtype=kept)
    model = model.to("meta")

    def tokens(batch, length):
        return torch.empty(batch, length, dtype=torch.int64, device="meta")

    with torch.inference_mode(), rehearsing(target, PROCESSORS["cuda:90"]) as rehearsal:
        for reproducible in (False, True):
            enable(model, reproducible=reproducible)
            for batch in (1, 3):
                for cache in (
                    HybridCache(model, snapshot_every=64),
                    transformers.DynamicCache(config=model.config),
                ):
                    for length in (300, 1, 77, 64, 1):
                        model(tokens(batch, length), cache=cache)
            disable(model)
    launched = {launch.kernel.__name__ for launch in rehearsal.launches}
    assert launched >= {"extend_kernel", "unified_kernel", "write_kernel"}
    assert ("scan_kernel" in launched) == (name == "tiny-qwen3-next")
    assert set(programs_of(rehearsal)) <= set(reach(target, [name]).programs)


def test_states_kept_in_slots_are_in_the_profile():
    """As a server keeps what it wants to hit: a state for each prompt, at its last border."""
    target, heads = TARGETS["cuda:90"], {"H": 16, "HV": 32, "K": 128, "V": 128}
    channels = 2 * 16 * 128 + 32 * 128
    cache = headstart.DeltaCache(
        40, **heads, conv_channels=channels, conv_width=4, dtype=torch.bfloat16, device="meta"
    )

    def empty(*sizes, dtype=torch.bfloat16):
        return torch.empty(*sizes, dtype=dtype, device="meta")

    gate = headstart.Gate.raw(
        empty(32, dtype=torch.float32), empty(32, dtype=torch.float32), beta="logit"
    )
    with rehearsing(target, PROCESSORS["cuda:90"]) as rehearsal:
        for lengths in ([8192], [300, 77, 4000], [64] * 20, [100]):
            ends = [length // 64 * 64 for length in lengths]
            step = headstart.Schedule(
                lengths, snapshot_positions=[[end] for end in ends], device="meta"
            )
            count, tokens = len(lengths), sum(lengths)
            where = {"schedule": step, "state": cache.at(range(count))}
            kept = cache.at(range(20, 20 + count))
            mixed = headstart.causal_conv1d(
                empty(tokens, channels), empty(channels, 4), **where, snapshots=kept
            ).y
            q, k, v = mixed.split([16 * 128, 16 * 128, 32 * 128], dim=1)
            headstart.gated_delta_rule(
                q.view(-1, 16, 128), k.view(-1, 16, 128), v.view(-1, 32, 128), empty(tokens, 32),
                empty(tokens, 32), gate=gate, qk_l2norm=True, snapshots=kept, **where,
            )  # fmt: skip
    assert set(programs_of(rehearsal)) <= set(reach(target, ["qwen3-next-80b"]).programs)


def test_models_share_a_bundle_and_each_has_its_own():
    every = reach(TARGETS["cuda:90"], ["qwen3-next-80b", "gpt-oss-20b"])
    first, second = (
        reach(TARGETS["cuda:90"], [name]) for name in ("qwen3-next-80b", "gpt-oss-20b")
    )
    assert set(every.programs) == {*first.programs, *second.programs}
    assert {program.name for program in second.programs.values()} == {
        "extend_kernel", "unified_kernel", "clear_kernel", "join_kernel", "write_kernel",
    }  # fmt: skip
    assert every.asked[next(iter(second.programs))].startswith("gpt-oss-20b: ")


def test_a_bundle_is_built_for_the_rule_and_for_every_table(tmp_path, monkeypatch):
    """Keys whose rows say what the rule says lead to no further program."""
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    before = reach(TARGETS["cuda:90"], ["tiny-gpt-oss"]).programs
    key = Key("extend_attention", "extend", (64, 64), torch.float32, 4)
    rule = configuration(64, 64, torch.float32, windowed=False)
    for device, target, found in (
        ("a", "cuda:90", dataclasses.replace(rule, warps=8)),
        ("b", "cuda:90", rule),
        ("c", "cuda:100", dataclasses.replace(rule, warps=2)),
    ):
        rows = (Row(key, dataclasses.asdict(found), {}, None, "3.6.0", "2026-11-30"),)
        Table(tmp_path / f"{device}.json", Device(device, target), rows).write()
    after = reach(TARGETS["cuda:90"], ["tiny-gpt-oss"]).programs
    more = [program for name, program in after.items() if name not in before]
    assert before.keys() < after.keys()
    assert {program.options.num_warps for program in more} == {8}
    assert {program.name for program in more} == {"extend_kernel"}
    mine = reach(TARGETS["cuda:90"], ["tiny-gpt-oss"], tables=[{key: rows[0].configuration}])
    assert before.keys() - mine.programs.keys()


def test_a_profile_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=r"models: expected some of .*, got 'gpt'"):
        reach(TARGETS["cuda:90"], ["gpt"])


def test_what_is_there_is_left(tmp_path):
    bundle, programs = Bundle(tmp_path), list(rehearsed().values())
    seen = []
    (built,) = build(bundle, programs, 1, lambda *told: seen.append(told))
    assert (built.program, built.error) == (programs[0], "")
    assert seen == [(1, 1, "norm_kernel")]
    assert build(bundle, programs, 1) == []


def _exits_well(bundle, programs):
    sys.exit(any(built.error for built in build(bundle, programs, 1)))


def test_two_builders_may_share_a_directory(tmp_path):
    programs = [*rehearsed().values(), *rehearsed(channels=96).values()]
    bundle = Bundle(tmp_path)
    start = multiprocessing.get_context("fork").Process
    builders = [start(target=_exits_well, args=(bundle, programs)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [builder.exitcode for builder in builders] == [0, 0]
    keys = {bundle.find(program).fields["key"] for program in programs}
    assert keys == {program.key for program in programs}
    assert len([*bundle.path.glob("cuda-90/*"), *bundle.path.glob("cuda-90/.*")]) == 2


class Broken(Program):
    def compile(self):
        raise RuntimeError("too many registers")


class Deadly(Program):
    def compile(self):
        os._exit(9)


class Loud(Program):
    def compile(self):
        os.write(1, b"module {")
        os.write(2, b"pipeline: ")
        raise RuntimeError("PassManager::run failed")


class Slow(Program):
    def compile(self):
        Path(os.environ["SLOW"]).write_text(str(os.getpid()))
        time.sleep(60)


class Grouped(Program):
    def compile(self):
        raise RuntimeError(f"group {os.getpgid(0)}")


def kind_of(kind, program):
    return kind(*(getattr(program, field.name) for field in dataclasses.fields(program)))


def test_a_program_that_does_not_compile_is_told_and_the_others_are_kept(tmp_path):
    (good,), (other,) = rehearsed().values(), rehearsed(channels=96).values()
    broken = kind_of(Broken, other)
    found = {built.program: built.error for built in build(Bundle(tmp_path), [broken, good], 1)}
    assert found == {broken: "RuntimeError: too many registers", good: ""}
    assert Bundle(tmp_path).find(good) is not None
    assert Bundle(tmp_path).find(other) is None


def test_a_compiler_that_takes_its_process_down_is_an_error(tmp_path):
    deadly = kind_of(Deadly, *rehearsed().values())
    with pytest.raises(ValueError, match="took its process down, in one of norm_kernel"):
        build(Bundle(tmp_path), [deadly], 1)


def test_what_triton_writes_about_a_failure_is_not_shown(tmp_path, capfd):
    (built,) = build(Bundle(tmp_path), [kind_of(Loud, *rehearsed().values())], 1)
    assert built.error == "RuntimeError: PassManager::run failed"
    assert capfd.readouterr() == ("", "")


def test_compilers_end_with_who_started_them(tmp_path, monkeypatch):
    told = tmp_path / "pid"
    monkeypatch.setenv("SLOW", str(told))
    slow = kind_of(Slow, *rehearsed().values())
    start = multiprocessing.get_context("fork").Process
    builder = start(target=_exits_well, args=(Bundle(tmp_path / "made"), [slow]))
    builder.start()
    while not (told.exists() and told.read_text()):
        time.sleep(0.05)
    worker = int(told.read_text())
    builder.kill()
    builder.join()
    until = time.monotonic() + 20
    while time.monotonic() < until and Path(f"/proc/{worker}/cmdline").exists():
        if not Path(f"/proc/{worker}/cmdline").read_bytes():  # ended, and not yet fetched
            break
        time.sleep(0.05)
    assert time.monotonic() < until


def test_an_interrupt_at_a_terminal_is_not_the_compilers(tmp_path):
    programs = [kind_of(Grouped, *rehearsed(channels=size).values()) for size in (64, 96)]
    groups = {built.error.split()[-1] for built in build(Bundle(tmp_path), programs, 2)}
    assert groups
    assert str(os.getpgid(0)) not in groups


@pytest.fixture
def one_case(monkeypatch):
    """A profile of one call, two small kernels in all: the command line's whole world."""
    case = AttentionCase(id="tiny", HQ=1, HK=1, D=16, lengths=(3,), dtype="float16", why="small")
    monkeypatch.setattr(profiles, "PROFILES", {"one": lambda: iter([case])})
    profile.cache_clear()
    yield
    profile.cache_clear()


def command(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bundle", *map(str, arguments)])
    return ended.value.code


def test_the_command_builds_checks_and_lists(one_case, tmp_path, capsys):
    here = tmp_path / "built"
    kept = tmp_path / "kept.json"
    assert command("build", "--target", "90", "--jobs", 1, "-o", here, "--json", kept) == 0
    (built,) = runs.load(kept, Built, "bundle").results
    assert (built.programs, built.compiled, built.before, built.failed) == (2, 2, 0, ())
    assert built.seconds > built.compiling / 2 > 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["cuda:90", "2", "0", "2"]
    assert command("check", here) == 0
    assert "100.0 %" in capsys.readouterr().out
    assert command("list", here) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["extend_kernel", "cuda:90"], ["unified_kernel", "cuda:90"],
    ]  # fmt: skip
    (folder,) = here.glob("cuda-90/extend_kernel-*")
    # What no call launches is counted, and named where it is damaged.
    old = shutil.copytree(folder, folder.with_name("extend_kernel-" + "0" * 32))
    (old / "artefact.json").write_text("{")
    (old.parent / "a-file").touch()
    assert command("check", here) == 1
    assert f"{old / 'artefact.json'} is damaged" in capsys.readouterr().out
    shutil.rmtree(old)
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    assert command("check", here) == 1
    told = capsys.readouterr().out
    assert "50.0 %" in told
    assert "missing for cuda:90: extend_kernel, key" in told
    assert "one: tiny" in told
    moved.rename(folder)
    (folder / "program.cubin").write_bytes(b"")
    assert command("check", here) == 1
    assert "is damaged: program: expected" in capsys.readouterr().out
    host = (here / "host").rename(tmp_path / "host")
    assert command("check", here, "--json", kept) == 1
    (checked,) = runs.load(kept, Checked, "bundle").results
    assert (checked.reachable, checked.held, len(checked.said)) == (2, 0, 2)
    told = capsys.readouterr().out
    assert " 0.0 %" in told
    assert "missing for cuda:90: what any Python launches with: unified_kernel, key" in told
    host.rename(here / "host")
    assert command("build", "--target", "90", "-o", here) == 2
    assert f"{folder / 'program.cubin'} is damaged" in capsys.readouterr().err


def test_the_command_tells_what_does_not_compile(one_case, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Program, "compile", Broken.compile)
    assert command("build", "--target", "90", "--jobs", 1, "-o", tmp_path) == 1
    _, counts, *told = capsys.readouterr().out.splitlines()
    assert counts.split()[:4] == ["cuda:90", "2", "0", "0"]
    assert sorted(told) == [
        f"FAILS for cuda:90: {name}_kernel, one: tiny: RuntimeError: too many registers"
        for name in ("extend", "unified")
    ]


@pytest.mark.parametrize("name", CALLS)
def test_first_calls_are_in_the_profiles(name):
    wanted = CALLS[name]
    assert case_of(name) in profile(wanted.model)


@pytest.mark.slow
def test_a_first_call_is_made_in_a_process_of_its_own(tmp_path, capsys):
    """On a CPU, where nothing is loaded."""
    kept = tmp_path / "kept.json"
    words = ("first", tmp_path, "--call", "tiny-attention", "--device", "cpu", "--json", kept)
    ended = command(*words)
    (found,) = runs.load(kept, FirstCall, "bundle").results
    assert ended == (0 if found.first <= 0.3 else 1)
    assert (found.call, found.loaded, found.compiled, found.failed) == ("tiny-attention", 0, 0, "")
    assert min(found.torch, found.package, found.first, found.second) > 0
    assert capsys.readouterr().out.splitlines()[1].startswith("tiny-attention")
    lost = first_call("tiny-attention", tmp_path, "cuda:9")
    assert "Torch" in lost.failed or "CUDA" in lost.failed
    assert not lost.good


def test_mistakes_at_the_command_line_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiles, "reach", None)  # all are found before anything is done
    new = tmp_path / "new"
    for arguments, said in (
        (("check", tmp_path / "none"), "none is no directory"),
        (("check", tmp_path), "holds nothing"),
        (("list", tmp_path / "none"), "none is no directory"),
        (("first", tmp_path / "none", "--device", "cpu"), "none is no directory"),
        (("first", tmp_path, "--call", "x"), "call: expected one of ['attention-window', "),
        (("check", tmp_path, "--json", tmp_path), "json: expected a file to write"),
        (("build", "--target", "cuda:91", "-o", tmp_path), "target: expected one of"),
        (("build", "--target", "90", "--models", "x", "-o", tmp_path), "models: expected some of"),
        (
            ("build", "--target", "90", "-o", __file__),
            f"bundle: expected a directory, got the file {__file__}",
        ),
        (
            ("build", "--target", "90", "-o", Path(__file__) / "bundle"),
            f"bundle: cannot make {__file__}/bundle: Not a directory",
        ),
        (("build", "--target", "90", "-o", ""), "output: expected a directory, got ''"),
        (("build", "--target", "90", "-o", new, "--json", new), "new is read by this command"),
        (("build", "--target", "90", "-o", new / "sub", "--json", new), "new is read by"),
    ):
        assert command(*arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
