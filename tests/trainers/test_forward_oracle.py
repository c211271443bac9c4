"""transformers computes the same logits as Megatron-core from the described shards of a trained model.

The ranks start from random values, not from parts of a checkpoint. The test assembles the checkpoint only from naming
tables and local shards. Wrong names, rows, rotary conventions or interleavings would change the logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import transformers
from hf_settings import SMALL, SMALL_LATENT, SMALL_ROUTED, spec_of
from megatron_rank import Case
from needs import need_package
from real_step import NUM_MICROBATCHES, microbatches
from safetensors.torch import save_file
from trained_rank import NUM_TOKENS, Trained, run_trained

from windlass.layout.dtypes import DType
from windlass.layout.manifest import ShardManifest

need_package("megatron")

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

COMMON: dict[str, Any] = {
    **SMALL,
    # Megatron pads the vocabulary to 64.
    "vocab_size": 60,
    "rms_norm_eps": 1e-6,
}
LATENT: dict[str, Any] = {**COMMON, **SMALL_LATENT}
YARN = {
    **LATENT,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.8,
        "mscale_all_dim": 1.0,
    },
}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN3 = {**COMMON, "model_type": "qwen3"}
QWEN3_MOE = {**COMMON, **SPARSE, "model_type": "qwen3_moe", "norm_topk_prob": True}
GLM4_MOE = {
    **COMMON,
    **SMALL_ROUTED,
    "model_type": "glm4_moe",
    "use_qk_norm": True,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
MIXTRAL = {**COMMON, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}


def row(name: str, config: dict[str, Any], **layout: Any) -> Trained:
    distributed = layout.pop("distributed", False)
    family = layout.pop("family", config["model_type"])
    return Trained(Case(name, spec_of(config), config=config, **layout), family, distributed)


ONE_RANK = [
    row("deepseek_v3_tp1", LATENT),
    row("deepseek_v3_tp1_yarn", YARN),
    row("deepseek_v3_without_query_rank", {**LATENT, "q_lora_rank": None}),
    row("kimi_k2_tp1", {**YARN, "n_group": 1}, family="kimi_k2"),
    row("llama_tp1", {**COMMON, "model_type": "llama"}),
    row("mixtral_tp1", MIXTRAL),
]
TWO_RANKS = [
    row("deepseek_v3_tp2_ep2", YARN, tp=2, ep=2),
    row("deepseek_v3_ep2", YARN, ep=2),
    row("deepseek_v3_pp2", YARN, pp=2),
    row("qwen2_tp2", {**COMMON, "model_type": "qwen2"}, tp=2),
    row("qwen3_cp2", QWEN3, cp=2),
    row("deepseek_v3_cp2", YARN, cp=2),
    row("qwen3_pp2_virtual2", {**QWEN3, "num_hidden_layers": 4}, pp=2, vpp=2),
    row("qwen3_pp2_tied", {**QWEN3, "tie_word_embeddings": True}, pp=2),
    row("qwen3_distributed_optimizer", QWEN3, distributed=True),
    row("qwen3_distributed_optimizer_bf16", QWEN3, distributed=True, dtype=torch.bfloat16),
    row("qwen3_moe_ep2_distributed_optimizer", QWEN3_MOE, ep=2, distributed=True),
    row("glm4_moe_tp2_ep2", GLM4_MOE, tp=2, ep=2),
    row("mixtral_ep2", MIXTRAL, ep=2),
]


def launch(rows: list[Trained], num_ranks: int, folder: Path) -> Path:
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        run_trained, (num_ranks, rows, str(folder)), nprocs=num_ranks, start_method="forkserver"
    )
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(ONE_RANK, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(TWO_RANKS, 2, tmp_path_factory.mktemp("two"))


def described(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the checkpoint that manifests and the memory of their parameters describe."""
    found: dict[str, torch.Tensor] = {}
    for state in states:
        manifest = ShardManifest.decode(state["manifest"])
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        names = [parameter.name for parameter in manifest.parameters]
        for shard in manifest.shards():
            index = names.index(shard.parameter)
            dtype = TORCH[manifest.parameters[index].dtype]
            memory = torch.frombuffer(bytearray(state["memory"][index]), dtype=dtype)
            strides = [step // dtype.itemsize for step in shard.strides_bytes]
            values = memory.as_strided(
                shard.box.sizes, strides, shard.offset_bytes // dtype.itemsize
            ).float()
            whole = found.setdefault(shard.tensor, torch.full(shapes[shard.tensor], torch.nan))
            edges = zip(shard.box.offsets, shard.box.ends, strict=True)
            at = tuple(slice(begin, end) for begin, end in edges)
            known = whole[at].isnan() | (whole[at] == values)
            assert known.all(), f"{shard.tensor}: replicas must be equal"
            whole[at] = values
    for name, whole in found.items():
        assert not whole.isnan().any(), f"{name}: every element must lie on a rank"
    return found


def check(trained: Trained, num_ranks: int, folder: Path) -> None:
    states = [torch.load(folder / f"{trained}-{rank}.pt") for rank in range(num_ranks)]
    assert min(state["moved"] for state in states) > 0.9
    for state in states:
        names = [spec.name for spec in ShardManifest.decode(state["manifest"]).parameters]
        for name, in_buffer in zip(names, state["in_buffers"], strict=True):
            of_optimizer = trained.distributed and not name.endswith("expert_bias")
            assert in_buffer == of_optimizer, name
    config = trained.case.config
    assert config is not None
    save_file(described(states), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    last = [state for state in states if state["logits"]]
    assert last
    assert all(after < before for before, after in (state["losses"] for state in last))
    for number, ids in zip(range(NUM_MICROBATCHES), microbatches(NUM_TOKENS), strict=False):
        with torch.no_grad():
            want = model.eval()(input_ids=ids).logits[0].log_softmax(-1)
        assert float(want.std()) > 0.1
        for state in last:
            have = state["logits"][number][:, : config["vocab_size"]].log_softmax(-1)
            tolerance = 1e-4 if trained.case.dtype is torch.float32 else 0.1
            assert torch.allclose(have, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("trained", ONE_RANK, ids=str)
def test_transformers_computes_the_same_output_as_one_megatron_rank(
    trained: Trained, one_rank: Path
) -> None:
    check(trained, 1, one_rank)


@pytest.mark.parametrize("trained", TWO_RANKS, ids=str)
def test_transformers_computes_the_same_output_as_two_megatron_ranks(
    trained: Trained, two_ranks: Path
) -> None:
    check(trained, 2, two_ranks)
