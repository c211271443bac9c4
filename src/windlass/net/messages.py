"""Messages that all protocols between Windlass processes share, and their decoder."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar, final

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError, ProtocolError

PROTOCOL_VERSION = 27
"""Version of all messages between processes of Windlass. Both ends of a connection must have the same version."""
MAX_NAME_NBYTES = 255

CallId = tuple[int, int, int]
"""(epoch, round, seq): identity of one call of a command to one peer."""

T_co = TypeVar("T_co", covariant=True)

encode = msgspec.msgpack.Encoder().encode
"""Encoder of a message of any type as MessagePack."""


@final
class Codec(Generic[T_co]):
    """Decoder of messages of one type, or of a union of tagged types.

    Args:
        kind: type of the messages.
        name: name of the messages in errors.
        max_nbytes: largest size of a message. A longer message is refused before it is decoded.
    """

    __slots__ = ("_decoder", "_name", "max_nbytes")

    def __init__(self, kind: object, name: str, *, max_nbytes: int = 256 << 20) -> None:
        self._decoder: msgspec.msgpack.Decoder[T_co] = msgspec.msgpack.Decoder(kind)
        self._name, self.max_nbytes = name, max_nbytes

    def decode(self, data: bytes) -> T_co:
        """Decode a message.

        Raises:
            ProtocolError: the message is too long or has another type.
        """
        if len(data) > self.max_nbytes:
            raise ProtocolError(
                f"{self._name} must have at most {self.max_nbytes} bytes, got {len(data)}"
            )
        try:
            return self._decoder.decode(data)
        except (*DECODE_ERRORS, ConfigError, ProtocolError) as error:
            raise ProtocolError(f"{self._name} of {len(data)} bytes: {error}") from error


class RoundId(NamedTuple):
    """Identity of one round or one binding of the fleet. A later identity is greater.

    `epoch` grows with every binding and with every start of a controller. `round` grows at the same
    times, and with every attempt to publish.
    """

    epoch: int
    round: int


class _OfCall(msgspec.Struct, frozen=True):
    """Message of one call."""

    epoch: int
    round: int
    seq: int

    @property
    def call_id(self) -> CallId:
        """Identity of the call."""
        return self.epoch, self.round, self.seq

    @property
    def round_id(self) -> RoundId:
        """Identity of the round to which the call belongs."""
        return RoundId(self.epoch, self.round)


class Envelope(_OfCall, Generic[T_co], frozen=True, tag="envelope"):
    """A command with the identity of its call."""

    command: T_co


class UnreadCall(_OfCall, frozen=True, tag="envelope"):
    """An envelope with a command that this process cannot decode."""

    command: msgspec.Raw


_UNREAD_CALLS = msgspec.msgpack.Decoder(UnreadCall)


def unread_call(data: bytes) -> UnreadCall | None:
    """Decode only the call identity of an envelope, not its command; return None if `data` is not an envelope."""
    try:
        return _UNREAD_CALLS.decode(data)
    except DECODE_ERRORS:
        return None


class Reply(_OfCall, Generic[T_co], frozen=True, tag="reply"):
    """The answer to the envelope with the same (epoch, round, seq)."""

    result: T_co


class Refused(msgspec.Struct, frozen=True, tag="refused", omit_defaults=True):
    """Refusal of a peer. The server sends it instead of a welcome, or before it closes the connection.

    Attributes:
        message: reason in one line, for logs and errors.
        final: whether the peer must not connect again. False if only this connection failed, or if
            the server may admit the peer later.
    """

    message: str
    final: bool = True


class MustWait(ProtocolError):
    """The server does not admit the peer yet. The peer may connect again."""


class OwnerClosed(MustWait):
    """The server is closing. A server that is started later at this address may admit the peer."""


class Garbled(ProtocolError):
    """A frame could not be decoded, perhaps because it was damaged on the way. The peer may connect again."""


def check_version(version: int, peer: str) -> None:
    """Check that `version`, the protocol version of a peer, is the version of this process.

    Raises:
        ProtocolError: the versions differ.
    """
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"{peer}: protocol_version must be {PROTOCOL_VERSION}, got {version}")


def check_name(name: str, what: str) -> None:
    """Check that the name of a peer can be written to logs, terminals and metrics.

    Raises:
        ProtocolError: the name is empty, has unprintable characters, or exceeds 255 bytes.
    """
    if not name or not name.isprintable() or len(name.encode()) > MAX_NAME_NBYTES:
        shown = name[:MAX_NAME_NBYTES].encode("unicode_escape").decode()
        raise ProtocolError(
            f"{what} must be 1 to {MAX_NAME_NBYTES} bytes of printable characters, got '{shown}'"
        )
