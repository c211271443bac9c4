"""Kernels of `put.cu`: they copy the pieces of a table, also into memory of a peer."""

from __future__ import annotations

import ctypes
import itertools
from importlib import resources
from typing import final

import numpy as np

from windlass.errors import ConfigError
from windlass.layout.columns import Int64Array, StructuredArray, UInt64Array
from windlass.layout.dtypes import DType, cast_refusal
from windlass.memory.cuda.driver import Device, Stream, compile_source
from windlass.memory.ranges import split_pieces

PIECE = np.dtype(
    [
        ("src", np.uint64),
        ("dst", np.uint64),
        ("src_pitch", np.uint64),
        ("dst_pitch", np.uint64),
        ("pos", np.uint64),
        ("pos_pitch", np.uint64),
        ("rows", np.uint32),
        ("row_elems", np.uint32),
    ]
)
"""`Piece` of put.cu: addresses, pitches and payload positions in bytes, sizes in elements."""

MAX_PIECE_NBYTES = 64 << 10
"""Largest piece in bytes. One block of threads copies a piece; smaller pieces keep more of the
device busy at the end."""
SMALL_PIECE_NBYTES = 8 << 10
"""If the mean piece size is at most this many bytes, 128 threads copy a piece, so that more pieces are
copied at once."""
SMALL_BLOCK, LARGE_BLOCK = 128, 512
THREADS_PER_MULTIPROCESSOR = 2048

PART_NBYTES = 1 << 30
"""Smallest size in bytes of a part of a table. The sender reports each part when the part is written, and the receiver
then hashes the part while the sender writes the next part. Only the hashing of the last part comes after all writes: 0.5
ms for 1 GiB. The parts together are written as fast as one whole table (H200, 2026-11-21)."""


def raw_pieces(
    sources: UInt64Array, targets: UInt64Array, nbytes: UInt64Array, max_nbytes: int
) -> StructuredArray:
    """Cut n ranges of bytes into pieces of at most `max_nbytes`. In the payload, the ranges follow each other.

    Args:
        sources: (n,) addresses to read.
        targets: (n,) addresses to write.
        nbytes: (n,) sizes in bytes.
        max_nbytes: largest size of a piece.
    """
    source, target, size = split_pieces(sources, targets, nbytes, max_nbytes)
    pieces = np.zeros(len(size), PIECE)
    pieces["src"], pieces["dst"], pieces["row_elems"] = source, target, size
    pieces["pos"] = np.cumsum(size) - size
    pieces["rows"] = 1
    return pieces


@final
class PieceTable:
    """Pieces on the device, all with the same source dtype and the same destination dtype.

    Args:
        device: GPU that stores the table.
        pieces: (n,) `PIECE`.
        kernel: name of the kernel that copies the pieces, without the suffix `_hashed`.
        dst_itemsize: bytes of one element at the destination.

    Raises:
        TransferFailed: the GPU has too little free memory.

    Attributes:
        address: address of the pieces in GPU memory; 0 after `close`.
        block: threads per block of a launch.
        parts: index ranges of the parts into which the pieces are divided, see `cut_parts`.
    """

    def __init__(
        self, device: Device, pieces: StructuredArray, kernel: str, dst_itemsize: int
    ) -> None:
        self.kernel = kernel
        self.itemsize = dst_itemsize
        self.num_pieces = len(pieces)
        nbytes = pieces["rows"].astype(np.int64) * pieces["row_elems"] * dst_itemsize
        mean = nbytes.mean() if len(pieces) else 0
        self.parts = cut_parts(nbytes)
        # Quantising kernels always use 512 threads, because they keep a block of 128 x 128 elements in registers.
        small = mean <= SMALL_PIECE_NBYTES and not kernel.startswith("fp8")
        self.block = SMALL_BLOCK if small else LARGE_BLOCK
        self._device = device
        self.address = device.allocate(max(pieces.nbytes, 1))
        if len(pieces):
            device.upload(self.address, np.ascontiguousarray(pieces).view(np.uint8).data)

    def close(self) -> None:
        """Free the table. Idempotent."""
        if self.address:
            self._device.free(self.address)
        self.address = 0


