"""Named tensors of training samples: element type, shape and bytes, without a dependency on torch."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import msgspec
import numpy as np

from windlass.errors import ConfigError
from windlass.layout.dtypes import DType

MAX_DIMS = 8


class SampleTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Tensor that travels with a `TrainingSample`. `SampleTensor.of` makes one from an array or tensor.

    Attributes:
        dtype: element type.
        shape: size of each dimension.
        data: the elements in C order, little-endian.
        per_token: whether the first dimension has one entry per token of the sample's `output_ids`.

    Raises:
        ConfigError: the dtype is unknown, or shape and data do not match.
    """

    dtype: DType
    shape: tuple[int, ...]
    data: bytes
    per_token: bool = True

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "dtype", _dtype_of(self.dtype))
        if not all(type(size) is int and size >= 0 for size in self.shape):
            raise ConfigError(f"tensor: shape must be integers >= 0, got {self.shape}")
        if not self.per_token <= len(self.shape) <= MAX_DIMS:
            raise ConfigError(
                f"tensor: shape must have {int(self.per_token)} to {MAX_DIMS} dimensions, got {self.shape}"
            )
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        data: object = self.data
        if not (isinstance(data, bytes) and len(data) == nbytes):
            got = f"{len(data)} bytes" if isinstance(data, bytes) else repr(data)
            raise ConfigError(
                f"tensor: data must be {nbytes} bytes for {self.dtype} of shape {self.shape}, got {got}"
            )

    @classmethod
    def of(cls, values: Any, *, per_token: bool = True) -> SampleTensor:
        """Copy a NumPy array, a torch tensor, or a list of numbers. Numbers of Python become float32 or int64.

        Args:
            values: the array, tensor or (nested) list. A tensor on a GPU is copied to the host.
            per_token: whether the first dimension has one entry per token of the sample's `output_ids`.

        Raises:
            ConfigError: the values are not numbers, or their element type is not in `DType`.
        """
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(values, torch.Tensor):
            whole = values.detach().cpu().contiguous()
            data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
            name = str(whole.dtype).removeprefix("torch.")
            return cls(
                dtype=_dtype_of(name), shape=tuple(whole.shape), data=data, per_token=per_token
            )
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise ConfigError(f"tensor: values must be numbers in one shape: {error}") from error
        if array.dtype == np.float64 and not isinstance(values, np.ndarray | np.generic):
            array = array.astype(np.float32)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(
            dtype=_dtype_of(array.dtype.name),
            shape=array.shape,
            data=little.tobytes(),
            per_token=per_token,
        )

    @property
    def has_numpy_dtype(self) -> bool:
        """Whether NumPy has this element type; it has neither bfloat16 nor float8."""
        return self.dtype not in {DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2}

    def to_numpy(self) -> Any:
        """Return a read-only NumPy array of the elements.

        Raises:
            ConfigError: NumPy has no such element type; use `to_torch`.
        """
        if not self.has_numpy_dtype:
            raise ConfigError(f"tensor: NumPy has no dtype {self.dtype}; use to_torch")
        return np.frombuffer(self.data, np.dtype(self.dtype.value)).reshape(self.shape)

    def to_torch(self) -> Any:
        """Return a torch tensor of the elements, on the CPU."""
        torch = importlib.import_module("torch")
        dtype = vars(torch)[self.dtype.value]
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)


def _dtype_of(name: str) -> DType:
    """Return the element type with a name; raise `ConfigError` if there is none."""
    try:
        return DType(name)
    except ValueError:
        raise ConfigError(
            f"tensor: dtype must be one of {', '.join(DType)}, got {name!r}"
        ) from None
