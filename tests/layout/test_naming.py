"""Naming tables: the contents of Megatron-core parameters, without Megatron."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from windlass.errors import ConfigError, ManifestError, UnsupportedLayout
from windlass.layout.naming.patterns import NUMBER, as_argument, renaming, said
from windlass.layout.naming.place import Coords, Geometry, Placed, place
from windlass.layout.naming.rules import Cut, Rule
from windlass.layout.naming.tables import FAMILIES

GEOMETRY = Geometry(
    num_query_groups=2, queries_per_group=3, head_dim=4, vocab_size=21, hidden_size=6, num_experts=4
)


def gathered(parts: list[tuple[Placed, npt.NDArray[np.int64]]]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the tensors of parameters, put together by address arithmetic; -1 where no shard is."""
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
    with pytest.raises(
        ManifestError, match=r"must have all rows of tensor .*, or 1/2 of the rows, got 5 rows"
    ):
        place(family, name, (5, 6), geometry, Coords(tp=(1, 2)))


def test_the_refusal_of_an_unknown_name_gives_a_working_rule() -> None:
    name = "decoder.layers.7.mlp.experts.linear_fc3.weight2"
    with pytest.raises(UnsupportedLayout) as caught:
        place(FAMILIES.find("qwen3_moe"), name, (2, 6), GEOMETRY, Coords(ep=(1, 2)))
    pattern = "decoder.layers.{layer}.mlp.experts.linear_fc3.weight{expert}"
    assert pattern in str(caught.value)
    rule = Rule(pattern, ("model.layers.{layer}.extra.{expert}",), Cut.COLUMN)
    family = FAMILIES.find("qwen3_moe").extended(rule)
    with pytest.raises(ManifestError, match="expert number must be < 2"):
        place(family, name, (2, 6), GEOMETRY, Coords(ep=(1, 2)))
    shard = place(family, name, (2, 6), GEOMETRY, Coords()).shards[0]
    assert shard.tensor == "model.layers.7.extra.2"


def test_shapes_that_contradict_the_model_are_refused() -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    with pytest.raises(ManifestError, match=r"must have 1/1 of 40 rows .*, got 20"):
        place(FAMILIES.find("llama"), name, (20, 6), GEOMETRY, Coords())
    with pytest.raises(ConfigError, match=r"must be one of .*llama"):
        FAMILIES.find("gpt2")


def test_many_names_are_shortened_to_patterns() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.w1" for i in range(4) for e in range(12)]
    assert said([*names, "lm_head.weight"]) == (
        "'lm_head.weight', 48 of 'model.layers.*.mlp.experts.*.w1'"
    )
    assert said(f"{letter}.{i}" for letter in "abcdefgh" for i in range(2)).endswith("and 4 more")


def proposed(words: str) -> Callable[[str], str] | None:
    """Return the function that an advice names, or None."""
    line = words.partition("`name_map=")[2].partition("`")[0]
    return eval(line) if line.startswith("lambda") else None


@pytest.mark.parametrize(
    ("wanted", "held"),
    [
        ("model.language_model.layers.{}.up.weight", "model.layers.{}.up.weight"),
        ("layers.{}.up.weight", "model.layers.{}.up.weight"),
        ("transformer.h.{}.up.weight", "h.{}.up.weight"),
        ("transformer.h.{}.up.weight", "module.h.{}.up.weight"),
    ],
)
def test_the_proposed_name_map_joins_both_sides(wanted: str, held: str) -> None:
    missing = {wanted.format(layer): (4, 4) for layer in range(3)}
    there = {held.format(layer): (4, 4) for layer in range(3)} | {"other": (9,)}
    words = renaming(missing, there)
    assert f"3 of {NUMBER.sub('*', held.format(0))!r}" in words
    name_map = proposed(words)
    assert name_map is not None
    assert all(name_map(held.format(layer)) == wanted.format(layer) for layer in range(3))
    assert name_map("other") == "other"


def test_change_of_the_last_part_of_all_names_is_proposed() -> None:
    parts = ("q_proj", "k_proj", "v_proj")
    words = renaming(
        {f"layers.{i}.{part}.weight": (4, 4) for i in range(2) for part in parts},
        {f"layers.{i}.{part}.kernel": (4, 4) for i in range(2) for part in parts},
    )
    name_map = proposed(words)
    assert name_map is not None
    assert name_map("layers.1.k_proj.kernel") == "layers.1.k_proj.weight"


