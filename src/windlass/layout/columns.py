"""Tables as columns: numpy arrays of equal length, one per field of a frozen dataclass, and their wire form.

The encoding of an object that contains a table has each column as bytes: the values, row-major and
little-endian.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import Field, field, fields
from typing import Any, ClassVar, Self, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]
StructuredArray = npt.NDArray[np.void]
"""Array of a structured dtype: each row has named fields."""
T = TypeVar("T")


def column(dtype: str, width: int = 0) -> Any:
    """Declare a field that is a column.

    Args:
        dtype: numpy's name of the dtype, little-endian. The field's annotation must have the same
            dtype.
        width: values per row, for a column of shape (n, width); 0 for shape (n,).
    """
    return field(metadata={"dtype": np.dtype(dtype), "width": width})


class Columns:
    """Base of keyword-only frozen dataclasses with fields that are all declared by `column`.

    Raises:
        ValueError: columns have different lengths.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __post_init__(self) -> None:
        for f in fields(self):
            values = getattr(self, f.name)
            if values.dtype != f.metadata["dtype"] or values.ndim != len(_shape(f, 0)):
                shaped = np.asarray(values, f.metadata["dtype"]).reshape(_shape(f, -1))
                object.__setattr__(self, f.name, shaped)
        lengths = {name: len(values) for name, values in self.columns().items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns must have equal lengths, got {lengths}")

    def __len__(self) -> int:
        return len(self.columns()[fields(self)[0].name])

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by name, without copying them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def empty(cls, num_rows: int) -> Self:
        """Return a table of `num_rows` uninitialised rows. Filling it with `fill` needs half the memory of `join`."""
        return cls(
            **{f.name: np.empty(_shape(f, num_rows), f.metadata["dtype"]) for f in fields(cls)}
        )

    @classmethod
    def join(cls, parts: Iterable[Columns]) -> Self:
        """Return one table of this class with the rows of all `parts`, in order."""
        tables = [cls.empty(0), *parts]
        return cls(
            **{f.name: np.concatenate([getattr(t, f.name) for t in tables]) for f in fields(cls)}
        )

    def fill(self, first: int, part: Columns) -> None:
        """Overwrite rows with the rows of `part`, from row `first` on."""
        for name, values in self.columns().items():
            values[first : first + len(part)] = getattr(part, name)

    def select(self, rows: slice | npt.NDArray[np.intp]) -> Self:
        """Return a table of the given rows: a view if `rows` is a slice, otherwise a copy."""
        return type(self)(**{name: values[rows] for name, values in self.columns().items()})


def encode_tables(holder: object) -> bytes:
    """Return the wire form (msgpack) of a dataclass or struct that contains tables."""
    return msgspec.msgpack.encode(holder, enc_hook=_bytes_of)


def decode_tables(data: bytes, kind: type[T]) -> T:
    """Decode the wire form that `encode_tables` returned. The columns are read-only views of `data`.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: `data` does not describe a `kind`, or the columns
            of a table have wrong lengths.
    """
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_column_of)


def _bytes_of(values: npt.NDArray[Any]) -> bytes:
    """Encode a column for msgspec as its values, row-major."""
    return np.ascontiguousarray(values).tobytes()


def _column_of(annotation: type, data: bytes) -> npt.NDArray[Any]:
    """Decode a flat column for msgspec. `annotation` is the numpy type of the field, which has the dtype."""
    (dtype,) = get_args(get_args(annotation)[1])
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def _shape(declared: Field[Any], num_rows: int) -> tuple[int, ...]:
    """Return the shape of a declared column with `num_rows` rows."""
    width = declared.metadata["width"]
    return (num_rows, width) if width else (num_rows,)
