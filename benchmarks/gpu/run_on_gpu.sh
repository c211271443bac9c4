#!/usr/bin/env bash
# Runs tests and benchmarks of the GPU data path. Requires NVIDIA GPUs (two or more for the benchmark), torch with CUDA,
# Windlass's packages, and pytest with pytest-asyncio and hypothesis. Mooncake and NIXL are tested if they are installed.
# Results go to RESULT_FOLDER. BENCHMARK=no runs only the tests. For replicas use run_replica.sh.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_on_gpu.sh RESULT_FOLDER [options of bench_nvlink.py]}
shift
failed=0
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/gpus.txt"
# Other test files are not collected, because they import packages that a GPU machine may lack. pyproject.toml's options need pytest plugins.
FILES=$(grep -rlE --include='test_*.py' 'mark\.gpu' tests | grep -v test_replica_on_gpu.py)
# tests.txt names every test, so that an interrupted run shows its progress. TESTS, such as "-k nixl", selects tests.
# With pytest-xdist, six tests run at a time: 219 tests took 203 s on two H200, and one after the other more than twice as long.
AT_ONCE=$(python3 -c 'import xdist; print("-n 6 --dist load")' 2>/dev/null)
timeout "${TESTS_S:-300}" python3 -m pytest -v --durations=15 -p no:cacheprovider -o addopts= -W ignore -m gpu $AT_ONCE ${TESTS:-} $FILES \
  > "$OUT/tests.txt" 2>&1 || failed=1
tail -40 "$OUT/tests.txt"
[ "${BENCHMARK:-yes}" = no ] && exit $failed
timeout 420 python3 benchmarks/gpu/bench_nvlink.py --json "$OUT/bench_nvlink.json" "$@" 2>&1 |
  tee "$OUT/bench_nvlink.txt" || failed=1
exit $failed
