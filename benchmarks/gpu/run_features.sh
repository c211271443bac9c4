#!/usr/bin/env bash
# Tests every feature between GPU memories, then compares NCCL broadcasts with bare NCCL of the same bytes, then measures a whole
# update over NVLink with this checkout and, if given, with an older one. Requires two GPUs, torch with CUDA, pytest with its
# plugins and Windlass's packages; for relays and networks also nixl or mooncake.
#   run_features.sh RESULT_FOLDER [OLDER_CHECKOUT]
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_features.sh RESULT_FOLDER [OLDER_CHECKOUT]}
OLDER=${2:-}
failed=0
. benchmarks/gpu/gpu_environment.sh
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/gpus.txt"
step() {
  local limit=$1 name=$2
  shift 2
  timeout -k 10 "$limit" "$@" > "$OUT/$name.txt" 2>&1 || { failed=1; echo "$name: status $?"; }
  tail -12 "$OUT/$name.txt"
}
step 400 features python3 tools/features.py run gpu --at-once 3 --json "$OUT/features_gpu.json"
step 90 xccl python3 benchmarks/bench_xccl.py --fabric nccl --device cuda --mib 16384 --bucket-mib 256 --dtype bfloat16 \
  --json "$OUT/bench_xccl_nccl.json"
for TURN in 1 2; do
  [ -z "$OLDER" ] || PYTHONPATH="$OLDER/src:$OLDER/benchmarks:$OLDER:${PYTHONPATH#*benchmarks:}" \
    step 100 "nvlink_older_$TURN" python3 "$OLDER/benchmarks/gpu/bench_nvlink.py" --layers 16 --skip-pieces --json "$OUT/bench_nvlink_older_$TURN.json"
  step 100 "nvlink_$TURN" python3 benchmarks/gpu/bench_nvlink.py --layers 16 --skip-pieces --json "$OUT/bench_nvlink_$TURN.json"
done
exit $failed
