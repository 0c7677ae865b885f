"""Steady calls: what an earlier call launched, launched again on other memory.

The arguments of a call are checked, and its launches worked out, once for a signature: a tuple of
every host fact that either depends on (shapes, strides, dtypes, devices, alignment, flags, which
arguments share memory; never a length that a table on the device holds). Such a call is recorded.
A later call of the same signature differs in the addresses of its tensors alone, so it takes the
compiled kernels straight to the driver's launcher, each with one tuple of arguments. Layouts are
not read one by one where tensors are like those of the last call of the same facts: a function of
PyTorch's, the guard of compiled graphs, tells.

    seen = signature(q, ...)  # facts and tensors; None: this call always goes the long way
    if seen is not None:
        result = dispatch.again(OPERATION, seen, name)
        if result is not dispatch.MISSED:
            return result
    return dispatch.anew(OPERATION, seen, bind(q, ...), name)  # recorded, for the next one

Kernels are launched by `launcher.start`, which records, and take scratch from a `Workspace`. A
record is of use if every address that a kernel was given is that of a tensor of the signature, of
an output, of scratch, or of a table that the call's schedule is asked for again. Where it is not,
and where Triton does not offer a launcher that can be called so (the interpreter), calls go the
long way each time. Prepared calls never change, so threads may share them; descriptors of scratch
belong to the workspace that holds it.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from operator import itemgetter
from typing import Any

import torch

from headstart.runtime import fresh
from headstart.runtime.layouts import USUAL, addresses_of, guard_of, key_of, memory
from headstart.runtime.record import Launched, Record
from headstart.runtime.workspace import Workspace, workspace_of

STREAM = object()
"""Stands for the stream where a launcher passes it on."""
MAPS = 64
"""Descriptors that are kept for one argument: addresses come again, but not forever."""
SIGNATURES = 1024
"""Signatures that are remembered, at about 30 KiB each."""
MISSED = object()
"""In place of a result: nothing was computed."""


class _Address:
    """Memory, as far as a descriptor is concerned."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class _Handle:
    """The driver's launcher of one compiled kernel, without the binder before it.

    launch: takes `base`, then the kernel's arguments, descriptors spelled out.
    base: grid, STREAM, function and whatever else this driver passes ahead of them.
    expand: (type, what the compiler says of the descriptor, argument) -> what `launch` takes for
    it.
    """

    launch: Callable[..., None]
    base: tuple[Any, ...]
    expand: Callable[[str, Any, Any], list[Any]]

    @staticmethod
    def of(launched: Launched) -> _Handle:
        """The handle; LookupError where Triton's launcher is not of the kind that has one.

        That kind is a function in C, written for the types of a kernel's arguments, which takes
        them one by one; where descriptors are among them it is wrapped in what spells those out.
        """
        launcher = launched.compiled.run
        module = sys.modules[type(launcher).__module__]
        wrap = getattr(module, "wrap_handle_tensordesc", None)
        launch = getattr(launcher, "launch", None)
        if inspect.isfunction(launch):
            launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
        if not hasattr(module, "make_launcher") or wrap is None or launch is None:
            raise LookupError("a launcher for each signature")
        passed: list[Any] = []
        asked = copy.copy(launcher)
        asked.launch = lambda *args: passed.extend(args)
        grid = (*launched.grid, 1, 1)[:3]
        compiled, first = launched.compiled, object()
        asked(*grid, STREAM, compiled.function, compiled.packed_metadata, None, None, None, first)
        *base, last = passed
        if last is not first:
            raise LookupError("a launcher that takes arguments one by one")

        def expand(kind: str, about: Any, argument: Any) -> list[Any]:
            given: list[Any] = []
            spelled = wrap(lambda *args: given.extend(args), {0: kind}, about and [about])
            spelled(*base, argument)
            return given[len(base) :]

        return _Handle(launch, tuple(base), expand)


def _encoder(handle: _Handle, kind: str, about: Any, descriptor: Any) -> Callable[[int], Any]:
    """Address -> the descriptor's first word (a tensor map), for memory laid out alike."""
    like = copy.copy(descriptor)
    like.base = None  # memory is not kept alive for its layout

    def encode(address: int) -> Any:
        there = copy.copy(like)
        there.base = _Address(address)
        return handle.expand(kind, about, there)[0]

    return encode


