"""Store of vLLM's `OffloadingConnector` for CPUs: keys and values in other memory of the same host.

vLLM 0.32 refuses its own store on CPUs, because it copies on CUDA streams. This store has the same manager and the same
keys, and copies in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """`spec_name` for `kv_connector_extra_config`."""

    def get_worker(self, kv_caches: Any) -> HostWorker:
        """Return the worker of this rank."""
        assert self.blocks_per_chunk == 1
        return HostWorker(kv_caches, self.num_chunks)


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks at once, in the main loop of a rank."""

    def __init__(self, kv_caches: Any, num_chunks: int) -> None:
        self._caches = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            for cache in kv_caches.tensors
        ]
        self._stored = [
            torch.zeros((num_chunks, cache.shape[1]), dtype=torch.int8) for cache in self._caches
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the cache into the store."""
        return self._copy(job_id, self._caches, src_spec, self._stored, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the store into the cache."""
        return self._copy(job_id, self._stored, src_spec, self._caches, dst_spec)

    def _copy(
        self,
        job_id: int,
        sources: Sequence[torch.Tensor],
        source: Any,
        targets: Sequence[torch.Tensor],
        target: Any,
    ) -> bool:
        read, written = (torch.as_tensor(spec.block_ids).long() for spec in (source, target))
        for one, other in zip(sources, targets, strict=True):
            other[written] = one[read]
        size = len(read) * sum(one.shape[1] for one in sources)
        self._finished.append(TransferResult(job_id, True, size, 1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the results of all copies since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: every copy has ended."""
