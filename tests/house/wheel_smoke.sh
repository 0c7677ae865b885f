#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh environment outside the repository and uses it there.
# PYTHON: an interpreter whose pip can build the wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$place/dist" .
"$python" -m venv "$place/venv"
grep -E '^(torch|triton|transformers|numpy)==' requirements-dev.txt >"$place/pins.txt"
wheel=$(echo "$place"/dist/headstart-*.whl)
"$place/venv/bin/python" -m pip install --quiet \
    --constraint "$place/pins.txt" --requirement <(grep '^torch==' "$place/pins.txt") \
    "headstart[cli,models] @ file://$wheel"

cd "$place"
venv/bin/python - <<'PYTHON'
from importlib.resources import files
from pathlib import Path

import headstart
from headstart import checkpoints

package = Path(headstart.__file__).parent
if "site-packages" not in str(package):
    raise SystemExit(f"wheel-smoke: headstart was imported from {package}, not from the wheel")
for name in checkpoints.names():
    for file in ("config.json", "model.safetensors"):
        if not (checkpoints.path(name) / file).is_file():
            raise SystemExit(f"wheel-smoke: {name}/{file} is missing from the wheel")
tables = files("headstart") / "tables"
if not tables.is_dir():
    raise SystemExit("wheel-smoke: headstart/tables is missing from the wheel")
found = sorted(entry.name for entry in tables.iterdir() if entry.name.endswith(".json"))
print(f"wheel-smoke: headstart {headstart.__version__}, {len(found)} tables {found}")
PYTHON
sample=$(venv/bin/python -c 'from headstart import checkpoints; print(checkpoints.sample_text())')
venv/bin/headstart env
for model in $(venv/bin/python -c 'from headstart import checkpoints; print(*checkpoints.names())'); do
    venv/bin/headstart prefill --model "$model" --prompt-file "$sample" --compare --prefix-cache
done
echo "wheel-smoke: passed"
