"""Naming tables: what lies in a Megatron-core parameter, without Megatron."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from windlass.errors import ConfigError, ManifestError, UnsupportedLayout
from windlass.layout.naming.patterns import NUMBER, renaming, said
from windlass.layout.naming.place import Coords, Geometry, Placed, place
from windlass.layout.naming.rules import Cut, Rule
from windlass.layout.naming.tables import FAMILIES

GEOMETRY = Geometry(
    num_query_groups=2, queries_per_group=3, head_dim=4, vocab_size=21, hidden_size=6, num_experts=4
)


def gathered(parts: list[tuple[Placed, npt.NDArray[np.int64]]]) -> dict[str, npt.NDArray[np.int64]]:
    """Tensors put together from parameters, by address arithmetic; -1 where nothing was said."""
    found: dict[str, npt.NDArray[np.int64]] = {}
    for placed, memory in parts:
        for shard in placed.shards:
            whole = found.setdefault(shard.tensor, np.full(shard.global_shape, -1, np.int64))
            view = np.lib.stride_tricks.as_strided(
                memory.reshape(-1)[shard.offset :], shard.box.sizes, [s * 8 for s in shard.strides]
            )
            whole[tuple(slice(o, e) for o, e in zip(shard.box.offsets, shard.box.ends, strict=True))] = view  # fmt: skip
    return found


def distinct(*shape: int) -> npt.NDArray[np.int64]:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tail", [(6,), ()])
def test_interleaved_qkv_is_found_even_when_ranks_cut_through_groups(
    tp: int, tail: tuple[int, ...]
) -> None:
    q, k, v = distinct(24, *tail), distinct(8, *tail) + 1000, distinct(8, *tail) + 2000
    rows = np.concatenate([x.reshape(2, -1, *tail) for x in (q, k, v)], axis=1).reshape(40, *tail)
    name = f"decoder.layers.5.self_attention.linear_qkv.{'weight' if tail else 'bias'}"
    parts = []
    for rank, local in enumerate(np.split(rows, tp)):
        parts.append((place(FAMILIES.find("qwen2"), name, local.shape, GEOMETRY, Coords(tp=(rank, tp))), local))  # fmt: skip
    found = gathered(parts)
    suffix = name.rsplit(".", 1)[1]
    for letter, want in zip("qkv", (q, k, v), strict=True):
        assert (found[f"model.layers.5.self_attn.{letter}_proj.{suffix}"] == want).all()


def test_grouped_experts_are_transposed_and_numbered_globally() -> None:
    gate, up, down = distinct(4, 10, 6), distinct(4, 10, 6) + 1000, distinct(4, 6, 10) + 2000
    parts = []
    for ep in range(2):
        for etp in range(2):
            coords = Coords(tp=(0, 1), ep=(ep, 2), etp=(etp, 2))
            experts, inner = slice(2 * ep, 2 * ep + 2), slice(5 * etp, 5 * etp + 5)
            both = np.concatenate([gate[experts, inner], up[experts, inner]], axis=1)
            weight1 = np.ascontiguousarray(both.transpose(0, 2, 1)).reshape(6, 20)
            weight2 = np.ascontiguousarray(down[experts][:, :, inner].transpose(0, 2, 1)).reshape(10, 6)  # fmt: skip
            for name, memory in (("weight1", weight1), ("weight2", weight2)):
                full_name = f"decoder.layers.0.mlp.experts.{name}"
                parts.append((place(FAMILIES.find("qwen3_moe"), full_name, memory.shape, GEOMETRY, coords), memory))  # fmt: skip
    found = gathered(parts)
    assert len(found) == 12
    for expert in range(4):
        for name, want in (("gate", gate), ("up", up), ("down", down)):
            assert (found[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"] == want[expert]).all()  # fmt: skip


def test_a_padded_vocabulary_gives_its_real_rows_and_counts_the_rest_as_padding() -> None:
    full = distinct(32, 6)
    parts, padding = [], 0
    for rank, local in enumerate(np.split(full, 4)):
        placed = place(FAMILIES.find("llama"), "output_layer.weight", (8, 6), GEOMETRY, Coords(tp=(rank, 4)))  # fmt: skip
        padding += placed.padding
        parts.append((placed, local))
    assert (gathered(parts)["lm_head.weight"] == full[:21]).all()
    assert padding == 11 * 6


def test_a_latent_projection_may_be_whole_or_cut() -> None:
    geometry = Geometry(num_query_groups=4, queries_per_group=1, head_dim=4, vocab_size=1, hidden_size=6, latent_rows=(("q_a_proj.weight", 8),))  # fmt: skip
    name, family = (
        "decoder.layers.0.self_attention.linear_q_down_proj.weight",
        FAMILIES.find("kimi_k2"),
    )
    whole = place(family, name, (8, 6), geometry, Coords(tp=(1, 2))).shards[0]
    part = place(family, name, (4, 6), geometry, Coords(tp=(1, 2))).shards[0]
    assert (whole.box.offsets, whole.box.sizes) == ((0, 0), (8, 6))
    assert (part.box.offsets, part.box.sizes) == ((4, 0), (4, 6))
    with pytest.raises(ManifestError, match="5 rows must be all or one of 2 parts"):
        place(family, name, (5, 6), geometry, Coords(tp=(1, 2)))


def test_an_unknown_name_is_refused_with_the_rule_to_add_and_that_rule_works() -> None:
    name = "decoder.layers.7.mlp.experts.linear_fc3.weight2"
    with pytest.raises(UnsupportedLayout) as caught:
        place(FAMILIES.find("qwen3_moe"), name, (2, 6), GEOMETRY, Coords(ep=(1, 2)))
    pattern = "decoder.layers.{layer}.mlp.experts.linear_fc3.weight{expert}"
    assert pattern in str(caught.value)
    rule = Rule(pattern, ("model.layers.{layer}.extra.{expert}",), Cut.COLUMN)
    family = FAMILIES.find("qwen3_moe").extended(rule)
    with pytest.raises(ManifestError, match="local expert must be < 2"):
        place(family, name, (2, 6), GEOMETRY, Coords(ep=(1, 2)))
    shard = place(family, name, (2, 6), GEOMETRY, Coords()).shards[0]
    assert shard.tensor == "model.layers.7.extra.2"


def test_shapes_that_contradict_the_model_are_refused() -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    with pytest.raises(ManifestError, match="20 rows on each of 1 ranks must be 40 rows"):
        place(FAMILIES.find("llama"), name, (20, 6), GEOMETRY, Coords())
    with pytest.raises(ConfigError, match=r"must be one of .*llama"):
        FAMILIES.find("gpt2")


def test_many_names_are_said_by_pattern() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.w1" for i in range(4) for e in range(12)]
    assert said([*names, "lm_head.weight"]) == (
        "'lm_head.weight', 48 of 'model.layers.*.mlp.experts.*.w1'"
    )
    assert said(f"{letter}.{i}" for letter in "abcdefgh" for i in range(2)).endswith("and 4 more")


@pytest.mark.parametrize(
    ("wanted", "held"),
    [
        ("model.layers.{}.block_sparse_moe.gate.weight", "model.layers.{}.mlp.gate.weight"),
        ("embed_out.weight", "lm_head.weight"),
        ("model.language_model.layers.{}.up.weight", "model.layers.{}.up.weight"),
        ("layers.{}.up.weight", "model.layers.{}.up.weight"),
        ("transformer.h.{}.up.weight", "h.{}.up.weight"),
        ("model.layers.{}.norm", "model.layers.{}.layer_norm"),
    ],
)
def test_the_line_that_joins_two_sides_does(wanted: str, held: str) -> None:
    missing = {wanted.format(layer): (4, layer + 1) for layer in range(3)}
    there = {held.format(layer): (4, layer + 1) for layer in range(3)} | {"other": (9,)}
    words = renaming(missing, there)
    assert repr(NUMBER.sub("*", next(iter(there)))) in words
    line = words.partition("`name_map=")[2].partition("`")[0]
    name_map = eval(line)
    assert {name_map(name) for name in there} >= missing.keys(), line
    assert name_map("other") == "other"


def test_nothing_is_proposed_where_nothing_is_alike() -> None:
    assert renaming({"a.weight": (4,)}, {"a.weights": (5,)}) == ""
    assert renaming({"model.norm.weight": (4,)}, {}) == ""
    several = renaming({"m.0.w1": (4,), "m.1.w1": (4,)}, {"m.0.w2": (4,)})
    assert "'m.0.w2' for 'm.0.w1'" in several
    assert "name_map" not in several, "it would not give both"
