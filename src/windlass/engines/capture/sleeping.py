"""Memory of an engine rank that sleeps: which tensors must be saved before, and whether the GPU has room to wake it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch

from windlass.engines.capture.description import Captured
from windlass.engines.capture.memory import Holding


def free_nbytes() -> int | None:
    """Return the free bytes of this rank's GPU; None without a GPU, because no figure then says whether memory can wake."""
    if not torch.cuda.is_available():
        return None
    # The engine's sleep mode would not use cached blocks of this process.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def shortage_of(tags: Collection[str], needed: int, free: int | None) -> str:
    """Return why a GPU has too little memory to wake `tags`; empty if it has enough.

    Args:
        tags: kinds of memory.
        needed: bytes that they need.
        free: see `free_nbytes`.
    """
    if free is None or needed <= free:
        return ""
    return (
        f"wake: {' and '.join(sorted(tags))} need {needed} bytes, and the GPU has {free} bytes free; free the "
        "trainer's memory first, for example in connect_trainer(release=...)"
    )


def unfilled(captured: Captured, held: Iterable[Holding]) -> Iterator[Holding]:
    """Yield the tensors of `held` that neither an update nor a calculation after it fills.

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
