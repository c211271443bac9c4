"""Pack the ops of a link that need packing into an arena, and hash the link.

The inputs are a `LinkProgram` and the parameter addresses of both sides; the outputs are
`WriteBatch`es for one-sided writes. The link's digest covers all ops in plan order, including
DIRECT ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import final

import numpy as np

from windlass.errors import PlanError
from windlass.layout.columns import UInt64Array
from windlass.memory.ops import OWN_WORK_S, LinkDigests, LinkPack, MemoryOps
from windlass.memory.packing import ALIGNMENT, PackedPart, aligned
from windlass.planning.program import BoundOp, LinkProgram
from windlass.transfer.arena import Arena, ArenaSlot
from windlass.transfer.bindings import DestinationBinding
from windlass.transports.base import OneSidedTransport, WriteBatch

WRITE_PIECES = 4096
"""Maximum number of pieces per transport call; it does not limit the bytes of a call."""


def packed_capacity(programs: Sequence[LinkProgram]) -> int:
    """Return the size in bytes of an arena that can hold all packed payloads at once."""
    return sum(aligned(op.nbytes) for p in programs for op in p.ops if not op.is_direct)


def batches_to(
    binding: DestinationBinding, local: UInt64Array, remote: UInt64Array, nbytes: UInt64Array
) -> Iterator[WriteBatch]:
    """Yield batches of at most `WRITE_PIECES` pieces.

    `local`, `remote` and `nbytes` are (n,): addresses at both ends, and sizes in bytes.
    """
    for start in range(0, len(nbytes), WRITE_PIECES):
        part = slice(start, start + WRITE_PIECES)
        yield WriteBatch(
            endpoint=binding.endpoint,
            local_addresses=local[part],
            remote_addresses=remote[part],
            nbytes=nbytes[part],
            regions=binding.regions,
        )


@dataclass(frozen=True, slots=True)
class Peer:
    """A destination, with its parameter addresses ready for arithmetic."""

    binding: DestinationBinding
    targets: UInt64Array

    @classmethod
    def bound_to(cls, binding: DestinationBinding) -> Peer:
        """Return the peer that offers `binding`."""
        return cls(binding, np.array(binding.parameter_addresses, np.uint64))

    def address_of(self, op: BoundOp) -> int:
        """Return the destination address of a packed op's payload."""
        if op.lands:
            return self.binding.staging_address + op.staging_offset
        return self.binding.parameter_addresses[op.dst_parameter] + op.dst_offset


