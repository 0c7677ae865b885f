"""Making programs ready: from the bundle or the compiler, once, and on the driver before a call."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.implementations import KERNELS
from tests.runtime.bundled import norm, rehearsed

import headstart
from headstart.ops.convolution.triton.norm import norm_kernel
from headstart.runtime import bundle_launch, bundle_warmup
from headstart.runtime.bundle_warmup import make_ready

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")
CPU = torch.device("cpu")


@pytest.fixture
def waiting(driver, monkeypatch):
    for name in (bundle_launch.BUNDLE, bundle_launch.JIT):
        monkeypatch.delenv(name, raising=False)
    driver.kernels.add(norm_kernel)
    return driver


def both():
    return [*rehearsed().values(), *rehearsed(channels=96).values()]


def test_a_call_finds_its_program(waiting, monkeypatch):
    told = []
    counted = make_ready(both(), CPU, 2, lambda *given: told.append(given))
    assert counted[:2] == (0, 2)
    assert [(done, count, name) for done, count, name in told] == [
        (1, 2, "norm_kernel"), (2, 2, "norm_kernel"),
    ]  # fmt: skip
    assert make_ready(both(), CPU)[:2] == (0, 0)
    monkeypatch.setenv(bundle_launch.JIT, "forbid")
    norm("cpu")
    norm("cpu", channels=96)
    assert len(waiting.launched) == 2


def test_what_the_bundle_holds_is_loaded_into_the_driver(waiting, bundle, monkeypatch):
    asked = []
    waiting.utils.get_device_properties = lambda device: {"max_shared_mem": 2**20}
    waiting.utils.load_binary = lambda name, data, shared, device: (
        asked.append((name, data[:4], device)) or (1, 2, 3, 0, 1024)
    )
    waiting.launcher_cls = lambda source, metadata: SimpleNamespace(metadata=metadata)
    monkeypatch.setenv(bundle_launch.BUNDLE, str(bundle.path))
    assert make_ready(rehearsed().values(), CPU, 1)[:2] == (1, 0)
    assert asked == [("norm_kernel", b"\x7fELF", waiting.device)]


def test_what_may_not_be_compiled_ends_it(waiting, bundle, monkeypatch):
    monkeypatch.setenv(bundle_launch.JIT, "forbid")
    with pytest.raises(headstart.CompileForbidden, match="norm_kernel"):
        make_ready(both(), CPU, 1)
    assert not norm_kernel.device_caches[waiting.device][0]


def test_a_device_that_is_not_here_is_an_error():
    for device in ("cpu", "meta", "cuda" if not torch.cuda.is_available() else "cpu"):
        with pytest.raises(
            ValueError, match=f"device: expected a CUDA .* that is here, got {device}"
        ):
            headstart.warmup("gpt-oss-20b", device=device)


def test_the_models_calls_on_the_device_are_what_is_readied(waiting, monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(bundle_warmup, "target_of", lambda device: headstart_target)
    monkeypatch.setattr(bundle_warmup, "processors", lambda device: 114)
    monkeypatch.setattr(bundle_warmup, "rows_of", lambda device: {})
    monkeypatch.setattr(
        bundle_warmup, "make_ready", lambda wanted, *rest: given.extend([*wanted, rest])
    )
    from headstart.runtime.static import Target

    headstart_target = Target("cuda:86", "cuda", 86, 32)  # in no list of targets
    headstart.warmup("tiny-gpt-oss", device="cuda:1", jobs=3)
    *wanted, rest = given
    assert rest == (torch.device("cuda:1"), 3, None)
    assert {program.target_name for program in wanted} == {"cuda:86"}
    assert {program.name for program in wanted} > {"extend_kernel", "unified_kernel"}
    for words, wrong in (
        ("models: expected some of", {"models": ["gpt-oss-20b", "x"]}),
        ("models: expected names of profiles, got 3", {"models": 3}),
        ("models: expected names of profiles", {"models": [3]}),
        ("jobs: expected an integer >= 1, got 0", {"jobs": 0}),
        ("device: expected a CUDA .* here, got cuda:2", {"device": "cuda:2"}),
    ):
        with pytest.raises(ValueError, match=words):
            headstart.warmup(**{"models": "gpt-oss-20b", "device": "cuda"} | wrong)


def test_threads_share_one_cache_of_a_kernel(waiting, monkeypatch):
    """A device's cache that two threads make at once would lose what the earlier one put there."""
    caches: Any = norm_kernel.device_caches
    made, makes = [], caches.default_factory

    def counting():
        made.append(threading.current_thread())
        return makes()

    monkeypatch.setattr(caches, "default_factory", counting)
    assert make_ready(both(), CPU, 2)[:2] == (0, 2)
    assert made == [threading.current_thread()]
