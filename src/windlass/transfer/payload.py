"""A link's payload as pieces in digest order, cut into chunks. Both ends compute the same pieces.

A piece is contiguous at the destination (in its parameter or in staging memory) and at the source
(in a parameter or in the packed payload of its op). A chunk is the unit that an engine verifies and
passes on. Chunk boundaries depend on the plan only.
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
    """Pieces in hash order. A piece has at most the bytes of a chunk and belongs to one chunk.

    Attributes:
        packed: (n,) True if the source packs the op; `src_offset` then counts from the packed
            payload.
        lands: (n,) True if the piece goes to staging memory; `dst_offset` then counts from its
            start.
        chunk: (n,) chunk index, ascending from 0; no chunk is empty.
    """

    packed: BoolArray = column("?")
    lands: BoolArray = column("?")
    chunk: Int64Array = column("<i8")

    @property
    def num_chunks(self) -> int:
        """Number of chunks; none is empty."""
        return int(self.chunk[-1]) + 1 if len(self) else 0

    def pieces_of(self, chunk: int) -> slice:
        """Return the slice of the pieces of a chunk."""
        start, stop = np.searchsorted(self.chunk, (chunk, chunk + 1)).tolist()
        return slice(start, stop)

    def digests(self, memory: MemoryOps, addresses: UInt64Array) -> ChunkDigests:
        """Return the digests of the chunks. `addresses` has the (n,) addresses of the pieces in `memory`.

        Raises:
            TransferFailed: the GPU has no room for the tables.
        """
        start = np.searchsorted(self.chunk, np.arange(self.num_chunks + 1))
        return memory.chunk_digests(addresses, self.nbytes, start)

    def at(self, parameter_addresses: Sequence[int], staging_address: int) -> UInt64Array:
        """Return the (n,) addresses of the pieces at a destination with these addresses of parameters and staging memory."""
        targets = np.array(parameter_addresses, np.uint64)
        base = np.where(self.lands, np.uint64(staging_address), targets[self.dst_parameter])
        return base + self.dst_offset.astype(np.uint64)


def payload_of(program: LinkProgram, chunk_nbytes: int) -> Payload:
    """Return the pieces of a link, divided into chunks.

    A chunk begins at the first piece at or after each multiple of `chunk_nbytes`.
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
