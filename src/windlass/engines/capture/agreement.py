"""Ranks of one engine agree that all of them have captured their layout, or none has."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from windlass.engines.capture.description import Captured
from windlass.errors import UnsupportedLayout

__all__ = ["RefusedElsewhere", "all_ranks", "capture_on_every_rank"]


class RefusedElsewhere(UnsupportedLayout):
    """Another rank of this engine could not capture its layout; that rank says why."""


def capture_on_every_rank(
    capture: Callable[[], Captured], is_on_every_rank: Callable[[bool], bool]
) -> Captured:
    """Capture a layout, unless another rank could not: a retry captures on every rank then.

    Loaders of tensor-parallel ranks may wait for each other, so that one must not load alone.

    Args:
        capture: of this rank; the others are in the same call.
        is_on_every_rank: collective; whether what this rank says of itself is so on all of them.

    Raises:
        RefusedElsewhere: another rank could not.
        UnsupportedLayout: see `capture`.
    """
    try:
        captured = capture()
    except BaseException:
        is_on_every_rank(False)
        raise
    if not is_on_every_rank(True):
        raise RefusedElsewhere("another rank of this engine could not capture its layout")
    return captured


def all_ranks(mine: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `mine` is true on every rank of a group, each of which is in the same call.

    Args:
        mine: of this rank.
        device: one whose tensors the group reduces.
        group: None for all of the world. Its timeout is the deadline.
    """
    least = torch.tensor([int(mine)], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return bool(least.item())
