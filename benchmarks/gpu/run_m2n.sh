#!/usr/bin/env bash
# Runs the own benchmark of NVIDIA's M2N reshard, from half of the GPUs to the other half. M2N is the fastest public
# alternative on one host. Requires nccl-extensions 0.1.0, nccl4py 0.6.0, nvidia-nccl-cu13 2.30.7, mpi4py and mpich. If the
# libraries are not found, set MPI4PY_LIBMPI to libmpi.so, and LD_LIBRARY_PATH to the folders of libnccl and libnccl_m2n.
set -uo pipefail
GPUS=${1:?usage: run_m2n.sh NUM_GPUS}
HALF=$((GPUS / 2))
export NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONUNBUFFERED=1
for shape in "16384x131072 0 1" "16384x131072 0 0" "2048x1536 0 1"; do
  read -r sizes source_dim target_dim <<<"$shape"
  # M2N's other API needs NVLink multicast.
  timeout 60 mpiexec -n "$GPUS" python3 -m nccl.m2n.benchmarks.reshard_bench --api window \
    --src-mesh-dims "1x$HALF" --dst-mesh-dims "1x$HALF" --tensor-dims "$sizes" \
    --src-shard-dim "$source_dim" --dst-shard-dim "$target_dim" 2>&1 | grep CSV_RESULT
done
