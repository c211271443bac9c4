"""What rank 0 tells the other ranks to do, and how it tells them.

Every forward pass is one `Step`. Ranks meet in a gloo broadcast, so they run the same steps in
the same order and are quiesced at the same one.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import final

import msgspec
import torch
import torch.distributed as dist

__all__ = ["Step", "StepChannel", "StepKind"]

IDLE_TIMEOUT = timedelta(days=30)
"""An idle rank waits in a broadcast; the death of a rank ends it, not the clock."""


class StepKind(StrEnum):
    """FORWARD runs the model; PAUSE quiesces every rank; STOP ends the process."""

    FORWARD = "forward"
    PAUSE = "pause"
    STOP = "stop"


class Step(msgspec.Struct, frozen=True):
    """One step of every rank.

    Attributes:
        kind: what to do.
        pause_id: which pause quiesces the ranks.
        slots: (B,) cache rows. tokens: (B, T) right-padded. start: (B,) position of the first token.
        lengths: (B,) number of tokens that are no padding.
    """

    kind: StepKind
    pause_id: str = ""
    slots: list[int] = []
    tokens: list[list[int]] = []
    start: list[int] = []
    lengths: list[int] = []


@final
class StepChannel:
    """A gloo broadcast of each step's msgpack bytes, from rank 0: their number first, then they.

    Args:
        world_size: ranks of the engine; of one, nobody receives.
    """

    def __init__(self, world_size: int) -> None:
        several = world_size > 1
        self._group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT) if several else None

    def publish(self, step: Step) -> None:
        """Rank 0: hand a step to every other rank."""
        if self._group is not None:
            data = torch.frombuffer(bytearray(msgspec.msgpack.encode(step)), dtype=torch.uint8)
            dist.broadcast(torch.tensor([len(data)]), src=0, group=self._group)
            dist.broadcast(data, src=0, group=self._group)

    def receive(self) -> Step:
        """Other ranks: return the next step; blocks until there is one."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._group)
        return msgspec.msgpack.decode(data.numpy().data, type=Step)
