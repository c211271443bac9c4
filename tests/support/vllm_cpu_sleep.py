"""Sleep mode for vLLM on CPUs: memory of weights and KV cache that loses its pages and keeps its addresses.

vLLM's worker for CPUs accepts `/sleep`, pauses, and frees nothing; `--enable-sleep-mode` is refused. `install` moves
every tensor of the models and the KV cache into memory of vLLM's own `CuMemAllocator`, in which four calls of CUDA are
replaced by calls for host memory. It gives the worker the same `sleep` and `wake_up` as the worker for GPUs (0.24, 0.32)
has: level 1 copies the weights to other memory and back, level 2 restores only the buffers of the served model. Any
access to memory that sleeps ends the process, and memory that wakes contains no values that a model has.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any

import torch

from windlass.engines.capture.memory import held_by
from windlass.memory.sleeping import SleepingMemory

SAVED = "_sleep_saved_buffers"
"""Attribute of vLLM's worker with the buffers that it restores."""
ALIGNMENT, GARBAGE = 512, 0xA5
"""Alignment of tensors in bytes, as torch's allocator aligns them, and the value of each byte of new pages."""
FILLED_NBYTES = 64 << 20
"""Largest part of new pages that is filled so. The weights of a test's model are smaller, and the KV cache is larger."""
SPARE_NBYTES = 64 << 20
"""Bytes that must be free beside memory that wakes. A process frees some memory of its own while it wakes."""
COPIED = "cpu sleep, copied by process: "
"""Text of a line on stdout at each wake. The process id follows, and the bytes that the process has copied up to now."""


class HostMemory:
    """Host memory in place of CUDA's, for vLLM's `CuMemAllocator`."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[SleepingMemory, mmap.mmap]] = {}
        self.num_copied = 0

    def allocate(self, nbytes: int) -> tuple[int, memoryview]:
        """Return the address of new pages, and the pages."""
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.pages[address] = SleepingMemory(address, nbytes), pages
        return address, memoryview(pages)

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        _, nbytes, address, _ = handle
        mmap.mmap(-1, nbytes + SPARE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        self.pages[address][0].wake()
        ctypes.memset(address, GARBAGE, min(nbytes, FILLED_NBYTES))

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        self.pages[handle[2]][0].sleep()

    def cudaMemcpy(self, target: int, source: int, nbytes: int) -> None:  # noqa: N802 - name of CUDA
        self.num_copied += nbytes
        ctypes.memmove(target, source, nbytes)


def own_allocator() -> tuple[Any, HostMemory]:
    """Return vLLM's allocator of this process, with host memory in place of CUDA's."""
    from vllm.device_allocator import cumem

    memory = HostMemory()
    cumem.create_and_map, cumem.unmap_and_release = memory.create_and_map, memory.unmap_and_release
    cumem.libcudart, cumem.cumem_available = memory, True
    # torch refuses this call without a GPU.
    torch.accelerator.empty_cache = lambda: None
    return cumem.CuMemAllocator.get_instance(), memory


class Pool:
    """All memory of a worker that sleeps."""

    def __init__(self) -> None:
        self.allocator, self.memory = own_allocator()

    def move(self, tensors: Iterable[torch.Tensor], tag: str) -> None:
        """Move the tensors into one new allocation."""
        from vllm.device_allocator import AllocationData

        placed, end = list[tuple[torch.Tensor, int, int]](), 0
        for tensor in tensors:
            if not tensor.numel():
                continue
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            nbytes = (sum((n - 1) * step for n, step in steps) + 1) * tensor.element_size()
            placed.append((tensor, end, nbytes))
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        address, pages = self.memory.allocate(end)
        self.allocator.pointer_to_data[address] = AllocationData((0, end, address, 0), tag)
        with torch.no_grad():
            for tensor, begin, nbytes in placed:
                flat = torch.frombuffer(pages[begin : begin + nbytes], dtype=torch.uint8)
                moved = flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
                moved.copy_(tensor)
                tensor.data = moved

    def wake(self, tags: list[str] | None) -> None:
        self.allocator.wake_up(tags)
        # One call, so that lines of two ranks do not mix.
        os.write(1, f"{COPIED}{os.getpid()} {self.memory.num_copied}\n".encode())


def install() -> None:
    """Give vLLM's worker for CPUs a sleep mode. It changes nothing without `--enable-sleep-mode`."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    load, prepare = CPUWorker.load_model, CPUWorker.initialize_from_config
    fall_asleep, awaken = CPUWorker.sleep, CPUWorker.wake_up

    def load_model(worker: Any, *told: Any, **named: Any) -> None:
        load(worker, *told, **named)
        if worker.model_config.enable_sleep_mode:
            worker.pool = Pool()
            held = held_by(worker.model_runner.get_model())
            worker.pool.move((holding.tensor for holding in held.values()), "weights")

    def initialize_from_config(worker: Any, *told: Any, **named: Any) -> None:
        prepare(worker, *told, **named)
        if worker.model_config.enable_sleep_mode:
            worker.pool.move(worker.model_runner.kv_caches, "kv_cache")

    def sleep(worker: Any, level: int = 1) -> None:
        if not worker.model_config.enable_sleep_mode:
            fall_asleep(worker, level)
            return
        if level == 2:
            buffers = worker.model_runner.model.named_buffers()
            vars(worker)[SAVED] = {name: buffer.clone() for name, buffer in buffers}
        worker.pool.allocator.sleep(("weights",) if level == 1 else ())

    def wake_up(worker: Any, tags: list[str] | None = None) -> None:
        if not worker.model_config.enable_sleep_mode:
            awaken(worker, tags)
            return
        worker.pool.wake(tags)
        saved = vars(worker)[SAVED]
        for name, buffer in worker.model_runner.model.named_buffers():
            if name in saved:
                buffer.data.copy_(saved[name])
        vars(worker)[SAVED] = {}

    CpuPlatform.is_sleep_mode_available = lambda _platform: True
    CPUWorker.load_model, CPUWorker.initialize_from_config = load_model, initialize_from_config
    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up
