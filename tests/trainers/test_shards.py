"""Engines get every byte of the checkpoint from real Megatron-core shards that are described in place."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from ground_truth import fill
from megatron_rank import Case, checkpoint, run
from needs import need_package
from reference_executor import execute

from tools.plan.families import ModelSpec
from tools.plan.synthesis import engine_manifests
from tools.plan.topology import EngineSpec, Fabric, Topology, TrainerSpec
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.planner import plan_transfer

need_package("megatron")

DENSE = ModelSpec(family="qwen3", num_hidden_layers=4, hidden_size=32, vocab_size=100, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48)  # fmt: skip
TIED = ModelSpec(family="qwen3", num_hidden_layers=4, hidden_size=32, vocab_size=100, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48, tie_word_embeddings=True)  # fmt: skip
ONE_GROUP = ModelSpec(family="qwen3", num_hidden_layers=1, hidden_size=32, vocab_size=100, num_attention_heads=4, num_key_value_heads=1, head_dim=8, intermediate_size=48)  # fmt: skip
MOE = ModelSpec(family="qwen3_moe", num_hidden_layers=2, hidden_size=32, vocab_size=100, num_attention_heads=4, num_key_value_heads=2, head_dim=8, n_routed_experts=4, moe_intermediate_size=16)  # fmt: skip
LATENT = ModelSpec(family="deepseek_v3", num_hidden_layers=2, hidden_size=32, vocab_size=100, num_attention_heads=4, intermediate_size=48, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, moe_intermediate_size=16, first_k_dense_replace=1, n_shared_experts=1)  # fmt: skip
LATENT_TIED = msgspec.structs.replace(LATENT, tie_word_embeddings=True)

TWO_RANKS = [
    Case("tp2", DENSE, tp=2),
    Case("tp2_fewer_groups_than_ranks", ONE_GROUP, tp=2),
    Case("pp2_tied", TIED, pp=2),
    Case("dp2_tied_in_the_buffer_of_the_distributed_optimizer", TIED, wrapped=True),
    Case("pp2_virtual2", DENSE, pp=2, vpp=2),
    Case("cp2", DENSE, cp=2),
    Case("tp2_fp32_copies_of_the_optimizer", DENSE, tp=2, main_params=True),
    Case("ep2", MOE, ep=2),
    Case("tp2_ep2", MOE, tp=2, ep=2),
    Case("tp2_etp2", MOE, tp=2, etp=2),
    Case("latent_tp2_ep2", LATENT, tp=2, ep=2),
    Case("latent_pp2", LATENT, pp=2),
    Case("latent_mtp_tp2_ep2", LATENT, tp=2, ep=2, mtp=1),
    Case("latent_mtp_pp2", LATENT, pp=2, mtp=2),
    Case("latent_mtp_pp2_tied", LATENT_TIED, pp=2, mtp=1),
]
FOUR_RANKS = [
    Case("tp2_pp2", DENSE, tp=2, pp=2),
    Case("tp2_pp2_virtual2_tied", TIED, tp=2, pp=2, vpp=2),
    Case("tp2_cp2", DENSE, tp=2, cp=2),
    Case("ep2_pp2", MOE, ep=2, pp=2),
    Case("latent_tp2_pp2_ep2", LATENT, tp=2, pp=2, ep=2),
]


def launch(world_size: int, cases: list[Case], folder: Path) -> Path:
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        run, (world_size, cases, str(folder)), nprocs=world_size, start_method="forkserver"
    )
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(2, TWO_RANKS, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(4, FOUR_RANKS, tmp_path_factory.mktemp("four"))


def check(case: Case, world_size: int, folder: Path) -> None:
    manifests = [
        ShardManifest.decode((folder / f"{case.name}-{rank}.manifest").read_bytes())
        for rank in range(world_size)
    ]
    sources = {
        manifest.worker: [
            tensor.numpy().reshape(-1).view(np.uint8)
            for tensor in torch.load(folder / f"{case.name}-{rank}.pt")
        ]
        for rank, manifest in enumerate(manifests)
    }
    engine_tp = min(2, case.spec.num_key_value_heads or 2)
    topology = Topology(
        name=case.name,
        model=case.held,
        trainer=TrainerSpec(kind="fsdp", world_size=1),
        engine=EngineSpec(tp=engine_tp, dtype=DType.FLOAT32),
        fabric=Fabric(nic_gbytes_per_s=1.0),
    )
    engines = [*engine_manifests(topology), *of_predictors(case)]
    values = {
        n: t.numpy().view(np.uint32) for n, t in checkpoint(case.held, case.predictors).items()
    }
    if case.spec.tie_word_embeddings:
        values["lm_head.weight"] = values["model.embed_tokens.weight"]
    plan = plan_transfer(manifests, engines)
    got = {e.worker: [np.full(p.nbytes, 0xEE, np.uint8) for p in e.parameters] for e in engines}
    execute(plan, sources, got)
    for engine in engines:
        for parameter, want, have in zip(
            engine.parameters, fill(engine, values, 0xEE), got[engine.worker], strict=True
        ):
            assert (want == have).all(), f"{case.name}: {engine.worker} {parameter.name}"


def of_predictors(case: Case) -> list[ShardManifest]:
    """Return an engine with the whole extra tensors of multi-token prediction layers; empty without such layers."""
    builder = ManifestBuilder("drafts/0", Role.ENGINE)
    for name, shape in case.predictors.items():
        builder.add_parameter(name, nbytes=4 * math.prod(shape), dtype=DType.FLOAT32)
        builder.add_shard(name, shape, Box.full(shape), name)
    return [builder.build()] if case.predictors else []


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.name)
def test_engine_bytes_equal_the_checkpoint_that_two_ranks_were_cut_from(
    case: Case, two_ranks: Path
) -> None:
    check(case, 2, two_ranks)


@pytest.mark.long
@pytest.mark.parametrize("case", FOUR_RANKS, ids=lambda case: case.name)
def test_engine_bytes_equal_the_checkpoint_that_four_ranks_were_cut_from(
    case: Case, four_ranks: Path
) -> None:
    check(case, 4, four_ranks)
