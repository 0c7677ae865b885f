"""From a bound call to the one implementation that runs it.

An operation is bound once (`bind` checks the arguments and returns a frozen call with a `device`),
then offered to its implementations in the order of the device. An implementation declines what it
cannot run with a sentence; a named implementation is strict; if all decline, one `Declined` carries
every sentence. Nothing falls back in silence: `explain` tells, `served` counts.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from headstart.runtime.checks import expect_choice, shown
from headstart.runtime.declined import Declined
from headstart.runtime.launcher import capturing
from headstart.runtime.layouts import ADDRESS, key_of
from headstart.runtime.precision import full_float32
from headstart.runtime.record import recording
from headstart.runtime.rehearsal import current_rehearsal
from headstart.runtime.steady import MISSED, SIGNATURES, Group, Prepared
from headstart.runtime.workspace import Workspace


class Call(Protocol):
    """What `bind` returns: checked, canonical arguments of one call."""

    @property
    def device(self) -> torch.device:
        """Device of the call's tensors."""
        ...


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    declines: the sentence why a call cannot run here, or None if it can.
    run: computes the call.
    workspace_bytes: scratch that `run` takes from its workspace for this call, exactly.
    """

    name: str
    declines: Callable[[Any], str | None]
    run: Callable[[Any], Any]
    workspace_bytes: Callable[[Any], int] = lambda call: 0


# Implementations in the order they are offered a call; `reference` runs only by name.
ORDER = {"cpu": ("torch",)}
DEVICE_ORDER = ("hopper", "triton", "torch")
NAMES = ("reference", "torch", "triton", "hopper")


@dataclass(frozen=True)
class Operation:
    """An operation: its name, its public function, its `bind`, and where its implementations live.

    places: implementation name -> "module:attribute", loaded at first use.
    written: of each result of a call, the rows that kernels write; those past them are zeros.
    changed: arguments that a call changes, which must lie apart from all others.
    prepared: how calls whose signature was seen before are computed, by facts and implementation
    asked for (see `runtime/steady.py`).
    """

    name: str
    bind: Callable[..., Call]
    places: dict[str, str]
    function: Callable[..., Any] | None = None
    written: Callable[[Any], tuple[int, ...]] | None = None
    changed: Callable[[Any], tuple[torch.Tensor, ...]] = lambda call: ()
    loaded: dict[str, Implementation] = field(default_factory=dict, compare=False)
    prepared: dict[Hashable, Group] = field(default_factory=dict, compare=False)

    def implementation(self, name: str) -> Implementation:
        """The implementation called `name`; Declined if the operation has none of that name."""
        expect_choice("implementation", name, NAMES)
        if name not in self.loaded:
            if name not in self.places:
                raise Declined(f"{self.name} has no implementation called {name}.")
            module, attribute = self.places[name].split(":")
            self.loaded[name] = getattr(importlib.import_module(module), attribute)
        return self.loaded[name]


_OPERATIONS: dict[str, Operation] = {}


class Served:
    """How many calls each (operation, implementation) has served in this process.

    Counted without a lock, by iterators whose step no other thread divides.

    >>> served["gated_delta_rule", "nobody"]
    0
    """

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], itertools.count[int]] = {}

    def counter(self, by: tuple[str, str]) -> Iterator[int]:
        """What is stepped once for each call."""
        return self._counters.setdefault(by, itertools.count())

    def __getitem__(self, by: tuple[str, str]) -> int:
        found = self._counters.get(by)
        # "count(3)": nothing else tells where it stands and leaves it there.
        return 0 if found is None else int(repr(found)[len("count(") : -1])


served = Served()

_watchers: ContextVar[tuple[list[tuple[str, str]], ...]] = ContextVar("watchers", default=())
_lock = threading.Lock()
_warned: set[tuple[str, str]] = set()


def register(operation: Operation) -> Operation:
    """Make an operation known to `explain` and `workspace_bytes`; returns it."""
    _OPERATIONS[operation.name] = operation
    return operation


def operations() -> dict[str, Operation]:
    """All operations by name.

    >>> sorted(operations())[:2]
    ['causal_conv1d', 'extend_attention']
    """
    importlib.import_module("headstart.public")  # which registers them
    return _OPERATIONS


def candidates(operation: Operation, device: torch.device) -> tuple[str, ...]:
    """Names of the implementations that may serve a call on `device`, in order."""
    order = ORDER.get(device.type, DEVICE_ORDER)
    return tuple(name for name in order if name in operation.places)


def choose(operation: Operation, call: Call, name: str | None) -> Implementation:
    """The implementation that runs `call`: the named one, or the first that accepts."""
    if name is not None:
        chosen = operation.implementation(name)
        if sentence := chosen.declines(call):
            raise Declined(f"{operation.name}, implementation {name}: {sentence}")
        return chosen
    sentences = []
    for candidate in candidates(operation, call.device):
        chosen = operation.implementation(candidate)
        sentence = chosen.declines(call)
        if sentence is None:
            if candidate == "torch" and call.device.type not in ("cpu", "meta"):
                _warn_once(operation, call.device, sentences)
            return chosen
        sentences.append(f"{candidate}: {sentence}")
    raise Declined(f"{operation.name}: no implementation accepts this call. " + " ".join(sentences))


def run(operation: Operation, call: Call, name: str | None = None) -> Any:
    """Compute a bound call and count it."""
    if current_rehearsal() is not None:
        return _rehearse(operation, call, name)
    if call.device.type == "meta":
        raise Declined(
            f"{operation.name}: meta tensors have no memory to compute in; "
            "explain and workspace_bytes take them."
        )
    chosen = choose(operation, call, name)
    # Kernels say themselves how they multiply; PyTorch's products ask the process.
    with full_float32() if chosen.name in ("torch", "reference") else nullcontext():
        result = chosen.run(call)
    _count((operation.name, chosen.name))
    return result


def _rehearse(operation: Operation, call: Call, name: str | None) -> Any:
    """A bound call on a device that is not here: what it launches is kept, no result computed."""
    chosen = choose(operation, call, name)
    if chosen.name not in ("hopper", "triton"):
        raise Declined(f"{operation.name}, implementation {chosen.name}: it launches no kernels.")
    result = chosen.run(call)
    for watcher in _watchers.get():
        watcher.append((operation.name, chosen.name))
    return result


def _count(served_by: tuple[str, str]) -> None:
    next(served.counter(served_by))
    for watcher in _watchers.get():
        watcher.append(served_by)


Signature = tuple[Hashable, list[torch.Tensor], list[torch.Tensor]]
"""Host facts of a call, and its tensors in a fixed order: those whose layouts are facts too, of the
call's device the first, and those of whose layouts the other facts tell."""
NAMED = (str, type(None))
NUMBERS = (float, int, type(None))
"""Types that a signature holds as they are: words and numbers, no flag among them."""


