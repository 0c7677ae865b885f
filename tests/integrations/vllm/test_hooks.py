"""What the plugin says before it hooks anything in."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from headstart.integrations.vllm import hooks, register

ROOT = Path(__file__).parents[3]


def test_vllm_finds_the_plugin_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["headstart"].split(":")
    assert getattr(import_module(module), name) is register


def test_loading_the_plugin_imports_nothing_that_could_fail():
    # vLLM swallows an error of importing a plugin and would run without it.
    code = (
        "import sys, headstart.integrations.vllm;"
        "print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("given", ["", "both", "attention,rule", "on"])
def test_other_words_are_refused(given):
    with pytest.raises(RuntimeError, match=r"HEADSTART_VLLM: expected off, or attention and delta"):
        hooks.parts(given, on_cpu=True)


def test_parts_may_be_named_in_any_order():
    assert hooks.parts("delta, attention", on_cpu=False) == ("attention", "delta")


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.32.0", "dev", "0.320.0"])
def test_other_versions_are_refused_by_name(version):
    with pytest.raises(RuntimeError, match=rf"serves vLLM 0.32.x, got {version}"):
        hooks.expect_version(version)
