"""`headstart bench host`: what it times, on a clock whose truth is known, and what it tells."""

import gc
import sys
import types
from datetime import timedelta

import pytest
import torch
from click.testing import CliRunner
from tests.evidence import report_runs as made

from headstart.cli.commands import headstart
from headstart.evidence import cases, host, report, timing
from headstart.evidence.arms import Arm, MissingPeer
from headstart.evidence.benching import DeviceLost
from headstart.evidence.host import CALLS, HostResult, Spread, host_of_case, launches
from headstart.evidence.runs import load

TINY = "gdn-1x1-small"
QUEUED = torch.device("meta")
"""Stands for a device that works while the host goes on; the time below is its clock's."""


def run(*arguments):
    return CliRunner().invoke(headstart, ["bench", "host", *arguments], prog_name="headstart")


class Time:
    """A host and a device in microseconds: a call keeps the first 20, or 35 after other work, and
    then the second 70; restoring takes 1,000, other work 5,000."""

    def __init__(self):
        self.now, self.done, self.after_other = 0, 0, False
        self.calls, self.restored = 0, 0
        self.collected = []

    def perf_counter(self):
        return self.now / 1e6

    def synchronize(self, device):
        self.now = max(self.now, self.done)

    def other_work(self):
        self.now += 5000
        self.after_other = True

    def call(self):
        self.now += 35 if self.after_other else 20
        self.after_other = False
        self.done = max(self.done, self.now) + 70
        self.calls += 1
        self.collected.append(gc.isenabled())

    def restore(self):
        self.now += 1000
        self.restored += 1


class Made:
    """In place of `Sources`: arms by name, as they stand."""

    def __init__(self, **arms):
        self._arms = arms

    def build(self, name, case, device, seed):
        if name not in self._arms:
            raise MissingPeer(f"{name} is not here")
        return Arm(name, self._arms[name], dict, note="as made")


@pytest.fixture
def clock(monkeypatch):
    time = Time()
    for module in (host, timing):
        monkeypatch.setattr(module, "time", time)
        monkeypatch.setattr(module, "synchronize", time.synchronize)
    monkeypatch.setattr(host, "OtherWork", lambda: time.other_work)
    return time


def measured(*names, by, device=QUEUED, rounds=4):
    return host_of_case(cases.get(TINY), names, by, device=device, rounds=rounds)


def test_each_time_is_what_the_clock_knows(clock):
    class Restored(Made):
        def build(self, *arguments):
            arm = super().build(*arguments)
            arm.restore = clock.restore
            return arm

    (found,) = measured("headstart", by=Restored(headstart=clock.call))
    assert (found.status, found.sentence, found.note) == ("measured", "", "as made")
    expected = {"in_row": 20, "idle_host": 20, "idle_wall": 90, "cold_host": 35, "cold_wall": 105}
    for name, microseconds in expected.items():
        spread = getattr(found, name)
        assert (spread.low, spread.median, spread.high) == pytest.approx((microseconds,) * 3), name
    # Warming up, single calls, and the one whose launches are counted; a row restores nothing.
    alone = timing.WARM_UPS + 2 * 4 + 1
    assert (clock.calls, clock.restored) == (4 * CALLS + alone, alone)
    assert found.cells == ("headstart", "-", "20.0", "20.0", "90.0", "35.0", "105.0")


def test_a_row_on_a_cpu_is_of_single_calls(clock):
    (found,) = measured("headstart", by=Made(headstart=clock.call), device=torch.device("cpu"))
    assert found.in_row.median == pytest.approx(20)


def test_nothing_is_collected_while_it_is_timed(clock):
    assert gc.isenabled()
    measured("headstart", by=Made(headstart=clock.call))
    assert clock.collected == [
        *[True] * timing.WARM_UPS, *[False] * (4 * CALLS + 2 * 4), True,
    ]  # fmt: skip
    assert gc.isenabled()


def test_what_does_not_run_says_why_and_the_rest_goes_on(clock):
    def late():
        clock.call()
        if clock.calls > timing.WARM_UPS:
            raise RuntimeError("no such luck")

    missing, failed, good = measured("fla", "torch", "hopper", by=Made(torch=late, hopper=dict))
    assert (missing.status, missing.sentence) == ("missing", "fla is not here")
    assert (failed.status, failed.sentence) == ("failed", "RuntimeError: no such luck")
    assert missing.cells == ("fla", *"------")
    assert good.status == "measured"
    assert gc.isenabled()