def again(
    operation: Operation,
    signature: Signature,
    name: str | None,
    workspace: Workspace | None = None,
    among: dict[Hashable, Group] | None = None,
    schedule: Any = None,
) -> Any:
    """The result of a call, computed as an earlier one of its signature; MISSED: it needs `anew`.

    among: what was prepared, if the operation does not keep it itself (see `anew`). schedule: of
    the call, if kernels read its tables.
    """
    facts, rows, held = signature
    if name is not None and type(name) is not str:
        return MISSED
    group = (operation.prepared if among is None else among).get((facts, name))
    if group is None:
        return MISSED
    tensors, prepared = rows + held, group.last
    if prepared is None or forward_ad._current_level >= 0 or not prepared.guard(*rows):
        prepared = group.find(rows, tensors)
        if prepared is None:
            return MISSED
    try:
        addresses = list(map(ADDRESS, tensors))
    except RuntimeError:  # one of those held is sparse
        return MISSED
    result = prepared.run(tensors, addresses, workspace, schedule)
    if result is MISSED:
        other = group.find(rows, tensors)
        if other is None or other is prepared:
            return MISSED
        prepared = other
        result = prepared.run(tensors, addresses, workspace, schedule)
        if result is MISSED:
            return MISSED
    next(prepared.served)
    if watchers := _watchers.get():
        for watcher in watchers:
            watcher.append((operation.name, prepared.implementation))
    return result


