"""By what an engine multiplies tensors while it loads them: alpha / rank of an adapter, say.

A load of one value everywhere shows, in every tensor, that value times the tensor's factor, rounded.
Further values are chosen where the factors that are still possible round differently, until none is
left: then all of them give the same bytes for every value, and one stands for them.
What is found is a claim about values of that kind; the proof with ordinary values decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import final

import torch

from windlass.engines.capture.codes import Codes, Load
from windlass.engines.capture.memory import Held, Holding
from windlass.memory.torch_dtypes import torch_dtype

__all__ = ["factors_of", "scaled"]

_MANTISSA_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
_FEW_BITS = 11
"""Types of more are told from one value alone: its product is the factor."""


@final
class _Between:
    """The factors that a tensor can have, after some loads of one value each.

    Args:
        dtype: of the tensor.
        loaded_bits: of the mantissas that are loaded.
    """

    def __init__(self, dtype: torch.dtype, loaded_bits: int) -> None:
        self._dtype, self._bits = dtype, _MANTISSA_BITS[dtype]
        self._loaded_bits = min(loaded_bits, self._bits)
        self._low, self._high = 0.0, math.inf
        self._seen: list[tuple[float, float]] = []

    def narrow(self, value: float, product: float) -> None:
        """Take what a load of `value` left."""
        self._seen.append((value, product))
        mantissa, exponent = math.frexp(product)
        half = math.ldexp(0.5, exponent - self._bits)
        below = half / 2 if mantissa == 0.5 else half  # values are denser below a power of two
        self._low = max(self._low, (product - below) / value)
        self._high = min(self._high, (product + half) / value)

    def telling(self) -> float | None:
        """The value from [1, 2) whose product divides what is possible best; None if none does."""
        if self._bits > _FEW_BITS:
            return None
        middle, best, value = (self._low + self._high) / 2, math.inf, None
        for mantissa in range(1 << (self._loaded_bits - 1), 1 << self._loaded_bits):
            candidate = math.ldexp(mantissa, 1 - self._loaded_bits)
            for product in self._edges(candidate * middle):
                edge = product / candidate
                if self._low < edge < self._high and abs(edge - middle) < best:
                    best, value = abs(edge - middle), candidate
        return self._doubtful() if value is None else value

    def _edges(self, product: float) -> Iterator[float]:
        """Where products close to this one begin to be rounded to another value."""
        _, exponent = math.frexp(product)
        unit = math.ldexp(1.0, exponent - self._bits)
        whole = math.floor(product / unit)
        yield (whole + 0.5) * unit
        if whole == 1 << (self._bits - 1):
            yield (whole - 0.25) * unit

    def _doubtful(self) -> float | None:
        """A value that the ends of what is possible, and what lies between, round differently."""
        values = self._values()
        first, *others = (scaled(values, factor) for factor in self._consistent())
        for other in others:
            differing = values[first != other]
            if len(differing):
                return float(differing[0])
        return None

    def _values(self) -> torch.Tensor:
        first = 1 << (self._loaded_bits - 1)
        return torch.arange(first, 2 * first).to(self._dtype) / first

    def _consistent(self) -> tuple[float, ...]:
        """1, the ends, at which products lie just between two values, and the middle."""
        middle = (self._low + self._high) / 2
        values = torch.tensor([value for value, _ in self._seen], dtype=self._dtype)
        products = torch.tensor([product for _, product in self._seen], dtype=self._dtype)
        found = [
            factor
            for factor in (1.0, self._low, self._high, middle)
            if self._low <= factor <= self._high and torch.equal(scaled(values, factor), products)
        ]
        return tuple(found) or (middle,)

    def factor(self) -> float:
        """One that does what was seen; all that are left do the same to every value."""
        return self._seen[0][1] if self._bits > _FEW_BITS else self._consistent()[0]


def factors_of(codes: Codes, load: Load, held: Held) -> dict[str, float]:
    """Per tensor that shows one factor throughout, which is not 1; it holds loads afterwards.

    Args:
        codes: of the checkpoint.
        load: see `capture`.
        held: by name, what the model holds now.
    """
    kinds = {torch_dtype(spec.dtype) for spec in codes.specs}
    if not kinds or not kinds <= _MANTISSA_BITS.keys():
        return {}
    loaded = min(_MANTISSA_BITS[kind] for kind in kinds)
    between: dict[str, _Between] = {}
    load(codes.constant(1.0))
    for name, holding in held().items():
        product = _only_value(holding)
        if holding.tensor.dtype in _MANTISSA_BITS and product is not None:
            between[name] = _Between(holding.tensor.dtype, loaded)
            between[name].narrow(1.0, product)
    while (value := _next_value(between)) is not None:
        load(codes.constant(value))
        for name, holding in held().items():
            product = _only_value(holding) if name in between else None
            if product is not None:
                between[name].narrow(value, product)
            else:
                between.pop(name, None)
    factors = {name: possible.factor() for name, possible in between.items()}
    return {name: factor for name, factor in factors.items() if factor != 1.0}


def scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    """As an engine multiplies: in the type of the tensor; untouched if the factor is 1."""
    return values if factor == 1.0 else values * factor


def _next_value(between: Mapping[str, _Between]) -> float | None:
    for possible in between.values():
        value = possible.telling()
        if value is not None:
            return value
    return None


def _only_value(holding: Holding) -> float | None:
    """The one value above 0 that a tensor holds besides 0."""
    memory = holding.memory()
    value = float(memory.amax()) if memory.is_floating_point() else 0.0
    if not 0.0 < value < math.inf or not bool(((memory == value) | (memory == 0)).all()):
        return None
    return value
