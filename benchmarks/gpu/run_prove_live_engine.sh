#!/usr/bin/env bash
# Compares live engines on GPUs with fresh ones, case by case. Requires the packages of run_live_engine.sh; 4 GPUs, or 2 with `--tp 1`.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_prove_live_engine.sh RESULT_FOLDER [options of prove_live_engine.py]}
shift
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
LOGS=$(mktemp -d)
timeout -k 10 "${DEADLINE_S:-560}" python3 benchmarks/gpu/prove_live_engine.py --json "$OUT/prove_live_engine.json" \
  --logs "$LOGS" "$@" 2>&1 | tee "$OUT/prove_live_engine.txt"
STATUS=${PIPESTATUS[0]}
for LOG in "$LOGS"/*.log; do
  echo "===== $(basename "$LOG")"
  tail -c 40000 "$LOG"
done > "$OUT/prove_live_engine.logs"
exit $STATUS
