"""Made-up run records of every kind, for the tests of reports: no figure in them was measured."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headstart.evidence import cases
from headstart.evidence.arms.sources import NOISE
from headstart.evidence.benching import ArmResult, CaseResult
from headstart.evidence.bundles.records import Built, Checked, FirstCall
from headstart.evidence.checking import Accuracy
from headstart.evidence.host import HostResult, Spread
from headstart.evidence.mutants import Found
from headstart.evidence.paired import Ratio
from headstart.evidence.runs import Environment, Run
from headstart.evidence.simulated_clock import Promise
from headstart.evidence.stages import AS_IT_STANDS, Stage, StagesResult
from headstart.evidence.tile_bounds import Count, Saving
from headstart.evidence.timing import Ceilings
from headstart.evidence.traffic.records import HitBits, HitShare, Replayed, Served, Workload
from headstart.evidence.tuning import results as tuning
from headstart.evidence.tuning.results import KeyResult, LeftOut, PointResult, TrialResult
from headstart.evidence.verify.bits import Bits
from headstart.evidence.verify.figures import Measured
from headstart.evidence.verify.soak import Sample, Soak
from headstart.evidence.verify.tolerances import Tolerance
from headstart.evidence.verify.transcript import Transcript
from headstart.evidence.verify.verification import Verification

DEVICE = "Imaginary X1, 12 multiprocessors, 34 GiB"
PLACE = "cuda:0 Imaginary X1"
MADE = datetime(2031, 5, 6, 7, 8, tzinfo=UTC)
ENVIRONMENT = Environment(
    revision="0123456789ab",
    version={"python": "3.11.0", "headstart": "0.0.0", "torch": "2.99.0", "triton": "3.99.0"},
    device={"cpu": "Imaginary C1, 2 cores", "cuda:0": DEVICE},
    variable={"HEADSTART_CHECK": "1"},
)
CEILINGS = Ceilings(copy_rate=4e12, matmul_rate=7e14)


def write(folder: Path, name: str, kind: str, found: list[Any], **changes: Any) -> Path:
    """A run record in a file of `folder`."""
    run = Run[Any](
        kind=kind,
        created=changes.pop("created", MADE),
        environment=ENVIRONMENT.model_copy(update=changes),
        options={"arms": "headstart,fla", "seed": 0},
        results=found,
    )
    path = folder / f"{name}.json"
    path.write_text(run.model_dump_json(indent=2) + "\n")
    return path


def arm(name: str, ms: float | None, ratio: tuple[float, float, float] | None = None,
        **more: Any) -> ArmResult:  # fmt: skip
    """An arm that took `ms`, or (None) that was not timed."""
    if ms is None:
        return ArmResult(arm=name, **{"status": "missing", "sentence": "not installed"} | more)
    found = None
    if ratio is not None:
        middle, low, high = ratio
        found = Ratio(ratio=middle, low=low, high=high, wins=0 if middle > 1 else 60, rounds=60)
    accuracy = Accuracy(output="o", heads=4, last_half=2.5e-3, row_error=4e-3, allowed=5e-3)
    return ArmResult(
        arm=name,
        status="timed",
        accuracy=(accuracy,),
        device_ms=(ms,),
        host_ms=0.021,
        wall_ms=ms + 0.02,
        median_ms=ms,
        ratio=found,
        **more,
    )


def timed(id: str, *arms: ArmResult) -> CaseResult:
    """A case under these arms; its floor is the catalogue's at made-up ceilings."""
    case = cases.get(id)
    moved, operations = case.floor()
    return CaseResult(
        case=id,
        op=case.op,
        device=PLACE,
        dtype=case.dtype,
        tokens=case.tokens,
        seed=0,
        rounds=60,
        clock="graph",
        flushed="L2, by reading other memory",
        floor_bytes=moved,
        floor_operations=operations,
        floor_ms=CEILINGS.floor(moved, operations),
        ceilings=CEILINGS,
        arms=arms,
    )


def four(ms: float, flashinfer: float, fla: float) -> list[ArmResult]:
    """headstart, its noise floor, two peers (one or none of them faster), and one that is away."""

    def ratio(other: float) -> tuple[float, float, float]:
        middle = other / ms
        return middle, middle * 0.98, middle * 1.02

    return [
        arm("headstart", ms, served="hopper"),
        arm(NOISE, ms, (1.001, 0.997, 1.004), note="headstart, separately loaded and compiled"),
        arm("flashinfer", flashinfer, ratio(flashinfer), note="plain states in and out"),
        arm("fla", fla, ratio(fla)),
        arm("flashqla", None),
    ]


