"""The README's table of results, generated from run records."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from headstart.evidence import cases
from headstart.evidence.arms import PEERS
from headstart.evidence.arms.sources import NOISE
from headstart.evidence.arms.unbounded import NAME as UNBOUNDED
from headstart.evidence.benching import ArmResult
from headstart.evidence.host import HostResult
from headstart.evidence.paired import compare
from headstart.evidence.report.reading import (
    ELSEWHERE,
    Benched,
    RunFile,
    arm_names,
    benched,
    host_times,
)
from headstart.evidence.report.summary import verdict

BEGIN = "<!-- results: begin -->"
END = "<!-- results: end -->"
NOTHING = "No run is kept yet."
DECLINED = "declined"
MOST_WORDS = 120
"""Characters of an error."""


def markdown(files: Sequence[RunFile]) -> str:
    """Tables of all times and checks in these runs; a sentence where there are none.

    A row names the winner: the first arm or the fastest other one, or neither (`Benched.winner`).

    >>> markdown([])
    'No run is kept yet.'
    """
    parts = [_times(*key, group) for key, group in benched(files).items()]
    parts += [host] if (host := _host(files)) else []
    checks = [file for file in files if file.kind not in ("bench", "stages", "host")]
    if checks:
        parts.append(_checks(checks))
    return "\n\n".join(parts) or NOTHING


def fill_block(text: str, content: str) -> str:
    """A document with `content` between its two marks; ValueError unless it has one pair.

    >>> fill_block("a\\n<!-- results: begin -->\\nold\\n<!-- results: end -->\\nb", "new")
    'a\\n<!-- results: begin -->\\nnew\\n<!-- results: end -->\\nb'
    """
    block = re.compile(re.escape(BEGIN) + r".*?" + re.escape(END), re.S)
    if (text.count(BEGIN), text.count(END), len(block.findall(text))) != (1, 1, 1):
        raise ValueError(f"into: expected one {BEGIN} and one {END} after it")
    return block.sub(lambda _: f"{BEGIN}\n{content}\n{END}", text)


def _times(device: str, op: str, first: str, group: Sequence[Benched]) -> str:
    tried = {arm.arm for one in group for arm in one.result.arms if arm.status != DECLINED}
    arms = [name for name in arm_names(group) if name in tried and _compared(name)]
    columns = [
        "case",
        "tokens",
        "floor ms",
        *(f"{arm} ms" for arm in arms),
        f"{first} against itself",
        f"fastest other / {first}",
        "calls",
        "faster",
        "made",
    ]
    rows = [
        [
            one.result.case,
            f"{one.result.tokens:,}",
            f"{one.result.floor_ms:.4f}",
            *(_time(one, arm) for arm in arms),
            _ratio(one.noise),
            _rival(one),
            _calls(one),
            _winner(one),
            f"{one.file.date}, `{one.file.commit}`",
        ]
        for one in group
    ]
    left = {0, *range(len(columns) - 4, len(columns))}
    words = (
        f"`{op}` on {device}: medians of interleaved launches, every timed arm right first; ratios "
        f"of paired rounds with their 95 % intervals, of launches on the device and of whole calls "
        f"on an idle one. Neither is faster where the interval holds 1 or meets that of {first} "
        f"against itself."
    )
    parts = (
        words,
        _table(columns, rows, left),
        _notes(group),
        _errors(first, group),
        _beside(first, group),
        _bounds(group),
    )
    return "\n\n".join(filter(None, parts))


def _host(files: Sequence[RunFile]) -> str:
    """How long calls keep the host, a line a case and arm; "" where nothing was measured."""
    found = host_times(files)
    if not found:
        return ""
    devices = ", ".join(dict.fromkeys(file.device(one.device) for file, one in found))
    words = (
        f"Host time of steady calls on {devices}: medians in a row without a wait for the device, "
        f"on an idle device until a call returned and until its work was done, and the same after "
        f"unrelated work in the host's caches. Outputs are not checked here."
    )
    rows = [[one.case, *one.cells, f"{file.date}, `{file.commit}`"] for file, one in found]
    columns = ["case", *HostResult.COLUMNS, "made"]
    return words + "\n\n" + _table(columns, rows, {0, 1, len(columns) - 1})


def _compared(name: str) -> bool:
    """Whether an arm runs the case as it stands in a build that somebody would use."""
    return ELSEWHERE not in name and not name.startswith(UNBOUNDED)


def _errors(first: str, group: Sequence[Benched]) -> str:
    """Errors of the first arm by those of each peer, the largest over the cases; "" without any."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for one in group:
        mine = one.first.error
        for arm in one.timed:
            theirs = arm.error if arm.arm in PEERS else None
            if mine is None or theirs is None:
                continue
            if theirs.last_half and theirs.row_error:
                ratios = mine.last_half / theirs.last_half, mine.row_error / theirs.row_error
                found.setdefault(arm.arm, []).append((*ratios, one.result.case))
    if not found:
        return ""
    told = []
    for name, ratios in sorted(found.items()):
        half, row = (max(ratios, key=lambda one: one[i]) for i in (0, 1))
        told.append(f"{name} {half[0]:.3f} ({half[2]}) and {row[1]:.3f} ({row[2]})")
    return (
        f"Errors of {first} against float64 by those of others on the same cases, the largest: "
        f"over the last half of the tokens and in the worst row, {'; '.join(told)}."
    )


