"""vLLM's sleep mode in a worker: what sleeps, which values are lost, and which values Windlass restores.

vLLM frees the memory of the weights and of the KV cache, and keeps the addresses. Updates write the weights, and compute
derived values again.

- At level 1, vLLM copies the memory of the weights to host memory and back. If a round (one update) wakes the weights,
  `WorkerSleep` copies back only the bytes that the update does not write, because these copies take longer than the
  update. The values of the weights are then lost until the round has filled them.
- At level 2, vLLM restores only the buffers of the served model. All other tensors that no update fills (plain attributes,
  models that no update reaches) would be lost, so `WorkerSleep` copies them to host memory and back.

vLLM calls all methods in the worker's main loop, between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, final

import torch

from windlass.engines.capture.memory import Holding, held_by
from windlass.engines.capture.sleeping import (
    free_nbytes,
    shortage_of,
    unfilled,
    unfilled_ranges,
)
from windlass.engines.engine_rank import EngineRank
from windlass.engines.rank_sleep import RankSleep
from windlass.engines.vllm.rank import Worker, cache_storages, models_of

logger = logging.getLogger(__name__)
WEIGHTS, CACHES = RankSleep.WEIGHTS, "kv_cache"
"""Tags of vLLM (0.24, 0.32) for memory that it frees at every level, and maps again by tag."""


class Allocation(NamedTuple):
    """One allocation that vLLM's sleep mode frees. `tag` is `WEIGHTS` or `CACHES`, or another tag of vLLM 0.32."""

    address: int
    nbytes: int
    tag: str


def allocations() -> list[Allocation]:
    """Return the memory of this process that vLLM's sleep mode frees."""
    found = _found_allocations().items()
    return [Allocation(address, data.handle[1], data.tag) for address, data in found]


def _found_allocations() -> Mapping[int, Any]:
    """Return vLLM's `AllocationData` of this process, by address."""
    from vllm.device_allocator.cumem import CuMemAllocator

    known: Mapping[int, Any] = CuMemAllocator.get_instance().pointer_to_data
    return known


