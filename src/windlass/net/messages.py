"""What every session says, and how messages are read: as one type, or as the peer's error. No I/O."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar, final

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError, ProtocolError

PROTOCOL_VERSION = 13
"""Of all that two processes of Windlass say to each other; both must have the same."""
MAX_NAME_NBYTES = 255

CallId = tuple[int, int, int]
"""(epoch, round, seq)."""

T_co = TypeVar("T_co", covariant=True)

encode = msgspec.msgpack.Encoder().encode
"""The MessagePack form of a message of any type."""


@final
class Codec(Generic[T_co]):
    """Reads messages of one type, or of a union of tagged types, that errors call `name`.

    Messages longer than `max_nbytes` are refused before they are decoded.
    """

    __slots__ = ("_decoder", "_name", "max_nbytes")

    def __init__(self, kind: object, name: str, *, max_nbytes: int = 256 << 20) -> None:
        self._decoder: msgspec.msgpack.Decoder[T_co] = msgspec.msgpack.Decoder(kind)
        self._name, self.max_nbytes = name, max_nbytes

    def decode(self, data: bytes) -> T_co:
        """Read a message.

        Raises:
            ProtocolError: it is too long, or none of the type.
        """
        if len(data) > self.max_nbytes:
            raise ProtocolError(
                f"{self._name} must be of at most {self.max_nbytes} bytes, got {len(data)}"
            )
        try:
            return self._decoder.decode(data)
        except (*DECODE_ERRORS, ConfigError, ProtocolError) as error:
            raise ProtocolError(f"{self._name} of {len(data)} bytes: {error}") from error


class RoundId(NamedTuple):
    """Tells one round, or one binding of the fleet, from every other; later ones are greater.

    `epoch` grows with every binding and with every start of a controller, `round` with both and
    with every attempt to publish.
    """

    epoch: int
    round: int


class _OfCall(msgspec.Struct, frozen=True):
    epoch: int
    round: int
    seq: int

    @property
    def call_id(self) -> CallId:
        """Of the call."""
        return self.epoch, self.round, self.seq

    @property
    def round_id(self) -> RoundId:
        """The round that the call belongs to."""
        return RoundId(self.epoch, self.round)


class Envelope(_OfCall, Generic[T_co], frozen=True, tag="envelope"):
    """A command and the id of its call."""

    command: T_co


class UnreadCall(_OfCall, frozen=True, tag="envelope"):
    """An envelope whose command this process cannot read."""

    command: msgspec.Raw


_UNREAD_CALLS = msgspec.msgpack.Decoder(UnreadCall)


def unread_call(data: bytes) -> UnreadCall | None:
    """Return a whole envelope without reading its command; None if the message is none."""
    try:
        return _UNREAD_CALLS.decode(data)
    except DECODE_ERRORS:
        return None


class Reply(_OfCall, Generic[T_co], frozen=True, tag="reply"):
    """The one answer to the envelope with the same (epoch, round, seq)."""

    result: T_co


class Refused(msgspec.Struct, frozen=True, tag="refused", omit_defaults=True):
    """Instead of a welcome, or before the server closes the connection.

    Attributes:
        message: one line for a person.
        final: the peer does not belong here, and need not come again. False where only this
            connection went wrong, or where it may be let in later.
    """

    message: str
    final: bool = True


class MustWait(ProtocolError):
    """The peer may belong here, but not yet: it may come again."""


class OwnerClosed(MustWait):
    """The owner is being closed: a successor may take the peer."""


class Garbled(ProtocolError):
    """The fault may be the connection's and not the peer's: it may come again."""


def check_version(version: int, peer: str) -> None:
    """A peer must say the protocol version of this process.

    Raises:
        ProtocolError: it says another one.
    """
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"{peer}: protocol_version must be {PROTOCOL_VERSION}, got {version}")


def check_name(name: str, what: str) -> None:
    """A name of a peer stands in logs, on terminals and in metrics.

    Raises:
        ProtocolError: it is empty, has characters that cannot be printed, or more than 255 bytes.
    """
    if not name or not name.isprintable() or len(name.encode()) > MAX_NAME_NBYTES:
        shown = name[:MAX_NAME_NBYTES].encode("unicode_escape").decode()
        raise ProtocolError(
            f"{what} must be 1 to {MAX_NAME_NBYTES} bytes of printable characters, got '{shown}'"
        )
