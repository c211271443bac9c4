"""How an upstream tells the next engine that a chunk has landed: one TCP connection per round.

One-sided writes leave no trace in the process that they go to, so after a chunk has been written its
writer says so here. The first frame names the round and carries the secret of the receiving engine; the
receiver answers with one byte if it takes part, and nothing is written before that. The connection
ends with `End`, after which nothing more will be written, or with the end of the process behind it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from typing import final

import msgspec

from windlass.errors import DECODE_ERRORS, PeerUnreachable, ProtocolError
from windlass.net.clock import Deadline

__all__ = [
    "ACCEPTED",
    "ChunkLanded",
    "End",
    "Frame",
    "Open",
    "Place",
    "RelayAddress",
    "RelaySender",
    "StripeEnd",
    "decode_frame",
    "encode_frame",
    "read_frame",
]

MAX_FRAME_NBYTES = 4096
ACCEPTED = b"\x01"
_LENGTH = struct.Struct(">I")

Place = tuple[int, int]
"""(epoch, round)."""


class RelayAddress(msgspec.Struct, frozen=True):
    """Where an engine rank listens, bound before it is published, and its secret."""

    worker: str
    host: str
    port: int
    token: str


class Open(msgspec.Struct, frozen=True, tag="open"):
    """First frame: who writes, in which (epoch, round)."""

    token: str
    upstream: str
    epoch: int
    round: int


class ChunkLanded(msgspec.Struct, frozen=True, tag="chunk"):
    """A chunk of the link from `source` is in place; `digest` is the source's own."""

    source: str
    chunk: int
    digest: str


class StripeEnd(msgspec.Struct, frozen=True, tag="stripe_end"):
    """Chunks of this stripe that are missing by now will not come from here."""

    stripe: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """No more will be written in this round; `unknown`: some bytes may still land all the same."""

    unknown: bool = False


Frame = Open | ChunkLanded | StripeEnd | End
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """Encode a frame, with its length in front."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def decode_frame(body: bytes) -> Frame:
    """Decode what follows the length.

    Raises:
        ProtocolError: it is no frame.
    """
    try:
        frame: Frame = _decoder.decode(body)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"relay: frame of {len(body)} bytes: {error}") from error
    return frame


async def read_frame(stream: asyncio.StreamReader) -> Frame:
    """Read the next frame.

    Raises:
        ProtocolError: it is longer than 4096 bytes or is none.
        OSError, EOFError: the connection has ended.
    """
    (nbytes,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    if nbytes > MAX_FRAME_NBYTES:
        raise ProtocolError(f"relay: a frame has at most {MAX_FRAME_NBYTES} bytes, got {nbytes}")
    return decode_frame(await stream.readexactly(nbytes))


@final
class RelaySender:
    """The writer's end of one connection.

    Raises:
        PeerUnreachable: nobody listens there, or it does not take part in this round.
    """

    def __init__(
        self, address: RelayAddress, upstream: str, place: Place, deadline: Deadline
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
            self.send(Open(address.token, upstream, *place))
            answer = self._socket.recv(1)
        except OSError as error:
            self.close()
            raise PeerUnreachable(f"relay: {self._peer} did not answer: {error}") from error
        except PeerUnreachable:
            self.close()
            raise
        if answer != ACCEPTED:
            self.close()
            raise PeerUnreachable(f"relay: {self._peer} takes no part in round {place}")

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
