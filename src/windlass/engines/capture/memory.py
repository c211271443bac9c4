"""Every tensor that an engine's model holds: parameters, buffers, and what modules keep besides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from windlass.engines.capture.codes import bits_of, chunk_on
from windlass.engines.capture.kernels import kernels_on
from windlass.errors import UnsupportedLayout
from windlass.layout.naming.patterns import said


class Kind(StrEnum):
    """How a module holds a tensor."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor of the model that shares no element with an earlier one."""

    name: str
    tensor: torch.Tensor
    kind: Kind

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
    """Return what a model holds by name, parameters first; tensors that lie inside another (tied, views) appear once.

    `ignored`: addresses of storages that hold no weights (key-value caches).
    """
    return distinct(tensors_of(model), ignored)


def distinct(
    tensors: Iterable[tuple[str, torch.Tensor, Kind]], ignored: frozenset[int]
) -> Mapping[str, Holding]:
    """Return what `held_by` does, of these tensors in this order."""
    found: dict[str, Holding] = {}
    taken: set[tuple[int, int]] = set()
    ranges: dict[int, list[tuple[int, int]]] = {}
    for name, tensor, kind in tensors:
        if tensor.numel() == 0 or tensor.is_meta or tensor.is_sparse:
            continue
        holding = Holding(name, tensor, kind)
        begin, end = holding.address, holding.address + holding.nbytes
        storage = tensor.untyped_storage().data_ptr()
        inside = any(b <= begin and end <= e for b, e in ranges.get(storage, ()))
        if inside or (begin, end) in taken or storage in ignored:
            continue
        taken.add((begin, end))
        ranges.setdefault(storage, []).append((begin, end))
        found[name] = holding
    return found


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, Kind]]:
    """Yield everything that modules hold by a name: parameters, buffers, other attributes."""
    for name, parameter in model.named_parameters():
        yield name, parameter, Kind.PARAMETER
    for name, buffer in model.named_buffers():
        yield name, buffer, Kind.BUFFER
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{attribute}" if path else attribute, value, Kind.ATTRIBUTE


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
    """Return the fingerprint of every tensor, in hexadecimal; names of others than parameters begin with their kind."""
    return {
        f"{'' if h.kind is Kind.PARAMETER else f'{h.kind}:'}{n}": f"{fingerprint(h.memory()):016x}"
        for n, h in held.items()
    }
