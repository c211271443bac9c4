"""A link's pieces on a GPU, and the words that its digest is added up in."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt

from windlass.execution.bind import LinkProgram
from windlass.execution.blocks import PieceArray, PieceKind
from windlass.planning.plan import Transform
from windlass.transports.cuda.gpu import Gpu
from windlass.transports.cuda.kernels import PieceTable, put_kernel

__all__ = [
    "DIGEST_NBYTES",
    "OWN_WORK_S",
    "DeviceLink",
    "UInt64Array",
    "load_link",
    "load_table",
    "read_digest",
    "unload_links",
]

DIGEST_NBYTES = 16
OWN_WORK_S = 60.0
"""For work on a GPU's own memory, which takes milliseconds."""
UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """A link on the device. `digest`: address of its two words.

    `tables`: one per kind of piece, in the same order and with the same pieces at both ends.
    """

    program: LinkProgram
    tables: tuple[PieceTable, ...]
    digest: int


def load_link(gpu: Gpu, program: LinkProgram, tables: Mapping[PieceKind, PieceArray]) -> DeviceLink:
    """Upload the tables of a link; all of them, or none is left behind.

    Raises:
        TransferFailed: the GPU has no room for them.
    """
    with ExitStack() as undo:
        loaded = []
        for kind, pieces in tables.items():
            loaded.append(load_table(gpu, kind, pieces))
            undo.callback(loaded[-1].close)
        link = DeviceLink(program, tuple(loaded), gpu.device.allocate(DIGEST_NBYTES))
        undo.pop_all()
    return link


def load_table(gpu: Gpu, kind: PieceKind, pieces: PieceArray) -> PieceTable:
    """Upload pieces of one kind; the caller closes the table."""
    return PieceTable(gpu.device, pieces, _kernel_of(kind), kind.dst_dtype.itemsize)


def _kernel_of(kind: PieceKind) -> str:
    match kind.transform:
        case Transform.NONE:
            return put_kernel(kind.src_dtype, kind.dst_dtype, kind.dst_dtype.itemsize)
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
    """The two words at `address`, as links report them; waits for no other stream."""
    a, b = np.frombuffer(gpu.device.download(address, DIGEST_NBYTES, gpu.stream), "<u8").tolist()
    return f"{a:016x}{b:016x}"
