"""Where programs come from: the bundle, else the compiler, else nowhere."""

import logging
import threading
import time
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from tests.implementations import KERNELS  # noqa: E402
from tests.runtime.bundled import norm, rehearsed  # noqa: E402

import headstart  # noqa: E402
from headstart.ops.convolution.triton.norm import norm_kernel  # noqa: E402
from headstart.runtime import bundle_launch  # noqa: E402
from headstart.runtime.bundle_programs import sources  # noqa: E402

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")


@pytest.fixture
def launching(driver, monkeypatch):
    """Launches on the fake driver, with no setting and counters at zero."""
    for name in (bundle_launch.BUNDLE, bundle_launch.JIT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bundle_launch, "_programs", bundle_launch.Programs(0, 0, 0.0))
    driver.kernels.add(norm_kernel)
    return driver


def kept(driver):
    return norm_kernel.device_caches[driver.device][0]


def test_a_launch_has_the_key_that_its_rehearsal_has(launching, monkeypatch):
    asked = []
    monkeypatch.setattr(
        bundle_launch, "obtain", lambda program: asked.append(program) or program.compile()
    )
    norm("cpu")
    assert [program.key for program in asked] == list(rehearsed())
    assert [program.slot for program in asked] == list(kept(launching))
    norm("cpu", rows=33)
    assert len(asked) == 1
    norm("cpu", channels=96)
    assert len(asked) == 2


def test_what_decides_a_program_decides_its_key():
    keys = [
        *rehearsed(), *rehearsed("cuda:80"), *rehearsed("hip:gfx942"), *rehearsed(channels=96),
    ]  # fmt: skip
    assert len(set(keys)) == 4
    assert [*rehearsed(rows=33)] == keys[:1]


@pytest.mark.parametrize("what", ["sources", "Triton", "settings"])
def test_another_build_is_another_program_of_the_same_specialisation(monkeypatch, what):
    (before,) = rehearsed().values()
    assert before.key == next(iter(rehearsed()))
    if what == "sources":
        monkeypatch.setattr(norm_kernel, "starting_line_number", 0)
    elif what == "Triton":
        monkeypatch.setattr(triton, "__version__", "3.6.1")
    else:
        monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    (after,) = rehearsed().values()
    assert after.key != before.key
    assert after.specialisation == before.specialisation


FACTOR, UNUSED = tl.constexpr(2), tl.constexpr(2)


@triton.jit
def doubled(x):
    return x * FACTOR


@triton.jit
def doubling(place):
    tl.store(place, doubled(tl.load(place)))


def test_a_key_holds_what_a_kernel_reaches_and_not_which_was_met_first(monkeypatch):
    before = sources(doubling)
    assert doubled.cache_key
    assert doubling.cache_key
    assert sources(doubling) == before
    monkeypatch.setitem(globals(), "UNUSED", tl.constexpr(3))
    assert sources(doubling) == before
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "FACTOR", tl.constexpr(3))
        assert sources(doubling) != before
    monkeypatch.setattr(doubled, "_src", doubled.src.replace("*", "+"))
    assert sources(doubling) != before


def test_where_triton_lies_does_not_matter_but_its_libraries_do(monkeypatch, tmp_path):
    (before,) = rehearsed()
    library = Path(triton.__file__).parent / "backends/nvidia/lib/libdevice.10.bc"
    elsewhere = tmp_path / library.name
    elsewhere.write_bytes(library.read_bytes())
    monkeypatch.setenv("TRITON_LIBDEVICE_PATH", str(elsewhere))
    assert list(rehearsed()) == [before]
    other = tmp_path / "other.bc"
    other.write_bytes(library.read_bytes()[:-1])
    monkeypatch.setenv("TRITON_LIBDEVICE_PATH", str(other))
    assert list(rehearsed()) != [before]


