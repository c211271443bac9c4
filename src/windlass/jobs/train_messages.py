"""What a train controller and its trainer ranks say to each other: msgpack over one WebSocket."""

from __future__ import annotations

from typing import Any

import msgspec

from windlass.errors import DECODE_ERRORS, ProtocolError
from windlass.rollout.messages import TrainingSample

__all__ = [
    "Call", "CallReply", "Done", "Failed", "Joined", "Load", "Operation", "Publish", "Save", "Setup",
    "Stop",
    "TrainCommand", "TrainStep", "decode_call", "decode_worker_frame", "encode_frame",
]  # fmt: skip

TRAIN_PROTOCOL_VERSION = 3


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


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Build the engine; answered with `Done.data_parallel_*` filled in."""

    store_host: str
    store_port: int
    deadline_s: float


class TrainStep(msgspec.Struct, frozen=True, tag="train_step"):
    """One optimiser step on this rank's shard; groups are never split between ranks."""

    step: int
    groups: tuple[tuple[TrainingSample, ...], ...]


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Publish the weights as they are now as `version`."""

    version: int
    deadline_s: float


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Write a checkpoint."""

    path: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Go on from a checkpoint."""

    path: str


class Operation(msgspec.Struct, frozen=True, tag="operation"):
    """Run what the rank's owner has put under this name; the answer is `Done.value`."""

    name: str
    argument: Any


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Close the engine and end the process."""


TrainCommand = Setup | TrainStep | Publish | Save | Load | Operation | Stop


class Call(msgspec.Struct, frozen=True):
    """One half of a collective call. Repeated with the same id after a reconnect, run once."""

    request_id: int
    command: TrainCommand


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The call returned.

    Attributes:
        metrics: of the engine. data_parallel_rank, data_parallel_size: after `Setup`.
        value: of an operation, msgpack-plain.
    """

    metrics: dict[str, float] = {}
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    value: Any = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The call raised."""

    error: str


class CallReply(msgspec.Struct, frozen=True, tag="call_reply"):
    """The answer to the call of that id."""

    request_id: int
    result: Done | Failed


_encoder = msgspec.msgpack.Encoder()
_call_decoder: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_worker_decoder: msgspec.msgpack.Decoder[Joined | CallReply] = msgspec.msgpack.Decoder(
    Joined | CallReply
)


def encode_frame(frame: Joined | CallReply | Call) -> bytes:
    """The wire form."""
    return _encoder.encode(frame)


def decode_call(data: bytes) -> Call:
    """Decode what the controller sent.

    Raises:
        ProtocolError: not a call.
    """
    try:
        return _call_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"train call of {len(data)} bytes: {error}") from error


def decode_worker_frame(data: bytes) -> Joined | CallReply:
    """Decode what a rank sent.

    Raises:
        ProtocolError: not such a frame.
    """
    try:
        return _worker_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"train worker frame of {len(data)} bytes: {error}") from error
