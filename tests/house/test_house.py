"""What holds for the repository as a whole."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 600
# Folders and hosts of the machines that the project is developed on, spelt so as not to match here.
FOREIGN = re.compile(
    r"/work[/]|/opt[/]wheels|/opt[/]pypi|/tmp[/]team|/root[/]"
    r"|pypi[.]org|pythonhosted[.]org|npmjs[.](?:com|org)|deb[.]debian[.]org|download[.]pytorch"
)


def tracked() -> list[Path]:
    """Files that git keeps; without git (an unpacked archive) there is nothing to say."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = listed.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_no_source_file_is_longer_than_a_reader_can_hold():
    long = {}
    for path in tracked():
        if path.suffix in (".py", ".sh") or path.name == "Makefile":
            count = len(path.read_text().splitlines())
            if count > MOST_LINES:
                long[str(path.relative_to(ROOT))] = count
    assert not long


def test_nothing_names_a_machine_or_a_registry():
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(text.splitlines(), 1)
            if FOREIGN.search(line)
        ]
    assert not found


@pytest.mark.parametrize("drawer", ["utils", "common", "helpers", "misc"])
def test_no_drawers(drawer):
    assert not [path for path in tracked() if drawer in (path.stem, *path.relative_to(ROOT).parts)]


def test_every_make_target_says_what_it_does():
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    told = re.findall(r"^([a-z-]+):.*## \S", makefile, re.M)
    assert sorted(phony.split()) == sorted(told)


def test_every_kernel_is_launched_where_launches_are_recorded():
    """A launch beside `launcher.start` would be missing from the calls that repeat it."""
    direct = re.compile(r"\bkernel\[|\w+_kernel\[")
    found = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if ROOT / "src" in path.parents and path.suffix == ".py" and direct.search(path.read_text())
    ]
    assert found == ["src/headstart/runtime/launcher.py"]


MAKERS = re.compile(
    r"arange|as_tensor|empty(_strided)?|eye|full|linspace|ones|rand(int|n|perm)?|(scalar_)?tensor"
    r"|zeros"
)


def test_no_tensor_is_made_where_a_process_happens_to_make_its_own():
    """Without a device, a tensor follows `torch.set_default_device`."""
    found = []
    for folder in ("ops", "runtime", "integrations"):
        for path in sorted((ROOT / "src/headstart" / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and MAKERS.fullmatch(node.func.attr)
                    and ast.unparse(node.func.value) == "torch"
                    and not any(one.arg == "device" for one in node.keywords)
                ):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found
