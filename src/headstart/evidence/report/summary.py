"""One sentence a run: what it was about and how it came out."""

from __future__ import annotations

from typing import Any, NamedTuple

from headstart.evidence.arms import PEERS
from headstart.evidence.arms.sources import NOISE
from headstart.evidence.bundles.records import WITHIN as SOON
from headstart.evidence.bundles.records import Built, Checked, FirstCall
from headstart.evidence.host import MEASURED
from headstart.evidence.report.reading import RunFile
from headstart.evidence.tile_bounds import Count
from headstart.evidence.traffic.records import HitBits, HitShare, Replayed, Workload
from headstart.evidence.tuning.results import WITHIN, KeyResult, LeftOut, worst


class Verdict(NamedTuple):
    """What a run says as a whole.

    devices: where its results were made; "" where none matters. failed: a check did not hold.
    """

    what: str
    devices: str
    sentence: str
    failed: bool


def verdict(file: RunFile) -> Verdict:
    """The verdict of a run."""
    what, tell = TOLD[file.kind]
    found = file.run.results
    places = dict.fromkeys(getattr(one, "device", "") for one in found)
    devices = "; ".join(dict.fromkeys(file.device(place) for place in places if place))
    sentence, failed = tell(found) if found else ("nothing", False)
    return Verdict(what, devices, sentence, failed)


def _verify(found: list[Any]) -> tuple[str, bool]:
    declined = sum(one.declined is not None for one in found)
    failed = sum(not one.passed for one in found)
    right = len(found) - declined - failed
    return f"{right:,} case runs right, {failed:,} wrong, {declined:,} declined", bool(failed)


def _bits(found: list[Any]) -> tuple[str, bool]:
    compared, differing = (sum(getattr(one, n) for one in found) for n in ("compared", "differing"))
    return f"{differing:,} of {compared:,} tensors differ", bool(differing)


def _transcript(found: list[Any]) -> tuple[str, bool]:
    broken = sum(one.failure is not None for one in found)
    rows = sum(one.rows for one in found)
    return f"{broken:,} of {len(found):,} transcripts broken, {rows:,} rows compared", bool(broken)


def _soak(found: list[Any]) -> tuple[str, bool]:
    failures = [f"{one.implementation}: {words}" for one in found for words in one.failures]
    laps, sequences, compared = (
        sum(getattr(one, name) for one in found) for name in ("laps", "sequences", "compared")
    )
    sentence = (
        f"{sum(one.seconds for one in found) / 60:.1f} minutes of {found[0].threads:,} threads: "
        f"{laps:,} laps of {sequences:,} sequences, {compared:,} tensors compared"
    )
    return "; ".join([sentence, *failures]), bool(failures)


def _tiles(found: list[Any]) -> tuple[str, bool]:
    counts = [one for one in found if isinstance(one, Count)]
    violations = sum(one.violations for one in counts)
    visited = sum(one.visited for one in counts)
    witnesses = sum(one.lower + one.upper for one in counts)
    return (
        f"{violations:,} violations in {visited:,} tiles, {witnesses:,} witnesses of tightness",
        bool(violations),
    )


def _mutants(found: list[Any]) -> tuple[str, bool]:
    killed = [one for one in found if one.killed_by is not None]
    alive = [one for one in found if one.killed_by is None]
    explained = sum(one.equivalent is not None for one in alive)
    blind = sum(one.cosine_passes is True for one in killed)
    whose = sorted({f"{one.op} {one.implementation}" for one in found})
    if len(whose) > 2:  # the section's table says which operations
        whose = sorted({one.implementation for one in found})
    sentence = f"{', '.join(whose)}: {len(killed):,} of {len(found):,} killed"
    if explained:
        sentence += f", {explained:,} explained as equivalent"
    return f"{sentence}; a cosine gate lets {blind:,} of them live", explained < len(alive)


def _bench(found: list[Any]) -> tuple[str, bool]:
    arms = [arm for case in found for arm in case.arms]
    timed = sum(arm.status == "timed" for arm in arms)
    bad = [arm.arm in PEERS for arm in arms if arm.status in ("wrong", "failed")]
    sentence = f"{timed:,} arms right and timed on {_count(found, 'case')}"
    if bad:
        sentence += f"; wrong or failed: {bad.count(False):,} of ours, {bad.count(True):,} of peers"
    return sentence, False in bad


def _stages(found: list[Any]) -> tuple[str, bool]:
    failed = sum(one.failed for one in found)
    ran = sum(not one.sentence for one in found)
    return f"{ran:,} arms and variants on {_count(found, 'case')}", bool(failed)


def _host(found: list[Any]) -> tuple[str, bool]:
    measured = sum(one.status == MEASURED for one in found)
    sentence = f"calls of {measured:,} arms measured on {_count(found, 'case')}"
    return sentence, any(one.status == "failed" for one in found)


def _simulate(found: list[Any]) -> tuple[str, bool]:
    used = found[0]
    return (
        f"an arm against itself: 1 held in {used.coverage:.1%}; {used.planted:.0%} found in "
        f"{used.found:.1%} of {used.experiments:,} experiments"
    ), not used.kept


