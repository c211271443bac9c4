"""A plan from the network either decodes or raises a named error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from windlass.errors import ProtocolError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer


def payload() -> dict[str, Any]:
    sides = []
    for worker, role in (("t", Role.TRAINER), ("e", Role.ENGINE)):
        builder = ManifestBuilder(worker, role)
        builder.add_parameter("p", nbytes=64, dtype=DType.FLOAT32)
        builder.add_shard("w", (4, 4), Box.full((4, 4)), "p")
        sides.append(builder.build())
    decoded: dict[str, Any] = msgspec.msgpack.decode(plan_transfer(sides[:1], sides[1:]).encode())
    return decoded


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"not a plan"])
def test_bytes_that_are_not_a_plan_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        TransferPlan.decode(data)


@pytest.mark.parametrize("column", ["src", "mode", "sizes", "staging_offset"])
def test_a_column_that_is_cut_or_absent_is_refused(column: str) -> None:
    whole = payload()
    assert len(TransferPlan.decode(msgspec.msgpack.encode(whole)).ops) == 1
    columns = whole["ops"]
    for cut in (columns[column][:-1], b""):
        changed = whole | {"ops": columns | {column: cut}}
        with pytest.raises(ProtocolError):
            TransferPlan.decode(msgspec.msgpack.encode(changed))
    absent = {name: data for name, data in columns.items() if name != column}
    with pytest.raises(ProtocolError):
        TransferPlan.decode(msgspec.msgpack.encode(whole | {"ops": absent}))


def test_a_plan_of_another_schema_is_refused() -> None:
    with pytest.raises(ProtocolError, match="schema_version must be 5, got 6"):
        TransferPlan.decode(msgspec.msgpack.encode(payload() | {"schema_version": 6}))
    unversioned = {name: value for name, value in payload().items() if name != "schema_version"}
    with pytest.raises(ProtocolError, match=r"plan: .* missing required field `schema_version`"):
        TransferPlan.decode(msgspec.msgpack.encode(unversioned))
