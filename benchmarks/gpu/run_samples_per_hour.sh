#!/usr/bin/env bash
# Measures samples per hour of one job on one GPU, with Windlass's updates and with vLLM's own (`disk`, `ipc`), in the same run.
# Requires the packages of run_demo.sh. --ipc-ray-stub FOLDER contains a placeholder of ray, which vLLM's backend imports.
# WAYS="in_place disk" DEADLINE_S=390
#   run_samples_per_hour.sh RESULT_FOLDER [--ipc-ray-stub FOLDER] [options of bench_samples_per_hour.py]
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_samples_per_hour.sh RESULT_FOLDER [options of bench_samples_per_hour.py]}
shift
mkdir -p "$OUT"
. benchmarks/gpu/gpu_environment.sh
if [ "${1:-}" = --ipc-ray-stub ]; then
  export PYTHONPATH="$PYTHONPATH:$2"
  shift 2
fi
LOGS=$(mktemp -d)
timeout -s INT -k 20 "${DEADLINE_S:-390}" python3 benchmarks/bench_samples_per_hour.py --device cuda --logs "$LOGS" \
  --ways ${WAYS:-in_place staged disk ipc} --json "$OUT/bench_samples_per_hour.json" "$@" 2>&1 | tee "$OUT/bench_samples_per_hour.txt"
STATUS=${PIPESTATUS[0]}
for LOG in "$LOGS"/*/*.log; do
  echo "===== ${LOG#"$LOGS"/}"
  tail -c 20000 "$LOG"
done > "$OUT/bench_samples_per_hour.logs" 2>/dev/null
exit "$STATUS"
