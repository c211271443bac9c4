"""Tables as columns: numpy arrays of equal length, one per field of a frozen dataclass, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, field, fields
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]
StructuredArray = npt.NDArray[np.void]
"""Of a structured dtype: rows of fields."""


def column(dtype: str, width: int = 0) -> Any:
    """Declare a field that is a column.

    Args:
        dtype: numpy's name, little-endian: that of the bytes, too.
        width: values per row, for a column of shape (n, width); 0 for one of shape (n,).
    """
    return field(metadata={"dtype": np.dtype(dtype), "width": width})


class Columns:
    """Base of keyword-only frozen dataclasses all of whose fields are declared by `column`."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __len__(self) -> int:
        return len(self.columns()[fields(self)[0].name])

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by name; they are this table's own."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def empty(cls, num_rows: int) -> Self:
        """Return uninitialised columns, to be filled part by part: half the memory of joining parts."""
        return cls(
            **{f.name: np.empty(_shape(f, num_rows), f.metadata["dtype"]) for f in fields(cls)}
        )

    @classmethod
    def join(cls, parts: Iterable[Columns]) -> Self:
        """Return the rows of all parts, one after another, of the columns that this class has."""
        tables = [cls.empty(0), *parts]
        return cls(
            **{f.name: np.concatenate([getattr(t, f.name) for t in tables]) for f in fields(cls)}
        )

    def fill(self, first: int, part: Columns) -> None:
        """Copy `part` into the rows from `first` on."""
        for name, values in self.columns().items():
            values[first : first + len(part)] = getattr(part, name)

    def select(self, rows: slice | npt.NDArray[np.intp]) -> Self:
        """Return the given rows (a view for a slice)."""
        return type(self)(**{name: values[rows] for name, values in self.columns().items()})

    def to_bytes(self) -> dict[str, bytes]:
        """Return the wire form: per column its values, row-major and little-endian."""
        return {
            f.name: np.ascontiguousarray(getattr(self, f.name), f.metadata["dtype"]).tobytes()
            for f in fields(self)
        }

    @classmethod
    def from_bytes(cls, columns: Mapping[str, Any]) -> Self:
        """Return read-only columns over the bytes of `to_bytes`; other keys are ignored.

        Lengths are not compared: whoever decodes says what a table that does not fit is part of.

        Raises:
            KeyError: a column is missing.
            ValueError: bytes that are no whole number of rows.
        """
        return cls(
            **{
                f.name: np.frombuffer(columns[f.name], f.metadata["dtype"]).reshape(_shape(f, -1))
                for f in fields(cls)
            }
        )


def _shape(declared: Field[Any], num_rows: int) -> tuple[int, ...]:
    width = declared.metadata["width"]
    return (num_rows, width) if width else (num_rows,)
