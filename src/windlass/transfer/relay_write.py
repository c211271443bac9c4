"""The trainer's part of a relay: the roots of a group are written, each with the chunks of its stripes.

The plan names one member of each group; the links to the others have the same ops, the same packed
bytes and the same digest. A trainer can write any member directly: so it completes the links that the
relay left incomplete.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from windlass.errors import PlanError
from windlass.memory.ops import OWN_WORK_S, ChunkDigests, MemoryOps, UInt64Array
from windlass.net.clock import Deadline
from windlass.planning.program import LinkProgram
from windlass.planning.relay import RelayGroup
from windlass.transfer.bind import check_binding
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.outcomes import is_unknown, submit
from windlass.transfer.packer import PackedLink, batches_to
from windlass.transfer.payload import WRITES_AT_ONCE, Payload, payload_of
from windlass.transfer.relay_wire import ChunkLanded, Place, RelayAddress, RelaySender
from windlass.transports.base import OneSidedTransport

__all__ = ["GroupWrite", "RelayWrites", "bind_group"]


@dataclass(frozen=True, slots=True)
class GroupWrite:
    """One group whose roots a trainer rank writes.

    Attributes:
        group: who is in it. program: of the link to its first member.
        payload: of every one of its links.
        addresses: root -> where it listens.
    """

    group: RelayGroup
    program: LinkProgram
    payload: Payload
    addresses: Mapping[str, RelayAddress]

    def stripes_of(self, root: str) -> tuple[int, ...]:
        """The stripes whose root it is."""
        return tuple(i for i, name in enumerate(self.group.roots()) if name == root)

    def copies(self) -> dict[str, LinkProgram]:
        """The links to the other members."""
        return {name: replace(self.program, peer=name) for name in self.group.members[1:]}


@dataclass(frozen=True, slots=True)
class _Ready:
    """A relayed that is packed and hashed: (n,) addresses, a digest per chunk, the link's."""

    local: UInt64Array
    chunks: tuple[str, ...]
    digest: str


def bind_group(
    group: RelayGroup,
    program: LinkProgram,
    bindings: Mapping[str, DestinationBinding],
    addresses: Sequence[RelayAddress],
) -> GroupWrite:
    """Check that every member can be written directly, and the roots by chunks.

    Raises:
        PlanError: a member has no binding, or a root no address.
        RegionError: a write would leave the published regions.
    """
    known = {address.worker: address for address in addresses}
    for member in group.members:
        if member not in bindings:
            raise PlanError(f"relay: {member} has no binding")
        check_binding(program, bindings[member])
    for root in group.roots():
        if root not in known:
            raise PlanError(f"relay: root {root} has no address")
    return GroupWrite(
        group,
        program,
        payload_of(program, group.chunk_nbytes),
        {root: known[root] for root in group.roots()},
    )


