"""Memory of an engine rank that sleeps: which tensors must be saved before, and whether the GPU has room to wake it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch

from windlass.engines.capture.description import Captured
from windlass.engines.capture.memory import Holding


def free_nbytes() -> int | None:
    """Release unused memory that torch caches, and return the free bytes of this rank's GPU. Return None without a GPU."""
    if not torch.cuda.is_available():
        return None
    # Memory that torch caches is not free for the engine's sleep mode.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def shortage_of(tags: Collection[str], needed: int, free: int | None) -> str:
    """Return the reason why a GPU has too little memory to wake `tags`; an empty string if it has enough.

    Args:
        tags: names of the kinds of memory to wake, such as weights or KV cache.
        needed: number of bytes of this memory.
        free: result of `free_nbytes`.
    """
    if free is None or needed <= free:
        return ""
    return (
        f"wake: {' and '.join(sorted(tags))} need {needed} bytes, and the GPU has {free} bytes free; free the "
        "trainer's memory first, for example in connect_trainer(release=...)"
    )


def unfilled(captured: Captured, held: Iterable[Holding]) -> Iterator[Holding]:
    """Yield the tensors of `held` that an update neither writes nor computes again. Sleep must save these tensors.

    Args:
        captured: the rank's captured layout.
        held: tensors of the rank's models.
    """
    sizes = [parameter.nbytes for parameter in captured.manifest.parameters]
    received = {*zip(captured.addresses, sizes, strict=True)}
    written = {*captured.repacked, *captured.recomputed}
    for holding in held:
        if holding.name not in written and (holding.address, holding.nbytes) not in received:
            yield holding
