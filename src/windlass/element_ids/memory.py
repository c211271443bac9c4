"""Flat views of the memory of tensors, and fingerprints of memory."""

from __future__ import annotations

import torch

from windlass.element_ids.codes import bits_of, chunk_on
from windlass.element_ids.kernels import kernels_on


def reach_of(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last in memory, including gaps between strides."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * step for size, step in steps) + 1


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a tensor's memory, including gaps: (reach,)."""
    return tensor.detach().as_strided((reach_of(tensor),), (1,))


# Odd constants of splitmix64, as signed numbers.
_WEIGHT = 0xBF58476D1CE4E5B9 - (1 << 64)
_STEP = 0x94D049BB133111EB - (1 << 64)


def fingerprint(memory: torch.Tensor) -> int:
    """Return a 64-bit hash of the bytes of a contiguous tensor (n,), computed on the tensor's device."""
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
    """Return the part of a fingerprint that n words contribute; `fingerprint` adds such parts modulo 2^64.

    `values` (n,) has the words as integers. `places` (n,) has the index of each word in the memory.
    """
    return _mixed_sum(values, places * _STEP)


def _mixed_sum(words: torch.Tensor, steps: torch.Tensor) -> int:
    """Return the sum of n hashes.

    Each hash depends on a word and on its step, which the caller computes from the word's index.
    """
    mixed = words.to(torch.int64, copy=True).add_(1).mul_(_WEIGHT).add_(steps)
    mixed.bitwise_xor_(mixed >> 29).mul_(_STEP)
    return int(mixed.bitwise_xor_(mixed >> 32).sum())


def _signed(number: int) -> int:
    """Wrap a number into the range of a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _words_of(memory: torch.Tensor) -> torch.Tensor:
    """View a tensor as int64 if its size is a multiple of 8 bytes; otherwise view each element as an integer.

    If the memory is not aligned to 8 bytes, return an int64 view of a copy.
    """
    if memory.nbytes % 8 or memory.element_size() == 8:
        return bits_of(memory)
    if memory.storage_offset() * memory.element_size() % 8 or memory.data_ptr() % 8:
        memory = memory.clone()
    return memory.view(torch.int64)
