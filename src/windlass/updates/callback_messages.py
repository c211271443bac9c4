"""What the leaders of a trainer and the controller say to each other by HTTP: msgpack of these types."""

from __future__ import annotations

import msgspec

from windlass.config import CollectiveFabric
from windlass.transfer.bindings import GroupOffer, WireTensor

__all__ = [
    "CallbackAnswer",
    "CallbackCall",
    "CallbackRequest",
    "ContinueCall",
    "DiskCall",
    "DistributedCall",
    "GroupCall",
    "MembersCall",
    "PauseCall",
]


class PauseCall(msgspec.Struct, frozen=True, tag="pause"):
    """Begin an update, or join it; it ends by itself after `session_s`.

    Attributes:
        stage, num_stages: which of how many leaders this one is, if they declare an order; then
            the update ends when all of them have continued.
    """

    session_s: float
    stage: int = -1
    num_stages: int = 0


class ContinueCall(msgspec.Struct, frozen=True, tag="continue"):
    """This leader has sent everything; the last one publishes. Nobody does if one is negative."""

    version: int


class MembersCall(msgspec.Struct, frozen=True, tag="members"):
    """Which engine ranks take part."""


class GroupCall(msgspec.Struct, frozen=True, tag="group"):
    """The other half of forming a group."""

    offer: GroupOffer
    fabric: CollectiveFabric


class DistributedCall(msgspec.Struct, frozen=True, tag="distributed"):
    """The other half of one broadcast."""

    group: str
    tensors: tuple[WireTensor, ...]


class DiskCall(msgspec.Struct, frozen=True, tag="disk"):
    """Read a checkpoint folder."""

    folder: str


CallbackCall = PauseCall | ContinueCall | MembersCall | GroupCall | DistributedCall | DiskCall


class CallbackRequest(msgspec.Struct, frozen=True):
    """A call of a leader; the same `request_id` is the same call, however often it is asked.

    `number` counts the calls of one leader in one update that all engines carry out.
    """

    request_id: str
    leader: str
    call: CallbackCall
    deadline_s: float
    number: int = 0


class CallbackAnswer(msgspec.Struct, frozen=True):
    """`error` is one line, empty when it was done; `members` answers `MembersCall`."""

    error: str = ""
    members: tuple[str, ...] = ()
