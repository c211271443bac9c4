#!/usr/bin/env bash
# Trains with TRL's GRPOTrainer and vLLM on one GPU, with Windlass's sync and with TRL's own. Requires vLLM 0.24, TRL 1.16, datasets, peft,
# transformers and torch 2.11 with CUDA, installed or on PYTHONPATH.
#   run_trl_colocated.sh RESULT_FOLDER [options of prove_trl_colocated.py]
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_trl_colocated.sh RESULT_FOLDER [options of prove_trl_colocated.py]}
shift
mkdir -p "$OUT"
. benchmarks/gpu/gpu_environment.sh
export TRL_EXPERIMENTAL_SILENCE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
LOGS=$(mktemp -d)
timeout -k 10 "${DEADLINE_S:-560}" python3 benchmarks/gpu/prove_trl_colocated.py --json "$OUT/trl_colocated.json" \
  --logs "$LOGS" "$@" 2>&1 | tee "$OUT/trl_colocated.txt"
STATUS=${PIPESTATUS[0]}
for LOG in "$LOGS"/*.log; do
  echo "===== $(basename "$LOG")"
  tail -c 60000 "$LOG"
done > "$OUT/trl_colocated.logs"
exit "$STATUS"
