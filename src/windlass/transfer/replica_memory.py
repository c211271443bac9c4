"""Where a trainer's replica lies: host memory, pinned host memory beside a GPU, or GPU memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import final

from windlass.config import ReplicaPlace, take_name
from windlass.errors import ConfigError
from windlass.memory.cuda.driver import Event
from windlass.memory.cuda.gpu import Gpu, shared_gpu
from windlass.memory.cuda.ops import CudaMemory
from windlass.memory.cuda.range_copy import COPY_ENGINE_NBYTES, RangeCopy
from windlass.memory.cuda.sources import PinnedArena
from windlass.memory.ops import OWN_WORK_S, Buffer
from windlass.transfer.arena import Arena, ArenaSlot
from windlass.transfer.base import LINKS_AT_ONCE
from windlass.transfer.pieces import UInt64Array
from windlass.transfer.replica import ReplicaMemory
from windlass.transports.base import MemoryType, OneSidedTransport
from windlass.transports.sharing import share

__all__ = ["GpuCopies", "HostCopies", "replica_memory"]

PART_NBYTES = 64 << 20
"""Copied at a time by one thread, which releases the interpreter."""
NUM_COPYING = LINKS_AT_ONCE
PCIE_ENGINE_NBYTES = 1 << 20
"""Over PCIe a copy of this size takes longer than queueing it."""


def replica_memory(
    asked: ReplicaPlace, transport: OneSidedTransport, threads: Executor
) -> ReplicaMemory | None:
    """What `replica` of `connect_trainer` asks for, where `transport` can send from it.

    Args:
        asked: a place or its name. AUTO for where the transport takes weights from: GPU memory where
            that is a GPU's.
        transport: writes.
        threads: copy host memory.

    Raises:
        ConfigError: no such place, or the transport cannot write out of it.
    """
    place = take_name("replica", asked, ReplicaPlace)
    if place is ReplicaPlace.OFF:
        return None
    traits, name = transport.traits, transport.endpoint().transport
    if place is ReplicaPlace.AUTO:
        on_gpu = traits.memory is MemoryType.CUDA
        place = ReplicaPlace.DEVICE if on_gpu else ReplicaPlace.HOST
    if transport.mapper is not None and not traits.strided_stores:
        names = [offer.transport for offer in transport.offers()]
        raise ConfigError(
            f"replica: needs one transport for weights on a GPU, got {names}: name one of them"
        )
    if transport.mapper is not None:
        return _beside(transport.mapper.gpu, place)
    if traits.memory is MemoryType.CUDA:
        if place is ReplicaPlace.HOST:
            raise ConfigError(
                f"replica: must be 'device' with {name} and weights on a GPU, out of whose "
                "memory it writes ('host' needs cuda_ipc), got 'host'"
            )
        gpu = shared_gpu(traits.gpu)
        return GpuCopies(gpu, lambda nbytes: Arena(transport, nbytes, CudaMemory(gpu)))
    if place is ReplicaPlace.DEVICE:
        raise ConfigError(
            f"replica: must be 'host' with {name}, which writes out of host memory, got 'device'"
        )
    return HostCopies(transport, threads)


def _beside(gpu: Gpu, place: ReplicaPlace) -> ReplicaMemory:
    """For kernels that store out of it themselves: nothing is registered."""
    if place is ReplicaPlace.HOST:
        return GpuCopies(gpu, lambda nbytes: PinnedArena(gpu.device, nbytes), PCIE_ENGINE_NBYTES)
    return GpuCopies(gpu, CudaMemory(gpu).allocate)


@final
class HostCopies:
    """`ReplicaMemory` in registered host memory; threads copy.

    Args:
        transport: registers it. threads: copy side by side.
    """

    def __init__(self, transport: OneSidedTransport, threads: Executor) -> None:
        self._threads = threads
        self._slot = ArenaSlot(lambda nbytes: Arena(transport, nbytes), 0)

    @property
    def address(self) -> int:
        """See `ReplicaMemory`."""
        return self._slot.address

    @property
    def nbytes(self) -> int:
        """See `ReplicaMemory`."""
        return self._slot.nbytes

    def mark(self, stream: int | None) -> None:
        """See `ReplicaMemory`."""

    def fit(self, nbytes: int) -> None:
        """See `ReplicaMemory`."""
        self._slot.fit(nbytes)

    def copy(self, sources: UInt64Array, targets: UInt64Array, nbytes: UInt64Array) -> float:
        """See `ReplicaMemory`."""
        parts = [
            partial(ctypes.memmove, target + at, source + at, min(PART_NBYTES, size - at))
            for source, target, size in zip(
                sources.tolist(), targets.tolist(), nbytes.tolist(), strict=True
            )
            for at in range(0, size, PART_NBYTES)
        ]
        share(parts, self._threads, min(len(parts), NUM_COPYING) - 1)
        return 0.0

    def abandon(self, *, renew: bool) -> None:
        """See `ReplicaMemory`."""
        self._slot.abandon(renew=renew)

    def close(self) -> None:
        """See `ReplicaMemory`."""
        self._slot.close()


@final
class GpuCopies:
    """`ReplicaMemory` that a GPU copies into, in GPU memory or in pinned host memory.

    Ranges are cut once and kept until a parameter or the memory moves.

    Args:
        gpu: copies.
        make: allocates so many bytes.
        engine_nbytes: from this size on a parameter is left to a copy engine.
    """

    def __init__(
        self,
        gpu: Gpu,
        make: Callable[[int], Buffer],
        engine_nbytes: int = COPY_ENGINE_NBYTES,
    ) -> None:
        self._gpu, self._engine_nbytes = gpu, engine_nbytes
        self._slot = ArenaSlot(make, 0)
        self._step: Event | None = None
        self._ranges: tuple[bytes, bytes] = (b"", b"")
        self._copy: RangeCopy | None = None

    @property
    def address(self) -> int:
        """See `ReplicaMemory`."""
        return self._slot.address

    @property
    def nbytes(self) -> int:
        """See `ReplicaMemory`."""
        return self._slot.nbytes

    def mark(self, stream: int | None) -> None:
        """See `ReplicaMemory`."""
        if self._step is not None:
            self._step.close()
        self._step = None if stream is None else self._gpu.device.record(stream)

    def fit(self, nbytes: int) -> None:
        """See `ReplicaMemory`."""
        self._gpu.refuse_late()
        self._drop()
        self._slot.fit(nbytes)

    def copy(self, sources: UInt64Array, targets: UInt64Array, nbytes: UInt64Array) -> float:
        """See `ReplicaMemory`."""
        began = time.perf_counter()
        step, self._step = self._step, None
        self._gpu.settle(OWN_WORK_S, step)
        step_s = time.perf_counter() - began
        ranges = sources.tobytes(), targets.tobytes()
        if self._copy is None or ranges != self._ranges:
            self._drop()
            self._copy = RangeCopy(self._gpu, sources, targets, nbytes, self._engine_nbytes)
            self._ranges = ranges
        try:
            self._copy.queue()
        finally:  # also of a part: nobody may change what it reads
            self._gpu.finish(OWN_WORK_S)
        return step_s

    def abandon(self, *, renew: bool) -> None:
        """See `ReplicaMemory`."""
        if not self._gpu.is_late:
            self._drop()
        self._slot.abandon(renew=renew and not self._gpu.is_late)

    def close(self) -> None:
        """See `ReplicaMemory`."""
        if self._gpu.is_late:  # copies, stores and their tables may still be read
            self._slot.abandon(renew=False)
            return
        if self._step is not None:
            self._step.close()
            self._step = None
        self._drop()
        self._slot.close()

    def _drop(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None