@final
class WorkerSleep:
    """Replacement for `sleep` and `wake_up` of one worker of a server with `--enable-sleep-mode`; it calls the originals.

    Args:
        worker: vLLM's worker.
        rank: rank of this worker. This object records in `rank.sleep` which memory sleeps.
    """

    def __init__(self, worker: Worker, rank: EngineRank) -> None:
        self._worker, self._rank = worker, rank
        self._sleep, self._wake_up = worker.sleep, worker.wake_up
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Address -> vLLM's copy of the memory of weights, for the next wake.
        self._copies: dict[int, torch.Tensor] = {}
        rank.sleep.is_enabled = True
        rank.sleep.caches_nbytes = sum(
            found.nbytes for found in allocations() if found.tag == CACHES
        )
        worker.sleep, worker.wake_up = self.sleep, self.wake_up

    def sleep(self, level: int = 1) -> None:
        """Free the memory (see vLLM's `Worker.sleep`), and record in `rank.sleep` that the memory sleeps.

        First search for values that the engine has computed from its weights, because the next round may overwrite the
        weights. At level 2, also record that the weights are lost, and save the tensors that no update restores.
        """
        state = self._rank.sleep
        if not state.is_lost:
            state.missed = self._missed()
        if level > 1:
            # Set this first: vLLM may fail after it has freed memory.
            state.is_lost = True
            self._saved = [
                (memory, memory.to("cpu", copy=True)) for memory in self._tensors_to_save()
            ]
        state.asleep = frozenset({WEIGHTS, CACHES})
        self._sleep(level)

    def expect_update(self) -> None:
        """Prepare `wake_up` for a round that fills the weights: it then copies back only the bytes that no update writes.

        Record that the weights are lost. Do nothing at level 2, or if an update cannot fill every value.
        """
        state = self._rank.sleep
        if WEIGHTS not in state.asleep or state.missed:
            return
        for address, data in _found_allocations().items():
            if data.tag == WEIGHTS and data.cpu_backup_tensor is not None:
                state.is_lost = True
                self._copies[address] = data.cpu_backup_tensor
                data.cpu_backup_tensor = None

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Wake the sleeping memory that has one of these tags (all sleeping memory if None); see vLLM's `Worker.wake_up`.

        If the weights wake, also restore the tensors that `sleep` saved. Store an error in `RankSleep.failure` instead of
        raising it: if one worker raised, vLLM would read the other workers' answers as answers to its next call.
        """
        state, worker = self._rank.sleep, self._worker
        woken = state.asleep if tags is None else state.asleep & {*tags}
        if not woken:
            return
        buffers = worker._sleep_saved_buffers
        if WEIGHTS in state.asleep - woken:
            # vLLM 0.24 restores these buffers in every call, even if their memory still sleeps.
            worker._sleep_saved_buffers = {}
        state.failure = ""
        try:
            self._wake_up(sorted(woken))
            if WEIGHTS in woken:
                self._copy_back()
        except Exception as error:
            logger.exception("cannot wake %s", sorted(woken))
            state.failure = f"{error}" or type(error).__name__
            return
        finally:
            if WEIGHTS in state.asleep - woken:
                worker._sleep_saved_buffers = buffers
        if WEIGHTS in woken:
            with torch.inference_mode():
                for memory, value in self._saved:
                    memory.copy_(value)
            self._saved = []
        state.asleep -= woken

    def shortage(self, tags: Collection[str]) -> str:
        """Return the reason why the GPU has too little memory to wake `tags`; an empty string if it has enough."""
        woken = self._rank.sleep.asleep & {*tags}
        needed = sum(found.nbytes for found in allocations() if found.tag in woken)
        if not needed:
            return ""
        return shortage_of(woken, needed, free_nbytes())

    def _missed(self) -> str:
        """Search for values that the engine has computed from its weights; see `Captured.look`.

        Return the reason why an update cannot fill all weights and all these values; an empty string if it can.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        try:
            self._rank.captured.look()
        # A worker must not raise, see `wake_up`.
        except Exception as error:
            logger.exception("cannot look for values that are computed from weights")
            return f"{error}" or type(error).__name__
        return ""

    def _copy_back(self) -> None:
        """Restore from `_copies` those bytes of the weights that no update writes, and drop the copies."""
        from vllm.device_allocator import cumem

        memory = ((address, address + copy.nbytes) for address, copy in self._copies.items())
        parts = unfilled_ranges(self._rank.captured, memory, self._rank.kept)
        for address, start, stop in parts:
            source = self._copies[address].data_ptr() + start - address
            cumem.libcudart.cudaMemcpy(start, source, stop - start)
        self._copies = {}

    def _tensors_to_save(self) -> Iterator[torch.Tensor]:
        """In the memory of the weights, find each tensor that an update neither writes nor computes again."""
        pages = [found for found in allocations() if found.tag == WEIGHTS]
        caches = cache_storages(self._worker)
        held = (held_by(model, caches).values() for model in models_of(self._worker))
        tensors = chain.from_iterable(held)
        for holding in unfilled(self._rank.captured, tensors, self._rank.kept):
            if _sleeps(holding, pages):
                yield holding.memory()


def _sleeps(holding: Holding, pages: list[Allocation]) -> bool:
    """Return whether a tensor is in one of `pages`."""
    return any(found.address <= holding.address < found.address + found.nbytes for found in pages)


def install(worker: Any, rank: EngineRank) -> None:
    """Create the worker's `WorkerSleep`, as `worker.windlass_sleep`, if the server has a sleep mode. Idempotent."""
    if worker.vllm_config.model_config.enable_sleep_mode and not rank.sleep.is_enabled:
        worker.windlass_sleep = WorkerSleep(worker, rank)
