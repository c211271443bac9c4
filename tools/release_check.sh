#!/usr/bin/env bash
# What must hold before a release, but for `make test-all`: wheel and sdist are built and well formed, an empty environment that has the
# wheel alone runs `windlass doctor`, and the version is the same everywhere.
#
#   bash tools/release_check.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
grep -q "^version: $version$" CITATION.cff || { echo "CITATION.cff: version is not $version"; exit 1; }
grep -q "^## \[$version\]" CHANGELOG.md || { echo "CHANGELOG.md: no entry for $version"; exit 1; }

"$python" -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet --disable-pip-version-check build twine check-wheel-contents
"$folder/tools/bin/python" -m build --outdir "$folder/dist" .
"$folder/tools/bin/twine" check --strict "$folder"/dist/*
"$folder/tools/bin/check-wheel-contents" "$folder"/dist/*.whl

"$python" -m venv "$folder/empty"
"$folder/empty/bin/pip" install --quiet --disable-pip-version-check "$folder"/dist/*.whl
cd "$folder"
test "$(empty/bin/windlass --version)" = "windlass $version"
COLUMNS=80 empty/bin/windlass doctor
echo "release check: windlass $version is well formed"
