#!/usr/bin/env bash
# Rollouts and empty updates of this checkout beside those of another one, at the same time, each run on cores of its
# own, which the two exchange in every turn. Four pairs at once on an idle machine with 32 cores need about 12
# minutes for two turns.
#
#     benchmarks/run_compare_reference.sh REFERENCE_CHECKOUT OUT
#
# OUT gets one JSON file per part, the shortest first. AT_ONCE (4) is the number of runs of each at a time, TURNS
# (2, even) how often, PARTS which ones, COMMIT the name of the reference where git cannot say. It needs no network,
# and python3 (PYTHON) with msgspec, aiohttp, xxhash, numpy, rich and, for update and xccl, torch.
set -euo pipefail
reference=$(realpath "${1:?a checkout to compare with}")
out=$(realpath -m "${2:?a folder for the results}")
turns=${TURNS:-2}
parts=${PARTS:-control throughput journal idle update xccl latency}
commit=${COMMIT:-$(git -C "$reference" rev-parse --short HEAD)}
cd "$(dirname "$0")"
mkdir -p "$out"

for part in $parts; do
    benchmark=bench_rollout
    given=(--only "$part")
    if [ "$part" = control ]; then
        benchmark=bench_control
        given=()
    fi
    "${PYTHON:-python3}" compare_checkouts.py "$benchmark" "$reference" --at-once "${AT_ONCE:-4}" --turns "$turns" \
        --commit "$commit" --json "$out/$part.json" -- "${given[@]}"
done
