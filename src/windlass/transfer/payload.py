"""A link's payload as pieces in the order of its digest, cut into chunks; the same at both ends.

A piece is contiguous at the destination, in its parameter or in staging memory, and at the source,
in a parameter or where the op's payload was packed. Chunks are what an engine verifies and passes on;
where they begin and end follows from the plan alone.
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
    """Pieces in the order in which their bytes are hashed, each of at most one chunk.

    Attributes:
        packed: (n,) whether the source packs the op first: `src_offset` counts from its packed payload then.
        lands: (n,) whether it goes to staging memory: `dst_offset` counts from its start then.
        chunk: (n,) ascending from 0; no chunk is empty.
    """

    packed: BoolArray = column("?")
    lands: BoolArray = column("?")
    chunk: Int64Array = column("<i8")

    @property
    def num_chunks(self) -> int:
        """Chunks, none of them empty."""
        return int(self.chunk[-1]) + 1 if len(self) else 0

    def pieces_of(self, chunk: int) -> slice:
        """The pieces of a chunk."""
        start, stop = np.searchsorted(self.chunk, (chunk, chunk + 1)).tolist()
        return slice(start, stop)

    def digests(self, memory: MemoryOps, addresses: UInt64Array) -> ChunkDigests:
        """Of its chunks, where the pieces lie at (n,) `addresses` of `memory`.

        Raises:
            TransferFailed: a GPU without room for its tables.
        """
        start = np.searchsorted(self.chunk, np.arange(self.num_chunks + 1))
        return memory.chunk_digests(addresses, self.nbytes, start)

    def at(self, parameter_addresses: Sequence[int], staging_address: int) -> UInt64Array:
        """(n,) addresses at the destination, given where parameters and staging memory begin."""
        targets = np.array(parameter_addresses, np.uint64)
        base = np.where(self.lands, np.uint64(staging_address), targets[self.dst_parameter])
        return base + self.dst_offset.astype(np.uint64)


def payload_of(program: LinkProgram, chunk_nbytes: int) -> Payload:
    """Cut the payload of a link; chunks begin at the first piece at or after each multiple of `chunk_nbytes`."""
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
