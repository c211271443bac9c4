#!/usr/bin/env bash
# NVIDIA's M2N reshard, half of the GPUs to the other half, by its own benchmark: the strongest public peer on one host.
# Needs nccl-extensions 0.1.0, nccl4py 0.6.0, nvidia-nccl-cu13 2.30.7, mpi4py and mpich; MPI4PY_LIBMPI names libmpi.so, and
# LD_LIBRARY_PATH the folders of libnccl and libnccl_m2n, if they are not found otherwise.
set -uo pipefail
GPUS=${1:?usage: run_m2n.sh NUM_GPUS}
HALF=$((GPUS / 2))
export NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONUNBUFFERED=1
for shape in "16384x131072 0 1" "16384x131072 0 0" "2048x1536 0 1"; do
  read -r sizes source_dim target_dim <<<"$shape"
  # Its other API asks for NVLink multicast.
  timeout 60 mpiexec -n "$GPUS" python3 -m nccl.m2n.benchmarks.reshard_bench --api window \
    --src-mesh-dims "1x$HALF" --dst-mesh-dims "1x$HALF" --tensor-dims "$sizes" \
    --src-shard-dim "$source_dim" --dst-shard-dim "$target_dim" 2>&1 | grep CSV_RESULT
done
