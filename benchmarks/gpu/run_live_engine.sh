#!/usr/bin/env bash
# Updates a live engine on GPUs under load. Half of the GPUs serve, half train. Requires Windlass's packages, and vLLM
# 0.24 or SGLang 0.5.16, transformers and torch 2.11 with CUDA, installed or on PYTHONPATH.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_live_engine.sh RESULT_FOLDER [options of bench_live_engine.py]}
shift
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/gpus.txt"
timeout 540 python3 benchmarks/gpu/bench_live_engine.py --json "$OUT/bench_live_engine.json" \
  --log "$OUT/engine.log" "$@" 2>&1 | tee "$OUT/bench_live_engine.txt"