def anew(
    operation: Operation,
    signature: Signature | None,
    call: Call,
    name: str | None,
    among: dict[Hashable, Group] | None = None,
    kept: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Any:
    """Compute a bound call, and remember how if it has a signature that was not seen before.

    A captured call is not remembered: it may copy what later ones find on the device.

    among: where to, in place of the operation: what keeps it is then a fact of the call, and so is
    where the tensors lie that it keeps, `kept`, which are no part of the signature.
    """
    if signature is None or operation.written is None or type(name) not in NAMED:
        return run(operation, call, name)
    facts, rows, held = signature
    tensors = rows + held
    key = key_of(rows, tensors)
    known = operation.prepared if among is None else among
    group = known.get((facts, name))
    if key is None or capturing(call.device) or (group is not None and key in group):
        return run(operation, call, name)
    with recording() as record, watching() as ran:
        result = run(operation, call, name)
    try:
        prepared = Prepared(
            record,
            ran[-1][1],
            served.counter(ran[-1]),
            rows,
            tensors,
            result,
            operation.written(call),
            operation.changed(call),
            kept(),
        )
    except LookupError:
        prepared = None
    with _lock:
        while sum(map(len, known.values())) >= SIGNATURES:
            oldest = next(iter(known))
            known[oldest].forget()
            if not len(known[oldest]):
                del known[oldest]
        known.setdefault((facts, name), Group()).add(key, prepared)
    return result


@contextmanager
def watching() -> Iterator[list[tuple[str, str]]]:
    """A list that receives (operation, implementation) of every call of this context.

    >>> import torch, headstart
    >>> with watching() as ran:
    ...     _ = headstart.causal_conv1d(torch.ones(2, 1), torch.ones(1, 2))
    >>> ran
    [('causal_conv1d', 'torch')]
    """
    ran: list[tuple[str, str]] = []
    token = _watchers.set((*_watchers.get(), ran))
    try:
        yield ran
    finally:
        _watchers.reset(token)


def explain(name: str, *args: Any, **kwargs: Any) -> list[tuple[str, bool, str]]:
    """Who would run `headstart.<name>(*args, **kwargs)`, and why the others would not.

    Returns one (implementation, accepted, sentence) for every implementation of the operation, in
    the order in which they are offered the call, `reference` last. Tensors may be meta tensors.

    >>> import torch, headstart
    >>> q = torch.zeros(4, 1, 16)
    >>> [row[:2] for row in headstart.explain("gated_delta_rule", q, q, q, None, None)]
    [('torch', True), ('hopper', False), ('triton', False), ('reference', True)]
    """
    operation, call, _ = bound(name, args, kwargs)
    order = candidates(operation, call.device)
    rest = tuple(other for other in operation.places if other not in order)
    rows = []
    for implementation in order + rest:
        sentence = operation.implementation(implementation).declines(call)
        accepted = sentence is None
        if accepted:
            sentence = "accepts this call"
            if implementation in rest:
                sentence += ", but only by name"
        rows.append((implementation, accepted, sentence))
    return rows


def workspace_bytes(name: str, *args: Any, **kwargs: Any) -> int:
    """Scratch bytes that `headstart.<name>(*args, **kwargs)` takes from its workspace, exactly.

    Outputs are not scratch. Tensors may be meta tensors; then the first implementation of any
    device that accepts the call is asked, unless `implementation=` names one.

    >>> import torch, headstart
    >>> q = torch.zeros(4, 1, 16, device="meta")
    >>> headstart.workspace_bytes("gated_delta_rule", q, q, q, None, None) > 0
    True
    """
    operation, call, chosen = bound(name, args, kwargs)
    return choose(operation, call, chosen).workspace_bytes(call)


def bound(name: str, args: tuple, kwargs: dict) -> tuple[Operation, Call, str | None]:
    """The operation called `name`, its call with these arguments, and `implementation=`."""
    known = operations()
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"name: expected one of {sorted(known)}, got {shown(name)}")
    operation = known[name]
    if operation.function is None:
        raise ValueError(f"name: {name} cannot be explained")
    bound = inspect.signature(operation.function).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    chosen = arguments.pop("implementation", None)
    return operation, operation.bind(**arguments), chosen


def _warn_once(operation: Operation, device: torch.device, sentences: list[str]) -> None:
    reason = " ".join(sentences) or "no other implementation is installed."
    key = (operation.name, reason)
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(
        f"{operation.name} on {device} runs in the decomposed PyTorch path: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )
