"""Request traces: reading, drawing a sample, shortening, and the text that ids stand for.

A trace has a line of JSON for each request, in order of arrival: `timestamp` in milliseconds,
`input_length` and `output_length` in tokens, and `hash_ids`, one id for each block of 512 tokens of
the prompt (the last may be cut short). Equal leading ids are an equal prefix. There is no text.

Below the grain of an id, and for outputs, text is made up by one rule. An id is a fixed block of
text. Where a prompt shares every full block of an earlier one and is longer than that prompt with
its output, it is taken to continue both: the blocks past the shared ones, where an id is seen for
the first time, begin with the rest of that prompt and with that output. Of several such earlier
prompts the longest counts, of equally long ones the latest.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headstart.runtime.checks import expect_int, shown

ID_TOKENS = 512
"""Tokens that an id of a trace stands for."""
GRAIN = 64
"""Tokens of a block that a prefix can be hit by."""
FIELDS = {"timestamp": 0, "input_length": 1, "output_length": 0}
"""Number in each line -> the least it may be."""


@dataclass(frozen=True)
class Request:
    """A line of a trace.

    arrival: milliseconds. prompt, output: tokens. ids: of each block of the prompt.
    """

    arrival: int
    prompt: int
    output: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival; id_tokens: what an id stands for."""

    requests: tuple[Request, ...]
    id_tokens: int = ID_TOKENS

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.prompt for request in self.requests)

    def shortened(self, by: int) -> Trace:
        """All lengths, and what an id stands for, divided by 1, 2, 4 or 8 and rounded up."""
        if by not in (1, 2, 4, 8):
            raise ValueError(f"shorten: expected 1, 2, 4 or 8, got {shown(by)}")
        return Trace(
            tuple(
                replace(one, prompt=-(-one.prompt // by), output=-(-one.output // by))
                for one in self.requests
            ),
            self.id_tokens // by,
        )

    def sample(self, count: int, seed: int = 0) -> Trace:
        """At least `count` requests of whole conversations, drawn by `seed`, in order of arrival.

        Conversations are told apart by the first id that not every request begins with.
        """
        expect_int("requests", count, 1)
        if count >= len(self.requests):
            return self
        common = _common_ids(self.requests)
        talks: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(self.requests):
            talks.setdefault(request.ids[: common + 1], []).append(index)
        drawn: list[int] = []
        order = list(talks.values())
        random.Random(seed).shuffle(order)
        for talk in order:
            if len(drawn) >= count:
                break
            drawn += talk
        return replace(self, requests=tuple(self.requests[index] for index in sorted(drawn)))


def _common_ids(requests: Sequence[Request]) -> int:
    """How many leading ids all requests share."""
    first = min((request.ids for request in requests), key=len)
    for place, id in enumerate(first):
        if any(request.ids[place] != id for request in requests):
            return place
    return len(first)


def made(seed: int, requests: int = 60) -> Trace:
    """A trace by seed, for trials without a file: conversations over one common first block.

    >>> trace = made(0)
    >>> len(trace.requests), trace == made(0), trace == made(1)
    (60, True, False)
    """
    drawn = random.Random(seed)
    talks: list[Request] = []
    found: list[Request] = []
    count = 0
    for index in range(requests):
        last = talks.pop(drawn.randrange(len(talks))) if talks and drawn.random() < 0.6 else None
        said = last.prompt + last.output if last else ID_TOKENS
        ids = last.ids[: last.prompt // ID_TOKENS] if last else (0,)
        prompt = said + drawn.randint(1, 2000)
        fresh = -(-prompt // ID_TOKENS) - len(ids)
        ids += tuple(range(count + 1, count + 1 + fresh))
        count += fresh
        found.append(Request(1000 * index, prompt, drawn.randint(0, 700), ids))
        talks.append(found[-1])
    return Trace(tuple(found))


def read(path: Path | str) -> Trace:
    """The trace in a file, or `made` by seed for "seed:N".

    Raises ValueError, naming file, line and field, for a file that is none.
    """
    name = str(path)
    if name.startswith("seed:"):
        if not name[5:].isdecimal():
            raise ValueError(f"trace: expected a file or seed:N, got {shown(name)}")
        return made(int(name[5:]))
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"trace: cannot read {path}: {error.strerror}") from error
    requests = [_request(f"trace: {path}:{at}", line) for at, line in enumerate(lines, 1) if line]
    if not requests:
        raise ValueError(f"trace: {path} has no requests")
    return Trace(tuple(requests))


def _request(where: str, line: bytes) -> Request:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {shown(data)}")
    numbers = {}
    for name, least in FIELDS.items():
        value = data.get(name)
        if type(value) is not int or value < least:
            raise ValueError(
                f"{where}: {name}: expected an integer of at least {least}, got {shown(value)}"
            )
        numbers[name] = value
    ids = data.get("hash_ids")
    count = -(-numbers["input_length"] // ID_TOKENS)
    if not isinstance(ids, list) or any(type(id) is not int for id in ids) or len(ids) != count:
        raise ValueError(
            f"{where}: hash_ids: expected {count} integers, one for each {ID_TOKENS} tokens of the "
            f"prompt, got {shown(ids)}"
        )
    return Request(
        numbers["timestamp"], numbers["input_length"], numbers["output_length"], tuple(ids)
    )


@dataclass(frozen=True)
class Text:
    """A request with text.

    keys: what stands in each 64-token block of prompt and output, the last one cut short perhaps.
        Equal keys are equal text.
    continues: index of the request that it continues, or None.
    """

    request: Request
    keys: tuple[int, ...]
    continues: int | None


def texts(trace: Trace, *, strict: bool = False) -> list[Text]:
    """The text of every request, by the rule above.

    strict: a prompt must share more than what all requests begin with to continue another. Without,
        a prompt that is little more than the common beginning is continued by whoever comes next.

    >>> first = Request(0, prompt=600, output=200, ids=(1, 2))
    >>> later = Request(1, prompt=1000, output=10, ids=(1, 3))
    >>> one, two = texts(Trace((first, later)))
    >>> two.continues, two.keys[:12] == one.keys[:12], two.keys[12] == one.keys[12]
    (0, True, False)
    """
    per_id = trace.id_tokens // GRAIN
    by_id: dict[int, list[int]] = {}
    latest: dict[tuple[int, ...], int] = {}  # full blocks of a prompt -> its index
    found: list[Text] = []
    numbers = itertools.count()
    least = 1 + _common_ids(trace.requests) if strict else 1
    for index, request in enumerate(trace.requests):
        earlier = _continued(request, trace.id_tokens, least, latest, found)
        kept: tuple[int, ...] = ()
        if earlier is not None:
            before = found[earlier]
            kept = before.keys[: (before.request.prompt + before.request.output) // GRAIN]
        keys: list[int] = []
        for id in request.ids:
            if id not in by_id:
                places = range(len(keys), len(keys) + per_id)
                by_id[id] = [kept[at] if at < len(kept) else next(numbers) for at in places]
            keys += by_id[id]
        blocks = -(-(request.prompt + request.output) // GRAIN)
        keys += itertools.islice(numbers, max(blocks - len(keys), 0))
        found.append(Text(request, tuple(keys[:blocks]), earlier))
        latest[request.ids[: request.prompt // trace.id_tokens]] = index
    return found


def _continued(
    request: Request,
    id_tokens: int,
    least: int,
    latest: dict[tuple[int, ...], int],
    found: Sequence[Text],
) -> int | None:
    """Index of the request of at least so many full blocks that this one continues, or None."""
    for full in range(request.prompt // id_tokens, least - 1, -1):
        index = latest.get(request.ids[:full])
        if index is not None:
            before = found[index].request
            if before.prompt + before.output < request.prompt:
                return index
    return None
