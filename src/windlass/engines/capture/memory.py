"""Find every tensor that an engine's model references, directly or indirectly, and compute fingerprints of tensors."""

from __future__ import annotations

import io
import mmap
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, repeat
from typing import Any, final

import numpy as np
import torch

from windlass.element_ids.memory import fingerprint, memory_of, reach_of
from windlass.engines.capture.reach import Form, Node, Number, Reach, Signature, reach
from windlass.errors import UnsupportedLayout
from windlass.layout.naming.patterns import said


class Kind(StrEnum):
    """Kind of reference from a model to a tensor.

    PARAMETER, BUFFER, ATTRIBUTE: the tensor is a parameter, a buffer or a plain attribute of a module.
    HELD: the tensor is inside a container, another object, a closure or a class; or the tensor is a view of an array,
        a storage or bytes.
    NUMBER: the tensor has the value of a Python number.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    HELD = "held"
    NUMBER = "number"


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor of the model, and the model's reference to it.

    Attributes:
        name: path of the tensor in the model.
        node: entry of the tensor's object in the walk through the model; None for a Python number.
        is_copy: True if the tensor has the values of an object that cannot be written through the tensor: a copy of
            bytes, or a view of a read-only array.
    """

    name: str
    tensor: torch.Tensor
    kind: Kind
    node: Node | None = None
    is_copy: bool = False

    @property
    def address(self) -> int:
        """Address of the tensor's first element."""
        return self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element, including gaps between elements."""
        return self.reach * self.tensor.element_size()

    @property
    def reach(self) -> int:
        """Length of the memory from the first to the last element, in elements, including gaps."""
        return reach_of(self.tensor)

    def memory(self) -> torch.Tensor:
        """Return a flat view (n,) of the tensor's memory from its first to its last element, including gaps."""
        return memory_of(self.tensor)


def refuse(names: Collection[str], why: str) -> None:
    """Raise UnsupportedLayout with the names and the reason, unless `names` is empty."""
    if names:
        raise UnsupportedLayout(f"{said(names)}: {why}")


Held = Callable[[], Mapping[str, Holding]]
"""Function that returns the current tensors of a model by name; see `held_by`."""


def held_by(model: torch.nn.Module, ignored: frozenset[int] = frozenset()) -> Mapping[str, Holding]:
    """Return the tensors that a model references, by name, parameters first.

    Leave out tied tensors and views: their memory lies inside an earlier tensor's memory. `ignored` has addresses of
    storages to skip, such as KV caches.
    """
    return _distinct(reach(model), ignored)


@final
class Walked:
    """Tensors of a model. The walk that finds them is repeated only if the model has changed since.

    A comparison with the last walk is much faster than a new walk. This object keeps all objects of the last walk
    alive, so that no other object can have the `id` of one of them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._last: tuple[Reach, Signature, list[tuple[torch.Tensor, int]]] | None = None
        self._held: Mapping[str, Holding] = {}

    def held(self) -> Mapping[str, Holding]:
        """Return the tensors that `held_by` would return now."""
        if self._last is None or not self._is_unchanged(*self._last[1:]):
            found = reach(self._model)
            self._held = _distinct(found, frozenset())
            items = (node.item for node in found.tensors if isinstance(node.item, torch.Tensor))
            self._last = found, Signature(found), [(item, _address(item)) for item in items]
        return self._held

    @staticmethod
    def _is_unchanged(signature: Signature, places: list[tuple[torch.Tensor, int]]) -> bool:
        """Return whether the model references the same objects, and the tensors have the addresses in `places`."""
        return signature.holds() and all(_address(item) == at for item, at in places)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor; 0 if it has no memory."""
    return tensor.data_ptr() if has_memory(tensor) else 0


def _distinct(found: Reach, ignored: frozenset[int]) -> Mapping[str, Holding]:
    """Return the tensors of a walk through the model, by name.

    Leave out each tensor with memory inside an earlier tensor's memory.
    """
    counts = found.num_parameters, found.num_buffers, found.num_attributes
    direct = (Kind.PARAMETER, Kind.BUFFER, Kind.ATTRIBUTE)
    kinds = (kind for kind, count in zip(direct, counts, strict=True) for _ in range(count))
    held: dict[str, Holding] = {}
    taken: set[tuple[int, int]] = set()
    ranges: dict[int, list[tuple[int, int]]] = {}
    for node, kind in zip(found.tensors, chain(kinds, repeat(Kind.HELD)), strict=False):
        tensor = _writable(node)
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


