"""The fake driver as one of AMD, whose launcher takes other things first and has no tensor maps."""

from tests.runtime.fake_driver import FakeDriver
from triton.backends.amd.driver import HIPLauncher, make_launcher, wrap_handle_tensordesc
from triton.backends.compiler import GPUTarget

__all__ = ["make_launcher"]  # by which a launcher of this kind is known


class FakeHipDriver(FakeDriver):
    """Descriptors are spelled out as an address and numbers."""

    def get_current_target(self):
        return GPUTarget("hip", "gfx942", 64)

    def descriptors(self, count):
        return None

    def launcher(self, src, about):
        return FakeHipLauncher(self, src, about)


class FakeHipLauncher(HIPLauncher):
    """Triton's launcher before a function in C that is not there."""

    def __init__(self, driver, src, about):
        self.launch = wrap_handle_tensordesc(driver.launch, src.signature, about)
        self.launch_cooperative_grid = False
        self.profile_scratch_size = self.profile_scratch_align = 0
