"""Relay: engines pass the chunks that they receive on to other engines.

Engine ranks that need the same bytes form a relay group (`planning/relay.py`). The chunks of a link are divided into
stripes, and each stripe has a tree of members. Trainers write the chunks of a stripe only to the root of its tree.
Every member writes the chunks on to its children in the tree. The plan has a link to the first member of each group;
the links to the other members have the same ops, packed payloads and digest. If a link is still incomplete after the
relay, the trainer writes it directly.

An engine rank does not notice one-sided writes, so a writer announces each chunk that it has written, over one TCP
connection per round:

1. The writer sends `Open` with the round and the secret of the receiver. The receiver answers with one byte if it takes
   part in the round. The writer writes nothing before this answer.
2. After each chunk the writer sends `ChunkLanded` with the digest that the trainer computed. The receiver hashes the
   chunk in its memory. If the digest is right, the receiver writes the chunk to its children, by one-sided writes.
3. The writer sends `End`, and writes nothing more. If the connection ends without `End`, the writer's process has ended
   or has closed the connection. In both cases it writes nothing more.

Only accepted writers write to a rank. `RelayNode.run` returns when each of them has ended or has timed out. So its
result names all ranks that may still write to this rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never, final

import msgspec
import numpy as np

from windlass.errors import (
    PeerUnreachable,
    PlanError,
    ProtocolError,
    TransferError,
    TransferOutcomeUnknown,
)
from windlass.layout.columns import UInt64Array
from windlass.memory.ops import OWN_WORK_S, Buffer, ChunkDigests, MemoryOps
from windlass.net.clock import Deadline
from windlass.net.messages import Codec, RoundId, encode
from windlass.planning.program import LinkProgram
from windlass.planning.relay import RelayGroup, children_of, depths_of
from windlass.transfer.base import LINKS_AT_ONCE, failed_link, is_unknown, submit
from windlass.transfer.bind import check_binding, check_destinations
from windlass.transfer.bindings import (
    Carried,
    DestinationBinding,
    LinkOutcome,
    LinkStatus,
    RelayAddress,
    Relayed,
    Written,
)
from windlass.transfer.packer import PackedBytes, batches_to
from windlass.transfer.payload import Payload, payload_of
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.base import OneSidedTransport

_log = logging.getLogger(__name__)


# --- frames --------------------------------------------------------------------------------------

ACCEPTED = b"\x01"
LENGTH = struct.Struct(">I")
"""Length in bytes of the frame that follows."""


class Open(msgspec.Struct, frozen=True, tag="open"):
    """First frame of a writer.

    Attributes:
        token: secret of the receiver (`RelayAddress.token`).
        upstream: worker name of the writer.
        epoch: epoch of the round.
        round: number of the round.
    """

    token: str
    upstream: str
    epoch: int
    round: int


class ChunkLanded(msgspec.Struct, frozen=True, tag="chunk"):
    """Announcement that a chunk is written.

    Attributes:
        source: trainer rank; its link to this engine rank contains the chunk.
        chunk: index of the chunk in the link's payload.
        digest: digest of the chunk, as `source` has computed it.
    """

    source: str
    chunk: int
    digest: str


class StripeEnd(msgspec.Struct, frozen=True, tag="stripe_end"):
    """Announcement that the writer writes no more chunks of a stripe."""

    stripe: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """Last frame of a writer in a round. `unknown`: whether some of its bytes may still arrive."""

    unknown: bool = False


Frame = Open | ChunkLanded | StripeEnd | End
FRAMES: Codec[Frame] = Codec(Frame, "relay: frame", max_nbytes=4096)


# --- both ends of a connection -------------------------------------------------------------------

MAX_CONNECTIONS = 4096
ACCEPT_AGAIN_S = 0.1
OPEN_S = 10.0
"""Seconds within which a client must send its first frame. A client without the secret can occupy a connection only for
so long."""
CLOSE_S = 10.0


@final
class RelaySender:
    """Writer's end of one connection. The constructor connects, and waits until the receiver accepts the writer.

    Args:
        address: address of the receiver.
        upstream: worker name of the writer.
        round_id: the round.
        deadline: deadline of all work on this connection.

    Raises:
        PeerUnreachable: no process listens at the address, or the receiver takes no part in this round, does not accept
            the writer, or did not answer by the deadline.
    """

    def __init__(
        self, address: RelayAddress, upstream: str, round_id: RoundId, deadline: Deadline
    ) -> None:
        self._peer, self._deadline = address.worker, deadline
        self._lock = threading.Lock()
        try:
            where = address.host, address.port
            self._socket = socket.create_connection(where, timeout=self._left_s())
        except OSError as error:
            raise PeerUnreachable(f"relay: cannot connect to {self._peer}: {error}") from error
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.send(Open(address.token, upstream, *round_id))
            try:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                answer = self._socket.recv(1)
            except OSError as error:
                raise PeerUnreachable(f"relay: {self._peer} did not answer: {error}") from error
            if answer != ACCEPTED:
                raise PeerUnreachable(f"relay: {self._peer} takes no part in round {round_id}")
            undo.pop_all()

    def send(self, frame: Frame) -> None:
        """Send one frame. Thread-safe.

        Raises:
            PeerUnreachable: the connection has ended or the deadline has passed.
        """
        body = encode(frame)
        try:
            with self._lock:
                self._socket.settimeout(self._left_s())
                self._socket.sendall(LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise PeerUnreachable(f"relay: cannot send to {self._peer}: {error}") from error

    def end(self, *, unknown: bool) -> None:
        """Send `End`, and close the connection. The caller must not write to the receiver after this."""
        # The frame may be lost. The receiver then sees only a closed connection. The result of this rank tells the
        # controller that bytes of this rank may still arrive in the receiver's memory.
        with contextlib.closing(self), contextlib.suppress(PeerUnreachable):
            self.send(End(unknown))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _left_s(self) -> float:
        return max(self._deadline.remaining_s, 0.01)


async def _read_frame(stream: asyncio.StreamReader) -> Frame:
    """Read the next frame.

    Raises:
        ProtocolError: the frame is longer than 4096 bytes or cannot be decoded.
        OSError, EOFError: the connection has ended.
    """
    (nbytes,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    if nbytes > FRAMES.max_nbytes:
        raise ProtocolError(
            f"relay: a frame must have at most {FRAMES.max_nbytes} bytes, got {nbytes}"
        )
    return FRAMES.decode(await stream.readexactly(nbytes))


class Ended(Enum):
    """Events of a round that are not frames.

    Attributes:
        DISCONNECTED: a connection ended without `End`. Bytes in the operating system of the writer may still arrive.
        INTERRUPTED: this rank must leave the round.
    """

    DISCONNECTED = auto()
    INTERRUPTED = auto()


RelayEvents = queue.SimpleQueue[tuple[str, ChunkLanded | StripeEnd | End | Ended]]
"""Queue of the events of a round: (upstream, frame or `Ended`). The upstream of INTERRUPTED is empty."""


@dataclass(slots=True)
class _Round:
    events: RelayEvents = field(default_factory=queue.SimpleQueue)
    joined: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    closed: bool = False


@final
class RelayReceiver:
    """Listener of one engine rank, with a thread that reads from the writers. Thread-safe.

    It accepts a writer that sends the right secret, unless the writer's round is older than the round of the newest
    `begin`, or was closed by `end`, or the writer was refused or accepted in this round before. For each accepted
    writer, the events of the round contain exactly one `End` or `DISCONNECTED`.

    Args:
        worker: this rank.
        host: address to bind; the system chooses the port.

    Attributes:
        address: address and secret for writers.
    """

    def __init__(self, worker: str, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.address = RelayAddress(
            worker, host, int(self._listener.getsockname()[1]), secrets.token_hex(16)
        )
        self._lock = threading.Lock()
        self._rounds: defaultdict[RoundId, _Round] = defaultdict(_Round)
        self._oldest = RoundId(0, 0)
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="windlass-relay", daemon=True)
        self._thread.start()

    def begin(self, round_id: RoundId) -> RelayEvents:
        """Return the events of a round, including events before this call.

        Delete all older rounds, and ignore later messages of these rounds.
        """
        with self._lock:
            self._oldest = max(self._oldest, round_id)
            for older in [found for found in self._rounds if found < round_id]:
                del self._rounds[older]
            return self._rounds[round_id].events

    def joined(self, round_id: RoundId) -> frozenset[str]:
        """Return the writers that were accepted in the round before this call."""
        with self._lock:
            return frozenset(self._rounds[round_id].joined)

    def end(self, round_id: RoundId) -> frozenset[str]:
        """Accept no more writers in the round; return the accepted writers."""
        with self._lock:
            of_round = self._rounds[round_id]
            of_round.closed = True
            return frozenset(of_round.joined)

    def refuse(self, round_id: RoundId, upstream: str) -> None:
        """Do not accept `upstream` in the round. Add an `End` to the events, so that `RelayNode.run` does not wait for it.

        If `upstream` was accepted before this call, it stays accepted, and this call adds no `End`.
        """
        with self._lock:
            if round_id < self._oldest:
                return
            of_round = self._rounds[round_id]
            of_round.refused.add(upstream)
            if upstream not in of_round.joined:
                of_round.events.put((upstream, End()))

    def interrupt(self, round_id: RoundId) -> None:
        """Add INTERRUPTED to the events of the round, so that `RelayNode.run` returns."""
        with self._lock:
            if round_id >= self._oldest:
                self._rounds[round_id].events.put(("", Ended.INTERRUPTED))

    def close(self) -> None:
        """Close every connection and end the thread. Idempotent."""
        with contextlib.suppress(RuntimeError):
            # The loop may be closed already.
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(CLOSE_S)

    # --- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        cancelled = contextlib.suppress(asyncio.CancelledError)
        with self._listener, contextlib.closing(self._loop), cancelled:
            self._loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        """Accept connections until the task is cancelled. At most `MAX_CONNECTIONS` are open at a time."""
        async with asyncio.TaskGroup() as connections:
            num_open = asyncio.Semaphore(MAX_CONNECTIONS)
            while True:
                await num_open.acquire()
                try:
                    accepted, _ = await self._loop.sock_accept(self._listener)
                except OSError:
                    # If too many files are open, `sock_accept` fails again at once, so wait.
                    num_open.release()
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                connection = connections.create_task(self._read(accepted))
                connection.add_done_callback(lambda _: num_open.release())

    async def _read(self, accepted: socket.socket) -> None:
        """Read one connection until it ends. If the writer is accepted, add its frames to the round's events.

        The last event of an accepted writer is `End` or `DISCONNECTED`.
        """
        with accepted, contextlib.suppress(OSError, EOFError, ProtocolError):
            stream, writer = await asyncio.open_connection(sock=accepted)
            try:
                async with asyncio.timeout(OPEN_S):
                    opened = await _read_frame(stream)
                if isinstance(opened, Open) and (events := self._let_in(opened)) is not None:
                    last: End | Ended = Ended.DISCONNECTED
                    try:
                        writer.write(ACCEPTED)
                        last = await self._follow(stream, opened.upstream, events)
                    finally:
                        # The writer has sent `End`, or its connection has ended. In both cases it begins no new write.
                        events.put((opened.upstream, last))
            finally:
                writer.close()
                await writer.wait_closed()

    @staticmethod
    async def _follow(stream: asyncio.StreamReader, upstream: str, events: RelayEvents) -> End:
        """Add the frames of an accepted writer to the events, and return its `End`.

        Raises:
            ProtocolError, OSError, EOFError: see `_read_frame`.
        """
        while True:
            frame = await _read_frame(stream)
            if isinstance(frame, End):
                return frame
            if isinstance(frame, Open):
                raise ProtocolError(
                    "relay: a connection must send `Open` once, got a second `Open`"
                )
            events.put((upstream, frame))

    def _let_in(self, frame: Open) -> RelayEvents | None:
        """Record the writer that sent `Open` as accepted in its round, and return the events of this round.

        Return None, and record nothing, if the writer is not accepted.
        """
        if not hmac.compare_digest(frame.token.encode(), self.address.token.encode()):
            return None
        round_id = RoundId(frame.epoch, frame.round)
        with self._lock:
            if round_id < self._oldest:
                return None
            of_round = self._rounds[round_id]
            if of_round.closed or frame.upstream in of_round.refused | of_round.joined:
                return None
            of_round.joined.add(frame.upstream)
            return of_round.events


# --- writers of chunks: trainer ranks, and engine ranks that pass chunks on -----------------------

WRITES_AT_ONCE = 4
"""Maximum number of concurrent chunk writes to one engine rank. With several, a write runs while the acknowledgement of
an earlier write is on its way."""


@final
class ChunkWriter:
    """Writer of chunks to one engine rank in one round. It writes each chunk and then announces it.

    It has its own threads, and connects in one of them. After the first error it writes nothing more.

    Args:
        transport: transport that writes.
        worker: name of the writing rank.
        binding: memory of the engine rank.
        address: relay listener of the engine rank.
        round_id: the round.
        deadline: deadline of all writes.

    Attributes:
        errors: errors in the order of their occurrence.
        unreached: whether the engine rank did not accept this writer. Nothing was written to it then.
        first_s: time (`time.perf_counter`) at the start of the first write; 0 without a write.
        last_s: time at the end of the last write; 0 without a write.
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
        self.unreached, self.first_s, self.last_s = False, 0.0, 0.0
        self._transport, self._binding, self._deadline = transport, binding, deadline
        self._sender: RelaySender | None = None
        self._lock, self._nbytes = threading.Lock(), 0
        self._pool = ThreadPoolExecutor(WRITES_AT_ONCE, "windlass-relay-write")
        self._jobs = [submit(self._pool, self._open, address, worker, round_id)]

    @property
    def is_unknown(self) -> bool:
        """Whether bytes of this writer may still arrive."""
        return any(is_unknown(error) for error in self.errors)

    def write(
        self, payload: Payload, local: UInt64Array, remote: UInt64Array, landed: ChunkLanded
    ) -> None:
        """Queue the write of a chunk.

        Args:
            payload: pieces and chunks of the link.
            local: (n,) addresses of all pieces in this process.
            remote: (n,) addresses of all pieces at the engine rank.
            landed: message with the number of the chunk. It is sent to the engine rank after the write.
        """

        def write(sender: RelaySender) -> None:
            pieces, deadline = payload.pieces_of(landed.chunk), self._deadline
            nbytes = payload.nbytes[pieces].astype(np.uint64)
            self.first_s = self.first_s or time.perf_counter()
            for batch in batches_to(
                self._transport, self._binding, local[pieces], remote[pieces], nbytes
            ):
                deadline.check_before_more()
                self._transport.write(batch, deadline_s=max(deadline.remaining_s, 0.001))
            sender.send(landed)
            self.last_s = time.perf_counter()
            with self._lock:
                self._nbytes += int(nbytes.sum())

        self._submit(write)

    def end_stripe(self, stripe: int) -> None:
        """Queue the frame `StripeEnd`. It is sent after all work that is queued already."""
        self._submit(lambda sender: sender.send(StripeEnd(stripe)), last=True)

    def end(self) -> None:
        """Queue the frame `End`. It is sent after all work that is queued already."""
        earlier = tuple(self._jobs)

        def end() -> None:
            # The pool starts jobs in order, so all earlier jobs have a thread already. This wait therefore cannot block
            # them.
            wait(earlier)
            lost = any(job.exception() is not None for job in earlier)
            if self._sender is not None:
                self._sender.end(unknown=self.is_unknown or lost)

        self._jobs.append(submit(self._pool, end))

    def close(self) -> Carried:
        """Wait for all queued work, end the threads, and close the connection.

        Log the unexpected exceptions of jobs, and add them to `errors`.

        Returns:
            The bytes written, and the seconds from the first to the last write.
        """
        self._pool.shutdown(wait=True)
        failed = [error for job in self._jobs if (error := job.exception()) is not None]
        for error in failed:
            _log.error("relaying to %s failed", self._binding.worker, exc_info=error)
        self.errors += failed
        if self._sender is not None:
            self._sender.close()
        return Carried(self._nbytes, max(self.last_s - self.first_s, 0.0))

    def _submit(self, job: Callable[[RelaySender], None], *, last: bool = False) -> None:
        """Queue a job. It is skipped if an earlier job has failed.

        With `last`, the job waits for all earlier jobs. Otherwise it waits only for the connection.
        """
        earlier = tuple(self._jobs if last else self._jobs[:1])

        def run() -> None:
            wait(earlier)
            if self._sender is None or self.errors:
                return
            try:
                job(self._sender)
            except BaseException as error:
                # `run` skips later jobs after this error. The engine rank then reports the link as incomplete.
                self.errors.append(error)
                if not isinstance(error, TransferError):
                    raise

        self._jobs.append(submit(self._pool, run))

    def _open(self, address: RelayAddress, worker: str, round_id: RoundId) -> None:
        """Connect to the engine rank. If this fails, set `unreached` and add the error, so that nothing is written."""
        try:
            self._sender = RelaySender(address, worker, round_id, self._deadline)
        except TransferError as error:
            self.errors.append(error)
            self.unreached = True


