"""Relay: engines pass the chunks that they receive on to other engines.

A one-sided write is not visible to the process that owns the memory. The writer therefore
announces each written chunk over one TCP connection per round. The first frame names the round and
carries the secret of the receiving engine. The receiver answers with one byte if it takes part in
the round, and the writer writes nothing before this answer. The last frame is `End`; after it the
writer writes nothing more. A connection without `End` ends when the writer's process ends.

A trainer writes only to the roots of a group: each root gets the chunks of its stripes. The plan
has a link to one member of each group; the links to the other members have the same ops, packed
bytes and digest. After a relay, a trainer completes incomplete links by writing to the members
directly.

An engine accepts a chunk when the bytes in its memory have the digest that the trainer computed.
Only then does it write the chunk to the next engines, by one-sided writes from its own memory. Only
writers that the listener has accepted write to this rank, and `RelayNode.run` returns when each of
them has ended or timed out. Its result therefore names the writers that may still write.
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
from windlass.transfer.bind import check_binding
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
"""Length prefix of every frame."""


class Open(msgspec.Struct, frozen=True, tag="open"):
    """First frame: secret of the receiver, name of the writer, epoch and round."""

    token: str
    upstream: str
    epoch: int
    round: int


class ChunkLanded(msgspec.Struct, frozen=True, tag="chunk"):
    """Announcement that a chunk of the link from `source` is in place; `digest` is the source's digest."""

    source: str
    chunk: int
    digest: str


class StripeEnd(msgspec.Struct, frozen=True, tag="stripe_end"):
    """Announcement that this writer sends no more chunks of a stripe."""

    stripe: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """Last frame of a writer in a round; `unknown`: some of its bytes may still land."""

    unknown: bool = False


Frame = Open | ChunkLanded | StripeEnd | End
FRAMES: Codec[Frame] = Codec(Frame, "relay: frame", max_nbytes=4096)


# --- both ends of a connection -------------------------------------------------------------------

MAX_CONNECTIONS = 4096
ACCEPT_AGAIN_S = 0.1
OPEN_S = 10.0
"""Seconds within which a client must send its first frame, so that a client without the token cannot
occupy a connection for longer."""
CLOSE_S = 10.0


@final
class RelaySender:
    """Writer's end of one connection.

    Raises:
        PeerUnreachable: no process listens at the address, or the peer does not take part in this
            round.
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
        """Send `End`, after which this writer writes nothing more, and close the connection."""
        # If the frame is lost, the receiver sees the end of the connection, and the controller gets
        # `unknown` with the result of the round.
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
        raise ProtocolError(f"relay: a frame has at most {FRAMES.max_nbytes} bytes, got {nbytes}")
    return FRAMES.decode(await stream.readexactly(nbytes))


class Ended(Enum):
    """Events of a round that are not frames."""

    DISCONNECTED = auto()
    """A connection ended without `End`; bytes in the writer's operating system may still arrive."""
    INTERRUPTED = auto()
    """The round is over for this rank."""


RelayEvents = queue.SimpleQueue[tuple[str, ChunkLanded | StripeEnd | End | Ended]]
"""Queue of (upstream, frame or `Ended`); see `RelayReceiver`."""


@dataclass(slots=True)
class _Round:
    events: RelayEvents = field(default_factory=queue.SimpleQueue)
    joined: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    closed: bool = False


@final
class RelayReceiver:
    """Listener of one engine rank, from construction to `close`. Thread-safe.

    A writer is accepted if it sends the right secret, and names the newest round or a later one,
    which `end` has not closed. The events of a round contain one `End` or `DISCONNECTED` for every
    accepted writer.

    Args:
        worker: this rank.
        host: address to bind; the system chooses the port.
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
        """Return the queue of a round's events, including events before this call. End older rounds."""
        with self._lock:
            self._oldest = max(self._oldest, round_id)
            for older in [found for found in self._rounds if found < round_id]:
                del self._rounds[older]
            return self._rounds[round_id].events

    def joined(self, round_id: RoundId) -> frozenset[str]:
        """Return the writers that were accepted into the round until now."""
        with self._lock:
            return frozenset(self._rounds[round_id].joined)

    def end(self, round_id: RoundId) -> frozenset[str]:
        """Accept no more writers into the round; return the accepted writers."""
        with self._lock:
            of_round = self._rounds[round_id]
            of_round.closed = True
            return frozenset(of_round.joined)

    def refuse(self, round_id: RoundId, upstream: str) -> None:
        """Refuse `upstream` in the round, and add its `End` to the events. Do nothing if `upstream` is already accepted."""
        with self._lock:
            if round_id < self._oldest:
                return
            of_round = self._rounds[round_id]
            of_round.refused.add(upstream)
            if upstream not in of_round.joined:
                of_round.events.put((upstream, End()))

    def interrupt(self, round_id: RoundId) -> None:
        """Wake the thread that reads the events of the round."""
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
        async with asyncio.TaskGroup() as connections:
            num_open = asyncio.Semaphore(MAX_CONNECTIONS)
            while True:
                await num_open.acquire()
                try:
                    accepted, _ = await self._loop.sock_accept(self._listener)
                except OSError:
                    # With too many open files the listener stays readable, so accepting again at
                    # once would spin.
                    num_open.release()
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                connection = connections.create_task(self._read(accepted))
                connection.add_done_callback(lambda _: num_open.release())

    async def _read(self, accepted: socket.socket) -> None:
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
                        # The writer's process has ended or has given up, so it writes nothing more.
                        events.put((opened.upstream, last))
            finally:
                writer.close()
                await writer.wait_closed()

    @staticmethod
    async def _follow(stream: asyncio.StreamReader, upstream: str, events: RelayEvents) -> End:
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


