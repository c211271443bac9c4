#!/usr/bin/env bash
# Rollouts and empty updates of this checkout beside those of another one, both at the same time, each on half of the
# cores, which they exchange in every turn. An idle machine with 16 cores needs about seven and a half minutes.
#
#     benchmarks/run_compare_reference.sh REFERENCE_CHECKOUT OUT
#
# OUT gets one JSON file per part, the shortest first. TURNS (4, even) is how often each checkout runs, COMMIT the
# name of the reference where git cannot say. It needs no network, and python3 (PYTHON) with msgspec, aiohttp,
# xxhash, numpy and rich.
set -euo pipefail
reference=$(realpath "${1:?a checkout to compare with}")
out=$(realpath -m "${2:?a folder for the results}")
turns=${TURNS:-4}
commit=${COMMIT:-$(git -C "$reference" rev-parse --short HEAD)}
cd "$(dirname "$0")"
mkdir -p "$out"

compare() {
    local part=$1 benchmark=$2
    shift 2
    "${PYTHON:-python3}" compare_checkouts.py "$benchmark" "$reference" --at-once --turns "$turns" \
        --commit "$commit" --json "$out/$part.json" -- "$@"
}

compare control bench_control
compare throughput bench_rollout --only throughput
compare latency bench_rollout --only latency