def _at(payload: Payload, binding: DestinationBinding) -> UInt64Array:
    return payload.at(binding.parameter_addresses, binding.staging_address)


@final
class GroupWrite:
    """Link of a trainer rank to a relay group: all members get the same bytes.

    Args:
        group: the group.
        program: the planned link to the first member.
        bindings: member -> its memory.
        addresses: root -> its relay listener.

    Attributes:
        leader: first member, to which the plan has a link.
        roots: members that this rank writes to during a relay.
        digest: digest of the link; empty while the link is not packed.

    Raises:
        PlanError: a root has no address.
    """

    def __init__(
        self,
        group: RelayGroup,
        program: LinkProgram,
        bindings: Mapping[str, DestinationBinding],
        addresses: Mapping[str, RelayAddress],
    ) -> None:
        for root in group.roots():
            if root not in addresses:
                raise PlanError(f"relay: root {root} has no address")
        self.leader, self.roots = group.members[0], frozenset(group.roots())
        self.digest = ""
        self._group, self._program = group, program
        self._bindings, self._addresses = bindings, addresses
        self._payload = payload_of(program, group.chunk_nbytes)
        self._local: UInt64Array = np.zeros(0, np.uint64)
        self._hashes: ChunkDigests | None = None
        self._chunks: tuple[str, ...] = ()

    def hash_chunks(self, memory: MemoryOps, packed: PackedBytes | None) -> None:
        """Hash the chunks of the packed link, and store the digests and the addresses of the pieces.

        Args:
            memory: memory of the parameters and of the arena.
            packed: bytes of the link; None if it is not packed as a whole.

        Raises:
            TransferFailed: the GPU has too little memory for the tables, or reports an error.
            TransferOutcomeUnknown: the hashing did not end within `OWN_WORK_S`.
        """
        if packed is None:
            self.digest = ""
            return
        payload = self._payload
        places = {part.op: part.address for turn in packed.pack.turns for part in turn}
        at = np.array([places.get(op, 0) for op in range(len(self._program.ops))], np.uint64)
        base = np.where(payload.packed, at[payload.op], packed.sources[payload.src_parameter])
        local = base + payload.src_offset.astype(np.uint64)
        is_same = self._hashes is not None and np.array_equal(self._local, local)
        if is_same and packed.digest == self.digest:
            return
        if self._hashes is None or not is_same:
            self.close()
            self._hashes = payload.digests(memory, local)
        self._local = local
        self._chunks = tuple(self._hashes.take(range(payload.num_chunks), OWN_WORK_S).values())
        self.digest = packed.digest

    def close(self) -> None:
        """Free the tables of the digests. Idempotent."""
        self.digest = ""
        hashes, self._hashes = self._hashes, None
        if hashes is not None:
            hashes.close()

    def write_root(
        self,
        transport: OneSidedTransport,
        worker: str,
        root: str,
        round_id: RoundId,
        deadline: Deadline,
    ) -> Carried:
        """Write the chunks of each stripe whose root is `root`, and wait until the writes have ended.

        If the link is not packed, send only `End`. If no stripe of this root has a chunk, do nothing.

        Args:
            transport: transport that writes.
            worker: name of this rank.
            root: member to write to.
            round_id: the round.
            deadline: deadline of all writes.

        Returns:
            The bytes written, and the seconds from the first to the last write.

        Raises:
            TransferError: the root was not reached, or a write failed.
            TransferOutcomeUnknown: bytes may still arrive at the root.
        """
        digests, roots = self._chunks if self.digest else (), self._group.roots()
        if root not in {roots[chunk % len(roots)] for chunk in range(self._payload.num_chunks)}:
            # No stripe of this root has a chunk, so the root does not wait for this rank and may have ended its round.
            return Carried(0, 0.0)
        binding = self._bindings[root]
        address, remote = self._addresses[root], _at(self._payload, binding)
        writer = ChunkWriter(transport, worker, binding, address, round_id, deadline)
        for chunk, digest in enumerate(digests):
            if roots[chunk % len(roots)] == root:
                landed = ChunkLanded(worker, chunk, digest)
                writer.write(self._payload, self._local, remote, landed)
        writer.end()
        sent = writer.close()
        for error in sorted(writer.errors, key=is_unknown, reverse=True):
            raise error
        return sent