def test_programs_are_counted_where_they_come_from(launching, bundle, monkeypatch):
    norm("cpu")
    assert headstart.programs()[:2] == (0, 1)
    norm("cpu")
    assert headstart.programs()[:2] == (0, 1)
    launching.forget()
    monkeypatch.setenv(bundle_launch.BUNDLE, str(bundle.path))
    taken = bundle_launch.obtain(next(iter(rehearsed().values())))
    assert headstart.programs()[:2] == (1, 1)
    # The driver is not there, but what it would be given is what was built.
    built = next(a for a in bundle.artefacts() if a.fields["target"] == "cuda:90")
    assert taken.kernel == built.program.read_bytes()
    assert taken.kernel[:4] == b"\x7fELF"
    assert taken.packed_metadata[0] == taken.metadata.num_warps > 0
    assert taken.metadata.target.arch == 90


def test_a_launch_is_given_what_the_bundle_holds(launching, bundle, monkeypatch):
    monkeypatch.setenv(bundle_launch.BUNDLE, str(bundle.path))
    monkeypatch.setenv(bundle_launch.JIT, "forbid")
    with pytest.raises(AttributeError, match="launcher_cls"):  # it goes to the driver that is not
        norm("cpu")
    assert [type(x).__name__ for x in kept(launching).values()] == ["CompiledKernel"]
    assert headstart.programs()[:2] == (1, 0)


def test_threads_wait_for_the_first_that_compiles(launching, monkeypatch):
    compile_it, began = launching.compile, threading.Barrier(8)

    def slowly(*given, **options):
        time.sleep(0.2)
        return compile_it(*given, **options)

    def call():
        began.wait()
        norm("cpu")

    monkeypatch.setattr(triton.compiler, "compile", slowly)
    launching.forget()
    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launching.launched) == 8
    assert headstart.programs()[:2] == (0, 1)


def test_a_cache_that_another_thread_replaced_has_what_was_compiled(launching, monkeypatch):
    compile_it = launching.compile

    def overtaken(*given, **options):
        norm_kernel.device_caches.pop(launching.device)  # the next look makes another
        return compile_it(*given, **options)

    monkeypatch.setattr(triton.compiler, "compile", overtaken)
    launching.forget()
    norm("cpu")
    assert len(kept(launching)) == 1
    assert headstart.programs()[:2] == (0, 1)


def test_forbid_names_kernel_and_key(launching, bundle, monkeypatch):
    monkeypatch.setenv(bundle_launch.JIT, "forbid")
    (key,) = rehearsed(channels=96)
    with pytest.raises(
        headstart.CompileForbidden, match=f"norm_kernel for cuda:90, key {key}.*set"
    ):
        norm("cpu", channels=96)
    monkeypatch.setenv(bundle_launch.BUNDLE, str(bundle.path))
    with pytest.raises(
        headstart.CompileForbidden, match=f"{key}.* not in the bundle {bundle.path}"
    ):
        norm("cpu", channels=96)
    assert headstart.programs()[:2] == (0, 0)
    assert not kept(launching)
    assert not launching.launched


def test_warn_logs_what_is_compiled_with_its_time(launching, monkeypatch, caplog):
    monkeypatch.setenv(bundle_launch.JIT, "warn")
    with caplog.at_level(logging.WARNING, "headstart"):
        norm("cpu")
        norm("cpu")
    (key,) = rehearsed()
    (record,) = caplog.records
    assert f"compiled norm_kernel for cuda:90, key {key} in 0." in record.getMessage()


def test_a_policy_that_does_not_exist_is_an_error(launching, monkeypatch):
    monkeypatch.setenv(bundle_launch.JIT, "never")
    with pytest.raises(ValueError, match=r"HEADSTART_JIT: expected one of .*'never'"):
        norm("cpu")


def test_a_bundle_that_is_not_there_is_an_error(launching, monkeypatch, tmp_path):
    monkeypatch.setenv(bundle_launch.BUNDLE, str(tmp_path / "none"))
    with pytest.raises(ValueError, match="none is no directory"):
        norm("cpu")
    assert not launching.launched


def test_hooks_of_triton_hear_what_is_compiled(launching, monkeypatch):
    heard = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda **given: heard.append(given["fn"].name),
    )
    norm("cpu")
    assert [name.split(".")[-1] for name in heard] == ["norm_kernel"]


def test_what_an_artefact_says_holds_no_path(bundle):
    for artefact in bundle.artefacts():
        for file in (artefact.metadata, artefact.folder / "artefact.json"):
            assert "/" not in file.read_text(), file
