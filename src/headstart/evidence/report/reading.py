"""Run records as their commands wrote them, each with the model of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from headstart.evidence import runs
from headstart.evidence.arms import OURS, PEERS
from headstart.evidence.arms.sources import NOISE
from headstart.evidence.benching import ArmResult, CaseResult
from headstart.evidence.bundles.records import Built, Checked, FirstCall
from headstart.evidence.cases import OPERATIONS
from headstart.evidence.host import MEASURED, HostResult
from headstart.evidence.models.records import ModelResult
from headstart.evidence.mutants import Found
from headstart.evidence.simulated_clock import Promise
from headstart.evidence.stages import StagesResult
from headstart.evidence.tile_bounds import Count, Saving
from headstart.evidence.traffic.records import HitBits, HitShare, Replayed, Workload
from headstart.evidence.tuning.results import KeyResult, LeftOut
from headstart.evidence.verify.bits import Bits
from headstart.evidence.verify.soak import Soak
from headstart.evidence.verify.transcript import Transcript
from headstart.evidence.verify.verification import Verification


class Compiled(BaseModel):
    """What a report shows of one kernel on one target; a compiler's failure has only an error."""

    model_config = ConfigDict(frozen=True)

    kernel: str
    operation: str
    target: str
    triton: str
    error: str
    broken: tuple[str, ...]
    registers: int | None = None
    vector_spills: int | None = None
    scalar_spills: int | None = None
    shared: int | None = None
    resident_blocks: int | None = None
    matrix: dict[str, int] = {}
    instructions: int | None = None


KINDS: dict[str, Any] = {
    "bench": CaseResult,
    "stages": StagesResult,
    "host": HostResult,
    "verify": Verification,
    "bits": Bits,
    "transcript": Transcript,
    "soak": Soak,
    "tiles": Count | Saving,
    "mutants": Found,
    "static": Compiled,
    "simulate": Promise,
    "trace": HitShare | Replayed | HitBits | Workload,
    "model": ModelResult,
    "tune": KeyResult | LeftOut,
    "bundle": Built | Checked | FirstCall,
}
"""Kind of a run -> what one of its results is, in the order in which a report tells them."""

ELSEWHERE = "@"
"""Stands in an arm's name before the case that it runs instead of the one that it is timed on."""
MAIN = OURS[0]
"""The arm that is what a user gets: what is compared with it comes first."""

M = TypeVar("M")


@dataclass(frozen=True)
class RunFile:
    """A run and the name of the file that it came from."""

    name: str
    run: runs.Run[Any]

    @property
    def kind(self) -> str:
        """The run's kind."""
        return self.run.kind

    @property
    def date(self) -> str:
        """The day it was made, UTC."""
        return f"{self.run.created:%Y-%m-%d}"

    @property
    def commit(self) -> str:
        """The commit it was made at: HEADSTART_REVISION, else the checkout's, else a version."""
        known = self.run.environment
        named = known.variable.get("HEADSTART_REVISION", "") or known.revision
        return named or f"version {known.version.get('headstart', 'unknown')}"

    def device(self, place: str) -> str:
        """What the environment says of a device such as "cuda:0" or "cuda:0 NVIDIA H200"."""
        name = place.split()[0]
        devices = self.run.environment.device
        return devices.get(name) or devices.get(f"{name}:0") or place


def read_runs(paths: Sequence[Path | str]) -> list[RunFile]:
    """The runs in these files; a folder stands for every *.json in it.

    Raises ValueError, naming the file, for a kind that no report knows and wherever `runs.load`
    does.
    """
    found = []
    for path in run_paths(paths):
        kind = runs.load(path).kind
        if kind not in KINDS:
            raise ValueError(f"{path}: kind: expected one of {list(KINDS)}, got {kind!r}")
        found.append(RunFile(path.name, runs.load(path, KINDS[kind])))
    return found


def run_paths(paths: Sequence[Path | str]) -> list[Path]:
    """The files that these paths stand for: themselves, or every *.json of a folder."""
    found: list[Path] = []
    for given in paths:
        if not str(given):
            raise ValueError("report: expected files or folders, got ''")
        path = Path(given)
        found += sorted(path.glob("*.json")) if path.is_dir() else [path]
    return found


def results(files: Sequence[RunFile], model: type[M]) -> list[tuple[RunFile, M]]:
    """Every result of one model, with the run that it is of."""
    return [
        (file, result) for file in files for result in file.run.results if isinstance(result, model)
    ]


