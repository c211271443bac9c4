"""Which checkpoint tensors a loader passes by.

Engines skip what they do not serve: layers that predict further tokens, an output matrix that is tied, a
tower that was not built. A tensor that left no trace may have been skipped, or lie where capture does not
see it. It was skipped if the loader called nothing with it but questions of its shape, and let it go.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "nbytes", "itemsize", "is_meta")
_METHODS = ("size", "dim", "numel", "nelement", "element_size", "stride")
_TENSOR: Mapping[str, Any] = vars(torch._C.TensorBase)
_QUESTIONS = frozenset(
    {*(_TENSOR[name].__get__ for name in _ATTRIBUTES), *(_TENSOR[name] for name in _METHODS)}
)
"""What is known of a tensor whose elements nobody has seen."""


@final
class Reading(TorchFunctionMode):
    """Entered for a load, takes note of the tensors with which torch's functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self._read: set[str] = set()
        self._given: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    def over(
        self, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors, watched from then on."""
        while True:
            with torch._C.DisableTorchFunction():  # making them is not reading them
                name, tensor = next(weights, ("", None))
            if tensor is None:
                return
            self._given[id(tensor)] = weakref.ref(tensor), name
            yield name, tensor
            del tensor

    def read(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of `names` that were read, or are still there. All of them if none was: another thread did it."""
        kept = {name for tensor, name in self._given.values() if tensor() is not None}
        found = self._read | kept
        return frozenset(name for name in names if not self._read or name in found)

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _QUESTIONS:
            for tensor in _tensors_in((*args, *(kwargs or {}).values())):
                given = self._given.get(id(tensor))
                if given is not None and given[0]() is tensor:
                    self._read.add(given[1])
        return func(*args, **(kwargs or {}))


def _tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