@final
class RelaySource:
    """Relay groups of a trainer rank. Thread-safe: its methods run one at a time.

    Args:
        sender: sender of the rank. It packs the links to the groups, and writes all other links.

    Attributes:
        groups: member -> its group, for all groups to which this rank has a link.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender, self._worker = sender, sender.manifest.worker
        self.groups: dict[str, GroupWrite] = {}

    def connect(
        self,
        groups: Sequence[RelayGroup],
        bindings: Sequence[DestinationBinding],
        addresses: Sequence[RelayAddress],
    ) -> None:
        """Bind links to all members of these relay groups. Ignore groups to which this rank has no planned link.

        Args:
            groups: the groups.
            bindings: memory of all members.
            addresses: relay listeners of the roots.

        Raises:
            ProtocolError: GPU kernels write this rank's links, but only a transport can write links to a relay group.
            PlanError: a member has no binding, or a root has no address.
            RegionError: bytes would be written outside the regions of a member.
        """
        roots = {address.worker: address for address in addresses}
        known = {binding.worker: binding for binding in bindings}
        with self._sender.reading():
            copies = {name: g.members[0] for g in groups for name in g.members[1:]}
            for program in self._sender.bind_copies(copies, known):
                (group,) = [g for g in groups if g.members[0] == program.peer]
                relayed = GroupWrite(group, program, known, roots)
                self.groups |= dict.fromkeys(group.members, relayed)

    def prepare(self) -> None:
        """Hash the chunks for all relay groups. Call this after `Sender.prepare`.

        Raises:
            TransferFailed, TransferOutcomeUnknown: see `GroupWrite.hash_chunks`.
        """
        with self._sender.reading():
            self._hash_chunks()

    def _hash_chunks(self) -> None:
        """Hash the chunks of the packed links to all relay groups, where the bytes have changed; see `GroupWrite`."""
        for relayed in set(self.groups.values()):
            relayed.hash_chunks(self._sender.packer.memory, self._sender.packed(relayed.leader))

    def write(
        self, round_id: RoundId, version: int, destinations: Sequence[str], deadline_s: float
    ) -> Written:
        """Write to the roots of all relay groups. At the same time, the sender writes to all other destinations.

        This rank does not write to members below the roots. For these members, OK means only that the link is packed and
        has a digest. Each of these members reports in `Relayed` whether its bytes have arrived.

        Raises:
            RoundAborted: this rank has no link to one of the destinations.
            TransferOutcomeUnknown: bytes may still arrive at some destinations.
            WindlassError: see `Sender.write`.
        """
        deadline = Deadline.after(deadline_s, "write")
        with self._sender.reading(), ThreadPoolExecutor(LINKS_AT_ONCE, "windlass-relay") as threads:
            check_destinations(self._sender.links.programs, destinations)
            self._hash_chunks()
            began, arena = time.perf_counter(), self._sender.packer.slot.arena
            relayed = [name for name in destinations if name in self.groups]
            self._sender.note_sent(relayed)
            roots = {
                name: submit(
                    threads,
                    group.write_root,
                    self._sender.transport,
                    self._worker,
                    name,
                    round_id,
                    deadline,
                )
                for name, group in self.groups.items()
                if name in group.roots
            }
            direct = [name for name in destinations if name not in self.groups]
            try:
                sent = self._sender.write(version, direct, max(deadline.remaining_s, 0.001))
            except Exception as error:
                met = [found for job in roots.values() if (found := job.exception()) is not None]
                if any(map(is_unknown, met)):
                    raise TransferOutcomeUnknown(
                        f"bytes may still arrive, because writes to relay roots failed: {met}; the write to the other "
                        f"destinations failed, too: {error!r}"
                    ) from error
                raise
            finally:
                wait(roots.values())
            outcomes = {link.destination: link for link in sent.links}
            digests = {name: self.groups[name].digest for name in relayed}
            for name in relayed:
                outcomes[name] = self._outcome(name, digests[name], roots.get(name), arena)
            wire_s = max(time.perf_counter() - began, sent.wire_s)
            links = tuple(outcomes[name] for name in destinations)
            return Written(links, sent.pack_s, wire_s, sent.register_s)

    def _outcome(
        self, name: str, digest: str, written: Future[Carried] | None, arena: Buffer | None
    ) -> LinkOutcome:
        """Return the outcome of the link to a member.

        Args:
            name: the member.
            digest: digest of the link; empty if the link is not packed as a whole.
            written: completed future of `GroupWrite.write_root` if the member is a root, else None.
            arena: arena from which the bytes were sent.
        """
        if written is not None and (lost := written.exception()) is not None:
            return self._sender.failed(name, lost, arena)
        if not digest:
            reason = (
                "arena_nbytes: must be 0 or large enough for all packed bytes of this rank, because the rank writes to a "
                "relay group"
            )
            return failed_link(name, reason)
        own = Carried(0, 0.0) if written is None else written.result()
        return LinkOutcome(name, LinkStatus.OK, own.nbytes, digest, wire_s=own.wire_s)

    def close(self) -> None:
        """Free the tables of the digests, and unbind all groups. Idempotent."""
        for relayed in self.groups.values():
            relayed.close()
        self.groups = {}


# --- an engine rank in a relay --------------------------------------------------------------------


TIMEOUT_SPREAD = 0.25
"""Maximum difference between the timeouts of the ranks of a stripe, as a fraction of the relay's deadline."""