# --- writers of chunks: trainers, and engines that pass them on ----------------------------------

WRITES_AT_ONCE = 4
"""Maximum number of concurrent chunk writes to one engine, so that the next chunk is on the wire while
earlier ones are acknowledged."""


@final
class ChunkWriter:
    """Writer of chunks to one engine in one round. It announces each chunk after writing it.

    It has its own threads and connects in one of them. After the first error it writes nothing
    more.

    Attributes:
        errors: errors in order of time.
        unreached: True if the engine did not accept this rank; nothing was written to it.
        first_s, last_s: times (`time.perf_counter`) at which the first write began and the last
            write ended; 0 without chunks.
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
        """True if bytes may still land."""
        return any(is_unknown(error) for error in self.errors)

    def write(
        self, payload: Payload, local: UInt64Array, remote: UInt64Array, landed: ChunkLanded
    ) -> None:
        """Queue the write of a chunk from (n,) `local` to (n,) `remote` addresses."""

        def write(sender: RelaySender) -> None:
            pieces, deadline = payload.pieces_of(landed.chunk), self._deadline
            nbytes = payload.nbytes[pieces].astype(np.uint64)
            self.first_s = self.first_s or time.perf_counter()
            for batch in batches_to(self._binding, local[pieces], remote[pieces], nbytes):
                deadline.check_before_more()
                self._transport.write(batch, deadline_s=max(deadline.remaining_s, 0.001))
            sender.send(landed)
            self.last_s = time.perf_counter()
            with self._lock:
                self._nbytes += int(nbytes.sum())

        self._submit(write)

    def end_stripe(self, stripe: int) -> None:
        """Queue the announcement that a stripe has ended, after the writes that are already queued."""
        self._submit(lambda sender: sender.send(StripeEnd(stripe)), last=True)

    def end(self) -> None:
        """Queue the `End` frame, after the writes that are already queued."""
        earlier = tuple(self._jobs)

        def end() -> None:
            # The earlier jobs began before this one, each in its own thread, so this wait cannot
            # block them.
            wait(earlier)
            lost = any(job.exception() is not None for job in earlier)
            if self._sender is not None:
                self._sender.end(unknown=self.is_unknown or lost)

        self._jobs.append(submit(self._pool, end))

    def close(self) -> Carried:
        """Wait for all queued work; return the bytes written and the seconds from the first write to the last."""
        self._pool.shutdown(wait=True)
        failed = [error for job in self._jobs if (error := job.exception()) is not None]
        for error in failed:
            _log.error("relaying to %s failed", self._binding.worker, exc_info=error)
        self.errors += failed
        if self._sender is not None:
            self._sender.close()
        return Carried(self._nbytes, max(self.last_s - self.first_s, 0.0))

    def _submit(self, job: Callable[[RelaySender], None], *, last: bool = False) -> None:
        """Queue a job. Skip the job after an error of an earlier job.

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
                # Later jobs are skipped after this error. The peer then lacks chunks and reports the link
                # as incomplete.
                self.errors.append(error)
                if not isinstance(error, TransferError):
                    raise

        self._jobs.append(submit(self._pool, run))

    def _open(self, address: RelayAddress, worker: str, round_id: RoundId) -> None:
        try:
            self._sender = RelaySender(address, worker, round_id, self._deadline)
        except TransferError as error:
            self.errors.append(error)
            self.unreached = True


