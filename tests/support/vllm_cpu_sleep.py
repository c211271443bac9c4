"""Sleep mode for vLLM on CPUs: memory of weights and KV cache that loses its pages and keeps its addresses.

vLLM's worker for CPUs accepts `/sleep`, pauses, and frees nothing; `--enable-sleep-mode` is refused. `install` moves
every tensor of the models and the KV cache into `SleepingMemory`, and gives the worker the same `sleep` and `wake_up` as
the worker for GPUs (0.24, 0.32) has: level 1 copies the weights to other memory and back, level 2 restores only the
buffers of the served model. Any access to memory that sleeps ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection, Iterable
from typing import Any

import torch

from windlass.engines.capture.memory import held_by
from windlass.memory.sleeping import SleepingMemory

TAGS = ("weights", "kv_cache")
SAVED = "_sleep_saved_buffers"
"""Attribute of vLLM's worker with the buffers that it restores."""


class Piece:
    """Memory of one tensor."""

    def __init__(self, tensor: torch.Tensor, tag: str) -> None:
        self.tag, self.saved = tag, b""
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        self.nbytes = (last + 1) * tensor.element_size()
        self.pages = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.memory = SleepingMemory(self.address, self.nbytes)
        flat = torch.frombuffer(self.pages, dtype=torch.uint8)[: self.nbytes].view(tensor.dtype)
        moved = flat.as_strided(tensor.shape, tensor.stride())
        moved.copy_(tensor)
        tensor.data = moved


class Pool:
    """All memory of a worker that sleeps."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def move(self, tensors: Iterable[torch.Tensor], tag: str) -> None:
        with torch.no_grad():
            self.pieces += [Piece(tensor, tag) for tensor in tensors if tensor.numel()]

    def sleep(self, offloaded: Collection[str]) -> None:
        for piece in self.pieces:
            if piece.tag in offloaded:
                piece.saved = ctypes.string_at(piece.address, piece.nbytes)
            piece.memory.sleep()

    def wake(self, tags: Collection[str]) -> None:
        for piece in self.pieces:
            if piece.tag in tags:
                piece.memory.wake()
                ctypes.memmove(piece.address, piece.saved, len(piece.saved))
                piece.saved = b""


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
        worker.pool.sleep(("weights",) if level == 1 else ())

    def wake_up(worker: Any, tags: list[str] | None = None) -> None:
        if not worker.model_config.enable_sleep_mode:
            awaken(worker, tags)
            return
        worker.pool.wake(TAGS if tags is None else tags)
        saved = vars(worker)[SAVED]
        for name, buffer in worker.model_runner.model.named_buffers():
            if name in saved:
                buffer.data.copy_(saved[name])
        vars(worker)[SAVED] = {}

    CpuPlatform.is_sleep_mode_available = lambda _platform: True
    CPUWorker.load_model, CPUWorker.initialize_from_config = load_model, initialize_from_config
    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up