@dataclass(frozen=True, slots=True)
class BoundGroup:
    """Binding of this rank to its relay group.

    Attributes:
        payloads: source -> payload of its link.
        local: source -> addresses of the pieces in this rank.
        digests: source -> prepared digests of the chunks in this rank.
        upstream: per stripe, the member that writes to this rank; empty if this rank is the root, so that trainers
            write.
        children: per stripe, the members that this rank passes chunks on to.
        timeout_shares: per stripe, the fraction of the relay's deadline that this rank waits. A rank closer to the root
            times out earlier, and then notifies its children. With equal timeouts, every rank below a stalled rank
            would report its own upstream as stalled.
        bindings: child -> its memory.
        addresses: child -> its relay listener.
        remote: child -> source -> addresses of the pieces in the child.
    """

    payloads: Mapping[str, Payload]
    local: Mapping[str, UInt64Array]
    digests: Mapping[str, ChunkDigests]
    upstream: tuple[str, ...]
    children: tuple[tuple[str, ...], ...]
    timeout_shares: tuple[float, ...]
    bindings: Mapping[str, DestinationBinding]
    addresses: Mapping[str, RelayAddress]
    remote: Mapping[str, Mapping[str, UInt64Array]]

    def close(self) -> None:
        """Free the tables of the digests. Idempotent."""
        for digests in self.digests.values():
            digests.close()


