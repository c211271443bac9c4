"""A copy of what a trainer rank sends as it lies, for owners who asked for one.

With it parameters are read in `prepare` and at no other time: what is packed lies in the packer's
arena, everything else in this one. So the owner may change, move or offload its weights as soon as
they are copied, and none of them is ever registered. It costs as much memory as it copies. The
engine replica of slime PR 1164 is the ancestor; this one is cut as the trainer is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import final

import numpy as np

from windlass.errors import RoundAborted
from windlass.execution.pack_arena import keep_mapped
from windlass.execution.pieces import UInt64Array
from windlass.layout.manifest import ShardManifest
from windlass.memory.arena import Arena, aligned_offsets
from windlass.transports.base import OneSidedTransport

__all__ = ["Replica"]

PART_NBYTES = 64 << 20
"""Copied at a time by one thread."""


@final
class Replica:
    """See the module. Not thread-safe; the sender's lock guards it.

    Args:
        transport: registers the copy.
        manifest: of the rank.
    """

    def __init__(self, transport: OneSidedTransport, manifest: ShardManifest) -> None:
        self._transport = transport
        self._sizes = [parameter.nbytes for parameter in manifest.parameters]
        self._arena: Arena | None = None
        self._offsets: dict[int, int] = {}
        self._in_doubt = False
        self._only_once = False
        self._taken = False
        self._whole = False
        self._on_taken: Callable[[], None] | None = None
        self._version: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return 0 if self._arena is None else self._arena.nbytes

    def begin(self, on_taken: Callable[[], None] | None, version: int | None = None) -> None:
        """Another version is about to be announced.

        Args:
            on_taken: called when it is copied, after which the weights may change; None where they
                stand still until the round has ended, and may be copied more than once.
            version: which; a round of another one, which its owner has given up, gets nothing. None
                for any.
        """
        self._version = version
        self._only_once, self._on_taken = on_taken is not None, on_taken
        self._taken = self._whole = False

    def end(self) -> None:
        """Nobody waits for the version any more: the weights may be others, copy nothing."""
        self._only_once = self._taken = True
        self._whole, self._on_taken = False, None

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

    def fit(self, parameters: Sequence[int]) -> None:
        """Have room for these parameters; what was copied before is gone.

        Raises:
            RegionError: memory cannot be registered.
        """
        self._whole = False
        offsets, used = aligned_offsets(self._sizes[index] for index in parameters)
        if self._arena is not None and self._arena.nbytes < used:
            self._arena.close()
            self._arena = None
        if self._arena is None and used:
            self._arena = Arena(self._transport, used)
        self._offsets = dict(zip(parameters, offsets, strict=True))

    def take(self, sources: UInt64Array, threads: Executor) -> UInt64Array:
        """Copy; returns where each parameter is to be read, in manifest order.

        Args:
            sources: where the parameters lie.
            threads: copy side by side.
        """
        read = sources.copy()
        parts: list[tuple[int, int, int]] = []
        for index, offset in self._offsets.items():
            if self._arena is None:
                break
            read[index] = np.uint64(self._arena.address + offset)
            begin, nbytes = int(sources[index]), self._sizes[index]
            parts += [
                (int(read[index]) + at, begin + at, min(PART_NBYTES, nbytes - at))
                for at in range(0, nbytes, PART_NBYTES)
            ]
        for _ in threads.map(_copy, parts):
            pass
        return read

    def taken(self) -> None:
        """Everything is copied or packed: the weights may change."""
        self._taken = self._whole = True
        if self._on_taken is not None:
            self._on_taken()

    def doubt(self) -> None:
        """A write of unknown outcome may still read the copy: it is not written to again."""
        self._in_doubt = True

    def settle(self, *, renew: bool = True) -> bool:
        """Part with memory that is in doubt; returns whether there was a doubt."""
        doubted, self._in_doubt = self._in_doubt, False
        if doubted and self._arena is not None:
            nbytes = self._arena.nbytes
            keep_mapped(self._arena)
            self._arena = None
            if renew:
                self._arena = Arena(self._transport, nbytes)
        return doubted

    def close(self) -> None:
        """Free the copy. Idempotent."""
        self.settle(renew=False)
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _copy(part: tuple[int, int, int]) -> None:
    """In a thread; the copy releases the interpreter."""
    ctypes.memmove(*part)
