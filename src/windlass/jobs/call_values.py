"""Arguments and values of the operations of trainer ranks: msgpack, in which tensors keep their dtype and shape.

A tensor is a msgpack extension with a `_Frame`: dtype, shape and bytes, without pickle.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.errors import UnsupportedLayout
from windlass.layout.dtypes import DType
from windlass.rollout.values import encode_value, plain_value

if TYPE_CHECKING:
    import torch

MAX_CALL_NBYTES = 512 << 20
"""Largest size of an argument or a value of one rank."""
_TENSOR = 1
"""Code of the msgpack extension."""


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """A tensor; `data` has the bytes of its elements in row-major order."""

    dtype: DType
    shape: tuple[int, ...]
    data: memoryview


def encode_call_value(what: str, value: object) -> bytes:
    """Encode a value of plain types and torch tensors as msgpack. A tensor without dims becomes a number.

    Raises:
        ConfigError: the value contains an object of another type, or its encoding exceeds `MAX_CALL_NBYTES`.
    """
    return encode_value(what, value, plain=_plain_or_frame, max_nbytes=MAX_CALL_NBYTES)


def decode_call_value(encoded: bytes) -> Any:
    """Decode bytes that `encode_call_value` returned. Tensors are in host memory.

    Raises:
        msgspec.DecodeError: `encode_call_value` cannot have returned these bytes.
    """
    return msgspec.msgpack.decode(encoded, ext_hook=_tensor_of)


def _plain_or_frame(value: object) -> object:
    """Convert a value that msgpack cannot encode: a tensor with dims to an extension, any other value to a plain value.

    Raises:
        TypeError: the value has no plain form, is a sharded or sparse tensor, or is a tensor of a dtype that
            checkpoints do not have.
    """
    # A value can be a tensor only if this process has imported torch.
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or not value.ndim:
        return plain_value(value)
    from torch.distributed.tensor import DTensor

    from windlass.memory.torch_dtypes import dtype_of

    if isinstance(value, DTensor) or value.layout is not torch.strided:
        raise TypeError("a tensor must be dense and local; call full_tensor() or to_dense()")
    try:
        dtype = dtype_of("value", value)
    except UnsupportedLayout as error:
        raise TypeError(str(error)) from error
    flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    frame = _Frame(dtype, tuple(value.shape), flat.numpy().data)
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(frame))


def _tensor_of(code: int, data: memoryview) -> torch.Tensor:
    """Return the tensor in a msgpack extension, in host memory. If there is no valid tensor, raise `ValidationError`."""
    import torch

    from windlass.memory.torch_dtypes import torch_dtype

    if code != _TENSOR:
        raise msgspec.ValidationError(f"extension code must be {_TENSOR}, got {code}")
    frame = msgspec.msgpack.decode(data, type=_Frame)
    nbytes = math.prod(frame.shape) * frame.dtype.itemsize
    if len(frame.data) != nbytes:
        raise msgspec.ValidationError(
            f"{frame.dtype} tensor of shape {frame.shape} must have {nbytes} bytes, got {len(frame.data)}"
        )
    try:
        found = torch.empty(frame.shape, dtype=torch_dtype(frame.dtype))
    except (RuntimeError, TypeError) as error:
        raise msgspec.ValidationError(
            f"cannot create a tensor of shape {frame.shape}: {error}"
        ) from error
    if nbytes:
        found.flatten().view(torch.uint8).numpy()[:] = frame.data
    return found