@final
class RelayRound:
    """State of one round in a rank: the chunks that it still waits for, and the writers to its children.

    Args:
        receiver: receiver of the rank.
        bound: the relay group.
        round_id: the round.
        deadline: deadline of the relay.
    """

    def __init__(
        self, receiver: Receiver, bound: BoundGroup, round_id: RoundId, deadline: Deadline
    ) -> None:
        self._bound = bound
        num_stripes = len(bound.upstream)
        self._left: dict[str, set[tuple[str, int]]] = {}
        for source, payload in bound.payloads.items():
            for chunk in range(payload.num_chunks):
                writer = bound.upstream[chunk % num_stripes] or source
                self._left.setdefault(writer, set()).add((source, chunk))
        self._stripes_of: dict[str, set[int]] = {}
        for writer, keys in self._left.items():
            self._stripes_of[writer] = {chunk % num_stripes for _, chunk in keys}
        self._deadlines = {
            writer: Deadline.after(
                deadline.seconds * max(bound.timeout_shares[i] for i in stripes), "relay"
            )
            for writer, stripes in self._stripes_of.items()
        }
        self._missing: set[str] = set()
        self._unknown: set[str] = set()
        self._disconnected: set[str] = set()
        self._first_s = self._last_s = 0.0
        self._children = {
            name: ChunkWriter(
                receiver.transport,
                receiver.manifest.worker,
                bound.bindings[name],
                bound.addresses[name],
                round_id,
                deadline,
            )
            for name in bound.remote
        }

    @property
    def waits(self) -> bool:
        """Whether the rank still waits for chunks."""
        return bool(self._left)

    def on_chunk(self, upstream: str, landed: ChunkLanded) -> None:
        """Hash a chunk that `upstream` has written. If its digest is right, queue the write of the chunk to each child.

        Otherwise record that bytes of the chunk's source are missing. In both cases this rank no longer waits for the
        chunk. Ignore a chunk that this rank does not wait for.

        Raises:
            TransferFailed, TransferOutcomeUnknown: see `Digests.take`.
        """
        key = landed.source, landed.chunk
        left = self._left.get(upstream)
        if left is None or key not in left:
            return
        self._first_s = self._first_s or time.perf_counter()
        found = self._bound.digests[landed.source].take([landed.chunk], OWN_WORK_S)
        self._last_s = time.perf_counter()
        # Remove the chunk only now, because it must count as missing if `take` raises.
        left.discard(key)
        if not left:
            del self._left[upstream]
        if found[landed.chunk] != landed.digest:
            self._missing.add(landed.source)
            return
        stripe = landed.chunk % len(self._bound.upstream)
        payload, local = self._bound.payloads[landed.source], self._bound.local[landed.source]
        for name in self._bound.children[stripe]:
            remote = self._bound.remote[name][landed.source]
            self._children[name].write(payload, local, remote, landed)

    @property
    def timeout_s(self) -> float:
        """Seconds until the next upstream times out."""
        return min(self._deadlines[writer].remaining_s for writer in self._left)

    @property
    def timed_out(self) -> list[str]:
        """Upstreams that have timed out, and for which this rank still waits."""
        return [writer for writer in self._left if not self._deadlines[writer].remaining_s]

    def on_stripe_end(self, upstream: str, stripe: int) -> None:
        """Record that an upstream writes no more chunks of a stripe, so that this rank no longer waits for them.

        If chunks of the stripe have not arrived, record that bytes of their sources are missing, and queue a `StripeEnd`
        to each child.
        """
        num_stripes = len(self._bound.upstream)
        left = self._left.get(upstream, set())
        gone = {key for key in left if key[1] % num_stripes == stripe}
        if not gone:
            return
        self._missing |= {source for source, _ in gone}
        left -= gone
        if not left:
            del self._left[upstream]
        for name in self._bound.children[stripe]:
            self._children[name].end_stripe(stripe)

    def on_disconnect(self, upstream: str) -> None:
        """Record that the connection of an upstream ended without `End`. Its process begins no more writes."""
        if upstream in self._left:
            self._disconnected.add(upstream)
        self.on_end(upstream, unknown=False)

    def on_end(self, upstream: str, *, unknown: bool) -> None:
        """Record that this rank no longer waits for an upstream. `unknown`: whether its bytes may still arrive."""
        for stripe in self._stripes_of.get(upstream, ()):
            self.on_stripe_end(upstream, stripe)
        if unknown:
            self._unknown.add(upstream)

    def finish(self, joined: Collection[str]) -> tuple[Relayed, frozenset[str]]:
        """Send `End` to all children after the queued writes, and wait until it is sent.

        `joined` contains the accepted writers.

        Returns:
            The result for the controller, and the upstreams that disconnected without `End`.
        """
        # If this rank still waits for an accepted writer, the writer may still be writing.
        self._unknown |= set(self._left) & set(joined)
        self._missing |= {source for left in self._left.values() for source, _ in left}
        children = self._children
        for child in children.values():
            child.end()
        passed_on = {name: child.close() for name, child in children.items()}
        last_s = max((self._last_s, *(child.last_s for child in children.values())))
        relayed = Relayed(
            missing=tuple(sorted(self._missing)),
            unknown_from=tuple(sorted(self._unknown)),
            unknown_to=tuple(name for name, child in children.items() if child.is_unknown),
            unreached=tuple(name for name, child in children.items() if child.unreached),
            nbytes=sum(sent.nbytes for sent in passed_on.values()),
            wire_s=last_s - self._first_s,
            passed_on=passed_on,
        )
        return relayed, frozenset(self._disconnected)


