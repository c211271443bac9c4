"""The listening end of a relay: one thread that turns connections into events of a round."""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import assert_never, final

from windlass.errors import ProtocolError
from windlass.transfer.relay_wire import (
    ACCEPTED,
    ChunkLanded,
    End,
    Frame,
    FrameBuffer,
    Open,
    Place,
    RelayAddress,
    StripeEnd,
)

__all__ = ["Arrived", "Ended", "Interrupted", "StripeEnded", "RelayEvent", "RelayReceiver"]

MAX_CONNECTIONS = 4096
READ_NBYTES = 1 << 16
ACCEPT_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Arrived:
    """`upstream` has written a chunk."""

    upstream: str
    landed: ChunkLanded


@dataclass(frozen=True, slots=True)
class StripeEnded:
    """`upstream` brings no more chunks of a stripe."""

    upstream: str
    stripe: int


@dataclass(frozen=True, slots=True)
class Ended:
    """`upstream` writes nothing more in this round, or never will.

    `wordless`: its connection ended without a word, so what its kernel holds may still come.
    """

    upstream: str
    unknown: bool
    wordless: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The round is over for this rank."""


RelayEvent = Arrived | StripeEnded | Ended | Interrupted


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    frames: FrameBuffer = field(default_factory=FrameBuffer)
    upstream: str = ""
    place: Place | None = None


@dataclass(slots=True)
class _Round:
    events: queue.SimpleQueue[RelayEvent] = field(default_factory=queue.SimpleQueue)
    joined: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    closed: bool = False


@final
class RelayReceiver:
    """Listens from construction to `close`. Thread-safe.

    A writer is let in for the newest round or a later one that has not been closed, and only with
    the right secret. Whoever was let in is followed by `Ended` in the events of its round, by its
    own word or by the end of its connection.

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
        self._rounds: dict[Place, _Round] = {}
        self._oldest: Place = (0, 0)
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._listens_from: float | None = None
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="windlass-relay", daemon=True)
        self._closed = False
        self._thread.start()

    @property
    def address(self) -> RelayAddress:
        """What writers need."""
        return self._address

    def begin(self, place: Place) -> queue.SimpleQueue[RelayEvent]:
        """The events of a round, also of those who came before this call; older rounds are over."""
        with self._lock:
            self._oldest = max(self._oldest, place)
            self._rounds = {p: r for p, r in self._rounds.items() if p >= place}
            return self._rounds.setdefault(place, _Round()).events

    def joined(self, place: Place) -> frozenset[str]:
        """Who was let into the round so far."""
        with self._lock:
            of_round = self._rounds.get(place)
            return frozenset(of_round.joined if of_round is not None else ())

    def end(self, place: Place) -> frozenset[str]:
        """Let nobody into the round any more; returns who was let in."""
        with self._lock:
            of_round = self._rounds.setdefault(place, _Round())
            of_round.closed = True
            return frozenset(of_round.joined)

    def refuse(self, place: Place, upstream: str) -> None:
        """`upstream` will not come, or must not: `Ended`, unless it is in already."""
        with self._lock:
            if place < self._oldest:
                return
            of_round = self._rounds.setdefault(place, _Round())
            of_round.refused.add(upstream)
            if upstream not in of_round.joined:
                of_round.events.put(Ended(upstream, unknown=False))

    def interrupt(self, place: Place) -> None:
        """Wake whoever reads the events of the round."""
        with self._lock:
            if place >= self._oldest:
                self._rounds.setdefault(place, _Round()).events.put(Interrupted())

    def close(self) -> None:
        """Close every connection and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake.close()
        self._thread.join(10.0)

    # --- in the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select(self._listen_again()):
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(self._connections[key.fd])
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._listener.close()
            self._woken.close()
            self._selector.close()

    def _listen_again(self) -> float | None:
        """Ask the listener again if it has rested; seconds that it still rests, None if it does not."""
        if self._listens_from is None:
            return None
        rest_s = self._listens_from - time.monotonic()
        if rest_s > 0:
            return rest_s
        self._listens_from = None
        self._selector.register(self._listener, selectors.EVENT_READ)
        return None

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it went away before we looked
        except OSError:
            # Too many open files: the listener stays readable, and must not be asked without end,
            # nor hold up those who are in.
            self._selector.unregister(self._listener)
            self._listens_from = time.monotonic() + ACCEPT_AGAIN_S
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        self._connections[accepted.fileno()] = _Connection(accepted)
        self._selector.register(accepted, selectors.EVENT_READ)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(READ_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            frames = connection.frames.feed(data) if data else []
            kept = bool(data) and all(self._take(connection, frame) for frame in frames)
        except ProtocolError:
            kept = False
        if not kept:
            self._drop(connection)

    def _take(self, connection: _Connection, frame: Frame) -> bool:
        """Whether the connection is still wanted."""
        if connection.place is None:
            return isinstance(frame, Open) and self._let_in(connection, frame)
        match frame:
            case ChunkLanded():
                self._post(connection, Arrived(connection.upstream, frame))
                return True
            case StripeEnd():
                self._post(connection, StripeEnded(connection.upstream, frame.stripe))
                return True
            case End():
                self._post(connection, Ended(connection.upstream, frame.unknown))
                connection.place = None
                return False
            case Open():
                return False
            case _:
                assert_never(frame)

    def _let_in(self, connection: _Connection, frame: Open) -> bool:
        if not hmac.compare_digest(frame.token.encode(), self._address.token.encode()):
            return False
        place = frame.epoch, frame.round
        with self._lock:
            if place < self._oldest:
                return False
            of_round = self._rounds.setdefault(place, _Round())
            if of_round.closed or frame.upstream in of_round.refused | of_round.joined:
                return False
            try:
                connection.socket.send(ACCEPTED)
            except OSError:
                return False
            of_round.joined.add(frame.upstream)
        connection.upstream, connection.place = frame.upstream, place
        return True

    def _post(self, connection: _Connection, event: RelayEvent) -> None:
        with self._lock:
            of_round = None if connection.place is None else self._rounds.get(connection.place)
            if of_round is not None:
                of_round.events.put(event)

    def _drop(self, connection: _Connection) -> None:
        # The process behind it has ended, or gave up: it is past its last write.
        if connection.place is not None:
            self._post(connection, Ended(connection.upstream, unknown=False, wordless=True))
        self._connections.pop(connection.socket.fileno(), None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
