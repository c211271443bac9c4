"""Memory of an engine rank that sleeps: which bytes an update does not fill, and whether the GPU has room to wake it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterable, Iterator

import torch

from windlass.engines.capture.description import Captured
from windlass.engines.capture.memory import Holding
from windlass.memory.ranges import joined_ranges


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
        f"wake: the GPU must have {needed} bytes free for {' and '.join(sorted(tags))}, got {free}; free the trainer's "
        "memory first, for example in connect_trainer(release=...)"
    )


def unfilled(
    captured: Captured, held: Iterable[Holding], kept: Collection[str]
) -> Iterator[Holding]:
    """Yield the tensors in `held` that sleep must save, because an update does not fill them completely.

    Args:
        captured: the rank's captured layout.
        held: tensors of the rank's models.
        kept: names of checkpoint tensors that no update writes.
    """
    received = {*_filled(captured, kept)}
    loaded = {*_loaded_whole(captured)}
    num_copied = {repack.name: len(repack.places) for repack in captured.repacks}
    for rounding in captured.roundings:
        if not rounding.in_place:
            num_copied[rounding.name] = sum(target.numel() for target in rounding.targets)
    for holding in held:
        is_computed = holding.name in loaded or num_copied.get(holding.name) == holding.reach
        if not is_computed and (holding.address, holding.nbytes) not in received:
            yield holding


def _loaded_whole(captured: Captured) -> Iterator[str]:
    """Yield the names of tensors of which the engine's loader writes every element again after an update.

    Leave out tensors that may have padding: `unwritten` has no entry for them, for example because they have an integer
    dtype.
    """
    if captured.recompute is not None:
        unwritten = captured.recompute.unwritten
        yield from (name for name in captured.recomputed if unwritten.get(name, -1) == 0)


def unfilled_ranges(
    captured: Captured, memory: Iterable[tuple[int, int]], kept: Collection[str]
) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of `memory` whose bytes an update does not write.

    Args:
        captured: the rank's captured layout.
        memory: (start, stop) addresses of each range of memory.
        kept: names of checkpoint tensors that no update writes.

    Yields:
        The start of the range that contains the part, and the (start, stop) addresses of the part.
    """
    filled = joined_ranges(
        (0, address, address + size) for address, size in _filled(captured, kept)
    )
    starts = [start for _, start, _ in filled]
    for begin, end in memory:
        at = begin
        for _, start, stop in filled[max(bisect(starts, begin) - 1, 0) :]:
            if start >= end:
                break
            if at < start:
                yield begin, at, start
            at = max(at, stop)
        if at < end:
            yield begin, at, end


def _filled(captured: Captured, kept: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield the address and the size of each parameter whose memory an update overwrites completely.

    Leave out parameters with padding, and parameters with elements of a checkpoint tensor in `kept`.
    """
    manifest = captured.manifest
    partial = {index for name, index in manifest.rows() if name in kept} if kept else set()
    for index, parameter in enumerate(manifest.parameters):
        if not parameter.padding_nbytes and index not in partial:
            yield captured.addresses[index], parameter.nbytes
