"""Copies of HiCache in plain torch, for SGLang 0.5.23 on CPUs.

SGLang copies keys and values between the cache and host memory with CUDA code. The copies of its `direct` backend here are
in plain torch. HiCache, its keys and its storage backends are SGLang's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PLUGIN = """[sglang.srt.plugins]
cpu_store = sglang_cpu_store:install
"""


def install() -> None:
    """Supply the copies in a process of a server. SGLang calls this before it makes a cache."""
    from sglang.srt.mem_cache.pool_host import common, mha

    mha.transfer_kv_direct = copy_rows
    mha.MHATokenToKVPoolHost.get_dummy_flat_data_page = blank_page
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def allocate(
    dims: tuple[int, ...], *, dtype: torch.dtype, device: str, **_of_gpus: object
) -> torch.Tensor:
    """Return host memory that is not pinned, because torch pins memory only for a GPU."""
    return torch.empty(dims, dtype=dtype, device=device)


def blank_page(pool: Any) -> torch.Tensor:
    """Return a page into which HiCache reads an entry of its storage, in memory that is not pinned."""
    dims = (2, pool.layer_num, pool.page_size, pool.head_num, pool.head_dim)
    return torch.zeros(dims, dtype=pool.dtype, device=pool.device).flatten()


def copy_rows(
    *,
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy rows of every layer; the arguments are those of `sgl_kernel.kvcacheio.transfer_kv_direct`."""
    assert len(src_indices) % page_size == 0
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def plugin_in(folder: Path) -> Path:
    """Write a distribution that makes SGLang call `install`; return its folder, for the path of imports."""
    info = folder / "cpu_store-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(PLUGIN)
    return folder
