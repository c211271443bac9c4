#!/usr/bin/env bash
# A trainer and a live engine take turns on the same GPUs. Requires the packages of run_live_engine.sh; one GPU, or two with `--tp 2 --trainers 2`.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_prove_turns.sh RESULT_FOLDER [options of prove_turns.py]}
shift
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
# SGLang preloads torch_memory_saver into its ranks, which needs the CUDA runtime before torch loads it.
CUDART=$(python3 -c 'import pathlib, sys
roots = [pathlib.Path(p) / "nvidia" for p in sys.path if p] + [pathlib.Path("/usr/local/cuda")]
found = [f.parent for root in roots if root.is_dir() for f in sorted(root.rglob("libcudart.so.1*"))]
print(found[0] if found else "")')
export LD_LIBRARY_PATH="$CUDART${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
LOGS=$(mktemp -d)
timeout -k 10 "${DEADLINE_S:-560}" python3 benchmarks/gpu/prove_turns.py --json "$OUT/prove_turns.json" \
  --logs "$LOGS" "$@" 2>&1 | tee "$OUT/prove_turns.txt"
STATUS=${PIPESTATUS[0]}
for LOG in "$LOGS"/*.log; do
  echo "===== $(basename "$LOG")"
  tail -c 20000 "$LOG"
done > "$OUT/prove_turns.logs"
exit $STATUS
