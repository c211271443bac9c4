#!/usr/bin/env bash
# Measures Windlass from live Megatron-core ranks, NIXL between GPUs, and checkpoint-engine, on one machine in one run.
# Requires the packages of run_on_gpu.sh, and megatron-core 0.16.1, nixl 1.5.1 with nixl-cu13, checkpoint-engine 0.4.2.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_comparisons.sh RESULT_FOLDER [megatron pieces checkpoint_engine nixl_tests]}
shift
STEPS=" ${*:-megatron pieces checkpoint_engine nixl_tests} "
failed=0
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/gpus.txt"
step() { # seconds, name, command
  local limit=$1 name=$2 began=$SECONDS
  shift 2
  [[ $STEPS == *" $name "* ]] || return 0
  echo "--- $name"
  timeout "$limit" "$@" 2>&1 | grep --line-buffered -v -E 'Warning:|warnings.warn' | tee "$OUT/$name.txt" || failed=1
  echo "--- $name: $((SECONDS - began)) s"
}
# Compiling Megatron's helpers takes longer than the step that uses them.
step 200 megatron env TORCHDYNAMO_DISABLE=1 python3 benchmarks/gpu/bench_megatron.py --json "$OUT/bench_megatron.json"
step 120 pieces python3 benchmarks/gpu/bench_nvlink.py --skip-updates --nixl --kinds contiguous --json "$OUT/bench_pieces.json"
step 130 checkpoint_engine python3 benchmarks/gpu/bench_checkpoint_engine.py --json "$OUT/bench_checkpoint_engine.json"
step 90 nixl_tests python3 -m pytest -q --maxfail=4 -p no:cacheprovider -o addopts= -W ignore -s tests/transports/test_nixl_cuda.py
exit $failed
