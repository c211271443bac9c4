#!/usr/bin/env bash
# Tests and benchmarks of the GPU data path. Needs NVIDIA GPUs (two or more for the benchmark), torch with CUDA, what
# Windlass needs, and pytest with pytest-asyncio and hypothesis. Mooncake and NIXL are tested where they are installed.
# Results go to the folder that is given. BENCHMARK=no runs the tests alone. Replicas: run_replica.sh.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_on_gpu.sh RESULT_FOLDER [options of bench_nvlink.py]}
shift
failed=0
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/gpus.txt"
# Other files are not collected: they import what a GPU machine need not have. The options of pyproject.toml need plugins of pytest.
FILES=$(grep -rlE --include='test_*.py' 'mark\.gpu' tests | grep -v test_replica_on_gpu.py)
# The file names every test, so that a run that is cut off shows how far it came. TESTS, such as "-k nixl", chooses some.
timeout "${TESTS_S:-300}" python3 -m pytest -v --durations=15 -p no:cacheprovider -o addopts= -W ignore -m gpu ${TESTS:-} $FILES \
  > "$OUT/tests.txt" 2>&1 || failed=1
tail -40 "$OUT/tests.txt"
[ "${BENCHMARK:-yes}" = no ] && exit $failed
timeout 420 python3 benchmarks/gpu/bench_nvlink.py --json "$OUT/bench_nvlink.json" "$@" 2>&1 |
  tee "$OUT/bench_nvlink.txt" || failed=1
exit $failed
