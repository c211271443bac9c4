"""Stores of vLLM's `OffloadingConnector` and `SimpleCPUOffloadConnector` for CPUs: keys and values in other memory of the host.

vLLM 0.32 copies on CUDA streams, and refuses the first store on CPUs. These stores have the same managers and the same
keys, and copy in plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class HostCopies:
    """Stands for `DmaCopyBackend` of `SimpleCPUOffloadConnector`: copies blocks at once, in the main loop of a rank."""

    def init(
        self,
        gpu_caches: Mapping[str, torch.Tensor],
        cpu_caches: Mapping[str, torch.Tensor],
        *_on_device: object,
    ) -> None:
        """Keep the tensors between which blocks are copied."""
        self._caches, self._stored = [*gpu_caches.values()], [*cpu_caches.values()]

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: object = None,
    ) -> None:
        """Copy blocks, and report the end of the copy."""
        del wait_event
        ends = (self._caches, self._stored) if is_store else (self._stored, self._caches)
        for one, other in zip(*ends, strict=True):
            other[torch.as_tensor(dst_blocks)] = one[torch.as_tensor(src_blocks)]
        events_list.append((event_idx, torch.cpu.Event()))

    def shutdown(self) -> None:
        """Do nothing: there is no thread."""


class _Stream(torch.cpu.Stream):
    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


def install_copies() -> None:
    """Make `SimpleCPUOffloadConnector` copy with `HostCopies` in this process."""
    from vllm.v1.simple_kv_offload import worker

    worker.DmaCopyBackend = HostCopies
    worker.PIN_MEMORY = False
    vars(worker)["torch"] = _TorchOfHost()


class _TorchOfHost:
    """Torch as the connector's module sees it, with streams and events of the CPU."""

    Event = torch.cpu.Event

    class cuda:  # noqa: N801
        Stream = _Stream

        @staticmethod
        def current_stream() -> _Stream:
            return _Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
