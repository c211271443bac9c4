"""Topologies: true sizes, whole models on both sides, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ground_truth import distinct_values, fill
from reference_executor import execute

from tools.plan.families import ModelSpec, modules
from tools.plan.mesh import MegatronMesh, even
from tools.plan.reports import plan_with_reports
from tools.plan.synthesis import engine_manifests, trainer_manifests
from tools.plan.topology import EngineSpec, Fabric, Topology, TrainerSpec, parse_topology
from windlass.errors import ConfigError
from windlass.layout.box import chunk
from windlass.planning.planner import PlanPolicy

TOPOLOGIES = Path(__file__).parents[2] / "examples" / "topologies"

QWEN = ModelSpec(
    family="qwen3_moe",
    num_hidden_layers=3,
    hidden_size=16,
    vocab_size=70,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=4,
    n_routed_experts=4,
    moe_intermediate_size=8,
)
DENSE = ModelSpec(
    family="qwen3",
    num_hidden_layers=2,
    hidden_size=16,
    vocab_size=70,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=24,
    tie_word_embeddings=True,
)
MLA = ModelSpec(
    family="deepseek_v3",
    num_hidden_layers=2,
    hidden_size=16,
    vocab_size=64,
    num_attention_heads=8,
    intermediate_size=24,
    n_routed_experts=8,
    moe_intermediate_size=8,
    first_k_dense_replace=1,
    n_shared_experts=1,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
)


def topology(model: ModelSpec, trainer: dict[str, object], engine: dict[str, object]) -> Topology:
    # 4-byte elements, so that the ground truth can number them.
    return Topology(
        name="test",
        model=model,
        trainer=msgspec.convert({"dtype": "float32", **trainer}, TrainerSpec),
        engine=msgspec.convert({"dtype": "float32", **engine}, EngineSpec),
        fabric=Fabric(nic_gbytes_per_s=50.0),
    )


MEGATRON = {"kind": "megatron", "world_size": 8}
FSDP = {"kind": "fsdp", "world_size": 6}


@pytest.mark.parametrize(
    ("model", "trainer", "engine"),
    [
        (QWEN, {**MEGATRON, "tp": 2, "pp": 2, "ep": 4}, {"tp": 8, "ep": 4, "replicas": 2}),
        (QWEN, {**MEGATRON, "tp": 4, "ep": 2, "etp": 2, "cp": 2}, {"tp": 2, "attention_dp": 2}),
        (QWEN, FSDP, {"tp": 4, "ep": 2}),
        (DENSE, {**MEGATRON, "tp": 2}, {"tp": 4, "vocab_multiple": 64}),
        (DENSE, {**FSDP, "replicas": 2}, {"tp": 8, "replicas": 2}),
        (MLA, {**MEGATRON, "tp": 2, "pp": 2, "ep": 2}, {"tp": 8, "ep": 8, "attention_dp": 4}),
        (MLA, FSDP, {"tp": 4, "ep": 4}),
    ],
)
def test_every_byte_of_a_small_model_arrives(
    model: ModelSpec, trainer: dict[str, object], engine: dict[str, object]
) -> None:
    described = topology(model, trainer, engine)
    sources, destinations = trainer_manifests(described), engine_manifests(described)
    policy = PlanPolicy(direct_min_run_bytes=64, min_split_bytes=256)
    plan = plan_with_reports(sources, destinations, policy).plan
    values = distinct_values((*sources, *destinations))
    held = {m.worker: fill(m, values, background=0) for m in sources}
    buffers = {m.worker: [np.zeros(p.nbytes, np.uint8) for p in m.parameters] for m in destinations}
    execute(plan, held, buffers)
    for manifest in destinations:
        for got, want in zip(buffers[manifest.worker], fill(manifest, values, 0), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("kimi-k2-256-to-128", 1026.4),
        ("deepseek-v3-128-to-128", 671.03),
        ("qwen3-235b-128-to-32", 235.09),
        ("qwen3-30b-a3b-4-to-4", 30.53),
    ],
)
def test_shipped_topologies_have_the_published_number_of_parameters(
    name: str, billions: float
) -> None:
    described = parse_topology((TOPOLOGIES / f"{name}.toml").read_text())
    assert described.name == name
    numel = sum(
        int(np.prod(spec.shape)) for module in modules(described.model) for spec in module.tensors
    )
    assert numel / 1e9 == pytest.approx(billions, rel=1e-4)


def test_tensor_names_are_unique() -> None:
    for model in (QWEN, DENSE, MLA):
        names = [spec.name for module in modules(model) for spec in module.tensors]
        assert len(names) == len(set(names))


def test_a_tied_model_has_an_alias_and_no_head() -> None:
    described = topology(DENSE, {**MEGATRON, "pp": 2}, {"tp": 1})
    (engine,) = engine_manifests(described)
    assert dict(engine.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    with_embedding = [m for m in trainer_manifests(described) if m.aliases]
    assert [m.worker for m in with_embedding] == [f"trainer/{i}" for i in range(4)]


def test_more_ranks_than_key_value_heads_keep_copies() -> None:
    manifests = engine_manifests(topology(QWEN, MEGATRON, {"tp": 8}))
    heads = [
        next(s.box for s in m.shards() if s.tensor.endswith("layers.0.self_attn.k_proj.weight"))
        for m in manifests
    ]
    assert [box.offsets[0] // 4 for box in heads] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {box.sizes for box in heads} == {(4, 16)}


def test_a_padded_vocabulary_holds_only_real_rows() -> None:
    manifests = engine_manifests(topology(QWEN, MEGATRON, {"tp": 4}))
    rows = [
        sum(s.box.sizes[0] for s in m.shards() if s.tensor == "lm_head.weight") for m in manifests
    ]
    # 70 rows are padded to 128.
    assert rows == [32, 32, 6, 0]
    padding = [m.parameters[-1].padding_nbytes // (16 * 4) for m in manifests]
    assert padding == [0, 0, 26, 32]


def test_megatron_coordinates_cover_each_mesh_once() -> None:
    mesh = MegatronMesh(world_size=32, tp=2, cp=2, pp=2, ep=4, etp=2)
    at = [mesh.coords(rank) for rank in range(32)]
    assert len({(c.tp, c.cp, c.dp, c.pp) for c in at}) == 32
    assert len({(c.etp, c.ep, c.edp, c.pp) for c in at}) == 32
    assert [c.tp for c in at[:4]] == [0, 1, 0, 1]
    assert {c.pp for c in at[:16]} == {0}


def test_cuts_tile_their_dim() -> None:
    assert [chunk(10, 4, i) for i in range(4)] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert [chunk(3, 4, i) for i in range(4)] == [(0, 1), (1, 1), (2, 1), (3, 0)]
    assert [even("x", 12, 3, i) for i in range(3)] == [(0, 4), (4, 4), (8, 4)]
    with pytest.raises(ConfigError, match="x: 10 must be divisible by 4"):
        even("x", 10, 4, 0)


@pytest.mark.parametrize(
    ("trainer", "engine", "message"),
    [
        ({**MEGATRON, "tp": 3}, {}, "must be a multiple of tp"),
        ({**MEGATRON, "ep": 16}, {}, "must be a multiple of etp"),
        ({**MEGATRON, "pp": 8}, {}, "pp 8 must be at most num_hidden_layers 3"),
        ({**MEGATRON, "tp": 8}, {}, "kv heads: 4 must be divisible by 8"),
        ({**FSDP, "replicas": 4}, {}, "must be a multiple of replicas 4"),
        (FSDP, {"tp": 4, "ep": 3}, "must be a multiple of ep = 3"),
        (FSDP, {"tp": 4, "attention_dp": 8}, "must be a multiple of attention_dp = 8"),
        (FSDP, {"tp": 16}, "must be divisible by 16"),
    ],
)
def test_parallelism_that_does_not_fit_is_refused(
    trainer: dict[str, object], engine: dict[str, object], message: str
) -> None:
    described = topology(QWEN, trainer, engine)
    with pytest.raises(ConfigError, match=message):
        plan_with_reports(trainer_manifests(described), engine_manifests(described))


def test_models_that_are_unknown_or_incomplete_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"family must be one of .*, got 'gpt2'"):
        list(modules(msgspec.structs.replace(QWEN, family="gpt2")))
    with pytest.raises(ConfigError, match=r"model\.head_dim must be >= 1"):
        list(modules(msgspec.structs.replace(QWEN, head_dim=0)))


TEXT = (TOPOLOGIES / "qwen3-30b-a3b-4-to-4.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[model]", "[model", "topology: "),
        ('kind = "fsdp"', 'kind = "ddp"', "kind"),
        ("tp = 4", "tensor_parallel = 4", "unknown field `tensor_parallel`"),
        ("hidden_size = 2048", "", "missing required field `hidden_size`"),
        ('dtype = "bfloat16"', 'dtype = "bf16"', "bf16"),
        ("tp = 4", "tp = 0", "engine.tp must be > 0, got 0"),
        ("nic_gbytes_per_s = 50.0", "nic_gbytes_per_s = -1.0", "nic_gbytes_per_s must be > 0"),
    ],
)
def test_a_malformed_topology_is_reported_in_one_line(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError, match=message) as caught:
        parse_topology(TEXT.replace(old, new))
    assert "\n" not in str(caught.value)


def test_data_parallel_ranks_share_one_table() -> None:
    manifests = trainer_manifests(topology(DENSE, {**MEGATRON, "tp": 2}, {}))
    assert manifests[0].table is manifests[2].table
    assert replace(manifests[0], worker="x").encode() == replace(manifests[2], worker="x").encode()
