"""Where Triton kernels run, and how host facts reach them."""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from headstart.runtime.bundle_launch import active_driver, supply
from headstart.runtime.checks import in_memory
from headstart.runtime.record import Launched, current_record
from headstart.runtime.rehearsal import Launch, current_rehearsal
from headstart.runtime.static import Target


@functools.cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter (TRITON_INTERPRET=1)."""
    if not installed():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def declines_tensors(device: torch.device, dtype: torch.dtype) -> str | None:
    """The sentence why kernels cannot run on such tensors at all, or None.

    >>> declines_tensors(torch.device("meta"), torch.float64)
    'it computes in float32; float64 is for the reference.'
    """
    if dtype == torch.float64:
        return "it computes in float32; float64 is for the reference."
    if not installed():
        return "Triton is not installed."
    if device.type == "cuda" or current_rehearsal() is not None:
        return declines_target(target_of(device))
    if device.type == "meta":
        return None
    if device.type != "cpu":
        return f"its kernels run on CUDA and ROCm devices, not on {device.type}."
    if not interpreted():
        return (
            "on CPU tensors it runs only in Triton's interpreter, in a process of its own "
            "(TRITON_INTERPRET=1)."
        )
    if dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly."
    return None


FAMILIES = {"cuda": ("8.x", "9.x", "10.x", "12.x"), "hip": ("gfx90a", "gfx94", "gfx95", "gfx11")}
"""Architectures whose configurations a rule gives: NVIDIA's capabilities, how AMD's names begin."""


def declines_target(target: Target) -> str | None:
    """The sentence why kernels know nothing of such devices, or None: configured as their family.

    >>> declines_target(Target("cuda:86", "cuda", 86, 32)) is None
    True
    >>> declines_target(Target("cuda:75", "cuda", 75, 32))
    'its kernels know the families 8.x, 9.x, 10.x, 12.x of cuda, not that of cuda:75.'
    """
    name = f"{target.arch // 10}.x" if isinstance(target.arch, int) else target.arch
    if name.startswith(FAMILIES[target.backend]):
        return None
    known = ", ".join(FAMILIES[target.backend])
    return f"its kernels know the families {known} of {target.backend}, not that of {target.name}."


def processors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a device; 1 in the interpreter."""
    rehearsal = current_rehearsal()
    return _processors(device) if rehearsal is None else rehearsal.processors


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def target_of(device: torch.device, interpreted_as: int = 90) -> Target:
    """What kernels for a device are compiled for.

    interpreted_as: compute capability times ten that the interpreter stands for, so that it runs
    tiles through descriptors (90) or through pointers (80).

    >>> target_of(torch.device("cpu")).name
    'cuda:90'
    """
    rehearsal = current_rehearsal()
    return _target_of(device, interpreted_as) if rehearsal is None else rehearsal.target


@functools.cache
def _target_of(device: torch.device, interpreted_as: int) -> Target:
    if device.type != "cuda":
        return Target(f"cuda:{interpreted_as}", "cuda", interpreted_as, 32)
    if torch.version.hip is not None:
        found = torch.cuda.get_device_properties(device)
        arch = found.gcnArchName.split(":")[0]
        return Target(f"hip:{arch}", "hip", arch, found.warp_size)
    major, minor = torch.cuda.get_device_capability(device)
    return Target(f"cuda:{10 * major + minor}", "cuda", 10 * major + minor, 32)


def reads_descriptors(target: Target) -> bool:
    """Whether tiles are copied through descriptors: a copy engine, and kernels that do not spill.

    >>> reads_descriptors(target_of(torch.device("cpu")))
    True
    """
    return isinstance(target.arch, int) and 90 <= target.arch < 120


def padded(size: int) -> int:
    """Columns of a tile of `size` channels: a power of two, at least 64.

    Triton 3.6 reads outside shared memory in some products over rows of less than 128 bytes.

    >>> padded(24), padded(96)
    (64, 128)
    """
    return max(64, 1 << (size - 1).bit_length())


def precision(dtype: torch.dtype, backend: str) -> str:
    """How float32 operands are multiplied; for 16-bit ones a name that every target accepts.

    >>> precision(torch.float32, "cuda"), precision(torch.float32, "hip")
    ('tf32x3', 'ieee')
    """
    return "tf32x3" if dtype == torch.float32 and backend == "cuda" else "ieee"


prepares = operator.attrgetter("is_cuda")
"""Whether calls on such tensors are computed as earlier ones were: see `runtime/steady.py`.

Elsewhere than on CUDA and ROCm devices a call's time on the host does not count.
"""


