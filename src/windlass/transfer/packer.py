"""Stage 5 in host memory: the bytes of a link that cannot go as they lie, packed into the arena and hashed.

In come a `LinkProgram` and where the parameters of both sides lie; `Pieces` go out: an address here,
one at the peer, and bytes, for one-sided writes. The link's digest is taken on the way, over all ops
in plan order, those that go as they lie included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import xxhash

from windlass.errors import PlanError
from windlass.memory.digest import hash_strided, new_digest
from windlass.memory.host import hash_link, least_half, pack_op, split_op
from windlass.memory.ops import ALIGNMENT, Buffer, DigestKind, aligned
from windlass.planning.program import BoundOp, LinkProgram
from windlass.transfer.arena import Arena, ArenaSlot
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.pieces import Pieces, UInt64Array, batches, direct_pieces, packed_capacity
from windlass.transports.base import OneSidedTransport

__all__ = ["HostPacker", "PackedLink", "Packer", "Peer", "as_pieces"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A destination, with its parameter addresses ready for arithmetic."""

    binding: DestinationBinding
    targets: UInt64Array

    @classmethod
    def bound_to(cls, binding: DestinationBinding) -> Peer:
        """The peer that offers `binding`."""
        return cls(binding, np.array(binding.parameter_addresses, np.uint64))

    def address_of(self, op: BoundOp) -> int:
        """Where the payload of a packed op goes."""
        if op.lands:
            return self.binding.landing_address + op.landing_offset
        return self.binding.parameter_addresses[op.dst_parameter] + op.dst_offset


@dataclass(frozen=True, slots=True)
class PackedLink:
    """A link that is packed and hashed."""

    batches: tuple[Pieces, ...]
    digest: str


class Packer(Protocol):
    """The arena of one rank, in the memory that its parameters are in. Not thread-safe.

    Attributes:
        sources: where the parameters lie, in manifest order; the owner keeps it up to date.
        digest_kind: of the digests it takes.
    """

    digest_kind: DigestKind
    sources: UInt64Array

    @property
    def arena(self) -> Buffer | None:
        """What is packed into; None where nothing is."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of arena allocated now."""
        ...

    def holds(self, programs: Sequence[LinkProgram]) -> bool:
        """Whether the packed bytes of all these links fit at once."""
        ...

    def fit(self, programs: Sequence[LinkProgram]) -> None:
        """Have an arena that is large enough for these links, within the limit.

        Raises:
            RegionError: memory cannot be registered.
        """
        ...

    def abandon(self, *, renew: bool = True) -> None:
        """Bytes may still leave the arena: never reuse or unmap it.

        `renew`: have a new one, for what follows.
        """
        ...

    def close(self) -> None:
        """Free the arena. Idempotent."""
        ...

    def hash_links(
        self, links: Sequence[tuple[LinkProgram, Peer]], pool: Executor
    ) -> tuple[str, ...]:
        """Digests of what links are to deliver, hex, from the parameters as they are.

        The arena may be used; what was packed is gone. `pool`: runs what can run side by side.

        Raises:
            TransferFailed: a cast overflows.
        """
        ...

    def pack_link(self, program: LinkProgram, peer: Peer, offset: int) -> tuple[PackedLink, int]:
        """Pack and hash a whole link at `offset` of the arena; returns where the next one may begin."""
        ...

    def pack_ops(self, program: LinkProgram, offset: int) -> tuple[dict[int, int], int]:
        """Pack a link at `offset` without hashing it.

        Returns:
            (op -> address of its payload, where the next link may begin).
        """
        ...

    def ring(self, program: LinkProgram, peer: Peer) -> Iterator[Pieces]:
        """Batches that use the two halves in turn; at most one may be in flight between two.

        They are not hashed: what `hash_links` saw before anything was sent is what must arrive.
        """
        ...


