"""Copies of GPU memory in host memory, as fast as the bus takes them.

Some threads share the work. Each has a stream and two chunks of pinned memory: while the GPU fills
(or reads) one, the thread moves the other from (or to) ordinary memory. To pin all of the host's
copy would take longer than the copies.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import final

import torch

CHUNK_NBYTES = 32 << 20
MAX_THREADS = 8

_Pair = tuple[torch.Tensor, torch.Tensor]


@final
class HostCopies:
    """What CUDA memory holds when this is made, in pageable host memory of its own.

    Args:
        memories: (n,) each, contiguous, on one GPU; work that writes them is waited for. They are kept.
    """

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self._device = memories[0].device
        total = sum(memory.nbytes for memory in memories)
        pages = mmap.mmap(-1, max(1, total))
        with suppress(OSError):  # of a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)  # a fault per 2 MiB and not per 4 KiB
        host = torch.frombuffer(pages, dtype=torch.uint8)
        self._pairs: list[_Pair] = []
        begin = 0
        for memory in memories:
            self._pairs.append((memory.view(torch.uint8), host[begin : begin + memory.nbytes]))
            begin += memory.nbytes
        self._run(range(len(memories)), to_host=True)

    def restore(self, chosen: Sequence[int]) -> None:
        """Write these memories as they were, and wait for it. May be called in any thread."""
        self._run(chosen, to_host=False)

    def _run(self, chosen: Sequence[int], *, to_host: bool) -> None:
        chunks = [chunk for index in chosen for chunk in _chunks(*self._pairs[index])]
        if not chunks:
            return
        torch.cuda.synchronize(self._device)
        num_threads = min(MAX_THREADS, os.cpu_count() or 1, len(chunks))
        shares = [chunks[at::num_threads] for at in range(num_threads)]
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in pool.map(partial(_copy, self._device, to_host), shares):
                pass


def _chunks(memory: torch.Tensor, copy: torch.Tensor) -> Iterator[_Pair]:
    for begin, end in pairwise([*range(0, len(memory), CHUNK_NBYTES), len(memory)]):
        yield memory[begin:end], copy[begin:end]


def _copy(device: torch.device, to_host: bool, chunks: Sequence[_Pair]) -> None:
    """Copy one thread's share. Tensors that were made in inference mode are written in it only."""
    size = max(len(memory) for memory, _ in chunks)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
        staging = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        done = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        late: list[_Pair] = []
        for number, (memory, copy) in enumerate(chunks):
            stage, event = staging[number % 2][: len(memory)], done[number % 2]
            if to_host:
                stage.copy_(memory, non_blocking=True)
                event.record()
                late.append((copy, stage))
                if number:
                    done[1 - number % 2].synchronize()
                    _move(*late.pop(0))
            else:
                event.synchronize()  # of the chunk before the last, which the stage still had
                _move(stage, copy)
                memory.copy_(stage, non_blocking=True)
                event.record()
        stream.synchronize()
        for copy, stage in late:
            _move(copy, stage)


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy by numpy, which lets other threads run and starts none."""
    target.numpy()[:] = source.numpy()
