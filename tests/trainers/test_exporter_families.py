"""Manifests captured from a converter equal its exports and the naming tables, for every family, on gloo ranks.

Converters: mbridge, and mcore-bridge for the models of 2026. Transformers loads what the manifests describe.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import hf_settings
import pytest
import torch
import torch.multiprocessing as mp
import transformers
from exported_rank import Row, run, text_of
from needs import need_package
from safetensors.torch import save_file

from windlass.layout.dtypes import DType
from windlass.layout.manifest import ShardManifest
from windlass.trainers.fsdp import describe_trainer

for package in ("megatron", "mbridge", "mcore_bridge"):
    need_package(package)

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
SMALL: Mapping[str, Any] = {
    **hf_settings.SMALL,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**SPARSE, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
INDEXED = {
    **LATENT,
    "scoring_func": "sigmoid",
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 4,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def config(model_type: str, *parts: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    made = dict(SMALL)
    for part in parts:
        made |= part
    return {**made, **others, "model_type": model_type}


def with_vision(model_type: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "text_config": config(f"{model_type}_text", *parts),
        "vision_config": VISION,
        "tie_word_embeddings": False,
    }


KNOWN = {
    one["model_type"]: one
    for one in (
        config("llama"),
        config("qwen2"),
        config("qwen3"),
        config("qwen3_moe", SPARSE, norm_topk_prob=True),
        config("mixtral", LOCAL),
        config("glm4_moe", ROUTED, use_qk_norm=True, attention_bias=True),
        config("deepseek_v3", LATENT),
    )
}
"""Models that mbridge and the naming tables know."""
SPARSE_MODELS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
NEW = {
    one["model_type"]: one
    for one in (
        config("deepseek_v32", INDEXED),
        config("dots1", ROUTED),
        config("glm4_moe_lite", LATENT),
        config("glm_moe_dsa", INDEXED),
        config(
            "gpt_oss",
            LOCAL,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        config(
            "hy_v3",
            SPARSE,
            num_shared_experts=1,
            first_k_dense_replace=1,
            qk_norm=True,
            moe_router_use_sigmoid=True,
        ),
        config("minimax_m2", LOCAL, use_qk_norm=True, scoring_func="sigmoid"),
        config("olmoe", num_experts=4, num_experts_per_tok=2, num_key_value_heads=4),
        config("qwen3_next", SHARED, LINEAR),
        with_vision("qwen3_5", LINEAR),
        with_vision("qwen3_5_moe", LINEAR, SHARED),
    )
}
"""Models that mcore-bridge knows and no naming table."""
ODD = {**KNOWN["qwen3"], "vocab_size": 60}
TIED_STAGES = {**KNOWN["qwen3"], "num_hidden_layers": 4, "tie_word_embeddings": True}


def split(name: str, **layout: int) -> Row:
    """Return the row of a model that tensor-parallel ranks split.

    mbridge 0.15.1 exports the down-projections of latent attention, which every tensor-parallel rank holds whole, once
    per rank.
    """
    bridge = "mcore_bridge" if name == "deepseek_v3" else "mbridge"
    return Row(bridge, KNOWN[name], name, **layout)  # type: ignore[arg-type]


ONE_RANK = [Row("mcore_bridge", config) for config in NEW.values()]
TWO_RANKS = {
    "tp2": [
        *(split(name, tp=2) for name in KNOWN),
        Row("mbridge", config("qwen2_moe", SHARED), tp=2),
        # mbridge leaves out the padding, and mcore-bridge exports it.
        Row("mbridge", ODD, "qwen3", tp=2, padded_to=64, falls_back=True),
        Row("mcore_bridge", ODD, "qwen3", tp=2, padded_to=64),
    ],
    "pp2": [
        *(Row("mbridge", config, name, pp=2) for name, config in KNOWN.items()),
        Row("mbridge", TIED_STAGES, "qwen3", pp=2, vpp=2),
    ],
    "ep2": [
        *(Row("mbridge", KNOWN[name], name, ep=2) for name in SPARSE_MODELS),
        Row("mbridge", KNOWN["qwen3"], "qwen3", cp=2),
    ],
    "new": [
        *(Row("mcore_bridge", config, tp=2) for name, config in NEW.items() if name != "gpt_oss"),
        # Megatron-core has no biases in experts that tensor-parallel ranks split.
        Row("mcore_bridge", NEW["gpt_oss"], tp=2, ep=2, etp=1),
    ],
}
FOUR_RANKS = [split(name, tp=2, pp=2) for name in KNOWN]


def launch(rows: list[Row], num_ranks: int, folder: Path) -> Path:
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        run, (num_ranks, rows, str(folder)), nprocs=num_ranks, start_method="forkserver"
    )
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(ONE_RANK, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that runs the rows of a group once."""

    @functools.cache
    def ran(group: str) -> Path:
        return launch(TWO_RANKS[group], 2, tmp_path_factory.mktemp(group))

    return ran


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(FOUR_RANKS, 4, tmp_path_factory.mktemp("four"))