def bench() -> list[CaseResult]:
    """One operation over five lengths, another over two; a peer wins two cases, one is level."""
    return [
        timed("gdn-next-2048", *four(0.081, 0.101, 0.212)),
        timed("gdn-next-8k", *four(0.262, 0.279, 0.671)),
        timed("gdn-next-18778", *four(0.561, 0.528, 1.193)),
        timed("gdn-next-32k", *four(1.010, 1.013, 2.240)),
        timed("gdn-next-64k", *four(1.930, 1.871, 4.310)),
        timed("gdn-397b-tp8-8k", *four(0.108, 0.113, 0.236)),
        timed("gdn-397b-tp8-64k", *four(0.391, 0.406, 1.822)),
        timed("gdn-varlen-33seq", *four(0.442, 0.465, 2.173)),
        timed(
            "oss-16k-win",
            arm("headstart", 0.184),
            arm(NOISE, 0.184, (0.999, 0.995, 1.002)),
            arm("fa4", 0.372, (2.02, 1.99, 2.05), note="sinks rounded to bfloat16"),
            arm("sdpa", None, status="declined", sentence="knows no window"),
        ),
    ]


def measured(output: str, relative: float, row_error: float = 0.0) -> Measured:
    """The figures of one output against a tolerance of 5e-3 (rows 1e-2)."""
    return Measured(
        output=output,
        dtype="bfloat16",
        rows=100,
        heads=4,
        cosine=1 - relative**2 / 2,
        relative=relative,
        last_half=relative,
        row_error=row_error or 1.5 * relative,
        row=17,
        head=3,
        nan=0,
        infinite=0,
        unwritten=0,
        tolerance=Tolerance(relative=5e-3, last_half=5e-3, row=1e-2, reason="made up"),
    )


def verifications() -> list[Verification]:
    """Right under two implementations, wrong under a third, declined by a fourth."""

    def one(id: str, implementation: str, **more: Any) -> Verification:
        case = cases.get(id)
        return Verification(
            case=id, op=case.op, implementation=implementation, device="cuda:0",
            dtype=case.dtype, **more,
        )  # fmt: skip

    good = {"outputs": (measured("o", 2.1e-3), measured("state", 1.7e-6))}
    return [
        one("gdn-next-8k", "triton", **good),
        one("gdn-next-8k", "hopper", outputs=(measured("o", 2.2e-3), measured("state", 4e-5))),
        one("gdn-snap-2", "triton", **good, notes=("reference gives no snapshots",)),
        one("oss-16k-win", "triton", outputs=(measured("o", 1.9e-3), measured("LSE", 1e-7))),
        one("oss-16k-win", "hopper", outputs=(measured("o", 3e-3, 0.25), measured("LSE", 1e-7))),
        one("gdn-next-8k", "torch", declined="keeps no promise of bits off the CPU"),
    ]


def mutants() -> list[Found]:
    """Killed clearly, killed barely, seen by bits alone, explained, and one that survives."""

    def one(
        name: str, excess: float, cosine: bool | None, killed: str | None, **more: Any
    ) -> Found:
        return Found(
            mutant=name, fault=f"The {name} is wrong.", op="gated_delta_rule", device="cpu",
            implementation="torch", pitfall=None, file="gated_delta_rule/chunk_scan.py", old="a",
            new="b", killed_by=killed, excess=excess, cosine_passes=cosine, checks=1, seconds=1.2,
            **more,
        )  # fmt: skip

    return [
        one("carry-scaled", 13.7, True, "rule at 1,200 tokens"),
        one("mask-dropped", 8200.0, False, "ragged rows"),
        one("last-decay", 1.6, True, "rule at 1,200 tokens"),
        one("bits-differ", float("inf"), None, "bits of a hit"),
        one("same-sum", 0.0, None, None, generated=True, equivalent="Adds nothing."),
        one("nobody-looks", 0.0, None, None),
    ]


def stages() -> list[StagesResult]:
    """Two arms as the case stands, one with a variant, and a missing peer."""

    def one(name: str, variant: str, device_us: float, wall_us: float, **more: Any) -> StagesResult:
        parts = (("prepare_kernel", 0.6), ("scan_kernel", 0.4))
        return StagesResult(
            case="gdn-next-8k", variant=variant, arm=name, device=PLACE, device_us=device_us,
            stages=tuple(
                Stage(name=part, count=1, microseconds=share * device_us) for part, share in parts
            ),
            launches=2, copies_to_host=0, wall_us=wall_us, launch_us=21.0,
            gap_us=wall_us - device_us, **more,
        )  # fmt: skip

    slower = Ratio(ratio=1.5, low=1.4, high=1.6, wins=0, rounds=24)
    return [
        one("headstart", AS_IT_STANDS, 262.0, 290.0),
        one("headstart", "a snapshot every 64 tokens", 300.0, 331.0, against=slower),
        one("fla", AS_IT_STANDS, 671.0, 1100.0, against=slower),
        StagesResult(case="gdn-next-8k", variant=AS_IT_STANDS, arm="flashqla", device=PLACE,
                     sentence="missing: flash_qla"),
    ]  # fmt: skip


