"""Messages of the backend `push`: HTTP calls of the trainer's leaders, and the resulting commands to engines.

If all engines must carry out a call, the controller forwards the call to them unchanged.
"""

from __future__ import annotations

import msgspec

from windlass.config import CollectiveFabric
from windlass.transfer.bindings import GroupOffer, WireTensor


class JoinPushGroup(msgspec.Struct, frozen=True, tag="join_push_group"):
    """Command to an engine: enter the group of a leader."""

    offer: GroupOffer
    fabric: CollectiveFabric
    deadline_s: float


class ReceiveTensors(msgspec.Struct, frozen=True, tag="receive_tensors"):
    """Command to an engine: receive one broadcast of whole tensors, flattened and in this order.

    Attributes:
        group: name of the group.
        tensors: the tensors, in the order of their places in the bucket.
        stamp: hex digits of the bytes that follow the tensors in the bucket. A bucket with other bytes belongs to
            another call.
        deadline_s: seconds for the broadcast.
    """

    group: str
    tensors: tuple[WireTensor, ...]
    stamp: str
    deadline_s: float


class ReadFiles(msgspec.Struct, frozen=True, tag="read_files"):
    """Command to an engine: read this rank's boxes from a checkpoint folder."""

    folder: str


PushCommand = JoinPushGroup | ReceiveTensors | ReadFiles


class PauseCall(msgspec.Struct, frozen=True, tag="pause"):
    """Call to begin an update, or to join a running one.

    Attributes:
        session_s: seconds after which the update ends, if the leaders have not finished it.
        stage: number of this leader in the declared order; -1 without an order.
        num_stages: number of leaders in the declared order; 0 without an order. With an order, the update ends after
            `continue_generation` of every leader.
        lease_s: seconds without an `AliveCall` of this leader after which the update ends; 0 if it sends none.
    """

    session_s: float
    stage: int = -1
    num_stages: int = 0
    lease_s: float = 0.0


class ContinueCall(msgspec.Struct, frozen=True, tag="continue"):
    """Call of a leader that has sent all its tensors.

    Attributes:
        version: version to publish; the call of the last leader publishes it. If a leader sends a negative version,
            the update fails.
    """

    version: int


class MembersCall(msgspec.Struct, frozen=True, tag="members"):
    """Call that asks for the engine ranks of the running update."""


class AliveCall(msgspec.Struct, frozen=True, tag="alive"):
    """Call that a leader repeats until its update ends, see `PauseCall.lease_s`."""


CallbackCall = PauseCall | ContinueCall | MembersCall | AliveCall | PushCommand


class CallbackRequest(msgspec.Struct, frozen=True):
    """Call of a leader. The leader repeats the request after a lost connection.

    Attributes:
        request_id: identity of the call; the controller carries out requests with the same id once.
        leader: name of the leader.
        call: the call.
        deadline_s: seconds for the call.
        number: number of the call in this update, from 0. It counts the calls of this leader that all engines carry out.
    """

    request_id: str
    leader: str
    call: CallbackCall
    deadline_s: float
    number: int = 0


class CallbackAnswer(msgspec.Struct, frozen=True):
    """Answer to a call of a leader.

    Attributes:
        error: failure in one line; empty after success.
        members: engine ranks, in answer to `MembersCall`.
    """

    error: str = ""
    members: tuple[str, ...] = ()
