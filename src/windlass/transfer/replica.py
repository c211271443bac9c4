"""Replica: an optional copy of the parameters that a trainer rank sends unpacked.

Without a replica, a trainer must not change its weights until the round has ended. With a replica, only
`Sender.prepare` reads the parameters: it packs ops that need packing into the arena, and copies all other parameters
into the replica. After that the trainer may change, move or offload its weights. The parameters themselves are never
registered. The cost is memory for the copy: host memory, GPU memory, or pinned host memory for weights on a GPU. The
idea comes from the engine replica of slime PR 1164. This replica has only the shards of one rank.
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
from windlass.memory.copy_sources import PinnedArena
from windlass.memory.cuda.driver import Event
from windlass.memory.cuda.gpu import Gpu, shared_gpu
from windlass.memory.cuda.range_copy import COPY_ENGINE_NBYTES, RangeCopy
from windlass.memory.device import CudaMemory
from windlass.memory.ops import OWN_WORK_S, Buffer
from windlass.transfer.arena import Arena, ArenaSlot, aligned_offsets
from windlass.transfer.base import LINKS_AT_ONCE
from windlass.transports.base import OneSidedTransport
from windlass.transports.sharing import share
from windlass.transports.traits import MemoryType

PART_NBYTES = 64 << 20
"""Maximum number of bytes that a thread copies per call. The call releases the interpreter lock."""
PCIE_ENGINE_NBYTES = 1 << 20
"""Minimum size in bytes of a parameter that a copy engine of the GPU copies to pinned host memory. The copy of a
smaller parameter over PCIe takes less time than queueing it."""


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """Times of the last copy of a replica.

    Attributes:
        nbytes: number of copied bytes.
        step_s: seconds of waiting for GPU work that the trainer had queued before, such as an optimizer step; 0 in host
            memory.
        copy_s: seconds of the copy, including building new tables.
    """

    nbytes: int = 0
    step_s: float = 0.0
    copy_s: float = 0.0


def replica_of(
    manifest: ShardManifest, asked: ReplicaPlace, transport: OneSidedTransport, threads: Executor
) -> Replica | None:
    """Return a new replica, as requested by `connect_trainer(replica=...)`. Return None for OFF.

    Args:
        manifest: manifest of the rank.
        asked: place of the replica. AUTO is GPU memory if the transport sends from GPU memory, else host memory.
        transport: transport that sends the replica.
        threads: threads that copy in host memory.

    Raises:
        ConfigError: `asked` is not a place, or the transport cannot send from it.
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
            f"replica: needs a single transport for weights on a GPU, got {names}; choose one of these by its name"
        )
    if transport.mapper is not None:
        # GPU kernels read the replica, so it needs no registration with the transport.
        gpu = transport.mapper.gpu
        if place is ReplicaPlace.DEVICE:
            return Replica(manifest, CudaMemory(gpu).allocate, gpu, COPY_ENGINE_NBYTES)
        return Replica(manifest, partial(PinnedArena, gpu.device), gpu, PCIE_ENGINE_NBYTES)
    if on_gpu and place is ReplicaPlace.HOST:
        raise ConfigError(
            f"replica: must be 'device' with {name} for weights on a GPU, because {name} writes only "
            "from GPU memory ('host' needs cuda_ipc), got 'host'"
        )
    if not on_gpu and place is ReplicaPlace.DEVICE:
        raise ConfigError(
            f"replica: must be 'host' with {name}, which writes only from host memory, got 'device'"
        )
    if not on_gpu:
        return Replica(manifest, lambda nbytes: Arena(transport, nbytes), threads)
    gpu = shared_gpu(traits.gpu)
    memory = CudaMemory(gpu)
    return Replica(manifest, lambda n: Arena(transport, n, memory), gpu, COPY_ENGINE_NBYTES)


