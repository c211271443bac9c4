"""Packs links into an arena, hashes them, and returns their one-sided writes.

Contiguous bytes that need no cast (DIRECT ops) are written from the parameter itself. The payloads of all other ops are
packed: gathered, cast and quantised into the arena. The inputs are a `LinkProgram` and the parameter addresses of both
ends; the outputs are `WriteBatch`es. The digest of a link covers all its ops in plan order, DIRECT ops too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import final

import numpy as np

from windlass.errors import PlanError
from windlass.layout.columns import UInt64Array
from windlass.memory.ops import OWN_WORK_S, LinkDigests, LinkPack, MemoryOps
from windlass.memory.packing import ALIGNMENT, PackedPart, aligned
from windlass.memory.ranges import Pieces
from windlass.planning.program import BoundOp, LinkProgram
from windlass.transfer.arena import Arena, ArenaSlot
from windlass.transfer.bindings import DestinationBinding
from windlass.transports.base import OneSidedTransport, WriteBatch


def packed_capacity(programs: Sequence[LinkProgram]) -> int:
    """Return the size in bytes of an arena that can hold the packed payloads of all these links at once."""
    return sum(aligned(op.nbytes) for p in programs for op in p.ops if not op.is_direct)


def batches_to(
    transport: OneSidedTransport,
    binding: DestinationBinding,
    local: UInt64Array,
    remote: UInt64Array,
    nbytes: UInt64Array,
) -> Iterator[WriteBatch]:
    """Yield the writes to a destination in batches of at most `transport.max_pieces` pieces.

    `local` and `remote` are the (n,) addresses of the pieces in this process and at the destination. `nbytes` contains
    their sizes.
    """
    step = transport.max_pieces(binding.endpoint)
    for start in range(0, len(nbytes), step):
        part = slice(start, start + step)
        yield WriteBatch(
            endpoint=binding.endpoint,
            local_addresses=local[part],
            remote_addresses=remote[part],
            nbytes=nbytes[part],
            regions=binding.regions,
        )


@dataclass(frozen=True, slots=True)
class Peer:
    """A destination. `targets` is `binding.parameter_addresses` as an array."""

    binding: DestinationBinding
    targets: UInt64Array

    @classmethod
    def bound_to(cls, binding: DestinationBinding) -> Peer:
        """Return a `Peer` for the destination that has this binding."""
        return cls(binding, np.array(binding.parameter_addresses, np.uint64))

    def address_of(self, op: BoundOp) -> int:
        """Return the address at the destination to which the packed payload of an op is written."""
        if op.lands:
            return self.binding.staging_address + op.staging_offset
        return self.binding.parameter_addresses[op.dst_parameter] + op.dst_offset


@dataclass(frozen=True, slots=True)
class PackedBytes:
    """Bytes of a link whose packed ops are all in the arena at once.

    Attributes:
        pack: places of the packed ops in the arena.
        sources: (num_parameters,) addresses of the parameters, for DIRECT ops.
        digest: digest of the link.
    """

    pack: LinkPack
    sources: UInt64Array
    digest: str


@final
class Packer:
    """Packer of one sending rank, with an arena in the same memory as the parameters. Not thread-safe.

    The packer prepares the copies of a link once (`LinkPack`), and uses them until a parameter or the arena moves.

    Args:
        transport: transport that registers the arena.
        memory: memory of the parameters and of the arena.
        limit_nbytes: maximum size of the arena in bytes; 0 for as much as one update needs.

    Attributes:
        memory: memory of the parameters and of the arena.
        slot: holder of the arena. Only the packer changes it.
    """

    def __init__(
        self, transport: OneSidedTransport, memory: MemoryOps, limit_nbytes: int = 0
    ) -> None:
        self._transport, self.memory = transport, memory
        self.slot = ArenaSlot(lambda nbytes: Arena(transport, nbytes, memory), limit_nbytes)
        self._sources: UInt64Array = np.zeros(0, np.uint64)
        self._packs: dict[tuple[str, int], LinkPack] = {}
        self._digests: LinkDigests | None = None
        self._hashed: tuple[LinkProgram, ...] = ()

    @property
    def sources(self) -> UInt64Array:
        """(num_parameters,) addresses of the parameters. The caller sets them before it packs or hashes."""
        return self._sources

    @sources.setter
    def sources(self, addresses: UInt64Array) -> None:
        if not np.array_equal(addresses, self._sources):
            self._drop()
        self._sources = addresses

    def holds(self, programs: Sequence[LinkProgram]) -> bool:
        """Return whether the packed payloads of all these links fit into the present arena at once."""
        return packed_capacity(programs) <= self.slot.nbytes

    def fit(self, programs: Sequence[LinkProgram], *, kept: Collection[str] = ()) -> None:
        """Make the arena large enough for the packed payloads of these links, within `limit_nbytes`.

        Args:
            programs: the links, in the order of their places in the arena.
            kept: destinations of links that have not changed since the last call. The prepared copies of such a link
                stay valid, unless the arena or the link's place in it changes.

        Raises:
            PlanError: half of the arena cannot hold the smallest unit that can be packed.
            RegionError: memory cannot be registered.
            TransferFailed: there is too little memory.
            TransferOutcomeUnknown: earlier kernels may still run.
        """
        # Kernels may still read memory that is freed below, so wait for them.
        self.memory.finish(OWN_WORK_S)
        needed = packed_capacity(programs)
        capacity = self.slot.capacity_for(needed)
        self._drop(keep=self._places(programs, kept) if 0 < capacity <= self.slot.nbytes else ())
        least = 2 * max(map(self._least, programs), default=0)
        if capacity < min(needed, least):
            raise PlanError(
                f"arena_nbytes: must be 0 or at least {least}, got {self.slot.limit_nbytes}: half of "
                "the arena must hold one piece, or one row of quantisation blocks"
            )
        self.slot.fit(capacity)

    def abandon(self, *, renew: bool = True) -> None:
        """Abandon the arena, because a late write may still send bytes from it. With `renew`, allocate a new arena.

        Raises:
            RegionError, TransferFailed: a new arena cannot be allocated.
        """
        try:
            if self.slot.arena is not None:
                self._drop()
        finally:
            # Abandon the arena even if `_drop` fails to free a table.
            self.slot.abandon(renew=renew)

    def close(self) -> None:
        """Free the arena and the prepared copies, unless late kernels may still use them. Idempotent."""
        self._drop()
        self.slot.close()

    def hash_links(self, programs: Sequence[LinkProgram], threads: Executor) -> dict[str, str]:
        """Compute the digests of these links from the current parameters, and pack nothing; return peer -> digest.

        If the parameters are in host memory, the threads of `threads` compute the digests.

        Raises:
            TransferFailed: a cast overflows, or other work of this process on the GPU did not end within `OWN_WORK_S`.
            TransferOutcomeUnknown: kernels of this method did not end within `OWN_WORK_S`.
        """
        self.memory.settle(OWN_WORK_S)
        if self._digests is None or self._hashed != tuple(programs):
            self._drop_digests()
            links = {program.peer: program for program in programs}
            self._digests = self.memory.sent_digests(links, self._sources)
            self._hashed = tuple(programs)
        return self._digests.take([program.peer for program in programs], OWN_WORK_S, threads)

    def pack(self, program: LinkProgram, offset: int) -> tuple[PackedBytes, int]:
        """Pack and hash a whole link at byte `offset` of the arena; return its bytes, and the next link's offset.

        Raises:
            TransferFailed, TransferOutcomeUnknown: see `hash_links`.
        """
        self.memory.settle(OWN_WORK_S)
        nbytes, key = packed_capacity((program,)), (program.peer, offset)
        if key not in self._packs:
            start = self.slot.address + offset
            places = (range(start, start + nbytes),)
            self._packs[key] = self.memory.pack_link(program, self._sources, places)
        pack = self._packs[key]
        return PackedBytes(pack, self._sources, pack.pack_and_hash(OWN_WORK_S)), offset + nbytes

    def batches_of(
        self, peer: Peer, program: LinkProgram, pack: LinkPack
    ) -> tuple[WriteBatch, ...]:
        """Return the writes of a link to `peer`.

        `pack` has packed this link, or a link with the same payload to another destination.
        """
        packed = (_packed(program, peer, turn) for turn in pack.turns)
        found = zip(self._direct(program, peer), *packed, strict=True)
        columns = (np.concatenate(column) for column in found)
        return tuple(batches_to(self._transport, peer.binding, *columns))

    def ring(self, program: LinkProgram, peer: Peer) -> Iterator[WriteBatch]:
        """Yield the writes of a link, and pack its payload alternately into the two halves of the arena.

        Before the caller asks for the next batch, the writes of all batches except the last one it got must have ended: the
        request may overwrite the half that they used.

        This method computes no digest; `hash_links` computes the digest of the link.

        Raises:
            TransferFailed, TransferOutcomeUnknown: see `hash_links`.
        """
        self.memory.settle(OWN_WORK_S)
        yield from batches_to(self._transport, peer.binding, *self._direct(program, peer))
        key = program.peer, -1
        if key not in self._packs:
            nbytes = self.slot.nbytes // 2 & -ALIGNMENT
            start, middle = self.slot.address, self.slot.address + nbytes
            places: tuple[range, ...] = (range(start, middle), range(middle, middle + nbytes))
            if nbytes < self._least(program) and self.holds((program,)):
                # Half of the arena is too small for this link, but the whole arena is large enough. The sender usually
                # packs such a link with `pack`. It calls `ring` only if the arena was abandoned after that, to pack the
                # link again into the new arena.
                places = (range(start, start + self.slot.nbytes),)
            self._packs[key] = self.memory.pack_link(program, self._sources, places)
        pack = self._packs[key]
        for turn, parts in enumerate(pack.turns):
            pack.pack(turn, OWN_WORK_S)
            yield from batches_to(self._transport, peer.binding, *_packed(program, peer, parts))

    def _least(self, program: LinkProgram) -> int:
        return aligned(self.memory.least_pack_nbytes(program))

    def _direct(self, program: LinkProgram, peer: Peer) -> Pieces:
        runs = program.direct
        return (
            self._sources[runs.src_parameter] + runs.src_offset.astype(np.uint64),
            peer.targets[runs.dst_parameter] + runs.dst_offset.astype(np.uint64),
            runs.nbytes.astype(np.uint64),
        )

    @staticmethod
    def _places(
        programs: Sequence[LinkProgram], names: Collection[str]
    ) -> frozenset[tuple[str, int]]:
        """Return the keys in `_packs` of the links to `names`.

        The key is (name, offset) for a link that is packed as a whole, and (name, -1) for a link that is packed in
        turns.
        """
        places, offset = set[tuple[str, int]](), 0
        for program in programs:
            if program.peer in names:
                places |= {(program.peer, offset), (program.peer, -1)}
            offset += packed_capacity((program,))
        return frozenset(places)

    def _drop(self, keep: Collection[tuple[str, int]] = ()) -> None:
        before, self._packs = self._packs, {}
        self._drop_digests()
        self._packs = {place: pack for place, pack in before.items() if place in keep}
        for place, pack in before.items():
            if place not in keep:
                pack.close()

    def _drop_digests(self) -> None:
        digests, self._digests = self._digests, None
        if digests is not None:
            digests.close()


def _packed(program: LinkProgram, peer: Peer, parts: Sequence[PackedPart]) -> Pieces:
    """Return three columns of packed parts: addresses in this process, addresses at the peer, and sizes."""
    rows = [(p.address, peer.address_of(program.ops[p.op]) + p.start, p.nbytes) for p in parts]
    local, remote, nbytes = np.ascontiguousarray(np.array(rows, np.uint64).reshape(-1, 3).T)
    return local, remote, nbytes
