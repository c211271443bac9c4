#!/usr/bin/env bash
# Runs the test and the benchmark of replicas of weights on GPUs. Requires two NVIDIA GPUs, torch with CUDA, and msgspec,
# xxhash, aiohttp, rich and pytest. Uses NIXL and Mooncake if they are installed. Results go to RESULT_FOLDER.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_replica.sh RESULT_FOLDER [options of bench_replica_gpu.py]}
shift
failed=0
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/gpus.txt"
timeout 120 python3 benchmarks/gpu/bench_replica_gpu.py --json "$OUT/bench_replica_gpu.json" "$@" 2>&1 |
  tee "$OUT/bench_replica_gpu.txt" || failed=1
timeout 240 python3 -m pytest -q -p no:cacheprovider -o addopts= -W ignore \
  tests/transfer/test_replica_on_gpu.py 2>&1 | tail -60 | tee "$OUT/test_replica_on_gpu.txt" || failed=1
exit $failed
