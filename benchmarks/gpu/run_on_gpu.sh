#!/usr/bin/env bash
# Tests and benchmarks of the GPU data path. Needs NVIDIA GPUs (two or more for the benchmark), torch with CUDA, what
# Windlass needs, and pytest with pytest-asyncio, pytest-timeout, hypothesis and trustme; Mooncake and NIXL are tested
# where they are installed. Results go to the folder that is given. Replicas: run_replica.sh.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_on_gpu.sh RESULT_FOLDER [options of bench_nvlink.py]}
shift
failed=0
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/gpus.txt"
timeout "${TESTS_S:-420}" python3 -m pytest -q -p no:cacheprovider -W default -m gpu tests \
  --ignore tests/transfer/test_replica_on_gpu.py --ignore tests/jobs 2>&1 | tail -60 | tee "$OUT/tests.txt" || failed=1
timeout 420 python3 benchmarks/gpu/bench_nvlink.py --json "$OUT/bench_nvlink.json" "$@" 2>&1 |
  tee "$OUT/bench_nvlink.txt" || failed=1
exit $failed