@final
class RelayWrites:
    """All relays of a trainer rank, by the name of any member."""

    def __init__(self) -> None:
        self._relays: dict[str, GroupWrite] = {}
        self._ready: dict[str, _Ready] = {}
        self._digests: dict[str, tuple[UInt64Array, ChunkDigests]] = {}

    def close(self) -> None:
        """Free what was prepared. Idempotent."""
        self.forget()
        for _, digests in self._digests.values():
            digests.close()
        self._digests = {}

    def __contains__(self, name: str) -> bool:
        return name in self._relays

    def add(self, relayed: GroupWrite) -> None:
        """Serve its members."""
        self._relays |= dict.fromkeys(relayed.group.members, relayed)

    def forget(self) -> None:
        """What was packed is there no more."""
        self._ready = {}

    def planned_for(self, name: str) -> str:
        """The link of the plan that delivers what `name` gets: all members get what the first does."""
        return self._relays[name].group.members[0] if name in self._relays else name

    def roots(self) -> tuple[str, ...]:
        """Members that trainers write."""
        return tuple(
            name for name, relayed in self._relays.items() if name in relayed.group.roots()
        )

    def keep(
        self,
        memory: MemoryOps,
        leader: str,
        sources: UInt64Array,
        packed: Mapping[int, int],
        digest: str,
    ) -> None:
        """Hash a relayed that has been packed.

        Args:
            memory: that the parameters are in, and what is packed.
            leader: first member of the group.
            sources: where the parameters lie.
            packed: op -> address of its packed payload.
            digest: of the link.

        Raises:
            TransferFailed: a GPU without room for its tables.
            TransferOutcomeUnknown: kernels do not end.
        """
        relayed = self._relays[leader]
        payload = relayed.payload
        parameter = np.where(payload.packed, 0, payload.src_parameter)
        at = np.array([packed.get(op, 0) for op in range(len(relayed.program.ops))], np.uint64)
        base = np.where(payload.packed, at[payload.op], sources[parameter])
        local = base + payload.src_offset.astype(np.uint64)
        known = self._digests.get(leader)
        if known is None or not np.array_equal(known[0], local):
            if known is not None:
                known[1].close()
            known = self._digests[leader] = local, payload.digests(memory, local)
        chunks = known[1].take(range(payload.num_chunks), OWN_WORK_S)
        self._ready[leader] = _Ready(local, tuple(chunks), digest)

    def digest_of(self, name: str) -> str:
        """Of the link to a member; empty when it is not packed."""
        ready = self._ready.get(self._relays[name].group.members[0])
        return ready.digest if ready is not None else ""

    def packed_link(self, binding: DestinationBinding) -> PackedLink | None:
        """Return all that one member gets, for direct writes; None where it is not packed."""
        relayed = self._relays[binding.worker]
        ready = self._ready.get(relayed.group.members[0])
        if ready is None:
            return None
        targets = np.array(binding.parameter_addresses, np.uint64)
        remote = relayed.payload.at_destination(targets, binding.landing_address)
        nbytes = relayed.payload.nbytes.astype(np.uint64)
        return PackedLink(tuple(batches_to(binding, ready.local, remote, nbytes)), ready.digest)

    def write_root(
        self,
        transport: OneSidedTransport,
        worker: str,
        binding: DestinationBinding,
        place: Place,
        deadline: Deadline,
    ) -> int:
        """Write the chunks of a root's stripes, a few at a time; returns bytes.

        What is not packed is not written: the root is told that nothing comes.

        Args:
            transport: writes.
            worker: this rank.
            binding: of the root.
            place: (epoch, round).
            deadline: for all of it.

        Raises:
            TransferError: the root was not reached, or a write failed.
            TransferOutcomeUnknown: bytes may still land.
        """
        relayed = self._relays[binding.worker]
        ready = self._ready.get(relayed.group.members[0])
        sender = RelaySender(relayed.addresses[binding.worker], worker, place, deadline)
        targets = np.array(binding.parameter_addresses, np.uint64)
        remote = relayed.payload.at_destination(targets, binding.landing_address)
        failed = threading.Event()

        def write(chunk: int) -> int:
            if ready is None or failed.is_set():
                return 0
            try:
                relayed.payload.write(transport, binding, chunk, ready.local, remote, deadline)
                sender.send(ChunkLanded(worker, chunk, ready.chunks[chunk]))
            except BaseException:  # whatever it is, the root waits for no more
                failed.set()
                raise
            return relayed.payload.chunk_nbytes(chunk)

        stripes, num_stripes = relayed.stripes_of(binding.worker), len(relayed.group.stripes)
        mine = [c for c in range(relayed.payload.num_chunks) if c % num_stripes in stripes]
        with ThreadPoolExecutor(WRITES_AT_ONCE, "windlass-relay-write") as pool:
            written = [submit(pool, write, chunk) for chunk in mine]
        errors = [error for job in written if (error := job.exception()) is not None]
        unknown = [error for error in errors if is_unknown(error)]
        sender.end(unknown=bool(unknown))
        for error in (*unknown, *errors):
            raise error
        return sum(job.result() for job in written)