def test_launches_are_those_that_triton_tells_of(clock):
    knobs = pytest.importorskip("triton").knobs
    hooks = knobs.runtime.launch_enter_hook
    before = list(hooks.calls)

    def two():
        for _ in range(2):
            hooks("metadata")

    def breaks():
        raise RuntimeError

    ours, peer = measured("headstart", "fla", by=Made(headstart=two, fla=two))
    assert (ours.launches, ours.cells[1]) == (2, "2")
    assert (peer.launches, peer.cells[1]) == (None, "-")
    with pytest.raises(RuntimeError):
        launches(Arm("headstart", breaks, dict))
    assert hooks.calls == before


def test_quartiles():
    assert Spread.of([0.001, 0.005, 0.003, 0.002, 0.004]) == Spread(low=2, median=3, high=4)


@pytest.mark.parametrize("id", ["oss-512-on-8k-win-small", "gdn-residual-512-small"])
def test_command_prints_and_writes_a_run_of_real_calls(id, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "CALLS", 2)
    file = tmp_path / "host.json"
    result = run(id, "--arms", "torch,fla", "--rounds", "3", "--device", "cpu", "--json", str(file))
    assert result.exit_code == 0, result.output
    for words in (f"{id} on cpu, 3 rounds", "in a row us", "cold wall us", "fla: "):
        assert words in result.stdout, words
    found = load(file, HostResult, kind="host")
    assert "json_file" not in found.options
    mine, other = found.results
    assert (mine.case, mine.arm, mine.served, mine.rounds) == (id, "torch", "torch", 3)
    assert mine.launches is None
    assert mine.idle_wall.median >= mine.idle_host.median > 0
    assert mine.cold_wall.median >= mine.cold_host.median > 0
    assert mine.in_row.low <= mine.in_row.median <= mine.in_row.high
    assert other.status in ("missing", "declined")
    shown = CliRunner().invoke(headstart, ["report", str(file), "--markdown"])
    assert f"| {id} | torch | - | {mine.in_row.median:.1f} |" in shown.stdout


def test_a_report_shows_one_table_of_the_latest(tmp_path):
    later = made.host()[0].model_copy(update={"launches": 3})
    made.write(tmp_path, "a", "host", [later], created=made.MADE + timedelta(days=1))
    made.write(tmp_path, "b", "host", made.host())
    text = report.markdown(report.read_runs([tmp_path]))
    assert text.startswith(f"Host time of steady calls on {made.DEVICE}: medians")
    ours, fla = [line for line in text.splitlines() if line.startswith("| gdn-1x128 |")]
    assert "| headstart (hopper) | 3 | 21.5 | 25.5 | 51.5 | 30.5 | 56.5 | 2031-05-07, " in ours
    assert "| fla | - | 210.0 | 214.0 | 240.0 | 219.0 | 245.0 | 2031-05-06, " in fla
    away = made.write(tmp_path, "c", "host", made.host()[2:])
    assert report.markdown(report.read_runs([away])) == report.NOTHING
    assert "Host time" not in report.page(report.read_runs([away]))


def test_an_arm_that_fails_is_exit_code_1(monkeypatch):
    def breaks(**options):
        raise RuntimeError("no such luck")

    broken = types.ModuleType("broken")
    broken.fused_recurrent_gated_delta_rule = breaks
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", broken)
    result = run(TINY, "--arms", "fla", "--rounds", "3", "--device", "cpu")
    assert result.exit_code == 1, result.output
    assert "fla: failed, RuntimeError: no such luck" in result.stdout


def test_a_lost_device_ends_the_run_with_one_line(monkeypatch):
    def lost(*arguments, **options):
        raise DeviceLost("cuda:0 was lost while timing fla")

    monkeypatch.setattr(host, "host_of_case", lost)
    result = run(TINY, "gdn-1x128-small", "--device", "cpu")
    assert result.exit_code == 1
    assert result.stderr == f"headstart: {TINY}: cuda:0 was lost while timing fla\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing argument 'CASE...'"),
        (("gdn-nxt-8k",), "case: no case is called 'gdn-nxt-8k'; near: gdn-next-8k"),
        (("gpt-oss-20b",), "case: gpt-oss-20b is a whole model"),
        ((TINY, "--arms", "nobody"), "arm: expected one of ['headstart', 'hopper'"),
        ((TINY, "--arms", ","), "arms: expected one or more, each once, got ','"),
        ((TINY, "--arms", "torch,torch"), "arms: expected one or more, each once"),
        ((TINY, "--rounds", "2"), "Invalid value for '--rounds'"),
        ((TINY, "--device", "nowhere"), "device: nowhere"),
        ((TINY, "--json", "/nowhere/a.json"), "json: no folder"),
    ],
)
def test_mistakes_give_one_line(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
