"""A Triton driver without a device: it compiles nothing and keeps what it is told to launch.

Triton's binder, its expansion of descriptors and its launcher class are the real ones; only what
they end in, a function in C, is a list here.
"""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, make_launcher, wrap_handle_tensordesc

__all__ = ["make_launcher"]  # by which a launcher of this kind is known

DEVICE = 77
"""An index that no device has: what kernels keep for it is nobody else's."""
STREAM = 5


@dataclass(frozen=True)
class Map:
    """A tensor map: what was encoded."""

    address: int
    rest: tuple


@dataclass
class FakeDriver:
    """launched: the arguments of every launch as the function in C would get them."""

    device: int = DEVICE
    stream: int = STREAM
    launched: list = field(default_factory=list)
    encoded: int = 0
    kernels: set = field(default_factory=set)

    def __post_init__(self):
        self.utils = SimpleNamespace(fill_tma_descriptor=self.encode)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return self.stream

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def descriptors(self, count):
        """What the compiler says of a kernel's descriptors."""
        layout = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False}
        return [layout | {"block_size": [64, i]} for i in range(count)]

    def launcher(self, src, about):
        """Triton's launcher of this kind of device."""
        return FakeLauncher(self, src, about)

    def forget(self):
        """Let no kernel remember what was compiled here."""
        for kernel in self.kernels:
            kernel.device_caches.pop(self.device, None)

    def encode(self, address, swizzle, size, kind, block, shape, strides, padding):
        self.encoded += 1
        return Map(address, (swizzle, size, kind, *block, *shape, *strides, padding))

    def launch(self, *args):
        self.launched.append(args)

    def compile(self, src, target, options):
        """What the JIT gets for a kernel and the types of its arguments."""
        self.kernels.add(src.fn)
        kinds = [kind for kind in src.signature.values() if kind.startswith("tensordesc")]
        about = self.descriptors(len(kinds))
        metadata = SimpleNamespace(tensordesc_meta=about, num_warps=options["num_warps"])
        packed = options["num_warps"], 1, options.get("maxnreg") or 0
        return SimpleNamespace(
            src=src, metadata=metadata, packed_metadata=packed, function=next(_functions),
            run=self.launcher(src, about), launch_metadata=_metadata,
        )  # fmt: skip


_functions = itertools.count(1000)


def _metadata(grid, stream, *args):
    return None


class FakeLauncher(CudaLauncher):
    """Triton's launcher before a function in C that is not there."""

    def __init__(self, driver, src, about):
        self.launch = wrap_handle_tensordesc(driver.launch, src.signature, about)
        self.num_ctas, self.launch_cooperative_grid, self.launch_pdl = 1, False, False
        self.global_scratch_size = self.global_scratch_align = 0
        self.profile_scratch_size = self.profile_scratch_align = 0
