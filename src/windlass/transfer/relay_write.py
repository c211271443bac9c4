"""The trainer's part of a relay: the roots of a group are written, each with the chunks of its stripes.

The plan names one member of each group; the links to the others have the same ops, the same packed
bytes and the same digest. A trainer can write any member directly: so it completes the links that the
relay left incomplete.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from windlass.transfer.payload import WRITES_AT_ONCE, payload_of
from windlass.transfer.relay_connection import RelaySender
from windlass.transfer.relay_wire import ChunkLanded, Place, RelayAddress
from windlass.transports.base import OneSidedTransport

__all__ = ["GroupWrite"]


@final
class GroupWrite:
    """One group whose roots a trainer rank writes; every member can be written directly as well.

    Args:
        group: who is in it.
        program: of the link to its first member.
        bindings: of every member. addresses: of every root.

    Attributes:
        leader: the first member, for which the plan was made.
        roots: members that trainers write.
        digest: of the link to any member; empty while nothing is packed.

    Raises:
        PlanError: a member has no binding, or a root no address.
        RegionError: a write would leave the published regions.
    """

    def __init__(
        self,
        group: RelayGroup,
        program: LinkProgram,
        bindings: Mapping[str, DestinationBinding],
        addresses: Mapping[str, RelayAddress],
    ) -> None:
        for member in group.members:
            if member not in bindings:
                raise PlanError(f"relay: {member} has no binding")
            check_binding(program, bindings[member])
        for root in group.roots():
            if root not in addresses:
                raise PlanError(f"relay: root {root} has no address")
        self.leader, self.roots = group.members[0], frozenset(group.roots())
        self.digest = ""
        self._group, self._program, self._addresses = group, program, addresses
        self._payload = payload_of(program, group.chunk_nbytes)
        self._local: UInt64Array = np.zeros(0, np.uint64)
        self._hashes: ChunkDigests | None = None
        self._chunks: tuple[str, ...] = ()

    def copies(self) -> dict[str, LinkProgram]:
        """Return the links to the other members."""
        return {name: replace(self._program, peer=name) for name in self._group.members[1:]}

    def keep(
        self, memory: MemoryOps, sources: UInt64Array, packed: Mapping[int, int], digest: str
    ) -> None:
        """Hash the chunks of a link that has been packed.

        Args:
            memory: that the parameters are in, and what is packed.
            sources: where the parameters lie.
            packed: op -> address of its packed payload.
            digest: of the link.

        Raises:
            TransferFailed: a GPU without room for its tables.
            TransferOutcomeUnknown: kernels do not end.
        """
        payload = self._payload
        parameter = np.where(payload.packed, 0, payload.src_parameter)
        at = np.array([packed.get(op, 0) for op in range(len(self._program.ops))], np.uint64)
        base = np.where(payload.packed, at[payload.op], sources[parameter])
        local = base + payload.src_offset.astype(np.uint64)
        if self._hashes is None or not np.array_equal(self._local, local):
            self.close()
            self._hashes = payload.digests(memory, local)
        self._local = local
        self._chunks = tuple(self._hashes.take(range(payload.num_chunks), OWN_WORK_S))
        self.digest = digest

    def forget(self) -> None:
        """What was packed is there no more."""
        self.digest = ""

    def close(self) -> None:
        """Free what was prepared. Idempotent."""
        self.forget()
        hashes, self._hashes = self._hashes, None
        if hashes is not None:
            hashes.close()

    def packed_link(self, binding: DestinationBinding) -> PackedLink | None:
        """Return all that one member gets, for direct writes; None where it is not packed."""
        if not self.digest:
            return None
        remote, nbytes = self._payload.at(binding), self._payload.nbytes.astype(np.uint64)
        return PackedLink(tuple(batches_to(binding, self._local, remote, nbytes)), self.digest)

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
        payload, local, digests = self._payload, self._local, self._chunks
        if not self.digest:
            digests = ()
        sender = RelaySender(self._addresses[binding.worker], worker, place, deadline)
        remote, failed = payload.at(binding), threading.Event()

        def write(chunk: int) -> int:
            if failed.is_set():
                return 0
            try:
                payload.write(transport, binding, chunk, local, remote, deadline)
                sender.send(ChunkLanded(worker, chunk, digests[chunk]))
            except BaseException:  # whatever it is, the root waits for no more
                failed.set()
                raise
            return payload.chunk_nbytes(chunk)

        roots = self._group.roots()
        mine = [c for c in range(len(digests)) if roots[c % len(roots)] == binding.worker]
        with ThreadPoolExecutor(WRITES_AT_ONCE, "windlass-relay-write") as pool:
            written = [submit(pool, write, chunk) for chunk in mine]
        errors = [error for job in written if (error := job.exception()) is not None]
        unknown = [error for error in errors if is_unknown(error)]
        sender.end(unknown=bool(unknown))
        for error in (*unknown, *errors):
            raise error
        return sum(job.result() for job in written)
