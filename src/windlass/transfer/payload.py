"""A link's payload as pieces in the order of its digest, cut into chunks; the same at both ends.

A piece is contiguous at the destination, in its parameter or in staging memory, and at the source,
in a parameter or where the op's payload was packed. Chunks are what an engine verifies and passes on;
where they begin and end follows from the plan alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from windlass.layout.columns import BoolArray, Int64Array, UInt64Array
from windlass.memory.ops import ChunkDigests, MemoryOps
from windlass.net.clock import Deadline
from windlass.planning.intersect import counted
from windlass.planning.program import LinkProgram
from windlass.transfer.bindings import DestinationBinding
from windlass.transports.base import OneSidedTransport, WriteBatch


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
    packed: BoolArray
    src_parameter: Int64Array
    src_offset: Int64Array
    lands: BoolArray
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

    def write(
        self,
        transport: OneSidedTransport,
        binding: DestinationBinding,
        chunk: int,
        local: UInt64Array,
        remote: UInt64Array,
        deadline: Deadline,
    ) -> None:
        """Write one chunk from (n,) `local` to (n,) `remote`; return once it is visible to the peer.

        Raises:
            TransferError: see `OneSidedTransport.write`.
        """
        deadline.check_before_more()
        pieces = self.pieces_of(chunk)
        transport.write(
            WriteBatch(
                endpoint=binding.endpoint,
                local_addresses=local[pieces],
                remote_addresses=remote[pieces],
                nbytes=self.nbytes[pieces].astype(np.uint64),
                regions=binding.regions,
            ),
            deadline_s=max(deadline.remaining_s, 0.001),
        )

    def at(self, binding: DestinationBinding) -> UInt64Array:
        """(n,) addresses at a peer."""
        targets = np.array(binding.parameter_addresses, np.uint64)
        return self.at_destination(targets, binding.staging_address)

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
    source = runs.op, runs.src_parameter, runs.src_offset
    direct = *source, runs.dst_parameter, runs.dst_offset, runs.nbytes
    packed = [
        (i, 0, 0, op.dst_parameter, op.staging_offset if op.lands else op.dst_offset, op.nbytes)
        for i, op in enumerate(ops)
        if not op.is_direct
    ]
    whole = np.concatenate([np.stack(direct, 1), np.array(packed, np.int64).reshape(-1, 6)])
    whole = whole[np.argsort(whole[:, 0], kind="stable")]
    count = -(-whole[:, 5] // chunk_nbytes)
    step = counted(count) * chunk_nbytes
    op_of, src_parameter, src_offset, dst_parameter, dst_offset, left = np.repeat(whole, count, 0).T
    nbytes = np.minimum(left - step, chunk_nbytes)
    chunk = (np.cumsum(nbytes) - nbytes) // chunk_nbytes
    first = np.flatnonzero(np.r_[True, chunk[1:] != chunk[:-1]]) if len(chunk) else chunk
    return Payload(
        op=op_of,
        packed=np.array([not op.is_direct for op in ops], np.bool_)[op_of],
        src_parameter=src_parameter,
        src_offset=src_offset + step,
        lands=np.array([op.lands for op in ops], np.bool_)[op_of],
        dst_parameter=dst_parameter,
        dst_offset=dst_offset + step,
        nbytes=nbytes,
        chunk_start=np.append(first, len(chunk)),
    )