def host() -> list[HostResult]:
    """headstart's calls and a peer's on one case, and a peer that is away."""

    def one(name: str, row: float, **more: Any) -> HostResult:
        times = {"in_row": row, "idle_host": row + 4, "idle_wall": row + 30, "cold_host": row + 9,
                 "cold_wall": row + 35}  # fmt: skip
        spreads = {
            name: Spread(low=0.9 * middle, median=middle, high=1.1 * middle)
            for name, middle in times.items()
        }
        return HostResult(case="gdn-1x128", arm=name, device=PLACE, status="measured", rounds=60,
                          **spreads, **more)  # fmt: skip

    return [
        one("headstart", 21.5, served="hopper", launches=2),
        one("fla", 210.0, note="plain states in and out"),
        HostResult(case="gdn-1x128", arm="flashqla", device=PLACE, status="missing",
                   sentence="flash_qla", rounds=60),
    ]  # fmt: skip


def static() -> list[dict[str, Any]]:
    """One kernel that fits, one over its budget, one that does not compile."""
    good = {
        "kernel": "scan", "operation": "gated_delta_rule", "target": "cuda:90", "triton": "3.99.0",
        "error": "", "broken": [], "registers": 168, "vector_spills": 0, "scalar_spills": None,
        "shared": 98304, "resident_blocks": 2, "matrix": {"HGMMA": 24}, "instructions": 3120,
        "loads": {}, "opcodes": {}, "fingerprint": "f",
    }  # fmt: skip
    keep = ("kernel", "operation", "triton")
    return [
        good,
        good | {"target": "hip:gfx942", "vector_spills": 40, "scalar_spills": 3,
                "broken": ["spills 40 vector words, allowed 0"]},
        {name: good[name] for name in keep} | {"target": "cuda:80", "error": "E: no",
                                               "broken": ["does not compile: E: no"]},
    ]  # fmt: skip


def traffic() -> list[Any]:
    """Shares under two policies and budgets, a replay without a differing bit, two workloads."""
    shares = [
        HitShare(
            text=text, grain=grain, policy=policy, model="qwen3-next-80b", budget=budget,
            requests=2, tokens=1000, hit_tokens=hit, ceiling_tokens=640, kept_bytes=2**30,
            evicted=3, hits=(0, hit),
        )
        for text, grain, policy, budget, hit in (
            ("synthetic", 64, "ends", 2**33, 320),
            ("synthetic", 64, "ends", None, 448),
            ("synthetic", 64, "geometric", 2**33, 608),
            ("synthetic", 512, "geometric", 2**33, 512),
            ("ids", 512, "geometric", 2**33, 512),
        )
    ]  # fmt: skip
    common = {"output": 9, "rows": 40, "differing": 0, "logits": 5, "differing_logits": 0}
    served = [
        Served(prompt=500, hit=hit, cold_seconds=2.0, hit_seconds=seconds, kept_bytes=7, **common)
        for hit, seconds in ((0, 2.0), (448, 0.5))
    ]
    replay = Replayed(
        model="tiny-qwen3-next", device="cpu", shortened=8, policy="geometric", budget=2**30,
        ceiling_tokens=448, evicted=0, served=tuple(served),
    )  # fmt: skip
    timed = [
        Workload(
            kind="linear_attention", layers=1, model="qwen3-next-80b", device=PLACE,
            served="hopper", clock="events", grain=grain, requests=2, steps=2,
            step_tokens=8192, new_tokens=900, prefix_tokens=100, ms=(ms,) * 3, median_ms=ms,
            ratio=Ratio(ratio=ms, low=ms, high=ms, wins=0, rounds=3),
            of_cold=Ratio(ratio=ms / 1.75, low=ms, high=ms, wins=0, rounds=3),
        )
        for grain, ms in ((0, 1.75), (64, 1.0))
    ]  # fmt: skip
    bits = HitBits(kind="linear_attention", model="qwen3-next-80b", device=PLACE, served="hopper",
                   requests=2, hit_tokens=128, rows=900, differing=0)  # fmt: skip
    return [*shares, replay, bits, *timed]


