"""Every tensor that an engine's model reaches, by name, and fingerprints of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, repeat
from typing import Any, final

import numpy as np
import torch

from windlass.engines.capture.codes import bits_of, chunk_on
from windlass.engines.capture.kernels import kernels_on
from windlass.engines.capture.reach import Form, Node, Number, Reach, reach
from windlass.errors import UnsupportedLayout
from windlass.layout.naming.patterns import said


class Kind(StrEnum):
    """How a model holds a tensor.

    PARAMETER, BUFFER and ATTRIBUTE: a module of the model holds it directly. HELD: the model reaches it in another way
    (in a container, an object, a closure, a class), or it is a numpy array. NUMBER: a Python number, as a tensor.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    HELD = "held"
    NUMBER = "number"


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor of the model that shares no element with an earlier one. `node`: its place; None for a number."""

    name: str
    tensor: torch.Tensor
    kind: Kind
    node: Node | None = None

    @property
    def address(self) -> int:
        """Return the address of its first element."""
        return self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        """Return its bytes from the first to the last element, gaps between strides included."""
        return self.reach * self.tensor.element_size()

    @property
    def reach(self) -> int:
        """Return `nbytes` in elements."""
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return sum((size - 1) * step for size, step in steps) + 1

    def memory(self) -> torch.Tensor:
        """Return its elements as they lie, gaps included: (reach,)."""
        return self.tensor.detach().as_strided((self.reach,), (1,))


def refuse(names: Collection[str], why: str) -> None:
    """Raise UnsupportedLayout that names tensors and says what is wrong with them, if there are any."""
    if names:
        raise UnsupportedLayout(f"{said(names)}: {why}")


Held = Callable[[], Mapping[str, Holding]]
"""By name, what a model holds now; see `held_by`."""


def held_by(model: torch.nn.Module, ignored: frozenset[int] = frozenset()) -> Mapping[str, Holding]:
    """Return all tensors that a model reaches, by name, parameters first. Tied tensors and views appear once.

    `ignored`: addresses of storages that hold no weights (key-value caches).
    """
    return _distinct(reach(model), ignored)


def _distinct(found: Reach, ignored: frozenset[int]) -> Mapping[str, Holding]:
    """Return what `held_by` does."""
    counts = found.num_parameters, found.num_buffers, found.num_attributes
    direct = (Kind.PARAMETER, Kind.BUFFER, Kind.ATTRIBUTE)
    kinds = (kind for kind, count in zip(direct, counts, strict=True) for _ in range(count))
    held: dict[str, Holding] = {}
    taken: set[tuple[int, int]] = set()
    ranges: dict[int, list[tuple[int, int]]] = {}
    for node, kind in zip(found.tensors, chain(kinds, repeat(Kind.HELD)), strict=False):
        tensor = node.item if node.shape.form is Form.TENSOR else _of_array(node.item)
        if tensor is None or not has_memory(tensor):
            continue
        holding = Holding("", tensor, kind, node)
        begin = holding.address
        end = begin + holding.nbytes
        storage = tensor.untyped_storage().data_ptr()
        inside = any(b <= begin and end <= e for b, e in ranges.get(storage, ()))
        if inside or (begin, end) in taken or storage in ignored:
            continue
        taken.add((begin, end))
        ranges.setdefault(storage, []).append((begin, end))
        name = node.path
        while name in held:
            name += "'"
        held[name] = replace(holding, name=name)
    return held


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in one storage: subclasses that wrap others do not, and the walk reaches those."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _of_array(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor in the memory of an array; None for one that torch cannot view."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an array that is read-only
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError):
            return None


_LARGEST_NUMBER = 1 << 40
"""Bound of integers that count as numbers. Larger ones are addresses and hashes."""


@final
class Watched:
    """Tensors of a model. After `changed`, the next question walks the model again.

    A call returns the tensors of `held_by`, without those that only loads make (see `settle`), and `numbers`.

    Attributes:
        numbers: paths of the Python numbers that appear among tensors.
    """

    def __init__(self, model: torch.nn.Module, ignored: frozenset[int] = frozenset()) -> None:
        self._model, self._ignored = model, ignored
        self._reach: Reach | None = None
        self._held: Mapping[str, Holding] | None = None
        self._settled: frozenset[str] | None = None
        self.numbers: frozenset[str] = frozenset()

    def changed(self) -> None:
        """Forget the last walk, and drop its references."""
        self._reach = self._held = None

    @property
    def reach(self) -> Reach:
        """Return what the model reaches."""
        if self._reach is None:
            self._reach = reach(self._model)
        return self._reach

    def settle(self) -> None:
        """Leave out, from now on, HELD tensors that the model does not have now.

        An engine's loader may keep tensors for its own use. The restored model has none of them.
        """
        self._settled = frozenset(name for name, h in self().items() if h.kind is Kind.HELD)

    def __call__(self) -> Mapping[str, Holding]:
        """Return what the model holds by name."""
        if self._held is None:
            held = _distinct(self.reach, self._ignored)
            settled = self._settled
            if settled is not None:
                held = {n: h for n, h in held.items() if h.kind is not Kind.HELD or n in settled}
            self._held = held
        if not self.numbers:
            return self._held
        found = self.all_numbers()
        return {**self._held} | {
            name: Holding(name, _of_number(found[name]), Kind.NUMBER)
            for name in sorted(self.numbers & found.keys())
        }

    def all_numbers(self) -> dict[str, Number]:
        """Return the Python numbers that the model holds, by path."""
        return self.reach.numbers()


def differing(one: Mapping[str, Number], other: Mapping[str, Number]) -> frozenset[str]:
    """Return the paths whose numbers differ between two walks, without integers as large as addresses."""
    return frozenset(
        path
        for path, value in one.items()
        if path in other
        and not (value == other[path] or (value != value and other[path] != other[path]))
        and abs(value) < _LARGEST_NUMBER
    )


def _of_number(value: Number) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.complex128 if isinstance(value, complex) else torch.float64)  # fmt: skip


# odd constants of splitmix64, as signed numbers
_WEIGHT = 0xBF58476D1CE4E5B9 - (1 << 64)
_STEP = 0x94D049BB133111EB - (1 << 64)


def fingerprint(memory: torch.Tensor) -> int:
    """Return 64 bits of the bytes of a contiguous (n,) tensor, sensitive to their order; on its device, in one pass."""
    words = _words_of(memory)
    if words.dtype is torch.int64 and (kernels := kernels_on(words.device)) is not None:
        return kernels.fingerprint(words)
    chunk = chunk_on(words.device) // 2
    steps = torch.arange(min(chunk, len(words)), device=words.device).mul_(_STEP)
    total = 0
    for begin in range(0, len(words), chunk):
        part = words[begin : begin + chunk]
        total += _mixed_sum(part, steps[: len(part)] + _signed(begin * _STEP))
    return total % (1 << 64)


def places_sum(values: torch.Tensor, places: torch.Tensor) -> int:
    """Return the part of a fingerprint that these words have, of which others lie between. (n,) integers each."""
    return _mixed_sum(values, places * _STEP)


def _mixed_sum(words: torch.Tensor, steps: torch.Tensor) -> int:
    mixed = words.to(torch.int64, copy=True).add_(1).mul_(_WEIGHT).add_(steps)
    mixed.bitwise_xor_(mixed >> 29).mul_(_STEP)
    return int(mixed.bitwise_xor_(mixed >> 32).sum())


def _signed(number: int) -> int:
    """Wrap a number as 64 signed bits hold it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _words_of(memory: torch.Tensor) -> torch.Tensor:
    """View its bytes as integers: of 8 bytes where that many fill it, else of its elements' size."""
    if memory.nbytes % 8 or memory.element_size() == 8:
        return bits_of(memory)
    if memory.storage_offset() * memory.element_size() % 8 or memory.data_ptr() % 8:
        memory = memory.clone()
    return memory.view(torch.int64)


def prints_of(held: Mapping[str, Holding]) -> dict[str, int]:
    """Return the fingerprint of every tensor, by name."""
    return {name: fingerprint(holding.memory()) for name, holding in held.items()}


def fingerprints(held: Mapping[str, Holding]) -> dict[str, str]:
    """Return the fingerprint of every tensor that modules hold directly, in hexadecimal.

    Names of others than parameters begin with their kind.
    """
    return {
        f"{'' if h.kind is Kind.PARAMETER else f'{h.kind}:'}{n}": f"{fingerprint(h.memory()):016x}"
        for n, h in held.items()
        if h.kind is not Kind.HELD
    }