def _bounds(group: Sequence[Benched]) -> str:
    """What bounds save: measured, beside the share of tiles; "" where no build without them ran."""
    rows = []
    for one in group:
        arms = {arm.arm: arm for arm in one.timed}
        for name, arm in arms.items():
            base, _, kind = name.partition(":")
            mate = arms.get(kind) if kind else arms.get("triton", one.first)
            if base != UNBOUNDED or mate is None or not mate.device_ms:
                continue
            ratio = compare(mate.device_ms, arm.device_ms)
            saved = [1 - x for x in (ratio.ratio, ratio.high, ratio.low)]
            times = (f"{x.median_ms or 0.0:.4f}" for x in (mate, arm))
            cells = (one.result.case, mate.arm, arm.note.removeprefix("bounds save "), *times)
            rows.append([*cells, "{:.1%} [{:.1%}, {:.1%}]".format(*saved)])
    if not rows:
        return ""
    columns = ["case", "kernels", "bounds save", "ms", "ms without", "measured"]
    return "What bounds save of the time of a launch:\n\n" + _table(columns, rows, {0, 1, 2})


def _beside(first: str, group: Sequence[Benched]) -> str:
    """What one case costs beside another, timed in the same rounds; "" where none was."""
    rows = []
    for one in group:
        for arm in one.beside:
            name, _, other = arm.arm.partition(ELSEWHERE)
            there = tokens_of(other)
            assert arm.ratio is not None
            ratios = tuple(1 / x for x in (arm.ratio.ratio, arm.ratio.high, arm.ratio.low))
            a_token = "-" if not there else f"{ratios[0] * there / one.result.tokens:.3f}"
            times = (f"{x.median_ms or 0.0:.4f}" for x in (one.first, arm))
            middle, low, high = ratios
            cells = (one.result.case, f"{other} ({name})", *times)
            rows.append([*cells, f"{middle:.3f} [{low:.3f}, {high:.3f}]", a_token])
    if not rows:
        return ""
    columns = ["case", "beside", f"{first} ms", "beside ms", "ratio", "of a token"]
    return "One case beside another, in the same rounds:\n\n" + _table(columns, rows, {0, 1})


def tokens_of(id: str) -> int:
    """Tokens of a case of the catalogue; 0 where it has none of this name any more."""
    try:
        return cases.get(id).tokens
    except ValueError:
        return 0


def _time(one: Benched, name: str) -> str:
    for arm in one.result.arms:
        if arm.arm == name:
            if arm.median_ms is not None:
                return f"{arm.median_ms:.4f}"
            return "-" if arm.status == DECLINED else arm.status
    return "-"


def _ratio(arm: ArmResult | None) -> str:
    return "-" if arm is None or arm.ratio is None else arm.ratio.words()


def _rival(one: Benched) -> str:
    return f"{one.rivals[0].arm} {_ratio(one.rivals[0])}" if one.rivals else "-"


def _calls(one: Benched) -> str:
    """The arm whose calls are the fastest of others, by wall time."""
    walls = [(arm.wall_ratio, arm.arm) for arm in one.rivals if arm.wall_ratio is not None]
    if not walls:
        return "-"
    ratio, name = min(walls, key=lambda wall: wall[0].ratio)
    return f"{name} {ratio.words()}"


def _winner(one: Benched) -> str:
    if one.first.status == "timed":
        winner = one.winner or ("neither" if one.rivals else "-")
        return winner if winner in ("neither", "-", one.first.arm) else f"**{winner}**"
    others = sorted(one.timed, key=lambda arm: arm.median_ms or 0.0)
    return f"**{others[0].arm}** ({one.first.arm} {one.first.status})" if others else "-"


def _notes(group: Sequence[Benched]) -> str:
    """What differs from a case as it stands, and what went wrong, with the cases it concerns."""
    told: dict[tuple[str, str], list[str]] = {}
    for one in group:
        for arm in one.result.arms:
            words = arm.note if arm.status == "timed" else _short(arm)
            if arm.status == DECLINED or arm.arm == NOISE or not _compared(arm.arm):
                continue
            if words:
                told.setdefault((arm.arm, words), []).append(one.result.case)
    return "\n".join(
        f"- {arm}: {words}" + (f" ({', '.join(ids)})" if len(ids) < len(group) else "")
        for (arm, words), ids in sorted(told.items())
    )


def _short(arm: ArmResult) -> str:
    """Why an arm was not timed; of an error its first sentence, for compilers tell long stories."""
    if arm.status != "failed":
        return arm.sentence
    first, stop, _ = arm.sentence.partition(". ")
    return textwrap.shorten(first + stop, MOST_WORDS, placeholder=" ...")


def _checks(files: Iterable[RunFile]) -> str:
    rows = []
    for file in files:
        what, devices, sentence, failed = verdict(file)
        result = f"**fails**: {sentence}" if failed else sentence
        rows.append([what, devices or "-", result, f"{file.date}, `{file.commit}`"])
    return _table(["checked", "device", "result", "made"], rows, {0, 1, 2, 3})


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: set[int]) -> str:
    """A Markdown table; columns not in `left` are aligned to the right."""
    lines = [columns, ["---" if i in left else "--:" for i in range(len(columns))], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
                     for line in lines)  # fmt: skip