def described(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the checkpoint that manifests and the memory of their parameters describe."""
    found: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    for state in states:
        manifest = ShardManifest.decode(state["manifest"])
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        names = {parameter.name: at for at, parameter in enumerate(manifest.parameters)}
        for shard in manifest.shards():
            index = names[shard.parameter]
            dtype = TORCH[manifest.parameters[index].dtype]
            memory = torch.frombuffer(bytearray(state["memory"][index]), dtype=dtype)
            strides = [step // dtype.itemsize for step in shard.strides_bytes]
            offset = shard.offset_bytes // dtype.itemsize
            values = memory.as_strided(shard.box.sizes, strides, offset)
            shape = shapes[shard.tensor]
            whole = found.setdefault(shard.tensor, torch.zeros(shape, dtype=dtype))
            filled = known.setdefault(shard.tensor, torch.zeros(shape, dtype=torch.bool))
            edges = zip(shard.box.offsets, shard.box.ends, strict=True)
            at = tuple(slice(begin, end) for begin, end in edges)
            same = ~filled[at] | (whole[at] == values)
            assert same.all(), f"{shard.tensor}: replicas must be equal"
            whole[at], filled[at] = values, True
    for name, filled in known.items():
        assert filled.all(), f"{name}: every element must be on a rank"
    return found


def elements(data: bytes) -> dict[tuple[str, tuple[int, ...]], set[tuple[str, int]]]:
    """Return every element of every tensor on this rank, and its places: a parameter and a byte offset."""
    found: dict[tuple[str, tuple[int, ...]], set[tuple[str, int]]] = {}
    for shard in ShardManifest.decode(data).shards():
        for index in (
            torch.cartesian_prod(*map(torch.arange, shard.box.sizes))
            .reshape(-1, len(shard.box.sizes))
            .tolist()
        ):
            at = tuple(i + o for i, o in zip(index, shard.box.offsets, strict=True))
            place = shard.offset_bytes + sum(
                i * step for i, step in zip(index, shard.strides_bytes, strict=True)
            )
            found.setdefault((shard.tensor, at), set()).add((shard.parameter, place))
    return found


def check(row: Row, num_ranks: int, folder: Path) -> None:
    states = [torch.load(folder / f"{row}-{rank}.pt") for rank in range(num_ranks)]
    for state in states:
        assert "error" not in state, state["error"]
    have = described(states)
    want, vocab_size = states[0]["exported"], text_of(row.config)["vocab_size"]
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        num_rows = vocab_size if name in VOCABULARY else len(tensor)
        assert torch.equal(have[name], tensor[:num_rows]), name
    for state in states if row.family else ():
        captured, table = (
            ShardManifest.decode(state["manifest"]),
            ShardManifest.decode(state["table"]),
        )
        assert elements(state["manifest"]) == elements(state["table"])
        assert captured.parameters == table.parameters
        assert sorted(captured.tensors, key=str) == sorted(table.tensors, key=str)
        assert captured.aliases == table.aliases


@pytest.mark.parametrize("row", ONE_RANK, ids=str)
def test_transformers_loads_what_one_rank_describes(row: Row, one_rank: Path) -> None:
    check(row, 1, one_rank)
    folder = one_rank / str(row)
    folder.mkdir()
    have = described([torch.load(one_rank / f"{row}-0.pt")])
    save_file(
        {n: t.contiguous() for n, t in have.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(row.config))
    auto = (
        transformers.AutoModelForImageTextToText
        if "text_config" in row.config
        else transformers.AutoModelForCausalLM
    )
    model, loading = auto.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(loading.values()), loading
    del model


@pytest.mark.parametrize(
    ("group", "row"),
    [(group, row) for group, rows in TWO_RANKS.items() for row in rows],
    ids=lambda value: str(value),
)
def test_two_ranks_describe_what_the_converter_exports(
    group: str, row: Row, two_ranks: Callable[[str], Path]
) -> None:
    check(row, 2, two_ranks(group))


@pytest.mark.parametrize("row", FOUR_RANKS, ids=str)
def test_four_ranks_describe_what_the_converter_exports(row: Row, four_ranks: Path) -> None:
    check(row, 4, four_ranks)


@pytest.mark.parametrize("config", [*KNOWN.values(), *NEW.values()], ids=lambda c: c["model_type"])
def test_a_transformers_model_gives_the_same_by_its_save_conversion(config: dict[str, Any]) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    made = hf_settings.transformers_config(config)
    is_text = "text_config" not in config
    auto = (
        transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
    )
    model = auto.from_config(made).to(torch.bfloat16)

    def export(models: list[torch.nn.Module]) -> Iterable[tuple[str, torch.Tensor]]:
        saved: dict[str, torch.Tensor] = revert_weight_conversion(models[0], models[0].state_dict())
        return saved.items()

    captured = describe_trainer(model, group="trainer", name_map=None, exporter=export).manifest
    watched = describe_trainer(model, group="trainer", name_map=None).manifest
    assert captured.parameters == watched.parameters
    assert elements(captured.encode()) == elements(watched.encode())
