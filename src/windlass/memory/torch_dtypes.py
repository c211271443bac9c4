"""Checkpoint element types and torch's."""

from __future__ import annotations

import torch

from windlass.errors import UnsupportedLayout
from windlass.layout.dtypes import DType

_TO_TORCH = {
    DType.FLOAT64: torch.float64,
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT8_E4M3: torch.float8_e4m3fn,
    DType.FLOAT8_E5M2: torch.float8_e5m2,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.INT16: torch.int16,
    DType.INT8: torch.int8,
    DType.UINT8: torch.uint8,
    DType.BOOL: torch.bool,
}
_FROM_TORCH = {value: key for key, value in _TO_TORCH.items()}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch type of a checkpoint type."""
    return _TO_TORCH[dtype]


def dtype_of(name: str, tensor: torch.Tensor) -> DType:
    """Return the checkpoint type of a tensor; `name` is for the message.

    Raises:
        UnsupportedLayout: a type that checkpoints do not have.
    """
    if tensor.dtype not in _FROM_TORCH:
        raise UnsupportedLayout(
            f"tensor {name!r}: dtype must be one of {[*map(str, _TO_TORCH)]}, got {tensor.dtype}"
        )
    return _FROM_TORCH[tensor.dtype]
