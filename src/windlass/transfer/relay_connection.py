"""Both ends of a relay's connections: a writer's, and the listener's, whose thread turns them into events."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import queue
import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import final

from windlass.errors import PeerUnreachable, ProtocolError
from windlass.net.clock import Deadline
from windlass.net.messages import RoundId
from windlass.transfer.relay_wire import (
    ACCEPTED,
    LENGTH,
    MAX_FRAME_NBYTES,
    ChunkLanded,
    End,
    Frame,
    Open,
    RelayAddress,
    StripeEnd,
    decode_frame,
    encode_frame,
)

MAX_CONNECTIONS = 4096
ACCEPT_AGAIN_S = 0.1
OPEN_S = 10.0
"""For the first frame of a connection: whoever has no token holds it for no longer."""
CLOSE_S = 10.0


@final
class RelaySender:
    """The writer's end of one connection.

    Raises:
        PeerUnreachable: nobody listens there, or it does not take part in this round.
    """

    def __init__(
        self, address: RelayAddress, upstream: str, round_id: RoundId, deadline: Deadline
    ) -> None:
        self._peer = address.worker
        self._lock = threading.Lock()
        self._deadline = deadline
        try:
            self._socket = socket.create_connection(
                (address.host, address.port), timeout=self._left_s()
            )
        except OSError as error:
            raise PeerUnreachable(f"relay: {self._peer} does not listen: {error}") from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.send(Open(address.token, upstream, *round_id))
            answer = self._socket.recv(1)
        except OSError as error:
            self.close()
            raise PeerUnreachable(f"relay: {self._peer} did not answer: {error}") from error
        except PeerUnreachable:
            self.close()
            raise
        if answer != ACCEPTED:
            self.close()
            raise PeerUnreachable(f"relay: {self._peer} takes no part in round {round_id}")

    def send(self, frame: Frame) -> None:
        """Send one frame. Thread-safe.

        Raises:
            PeerUnreachable: the connection is gone or the deadline has passed.
        """
        try:
            with self._lock:
                self._socket.settimeout(self._left_s())
                self._socket.sendall(encode_frame(frame))
        except OSError as error:
            raise PeerUnreachable(f"relay: {self._peer} is gone: {error}") from error

    def end(self, *, unknown: bool) -> None:
        """Say that nothing more will be written, and close."""
        try:
            self.send(End(unknown))
        except PeerUnreachable:
            pass  # the end of the connection says the same, but for `unknown`, which is reported
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _left_s(self) -> float:
        return max(self._deadline.remaining_s, 0.01)


async def _read_frame(stream: asyncio.StreamReader) -> Frame:
    """Read the next frame.

    Raises:
        ProtocolError: it is longer than 4096 bytes or is none.
        OSError, EOFError: the connection has ended.
    """
    (nbytes,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    if nbytes > MAX_FRAME_NBYTES:
        raise ProtocolError(f"relay: a frame has at most {MAX_FRAME_NBYTES} bytes, got {nbytes}")
    return decode_frame(await stream.readexactly(nbytes))


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection ended without `End`: what the kernel of its peer holds may still come."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The round is over for this rank."""


RelayEvents = queue.SimpleQueue[
    tuple[str, ChunkLanded | StripeEnd | End | Disconnected | Interrupted]
]
"""Upstreams, and what each of them has written or said; see `RelayReceiver`."""


@dataclass(slots=True)
class _Round:
    events: RelayEvents = field(default_factory=queue.SimpleQueue)
    joined: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    closed: bool = False


@final
class RelayReceiver:
    """Listens from construction to `close`. Thread-safe.

    A writer is let in for the newest round or a later one that has not been closed, and only with
    the right secret. Whoever was let in is followed by `End` or `Disconnected` in the events of its round.

    Args:
        worker: this rank. host: address to bind; the port is chosen by the system.
    """

    def __init__(self, worker: str, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self._address = RelayAddress(
            worker, host, int(self._listener.getsockname()[1]), secrets.token_hex(16)
        )
        self._lock = threading.Lock()
        self._rounds: dict[RoundId, _Round] = {}
        self._oldest = RoundId(0, 0)
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="windlass-relay", daemon=True)
        self._thread.start()

    @property
    def address(self) -> RelayAddress:
        """What writers need."""
        return self._address

    def begin(self, round_id: RoundId) -> RelayEvents:
        """Return the events of a round, also of those who came before this call; older rounds are over."""
        with self._lock:
            self._oldest = max(self._oldest, round_id)
            self._rounds = {p: r for p, r in self._rounds.items() if p >= round_id}
            return self._rounds.setdefault(round_id, _Round()).events

    def joined(self, round_id: RoundId) -> frozenset[str]:
        """Return who was let into the round so far."""
        with self._lock:
            of_round = self._rounds.get(round_id)
            return frozenset(of_round.joined if of_round is not None else ())

    def end(self, round_id: RoundId) -> frozenset[str]:
        """Let nobody into the round any more; return who was let in."""
        with self._lock:
            of_round = self._rounds.setdefault(round_id, _Round())
            of_round.closed = True
            return frozenset(of_round.joined)

    def refuse(self, round_id: RoundId, upstream: str) -> None:
        """Let `upstream`, which will not come or must not, not into the round: that is its `End` there."""
        with self._lock:
            if round_id < self._oldest:
                return
            of_round = self._rounds.setdefault(round_id, _Round())
            of_round.refused.add(upstream)
            if upstream not in of_round.joined:
                of_round.events.put((upstream, End()))

    def interrupt(self, round_id: RoundId) -> None:
        """Wake whoever reads the events of the round."""
        with self._lock:
            if round_id >= self._oldest:
                self._rounds.setdefault(round_id, _Round()).events.put(("", Interrupted()))

    def close(self) -> None:
        """Close every connection and end the thread. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
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
                    # Too many open files: the listener stays readable, and must not be asked without end.
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
                    last: End | Disconnected = Disconnected()
                    try:
                        writer.write(ACCEPTED)
                        last = await self._follow(stream, opened.upstream, events)
                    finally:  # the process behind it has ended, or gave up: it is past its last write
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
                raise ProtocolError("relay: a connection is opened once")
            events.put((upstream, frame))

    def _let_in(self, frame: Open) -> RelayEvents | None:
        if not hmac.compare_digest(frame.token.encode(), self._address.token.encode()):
            return None
        round_id = RoundId(frame.epoch, frame.round)
        with self._lock:
            if round_id < self._oldest:
                return None
            of_round = self._rounds.setdefault(round_id, _Round())
            if of_round.closed or frame.upstream in of_round.refused | of_round.joined:
                return None
            of_round.joined.add(frame.upstream)
            return of_round.events
