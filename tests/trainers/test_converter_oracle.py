"""Names and rows of Transformer Engine parameters agree with mbridge, an independent converter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from windlass.layout.naming.place import Coords, Geometry, place
from windlass.layout.naming.tables import FAMILIES

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

HIDDEN, GROUPS, QUERIES, HEAD, INNER, EXPERTS, VOCAB = 32, 2, 2, 8, 12, 4, 40
COMMON = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": GROUPS * QUERIES, "num_key_value_heads": GROUPS, "vocab_size": VOCAB}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(head_dim=HEAD, **COMMON),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(head_dim=HEAD, **COMMON),
    "qwen3_moe": Qwen3MoeConfig(head_dim=HEAD, num_experts=EXPERTS, **COMMON),
    "glm4_moe": Glm4MoeConfig(head_dim=HEAD, n_routed_experts=EXPERTS, **COMMON),
    "deepseek_v3": DeepseekV3Config(n_routed_experts=EXPERTS, **COMMON),
    "mixtral": MixtralConfig(head_dim=HEAD, num_local_experts=EXPERTS, **COMMON),
}
GEOMETRY = Geometry(num_query_groups=GROUPS, queries_per_group=QUERIES, head_dim=HEAD, vocab_size=VOCAB, hidden_size=HIDDEN, num_experts=EXPERTS, latent_rows=(("kv_a_proj_with_mqa.weight", 20), ("q_a_proj.weight", 24)))  # fmt: skip

ENDS = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN), "output_layer.weight": (VOCAB, HIDDEN), "decoder.final_layernorm.weight": (HIDDEN,)}  # fmt: skip
QKV_ROWS = GROUPS * (QUERIES + 2) * HEAD
GROUPED_QUERY = {"self_attention.linear_qkv.layer_norm_weight": (HIDDEN,), "self_attention.linear_qkv.weight": (QKV_ROWS, HIDDEN), "self_attention.linear_proj.weight": (HIDDEN, GROUPS * QUERIES * HEAD)}  # fmt: skip
QKV_BIAS = {"self_attention.linear_qkv.bias": (QKV_ROWS,)}
QK_NORMS = {"self_attention.q_layernorm.weight": (HEAD,), "self_attention.k_layernorm.weight": (HEAD,)}  # fmt: skip
DENSE = {"mlp.linear_fc1.layer_norm_weight": (HIDDEN,), "mlp.linear_fc1.weight": (2 * INNER, HIDDEN), "mlp.linear_fc2.weight": (HIDDEN, INNER)}  # fmt: skip
SPARSE = {"pre_mlp_layernorm.weight": (HIDDEN,), "mlp.router.weight": (EXPERTS, HIDDEN), "mlp.experts.linear_fc1.weight3": (2 * INNER, HIDDEN), "mlp.experts.linear_fc2.weight1": (HIDDEN, INNER)}  # fmt: skip
SHARED = {"mlp.router.expert_bias": (EXPERTS,), "mlp.shared_experts.linear_fc1.weight": (2 * INNER, HIDDEN), "mlp.shared_experts.linear_fc2.weight": (HIDDEN, INNER)}  # fmt: skip
LATENT = {"input_layernorm.weight": (HIDDEN,), "self_attention.linear_q_down_proj.weight": (24, HIDDEN), "self_attention.linear_q_up_proj.layer_norm_weight": (24,), "self_attention.linear_q_up_proj.weight": (40, 24), "self_attention.linear_kv_down_proj.weight": (20, HIDDEN), "self_attention.linear_kv_up_proj.layer_norm_weight": (16,), "self_attention.linear_kv_up_proj.weight": (48, 16), "self_attention.linear_proj.weight": (HIDDEN, 32), "self_attention.linear_q_proj.weight": (40, HIDDEN)}  # fmt: skip
LAYERS = {
    "llama": GROUPED_QUERY | DENSE,
    "qwen2": GROUPED_QUERY | QKV_BIAS | DENSE,
    "qwen3": GROUPED_QUERY | QK_NORMS | DENSE,
    "qwen3_moe": GROUPED_QUERY | QK_NORMS | SPARSE,
    "glm4_moe": GROUPED_QUERY | QKV_BIAS | QK_NORMS | DENSE | SPARSE | SHARED,
    "deepseek_v3": LATENT | DENSE | SPARSE | SHARED,
    "mixtral": GROUPED_QUERY | SPARSE,
}


@pytest.fixture(scope="module")
def process_group() -> object:
    from windlass.jobs.megatron_cpu import install

    install()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("family", CONFIGS)
def test_every_name_and_row_agrees_with_mbridge(
    family: str, process_group: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    mbridge = pytest.importorskip("mbridge")
    # mbridge makes its training configuration of this family for an older Megatron. Names do not need it.
    monkeypatch.setattr(
        mbridge.models.DeepseekV3Bridge,
        "_build_config",
        lambda self: SimpleNamespace(num_layers=2, mtp_num_layers=0),
    )
    config = CONFIGS[family]
    # mbridge reads these values from the top level of the configuration.
    config.rope_theta, config.rope_scaling = 1e4, None
    bridge = mbridge.AutoBridge.from_config(config)
    names = ENDS | {f"decoder.layers.1.{name}": shape for name, shape in LAYERS[family].items()}
    for name, shape in names.items():
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        hf_names, hf_values = bridge._weight_to_hf_format(name, values)
        found: dict[str, torch.Tensor] = {}
        for shard in place(FAMILIES.find(family), name, shape, GEOMETRY, Coords()).shards:
            view = values.as_strided(shard.box.sizes, shard.strides, shard.offset)
            whole = found.setdefault(shard.tensor, torch.full(shard.global_shape, -1.0))
            whole[tuple(slice(o, e) for o, e in zip(shard.box.offsets, shard.box.ends, strict=True))] = view  # fmt: skip
        assert set(found) == set(hf_names), name
        for hf_name, want in zip(hf_names, hf_values, strict=True):
            assert torch.equal(found[hf_name], want), (name, hf_name)
