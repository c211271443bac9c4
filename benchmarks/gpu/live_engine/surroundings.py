"""Constants and settings that all processes of a run share."""

from __future__ import annotations

from pathlib import Path

TOKEN = "secret of the benchmark"
ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "CUDA_MODULE_LOADING": "LAZY",
    "TOKENIZERS_PARALLELISM": "false",
}
