"""Settings of Megatron-core that match a `config.json` of Hugging Face. Tests only."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Processes without pytest need this path for `tools.plan`.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tools.plan.families import ModelSpec

LATENT = ("deepseek_v3", "kimi_k2")
BIASED_QKV = ("qwen2", "glm4_moe")
NORMED_HEADS = ("qwen3", "qwen3_moe", "glm4_moe", *LATENT)
BIASED_ROUTER = ("glm4_moe", *LATENT)
SMALL: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
"""Values of a `config.json`, as in the constants below."""
DENSE: Mapping[str, Any] = {
    **SMALL,
    "model_type": "qwen3",
    # No padding: Megatron counts padded logits into its loss.
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
}
SPARSE: Mapping[str, Any] = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
SMALL_ROUTED: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
}
SMALL_LATENT: Mapping[str, Any] = {
    **SMALL_ROUTED,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}


def transformers_config(values: Mapping[str, Any]) -> Any:
    """Return the configuration of transformers, which writes into nested values: it gets copies of the shared ones."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**copy.deepcopy(dict(values)))


@dataclass(frozen=True)
class Settings:
    """Arguments that do not follow from sizes.

    Attributes:
        config: arguments of Megatron's configuration.
        model: arguments of `GPTModel`.
    """

    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


def num_experts(config: Mapping[str, Any]) -> int:
    for name in ("n_routed_experts", "num_experts", "num_local_experts"):
        if name in config:
            return int(config[name])
    return 0


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    """Return the sizes of a model, under the same names for every family."""
    experts = num_experts(config)
    inner = config["intermediate_size"]
    sizes = {
        name: config.get(name) or 0
        for name in (
            *("first_k_dense_replace", "n_shared_experts", "q_lora_rank", "kv_lora_rank"),
            *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        )
    }
    latent = sizes["kv_lora_rank"] > 0
    return ModelSpec(
        family=config["model_type"],
        num_hidden_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        num_attention_heads=config["num_attention_heads"],
        intermediate_size=0 if experts and not sizes["first_k_dense_replace"] else inner,
        num_key_value_heads=0 if latent else config["num_key_value_heads"],
        head_dim=0 if latent else config["head_dim"],
        n_routed_experts=experts,
        moe_intermediate_size=config.get("moe_intermediate_size", inner) if experts else 0,
        tie_word_embeddings=config["tie_word_embeddings"],
        **sizes,
    )


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Return the settings of norms, biases, routing and rotary embeddings."""
    kind = config["model_type"]
    rope = config.get("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    own: dict[str, Any] = {
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "qk_layernorm": kind in NORMED_HEADS,
        "add_qkv_bias": kind in BIASED_QKV,
    }
    if num_experts(config):
        own["moe_router_topk"] = config["num_experts_per_tok"]
    if kind in BIASED_ROUTER:
        own |= {
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 2.5),
            "moe_shared_expert_intermediate_size": config["moe_intermediate_size"]
            * config["n_shared_experts"],
        }
        if config["n_group"] > 1:
            own["moe_router_num_groups"] = config["n_group"]
            own["moe_router_group_topk"] = config["topk_group"]
    if kind in LATENT:
        own |= {"rotary_base": rope["rope_theta"], "rope_type": "rope"}
        if rope["rope_type"] == "yarn":
            own |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": rope["factor"],
                "original_max_position_embeddings": rope["original_max_position_embeddings"],
                **{x: rope[x] for x in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
            }
        return Settings(own)
    percent = rope.get("partial_rotary_factor", 1.0)
    return Settings(own, {"rotary_base": rope["rope_theta"], "rotary_percent": percent})