def cut_parts(nbytes: Int64Array) -> tuple[range, ...]:
    """Divide pieces into parts of about equal size. Return the index range of each part; () if there are no pieces.

    Return as many parts as possible such that their average size is at least `PART_NBYTES`, and at least one part.

    Args:
        nbytes: (num_pieces,) size of each piece in bytes.
    """
    ends = np.cumsum(nbytes)
    if not len(ends):
        return ()
    num_parts = max(int(ends[-1]) // PART_NBYTES, 1)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, num_parts) // num_parts, "right")
    bounds = sorted({0, *cuts.tolist(), len(ends)})
    return tuple(range(first, stop) for first, stop in itertools.pairwise(bounds))


def put_kernel(src_dtype: DType, dst_dtype: DType) -> str:
    """Return the name of the kernel that reads elements of `src_dtype` and stores them as `dst_dtype`.

    Raises:
        ConfigError: the dtypes differ, and `CASTS` does not contain the pair.
    """
    if src_dtype is dst_dtype:
        return f"put_{dst_dtype.itemsize}"
    if refusal := cast_refusal(src_dtype, dst_dtype):
        raise ConfigError(f"cuda: {refusal}")
    return f"put_{src_dtype}_{dst_dtype}"


@final
class Kernels:
    """Kernels compiled for one device.

    Args:
        device: GPU that runs the kernels.
        num_multiprocessors: largest number of multiprocessors that a launch uses, so that the engine
            can use the others; 0 for all.

    Raises:
        TransportUnavailable: NVRTC is missing.
    """

    def __init__(self, device: Device, num_multiprocessors: int = 0) -> None:
        self._device = device
        self._num_threads = THREADS_PER_MULTIPROCESSOR * (
            num_multiprocessors or device.num_multiprocessors
        )
        source = resources.files("windlass.memory.cuda").joinpath("put.cu").read_text()
        self._module = device.load(compile_source(source, device.architecture))
        self._functions: dict[str, object] = {}

    def put(
        self,
        table: PieceTable,
        stream: Stream,
        digest_address: int = 0,
        part: range | None = None,
        num_multiprocessors: int = 0,
    ) -> None:
        """Queue the copies of a table.

        Args:
            table: pieces to copy.
            stream: stream of the copies.
            digest_address: address of three 64-bit words, or 0. Kernels add the digest of the
                copied bytes to the first two words. If a cast overflows, kernels set the third word
                to 1 + the position of an overflowing piece in the payload.
            part: range of the table's pieces; by default all.
            num_multiprocessors: largest number of multiprocessors for this launch; 0 for the constructor's limit.
        """
        name = f"{table.kernel}_hashed" if digest_address else table.kernel
        self._launch(name, table, stream, digest_address, part, num_multiprocessors)

    def hash(
        self, table: PieceTable, stream: Stream, digest_address: int, part: range | None = None
    ) -> None:
        """Queue the hashing of the bytes at the pieces' destinations; add the digest to the words at `digest_address`."""
        self._launch(f"hash_{table.itemsize}", table, stream, digest_address, part)

    def _launch(
        self,
        name: str,
        table: PieceTable,
        stream: Stream,
        digest_address: int,
        part: range | None,
        num_multiprocessors: int = 0,
    ) -> None:
        pieces = range(table.num_pieces) if part is None else part
        if not pieces:
            return
        if name not in self._functions:
            self._functions[name] = self._device.function(self._module, name)
        arguments = (
            ctypes.c_uint64(table.address + pieces.start * PIECE.itemsize),
            ctypes.c_uint32(len(pieces)),
            ctypes.c_uint64(digest_address),
        )
        num_threads = THREADS_PER_MULTIPROCESSOR * num_multiprocessors or self._num_threads
        grid = min(num_threads // table.block, len(pieces))
        self._device.launch(self._functions[name], grid, table.block, arguments, stream.handle)