class _Places:
    """Where in one list the launches of a call find what changes, and their last arguments.

    The list: the stream; addresses of the call's tensors; descriptors of them; then what stays
    between calls: addresses of scratch, descriptors of it, numbers.
    """

    def __init__(
        self, addresses: Sequence[int], scratch: Sequence[int], kept: Sequence[int]
    ) -> None:
        self._addresses, self._scratch, self._kept = list(addresses), list(scratch), set(kept)
        self.described: list[tuple[int, Callable[[int], Any]]] = []
        self.scratch_described: list[tuple[int, Callable[[int], Any]]] = []
        self.numbers: list[Any] = []

    def of_launch(self, launched: Launched, handle: _Handle) -> list[tuple[str, Any]]:
        """The places of a launch's arguments, as sections of the list and indices in them.

        Of numbers the place is the number itself. Raises LookupError where an address is none of a
        tensor of the call or of scratch.
        """
        places = [("stream", 0) if x is STREAM else ("number", x) for x in handle.base]
        about = iter(getattr(launched.compiled.metadata, "tensordesc_meta", None) or ())
        kinds = launched.compiled.src.signature.values()
        for kind, argument in zip(kinds, launched.arguments, strict=True):
            if not isinstance(kind, str):
                raise LookupError("arguments in a tuple")
            if kind.startswith("tensordesc"):
                places += self._descriptor(handle, kind, next(about, None), argument)
            elif kind != "constexpr" and hasattr(argument, "data_ptr"):
                places.append(self._address(argument.data_ptr()))
            else:
                places.append(("number", argument))
        return places

    def _address(self, address: int) -> tuple[str, int]:
        if address in self._addresses:
            return "call", self._addresses.index(address)
        if address in self._scratch:
            return "scratch", self._scratch.index(address)
        if address in self._kept:
            return "number", address
        raise LookupError("memory of the call")

    def _descriptor(
        self, handle: _Handle, kind: str, about: Any, descriptor: Any
    ) -> list[tuple[str, Any]]:
        first, *layout = handle.expand(kind, about, descriptor)
        section, i = self._address(descriptor.base.data_ptr())
        numbers = [("number", value) for value in layout]
        if hasattr(first, "data_ptr"):  # where there is no copy engine, the address itself
            return [(section, i), *numbers]
        if section == "number":
            return [(section, first), *numbers]
        kept = self.described if section == "call" else self.scratch_described
        kept.append((i, _encoder(handle, kind, about, descriptor)))
        section = "described" if section == "call" else "scratch described"
        return [(section, len(kept) - 1), *numbers]

    def split(self, places: list[tuple[str, Any]]) -> tuple[list[tuple[str, int]], tuple]:
        """Places with every number in the list, and the numbers at the end, which need none."""
        count = len(places)
        while places[count - 1][0] == "number":
            count -= 1
        listed = []
        for section, value in places[:count]:
            if section == "number":
                self.numbers.append(value)
                listed.append((section, len(self.numbers) - 1))
            else:
                listed.append((section, value))
        return listed, tuple(value for _, value in places[count:])

    def index(self, place: tuple[str, int]) -> int:
        """The index in the whole list, once all launches are split."""
        sizes = {
            "stream": 1, "call": len(self._addresses), "described": len(self.described),
            "scratch": len(self._scratch), "scratch described": len(self.scratch_described),
            "number": len(self.numbers),
        }  # fmt: skip
        section, i = place
        before = list(sizes)[: list(sizes).index(section)]
        return sum(sizes[name] for name in before) + i


