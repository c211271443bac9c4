"""What a loader may touch of a model, kept so that all of it can be put back.

An engine's loader replaces parameters, moves them to the meta device, registers buffers, sets
attributes of modules, of tensors and of quantisation methods, and may fail in between. What is kept
are references: to every module, tensor, container and object of the engine's own that the model
reaches, with what it held. So the objects that are put back are those to which the engine's graphs,
kernels and compiled code refer, at the addresses that they had.
"""

from __future__ import annotations

import enum
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MemberDescriptorType
from typing import final

import torch
import torch.distributed as dist

from windlass.engines.capture.codes import Load
from windlass.engines.capture.memory import Holding, Kind, distinct, tensors_of

__all__ = ["Snapshot", "undone_if_it_fails"]

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}
"""Packages whose objects are left alone, containers, modules and tensors apart."""
_SHARED = (
    *((dist.ProcessGroup,) if dist.is_available() else ()),
    *(threading.Thread, type(threading.Lock()), type(threading.RLock()), socket.socket),
)
"""An object that holds one of these (a communicator) has state that others share: it is left alone."""

Restore = Callable[[], None]


@final
class Snapshot:
    """A model as it is now. Keeps every tensor of it alive.

    Args:
        model: of this rank. `restore` may be called in any thread and in any inference mode.
        ignored: addresses of storages whose bytes are not kept (key-value caches).
        copies: whether bytes are kept, too: a copy of every tensor that the model reaches, on its
            device where that has room, else on the host.
    """

    def __init__(
        self, model: torch.nn.Module, ignored: frozenset[int] = frozenset(), *, copies: bool = False
    ) -> None:
        reached = list(_reached(model))
        self._restores = [restore for item in reached for restore in _restores_of(item)]
        self._bytes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        if copies:
            others = (
                (f"#{number}", item, Kind.ATTRIBUTE)
                for number, item in enumerate(reached)
                if isinstance(item, torch.Tensor) and _has_memory(item)
            )
            held = distinct((*tensors_of(model), *others), ignored)
            self._bytes = _copies(held)

    @property
    def copies(self) -> Mapping[str, torch.Tensor]:
        """By the names of `held_by`, the bytes that tensors had: (reach,) each."""
        return {name: copy for name, (_, copy) in self._bytes.items()}

    def restore(self) -> None:
        """Put everything back. Idempotent."""
        for restore in self._restores:
            restore()
        # Tensors that were made in inference mode are written in it only; others may be.
        with torch.inference_mode():
            for memory, copy in self._bytes.values():
                memory.copy_(copy)


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


def _copies(held: Mapping[str, Holding]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    nbytes = sum(holding.nbytes for holding in held.values() if holding.tensor.is_cuda)
    roomy = not nbytes or nbytes < torch.cuda.mem_get_info()[0] // 2
    memories = {name: holding.memory() for name, holding in held.items()}
    return {n: (m, m.clone() if roomy else m.cpu()) for n, m in memories.items()}


def _reached(model: torch.nn.Module) -> Iterator[object]:
    """Every object whose state is kept, once."""
    seen: dict[int, object] = {}  # as long as they are kept here their numbers are theirs
    waiting: list[object] = [model]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or not _is_kept(item):
            continue
        seen[id(item)] = item
        yield item
        waiting.extend(_parts(item))


def _is_kept(item: object) -> bool:
    kind = type(item)  # and not what a proxy says that it is
    if issubclass(kind, (torch.nn.Module, torch.Tensor, *_CONTAINERS)):
        return True
    if issubclass(kind, (type, enum.Enum)):
        return False
    if kind.__module__.partition(".")[0] in _FOREIGN:
        return False
    return not any(isinstance(value, _SHARED) for value in _attributes(item).values())


def _parts(item: object) -> Iterable[object]:
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, _CONTAINERS):
        return tuple(item)
    return (*_attributes(item).values(), *_slots(item).values())


def _attributes(item: object) -> dict[str, object]:
    return vars(item) if hasattr(item, "__dict__") else {}


def _slots(item: object) -> dict[str, object]:
    """Values in `__slots__`, of classes in Python."""
    found: dict[str, object] = {}
    for base in type(item).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType) and hasattr(item, name):
                found.setdefault(name, member.__get__(item))
    return found


def _restores_of(item: object) -> Iterator[Restore]:
    """What puts one object back."""
    if isinstance(item, dict):
        yield _of_mapping(item)
    elif isinstance(item, (list, deque)):
        yield _of_sequence(item)
    elif isinstance(item, set):
        yield _of_set(item)
    elif not isinstance(item, (tuple, frozenset)):
        if isinstance(item, torch.Tensor):
            yield _of_tensor(item)
        else:
            yield _of_slots(item)
        if hasattr(item, "__dict__"):
            yield _of_mapping(vars(item))


def _of_mapping(target: dict[str, object]) -> Restore:
    kept = dict(target)

    def restore() -> None:
        if list(target) != list(kept) or not _same(target.values(), kept.values()):
            target.clear()
            target.update(kept)

    return restore


def _of_sequence(target: list[object] | deque[object]) -> Restore:
    kept = list(target)

    def restore() -> None:
        if not _same(target, kept):
            target.clear()
            target.extend(kept)

    return restore


def _same(one: Collection[object], other: Collection[object]) -> bool:
    """The same objects in the same order."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _of_set(target: set[object]) -> Restore:
    kept = set(target)

    def restore() -> None:
        if target != kept:
            target.clear()
            target.update(kept)

    return restore


def _of_slots(item: object) -> Restore:
    kept = _slots(item)

    def restore() -> None:
        for name, value in kept.items():
            if not hasattr(item, name) or _slots(item)[name] is not value:
                object.__setattr__(item, name, value)

    return restore


def _of_tensor(tensor: torch.Tensor) -> Restore:
    kind, requires_grad = tensor.__class__, tensor.requires_grad
    kept = tensor.data if _has_memory(tensor) else None

    def restore() -> None:
        if tensor.__class__ is not kind:
            tensor.__class__ = kind  # type: ignore[assignment]
        if kept is not None and not _is_at(tensor, kept):
            tensor.data = kept
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)

    return restore


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
