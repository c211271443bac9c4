#!/usr/bin/env bash
# Updates plain vLLM servers from an FSDP2 trainer on one or two GPUs. Requires Windlass's packages, and vLLM 0.24, transformers and torch
# 2.11 with CUDA, installed or on PYTHONPATH.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_prove_vllm_plugin.sh RESULT_FOLDER [options of prove_vllm_plugin.py]}
shift
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
LOGS=$(mktemp -d)
timeout -k 10 "${DEADLINE_S:-450}" python3 benchmarks/gpu/prove_vllm_plugin.py --json "$OUT/prove_vllm_plugin.json" \
  --logs "$LOGS" "$@" 2>&1 | tee "$OUT/prove_vllm_plugin.txt"
STATUS=${PIPESTATUS[0]}
for LOG in "$LOGS"/*.log; do
  echo "===== $(basename "$LOG")"
  tail -c 12000 "$LOG"
done > "$OUT/prove_vllm_plugin.logs"
exit $STATUS