class Program:
    """The launches of one signature.

    Raises LookupError where they cannot be made without the long way.

    Attributes
    ----------
    driver: Triton's, of the device.
    scratch: name -> shape and dtype of what they take from a workspace.
    """

    __slots__ = (
        "_after", "_before", "_described", "_encoders", "_heard", "_knobs", "_launches", "_maps",
        "_numbers", "_scratch_described", "driver", "scratch",
    )  # fmt: skip

    def __init__(self, record: Record, addresses: Sequence[int], kept: Sequence[int]) -> None:
        from triton import knobs
        from triton.runtime import driver

        handles = [_Handle.of(launched) for launched in record.launches]
        scratch = [address for _, _, address in record.scratch.values()]
        places = _Places(addresses, scratch, kept)
        split = [
            places.split(places.of_launch(launched, handle))
            for launched, handle in zip(record.launches, handles, strict=True)
        ]
        self.driver: Any = driver.active
        self.scratch = {name: (shape, kind) for name, (shape, kind, _) in record.scratch.items()}
        self._launches = tuple(
            (handle.launch, itemgetter(*map(places.index, listed)), last)
            for handle, (listed, last) in zip(handles, split, strict=True)
        )
        self._encoders = tuple(encode for _, encode in places.described)
        self._maps: tuple[dict[int, Any], ...] = tuple({} for _ in self._encoders)
        self._described = _picker([i for i, _ in places.described])
        self._scratch_described = tuple(places.scratch_described)
        self._numbers = tuple(places.numbers)
        self._knobs = knobs.runtime
        self._before = self._knobs.launch_enter_hook
        self._after = self._knobs.launch_exit_hook
        # Lists, to which hooks may be added later.
        self._heard = [launched.kernel.pre_run_hooks for launched in record.launches]
        self._heard += [x.calls for x in (self._before, self._after) if hasattr(x, "calls")]

    def heard(self) -> bool:
        """Whether somebody listens to launches: then they go the long way, which tells all."""
        if any(self._heard):
            return True
        before, after = self._knobs.launch_enter_hook, self._knobs.launch_exit_hook
        if before is self._before and after is self._after:
            return False
        return bool(getattr(before, "calls", before) or getattr(after, "calls", after))

    def run(self, stream: int, addresses: list[int], workspace: Workspace | None) -> None:
        """Launch on the current device; workspace: of this device and stream."""
        values: list[Any] = [stream, *addresses]
        if self._maps:
            described = self._described(addresses)
            found = list(map(dict.get, self._maps, described))
            values += found if all(found) else self._encoded(described)
        values += self._numbers if workspace is None else self._fixed(workspace)
        for launch, pick, last in self._launches:
            launch(*(pick(values) + last))  # one tuple, which is handed on as it is

    def _encoded(self, addresses: tuple[int, ...]) -> list[Any]:
        """Descriptors of what lies at these addresses, some of them new."""
        found = []
        for encode, maps, address in zip(self._encoders, self._maps, addresses, strict=True):
            there = maps.get(address)
            if there is None:
                if len(maps) >= MAPS:
                    maps.clear()
                there = maps[address] = encode(address)
            found.append(there)
        return found

    def _fixed(self, workspace: Workspace) -> tuple[Any, ...]:
        """What stays as long as the scratch lies where it lies, which its workspace knows."""
        fixed = workspace.bound.get(self)
        if fixed is None:
            held = [
                workspace.buffer(name, shape, kind).data_ptr()
                for name, (shape, kind) in self.scratch.items()
            ]
            maps = [encode(held[i]) for i, encode in self._scratch_described]
            if len(workspace.bound) >= SIGNATURES:
                workspace.bound.clear()
            fixed = workspace.bound[self] = (*held, *maps, *self._numbers)
        return fixed


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the items at these places of a list."""
    if len(places) == 1:
        return lambda items: (items[places[0]],)
    return itemgetter(*places) if places else lambda items: ()


class Prepared:
    """How calls of one signature are computed.

    guard: whether the tensors of another call, those whose layouts are facts, are laid out like
    those of this one. implementation: whose launches these are. served: counts its calls.
    """

    __slots__ = (
        "_apart", "_build", "_device", "_given", "_kind", "_memory", "_outputs", "_returned",
        "_several", "_stream", "_tables", "guard", "implementation", "program", "served",
    )  # fmt: skip

    def __init__(
        self,
        record: Record,
        implementation: str,
        served: Iterator[int],
        rows: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        result: Any,
        written: Sequence[int],
        changed: Sequence[torch.Tensor] = (),
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        """From a call's record, its tensors and its result; raises LookupError if it is of no use.

        rows: those of the tensors whose layouts are facts. written: of each result, the rows that
        kernels write. changed: tensors that must lie apart from all others, beside results. kept:
        further tensors that kernels read, which stay where they are.
        """
        if not record.launches or any(run.compiled is None for run in record.launches):
            raise LookupError("a kernel")
        results: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
        # What a named tuple's `_make` ends in.
        self._build = partial(tuple.__new__, type(result)) if results is result else _alone
        self.guard = guard_of(rows)
        self.implementation, self.served = implementation, served
        self._device = tensors[0].device
        self._kind = self._device.type
        self._several = self._device.type == "cuda" and torch.cuda.device_count() > 1
        addresses = addresses_of(tensors)
        self._memory = memory(addresses)
        returned: list[tuple[int, int]] = []
        # Place among the results, shape, strides and dtype, the first row that no kernel writes.
        outputs: list[tuple[int, tuple[Any, ...], int | None]] = []
        for place, (x, count) in enumerate(zip(results, written, strict=True)):
            at = [i for i, given in enumerate(tensors) if given is x]
            if at:
                returned.append((place, at[0]))
            elif x is not None:
                layout = tuple(x.shape), x.stride(), x.dtype
                outputs.append((place, layout, count if count < x.shape[0] else None))
                addresses.append(x.data_ptr())
        self._given, self._outputs = tuple(returned), tuple(outputs)
        self._returned: list[torch.Tensor | None] = [None] * len(results)
        alone = [i for _, i in returned]
        alone += [i for i, x in enumerate(tensors) if any(x is other for other in changed)]
        sizes = [_bytes(x) for x in tensors]
        self._apart = tuple(
            (i, j, sizes[i], sizes[j], addresses[j] - addresses[i])
            for i in alone
            for j in range(len(tensors))
            if i != j
        )
        # In the order of `run`: tensors, outputs, places in tables.
        self._tables: list[tuple[Callable[..., torch.Tensor], list[int]]] = []
        for build, table in record.tables.items():
            begin, size = table.data_ptr(), _bytes(table)
            places = sorted(_pointers(record) - set(addresses))
            shifts = [place - begin for place in places if begin <= place < begin + size]
            self._tables.append((build, shifts))
            addresses += [begin + shift for shift in shifts]
        self.program = Program(record, addresses, addresses_of(kept))
        self._stream = partial(self.program.driver.get_current_stream, self._device.index)

    def run(
        self,
        tensors: list[torch.Tensor],
        addresses: list[int],
        workspace: Workspace | None,
        schedule: Any = None,
    ) -> Any:
        """The result of a call, workspace None: that of this thread and stream; or MISSED.

        MISSED: somebody listens to launches, or memory lies otherwise. Tensors that lie to each
        other as in the call that was checked are apart as they were; of any others whose ranges
        meet, the long way tells columns of the same rows from a mistake.
        """
        if gcd(*addresses) & 15 or len({0, *addresses}) <= len(addresses):
            if self._memory != memory(addresses):
                return MISSED
        elif self._memory != USUAL:
            return MISSED
        for i, j, size, other, shift in self._apart:
            found = addresses[j] - addresses[i]
            if found != shift and found < size and -found < other:
                return MISSED
        program, device = self.program, self._device
        if program.heard():
            return MISSED
        if self._several and program.driver.get_current_device() != device.index:
            with torch.cuda.device(device):
                return self.run(tensors, addresses, workspace, schedule)
        stream = self._stream()
        results = self._returned.copy()
        for place, i in self._given:
            results[place] = tensors[i]
        empty = getattr(fresh, self._kind)
        for place, layout, unwritten in self._outputs:
            x = results[place] = empty(*layout)
            if unwritten is not None:
                x[unwritten:].zero_()
            addresses.append(x.data_ptr())
        if self._tables:
            addresses += schedule.found.get(self) or self._look_up(schedule)
        if not program.scratch:
            workspace = None
        elif workspace is None:
            workspace = workspace_of(device, stream)
        program.run(stream, addresses, workspace)
        return self._build(results)

    def _look_up(self, schedule: Any) -> list[int]:
        """Where kernels read in a schedule's tables, which it knows as long as they stay."""
        found = schedule.found[self] = [
            schedule.on_device(build).data_ptr() + shift
            for build, shifts in self._tables
            for shift in shifts
        ]
        return found


