"""A link's pieces on a GPU, and the words that its digest is added up in."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from windlass.layout.columns import StructuredArray
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.kernels import PieceTable, put_kernel
from windlass.memory.cuda.pieces import PieceKind
from windlass.memory.packing import overflow_text
from windlass.planning.plan import Transform
from windlass.planning.program import LinkProgram

DIGEST_NBYTES = 16
WORDS_NBYTES = DIGEST_NBYTES + 8
"""Of a link: a digest, and a word that says where a cast overflowed."""


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """A link on the device. `digest`: address of its words.

    `tables`: one per kind of piece, in the same order and with the same pieces at both ends.
    """

    program: LinkProgram
    tables: tuple[PieceTable, ...]
    digest: int


def load_link(
    gpu: Gpu, program: LinkProgram, tables: Mapping[PieceKind, StructuredArray]
) -> DeviceLink:
    """Upload the tables of a link; all of them, or none is left behind.

    Raises:
        TransferFailed: the GPU has no room for them.
    """
    with ExitStack() as undo:
        loaded = []
        for kind, pieces in tables.items():
            loaded.append(load_table(gpu, kind, pieces))
            undo.callback(loaded[-1].close)
        link = DeviceLink(program, tuple(loaded), gpu.device.allocate(WORDS_NBYTES))
        undo.pop_all()
    return link


def load_table(gpu: Gpu, kind: PieceKind, pieces: StructuredArray) -> PieceTable:
    """Upload pieces of one kind; the caller closes the table."""
    return PieceTable(gpu.device, pieces, _kernel_of(kind), kind.dst_dtype.itemsize)


def _kernel_of(kind: PieceKind) -> str:
    match kind.transform:
        case Transform.NONE:
            return put_kernel(kind.src_dtype, kind.dst_dtype)
        case Transform.FP8_BLOCK_VALUES:
            return f"fp8_values_{kind.src_dtype}"
        case Transform.FP8_BLOCK_SCALES:
            return f"fp8_scales_{kind.src_dtype}"
        case _:
            assert_never(kind.transform)


def unload_links(gpu: Gpu, links: Mapping[str, DeviceLink]) -> None:
    """Free their tables and words."""
    for link in links.values():
        for table in link.tables:
            table.close()
        gpu.device.free(link.digest)


def read_digest(gpu: Gpu, address: int) -> str:
    """Return the digest at `address`, as links report it; waits for no other stream."""
    a, b, _ = read_words(gpu, address)
    return f"{a:016x}{b:016x}"


def read_sent(gpu: Gpu, address: int, program: LinkProgram) -> tuple[str, str]:
    """Return what kernels noted of a link at its source.

    Returns:
        (digest, which tensor's cast overflowed or empty).
    """
    a, b, overflow = read_words(gpu, address)
    reason = ""
    if overflow:
        ends = itertools.accumulate(op.nbytes for op in program.ops)
        op = next(op for op, end in zip(program.ops, ends, strict=True) if overflow <= end)
        reason = overflow_text(op.tensor, op.src_dtype, op.cast_dtype)
    return f"{a:016x}{b:016x}", reason


def read_words(gpu: Gpu, address: int) -> list[int]:
    """Return the words at `address`: a digest, and where a cast overflowed or 0."""
    found = gpu.device.download(address, WORDS_NBYTES, gpu.stream)
    words: list[int] = np.frombuffer(found, "<u8").tolist()
    return words
