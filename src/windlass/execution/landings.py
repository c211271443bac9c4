"""Which parts of a link have landed, told by the writer to the rank whose memory it writes.

A one-sided write says nothing to its target, so a rank that waits for the whole update hashes it
when the wire is silent already. With these datagrams it hashes each part while later ones are under
way. They are hints: one that is lost, late or a lie costs time and nothing else, because a digest that
was added up from hints counts only where it is the expected one. Both processes are on one host.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from typing import final

import msgspec

__all__ = ["Landed", "LandingListener", "LandingTeller"]

MAX_NBYTES = 4096
CLOSE_S = 5.0


class Landed(msgspec.Struct, frozen=True, array_like=True):
    """Pieces [start, stop) of one table of a link lie in their places.

    Attributes:
        source: the writing worker.
        version: of the weights.
        write: names one call of `DeviceSender.write`; a link that is written again starts anew.
        table, start, stop: see `DeviceLink`.
    """

    source: str
    version: int
    write: str
    table: int
    start: int
    stop: int


@final
class LandingTeller:
    """The writer's end. Not thread-safe."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def tell(self, listener: str, landed: Landed) -> None:
        """Send and forget. A listener that is gone or has a full queue hashes by itself."""
        with contextlib.suppress(OSError):
            self._socket.sendto(msgspec.msgpack.encode(landed), _name_of(listener))

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


@final
class LandingListener:
    """The rank's end: a socket in Linux's abstract namespace and a thread that sleeps on it.

    Args:
        deliver: called with each message, by the thread or by `drain`, never by both at once.

    Attributes:
        address: for the writers' `tell`.
    """

    def __init__(self, deliver: Callable[[Landed], None]) -> None:
        self._deliver = deliver
        self._decoder = msgspec.msgpack.Decoder(Landed)
        self._lock = threading.Lock()
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.address = secrets.token_hex(16)
        self._socket.bind(_name_of(self.address))
        self._thread = threading.Thread(target=self._listen, name="landings", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Deliver what was told before this call."""
        with self._lock:
            while not self._closed and (message := self._next()) is not None:
                with contextlib.suppress(msgspec.DecodeError):
                    self._deliver(self._decoder.decode(message))

    def close(self) -> None:
        """Deliver nothing more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.join(CLOSE_S)
        self._socket.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._closed:
                selector.select()
                self.drain()

    def _next(self) -> bytes | None:
        try:
            return self._socket.recv(MAX_NBYTES)
        except BlockingIOError:
            return None


def _name_of(listener: str) -> str:
    return f"\0windlass-{listener}"
