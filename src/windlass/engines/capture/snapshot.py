"""What a loader may touch of a model, kept so that all of it can be put back.

An engine's loader replaces parameters, moves them to the meta device, registers buffers, sets
attributes of modules, of tensors and of quantisation methods, and may fail in between. What is kept
are references: to every module, tensor, container and object of the engine's own that the model
reaches, with what it held. So the objects that are put back are those to which the engine's graphs,
kernels and compiled code refer, at the addresses that they had.
"""

from __future__ import annotations

import enum
import mmap
import os
import socket
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MemberDescriptorType
from typing import Any, cast, final

import torch
import torch.distributed as dist

from windlass.engines.capture.codes import Load
from windlass.engines.capture.memory import Holding, Kind, distinct, fingerprint, tensors_of

CHUNK_NBYTES = 32 << 20
MAX_THREADS = 16
"""Of copies between a GPU and the host."""
_Pair = tuple[torch.Tensor, torch.Tensor]
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_Container = dict[object, object] | list[object] | set[object] | deque[object]
_PLAIN = frozenset({dict, OrderedDict, list, set, deque})
"""Containers that have no attributes; an `OrderedDict` could, and nobody gives it any."""
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}
_APART = frozenset({"compilation", "config", "configs", "distributed"})
"""Objects of these packages, and of these parts of an engine, are left alone; containers, modules and
tensors are not. Compiled code refers to memory of its graphs, configurations belong to everybody."""
_UNSET = object()
_MADE_IN_PYTHON = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE`: slots of others are no state that Python code may set."""
_SHARED = (
    *((dist.ProcessGroup,) if dist.is_available() else ()),
    *(threading.Thread, type(threading.Lock()), type(threading.RLock()), socket.socket),
)
"""An object that holds one of these (a communicator) has state that others share: it is left alone."""


@final
class Snapshot:
    """A model as it is now. Keeps every tensor of it alive.

    Args:
        model: of this rank. `restore` may be called in any thread and in any inference mode.
        ignored: addresses of storages whose bytes are not kept (key-value caches).
        copies: whether bytes are kept, too: a copy of every tensor that the model reaches, on its
            device where that has room, else on the host. What a GPU still holds is not written again.
        parameters: whether those of parameters are among them; scalars are in any case.

    Attributes:
        prints: fingerprints of what tensors held, by the names of `held_by`; none without copies.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ignored: frozenset[int] = frozenset(),
        *,
        copies: bool = False,
        parameters: bool = True,
    ) -> None:
        self._kept: list[tuple[Callable[[Any, Any], None], object, object]] = []
        self._tensors: list[_KeptTensor] = []
        self._empty: list[_Container] = []
        for item, kind in _reached(model, self._empty):
            self._keep(item, kind)
        held: Mapping[str, Holding] = {}
        if copies:
            others = (
                (f"#{number}", kept.tensor, Kind.ATTRIBUTE)
                for number, kept in enumerate(self._tensors)
                if kept.data is not None
            )
            held = {
                name: holding
                for name, holding in distinct((*tensors_of(model), *others), ignored).items()
                if parameters or holding.kind is not Kind.PARAMETER or not holding.tensor.dim()
            }
        self._keep_bytes(held)

    def _keep_bytes(self, held: Mapping[str, Holding]) -> None:
        """Keep copies; what a GPU has no room for goes to the host by way of pinned memory."""
        self._memories = {name: holding.memory() for name, holding in held.items()}
        self.prints = {name: fingerprint(memory) for name, memory in self._memories.items()}
        on_gpu = {n: memory for n, memory in self._memories.items() if memory.is_cuda}
        nbytes = sum(memory.nbytes for memory in on_gpu.values())
        roomy = not nbytes or nbytes < torch.cuda.mem_get_info()[0] // 2
        self._moved = [] if roomy else list(on_gpu)
        self._copies = {
            name: memory.clone()
            for name, memory in self._memories.items()
            if roomy or not memory.is_cuda
        }
        self._on_host = HostCopies([on_gpu[name] for name in self._moved]) if self._moved else None

    def _keep(self, item: object, kind: _Kind) -> None:
        if kind.has_dict:
            self._kept.append((_refill, vars(item), vars(item).copy()))
        if kind.members:
            self._kept.append((_restore_slots, item, _slots(item, kind)))
        if not kind.exempt:
            return
        if isinstance(item, torch.Tensor):
            self._tensors.append(_KeptTensor.of(item))
            return
        for container in (dict, list, set, deque):
            if isinstance(item, container):
                self._kept.append((_refill, item, container(item)))
                return

    def restore(self) -> None:
        """Put everything back. Idempotent."""
        for container in self._empty:
            container.clear()
        for restore, item, held in self._kept:
            restore(item, held)
        for tensor in self._tensors:
            tensor.restore()
        # Tensors that were made in inference mode are written in it only; others may be.
        with torch.inference_mode():
            for name, copy in self._copies.items():
                self._memories[name].copy_(copy)
        if self._on_host is not None:
            changed = (fingerprint(self._memories[n]) != self.prints[n] for n in self._moved)
            self._on_host.restore([index for index, differs in enumerate(changed) if differs])
        if any(memory.is_cuda for memory in self._memories.values()):
            torch.cuda.synchronize()  # the engine's next step may run on another stream


def _refill(container: Any, kept: Any) -> None:
    """Put back what a container held, in its order, if it holds anything else."""
    is_set = isinstance(kept, set)  # which has no order to be told
    if container != kept if is_set else not _same(_members(container), _members(kept)):
        container.clear()
        (container.update if isinstance(kept, dict | set) else container.extend)(kept)


def _members(container: Any) -> tuple[object, ...]:
    return (*container, *container.values()) if isinstance(container, dict) else (*container,)


def _restore_slots(item: object, values: dict[MemberDescriptorType, object]) -> None:
    for member, value in values.items():
        if _value(member, item) is not value:
            member.__set__(item, value)


def undone_if_it_fails(load: Load, model: torch.nn.Module) -> Load:
    """`load`, after which the model holds what it held before, if it raises; bytes apart."""

    def guarded(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        before = Snapshot(model)
        try:
            load(weights)
        except BaseException:
            before.restore()
            raise

    return guarded


@final
class HostCopies:
    """What CUDA memory holds when this is made, in pageable host memory of its own.

    Some threads share the work. Each has a stream and two chunks of pinned memory: while the GPU fills
    (or reads) one, the thread moves the other from (or to) ordinary memory. To pin all of the host's
    copy would take longer than the copies.

    Args:
        memories: (n,) each, contiguous, on one GPU; work that writes them is waited for. They are kept.
    """

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self._device = memories[0].device
        total = sum(memory.nbytes for memory in memories)
        pages = mmap.mmap(-1, max(1, total), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    """A tensor's type and memory; `data` is None where it lies in none."""

    tensor: torch.Tensor
    kind: type
    requires_grad: bool
    data: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _KeptTensor:
        data = tensor.data if _has_memory(tensor) else None
        return cls(tensor, tensor.__class__, tensor.requires_grad, data)

    def restore(self) -> None:
        if self.tensor.__class__ is not self.kind:
            self.tensor.__class__ = self.kind
        if self.data is not None and not _is_at(self.tensor, self.data):
            self.tensor.data = self.data
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is looked at in objects of a class; `exempt`: whether they cannot be shared state."""

    has_dict: bool
    members: tuple[MemberDescriptorType, ...]
    exempt: bool


_KINDS: dict[type, _Kind | None] = {}


def _kind_of(item: object) -> _Kind | None:
    """Return what is looked at in an object; None for what is left alone, with all that it holds."""
    kind = type(item)  # and not what a proxy says that it is
    if kind not in _KINDS:
        _KINDS[kind] = _look_at(kind)
    return _KINDS[kind]


def _look_at(kind: type) -> _Kind | None:
    exempt = issubclass(kind, (torch.nn.Module, torch.Tensor, *_CONTAINERS))
    if not exempt:
        package, *parts = kind.__module__.split(".")
        foreign = package in _FOREIGN or not _APART.isdisjoint(parts)
        if foreign or issubclass(kind, (type, enum.Enum)):
            return None
    members = (member for base in kind.__mro__ for member in vars(base).values())
    return _Kind(
        has_dict=kind.__dictoffset__ != 0 and kind not in _PLAIN,
        members=tuple(
            m
            for m in members
            if isinstance(m, MemberDescriptorType) and m.__objclass__.__flags__ & _MADE_IN_PYTHON
        ),
        exempt=exempt,
    )


def _reached(model: torch.nn.Module, empty: list[_Container]) -> Iterator[tuple[object, _Kind]]:
    """Yield every object whose state is kept, once; put containers that hold nothing into `empty`.

    A loader that runs after every update is guarded by this, in the pause: most of what modules hold
    are their hooks, which are none, and plain values.
    """
    seen: dict[int, object] = {}  # as long as they are kept here their numbers are theirs
    waiting: list[object] = [model]
    known = _KINDS
    while waiting:
        item = waiting.pop()
        if type(item) in _PLAIN and not item:
            empty.append(cast("_Container", item))
            continue
        kind = _kind_of(item)
        if kind is None or id(item) in seen:
            continue
        held: Iterable[object] = vars(item).values() if kind.has_dict else ()
        if not kind.exempt and any(isinstance(value, _SHARED) for value in held):
            continue
        seen[id(item)] = item
        yield item, kind
        if kind.members:
            held = (*held, *_slots(item, kind).values())
        if isinstance(item, dict):
            held = (*held, *item.values())
        elif isinstance(item, list | tuple | set | frozenset | deque):
            held = (*held, *item)
        waiting += [value for value in held if known.get(type(value), value) is not None]


def _slots(item: object, kind: _Kind) -> dict[MemberDescriptorType, object]:
    """Return values in `__slots__`, of classes in Python."""
    return {m: v for m in kind.members if (v := _value(m, item)) is not _UNSET}


def _value(member: MemberDescriptorType, item: object) -> object:
    try:
        return member.__get__(item)
    except AttributeError:
        return _UNSET


def _same(one: Collection[object], other: Collection[object]) -> bool:
    """Return whether these are the same objects in the same order."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it lies in one storage: subclasses that wrap others do not, and those are kept."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _is_at(tensor: torch.Tensor, kept: torch.Tensor) -> bool:
    return (
        tensor.device == kept.device
        and tensor.dtype == kept.dtype
        and tensor.data_ptr() == kept.data_ptr()
        and tensor.shape == kept.shape
        and tensor.stride() == kept.stride()
    )
