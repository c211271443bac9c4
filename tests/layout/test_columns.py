"""Tables as columns: rows in and out, and checks of their bytes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from windlass.layout.columns import Columns, column, decode_tables, encode_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Points(Columns):
    place: npt.NDArray[np.int64] = column("<i8", 2)
    kind: npt.NDArray[np.uint8] = column("u1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Points):
    name: npt.NDArray[np.int32] = column("<i4")


def points(*rows: tuple[int, int, int]) -> Points:
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Points(place=table[:, :2], kind=table[:, 2].astype(np.uint8))


def rows(table: Points) -> list[list[int]]:
    found: list[list[int]] = np.concatenate([table.place, table.kind[:, None]], axis=1).tolist()
    return found


def test_rows_are_joined_selected_and_filled_in() -> None:
    joined = Points.join([points((1, 2, 3)), points(), points((4, 5, 6), (7, 8, 9))])
    assert len(joined) == 3
    assert rows(joined.select(np.array([2, 0]))) == [[7, 8, 9], [1, 2, 3]]
    target = Points.empty(3)
    target.fill(0, points((0, 0, 0)))
    target.fill(1, joined.select(slice(1, 3)))
    assert rows(target) == [[0, 0, 0], [4, 5, 6], [7, 8, 9]]
    assert len(Points.join([])) == 0


def test_a_table_with_more_columns_joins_to_one_with_fewer() -> None:
    named = Named(**points((1, 2, 3)).columns(), name=np.array([7], np.int32))
    assert rows(Points.join([named, points((4, 5, 6))])) == [[1, 2, 3], [4, 5, 6]]
    assert list(Named.empty(0).columns()) == ["place", "kind", "name"]


def test_a_column_is_encoded_little_endian_and_row_major() -> None:
    table = points((1, 2, 3), (4, 5, 6))
    turned = Points(place=np.asfortranarray(table.place).astype(">i8"), kind=table.kind)
    assert encode_tables(turned) == encode_tables(table)
    sent = msgspec.msgpack.decode(encode_tables(table))
    assert sent["kind"] == b"\x03\x06"
    assert sent["place"] == b"".join(v.to_bytes(8, "little") for v in (1, 2, 4, 5))
    again = decode_tables(msgspec.msgpack.encode({**sent, "other": b"?"}), Points)
    assert rows(again) == rows(table)
    assert not again.place.flags.writeable


def test_bytes_that_are_not_a_valid_table_are_refused() -> None:
    good = msgspec.msgpack.decode(encode_tables(points((1, 2, 3))))
    with pytest.raises(msgspec.ValidationError, match="kind"):
        decode_tables(msgspec.msgpack.encode({"place": good["place"]}), Points)
    wrong = (good["place"][:-1], good["place"][:8], 2 * good["place"])
    for place in wrong:
        with pytest.raises(msgspec.ValidationError, match=r"buffer size|reshape|equal lengths"):
            decode_tables(msgspec.msgpack.encode({**good, "place": place}), Points)
    with pytest.raises(ValueError, match=r"equal lengths, got \{'place': 1, 'kind': 0\}"):
        Points(place=np.zeros((1, 2), np.int64), kind=np.zeros(0, np.uint8))
