# Variables for vLLM 0.24, SGLang 0.5.16 and their trainers on a GPU machine without a network. Source it in the root of the repository.
# vLLM finds Windlass's plugin by its entry point.
PLUGINS=$(mktemp -d)
python3 -c 'import pathlib, sys; from tools.entry_points import write_entry_points as write; write(pathlib.Path(sys.argv[1]))' "$PLUGINS"
export PYTHONPATH="$PWD/src:$PWD/benchmarks:$PLUGINS${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=160
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false CUDA_MODULE_LOADING=LAZY
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_WORKER_MULTIPROC_METHOD=spawn
export VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_HOST_IP=127.0.0.1 VLLM_NO_USAGE_STATS=1
export SGLANG_HOST_IP=127.0.0.1 SGLANG_ENABLE_JIT_DEEPGEMM=0 FLASHINFER_DISABLE_VERSION_CHECK=1
# SGLang finds ninja next to its interpreter, and kernels that were compiled before, in a folder next to its package.
PATH="$(python3 -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH"
if [ -d /usr/local/cuda ]; then
  export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
fi
KERNELS=$(python3 -c 'import importlib.util as util, pathlib
found = util.find_spec("sglang")
print(pathlib.Path(found.origin).parents[1] / "_jitcache" if found and found.origin else "")')
if [ -n "$KERNELS" ] && [ -d "$KERNELS" ]; then
  export TVM_FFI_CACHE_DIR="${TVM_FFI_CACHE_DIR:-$KERNELS}"
fi
