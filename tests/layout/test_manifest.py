"""Manifests: refusals, and equality after a trip over the wire."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from strategies import Fleet, fleets

from windlass.errors import ManifestError, ProtocolError, UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest, contiguous_strides


def one(role: Role = Role.TRAINER, nbytes: int = 32) -> ManifestBuilder:
    builder = ManifestBuilder("rank/0", role)
    builder.add_parameter("p", nbytes=nbytes, dtype=DType.FLOAT32)
    return builder


@settings(max_examples=50, deadline=None)
@given(fleets())
def test_a_manifest_survives_encoding(fleet: Fleet) -> None:
    for manifest in (*fleet.sources, *fleet.destinations):
        again = ShardManifest.decode(manifest.encode())
        assert list(again.shards()) == list(manifest.shards())
        assert again.aliases == manifest.aliases
        assert again.parameters == manifest.parameters
        assert again.digest() == manifest.digest()


def test_different_layouts_have_different_digests() -> None:
    digests = set()
    for offset in (0, 16):
        builder = one()
        builder.add_shard("w", (4, 4), Box((0, 0), (1, 4)), "p", offset_bytes=offset)
        digests.add(builder.build().digest())
    assert len(digests) == 2


def test_contiguous_strides_are_row_major() -> None:
    assert contiguous_strides((2, 3, 5), 2) == (30, 10, 2)
    assert contiguous_strides((), 4) == ()


def test_a_box_outside_its_tensor_is_refused() -> None:
    builder = one()
    builder.add_shard("w", (4, 4), Box((3, 0), (2, 4)), "p")
    with pytest.raises(ManifestError, match=r"'w'.*must be inside shape \(4, 4\)"):
        builder.build()


@pytest.mark.parametrize(("offset", "strides"), [(4, None), (0, (20, 4)), (0, (-16, 4))])
def test_a_shard_that_leaves_its_parameter_is_refused(
    offset: int, strides: tuple[int, ...] | None
) -> None:
    builder = one()
    builder.add_shard(
        "w", (4, 4), Box((0, 0), (2, 4)), "p", offset_bytes=offset, strides_bytes=strides
    )
    with pytest.raises(ManifestError, match="occupies bytes"):
        builder.build()


def test_an_engine_parameter_must_be_described_whole() -> None:
    builder = one(Role.ENGINE, nbytes=48)
    builder.add_shard("w", (4, 4), Box((0, 0), (2, 4)), "p")
    with pytest.raises(ManifestError, match="has 48 bytes, but its shards and padding describe 32"):
        builder.build()


def test_contradictions_are_refused() -> None:
    builder = one()
    with pytest.raises(ManifestError, match="declared twice"):
        builder.add_parameter("p", nbytes=4, dtype=DType.INT8)
    with pytest.raises(ManifestError, match="undeclared parameter 'x'"):
        builder.add_shard("w", (4,), Box((0,), (4,)), "x")
    builder.add_shard("w", (4,), Box((0,), (4,)), "p")
    with pytest.raises(ManifestError, match="in one shard and"):
        builder.add_shard("w", (5,), Box((0,), (4,)), "p")
    with pytest.raises(UnsupportedLayout, match="at most 5 dims"):
        builder.add_shard("v", (1,) * 6, Box.full((1,) * 6), "p")
    builder.add_alias("lm_head", "nowhere")
    with pytest.raises(ManifestError, match="unknown tensor 'nowhere'"):
        builder.build()


def test_an_empty_box_is_dropped() -> None:
    builder = one()
    builder.add_shard("w", (4, 4), Box((4, 0), (0, 4)), "p")
    assert len(builder.build().table) == 0


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"schema_version": 1})])
def test_bytes_that_are_not_a_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        ShardManifest.decode(data)


def test_a_manifest_of_another_schema_or_with_cut_columns_is_refused() -> None:
    builder = one()
    builder.add_shard("w", (4,), Box((0,), (4,)), "p")
    payload = msgspec.msgpack.decode(builder.build().encode())
    table = payload["table"]

    def with_column(name: str, data: bytes) -> bytes:
        return msgspec.msgpack.encode(payload | {"table": table | {name: data}})

    with pytest.raises(ProtocolError, match="schema_version must be 4, got 99"):
        ShardManifest.decode(msgspec.msgpack.encode(payload | {"schema_version": 99}))
    unversioned = {name: value for name, value in payload.items() if name != "schema_version"}
    with pytest.raises(
        ProtocolError, match=r"manifest: .* missing required field `schema_version`"
    ):
        ShardManifest.decode(msgspec.msgpack.encode(unversioned))
    with pytest.raises((ProtocolError, ManifestError)):
        ShardManifest.decode(with_column("sizes", table["sizes"][:-8]))
    with pytest.raises(ManifestError, match="index of a shard must be in"):
        ShardManifest.decode(with_column("tensor", (7).to_bytes(4, "little")))
