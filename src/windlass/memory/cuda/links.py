"""Prepared data on a GPU: tables of pieces, and digest words (64-bit numbers to which kernels add digests)."""

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
"""Size in bytes of the words of a link: its digest, and a word for the position of a cast that overflowed."""


class GpuTables:
    """Base class of objects that own tables and digest words in a GPU's memory; `close` frees all of them.

    A derived class creates its tables inside `_building`.

    Raises:
        TransferOutcomeUnknown: kernels exceeded a deadline.
        TransferFailed: the GPU has too little free memory; nothing stays allocated.
    """

    def __init__(self, gpu: Gpu) -> None:
        gpu.refuse_late()
        self._gpu = gpu
        self._held: list[Callable[[], None]] = []

    def close(self) -> None:
        """Free all tables and digest words, unless kernels past their deadline may still use them. Idempotent."""
        held, self._held = self._held, []
        if not self._gpu.is_late:
            for free in held:
                free()

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Run a block that creates tables and digest words. If the block raises, free all that this object owns."""
        with ExitStack() as undo:
            undo.callback(self.close)
            yield
            undo.pop_all()

    def _load(self, tables: Mapping[PieceKind, StructuredArray]) -> list[PieceTable]:
        """Upload one table per kind of piece. `close` frees the tables."""
        loaded = []
        for kind, pieces in tables.items():
            loaded.append(load_table(self._gpu, kind, pieces))
            self._held.append(loaded[-1].close)
        return loaded

    def _allocate(self, nbytes: int) -> int:
        """Allocate GPU memory and return its address. `close` frees the memory."""
        address = self._gpu.device.allocate(nbytes)
        self._held.append(partial(self._gpu.device.free, address))
        return address

    def _queue_digest(
        self, words: int, hashed: Iterable[PieceTable], stored: Iterable[PieceTable] = ()
    ) -> None:
        """Queue kernels that compute one digest over the pieces of all these tables.

        Args:
            words: address of the words that get the digest.
            hashed: tables of the pieces to hash in place.
            stored: tables of the pieces to copy; the copied bytes are hashed.
        """
        gpu = self._gpu
        gpu.device.clear(words, WORDS_NBYTES, gpu.stream)
        for table in hashed:
            gpu.kernels.hash(table, gpu.stream, words)
        for table in stored:
            gpu.kernels.put(table, gpu.stream, words)


@final
class DeviceLink(GpuTables):
    """Tables and words of one link in GPU memory.

    Attributes:
        tables: one per kind of piece. Both ends of the link have the same pieces in the same order.
        digest: address of the link's words, `WORDS_NBYTES` long.
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
    """Upload pieces of one kind to the GPU, and return their table. The caller closes the table."""
    return PieceTable(gpu.device, pieces, kind.kernel, kind.dst_dtype.itemsize)


def read_digest(gpu: Gpu, address: int) -> str:
    """Wait for the GPU's stream, and return the digest at `address` as hexadecimal text."""
    return digest_text(read_words(gpu, address))


def read_sent(gpu: Gpu, address: int, program: LinkProgram) -> tuple[str, str]:
    """Wait for the GPU's stream, and return the digest of a link that was hashed at its source.

    Args:
        gpu: GPU of the source.
        address: address of the link's words, see `read_words`.
        program: program of the link.

    Returns:
        (digest in hexadecimal, error text of a cast that overflowed). The text is "" if no cast overflowed.
    """
    words, reason = read_words(gpu, address), ""
    if words[2]:
        op = item_at(words[2], program.ops, (op.nbytes for op in program.ops))
        reason = overflow_text(op.tensor, op.src_dtype, op.cast_dtype)
    return digest_text(words), reason


def read_words(gpu: Gpu, address: int) -> list[int]:
    """Wait for the GPU's stream, and return the three words at `address`.

    The first two words are the digest. The third word is 0 if no cast overflowed. Otherwise it is p + 1, and p is a
    position in the payload at which a cast overflowed.
    """
    found = gpu.device.download(address, WORDS_NBYTES, gpu.stream)
    words: list[int] = np.frombuffer(found, "<u8").tolist()
    return words


def item_at(overflow: int, items: Sequence[Item], nbytes: Iterable[int]) -> Item:
    """Return the op or copy in which a cast overflowed.

    `overflow` is the third word of `read_words`. The payloads of the `items` follow each other; `nbytes` has their sizes.
    """
    ends = itertools.accumulate(nbytes)
    return next(item for item, end in zip(items, ends, strict=True) if overflow <= end)


def digest_text(words: Sequence[int]) -> str:
    """Return a digest as 32 hexadecimal digits. Its two 64-bit words come first in `words`."""
    return f"{words[0]:016x}{words[1]:016x}"
