"""Codes of checkpoints with element numbers above 32 bits."""

from __future__ import annotations

import pytest
import torch

from windlass.element_ids.codes import CheckpointSpec, Codes, digits_at
from windlass.layout.dtypes import DType

HALF = 1 << 32
MASK = HALF - 1


def _hash24(number: int, seed: int) -> int:
    """Compute the hash in integers of unlimited width, as its definition is written."""
    state = ((number >> 32) * 0x9E3779B1 & MASK) ^ (number & MASK)
    state = (state + (seed + 1) * 0x9E3779B1) & MASK
    # torch shifts signed integers, so copies of the sign bit fill the free bits.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ _signed(state) >> shift) & MASK
        state = state * factor & MASK
    state = (state ^ _signed(state) >> 16) & MASK
    return _signed(state) >> 4 & 0xFFFFFF


def _signed(number: int) -> int:
    return number - HALF if number >> 31 else number


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_values_use_64_bit_element_numbers(dtype: DType) -> None:
    """Check tensors before, across and after element 2**32; the huge first tensor is never created."""
    sizes = {"huge": HALF - 90, "before": 40, "crossing": 100, "empty": 0, "after": 30}
    codes = Codes([CheckpointSpec(name, (size,), dtype) for name, size in sizes.items()])
    made = dict(codes.some(frozenset(sizes) - {"huge"}, 3))

    assert list(made) == ["before", "crossing", "empty", "after"]
    loaded = torch.cat(list(made.values()))
    numbers = torch.arange(HALF - 90, HALF + 80)
    written = [(_hash24(n, 3) - (1 << 23)) * 2.0**-26 for n in numbers.tolist()]
    expected = torch.tensor(written).to(loaded.dtype) * 16
    assert torch.equal(loaded, expected)
    assert torch.equal(codes.expected(numbers, 3, loaded.dtype, loud=True), expected)
    assert numbers.tolist() == list(range(HALF - 90, HALF + 80)), "numbers belong to the caller"


@pytest.mark.parametrize("bits", [4, 7])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 5), (127, 129), (HALF - 1, HALF),
    (HALF, HALF + 300), (5 * HALF - 200, 5 * HALF)])  # fmt: skip
def test_digits_encode_the_element_numbers(bits: int, first: int, last: int) -> None:
    num_digits = -(-last.bit_length() // bits)
    digits = [digits_at(first, last, bits, p, torch.device("cpu")) for p in range(num_digits)]

    spelt = sum((d.long() - 1) << bits * p for p, d in enumerate(digits))
    assert torch.equal(torch.as_tensor(spelt), torch.arange(first, last))
    assert all(d.min() >= 1 and d.max() <= 1 << bits for d in digits if len(d))
