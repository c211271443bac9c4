"""What is prepared on a GPU: tables of pieces, and the words that digests are added up in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar, final

import numpy as np

from windlass.layout.columns import StructuredArray
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.kernels import PieceTable
from windlass.memory.cuda.pieces import PieceKind
from windlass.memory.packing import overflow_text
from windlass.planning.program import LinkProgram

Item = TypeVar("Item")

DIGEST_NBYTES = 16
WORDS_NBYTES = DIGEST_NBYTES + 8
"""Of a link: a digest, and a word that says where a cast overflowed."""


class GpuTables:
    """Tables and words of one preparation in a GPU's memory, freed together.

    Derived classes build theirs within `_building`, and none under late kernels.

    Raises:
        TransferOutcomeUnknown: kernels outlived a deadline.
        TransferFailed: the GPU has no room for them; nothing is left behind.
    """

    def __init__(self, gpu: Gpu) -> None:
        gpu.refuse_late()
        self._gpu = gpu
        self._held: list[Callable[[], None]] = []

    def close(self) -> None:
        """Free them, unless late kernels may still use them. Idempotent."""
        held, self._held = self._held, []
        if not self._gpu.is_late:
            for free in held:
                free()

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Leave nothing behind of a preparation that fails."""
        with ExitStack() as undo:
            undo.callback(self.close)
            yield
            undo.pop_all()

    def _load(self, tables: Mapping[PieceKind, StructuredArray]) -> list[PieceTable]:
        """Upload a table per kind of piece."""
        loaded = []
        for kind, pieces in tables.items():
            loaded.append(load_table(self._gpu, kind, pieces))
            self._held.append(loaded[-1].close)
        return loaded

    def _allocate(self, nbytes: int) -> int:
        address = self._gpu.device.allocate(nbytes)
        self._held.append(partial(self._gpu.device.free, address))
        return address

    def _queue_digest(
        self, words: int, hashed: Iterable[PieceTable], stored: Iterable[PieceTable] = ()
    ) -> None:
        """Queue the digest of what is hashed where it lies, and of what is stored meanwhile."""
        gpu = self._gpu
        gpu.device.clear(words, WORDS_NBYTES, gpu.stream)
        for table in hashed:
            gpu.kernels.hash(table, gpu.stream, words)
        for table in stored:
            gpu.kernels.put(table, gpu.stream, words)


@final
class DeviceLink(GpuTables):
    """A link on the device.

    Attributes:
        tables: one per kind of piece, in the same order and with the same pieces at both ends.
        digest: address of its words.
    """

    def __init__(
        self, gpu: Gpu, program: LinkProgram, tables: Mapping[PieceKind, StructuredArray]
    ) -> None:
        super().__init__(gpu)
        self.program = program
        with self._building():
            self.tables = tuple(self._load(tables))
            self.digest = self._allocate(WORDS_NBYTES)


def load_table(gpu: Gpu, kind: PieceKind, pieces: StructuredArray) -> PieceTable:
    """Upload pieces of one kind; the caller closes the table."""
    return PieceTable(gpu.device, pieces, kind.kernel, kind.dst_dtype.itemsize)


def read_digest(gpu: Gpu, address: int) -> str:
    """Return the digest at `address`, as links report it; waits for no other stream."""
    return digest_text(read_words(gpu, address))


def read_sent(gpu: Gpu, address: int, program: LinkProgram) -> tuple[str, str]:
    """Return what kernels noted of a link at its source: its digest, and which tensor's cast overflowed or empty."""
    words, reason = read_words(gpu, address), ""
    if words[2]:
        op = item_at(words[2], program.ops, (op.nbytes for op in program.ops))
        reason = overflow_text(op.tensor, op.src_dtype, op.cast_dtype)
    return digest_text(words), reason


def read_words(gpu: Gpu, address: int) -> list[int]:
    """Return the words at `address`: a digest, and where a cast overflowed or 0."""
    found = gpu.device.download(address, WORDS_NBYTES, gpu.stream)
    words: list[int] = np.frombuffer(found, "<u8").tolist()
    return words


def item_at(overflow: int, items: Sequence[Item], nbytes: Iterable[int]) -> Item:
    """Return which of `items`, whose payloads of `nbytes` follow each other, the third word names."""
    ends = itertools.accumulate(nbytes)
    return next(item for item, end in zip(items, ends, strict=True) if overflow <= end)


def digest_text(words: Sequence[int]) -> str:
    """Return a digest as links report it, of words as `read_words` gives them."""
    return f"{words[0]:016x}{words[1]:016x}"
