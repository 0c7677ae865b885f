"""Engines that several tests look at: each runs once, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("engine_run.py")
DRAFTS = {
    "enable_prefix_caching": False,  # vLLM's own bookkeeping of both together needs Triton
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    },
}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of the tiny checkpoints in vLLM's form, by name."""
    from headstart import checkpoints
    from headstart.integrations.vllm.tiny import write

    folder = tmp_path_factory.mktemp("models")
    return {name: write(name, folder / name) for name in checkpoints.names()}


@pytest.fixture(scope="session")
def engine(models, tmp_path_factory):
    """engine(name, dtype, plugin=, **options) -> what an engine found; the same call runs once."""
    kept = {}

    def run(name, dtype, *, plugin, jobs=("prompts", "prefixes", "crowd"), **options):
        asked = {"model": str(models[name]), "dtype": dtype, "jobs": jobs, "options": options}
        key = json.dumps([asked, plugin])
        if key not in kept:
            place = tmp_path_factory.mktemp("run") / "result.json"
            ended = subprocess.run(
                [sys.executable, RUN, json.dumps(asked), place],
                env=os.environ | {"VLLM_PLUGINS": "headstart" if plugin else ""},
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert ended.returncode == 0, ended.stderr[-4000:]
            kept[key] = json.loads(place.read_text())
        return kept[key]

    return run