@dataclass(frozen=True)
class Benched:
    """A case as the latest run timed it on one device against one first arm."""

    file: RunFile
    result: CaseResult

    @property
    def timed(self) -> list[ArmResult]:
        """The arms that were timed, the noise floor left out."""
        return [arm for arm in self.result.arms if arm.status == "timed" and arm.arm != NOISE]

    def floors(self, arm: ArmResult) -> float | None:
        """How many times the case's floor an arm took; None where either is nothing."""
        floor = self.result.floor_ms
        return None if arm.median_ms is None or not floor else arm.median_ms / floor

    @property
    def first(self) -> ArmResult:
        """The arm that was asked for first."""
        return self.result.arms[0]

    @property
    def noise(self) -> ArmResult | None:
        """The first arm entered a second time, if it was timed."""
        again = (arm for arm in self.result.arms if arm.arm == NOISE and arm.status == "timed")
        return next(again, None)

    @property
    def rivals(self) -> list[ArmResult]:
        """Timed arms with a ratio to the first arm, fastest first; none if that was not timed.

        Of the same case, and where peers were timed those alone.
        """
        if self.first.status != "timed":
            return []
        others = [arm for arm in self.timed if arm.ratio is not None and ELSEWHERE not in arm.arm]
        others = [arm for arm in others if arm.arm in PEERS] or others
        return sorted(others, key=lambda arm: arm.ratio.ratio)  # type: ignore[union-attr]

    @property
    def beside(self) -> list[ArmResult]:
        """Timed arms on other cases, with a ratio to the first arm."""
        return [arm for arm in self.timed if arm.ratio is not None and ELSEWHERE in arm.arm]

    def clear(self, arm: ArmResult) -> str:
        """Whether an arm is "faster" or "slower" than the first, or "level" with it.

        Level is where the interval of their ratio holds 1, or meets that of the first arm against
        itself.
        """
        again = self.noise.ratio if self.noise is not None else None
        ratio = arm.ratio
        if ratio is None or arm.arm == NOISE:
            return "level"
        if again is not None and ratio.low <= again.high and again.low <= ratio.high:
            return "level"
        return ratio.decided

    @property
    def winner(self) -> str | None:
        """The faster of the first arm and its fastest rival; None where neither is clearly."""
        if not self.rivals:
            return None
        return {"faster": self.rivals[0].arm, "slower": self.first.arm}.get(
            self.clear(self.rivals[0])
        )


def benched(files: Sequence[RunFile]) -> dict[tuple[str, str, str], list[Benched]]:
    """Timed cases by (device, operation, first arm); of a case timed twice the latest run.

    Arms that the latest run was not asked for, or did not find installed, are those of the run
    before it: every ratio is to the first arm of its own run.
    """
    latest: dict[tuple[str, str, str, str], Benched] = {}
    for file, result in sorted(results(files, CaseResult), key=lambda one: one[0].run.created):
        if result.arms:
            one = Benched(file, result)
            key = file.device(result.device), result.op, one.first.arm, result.case
            if key in latest:
                one = Benched(file, _completed(result, latest[key].result))
            latest[key] = one
    groups: dict[tuple[str, str, str], list[Benched]] = {}
    for (device, op, arm, _), one in latest.items():
        groups.setdefault((device, op, arm), []).append(one)
    order = sorted(groups, key=lambda key: (key[0], _place(key[1]), key[2] != MAIN))
    return {key: groups[key] for key in order}


def host_times(files: Sequence[RunFile]) -> list[tuple[RunFile, HostResult]]:
    """Measured arms by device and case; of an arm measured twice on a case the latest run."""
    latest: dict[tuple[str, str, str], tuple[RunFile, HostResult]] = {}
    for file, result in sorted(results(files, HostResult), key=lambda one: one[0].run.created):
        if result.status == MEASURED:
            latest[file.device(result.device), result.case, result.arm] = file, result
    return list(latest.values())


def _completed(later: CaseResult, earlier: CaseResult) -> CaseResult:
    """A case with arms of an earlier run in place of those that the later one lacks."""
    have = {arm.arm: arm for arm in earlier.arms if arm.status == "timed" and arm.arm != NOISE}
    arms = [have.get(arm.arm, arm) if arm.status == "missing" else arm for arm in later.arms]
    asked = {arm.arm for arm in later.arms}
    arms += [arm for name, arm in have.items() if name not in asked]
    return later.model_copy(update={"arms": tuple(arms)})


def _place(op: str) -> int:
    """Where an operation stands among the catalogue's; unknown ones last."""
    return OPERATIONS.index(op) if op in OPERATIONS else len(OPERATIONS)


def arm_names(group: Sequence[Benched]) -> list[str]:
    """Names of the arms of a group, the noise floor left out, in the order first asked for."""
    return [name for name in dict.fromkeys(a.arm for b in group for a in b.result.arms)
            if name != NOISE]  # fmt: skip
