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

(cd src/headstart && find . -type f -not -path '*/__pycache__/*' | sort) >"$place/files.txt"

cd "$place"
venv/bin/python - <<'PYTHON'
from pathlib import Path

import headstart

package = Path(headstart.__file__).parent
if "site-packages" not in package.parts:
    raise SystemExit(f"wheel-smoke: headstart was imported from {package}, not from the wheel")
files = Path("files.txt").read_text().split()
if missing := [name for name in files if not (package / name).is_file()]:
    raise SystemExit(f"wheel-smoke: missing from the wheel: {missing}")
data = [name for name in files if not name.endswith(".py")]
print(f"wheel-smoke: headstart {headstart.__version__}, {len(files)} files, data: {data}")
PYTHON
venv/bin/python -c "from headstart import checkpoints as c; open('prompt', 'wb').write(c.sample_text().read_bytes()[:1000])"
venv/bin/headstart env
for model in $(venv/bin/python -c 'from headstart import checkpoints; print(*checkpoints.names())'); do
    venv/bin/headstart prefill --model "$model" --prompt-file prompt --compare --prefix-cache
done
echo "wheel-smoke: passed"
