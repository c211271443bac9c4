"""How an upstream tells the next engine that a chunk has landed: one TCP connection per round.

One-sided writes leave no trace in the process that they go to, so after a chunk has been written its
writer says so here. The first frame names the round and carries the secret of the receiving engine; the
receiver answers with one byte if it takes part, and nothing is written before that. The connection
ends with `End`, after which nothing more will be written, or with the end of the process behind it.
"""

from __future__ import annotations

import struct

import msgspec

from windlass.errors import DECODE_ERRORS, ProtocolError

MAX_FRAME_NBYTES = 4096
ACCEPTED = b"\x01"
LENGTH = struct.Struct(">I")


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
    return LENGTH.pack(len(body)) + body


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