def current(device: torch.device) -> AbstractContextManager:
    """Make `device` the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def start(kernel: Any, grid: tuple[int, ...], given: dict[str, Any], **options: Any) -> None:
    """Launch a kernel with those of the given arguments that it names, on the current device.

    options: the compiler's. A call that is recorded (`runtime/steady.py`) keeps the launch; one
    that is rehearsed (`runtime/rehearsal.py`) does not launch.
    """
    arguments = {name: given[name] for name in kernel.arg_names}
    if (rehearsal := current_rehearsal()) is not None:
        rehearsal.launches.append(Launch(kernel, arguments, options))
        return
    supply(kernel)
    compiled = kernel[grid](**arguments, **options)
    if (record := current_record()) is not None:
        record.launches.append(Launched(kernel, compiled, grid, tuple(arguments.values())))


class Listed(NamedTuple):
    """What is to be known of slots: the least, the most, and those that are not -1."""

    least: int
    most: int
    used: frozenset[int]
    distinct: bool


class HostInts(tuple[int, ...]):
    """Integers or flags that the host gave once: they never change, nor does a copy of them.

    >>> slots = HostInts([3, -1])
    >>> slots.listed
    Listed(least=-1, most=3, used=frozenset({3}), distinct=True)
    >>> slots.on_device(torch.device("cpu")).tolist()
    [3, -1]
    """

    @functools.cached_property
    def listed(self) -> Listed | None:
        """What is to be known of them as slots; None where some are no ints."""
        if not set(map(type, self)) <= {int}:
            return None
        used = frozenset(self) - {-1}
        distinct = len(used) == len(self) - self.count(-1)
        return Listed(min(self, default=0), max(self, default=-1), used, distinct)

    @functools.cached_property
    def suited(self) -> set[tuple[int, int, bool]]:
        """What `suit` was asked and affirmed, for those who ask it in every call."""
        return set()

    def suit(self, entries: int, limit: int, written: bool) -> bool:
        """Whether these are slots of so many sequences in a pool of `limit`, distinct if written.

        >>> HostInts([3, 3]).suit(2, 4, False), HostInts([3, 3]).suit(2, 4, True)
        (True, False)
        """
        listed = self.listed
        suited = (
            listed is not None
            and len(self) == entries
            and listed.least >= -1
            and listed.most < limit
            and (listed.distinct or not written)
        )
        if suited:
            self.suited.add((entries, limit, written))
        return suited

    @functools.cached_property
    def _copies(self) -> dict[tuple[torch.device, int], torch.Tensor]:
        return {}

    def on_device(self, device: torch.device) -> torch.Tensor:
        """Their copy on `device`, made once for each stream: it then waits for no other."""
        key = device, stream_of(device)
        found = self._copies.get(key)
        if found is None and capturing(device):
            # A warming call on another stream has ended before a capture begins.
            others = (copy for (place, _), copy in self._copies.items() if place == device)
            found = next(others, None)
        if found is None:
            found = device_ints(list(self), device)
            # What a graph copies while it is captured is there only once it is replayed.
            if not capturing(device):
                self._copies[key] = found
        return found


def frozen_ints(values: Any) -> Any:
    """Lists and tuples of Python's ints or bools as `HostInts`; anything else as it is.

    >>> type(frozen_ints([1, 2])) is HostInts, type(frozen_ints([torch.tensor(1)])) is HostInts
    (True, False)
    """
    plain = type(values) in (list, tuple) and set(map(type, values)) <= {int, bool}
    return HostInts(values) if plain else values


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured in a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The stream that kernels on a device are ordered by now; 0 on a CPU."""
    return _stream_reader(device)()


@functools.cache
def _stream_reader(device: torch.device) -> Callable[[], int]:
    """What reads the handle of a device's current stream: Triton's way is a tenth of PyTorch's."""
    if device.type != "cuda":
        return lambda: 0
    if not installed():
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return functools.partial(active_driver().get_current_stream, device.index)


def device_ints(values: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Integers or flags as a contiguous tensor on `device`; lists travel without a wait.

    >>> device_ints([3, -1], torch.device("cpu")).dtype
    torch.int32
    """
    if isinstance(values, HostInts):
        return values.on_device(device)
    if not isinstance(values, torch.Tensor):
        values = torch.tensor([int(x) for x in values], dtype=torch.int32, device="cpu")
    values = in_memory("values", values)
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    if values.device == device:
        return values.contiguous()
    if values.device.type == "cpu" and device.type == "cuda":
        # Memory of its own even where the caller's is pinned: that may be overwritten at once.
        values = torch.empty_like(values, pin_memory=True).copy_(values)
    return values.to(device, non_blocking=True).contiguous()
