"""Element types and their names, with no dependency on any framework."""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """An element type, spelled as PyTorch spells it."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
}

_LARGEST = {
    DType.FLOAT32: (2 - 2**-23) * 2.0**127,
    DType.BFLOAT16: (2 - 2**-7) * 2.0**127,
    DType.FLOAT16: 65504.0,
}

CASTS = tuple(
    (source, target) for source in _LARGEST for target in _LARGEST if source is not target
)
"""Every (source, destination) that is cast on the way, by host packing and by a kernel alike.

A cast rounds to nearest even, bit for bit as torch does, also to subnormal numbers and to zero. An
infinity stays one, and a NaN a NaN of unspecified bits. A finite number that would become an infinity
is an error: see `can_overflow`. Float8 is written with scales only (`layout/quantization.py`), and
otherwise travels as it lies; so does every other type.
"""


def can_overflow(source: DType, target: DType) -> bool:
    """Whether a finite number of `source` may have no finite one of `target` to be rounded to."""
    return _LARGEST[source] > _LARGEST[target]


def cast_refusal(source: DType, target: DType) -> str:
    """Why elements of `source` cannot become elements of `target` on the way; empty if they can."""
    if source is target or (source, target) in CASTS:
        return ""
    return f"only {', '.join(_LARGEST)} are cast into one another, got {source} at the source and {target} at the destination"


SAFETENSORS_NAMES = {
    DType.FLOAT64: "F64",
    DType.FLOAT32: "F32",
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.FLOAT8_E4M3: "F8_E4M3",
    DType.FLOAT8_E5M2: "F8_E5M2",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.INT16: "I16",
    DType.INT8: "I8",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
}
"""In the headers of safetensors files."""
