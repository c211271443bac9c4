"""What the leaders of a trainer that drives an update ask for, and what engines are told because of it.

Leaders ask by HTTP. What all engines must carry out is passed on to them as it is.
"""

from __future__ import annotations

import msgspec

from windlass.config import CollectiveFabric
from windlass.transfer.bindings import GroupOffer, WireTensor


class BeginPush(msgspec.Struct, frozen=True, tag="begin_push"):
    """Engine: the trainer drives this update; gather what comes, and change nothing yet."""


class JoinPushGroup(msgspec.Struct, frozen=True, tag="join_push_group"):
    """Engine: enter the group of a leader."""

    offer: GroupOffer
    fabric: CollectiveFabric
    deadline_s: float


class ReceiveTensors(msgspec.Struct, frozen=True, tag="receive_tensors"):
    """Engine: the receiving half of one broadcast of whole tensors, flat, in this order."""

    group: str
    tensors: tuple[WireTensor, ...]
    deadline_s: float


class ReadFiles(msgspec.Struct, frozen=True, tag="read_files"):
    """Engine: read this rank's boxes from a checkpoint folder."""

    folder: str


PushCommand = JoinPushGroup | ReceiveTensors | ReadFiles


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


CallbackCall = PauseCall | ContinueCall | MembersCall | PushCommand


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
