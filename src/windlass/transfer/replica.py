"""A copy of what a trainer rank sends as it lies, for owners who asked for one.

With it parameters are read in `prepare` and at no other time: what is packed lies in the packer's
arena, everything else in this one. So the owner may change, move or offload its weights as soon as
they are copied, and none of them is ever registered. It costs as much memory as it copies: host memory,
pinned host memory beside a GPU, or GPU memory. The engine replica of slime PR 1164 is the ancestor; this
one is cut as the trainer is.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np

from windlass.config import ReplicaPlace, take_name
from windlass.errors import ConfigError, RoundAborted
from windlass.layout.columns import UInt64Array
from windlass.layout.manifest import ShardManifest
from windlass.memory.cuda.driver import Event
from windlass.memory.cuda.gpu import Gpu, shared_gpu
from windlass.memory.cuda.ops import CudaMemory
from windlass.memory.cuda.range_copy import COPY_ENGINE_NBYTES, RangeCopy
from windlass.memory.cuda.sources import PinnedArena
from windlass.memory.ops import OWN_WORK_S, Buffer
from windlass.transfer.arena import Arena, ArenaSlot, aligned_offsets
from windlass.transfer.base import LINKS_AT_ONCE
from windlass.transports.base import OneSidedTransport
from windlass.transports.sharing import share
from windlass.transports.traits import MemoryType

PART_NBYTES = 64 << 20
"""Copied at a time by one thread, which releases the interpreter."""
PCIE_ENGINE_NBYTES = 1 << 20
"""Over PCIe a copy of this size takes longer than queueing it."""


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """What the last copy of a replica took.

    Attributes:
        nbytes: copied.
        step_s: waiting for what the owner had queued on its GPU before; 0 in host memory.
        copy_s: seconds of the copy itself, tables that are new included.
    """

    nbytes: int = 0
    step_s: float = 0.0
    copy_s: float = 0.0


def replica_of(
    manifest: ShardManifest, asked: ReplicaPlace, transport: OneSidedTransport, threads: Executor
) -> Replica | None:
    """What `replica` of `connect_trainer` asks for, where `transport` can send from it.

    AUTO is for where the transport takes weights from: GPU memory where that is a GPU's.

    Raises:
        ConfigError: no such place, or the transport cannot write out of it.
    """
    place = take_name("replica", asked, ReplicaPlace)
    if place is ReplicaPlace.OFF:
        return None
    traits, name = transport.traits, transport.endpoint().transport
    on_gpu = traits.memory is MemoryType.CUDA
    if place is ReplicaPlace.AUTO:
        place = ReplicaPlace.DEVICE if on_gpu else ReplicaPlace.HOST
    if transport.mapper is not None and not traits.strided_stores:
        names = [offer.transport for offer in transport.offers()]
        raise ConfigError(
            f"replica: needs one transport for weights on a GPU, got {names}: name one of them"
        )
    if transport.mapper is not None:  # kernels store out of it themselves: nothing is registered
        gpu = transport.mapper.gpu
        if place is ReplicaPlace.DEVICE:
            return Replica(manifest, CudaMemory(gpu).allocate, gpu, COPY_ENGINE_NBYTES)
        return Replica(manifest, partial(PinnedArena, gpu.device), gpu, PCIE_ENGINE_NBYTES)
    if on_gpu and place is ReplicaPlace.HOST:
        raise ConfigError(
            f"replica: must be 'device' with {name} and weights on a GPU, out of whose "
            "memory it writes ('host' needs cuda_ipc), got 'host'"
        )
    if not on_gpu and place is ReplicaPlace.DEVICE:
        raise ConfigError(
            f"replica: must be 'host' with {name}, which writes out of host memory, got 'device'"
        )
    if not on_gpu:
        return Replica(manifest, lambda nbytes: Arena(transport, nbytes), threads)
    gpu = shared_gpu(traits.gpu)
    memory = CudaMemory(gpu)
    return Replica(manifest, lambda n: Arena(transport, n, memory), gpu, COPY_ENGINE_NBYTES)


@final
class Replica:
    """See the module. Not thread-safe.

    What a GPU copies is cut once and kept until a parameter or the memory moves.

    Args:
        copier: a GPU, for its own memory and pinned host memory; or threads, for host memory.
        engine_nbytes: from this size on a parameter is left to a copy engine of the GPU.

    Attributes:
        in_doubt: a write of unknown outcome may still read the copy: it is not written to again.
    """

    def __init__(
        self,
        manifest: ShardManifest,
        make: Callable[[int], Buffer],
        copier: Gpu | Executor,
        engine_nbytes: int = 0,
    ) -> None:
        self.times = CopyTimes()
        self._sizes = [parameter.nbytes for parameter in manifest.parameters]
        self._copier, self._engine_nbytes = copier, engine_nbytes
        self._gpu = None if isinstance(copier, Executor) else copier
        self._slot = ArenaSlot(make, 0)
        self._step: Event | None = None
        self._ranges: tuple[bytes, bytes] = (b"", b"")
        self._copy: RangeCopy | None = None
        self._indices = np.zeros(0, np.int64)
        self._offsets = np.zeros(0, np.uint64)
        self._used = 0
        self.in_doubt = False
        self._only_once = False
        self._taken = False
        self._whole = False
        self._holds: int | None = None
        self._on_taken: Callable[[], None] | None = None
        self._version: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self._slot.nbytes

    def begin(
        self,
        on_taken: Callable[[], None] | None,
        version: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Another version is about to be announced.

        Args:
            on_taken: called when it is copied, after which the weights may change; None where they
                stand still until the round has ended, and may be copied more than once.
            version: which; a round of another one, which its owner has given up, gets nothing. None
                for any.
            stream: have the copy wait for what is queued in this stream of the GPU so far, and for no more;
                None for whatever this process has queued.
        """
        self._drop_step()
        if self._gpu is not None and stream is not None:
            self._step = self._gpu.device.record(stream)
        self._version = version
        self._only_once, self._on_taken = on_taken is not None, on_taken
        self._taken = self._whole = False

    def end(self) -> None:
        """Nobody waits for the version any more: the weights might be others, copy nothing."""
        self._only_once = self._taken = True
        self._whole, self._on_taken, self._holds = False, None, None

    def is_taken(self, version: int | None = None) -> bool:
        """Whether what is there must be used as it is, because the weights may have changed.

        Raises:
            RoundAborted: it is gone, was cut for another fleet, or is of another version.
        """
        if None not in (version, self._version) and version != self._version:
            raise RoundAborted(
                f"prepare: version must be {self._version}, whose weights these are, got {version}"
            )
        if self._only_once and self._taken and not self._whole:
            raise RoundAborted(
                "prepare: the fleet has changed since this version's weights were copied, or nobody "
                "waits for them any more: publish again"
            )
        return self._only_once and self._taken

    def holds(self, version: int) -> bool:
        """Whether the copy is that of this version, whole."""
        return self._holds == version

    def fit(self, parameters: Sequence[int]) -> None:
        """Have room for these parameters; what was copied before is gone.

        Raises:
            RegionError: memory cannot be registered.
            TransferFailed: a GPU has no room, or a host refuses to lock so much.
            TransferOutcomeUnknown: kernels may still read it.
        """
        self._whole, self._holds = False, None
        offsets, used = aligned_offsets(self._sizes[index] for index in parameters)
        self._indices, self._offsets = np.zeros(0, np.int64), np.zeros(0, np.uint64)
        self._fit(used)
        self._used = used
        self._indices = np.array(parameters, np.int64)
        self._offsets = np.array(offsets, np.uint64)

    def _fit(self, nbytes: int) -> None:
        if self._gpu is not None:
            self._gpu.refuse_late()
        self._drop_copy()
        self._slot.fit(nbytes)

    def take(self, sources: UInt64Array) -> UInt64Array:
        """Copy; returns where each parameter is to be read, in manifest order.

        Raises:
            RegionError: see `fit`.
            TransferFailed: the owner's own work is not over in time, or failed, and nothing was copied; or
                see `fit`.
            TransferOutcomeUnknown: a copy goes on and may read the sources for ever.
        """
        self._whole, self._holds = False, None
        read = sources.copy()
        if not len(self._indices):
            return read
        if not self._slot.address:  # it was parted with, and there was no room for another
            self._fit(self._used)
            if not self._slot.address:
                return read  # of parameters without bytes
        targets = self._offsets + np.uint64(self._slot.address)
        sizes = np.array([self._sizes[index] for index in self._indices], np.uint64)
        began, step_s, gpu = time.perf_counter(), 0.0, self._copier
        if isinstance(gpu, Executor):
            _copy_by_threads(gpu, sources[self._indices], targets, sizes)
        else:
            step_s = self._copy_by(gpu, sources[self._indices], targets, sizes)
        self.times = CopyTimes(int(sizes.sum()), step_s, time.perf_counter() - began - step_s)
        read[self._indices] = targets
        return read

    def _copy_by(
        self, gpu: Gpu, sources: UInt64Array, targets: UInt64Array, nbytes: UInt64Array
    ) -> float:
        """Copy ranges; complete on return. Seconds that the owner's own work was waited for."""
        began = time.perf_counter()
        step, self._step = self._step, None
        gpu.settle(OWN_WORK_S, step)
        step_s = time.perf_counter() - began
        ranges = sources.tobytes(), targets.tobytes()
        if self._copy is None or ranges != self._ranges:
            self._drop_copy()
            self._copy = RangeCopy(gpu, sources, targets, nbytes, self._engine_nbytes)
            self._ranges = ranges
        try:
            self._copy.queue()
        finally:  # also of a part: nobody may change what it reads
            gpu.finish(OWN_WORK_S)
        return step_s

    def taken(self, version: int | None = None) -> None:
        """Everything is copied or packed: the weights may change."""
        self._taken = self._whole = True
        self._holds = version
        if self._on_taken is not None:
            self._on_taken()

    def settle(self, *, renew: bool = True) -> None:
        """Part with memory that is in doubt, if it is."""
        doubted, self.in_doubt = self.in_doubt, False
        if doubted:
            self._holds = None
            if not self._is_late:
                self._drop_copy()
            self._slot.abandon(renew=renew and not self._is_late)

    def close(self) -> None:
        """Free the copy, unless a late kernel may still read it. Idempotent."""
        self._holds = None
        self.settle(renew=False)
        if self._is_late:  # copies, stores and their tables may still be read
            self._slot.abandon(renew=False)
            return
        self._drop_step()
        self._drop_copy()
        self._slot.close()

    @property
    def _is_late(self) -> bool:
        return self._gpu is not None and self._gpu.is_late

    def _drop_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.close()

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()


def _copy_by_threads(
    threads: Executor, sources: UInt64Array, targets: UInt64Array, nbytes: UInt64Array
) -> None:
    columns = (column.tolist() for column in (sources, targets, nbytes))
    parts = [
        partial(ctypes.memmove, target + at, source + at, min(PART_NBYTES, size - at))
        for source, target, size in zip(*columns, strict=True)
        for at in range(0, size, PART_NBYTES)
    ]
    share(parts, threads, min(len(parts), LINKS_AT_ONCE) - 1)