def _static(found: list[Any]) -> tuple[str, bool]:
    broken = sum(bool(one.broken) for one in found)
    errors = sum(bool(one.error) for one in found)
    spilling = sum(bool(one.vector_spills) for one in found)
    sentence = (
        f"{_count(found, 'kernel')} on {_count(found, 'target')}: {broken:,} over budget, "
        f"{errors:,} not compiling, {spilling:,} with vector spills"
    )
    return sentence, bool(broken or errors)


def _trace(found: list[Any]) -> tuple[str, bool]:
    told = []
    shares = [one for one in found if isinstance(one, HitShare)]
    if shares:
        best = max(shares, key=lambda one: (-one.grain, one.text != "ids", one.of_ceiling))
        bound = "no bound" if best.budget is None else f"{best.budget / 2**30:g} GiB"
        told.append(
            f"{best.share:.1%} of the prompt tokens hit at a grain of {best.grain:,} in {bound} "
            f"({'ids alone' if best.text == 'ids' else 'synthetic text'}), "
            f"{best.of_ceiling:.1%} of what could be"
        )
    replays = [one for one in found if isinstance(one, Replayed)]
    for one in replays:
        told.append(
            f"{one.differing:,} of {one.total('rows') + one.total('logits'):,} rows differ between "
            f"hits and cold prefills of {len(one.served):,} requests, {one.saved:.0%} of the time "
            "to first token saved"
        )
    bits = [one for one in found if isinstance(one, HitBits)]
    if bits:
        told.append(
            f"{sum(one.differing for one in bits):,} of {sum(one.rows for one in bits):,} rows "
            f"of single layers differ past hits of {bits[0].requests:,} requests side by side"
        )
    timed = sum(isinstance(one, Workload) for one in found)
    told += [f"{timed:,} workloads timed"] if timed else []
    return "; ".join(told), any(one.differing for one in [*replays, *bits])


def _model(found: list[Any]) -> tuple[str, bool]:
    told, failed = [], False
    for one in found:
        failed |= any(arm.status in ("wrong", "failed") for arm in one.arms)
        for arm in one.arms:
            if arm.ratio is not None and arm.arm != NOISE:
                told.append(
                    f"{one.model} at {one.prompt_tokens:,} tokens: {arm.arm} takes "
                    f"{arm.ratio.words()} of {one.arms[0].arm}"
                )
    return "; ".join(told) or "no two arms timed", failed


def _tune(found: list[Any]) -> tuple[str, bool]:
    points = [point for one in found if isinstance(one, KeyResult) for point in one.points]
    most = worst(points)
    moved = sum(point.moved for point in points)
    left = sum(isinstance(one, LeftOut) for one in found)
    sentence = (
        f"by rule at most {most:.1%} longer than by the fastest tried on "
        f"{_count(points, 'case')} ({len(points):,} calls, {WITHIN:.0%} allowed); the ranking "
        f"moves with the length on {moved:,}"
    )
    return sentence + (f"; left out: {left:,}" if left else ""), most > WITHIN


def _bundle(found: list[Any]) -> tuple[str, bool]:
    built = [one for one in found if isinstance(one, Built)]
    checked = [one for one in found if isinstance(one, Checked)]
    first = [one for one in found if isinstance(one, FirstCall)]
    told, failed = [], False
    if built:
        broken = sum(len(one.failed) for one in built)
        told.append(
            f"{sum(one.compiled for one in built):,} programs compiled for "
            f"{_count(built, 'target')} in {sum(one.seconds for one in built) / 60:.1f} minutes, "
            f"{broken:,} do not compile"
        )
        failed |= bool(broken)
    if checked:
        held, all_of_them = (sum(getattr(x, n) for x in checked) for n in ("held", "reachable"))
        told.append(f"{held:,} of {all_of_them:,} programs held for {_count(checked, 'target')}")
        failed |= any(one.said for one in checked)
    if first:
        made = [one for one in first if not one.failed]
        most = max((one.first for one in made), default=0.0)
        told.append(
            f"{len(made):,} of {_count(first, 'call')} made, in at most {most:.2f} s "
            f"({SOON:g} allowed) beyond the device's start, "
            f"{sum(one.compiled for one in first):,} programs compiled"
        )
        failed |= not all(one.good for one in first)
    return "; ".join(told), failed


def _count(found: list[Any], name: str) -> str:
    """How many different values a field has: "1 case", "3 targets"."""
    count = len({getattr(one, name) for one in found})
    return f"{count:,} {name}{'' if count == 1 else 's'}"


TOLD = {
    "verify": ("errors", _verify),
    "bits": ("bits", _bits),
    "transcript": ("transcripts", _transcript),
    "soak": ("soak", _soak),
    "tiles": ("tile bounds", _tiles),
    "mutants": ("mutants", _mutants),
    "bench": ("times", _bench),
    "stages": ("stages", _stages),
    "host": ("host times", _host),
    "simulate": ("statistics", _simulate),
    "static": ("kernels", _static),
    "trace": ("traffic", _trace),
    "model": ("models", _model),
    "tune": ("configurations", _tune),
    "bundle": ("bundles", _bundle),
}
"""Kind of a run -> what it is about, and what tells how it came out."""
