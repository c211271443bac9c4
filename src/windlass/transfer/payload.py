"""A link's payload as pieces in the order of its digest, cut into chunks; the same at both ends.

A piece is contiguous at the destination, in its parameter or in staging memory, and at the source,
in a parameter or where the op's payload was packed. Chunks are what an engine verifies and passes on;
where they begin and end follows from the plan alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.memory.ops import ChunkDigests, Int64Array, MemoryOps, UInt64Array
from windlass.planning.program import LinkProgram

__all__ = ["Payload", "payload_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Columns of n pieces, ordered as their bytes are hashed.

    Attributes:
        op: (n,) index in `LinkProgram.ops`.
        packed: (n,) whether the source packs the op first.
        src_parameter: (n,) of the source; meaningless where packed.
        src_offset: (n,) bytes from the start of that parameter, or of the op's packed payload.
        lands: (n,) whether it goes to staging memory.
        dst_parameter: (n,) of the destination; meaningless where it lands.
        dst_offset: (n,) bytes from the start of that parameter, or of staging memory.
        nbytes: (n,) at most one chunk.
        chunk_start: (num_chunks + 1,) first piece of each chunk.
    """

    op: Int64Array
    packed: npt.NDArray[np.bool_]
    src_parameter: Int64Array
    src_offset: Int64Array
    lands: npt.NDArray[np.bool_]
    dst_parameter: Int64Array
    dst_offset: Int64Array
    nbytes: Int64Array
    chunk_start: Int64Array

    @property
    def num_chunks(self) -> int:
        """Chunks, none of them empty."""
        return len(self.chunk_start) - 1

    def pieces_of(self, chunk: int) -> slice:
        """The pieces of a chunk."""
        return slice(int(self.chunk_start[chunk]), int(self.chunk_start[chunk + 1]))

    def chunk_nbytes(self, chunk: int) -> int:
        """Bytes of a chunk."""
        return int(self.nbytes[self.pieces_of(chunk)].sum())

    def digests(self, memory: MemoryOps, addresses: UInt64Array) -> ChunkDigests:
        """Of its chunks, where the pieces lie at (n,) `addresses` of `memory`.

        Raises:
            TransferFailed: a GPU without room for its tables.
        """
        return memory.chunk_digests(addresses, self.nbytes, self.chunk_start)

    def at_destination(self, targets: UInt64Array, staging_address: int) -> UInt64Array:
        """(n,) addresses, given where parameters and staging memory begin."""
        parameter = np.where(self.lands, 0, self.dst_parameter)
        base = np.where(self.lands, np.uint64(staging_address), targets[parameter])
        return base + self.dst_offset.astype(np.uint64)


def payload_of(program: LinkProgram, chunk_nbytes: int) -> Payload:
    """Cut the payload of a link.

    Args:
        program: of the link, at either end.
        chunk_nbytes: chunks begin at the first piece at or after each multiple of this.
    """
    runs, ops = program.direct, program.ops
    packed = np.array([i for i, op in enumerate(ops) if not op.is_direct], np.int64)
    lands = np.array([ops[i].lands for i in packed], np.bool_)
    at = np.array(
        [ops[i].landing_offset if ops[i].lands else ops[i].dst_offset for i in packed], np.int64
    )
    none = np.zeros(len(packed), np.int64)
    columns = {
        "op": np.concatenate([runs.op, packed]),
        "packed": np.repeat([False, True], [len(runs), len(packed)]),
        "src_parameter": np.concatenate([runs.src_parameter, none]),
        "src_offset": np.concatenate([runs.src_offset, none]),
        "lands": np.concatenate([np.zeros(len(runs), np.bool_), lands]),
        "dst_parameter": np.concatenate(
            [runs.dst_parameter, np.array([ops[i].dst_parameter for i in packed], np.int64)]
        ),
        "dst_offset": np.concatenate([runs.dst_offset, at]),
        "nbytes": np.concatenate(
            [runs.nbytes, np.array([ops[i].nbytes for i in packed], np.int64)]
        ),
    }
    order = np.argsort(columns["op"], kind="stable")
    count = -(-columns["nbytes"][order] // chunk_nbytes)
    rows = np.repeat(order, count)
    step = (np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)) * chunk_nbytes
    cut = {name: column[rows] for name, column in columns.items()}
    cut["nbytes"] = np.minimum(cut["nbytes"] - step, chunk_nbytes)
    cut["src_offset"] = cut["src_offset"] + step
    cut["dst_offset"] = cut["dst_offset"] + step
    begin = np.cumsum(cut["nbytes"]) - cut["nbytes"]
    chunk = begin // chunk_nbytes
    first = np.flatnonzero(np.r_[True, chunk[1:] != chunk[:-1]]) if len(chunk) else chunk
    return Payload(**cut, chunk_start=np.append(first, len(chunk)))