@final
class HostPacker:
    """The arena of one rank in host memory. See `Packer`.

    Args:
        transport: registers the arena.
        limit_nbytes: capacity of the arena; 0 for as much as one update needs.
    """

    digest_kind = DigestKind.XXH3

    def __init__(self, transport: OneSidedTransport, limit_nbytes: int) -> None:
        self._slot = ArenaSlot(lambda nbytes: Arena(transport, nbytes), limit_nbytes)
        self.sources: UInt64Array = np.zeros(0, np.uint64)

    @property
    def arena(self) -> Arena | None:
        """See `Packer`."""
        return self._slot.arena

    @property
    def nbytes(self) -> int:
        """See `Packer`."""
        return self._slot.nbytes

    def holds(self, programs: Sequence[LinkProgram]) -> bool:
        """See `Packer`."""
        return packed_capacity(programs) <= self.nbytes

    def fit(self, programs: Sequence[LinkProgram]) -> None:
        """See `Packer`."""
        needed = packed_capacity(programs)
        capacity = self._slot.capacity_for(needed)
        half_nbytes = capacity // 2 & -ALIGNMENT
        least = max((least_half(program) for program in programs), default=0)
        if half_nbytes < least and capacity < needed:
            raise PlanError(
                f"arena_nbytes: half of it must hold one row of blocks, {least} bytes, got {half_nbytes}"
            )
        self._slot.fit(capacity)

    def abandon(self, *, renew: bool = True) -> None:
        """See `Packer`."""
        self._slot.abandon(renew=renew)

    def close(self) -> None:
        """See `Packer`."""
        self._slot.close()

    def hash_links(
        self, links: Sequence[tuple[LinkProgram, Peer]], pool: Executor
    ) -> tuple[str, ...]:
        """See `Packer`."""
        return tuple(pool.map(lambda link: hash_link(link[0], self.sources), links))

    def pack_link(self, program: LinkProgram, peer: Peer, offset: int) -> tuple[PackedLink, int]:
        """See `Packer`."""
        digest = new_digest()
        packed = []
        for op in program.ops:
            if op.is_direct:
                self._hash_source(digest, op)
            else:
                packed.append((self._pack(op, offset, digest), peer.address_of(op), op.nbytes))
                offset += aligned(op.nbytes)
        found = (*batches(self._direct(program, peer)), *batches(as_pieces(packed)))
        return PackedLink(found, digest.hexdigest()), offset

    def pack_ops(self, program: LinkProgram, offset: int) -> tuple[dict[int, int], int]:
        """See `Packer`."""
        packed = {}
        for index, op in enumerate(program.ops):
            if not op.is_direct:
                packed[index] = self._pack(op, offset, None)
                offset += aligned(op.nbytes)
        return packed, offset

    def ring(self, program: LinkProgram, peer: Peer) -> Iterator[Pieces]:
        """See `Packer`."""
        yield from batches(self._direct(program, peer))
        half_nbytes = self.nbytes // 2 & -ALIGNMENT
        if half_nbytes < least_half(program) and self.holds((program,)):
            half_nbytes = (
                self.nbytes
            )  # of a link that is written again: all of it is the first half
        half, used = 0, 0
        packed: list[tuple[int, int, int]] = []
        for op in program.ops:
            if op.is_direct:
                continue
            for part in split_op(op, half_nbytes):
                if used + aligned(part.nbytes) > half_nbytes:
                    yield from batches(as_pieces(packed))
                    packed, half, used = [], 1 - half, 0
                address = self._pack(part, half * half_nbytes + used, None)
                packed.append((address, peer.address_of(part), part.nbytes))
                used += aligned(part.nbytes)
        yield from batches(as_pieces(packed))

    def _direct(self, program: LinkProgram, peer: Peer) -> Pieces:
        return direct_pieces(program.direct, self.sources, peer.targets)

    def _hash_source(self, digest: xxhash.xxh3_128, op: BoundOp) -> None:
        hash_strided(
            digest,
            address=int(self.sources[op.src_parameter]) + op.src_offset,
            sizes=op.sizes,
            strides_bytes=op.src_strides,
            dtype=op.src_dtype,
        )

    def _pack(self, op: BoundOp, offset: int, digest: xxhash.xxh3_128 | None) -> int:
        """Pack an op at `offset` of the arena and hash it, if asked to; returns its address."""
        if self._slot.arena is None:
            raise PlanError("pack: the sender has no arena; connect first")
        address = self._slot.arena.address + offset
        pack_op(op, int(self.sources[op.src_parameter]), address)
        if digest is not None:
            digest.update(self._slot.arena.bytes[offset : offset + op.nbytes].data)
        return address


def as_pieces(rows: Sequence[tuple[int, int, int]]) -> Pieces:
    """Writes from rows of local address, remote address, bytes."""
    table = np.array(rows, np.uint64).reshape(-1, 3)
    return Pieces(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())