@dataclass(frozen=True, slots=True)
class PackedLink:
    """A link that is packed and hashed."""

    batches: tuple[WriteBatch, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class PackedBytes:
    """Bytes of a link that is packed as a whole.

    Attributes:
        pack: places of the packed ops.
        sources: addresses of the parameters, for ops that are sent from there.
        digest: digest of the link.
    """

    pack: LinkPack
    sources: UInt64Array
    digest: str


@final
class Packer:
    """Packer of one rank, with an arena in the memory of the rank's parameters. Not thread-safe.

    The prepared copies of a link are kept until a parameter or the arena moves.

    Args:
        limit_nbytes: capacity of the arena; 0 for as much as one update needs.

    Attributes:
        slot: slot of the arena; only methods of the packer change its contents.
    """

    def __init__(
        self, transport: OneSidedTransport, memory: MemoryOps, limit_nbytes: int = 0
    ) -> None:
        self.memory = memory
        self.slot = ArenaSlot(lambda nbytes: Arena(transport, nbytes, memory), limit_nbytes)
        self._sources: UInt64Array = np.zeros(0, np.uint64)
        self._packs: dict[tuple[str, int], LinkPack] = {}
        self._digests: LinkDigests | None = None
        self._hashed: tuple[LinkProgram, ...] = ()

    @property
    def sources(self) -> UInt64Array:
        """Addresses of the parameters, in manifest order. The caller sets them before it packs or hashes."""
        return self._sources

    @sources.setter
    def sources(self, addresses: UInt64Array) -> None:
        if not np.array_equal(addresses, self._sources):
            self._drop()
        self._sources = addresses

    def holds(self, programs: Sequence[LinkProgram]) -> bool:
        """Return whether the packed bytes of all these links fit into the arena at once."""
        return packed_capacity(programs) <= self.slot.nbytes

    def fit(self, programs: Sequence[LinkProgram], *, kept: Collection[str] = ()) -> None:
        """Make the arena large enough for the packed bytes of these links, within the limit.

        `kept` has destinations with links that have not changed since the last call. The prepared
        copies of such a link stay unless the arena or the link's place in the arena changes.

        Raises:
            PlanError: half of the arena cannot hold the smallest unit that can be packed.
            RegionError: memory cannot be registered.
            TransferFailed: the GPU has not enough memory.
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
        """Never reuse or unmap the arena, because a late write may still read it. With `renew`, allocate a new arena.

        Raises:
            RegionError, TransferFailed: there is no memory for a new arena.
        """
        try:
            if self.slot.arena is not None:
                self._drop()
        finally:
            # If a table cannot be freed, the arena must still be abandoned.
            self.slot.abandon(renew=renew)

    def close(self) -> None:
        """Free the arena, unless late kernels may still use it. Idempotent."""
        self._drop()
        self.slot.close()

    def hash_links(self, programs: Sequence[LinkProgram], threads: Executor) -> dict[str, str]:
        """Return digests of the links by peer, from the current parameters. Pack nothing.

        Raises:
            TransferFailed: a cast overflows, or work that this process has queued on the GPU does
                not end.
            TransferOutcomeUnknown: kernels do not end.
        """
        self.memory.settle(OWN_WORK_S)
        if self._digests is None or self._hashed != tuple(programs):
            self._drop_digests()
            links = {program.peer: program for program in programs}
            self._digests = self.memory.sent_digests(links, self._sources)
            self._hashed = tuple(programs)
        return self._digests.take([program.peer for program in programs], OWN_WORK_S, threads)

    def pack(self, program: LinkProgram, offset: int) -> tuple[LinkPack, str, int]:
        """Pack and hash a whole link at `offset` of the arena.

        Returns:
            (packed parts, digest, offset of the next link).

        Raises:
            TransferFailed: a cast overflows, or work that this process has queued on the GPU does
                not end.
            TransferOutcomeUnknown: kernels do not end.
        """
        self.memory.settle(OWN_WORK_S)
        nbytes, key = packed_capacity((program,)), (program.peer, offset)
        if key not in self._packs:
            start = self.slot.address + offset
            places = (range(start, start + nbytes),)
            self._packs[key] = self.memory.pack_link(program, self._sources, places)
        pack = self._packs[key]
        return pack, pack.pack_and_hash(OWN_WORK_S), offset + nbytes

    def link_to(self, peer: Peer, program: LinkProgram, pack: LinkPack, digest: str) -> PackedLink:
        """Return the writes of a link that is packed as a whole."""
        packed = [_packed_batches(program, peer, turn) for turn in pack.turns]
        found = (*self._direct(program, peer), *itertools.chain.from_iterable(packed))
        return PackedLink(found, digest)

    def ring(self, program: LinkProgram, peer: Peer) -> Iterator[WriteBatch]:
        """Yield the writes of a link, packing into one half of the arena and then into the other.

        When the caller asks for the next batch, at most one earlier batch may be in flight. The packed bytes are not
        hashed here, because the engine compares them with the digests of `hash_links`.
        """
        self.memory.settle(OWN_WORK_S)
        yield from self._direct(program, peer)
        pack = self._in_turns(program)
        for turn, parts in enumerate(pack.turns):
            pack.pack(turn, OWN_WORK_S)
            yield from _packed_batches(program, peer, parts)

    def _in_turns(self, program: LinkProgram) -> LinkPack:
        key = program.peer, -1
        if key not in self._packs:
            nbytes = self.slot.nbytes // 2 & -ALIGNMENT
            start, middle = self.slot.address, self.slot.address + nbytes
            places: tuple[range, ...] = (range(start, middle), range(middle, middle + nbytes))
            if nbytes < self._least(program) and self.holds((program,)):
                # Half of the arena is too small for this link, but the whole arena is large enough. Such a link
                # is written in turns only when it is written again.
                places = (range(start, start + self.slot.nbytes),)
            self._packs[key] = self.memory.pack_link(program, self._sources, places)
        return self._packs[key]

    def _least(self, program: LinkProgram) -> int:
        return aligned(self.memory.least_pack_nbytes(program))

    def _direct(self, program: LinkProgram, peer: Peer) -> Iterator[WriteBatch]:
        runs = program.direct
        return batches_to(
            peer.binding,
            self._sources[runs.src_parameter] + runs.src_offset.astype(np.uint64),
            peer.targets[runs.dst_parameter] + runs.dst_offset.astype(np.uint64),
            runs.nbytes.astype(np.uint64),
        )

    @staticmethod
    def _places(
        programs: Sequence[LinkProgram], names: Collection[str]
    ) -> frozenset[tuple[str, int]]:
        """Return the keys of packs of the links to `names`: (name, offset) if packed whole, (name, -1) if in turns."""
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


def _packed_batches(
    program: LinkProgram, peer: Peer, parts: Sequence[PackedPart]
) -> Iterator[WriteBatch]:
    rows = [(p.address, peer.address_of(program.ops[p.op]) + p.start, p.nbytes) for p in parts]
    table = np.array(rows, np.uint64).reshape(-1, 3)
    return batches_to(peer.binding, *(np.ascontiguousarray(column) for column in table.T))
