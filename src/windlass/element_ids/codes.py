"""Checkpoint tensors with values that encode the numbers of their elements.

Every element of every checkpoint tensor has a number, from 0 on. In a load of digits, the value of an element is one
digit of its number, plus 1 (so that zeros in the engine's memory are padding). The base is 128, or 16 if any tensor is
float8: all dtypes of the checkpoint represent these integers exactly. After one load per digit, capture knows the
checkpoint element at every place in the engine's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from windlass.element_ids.kernels import NAMES, kernels_on
from windlass.layout.dtypes import DType
from windlass.memory.torch_dtypes import torch_dtype

DIGIT_BITS = 7
"""Bits per digit. Loads contain digits as 1 .. 128, which are exact in bfloat16."""

FLOAT8_DIGIT_BITS = 4
"""Bits per digit if a tensor is float8. Loads contain 1 .. 16; e4m3 represents no odd integer above 15."""

LOUDNESS = 16.0
"""Factor by which values of `Codes.some` are larger than values of `Codes.random`.

The larger values change even a result that is a maximum over several tensors.
"""


def chunk_on(device: torch.device) -> int:
    """Return the number of elements to generate or compare at a time.

    On a CPU, the elements fit into a core's cache. On a GPU, the number is large, because each kernel launch takes time.
    """
    return 1 << 16 if device.type == "cpu" else 1 << 24


# Constants of MurmurHash3 (Appleby, 2011), as signed numbers.
_MIX_1 = 0x85EBCA6B - (1 << 32)
_MIX_2 = 0xC2B2AE35 - (1 << 32)
_HIGH = 0x9E3779B1 - (1 << 32)
"""Multiplier for the high half of a number."""
_LOW_HALVES = 1 << 32
"""Number of element numbers that have the same high 32 bits."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Load = Callable[[Iterator[tuple[str, torch.Tensor]]], None]
"""The engine's loader: a function that loads named checkpoint tensors into the model.

The loader owns the tensors that it gets, and may keep or overwrite them.
"""


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Successive tensors that together have the element numbers [first, last).

    `is_chosen` is the same for all tensors of a batch; see `Codes._batches`.
    """

    specs: list[CheckpointSpec]
    first: int
    last: int
    is_chosen: bool


class Codes:
    """Numbers of all elements of a checkpoint, and the coded tensors to load.

    Args:
        specs: tensors of the checkpoint, each name once.
        device: device on which the coded tensors are generated.

    Attributes:
        starts: number of the first element of each tensor in `specs`, and the total; int64, (len(specs) + 1,).
        digit_bits: number of bits per digit.
        num_digits: number of digits of the highest element number.
        index: name of a tensor -> its index in `specs`.
        dtypes: torch dtypes of the tensors, each once.
    """

    def __init__(self, specs: Sequence[CheckpointSpec], device: torch.device | str = "cpu") -> None:
        self.specs = tuple(specs)
        self.device = torch.device(device)
        sizes = np.array([spec.numel for spec in specs], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        total = int(self.starts[-1])
        narrow = any(spec.dtype is DType.FLOAT8_E4M3 for spec in specs)
        self.digit_bits = FLOAT8_DIGIT_BITS if narrow else DIGIT_BITS
        self.num_digits = max(1, -(-max(0, total - 1).bit_length() // self.digit_bits))
        self.index = {spec.name: at for at, spec in enumerate(specs)}
        self._dtypes = tuple(sorted({spec.dtype for spec in specs}))
        self.dtypes = tuple(torch_dtype(dtype) for dtype in self._dtypes)
        self._kinds = torch.tensor([self._dtypes.index(s.dtype) for s in specs], device=self.device)
        self._all = tuple(self._batches(range(len(specs))))

    def digits(
        self, position: int, chosen: frozenset[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for all tensors, or only for the tensors named in `chosen`.

        Each value is 1 + the digit at `position` of the element's number; position 0 is the lowest digit.
        """
        return self._load(
            lambda first, last, _dtype, _chosen: digits_at(
                first, last, self.digit_bits, position, self.device
            ),
            None if chosen is None else self._batches(self._indices(chosen)),
        )

    def constant(self, value: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for all tensors, with `value` in every element."""
        same = torch.full((1,), value, device=self.device)
        return self._load(lambda first, last, _dtype, _chosen: same.expand(last - first))

    def random(
        self, seed: int, chosen: frozenset[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) with random values for all tensors, or only for the tensors named in `chosen`.

        A value depends only on the seed and the element's number. Values are uniform between -0.125 and 0.125. Values of
        float8 tensors are uniform over the 254 bit patterns that are not NaN.
        """
        return self._load(
            lambda first, last, dtype, _chosen: self._ordinary(first, last, seed, dtype),
            None if chosen is None else self._batches(self._indices(chosen)),
        )

    def some(self, chosen: frozenset[str], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for the tensors named in `chosen`, with random values between -2 and 2.

        Float8 tensors have the values of `random`.
        """
        return self._load(
            lambda first, last, dtype, _chosen: _loud(*self._halves(first, last), seed, dtype),
            self._batches(self._indices(chosen)),
        )

    def mixed(self, chosen: frozenset[str], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for all tensors.

        The tensors named in `chosen` have the values of `some`; all other tensors have the values of `random(0)`.
        """
        return self._load(
            lambda first, last, dtype, is_chosen: (
                _loud(*self._halves(first, last), seed, dtype)
                if is_chosen
                else self._ordinary(first, last, 0, dtype)
            ),
            self._batches(range(len(self.specs)), chosen),
        )

    def expected(
        self, numbers: torch.Tensor, seed: int, dtype: torch.dtype, *, loud: bool = False
    ) -> torch.Tensor:
        """Return the values (n,) of `random(seed)` for these elements. If `loud`, return the values of `some` instead.

        `numbers` has element numbers, (n,) int64, on any device. Each value is generated in the checkpoint's dtype and
        then cast to `dtype`, the dtype of the engine's tensor.
        """
        make = _loud if loud else _ordinary

        def values(numbers: torch.Tensor, stored: DType) -> torch.Tensor:
            if self.starts[-1] <= _LOW_HALVES:
                return make(numbers.to(torch.int32), 0, seed, stored)
            halves = numbers.contiguous().view(torch.int32).view(-1, 2)
            return make(halves[:, 0].clone(), halves[:, 1], seed, stored)

        if len(self._dtypes) == 1:
            return values(numbers, self._dtypes[0]).to(dtype)
        bounds = torch.from_numpy(self.starts[1:-1]).to(numbers.device)
        tensors = torch.searchsorted(bounds, numbers, right=True)
        kinds = self._kinds.to(numbers.device)[tensors]
        result = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
        for kind, stored in enumerate(self._dtypes):
            chosen = kinds == kind
            bits_of(result)[chosen] = bits_of(values(numbers[chosen], stored).to(dtype))
        return result

    def tensor_of(
        self, numbers: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return, for each element number, the index of its tensor in `specs`."""
        return np.searchsorted(self.starts, numbers, side="right") - 1

    def _indices(self, chosen: frozenset[str]) -> list[int]:
        """Return the indices in `specs` of the tensors named in `chosen`, in ascending order."""
        return [at for at, spec in enumerate(self.specs) if spec.name in chosen]

    def _ordinary(self, first: int, last: int, seed: int, dtype: DType) -> torch.Tensor:
        """Return the values of `random` for the element numbers [first, last). Use a GPU kernel if there is one."""
        kernels, stored = kernels_on(self.device), torch_dtype(dtype)
        if kernels is None or stored not in NAMES:
            return _ordinary(*self._halves(first, last), seed, dtype)
        made = torch.empty(last - first, dtype=stored, device=self.device)
        kernels.fill(made, first, hash_seed(seed))
        return made

    def _halves(self, first: int, last: int) -> tuple[torch.Tensor, int]:
        """Return the low 32 bits of the numbers [first, last), and the high 32 bits, which all these numbers share."""
        low = torch.arange(_signed(first), _signed(first) + last - first, device=self.device)
        return low.to(torch.int32), first >> 32

    def _load(
        self,
        values: Callable[[int, int, DType, bool], torch.Tensor],
        batches: Iterable[_Batch] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of `batches` (default: all tensors), with generated values.

        `values(first, last, dtype, is_chosen)` returns the values of the element numbers [first, last). All numbers
        of one call have the same high 32 bits.
        """
        most = chunk_on(self.device)
        for batch in self._all if batches is None else batches:
            stored, first, last = batch.specs[0].dtype, batch.first, batch.last
            made = torch.empty(last - first, dtype=torch_dtype(stored), device=self.device)
            begin = first
            while begin < last:
                end = min(last, begin + most, ((begin >> 32) + 1) * _LOW_HALVES)
                part = values(begin, end, stored, batch.is_chosen)
                made[begin - first : end - first] = part
                begin = end
            parts = torch.split(made, [spec.numel for spec in batch.specs])
            for spec, part in zip(batch.specs, parts, strict=True):
                # Clone, because the loader may keep the tensor. A view would keep the whole batch in memory.
                yield spec.name, (part.clone() if len(parts) > 1 else part).view(spec.shape)

    def _batches(
        self, specs: Iterable[int], chosen: frozenset[str] = frozenset()
    ) -> Iterator[_Batch]:
        """Yield batches of successive tensors.

        One batch for many small tensors saves kernel launches; a model has thousands of small tensors. All tensors of a
        batch have one dtype, and either all or none of them are in `chosen`. A batch of several tensors has at most
        `chunk_on` elements, and the high 32 bits of their numbers are the same.
        """
        batch: list[CheckpointSpec] = []
        first = last = 0
        most = chunk_on(self.device)
        for index in specs:
            spec = self.specs[index]
            begin, end = int(self.starts[index]), int(self.starts[index + 1])
            if batch:
                is_chosen = batch[0].name in chosen
                alike = spec.dtype is batch[0].dtype and (spec.name in chosen) == is_chosen
                fits = end - first <= most and (end - 1) >> 32 == first >> 32
                if begin != last or not alike or not fits:
                    yield _Batch(batch, first, last, is_chosen)
                    batch = []
            if not batch:
                first = begin
            batch.append(spec)
            last = end
        if batch:
            yield _Batch(batch, first, last, batch[0].name in chosen)


def bits_of(memory: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of the same element size. Unlike float8, integers support all torch operations."""
    return memory.view(_INTEGERS[memory.element_size()])


def _signed(number: int) -> int:
    """Wrap a number into the range of a signed 32-bit integer."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def digits_at(
    first: int, last: int, bits: int, position: int, device: torch.device
) -> torch.Tensor:
    """Return, for each number in [first, last), 1 + its digit at `position`, as float32."""
    # Each row of the table is for numbers that differ only in their lowest digit.
    if position:
        rows = torch.arange(first >> bits, (last - 1 >> bits) + 1, device=device)
        rows = rows.bitwise_right_shift_(bits * (position - 1)).bitwise_and_((1 << bits) - 1)
        table = rows.add_(1).float()[:, None].expand(-1, 1 << bits)
    else:
        row = torch.arange(1, (1 << bits) + 1, device=device).float()
        table = row.expand((last - 1 >> bits) + 1 - (first >> bits), -1)
    begin = first & (1 << bits) - 1
    return table.reshape(-1)[begin : begin + last - first]


_HighHalf = torch.Tensor | int
"""High 32 bits: (n,) int32, or one integer for all numbers."""


def _loud(low: torch.Tensor, high: _HighHalf, seed: int, dtype: DType) -> torch.Tensor:
    """Return the values of `Codes.some`: the values of `Codes.random`, multiplied by `LOUDNESS`.

    Values of float8 are not multiplied, because they span the full range already.
    """
    values = _ordinary(low, high, seed, dtype)
    return values if dtype is DType.FLOAT8_E4M3 else values * LOUDNESS


def _ordinary(low: torch.Tensor, high: _HighHalf, seed: int, dtype: DType) -> torch.Tensor:
    """Return the values of `Codes.random`: a value for each element number, computed from 24 bits of a hash.

    Every device computes the same values.

    Args:
        low: low 32 bits of the numbers, (n,) int32. This function overwrites them.
        high: high 32 bits of the numbers.
        seed: seed of the load.
        dtype: dtype of the result.
    """
    bits = _bits24(low, high, hash_seed(seed))
    if dtype is DType.FLOAT8_E4M3:
        pattern = bits.remainder_(254)
        # The patterns 127 and 255 are NaN.
        pattern += pattern >= 127
        return pattern.to(torch.uint8).view(torch.float8_e4m3fn)
    return bits.sub_(1 << 23).to(torch.float32).mul_(2.0**-26).to(torch_dtype(dtype))


def hash_seed(seed: int) -> int:
    """Return the initial state of the hash for a load's seed."""
    return _signed((seed + 1) * _HIGH)


def _bits24(low: torch.Tensor, high: _HighHalf, seed: int) -> torch.Tensor:
    """Return a 24-bit hash of each number. This function overwrites `low`."""
    mixed = _signed(high * _HIGH) if isinstance(high, int) else high * _HIGH
    state = low.bitwise_xor_(mixed).add_(seed)
    state.bitwise_xor_(state >> 16).mul_(_MIX_1)
    state.bitwise_xor_(state >> 13).mul_(_MIX_2)
    return state.bitwise_xor_(state >> 16).bitwise_right_shift_(4).bitwise_and_(0xFFFFFF)
