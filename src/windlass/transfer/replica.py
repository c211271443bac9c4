"""A copy of what a trainer rank sends as it lies, for owners who asked for one.

With it parameters are read in `prepare` and at no other time: what is packed lies in the packer's
arena, everything else in this one. So the owner may change, move or offload its weights as soon as
they are copied, and none of them is ever registered. It costs as much memory as it copies, where
`replica_memory.py` puts it. The engine replica of slime PR 1164 is the ancestor; this one is cut as
the trainer is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from windlass.errors import RoundAborted
from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import aligned_offsets
from windlass.transfer.pieces import UInt64Array

__all__ = ["CopyTimes", "Replica", "ReplicaMemory"]


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


class ReplicaMemory(Protocol):
    """Where a replica lies, and who copies into it."""

    @property
    def address(self) -> int:
        """Of its first byte, as writes read it; 0 without one."""
        ...

    @property
    def nbytes(self) -> int:
        """Capacity."""
        ...

    def mark(self, stream: int | None) -> None:
        """The next copy waits for what is queued in this stream of the GPU so far, and for no more.

        None: for whatever this process has queued. Without a GPU nothing.
        """
        ...

    def fit(self, nbytes: int) -> None:
        """Have room; what was copied before is gone.

        Raises:
            RegionError: memory cannot be registered.
            TransferFailed: a GPU has no room, or a host refuses to lock so much.
            TransferOutcomeUnknown: kernels may still read it.
        """
        ...

    def copy(self, sources: UInt64Array, targets: UInt64Array, nbytes: UInt64Array) -> float:
        """Copy ranges; complete on return. Seconds that the owner's own work was waited for.

        Raises:
            TransferFailed: that work is not over in time, or failed; nothing was copied.
            TransferOutcomeUnknown: a copy goes on and may read the sources for ever.
        """
        ...

    def abandon(self, *, renew: bool) -> None:
        """Leave the memory mapped and untouched until the process ends; `renew`: have other."""
        ...

    def close(self) -> None:
        """Free it, unless a late kernel may still read it. Idempotent."""
        ...


@final
class Replica:
    """See the module. Not thread-safe; `lock` guards it.

    Args:
        manifest: of the rank. memory: owned from here on.

    Attributes:
        lock: shared by all that send from this replica.
        times: of the last copy.
    """

    def __init__(self, manifest: ShardManifest, memory: ReplicaMemory) -> None:
        self.lock = threading.Lock()
        self.times = CopyTimes()
        self._memory = memory
        self._sizes = [parameter.nbytes for parameter in manifest.parameters]
        self._indices = np.zeros(0, np.int64)
        self._offsets = np.zeros(0, np.uint64)
        self._used = 0
        self._in_doubt = False
        self._only_once = False
        self._taken = False
        self._whole = False
        self._holds: int | None = None
        self._on_taken: Callable[[], None] | None = None
        self._version: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self._memory.nbytes

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
            stream: see `ReplicaMemory.mark`.
        """
        self._memory.mark(stream)
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
            RegionError, TransferFailed, TransferOutcomeUnknown: see `ReplicaMemory.fit`.
        """
        self._whole, self._holds = False, None
        offsets, used = aligned_offsets(self._sizes[index] for index in parameters)
        self._indices, self._offsets = np.zeros(0, np.int64), np.zeros(0, np.uint64)
        self._memory.fit(used)
        self._used = used
        self._indices = np.array(parameters, np.int64)
        self._offsets = np.array(offsets, np.uint64)

    def take(self, sources: UInt64Array) -> UInt64Array:
        """Copy; returns where each parameter is to be read, in manifest order.

        Args:
            sources: where the parameters lie.

        Raises:
            RegionError, TransferFailed, TransferOutcomeUnknown: see `ReplicaMemory.copy` and `fit`.
        """
        self._whole, self._holds = False, None
        read = sources.copy()
        if not len(self._indices):
            return read
        if not self._memory.address:  # it was parted with, and there was no room for another
            self._memory.fit(self._used)
            if not self._memory.address:
                return read  # of parameters without bytes
        targets = self._offsets + np.uint64(self._memory.address)
        sizes = np.array([self._sizes[index] for index in self._indices], np.uint64)
        began = time.perf_counter()
        step_s = self._memory.copy(sources[self._indices], targets, sizes)
        self.times = CopyTimes(int(sizes.sum()), step_s, time.perf_counter() - began - step_s)
        read[self._indices] = targets
        return read

    def taken(self, version: int | None = None) -> None:
        """Everything is copied or packed: the weights may change."""
        self._taken = self._whole = True
        self._holds = version
        if self._on_taken is not None:
            self._on_taken()

    def doubt(self) -> None:
        """A write of unknown outcome may still read the copy: it is not written to again."""
        self._in_doubt = True

    @property
    def in_doubt(self) -> bool:
        """Whether a write of unknown outcome may still read the copy."""
        return self._in_doubt

    def settle(self, *, renew: bool = True) -> None:
        """Part with memory that is in doubt, if it is."""
        doubted, self._in_doubt = self._in_doubt, False
        if doubted:
            self._holds = None
            self._memory.abandon(renew=renew)

    def close(self) -> None:
        """Free the copy. Idempotent."""
        self._holds = None
        self.settle(renew=False)
        self._memory.close()