@final
class Replica:
    """Copy of parameters; see the module. Not thread-safe.

    The tables for a copy by a GPU are built once and used until a parameter or the copy moves.

    Args:
        manifest: manifest of the rank.
        make: function that allocates the memory of the copy.
        copier: threads that copy in host memory; or the GPU that copies to GPU memory or to pinned host memory.
        engine_nbytes: minimum size in bytes of a parameter that a copy engine of the GPU copies. Kernels copy smaller
            parameters.

    Attributes:
        times: times of the last copy.
        slot: holder of the memory of the copy.
        in_doubt: whether a write of unknown outcome may still read the copy, so that the copy must not be overwritten.
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
        self.slot = ArenaSlot(make, 0)
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
        """Size of the copy's memory in bytes."""
        return self.slot.nbytes

    def begin(
        self,
        on_taken: Callable[[], None] | None,
        version: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Begin a version. Call this before the trainer announces it.

        Args:
            on_taken: function to call when the weights have been copied and may change. With None, the weights must not
                change until the round has ended, and they may be copied several times.
            version: number of the version. `is_taken` raises RoundAborted if it gets a different version. With None, it
                accepts all versions.
            stream: handle of a GPU stream. The copy waits only for the work that this stream contains now. With None, the
                copy waits for all work that this process has queued on the GPU.
        """
        self._drop_step()
        if self._gpu is not None and stream is not None:
            self._step = self._gpu.device.record(stream)
        self._version = version
        self._only_once, self._on_taken = on_taken is not None, on_taken
        self._taken = self._whole = False

    def end(self) -> None:
        """End the version that `begin` began. The weights may change after this call.

        Until the next `begin`, `is_taken` raises RoundAborted.
        """
        self._only_once = self._taken = True
        self._whole, self._on_taken, self._holds = False, None, None

    def is_taken(self, version: int | None = None) -> bool:
        """Return whether the weights may have changed since they were copied. `prepare` must then use the copy.

        Raises:
            RoundAborted: `version` is not the version that `begin` got.
            RoundAborted: the weights may have changed, and the copy cannot be used, because it lacks parameters of new
                links or because `end` was called.
        """
        if None not in (version, self._version) and version != self._version:
            raise RoundAborted(
                f"prepare: version must be {self._version}, the version being published, got {version}"
            )
        if self._only_once and self._taken and not self._whole:
            raise RoundAborted(
                "prepare: the fleet has changed since this version's weights were copied, or the trainer "
                "no longer waits for this version: publish again"
            )
        return self._only_once and self._taken

    def holds(self, version: int) -> bool:
        """Return whether the copy is complete and contains the weights of this version."""
        return self._holds == version

    def fit(self, parameters: Sequence[int]) -> None:
        """Allocate memory for a copy of these parameters (manifest indices). Discard the previous copy.

        Raises:
            RegionError: memory cannot be registered.
            TransferFailed: the GPU has too little memory, or the host cannot pin so much memory.
            TransferOutcomeUnknown: late kernels may still read the previous copy.
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
        self.slot.fit(nbytes)

    def take(self, sources: UInt64Array) -> UInt64Array:
        """Copy the parameters for which `fit` has allocated memory.

        Args:
            sources: (num_parameters,) addresses of all parameters, in manifest order.

        Returns:
            (num_parameters,) addresses to send from. For a copied parameter this is the address of the copy, otherwise
            the address in `sources`.

        Raises:
            RegionError: see `fit`.
            TransferFailed: see `fit`. Or work that the trainer had queued on the GPU failed or did not end within
                `OWN_WORK_S`; nothing was copied then.
            TransferOutcomeUnknown: the copy did not end within `OWN_WORK_S` and may read the parameters at any later
                time.
        """
        self._whole, self._holds = False, None
        read = sources.copy()
        if not len(self._indices):
            return read
        if not self.slot.address:
            # After the memory was abandoned, the allocation of new memory may have failed. Try again.
            self._fit(self._used)
            if not self.slot.address:
                # All parameters are empty.
                return read
        targets = self._offsets + np.uint64(self.slot.address)
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
        """Wait for the trainer's queued work, then copy ranges with a GPU, and wait until the copy has ended.

        `sources`, `targets` and `nbytes` are (n,): addresses, and sizes in bytes.

        Returns:
            Seconds that this method waited for the trainer's work.
        """
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
        finally:
            # Wait after an error too, because a queued part of the copy may still read the sources. The trainer may
            # change them once this method has returned or raised.
            gpu.finish(OWN_WORK_S)
        return step_s

    def taken(self, version: int | None = None) -> None:
        """Record that all weights of `version` are copied and packed. Call `on_taken`; the weights may then change."""
        self._taken = self._whole = True
        self._holds = version
        if self._on_taken is not None:
            self._on_taken()

    def settle(self, *, renew: bool = True) -> None:
        """Abandon the memory of the copy if a write of unknown outcome may still read it.

        With `renew`, allocate new memory in its place.

        Raises:
            RegionError, TransferFailed: see `fit`.
        """
        doubted, self.in_doubt = self.in_doubt, False
        if doubted:
            self._holds = None
            if not self._is_late:
                self._drop_copy()
            self.slot.abandon(renew=renew and not self._is_late)

    def close(self) -> None:
        """Free the copy, or abandon it if a late write or kernel may still read it. Idempotent."""
        self._holds = None
        self.settle(renew=False)
        if self._is_late:
            # Late kernels may still use the copy and its tables.
            self.slot.abandon(renew=False)
            return
        self._drop_step()
        self._drop_copy()
        self.slot.close()

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
