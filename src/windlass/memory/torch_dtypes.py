"""Conversion between checkpoint element types and torch's."""

from __future__ import annotations

import torch

from windlass.errors import UnsupportedLayout
from windlass.layout.dtypes import DType

_TO_TORCH: dict[DType, torch.dtype] = {dtype: vars(torch)[dtype.value] for dtype in DType}
_FROM_TORCH = {value: key for key, value in _TO_TORCH.items()}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch type of a checkpoint type."""
    return _TO_TORCH[dtype]


def dtype_of(name: str, tensor: torch.Tensor) -> DType:
    """Return the `DType` of a tensor; `name` is the tensor's name in the error.

    Raises:
        UnsupportedLayout: no `DType` equals the tensor's dtype.
    """
    if tensor.dtype not in _FROM_TORCH:
        raise UnsupportedLayout(
            f"tensor {name!r}: dtype must be one of {[*map(str, _TO_TORCH)]}, got {tensor.dtype}"
        )
    return _FROM_TORCH[tensor.dtype]