@final
class RelayNode:
    """Member of a relay group in one engine rank.

    One thread calls `run`. During `run`, any thread may call `refuse` and `interrupt`.

    Args:
        receiver: receiver of the rank. Upstreams write to its memory, and its transport writes to the children.
        host: address at which upstreams can reach this rank.
    """

    def __init__(self, receiver: Receiver, host: str) -> None:
        self._receiver, self._host = receiver, host
        self._lock = threading.Lock()
        self._listener: RelayReceiver | None = None
        self._bound: BoundGroup | None = None
        self._running: RoundId | None = None

    def open(self) -> RelayAddress:
        """Return the address of this rank's listener for relays. The first call starts the listener.

        Raises:
            OSError: the first call cannot bind the address.
        """
        with self._lock:
            if self._listener is None:
                self._listener = RelayReceiver(self._receiver.manifest.worker, self._host)
            return self._listener.address

    def connect(
        self,
        group: RelayGroup,
        bindings: Sequence[DestinationBinding],
        addresses: Sequence[RelayAddress],
    ) -> None:
        """Bind the rank to a relay group, and free the tables of its previous group.

        The caller must call `Receiver.connect` first.

        Args:
            group: the group. All its members have bound the same plan part.
            bindings: memory of the children.
            addresses: relay listeners of the children.

        Raises:
            PlanError: this rank is not in the group, or a child has no binding or no address.
            RegionError: bytes would be written outside the regions of a child.
            TransferFailed: the GPU has too little memory for the tables.
        """
        worker = self._receiver.manifest.worker
        if worker not in group.members:
            raise PlanError(f"relay: {worker} is not one of the group's members")
        destination = self._receiver.destination
        programs = destination.programs
        children = children_of(group, worker)
        bound = {binding.worker: binding for binding in bindings}
        known = {address.worker: address for address in addresses}
        names = dict.fromkeys(name for stripe in children for name in stripe)
        for child in names:
            if child not in bound or child not in known:
                raise PlanError(f"relay: {child} must have a binding and an address")
            for program in programs.values():
                check_binding(program, bound[child])
        payloads = {
            source: payload_of(program, group.chunk_nbytes) for source, program in programs.items()
        }
        local = {
            source: payload.at(destination.addresses, destination.staging_address)
            for source, payload in payloads.items()
        }
        index = group.members.index(worker)
        self._unbind()
        self._bound = BoundGroup(
            payloads=payloads,
            local=local,
            digests={s: p.digests(destination.memory, local[s]) for s, p in payloads.items()},
            upstream=tuple("" if p[index] < 0 else group.members[p[index]] for p in group.stripes),
            children=children,
            timeout_shares=tuple(
                1 - TIMEOUT_SPREAD * (1 - depths[index] / max(depths))
                for depths in depths_of(group)
            ),
            bindings=bound,
            addresses=known,
            remote={n: {s: _at(p, bound[n]) for s, p in payloads.items()} for n in names},
        )

    def run(self, round_id: RoundId, deadline_s: float) -> tuple[Relayed, frozenset[str]]:
        """Take part in a round until every link to this rank is complete or cannot become complete.

        Returns:
            The result for the controller, and the upstreams that disconnected without `End`. With a TCP transport, the
            operating system of a disconnected upstream may still send bytes. The caller must therefore call the
            transport's `fence` before it uses this rank's memory.

        Raises:
            PlanError: no group is bound.
        """
        bound, listener = self._bound, self._listener
        if bound is None or listener is None:
            raise PlanError("relay: no group is bound; connect first")
        deadline = Deadline.after(deadline_s, "relay")
        # Set this first, so that `interrupt` ends a round that is about to begin.
        self._running = round_id
        events = listener.begin(round_id)
        round_ = RelayRound(self._receiver, bound, round_id, deadline)
        try:
            while round_.waits:
                try:
                    upstream, event = events.get(timeout=max(round_.timeout_s, 0.001))
                except queue.Empty:
                    for writer in round_.timed_out:
                        # A writer that connects later would write to this rank, and nobody would wait for its end.
                        listener.refuse(round_id, writer)
                        # A writer that was accepted before may still be writing.
                        round_.on_end(writer, unknown=writer in listener.joined(round_id))
                    continue
                match event:
                    case ChunkLanded():
                        round_.on_chunk(upstream, event)
                    case StripeEnd():
                        round_.on_stripe_end(upstream, event.stripe)
                    case End():
                        round_.on_end(upstream, unknown=event.unknown)
                    case Ended.DISCONNECTED:
                        round_.on_disconnect(upstream)
                    case Ended.INTERRUPTED:
                        break
                    case _:
                        assert_never(event)
        # Catch every error, because the controller needs the state of the writes in any case.
        except Exception:  # noqa: BLE001
            _log.exception("%s: the relay of this round failed", self._receiver.manifest.worker)
        finally:
            self._running = None
            ended = round_.finish(listener.end(round_id))
        return ended

    def refuse(self, round_id: RoundId, upstream: str) -> None:
        """Do not accept `upstream` in the round, and do not wait for it; see `RelayReceiver.refuse`."""
        if self._listener is not None:
            self._listener.refuse(round_id, upstream)

    def interrupt(self, round_id: RoundId | None = None) -> None:
        """Make `run` return early. If `run` is called later for this round, it also returns early.

        `round_id` is the round to interrupt; None for the round that runs now, if any.
        """
        round_id = self._running if round_id is None else round_id
        if self._listener is not None and round_id is not None:
            self._listener.interrupt(round_id)

    def close(self) -> None:
        """Stop listening, and free all tables. `run` must have ended. Idempotent."""
        with self._lock:
            self._unbind()
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def _unbind(self) -> None:
        """Drop the relay group, and free its tables."""
        bound, self._bound = self._bound, None
        if bound is not None:
            bound.close()