@pytest.mark.parametrize(
    ("wanted", "held"),
    [
        (["mlp.gate_proj", "mlp.up_proj"], ["mlp.w_in", "mlp.w_in_gate"]),
        (["q_proj", "o_proj"], ["q_out", "k_query"]),
        (["q_proj", "k_proj", "v_proj", "o_proj"], ["wq", "wk", "wv", "wo"]),
        (["q_proj", "k_proj"], ["q_proj_x", "k_proj_y"]),
        (["lm_head"], ["tok_embeddings"]),
        (["mlp.gate_proj"], ["mlp.w3"]),
        (["input_layernorm"], ["ln_2"]),
        (["block_sparse_moe.gate"], ["mlp.gate"]),
        (["model.norm"], ["visual.norm"]),
    ],
)
@pytest.mark.parametrize("layer", ["", "model.layers.0.", "model.layers.1."])
@pytest.mark.parametrize("leaf", ["", ".weight"])
def test_similar_names_are_never_paired(
    wanted: list[str], held: list[str], layer: str, leaf: str
) -> None:
    words = renaming(
        {f"{layer}{name}{leaf}": (4, 4) for name in wanted},
        {f"{layer}{name}{leaf}": (4, 4) for name in held},
    )
    assert proposed(words) is None
    assert all(repr(f"{layer}{name}{leaf}") in words for name in held)


def test_advice_is_never_wrong_for_random_bijections() -> None:
    """Each side has random names of one shape; the truth pairs them at random, or by one change of
    all prefixes."""
    draw = random.Random(7)
    words = ("a", "b", "mlp", "norm", "weight", "q", "k", "proj", "0", "1")
    num_proposed = 0
    for _ in range(3000):
        names = {
            ".".join(draw.choices(words, k=draw.randint(1, 4)))
            for _ in range(2 * draw.randint(1, 6))
        }
        wanted = sorted(names)
        if by_prefix := draw.random() < 0.3:
            old, new = draw.sample(("x.", "y.z.", "w.", ""), 2)
            truth = {old + name: new + name for name in wanted}
        else:
            wanted, held = wanted[: len(wanted) // 2], wanted[len(wanted) // 2 :]
            held = draw.sample(held, len(held))[: len(wanted)]
            truth = dict(zip(held, wanted, strict=True))
        there = dict.fromkeys(truth, (4, 4))
        if truth.keys() & set(truth.values()) or not truth:
            continue
        name_map = proposed(renaming(dict.fromkeys(truth.values(), (4, 4)), there))
        if name_map is None:
            continue
        num_proposed += by_prefix
        assert {name: name_map(name) for name in there} == truth
    assert num_proposed > 100


def test_change_that_another_change_contradicts_is_not_proposed() -> None:
    missing = {"model.layers.0.up.weight": (4,), "model.norm.weight": (4,)}
    towers = {
        f"{tower}.{name.removeprefix('model.')}": shape
        for tower in ("text", "vision")
        for name, shape in missing.items()
    }
    assert proposed(renaming(missing, towers)) is None
    assert proposed(renaming(missing, {n: s for n, s in towers.items() if "text" in n})) is not None


def test_change_that_breaks_names_which_match_is_not_proposed() -> None:
    missing, there = {"model.x.up.weight": (4,)}, {"x.up.weight": (4,)}
    assert proposed(renaming(missing, there)) is not None
    assert proposed(renaming(missing, there, {"x.down.weight"})) is None


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", "PEFT.* merge the adapters"),
        ("model.layers.0.q_proj.base_layer.weight", "PEFT"),
        ("model.layers.0.q_proj.lora_A.default.weight", "adapter_names"),
        ("lm_head.modules_to_save.default.weight", "PEFT"),
        ("lm_head.original_module.weight", "PEFT"),
        ("prompt_encoder.default.embedding.weight", "prompt tuning cannot be served"),
        ("layers.0.q_proj.parametrizations.weight.original0", "remove_parametrizations"),
        ("layers.0.q_proj.weight_g", "weight norm"),
        ("layers.0.q_proj.weight_orig", "pruning"),
        ("layers.0.q_proj.weight.absmax", "bitsandbytes"),
        ("layers.0.q_proj.weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("layers.0.q_proj.SCB", "bitsandbytes"),
        ("_orig_mod.layers.0.q_proj.weight", "torch.compile"),
        ("_fsdp_wrapped_module.layers.0.q_proj.weight", "FSDP1.*fully_shard"),
        ("_flat_param", "FSDP1"),
    ],
)
def test_wrappers_are_recognised_by_their_names(held: str, says: str) -> None:
    words = renaming({"layers.0.q_proj.weight": (4, 4)}, {held: (4, 4)})
    assert re.search(says, words)
    assert proposed(words) is None


def test_advice_is_empty_when_no_unmatched_names_are_left() -> None:
    assert renaming({"model.norm.weight": (4,)}, {}) == ""


@pytest.mark.parametrize(
    ("num_names", "ends"),
    [
        (1, "('part_a.w',)"),
        (6, "'part_f.w',)"),
        (7, "'part_f.w',), and 1 more pattern"),
        (9, "), and 3 more patterns"),
    ],
)
def test_an_argument_of_patterns_counts_the_omitted_patterns(num_names: int, ends: str) -> None:
    assert as_argument([f"part_{letter}.w" for letter in "abcdefghi"[:num_names]]).endswith(ends)
