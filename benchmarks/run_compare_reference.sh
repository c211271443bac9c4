#!/usr/bin/env bash
# Compares rollouts and empty updates of this checkout with another one. Runs of both run at the same time on separate
# cores, and the two swap cores in every turn. With four pairs at a time and 32 idle cores, two turns take about 12
# minutes.
#
#     benchmarks/run_compare_reference.sh REFERENCE_CHECKOUT OUT
#
# OUT gets one JSON file per part, the shortest part first. Variables: AT_ONCE (4), runs of each checkout at a time; TURNS
# (2, even), number of turns; PARTS, parts to run; COMMIT, name of the reference if git does not know it. The script needs
# no network, and python3 (PYTHON) with msgspec, aiohttp, xxhash, numpy, rich and, for update and xccl, torch.
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
