"""SGLang's memory saver for CPUs: memory that loses its pages and keeps its addresses.

torch_memory_saver, which SGLang needs for `--enable-memory-saver`, needs CUDA: without it, the server does not start.
`install` replaces SGLang's adapter of that library. In a region, each new tensor is moved to `SleepingMemory`. Any access to
memory that sleeps ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.memory.sleeping import SleepingMemory


@dataclass(eq=False)
class Piece:
    """Memory of one tensor that sleeps, until the tensor is freed."""

    tag: str
    backed_up: bool
    pages: weakref.ref[mmap.mmap]
    memory: SleepingMemory
    address: int
    nbytes: int
    saved: bytes = field(default=b"", repr=False)


PIECES: list[Piece] = []


def moved(tensor: torch.Tensor, tag: str, *, backed_up: bool) -> torch.Tensor:
    """Return a copy of a tensor in memory that can sleep."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (last + 1) * tensor.element_size()
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    flat = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes].view(tensor.dtype)
    memory = SleepingMemory(address, nbytes)
    PIECES.append(Piece(tag, backed_up, weakref.ref(pages), memory, address, nbytes))
    found = flat.as_strided(tensor.shape, tensor.stride())
    return found.copy_(tensor)


class Region(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves each tensor that an operation returns and that is not a view."""

    def __init__(self, tag: str, *, backed_up: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tag, self._backed_up = tag, backed_up

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        if not isinstance(out, torch.Tensor) or out.layout is not torch.strided:
            return out
        given = (*args, *named.values())
        tensors = [t for t in given if isinstance(t, torch.Tensor) and t.layout is torch.strided]
        storage = out.untyped_storage().data_ptr()
        is_view = any(t.untyped_storage().data_ptr() == storage for t in tensors)
        if is_view or out.device.type != "cpu" or not out.numel():
            return out
        return moved(out, self._tag, backed_up=self._backed_up)


class HostSaver:
    """Same methods as SGLang's adapter of torch_memory_saver."""

    enabled = True

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with Region(tag, backed_up=enable_cpu_backup):
            yield

    @contextmanager
    def configure_subprocess(self) -> Iterator[None]:
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield

    def check_validity(self, caller_name: str) -> None:
        """Do nothing: the memory sleeps."""

    def pause(self, tag: str) -> None:
        for piece in _alive(tag):
            assert not piece.memory.is_asleep, "torch_memory_saver would end the process"
            if piece.backed_up:
                piece.saved = ctypes.string_at(piece.address, piece.nbytes)
            piece.memory.sleep()

    def resume(self, tag: str) -> None:
        for piece in _alive(tag):
            assert piece.memory.is_asleep, "torch_memory_saver would end the process"
            piece.memory.wake()
            ctypes.memmove(piece.address, piece.saved, len(piece.saved))
            piece.saved = b""


def _alive(tag: str) -> list[Piece]:
    PIECES[:] = [piece for piece in PIECES if piece.pages() is not None]
    return [piece for piece in PIECES if piece.tag == tag]


def install() -> None:
    """Give this process of SGLang a memory saver. It changes nothing without `--enable-memory-saver`."""
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    create = TorchMemorySaverAdapter.create
    TorchMemorySaverAdapter.create = lambda enable: HostSaver() if enable else create(enable)