def tied_names(model: torch.nn.Module) -> Mapping[str, frozenset[str]]:
    """Map each name of a tied parameter to all names of this parameter. Leave out parameters with one name.

    Two parameter objects are one parameter if they have the same address, shape, strides and dtype.
    """
    names: dict[object, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if has_memory(parameter):
            place = parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype
            names.setdefault(place, set()).add(name)
    return {name: frozenset(found) for found in names.values() if len(found) > 1 for name in found}


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a storage with elements.

    A tensor subclass that wraps other tensors has no storage; the walk through the model finds the wrapped tensors.
    """
    if (
        tensor.is_meta
        or tensor.is_nested
        or tensor.layout is not torch.strided
        or tensor.numel() == 0
    ):
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _writable(node: Node) -> torch.Tensor | None:
    """Return a tensor that shares memory with a node's object (a tensor, an array or a storage).

    Return None for any other object, and for read-only memory.
    """
    item = node.item
    if node.shape.form is Form.TENSOR:
        return _without_bits(item)
    if isinstance(item, torch.TypedStorage):
        item = item.untyped()  # type: ignore[no-untyped-call]
    if isinstance(item, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8, device=item.device).set_(item)
    return _of_array(item) if isinstance(item, np.ndarray) and _may_be_written(item) else None


def _without_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that shows the values as they are stored in memory.

    For a quantised tensor, these values are integers. For a view that negates or conjugates lazily, these values are
    not yet negated or conjugated.
    """
    if tensor.is_quantized:
        integers = torch.empty(0, dtype=_QUANTISED[tensor.dtype], device=tensor.device)
        return integers.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    return tensor.conj() if tensor.is_conj() else tensor


def _may_be_written(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array's memory may be written.

    A read-only array may view writable memory. In that case, numpy allows the array's `writeable` flag to be set.
    """
    if array.flags.writeable:
        return True
    try:
        array.flags.writeable = True
    except ValueError:
        return False
    array.flags.writeable = False
    return True


def _of_array(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor that shares memory with an array, or None if torch cannot view the array.

    The tensor's elements are in memory order. Its dtype is uint8 if torch lacks the array's dtype.
    """
    forwards = array[tuple(slice(None, None, -1 if step < 0 else 1) for step in array.strides)]
    with warnings.catch_warnings():
        # torch warns about read-only arrays.
        warnings.simplefilter("ignore")
        for kind in (forwards.dtype, np.dtype(np.uint8)):
            with suppress(TypeError, ValueError):
                return torch.from_numpy(forwards if kind == forwards.dtype else forwards.view(kind))
    return None


def _copied(node: Node) -> torch.Tensor | None:
    """Return the elements of an object as a tensor if `_writable` cannot return a tensor with the object's memory.

    Such objects are: bytes-like objects, read-only arrays, arrays in a non-native byte order, tensors in a layout of
    oneDNN, and weights that torch has packed for a quantised kernel. Return None for any other object, and for a
    bytes-like object of fewer than 32 bytes.
    """
    item = node.item
    if node.shape.form is Form.TENSOR:
        return item.detach().to_dense() if item.is_mkldnn else None
    if isinstance(item, torch.ScriptObject):
        return _packed_weight(item)
    if node.shape.form is Form.BYTES:
        data = bytes_in(item)
        is_long = data is not None and len(data) >= _FEWEST_BYTES
        return torch.from_numpy(data.copy()) if data is not None and is_long else None
    if not isinstance(item, np.ndarray) or item.dtype.kind not in "iufV":
        return None
    if not item.dtype.isnative:
        item = item.astype(item.dtype.newbyteorder("="))
    elif _may_be_written(item):
        return None
    return _of_array(item)


def bytes_in(item: Any) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Return an array that shares memory with a bytes-like object.

    Return None for a closed object, and for a mapped file that is read-only or larger than 1 GiB: such a file probably
    contains input data, not values that the engine computed from weights.
    """
    if isinstance(item, mmap.mmap):
        with suppress(ValueError):
            view = memoryview(item)
            if not view.readonly and len(view) <= _LARGEST_MAP:
                return np.frombuffer(view, np.uint8)
        return None
    # A closed buffer raises ValueError.
    with suppress(ValueError):
        return np.frombuffer(item.getbuffer() if isinstance(item, io.BytesIO) else item, np.uint8)
    return None


def _packed_weight(item: torch.ScriptObject) -> torch.Tensor | None:
    """Return the values of a weight that torch has packed, for example with `torch.ops.quantized.linear_prepack`.

    Return None for any other object.
    """
    if not item._type().qualified_name().endswith("PackedParamsBase"):
        return None
    state: Any = item.__getstate__()
    weight = state[0][0]
    if not isinstance(weight, torch.Tensor):
        return None
    return weight.dequantize() if weight.is_quantized else weight


_QUANTISED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32,
              torch.quint4x2: torch.uint8, torch.quint2x4: torch.uint8}  # fmt: skip
_LARGEST_MAP = 1 << 30
"""Maximum size in bytes of a mapped file that `bytes_in` returns."""
_FEWEST_BYTES = 32
"""Minimum number of bytes of an object whose bytes are compared with weights."""
_LARGEST_NUMBER = 1 << 40
"""Numbers of at least this absolute value are ignored, because they are addresses or hashes."""


@final
class Watched:
    """Tensors of a model, found by a walk through its objects and cached until `changed` is called.

    Attributes:
        numbers: paths of the model's Python numbers that `__call__` returns as tensors, in addition to the tensors.
    """

    def __init__(self, model: torch.nn.Module, ignored: frozenset[int] = frozenset()) -> None:
        self._model, self._ignored = model, ignored
        self._reach: Reach | None = None
        self._held: Mapping[str, Holding] | None = None
        self._settled: frozenset[str] | None = None
        self.numbers: frozenset[str] = frozenset()

    def changed(self) -> None:
        """Discard the cached tensors, because the model may have changed."""
        self._reach = self._held = None

    @property
    def reach(self) -> Reach:
        """Objects and tensors that the model references, directly or indirectly."""
        if self._reach is None:
            self._reach = reach(self._model)
        return self._reach

    def settle(self) -> None:
        """Ignore tensors of kind HELD (not direct members of a module) that appear after this call.

        During a load, an engine's loader may keep temporary tensors in objects other than modules.
        """
        self._settled = frozenset(name for name, h in self().items() if h.kind is Kind.HELD)

    def __call__(self) -> Mapping[str, Holding]:
        """Return the current tensors of the model and the numbers in `numbers`, by name."""
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

    def copies(self) -> Mapping[str, Holding]:
        """Return tensors with the contents of the model's bytes-like objects, read-only arrays and packed weights, by path.

        `__call__` does not return these objects, because torch cannot view their memory or may not write to it. A
        returned tensor may share memory with a read-only array, so do not write to the tensor.
        """
        found: dict[str, Holding] = {}
        ranges = [(h.address, h.address + h.nbytes) for h in self().values()]
        for node in self.reach.tensors:
            if (tensor := _copied(node)) is None:
                continue
            holding = Holding(node.path, tensor, Kind.HELD, node, is_copy=True)
            begin, end = holding.address, holding.address + holding.nbytes
            if tensor.numel() and not any(b <= begin and end <= e for b, e in ranges):
                found[node.path] = holding
        return found

    def all_numbers(self) -> dict[str, Number]:
        """Return the Python numbers of the model, by path."""
        return self.reach.numbers()


def differing(one: Mapping[str, Number], other: Mapping[str, Number]) -> frozenset[str]:
    """Return the paths of numbers that differ between `one` and `other`; ignore numbers above `_LARGEST_NUMBER`."""
    return frozenset(
        path
        for path, value in one.items()
        if path in other
        and not (value == other[path] or (value != value and other[path] != other[path]))
        and abs(value) < _LARGEST_NUMBER
    )


def _of_number(value: Number) -> torch.Tensor:
    """Return a tensor (1,) with the value of a Python number."""
    return torch.tensor([value], dtype=torch.complex128 if isinstance(value, complex) else torch.float64)  # fmt: skip


def prints_of(held: Mapping[str, Holding]) -> dict[str, int]:
    """Return the fingerprint of every tensor, by name."""
    return {name: fingerprint(holding.memory()) for name, holding in held.items()}


def fingerprints(held: Mapping[str, Holding]) -> dict[str, str]:
    """Return the fingerprints of parameters, buffers and other attributes of modules, by name, in hexadecimal.

    The name of a tensor that is not a parameter begins with its kind, as in `buffer:NAME`.
    """
    return {
        f"{'' if h.kind is Kind.PARAMETER else f'{h.kind}:'}{n}": f"{fingerprint(h.memory()):016x}"
        for n, h in held.items()
        if h.kind is not Kind.HELD
    }
