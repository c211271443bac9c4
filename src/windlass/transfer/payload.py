"""The payload of a link, divided into pieces and chunks for a relay.

A piece is contiguous at the destination (in a parameter or in staging memory) and at the source (in a parameter or in
the packed payload of its op). A chunk is a sequence of pieces that an engine verifies and passes on as a unit. Both
ends of a link compute the same pieces and chunks, because these depend only on the plan and on the chunk size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windlass.layout.columns import BoolArray, Int64Array, UInt64Array, column
from windlass.memory.ops import ChunkDigests, MemoryOps
from windlass.planning.intersect import counted
from windlass.planning.program import DirectRuns, LinkProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload(DirectRuns):
    """Pieces of a link's payload, in the order in which the digest covers them. Each piece belongs to one chunk.

    Attributes:
        packed: (n,) True if the source packs the op. `src_offset` is then an offset in the packed payload of the op.
        lands: (n,) True if the piece is written to staging memory. `dst_offset` is then an offset in staging memory.
        chunk: (n,) chunk index, ascending from 0; no chunk is empty.
    """

    packed: BoolArray = column("?")
    lands: BoolArray = column("?")
    chunk: Int64Array = column("<i8")

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return int(self.chunk[-1]) + 1 if len(self) else 0

    def pieces_of(self, chunk: int) -> slice:
        """Return the index range of the pieces of a chunk, as a slice."""
        start, stop = np.searchsorted(self.chunk, (chunk, chunk + 1)).tolist()
        return slice(start, stop)

    def digests(self, memory: MemoryOps, addresses: UInt64Array) -> ChunkDigests:
        """Prepare the digests of the chunks.

        Args:
            memory: memory that contains the pieces.
            addresses: (n,) addresses of the pieces.

        Raises:
            TransferFailed: the GPU has too little memory for the tables.
        """
        start = np.searchsorted(self.chunk, np.arange(self.num_chunks + 1))
        return memory.chunk_digests(addresses, self.nbytes, start)

    def at(self, parameter_addresses: Sequence[int], staging_address: int) -> UInt64Array:
        """Return the (n,) addresses of the pieces at a destination.

        Args:
            parameter_addresses: addresses of the destination's parameters.
            staging_address: address of its staging memory.
        """
        targets = np.array(parameter_addresses, np.uint64)
        base = np.where(self.lands, np.uint64(staging_address), targets[self.dst_parameter])
        return base + self.dst_offset.astype(np.uint64)


def payload_of(program: LinkProgram, chunk_nbytes: int) -> Payload:
    """Return the pieces of a link. A piece has at most `chunk_nbytes` bytes.

    To find the chunk of a piece, divide the byte offset of the piece in the payload by `chunk_nbytes`, and round down. The
    last piece of a chunk may cross the chunk's end, so a chunk has less than twice `chunk_nbytes` bytes.
    """
    ops = program.ops
    packed = np.array([not op.is_direct for op in ops], np.bool_)
    lands = np.array([op.lands for op in ops], np.bool_)
    rest = [(i, op) for i, op in enumerate(ops) if not op.is_direct]
    offsets = [op.staging_offset if op.lands else op.dst_offset for _, op in rest]
    none = np.zeros(len(rest), np.int32)
    beside = DirectRuns(
        op=np.array([i for i, _ in rest], np.int64),
        src_parameter=none,
        src_offset=none.astype(np.int64),
        dst_parameter=np.array([op.dst_parameter for _, op in rest], np.int32),
        dst_offset=np.array(offsets, np.int64),
        nbytes=np.array([op.nbytes for _, op in rest], np.int64),
    )
    whole = DirectRuns.join([program.direct, beside])
    whole = whole.select(np.argsort(whole.op, kind="stable"))
    count = -(-whole.nbytes // chunk_nbytes)
    runs, step = (
        whole.select(np.repeat(np.arange(len(whole)), count)),
        counted(count) * chunk_nbytes,
    )
    nbytes = np.minimum(runs.nbytes - step, chunk_nbytes)
    return Payload(
        op=runs.op,
        src_parameter=runs.src_parameter,
        src_offset=runs.src_offset + step,
        dst_parameter=runs.dst_parameter,
        dst_offset=runs.dst_offset + step,
        nbytes=nbytes,
        packed=packed[runs.op],
        lands=lands[runs.op],
        chunk=(np.cumsum(nbytes) - nbytes) // chunk_nbytes,
    )
