"""How chunks are written to an engine of a relay; and the trainer's part, which writes the roots of a group.

Each root gets the chunks of its stripes. The plan names one member of each group; the links to the others have the same ops, the same packed
bytes and the same digest. A trainer can write any member directly: so it completes the links that the
relay left incomplete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import final

import numpy as np

from windlass.errors import PlanError, TransferError
from windlass.memory.ops import OWN_WORK_S, ChunkDigests, MemoryOps, UInt64Array
from windlass.net.clock import Deadline
from windlass.net.messages import RoundId
from windlass.planning.program import LinkProgram
from windlass.planning.relay import RelayGroup
from windlass.transfer.base import is_unknown, submit
from windlass.transfer.bind import check_binding
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.packer import PackedLink, batches_to
from windlass.transfer.payload import Payload, payload_of
from windlass.transfer.relay_connection import RelaySender
from windlass.transfer.relay_wire import ChunkLanded, RelayAddress, StripeEnd
from windlass.transports.base import OneSidedTransport

_log = logging.getLogger(__name__)
WRITES_AT_ONCE = 4
"""Chunks on their way to one engine: the next one is written while the last is acknowledged."""


@final
class ChunkWriter:
    """Chunks on their way to one engine in one round, each announced once it is in place.

    It has threads of its own, and connects in one of them. After the first error it writes no more.

    Args:
        transport: writes.
        worker: this rank.
        binding: of the engine. address: where it listens.
        round_id: of the relay.
        deadline: for all of it.

    Attributes:
        errors: what went wrong, in the order of time.
        unreached: the engine did not let this rank in; nothing was written to it.
        last_s: when the last chunk was in place, by `time.perf_counter`; 0 for none.
    """

    def __init__(
        self,
        transport: OneSidedTransport,
        worker: str,
        binding: DestinationBinding,
        address: RelayAddress,
        round_id: RoundId,
        deadline: Deadline,
    ) -> None:
        self.errors: list[BaseException] = []
        self.unreached, self.last_s = False, 0.0
        self._transport, self._binding, self._deadline = transport, binding, deadline
        self._sender: RelaySender | None = None
        self._pool = ThreadPoolExecutor(WRITES_AT_ONCE, "windlass-relay-write")
        self._jobs: list[Future[int]] = []
        self._submit(partial(self._open, address, worker, round_id))

    @property
    def is_unknown(self) -> bool:
        """Whether bytes may still land."""
        return any(is_unknown(error) for error in self.errors)

    def write(
        self, payload: Payload, local: UInt64Array, remote: UInt64Array, landed: ChunkLanded
    ) -> None:
        """Have a chunk written from (n,) `local` to (n,) `remote`."""
        self._submit(partial(self._write, payload, local, remote, landed))

    def end_stripe(self, stripe: int) -> None:
        """Say that nothing more comes of a stripe, once everything before is written."""
        self._submit_last(partial(self._end_stripe, stripe))

    def end(self) -> None:
        """Say that nothing more comes, once everything before is written."""
        self._submit_last(self._end)

    def close(self) -> int:
        """Wait for all; returns the bytes written."""
        self._pool.shutdown(wait=True)
        failed = [error for job in self._jobs if (error := job.exception()) is not None]
        for error in failed:
            _log.error("relaying to %s failed", self._binding.worker, exc_info=error)
        self.errors += failed
        if self._sender is not None:
            self._sender.close()
        return sum(job.result() for job in self._jobs if job.exception() is None)

    def _submit(self, job: Callable[[], int]) -> None:
        """Jobs begin in this order."""
        self._jobs.append(submit(self._pool, job))

    def _submit_last(self, job: Callable[[], int]) -> None:
        earlier = tuple(self._jobs)

        def after() -> int:
            wait(earlier)  # they have threads of their own: they began before this one
            return job()

        self._submit(after)

    def _open(self, address: RelayAddress, worker: str, round_id: RoundId) -> int:
        try:
            self._sender = RelaySender(address, worker, round_id, self._deadline)
        except TransferError as error:
            self.errors.append(error)
            self.unreached = True
        return 0

    def _write(
        self, payload: Payload, local: UInt64Array, remote: UInt64Array, landed: ChunkLanded
    ) -> int:
        if self._jobs[0].exception() is not None or self.errors or self._sender is None:
            return 0
        try:
            payload.write(
                self._transport, self._binding, landed.chunk, local, remote, self._deadline
            )
            self._sender.send(landed)
        except TransferError as error:
            self.errors.append(error)  # the peer finds the link incomplete in the end
            return 0
        except BaseException as error:  # whatever it is, bytes may still land there
            self.errors.append(error)
            raise
        self.last_s = time.perf_counter()
        return payload.chunk_nbytes(landed.chunk)

    def _end_stripe(self, stripe: int) -> int:
        if self._sender is not None and not self.errors:
            try:
                self._sender.send(StripeEnd(stripe))
            except TransferError as error:
                self.errors.append(error)  # the end of the connection says more
        return 0

    def _end(self) -> int:
        if self._sender is not None:
            lost = any(job.exception() is not None for job in self._jobs if job.done())
            self._sender.end(unknown=self.is_unknown or lost)
        return 0


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
        round_id: RoundId,
        deadline: Deadline,
    ) -> int:
        """Write the chunks of a root's stripes, a few at a time; returns bytes.

        What is not packed is not written: the root is told that nothing comes.

        Args:
            transport: writes.
            worker: this rank.
            binding: of the root.
            round_id: of the relay.
            deadline: for all of it.

        Raises:
            TransferError: the root was not reached, or a write failed.
            TransferOutcomeUnknown: bytes may still land.
        """
        digests, roots = self._chunks if self.digest else (), self._group.roots()
        address, remote = self._addresses[binding.worker], self._payload.at(binding)
        writer = ChunkWriter(transport, worker, binding, address, round_id, deadline)
        for chunk, digest in enumerate(digests):
            if roots[chunk % len(roots)] == binding.worker:
                landed = ChunkLanded(worker, chunk, digest)
                writer.write(self._payload, self._local, remote, landed)
        writer.end()
        nbytes = writer.close()
        for error in sorted(writer.errors, key=is_unknown, reverse=True):
            raise error
        return nbytes