def _at(payload: Payload, binding: DestinationBinding) -> UInt64Array:
    return payload.at(binding.parameter_addresses, binding.staging_address)


@final
class GroupWrite:
    """A relay group, as seen by a trainer rank.

    Attributes:
        leader: first member; the plan contains the link to it.
        roots: members that trainers write to during a relay.
        digest: digest of the link to any member; empty while nothing is packed.

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

    def keep(self, memory: MemoryOps, packed: PackedBytes | None) -> None:
        """Hash the chunks of the link after it was packed, and keep their addresses.

        Raises:
            TransferFailed: the GPU has no room for the tables.
            TransferOutcomeUnknown: kernels do not end.
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
        """Free the hash tables. Idempotent."""
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
        """Write the chunks of a root's stripes, a few at a time.

        If nothing is packed, send the root only `End`.

        Raises:
            TransferError: the root was not reached, or a write failed.
            TransferOutcomeUnknown: bytes may still land.
        """
        digests, roots = self._chunks if self.digest else (), self._group.roots()
        if root not in {roots[chunk % len(roots)] for chunk in range(self._payload.num_chunks)}:
            # The root expects no chunk of this trainer, so its relay may have ended already.
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
    """Relay groups of a trainer rank. Any thread may call its methods; the calls run one at a time.

    Args:
        sender: packs the links to the groups, and writes all links that are not relayed.

    Attributes:
        groups: destination -> its group.
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
        """Bind links to all members of the groups to whose first member the sender has a link.

        Raises:
            ProtocolError: GPU kernels of this rank store the links.
            PlanError: a member has no binding, or a root has no address.
            RegionError: a write would leave the published regions.
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
        """Hash the chunks of all groups, after the sender has packed the links.

        Raises:
            TransferFailed, TransferOutcomeUnknown: see `GroupWrite.keep`.
        """
        with self._sender.reading():
            self._keep()

    def _keep(self) -> None:
        for relayed in set(self.groups.values()):
            relayed.keep(self._sender.memory, self._sender.packed(relayed.leader))

    def write(
        self, round_id: RoundId, version: int, destinations: Sequence[str], deadline_s: float
    ) -> Written:
        """Write to the roots of all groups, while the sender writes the links that are not relayed.

        For a member that this rank does not write, the outcome is OK once its digest is known. The member itself
        reports whether its bytes arrived.

        Raises:
            RoundAborted: this rank has no link to one of the destinations.
            TransferOutcomeUnknown: bytes may still land, and there is no outcome per link.
        """
        deadline = Deadline.after(deadline_s, "write")
        with self._sender.reading(), ThreadPoolExecutor(LINKS_AT_ONCE, "windlass-relay") as threads:
            self._sender.check_links(destinations)
            self._keep()
            began, arena = time.perf_counter(), self._sender.arena
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
                met = [job.exception() for job in roots.values()]
                if any(found is not None and is_unknown(found) for found in met):
                    raise TransferOutcomeUnknown(
                        f"{error!r}; errors of relay roots: {met}"
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
        if written is not None and (lost := written.exception()) is not None:
            return self._sender.failed(name, lost, arena)
        if not digest:
            return failed_link(name, "arena_nbytes: too small to hold a relayed link")
        own = Carried(0, 0.0) if written is None else written.result()
        return LinkOutcome(name, LinkStatus.OK, own.nbytes, digest, wire_s=own.wire_s)

    def close(self) -> None:
        """Free the hash tables and unbind all groups. Idempotent."""
        for relayed in self.groups.values():
            relayed.close()
        self.groups = {}


# --- an engine rank that takes part --------------------------------------------------------------


TIMEOUT_SPREAD = 0.25
"""Difference between the timeouts of the first and the last rank of a stripe, as a fraction of the
relay's time."""


@dataclass(frozen=True, slots=True)
class BoundGroup:
    """Binding of this rank to a relay group, used in every round.

    Attributes:
        payloads: source -> payload of its link.
        local: source -> addresses of the pieces in this rank.
        digests: source -> digests of the chunks in this rank.
        upstream: per stripe: member that writes to this rank; empty if trainers do.
        children: per stripe: members that this rank passes chunks on to.
        timeout_shares: per stripe: fraction of the relay's deadline that this rank waits. Ranks
            closer to the root time out first, so that a rank that only waits for a stalled rank is
            not reported as stalled.
        bindings, addresses: child -> its memory and its relay listener.
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
    """State of one round: chunks that are still expected, and writers to the children."""

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
        """True while more chunks are expected."""
        return bool(self._left)

    def on_chunk(self, upstream: str, landed: ChunkLanded) -> None:
        """Verify a chunk. If its digest is right, pass the chunk on to the children."""
        key = landed.source, landed.chunk
        left = self._left.get(upstream)
        if left is None or key not in left:
            return
        self._first_s = self._first_s or time.perf_counter()
        found = self._bound.digests[landed.source].take([landed.chunk], OWN_WORK_S)
        self._last_s = time.perf_counter()
        # Remove the chunk only now: if hashing raises, the chunk must stay in the missing chunks.
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
        """Seconds until the next timeout of a writer."""
        return min(self._deadlines[writer].remaining_s for writer in self._left)

    def expire(self, joined: Collection[str]) -> None:
        """Stop waiting for writers that have timed out.

        A timed-out writer in `joined`, the accepted writers, may still be writing.
        """
        for writer in [w for w in self._left if not self._deadlines[w].remaining_s]:
            self.on_end(writer, unknown=writer in joined)

    def on_stripe_end(self, upstream: str, stripe: int) -> None:
        """Record that an upstream sends no more chunks of a stripe, and tell the children of that stripe."""
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
        """Record that the connection of an upstream ended without `End`. The upstream writes nothing more."""
        if upstream in self._left:
            self._disconnected.add(upstream)
        self.on_end(upstream, unknown=False)

    def on_end(self, upstream: str, *, unknown: bool) -> None:
        """Record that an upstream writes nothing more. With `unknown`, its last bytes may still land."""
        for stripe in self._stripes_of.get(upstream, ()):
            self.on_stripe_end(upstream, stripe)
        if unknown:
            self._unknown.add(upstream)

    def finish(self, joined: Collection[str]) -> tuple[Relayed, frozenset[str]]:
        """Wait for all writes to children, send them `End`, and return the result; see `RelayNode.run`.

        `joined` has the writers that were accepted.
        """
        # An accepted writer that has not ended may still be writing.
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
    """Relay part of one engine rank. The agent's command thread calls `run`; any thread may call other methods.

    Args:
        receiver: owner of the memory that upstreams write and that is passed on. Its transport
            writes to the children.
        host: address at which upstreams can reach this rank.
    """

    def __init__(self, receiver: Receiver, host: str) -> None:
        self._receiver, self._host = receiver, host
        self._lock = threading.Lock()
        self._listener: RelayReceiver | None = None
        self._bound: BoundGroup | None = None
        self._running: RoundId | None = None

    def open(self) -> RelayAddress:
        """Return the address of this rank's listener for relays. The first call starts the listener."""
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
        """Bind a group. Call this after `Receiver.connect`, with the same plan for every member.

        Raises:
            PlanError: a child has no binding or no address, or this rank is not in the group.
            RegionError: a write would leave the published regions.
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
                raise PlanError(f"relay: {child} has no binding or no address")
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
            The result, and the upstreams whose connection ended without `End`. With a TCP
            transport, the operating system of such an upstream may still send bytes, so the caller
            must fence this rank's memory before relying on it.

        Raises:
            PlanError: no group is bound.
        """
        bound, listener = self._bound, self._listener
        if bound is None or listener is None:
            raise PlanError("relay: no group is bound; connect first")
        deadline = Deadline.after(deadline_s, "relay")
        events = listener.begin(round_id)
        self._running = round_id
        round_ = RelayRound(self._receiver, bound, round_id, deadline)
        try:
            while round_.waits:
                try:
                    upstream, event = events.get(timeout=max(round_.timeout_s, 0.001))
                except queue.Empty:
                    round_.expire(listener.joined(round_id))
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
        # After any error, the controller still needs the state of this round's writes.
        except Exception:  # noqa: BLE001
            _log.exception("%s: failed in the relay", self._receiver.manifest.worker)
        finally:
            self._running = None
            ended = round_.finish(listener.end(round_id))
        return ended

    def refuse(self, round_id: RoundId, upstream: str) -> None:
        """Refuse writes of `upstream` in the round, because `upstream` takes no part in the round."""
        if self._listener is not None:
            self._listener.refuse(round_id, upstream)

    def interrupt(self, round_id: RoundId | None = None) -> None:
        """Make the running `run` return, or the `run` of `round_id` as soon as it begins."""
        round_id = self._running if round_id is None else round_id
        if self._listener is not None and round_id is not None:
            self._listener.interrupt(round_id)

    def close(self) -> None:
        """Stop listening and free all tables. `run` must have ended. Idempotent."""
        with self._lock:
            self._unbind()
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def _unbind(self) -> None:
        bound, self._bound = self._bound, None
        if bound is not None:
            bound.close()