def tuned() -> list[Any]:
    """Two keys, one of which another configuration than the rule's is better for; one left out."""

    def one(key: str, tried: dict[int, tuple[float, float]], chosen: int) -> KeyResult:
        def at(BN: int, point: int, name: str) -> tuning.Measured:
            middle = tried[BN][point]
            ratio = Ratio(ratio=middle, low=middle - 0.01, high=middle + 0.01, wins=0, rounds=20)
            return tuning.Measured(point=name, ratio=ratio, milliseconds=0.2 * middle)

        names = ("oss-16k-win", "oss-16k-win@0.25")
        trials = [
            TrialResult(configuration={"BN": BN}, mean=sum(ratios) / 2, refused="",
                        measured=tuple(at(BN, i, name) for i, name in enumerate(names)))
            for BN, ratios in tried.items()
        ]  # fmt: skip
        out = TrialResult(configuration={"BN": 128}, mean=None, refused="no room", measured=())
        points = []
        for i, name in enumerate(names):
            least = min(tried, key=lambda BN: tried[BN][i])
            regret = 1 / tried[least][i] - 1
            points.append(PointResult(
                point=name, rule_regret=regret, chosen_regret=tried[chosen][i] * (1 + regret) - 1,
                fastest={"BN": least}, decided=least != 32, moved=least != chosen,
            ))  # fmt: skip
        return KeyResult(
            device="cuda:0", operation="extend_attention", kernel="extend", key=key,
            rule={"BN": 32}, chosen={"BN": chosen}, decided=chosen != 32, regret=0.0,
            points=tuple(points), trials=(*trials, out),
        )  # fmt: skip

    return [
        one("extend_attention/extend 64x64", {32: (1.0, 1.0), 64: (0.9, 0.8), 16: (0.95, 0.7)}, 64),
        one("extend_attention/unified 64x64", {32: (1.0, 1.0), 64: (1.1, 1.2)}, 32),
        LeftOut(what="extend_attention/extend 512x512", why="not reached"),
    ]


def bundles() -> list[Any]:
    """One target built, and held but for one program; a first call in time, and one that is not."""
    common = {"target": "cuda:90", "triton": "3.99.0", "models": ("gpt-oss-20b",)}
    return [
        Built(**common, programs=20, before=5, compiled=15, seconds=90.0, compiling=170.5, jobs=2,
              failed=()),
        Checked(**common, reachable=20, held=19, others=3, declined=1, said=("missing: scan",)),
        FirstCall(call="layer", device="cuda", python="3.12.3", torch=2.0, start=0.5, package=0.1,
                  first=0.21, second=0.0007, loaded=5),
        FirstCall(call="rule", device="cuda", first=0.4, compiled=1),
        FirstCall(call="norm", device="cuda", failed="ValueError: bundle: stale"),
    ]  # fmt: skip


def everything(folder: Path) -> list[Path]:
    """A run of every kind."""
    bits = Bits(op="gated_delta_rule", check="hits", form="bfloat16", implementation="triton",
                device="cuda:0", compared=120)  # fmt: skip
    replay = Transcript(implementation="triton", form="plain", convolution=True, seed=3,
                        device="cuda:0", turns=40, rows=812, events={"restored": 5},
                        excess=0.4)  # fmt: skip
    held = [Sample(seconds=n, laps=4 * n, host_bytes=3 * 2**30, device_bytes=2**20 + n,
                   scratch_bytes=2**20) for n in range(3)]  # fmt: skip
    soak = Soak(implementation="triton", device="cuda:0", seed=0, threads=4, seconds=2.0, laps=8,
                sequences=300, calls={"gated_delta_rule": 90}, compared=70, samples=tuple(held),
                failure=None)  # fmt: skip
    count = Count(rules="causal", blocks=900, visited=5000, lost=0, idle=0, lower=70, upper=60,
                  unmasked=0)  # fmt: skip
    saving = Saving(case="oss-16k-win", tiling=(64, 64), before=32896, after=767)
    promise = Promise(interval="percentile", experiments=400, rounds=60, planted=0.03,
                      coverage=0.955, found=0.9975, width=0.0081)  # fmt: skip
    return [
        write(folder, kind, kind, found)
        for kind, found in {
            "bench": bench(),
            "stages": stages(),
            "host": host(),
            "verify": verifications(),
            "bits": [bits],
            "transcript": [replay],
            "soak": [soak],
            "mutants": mutants(),
            "tiles": [count, saving],
            "static": static(),
            "simulate": [promise],
            "trace": traffic(),
            "tune": tuned(),
            "bundle": bundles(),
        }.items()
    ]
