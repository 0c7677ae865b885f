"""The README's examples run, and its links and commands lead somewhere."""

import re
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_examples_run():
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        assert "assert" in block
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            exec(compile(block, "README.md", "exec"), {})  # each on its own


def test_links_lead_to_files():
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
            assert (ROOT / target).exists(), f"{document}: {target}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_benchmark_is_described():
    listed = set(re.findall(r"`(\w+\.py)`", (ROOT / "benchmarks/README.md").read_text()))
    assert listed == {path.name for path in (ROOT / "benchmarks").glob("*.py")}