def _pointers(record: Record) -> set[int]:
    """Addresses that kernels were given."""
    return {
        argument.data_ptr()
        for launched in record.launches
        for argument in launched.arguments
        if hasattr(argument, "data_ptr")
    }


def _alone(results: list[Any]) -> Any:
    return results[0]


def _bytes(x: torch.Tensor) -> int:
    """From the first byte of a tensor to the one after its last."""
    if not x.numel():
        return 0
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return (reach + 1) * x.element_size()


class Group:
    """How calls of the same facts are computed, by the layouts and the memory of their tensors.

    last: what the last of them took. A call that cannot be repeated stands as None.
    """

    __slots__ = ("_prepared", "last")

    def __init__(self) -> None:
        self._prepared: dict[Hashable, Prepared | None] = {}
        self.last: Prepared | None = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._prepared

    def __len__(self) -> int:
        return len(self._prepared)

    def add(self, key: Hashable, prepared: Prepared | None) -> None:
        """Keep what calls of this key take."""
        self._prepared[key] = self.last = prepared

    def forget(self) -> None:
        """Drop the oldest of them."""
        dropped = self._prepared.pop(next(iter(self._prepared)))
        if self.last is dropped:
            self.last = None

    def find(self, rows: Sequence[Any], tensors: Sequence[Any]) -> Prepared | None:
        """What a call takes that is not like the last one."""
        key = key_of(rows, tensors)
        found = None if key is None else self._prepared.get(key)
        if found is not None:
            self.last = found
            if not found.guard(*rows):  # it looks at the mode of gradients and of inference too
                found.guard = guard_of(rows)
        return found
