"""`headstart bench`: arms that are right are timed, all others are reported."""

import re
import shlex
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import headstart as package
from headstart.cli.commands import headstart
from headstart.evidence import arms, benching, cases
from headstart.evidence.arms.copies import loaded_copy, renamed
from headstart.evidence.arms.sources import NOISE, SOURCE, Sources
from headstart.evidence.bench_jobs import Job, Lost, _Worker, run_jobs
from headstart.evidence.benching import CaseResult, Prepared, bench_case
from headstart.evidence.checking import check, load_truths
from headstart.evidence.runs import load
from headstart.evidence.timing import Ceilings, measure_ceilings

CPU = torch.device("cpu")
TINY = "gdn-1x1-small"


def run(*arguments):
    return CliRunner().invoke(headstart, ["bench", *arguments], prog_name="headstart")


def by_arm(result):
    return {arm.arm: arm for arm in result.arms}


def bench(case, *names, **options):
    with Sources(names) as sources:
        return bench_case(
            cases.get(case) if isinstance(case, str) else case,
            names,
            sources,
            device=CPU,
            rounds=options.pop("rounds", 4),
            ceilings=Ceilings(copy_rate=1e9, matmul_rate=1e10),
            **options,
        )


@pytest.fixture
def peer(monkeypatch):
    """Puts a made-up module in the place of a peer's."""

    def install(name, **attributes):
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    return install


def recurrence(q, k, v, g, beta, initial_state=None, output_final_state=False, **more):
    """What fla's function computes, by headstart's reference."""
    found = package.gated_delta_rule(
        *(row.flatten(0, 1) for row in (q, k, v, g, beta)),
        schedule=[q.shape[1]] * q.shape[0],
        state=initial_state,
        return_state=True,
        implementation="reference",
    )
    return found.o.view(v.shape), found.state


def test_arms_are_checked_timed_and_compared():
    found = bench("gdn-1x128-small", "torch", "reference", "transformers", rounds=6)
    assert [arm.arm for arm in found.arms] == ["torch", NOISE, "reference", "transformers"]
    for arm in found.arms:
        assert arm.status == "timed", arm.sentence
        assert len(arm.device_ms) == 6
        assert min(arm.device_ms) > 0
        assert {one.output for one in arm.accuracy} == {"o", "state"}
        assert all(one.last_half <= one.allowed for one in arm.accuracy)
        assert arm.floor_share == pytest.approx(found.floor_ms / arm.median_ms)
    base, again, slow, _ = found.arms
    assert base.ratio is None
    assert again.note == "torch, separately loaded and compiled"
    assert (again.served, slow.served) == ("torch", "reference")
    # 128 single steps against two chunks.
    assert slow.ratio.low > 1
    case = cases.get("gdn-1x128-small")
    assert (found.floor_bytes, found.floor_operations) == case.floor()
    assert found.floor_ms == pytest.approx(
        1000 * max(found.floor_bytes / 1e9, found.floor_operations / 1e10)
    )


def test_a_wrong_arm_is_reported_and_not_timed(peer):
    def wrong(*args, **options):
        o, state = recurrence(*args, **options)
        return 0.9 * o, state

    peer("fla.ops.gated_delta_rule", chunk_gated_delta_rule=wrong)
    found = by_arm(bench("gdn-1x128-small", "torch", "fla"))
    assert found["fla"].status == "wrong"
    assert "o: relative 0.1" in found["fla"].sentence
    assert found["fla"].device_ms == ()
    assert found["fla"].ratio is None
    assert found["torch"].status == "timed"


def test_a_peer_may_round_more_than_headstart_and_is_told(peer):
    def rounded(*args, **options):
        o, state = recurrence(*args, **options)
        return 0.985 * o, state

    peer("fla.ops.gated_delta_rule", chunk_gated_delta_rule=rounded)
    found = by_arm(bench("gdn-1x128-small", "torch", "fla"))["fla"]
    assert found.status == "timed", found.sentence
    o, state = found.accuracy
    assert (o.failures, state.beyond_ours) == ((), ())
    assert any(words.startswith("o: relative 0.015 > 0.00859") for words in o.beyond_ours)
    assert "o: relative 0.015 > 0.00859" in found.note


def test_no_tolerance_excuses_a_nan_of_a_peer(peer):
    def spoiled(*args, **options):
        o, state = recurrence(*args, **options)
        o[0, 3, 0, 0] = torch.nan
        return o, state

    peer("fla.ops.gated_delta_rule", chunk_gated_delta_rule=spoiled)
    found = by_arm(bench("gdn-1x128-small", "torch", "fla"))["fla"]
    assert found.status == "wrong"
    assert "o: NaN 1" in found.sentence


def test_what_headstart_serves_is_allowed_no_more_than_is_asked_of_it():
    case = cases.get("gdn-1x128-small")
    truths = load_truths(case, 0, torch.device("cpu"), None)

    def judged(served):
        arm = arms.build("reference", case, "cpu")
        outputs = {name: 0.985 * x for name, x in arm.outputs(arm.call()).items()}
        arm.served = served
        return [bool(one.failures) for one in check(arm, case, outputs, truths)]

    assert judged("triton") == [True, True]
    assert judged("") == [False, False]


def test_a_right_peer_is_timed_on_its_own_layout(peer):
    peer("fla.ops.gated_delta_rule", chunk_gated_delta_rule=recurrence)
    found = by_arm(bench("gdn-1x128-small", "torch", "fla"))
    assert found["fla"].status == "timed", found["fla"].sentence
    assert {one.output for one in found["fla"].accuracy} == {"o", "state"}


def test_flashinfer_gets_decay_itself_and_value_major_states(peer):
    seen = {}

    def rule(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, output,
             output_state, max_seqlen):  # fmt: skip
        seen.update(g=g, state=initial_state, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        o, state = recurrence(
            q[None], k[None], v[None], g.log()[None], beta[None],
            initial_state.transpose(-1, -2).contiguous(),
        )  # fmt: skip
        output.copy_(o[0])
        output_state.copy_(state.transpose(-1, -2))
        return output, output_state

    peer("flashinfer.gdn_prefill", chunk_gated_delta_rule=rule)
    found = by_arm(bench("gdn-1x128-small", "torch", "flashinfer"))
    assert found["flashinfer"].status == "timed", found["flashinfer"].sentence
    assert 0 <= seen["g"].min() <= seen["g"].max() <= 1
    assert seen["max_seqlen"] == 128
    assert seen["cu_seqlens"].tolist() == [0, 128]
    assert seen["state"].is_contiguous()


def test_an_arm_that_raises_is_a_result(peer):
    def raises(*args, **options):
        raise RuntimeError("no kernel image")

    peer("fla.ops.gated_delta_rule", chunk_gated_delta_rule=raises)
    found = by_arm(bench("gdn-1x128-small", "torch", "fla"))
    assert found["fla"].status == "failed"
    assert "no kernel image" in found["fla"].sentence


def test_an_arm_that_breaks_on_a_later_call_is_a_result(peer):
    calls = []

    def breaks(*args, **options):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("workspace is gone")
        return recurrence(*args, **options)

    peer("fla.ops.gated_delta_rule", chunk_gated_delta_rule=breaks)
    found = by_arm(bench("gdn-1x128-small", "torch", "fla"))
    assert (found["fla"].status, found["torch"].status) == ("failed", "timed")
    assert "workspace is gone" in found["fla"].sentence
    assert found["fla"].device_ms == ()


def test_a_lost_device_ends_the_run_with_one_line(peer, monkeypatch, tmp_path):
    lost = []

    def wild(*args, **options):
        lost.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def synchronize(device):
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(benching, "synchronize", synchronize)
    peer("fla.ops.gated_delta_rule", chunk_gated_delta_rule=wild)
    file = tmp_path / "bench.json"
    result = run(
        "oss-512-on-512-win-small", "gdn-1x128-small", TINY, "--arms", "torch,fla", "--rounds", "3",
        "--device", "cpu", "--json", str(file),
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    assert result.stderr == (
        "headstart: gdn-1x128-small: cpu was lost while checking fla: RuntimeError: CUDA error: "
        f"an illegal memory access was encountered; not run: {TINY}\n"
    )
    # What was found before is kept.
    assert [one.case for one in load(file, CaseResult, kind="bench").results] == [
        "oss-512-on-512-win-small"
    ]


def test_missing_and_unfit_peers_say_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    found = by_arm(bench("gdn-1x128-small", "torch", "flashqla", "fa4"))
    assert (found["flashqla"].status, found["fa4"].status) == ("missing", "declined")
    assert "flash_qla" in found["flashqla"].sentence
    assert "softmax attention" in found["fa4"].sentence


def test_peers_load_only_for_their_arm():
    code = (
        "import sys; from headstart.evidence import arms, benching, cases; "
        "arms.build('torch', cases.get('gdn-1x1-small'), 'cpu'); "
        "print(sorted(set(sys.modules) & {'transformers', 'fla', 'flashinfer', 'sglang'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("id", ["gdn-residual-512-small", "gdn-decode-64-small", "gdn-pool-small"])
def test_calls_that_change_memory_start_from_the_same_memory(id):
    arm = arms.build("torch", cases.get(id), CPU)
    first = {name: values.clone() for name, values in arm.outputs(arm.call()).items()}
    arm.restore()
    again = arm.outputs(arm.call())
    assert {"o", "state"} <= set(first)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_plain_peer_starts_where_a_cached_tail_ends(peer):
    peer("fla.ops.gated_delta_rule", fused_recurrent_gated_delta_rule=recurrence)
    case = cases.get("gdn-decode-64-small")
    found = by_arm(bench(case, "torch", "fla", rounds=3, noise_floor=False))
    assert found["fla"].status == "timed", found["fla"].sentence
    assert "plain states" in found["fla"].note


@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_an_arm_without_sinks_runs_the_sibling(name):
    case = _sinks_without_prefix()
    found = by_arm(bench(case, "torch", name, rounds=3, noise_floor=False))
    assert found[name].status == "timed", found[name].sentence
    assert found[name].note.startswith("the case without sinks")


def _sinks_without_prefix():
    return next(
        case
        for case in cases.catalogue("extend_attention")
        if case.sinks and not any(case.cached) and case.window is None
        and case.id.endswith("-small") and len(set(case.lengths)) == 1 and case.lengths[0] > 64
    )  # fmt: skip


def test_an_empty_batch_is_a_case_like_others():
    found = by_arm(bench("edge-1-small", "torch", "flex", rounds=3, noise_floor=False))
    assert found["torch"].status == "timed", found["torch"].sentence
    assert found["torch"].accuracy[0].last_half == 0
    assert (found["flex"].status, found["flex"].sentence) == ("declined", "takes no empty batch")


def test_an_arm_runs_another_case_beside_this_one():
    other = "oss-512-on-512-win-small"
    found = by_arm(bench("oss-512-on-8k-win-small", "torch", f"torch@{other}", f"sdpa@{TINY}"))
    there = found[f"torch@{other}"]
    assert (there.status, there.note) == ("timed", f"on {other}"), there.sentence
    floor = Ceilings(copy_rate=1e9, matmul_rate=1e10).floor(*cases.get(other).floor())
    assert there.floor_share == pytest.approx(floor / there.median_ms)
    assert "not gated_delta_rule" in found[f"sdpa@{TINY}"].sentence


def test_a_layer_is_checked_by_heads_however_few():
    found = by_arm(bench("block-residual-512-small", "torch", rounds=3, groups=1))
    assert found["torch"].status == "timed", found["torch"].sentence
    assert [(one.output, one.heads) for one in found["torch"].accuracy] == [("norm", 2)]


def test_a_convolution_is_a_case_like_others():
    found = by_arm(bench("conv-next-18778-small", "torch", "reference", "fla", "reproducible",
                         rounds=3))  # fmt: skip
    for name in ("torch", NOISE, "reference"):
        assert found[name].status == "timed", found[name].sentence
        assert [(one.output, one.heads) for one in found[name].accuracy] == [("convolution", 8)]
    assert found["fla"].sentence == "computes the gated delta rule, not causal_conv1d"
    assert found["reproducible"].status == "declined"


def test_reproducible_rows_are_an_arm():
    found = by_arm(bench("oss-512-on-512-win-small", "reproducible", "torch", noise_floor=False))
    assert (found["reproducible"].status, found["reproducible"].served) == ("timed", "torch")
    # Keys are reduced in blocks that do not follow the batch: other bits, as right.
    wrong = by_arm(bench("block-residual-512-small", "torch", "reproducible", rounds=3))
    assert wrong["reproducible"].status == "declined"


def test_ids_of_flashinfer_bench_are_accepted():
    assert cases.get("gdn_prefill_qk8_v16_d128_k_last").id == "gdn-qk8-v16-8k"


def test_a_copy_shares_nothing_with_the_original():
    with loaded_copy(SOURCE, "headstart_of_a_test") as name:
        copied = __import__(name)
        assert copied.gated_delta_rule is not package.gated_delta_rule
        q = torch.ones(4, 1, 16)
        found = copied.gated_delta_rule(q, q, q, None, None)
        assert type(found).__module__.startswith(name)
        loaded = {module for module in sys.modules if module.startswith(name)}
        assert f"{name}.ops.gated_delta_rule.decomposed" in loaded
        for op in ("causal_conv1d", "gated_delta_rule", "extend_attention"):
            own = getattr(getattr(torch.ops, name), op)
            assert own is not getattr(torch.ops.headstart, op)
    assert not any(module.startswith("headstart_of_a_test") for module in sys.modules)


def test_a_package_can_be_copied_again_in_one_process():
    found = []
    for _ in range(2):
        with loaded_copy(SOURCE, "headstart_of_a_test") as name:
            found.append(__import__(name).causal_conv1d(torch.ones(2, 1), torch.ones(1, 2)).y)
    assert torch.equal(*found)


def test_renaming_touches_imports_and_places_only():
    text = '"headstart" \nfrom headstart.a import b\n"headstart.ops:x"\nHEADSTART_CHECK headstarter'
    assert renamed(text, "two") == (
        '"headstart" \nfrom two.a import b\n"two.ops:x"\nHEADSTART_CHECK headstarter'
    )


def test_ceilings_are_rates_of_this_machine():
    found = measure_ceilings(CPU, torch.float32)
    assert 1e8 < found.copy_rate < 1e13
    assert 1e8 < found.matmul_rate < 1e14
    assert found.floor(int(found.copy_rate), 0) == pytest.approx(1000, rel=1e-6)
    assert found.floor(0, int(found.matmul_rate)) == pytest.approx(1000, rel=1e-6)


def test_command_prints_and_writes_a_run(tmp_path):
    file = tmp_path / "bench.json"
    result = run(
        TINY, "--arms", "torch,fa4", "--rounds", "3", "--device", "cpu", "--json", str(file)
    )
    assert result.exit_code == 0, result.output
    assert f"{TINY} on cpu, bfloat16, 1 tokens, 3 rounds" in result.stdout
    assert "noise floor (torch)" in result.stdout
    written = load(file, CaseResult, kind="bench")
    assert [arm.status for arm in written.results[0].arms] == ["timed", "timed", "declined"]
    assert written.options["arms"] == "torch,fa4"


def test_cases_are_prepared_side_by_side(tmp_path):
    file = tmp_path / "bench.json"
    result = run(
        TINY, "gdn-1x128-small", "oss-512-on-512-win-small", "--arms", "torch,reference",
        "--rounds", "3", "--device", "cpu", "--jobs", "2", "--json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = load(file, CaseResult, kind="bench").results
    assert [one.case for one in written] == [TINY, "gdn-1x128-small", "oss-512-on-512-win-small"]
    for one in written:
        assert [arm.arm for arm in one.arms] == ["torch", NOISE, "reference"]
        assert {arm.status for arm in one.arms} == {"timed"}
        assert [len(arm.device_ms) for arm in one.arms] == [3, 3, 3]


@pytest.mark.parametrize("ended", ["when it has answered", "while it prepares"])
def test_a_worker_leaves_nothing_behind(ended, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = Job(
        case=TINY, arms=("reference",), device="cpu", seed=0, rounds=3, clock="auto", groups=1,
        noise_floor=True,
    )  # fmt: skip
    if ended == "when it has answered":
        ((_, result),) = run_jobs([job], 2, 300)
        assert isinstance(result, CaseResult)
    else:
        with ThreadPoolExecutor(2) as pool, _Worker(job, 1, pool):
            while not list(tmp_path.glob("headstart-*")):
                time.sleep(0.01)
    assert not list(tmp_path.glob("headstart-*"))


def test_a_case_may_name_its_own_arms(tmp_path):
    file = tmp_path / "bench.json"
    result = run(
        TINY, f"gdn-1x128-small=torch,torch@{TINY}", "--arms", "reference", "--rounds", "3",
        "--device", "cpu", "--no-noise-floor", "--json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = load(file, CaseResult, kind="bench").results
    assert [[arm.arm for arm in one.arms] for one in written] == [
        ["reference"], ["torch", f"torch@{TINY}"],
    ]  # fmt: skip


def test_a_case_that_is_late_costs_itself(tmp_path):
    file = tmp_path / "bench.json"
    result = run(
        "gdn-1m", TINY, "--arms", "torch", "--rounds", "3", "--device", "cpu", "--jobs", "2",
        "--limit", "30", "--json", str(file),
    )  # fmt: skip
    assert result.exit_code == 1
    # Either its arms give up in time or it is ended, as the machine has it.
    assert "was not prepared" in result.stderr + result.stdout
    found = load(file, CaseResult, kind="bench").results
    timed = [one.case for one in found if any(arm.status == "timed" for arm in one.arms)]
    assert timed == [TINY]


def test_a_worker_that_never_gets_ready_is_told_by_what_it_is_at():
    job = Job(
        case=TINY, arms=("torch",), device="cpu", seed=0, rounds=3, clock="auto", groups=1,
        noise_floor=False,
    )  # fmt: skip
    ((_, lost),) = run_jobs([job], 2, 0.2)
    assert str(lost) == "was not prepared within 0.2 s: starting"


def test_an_arm_that_is_late_costs_itself(peer):
    def slow(*args, **options):
        time.sleep(60)

    peer("fla.ops.gated_delta_rule", chunk_gated_delta_rule=slow)
    peer("flash_qla", chunk_gated_delta_rule=recurrence)
    names = ("fla", "torch", "flashqla")
    case = cases.get("gdn-1x128-small")
    began = time.time()
    with Sources(names) as sources:
        prepared = Prepared(case, names, sources, device=CPU, noise_floor=False, until=began + 10)
        assert time.time() - began < 20
        found = by_arm(prepared.time(3, ceilings=Ceilings(copy_rate=1e9, matmul_rate=1e10)))
    # Ours come first, whatever the order asked for, and late is who comes after the late one too.
    assert found["torch"].status == "timed", found["torch"].sentence
    for name, doing in (("fla", "checking"), ("flashqla", "nothing more")):
        words = f"was not prepared in time, at {doing}"
        assert (found[name].status, found[name].sentence) == ("failed", words)


def test_a_worker_that_ends_says_why():
    job = Job(
        case=TINY, arms=("torch",), device="nowhere", seed=0, rounds=3, clock="auto", groups=1,
        noise_floor=False,
    )  # fmt: skip
    ((_, lost),) = run_jobs([job], 2, 60)
    assert isinstance(lost, Lost)
    assert "nowhere" in str(lost)


def test_command_exits_with_1_for_a_wrong_arm(peer):
    peer("fla.ops.gated_delta_rule", chunk_gated_delta_rule=lambda **o: (o["v"], None))
    result = run("gdn-1x128-small", "--arms", "torch,fla", "--rounds", "3", "--device", "cpu")
    assert result.exit_code == 1
    assert "wrong" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((TINY, "--arms", "torch,nobody"), "arm: expected one of ['headstart', 'hopper'"),
        (("gdn-nxt-8k",), "case: no case is called 'gdn-nxt-8k'; near: gdn-next-8k"),
        (("gpt-oss-20b",), "case: gpt-oss-20b is a whole model"),
        ((TINY, "--arms", "torch,torch"), "arms: expected one or more, each once"),
        ((TINY, "--arms", "torch@gdn-nxt-8k"), "case: no case is called 'gdn-nxt-8k'"),
        ((TINY, "--arms", "HEAD:nobody"), "arm: expected one of ['headstart', 'hopper'"),
        ((f"{TINY}=", "--arms", "torch"), "arms: expected one or more, each once, got ''"),
        ((TINY, "--check", "none"), "check: expected a positive number or all"),
        ((TINY, "--device", "nowhere"), "device: nowhere"),
        ((TINY, "--clock", "graph", "--device", "cpu"), "clock: graph needs a GPU"),
        ((TINY, "--json", "/nowhere/a.json"), "json: no folder"),
        (("stages", TINY, "--arms", "nobody"), "arm: expected one of"),
        (("stages", TINY, "--arms", ","), "arms: expected one or more, each once, got ','"),
        (("stages", TINY, "--arms", "torch,torch"), "arms: expected one or more, each once"),
        (("stages", TINY, "--against", "fla"), "against: expected one of the arms ['headstart']"),
        (("stages", "gdn-nxt"), "case: no case is called"),
    ],
)
def test_mistakes_give_one_line(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_commands_of_the_document_are_commands():
    document = (Path(__file__).parents[2] / "docs/bench.md").read_text()
    lines = re.findall(r"^\$ headstart (.*)$", document, re.M)
    assert len(lines) >= 6
    for line in lines:
        # Options are parsed before help is shown.
        result = CliRunner().invoke(headstart, [*shlex.split(line), "--help"])
        assert result.exit_code == 0, f"{line}: {result.output}"


def test_a_promise_that_is_not_kept_exits_with_1_and_says_how():
    result = run("simulate", "--experiments", "10", "--rounds", "3")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("headstart: the interval that bench reports: percentile holds 1 in ")
    assert "expected 92% to 98%; 3.0% found in " in line


def test_simulate_prints_coverage_and_width():
    result = run("simulate", "--experiments", "40", "--rounds", "20")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[:3] for row in rows[1:]] == [["percentile", "40", "20"], ["corrected", "40", "20"]]
