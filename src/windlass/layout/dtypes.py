"""Element types and their names, with no dependency on any framework."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class DType(StrEnum):
    """An element type, with PyTorch's name.

    Attributes:
        itemsize: bytes per element.
        safetensors_name: name in the headers of safetensors files.
    """

    itemsize: int
    safetensors_name: str

    def __new__(cls, name: str, itemsize: int = 0, safetensors_name: str = "") -> Self:
        """Create a member of the enum. `DType(name)` looks up a member and does not call `__new__`."""
        member = str.__new__(cls, name)
        member._value_, member.itemsize, member.safetensors_name = name, itemsize, safetensors_name
        return member

    FLOAT64 = "float64", 8, "F64"
    FLOAT32 = "float32", 4, "F32"
    FLOAT16 = "float16", 2, "F16"
    BFLOAT16 = "bfloat16", 2, "BF16"
    FLOAT8_E4M3 = "float8_e4m3fn", 1, "F8_E4M3"
    FLOAT8_E5M2 = "float8_e5m2", 1, "F8_E5M2"
    INT64 = "int64", 8, "I64"
    INT32 = "int32", 4, "I32"
    INT16 = "int16", 2, "I16"
    INT8 = "int8", 1, "I8"
    UINT8 = "uint8", 1, "U8"
    BOOL = "bool", 1, "BOOL"


_LARGEST = {
    DType.FLOAT32: (2 - 2**-23) * 2.0**127,
    DType.BFLOAT16: (2 - 2**-7) * 2.0**127,
    DType.FLOAT16: 65504.0,
}
"""Floating-point type -> its largest finite number."""

CASTS = tuple(
    (source, target) for source in _LARGEST for target in _LARGEST if source is not target
)
"""Every (source, destination) pair that host packing and GPU kernels can cast.

A cast rounds to nearest even, bit for bit as torch does, also to subnormal numbers and to zero. An
infinity stays an infinity, and a NaN stays a NaN with unspecified bits. A finite number that would
become an infinity is an error; see `can_overflow`. A cast to float8 needs scales
(`layout/quantization.py`). Without a cast, the source and the destination must have the same type.
"""

CAST_RULE = f"only {', '.join(_LARGEST)} are cast into one another"
"""Rule for casts, as a part of errors."""


def can_overflow(source: DType, target: DType) -> bool:
    """Return whether a cast from `source` to `target` can turn a finite number into an infinity."""
    return _LARGEST[source] > _LARGEST[target]


def cast_refusal(source: DType, target: DType) -> str:
    """Return the reason why elements of `source` cannot be cast to `target`; "" if they can be cast."""
    if source is target or (source, target) in CASTS:
        return ""
    return f"{CAST_RULE}, got {source} at the source and {target} at the destination"
