"""What a train controller and its trainer ranks say to each other, in a session of `net.rpc`.

A collective call is one call of every rank, with the same id.
"""

from __future__ import annotations

import msgspec

from windlass.net.messages import Codec, Envelope, Refused, Reply
from windlass.rollout.messages import TrainingSample

__all__ = [
    "CONTROLLER_FRAMES",
    "MAX_MESSAGE_NBYTES",
    "RANK_FRAMES",
    "ControllerFrame",
    "Done",
    "Failed",
    "Joined",
    "Load",
    "Operation",
    "PreparePublish",
    "RankFrame",
    "Save",
    "Setup",
    "Stop",
    "TrainCommand",
    "TrainResult",
    "TrainStep",
    "Welcome",
]

MAX_MESSAGE_NBYTES = 1 << 30


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """First frame of every connection of a rank.

    Attributes:
        protocol_version: must be the controller's. rank, world_size: in the job.
        incarnation: of the process; a second process with a taken rank is refused.
        store_host, store_port: rank 0's store, bound before it was published; '' and 0 of others.
        operations: names of the user code that the rank was started with.
    """

    protocol_version: int
    rank: int
    world_size: int
    incarnation: str
    store_host: str = ""
    store_port: int = 0
    operations: tuple[str, ...] = ()


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to `Joined`."""


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Build the engine; answered with `Done.data_parallel_*` filled in."""

    store_host: str
    store_port: int
    deadline_s: float


class TrainStep(msgspec.Struct, frozen=True, tag="train_step"):
    """One optimiser step on this rank's shard; groups are never split between ranks."""

    step: int
    groups: tuple[tuple[TrainingSample, ...], ...]


class PreparePublish(msgspec.Struct, frozen=True, tag="prepare_publish"):
    """Have the weights stand still as `version`; answered with `Done.sends_copies` filled in."""

    version: int


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Write a checkpoint."""

    path: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Go on from a checkpoint."""

    path: str


class Operation(msgspec.Struct, frozen=True, tag="operation"):
    """Run what the rank's owner has put under this name; the answer is `Done.value`.

    `argument` is msgpack: nobody decodes it but who has asked for the operation.
    """

    name: str
    argument: bytes


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Close the engine and end the process."""


TrainCommand = Setup | TrainStep | PreparePublish | Save | Load | Operation | Stop


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The call returned.

    Attributes:
        metrics: of the engine. data_parallel_rank, data_parallel_size: after `Setup`.
        sends_copies: after `PreparePublish`: the weights may change once they are copied.
        value: msgpack of what an operation returned; empty for other commands.
    """

    metrics: dict[str, float] = {}
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    value: bytes = b""
    sends_copies: bool = False


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The call raised."""

    error: str


TrainResult = Done | Failed
RankFrame = Joined | Reply[TrainResult]
ControllerFrame = Welcome | Refused | Envelope[TrainCommand]

RANK_FRAMES: Codec[RankFrame] = Codec(RankFrame, "train rank frame", max_nbytes=MAX_MESSAGE_NBYTES)
CONTROLLER_FRAMES: Codec[ControllerFrame] = Codec(
    ControllerFrame, "train controller frame", max_nbytes=MAX_MESSAGE_NBYTES
)
