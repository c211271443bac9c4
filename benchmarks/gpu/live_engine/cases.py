"""Models of `prove_live_engine.py`, with few layers, and sizes that the engines' GPU kernels accept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import block_float8

from live_engine.shapes import COMMON, model_config

LAYERS = 3
HEAD = 128
_COMMON: dict[str, Any] = {
    **COMMON,
    "vocab_size": 32010,  # engines pad it
    "hidden_size": 1024,
    "num_hidden_layers": LAYERS,
}
_QWEN3: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": HEAD,
    "rope_theta": 1e6,
    "use_sliding_window": False,
}
_QWEN3_EXPERTS: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}
_DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": 64,
    "v_head_dim": HEAD,
    "head_dim": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_DEEPSEEK_V3: dict[str, Any] = {
    **_DEEPSEEK,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "num_nextn_predict_layers": 1,
}
"""Heads, ranks, groups and rows of experts as published; hidden size, layers, experts and vocabulary reduced."""
_KIMI_K2: dict[str, Any] = {
    **_DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 48,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
}
DRAFT = "{draft}"
"""Part of a flag that stands for the folder of a frozen draft model: the weights with which the live server starts."""
_FROZEN = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}
_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
_STORE = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
}
_DRAFTING = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1}))


@dataclass(frozen=True)
class Case:
    """Model, with the settings of engines and the trainers that support it.

    Attributes:
        config: configuration for transformers and the engines.
        quantised: whether engines have the model in block float8.
        flags: engine -> flags of its server.
        megatron: whether `megatron_model.py` can build it. fsdp: whether transformers builds all of it.
        adapter: whether engines also serve a LoRA adapter, and updates change only the adapter.
        drafts: whether engines draft tokens with a model or a table that no update changes.
        stores: whether engines store their KV cache outside the GPU.
        only: engine that has the case; empty for both.
    """

    config: Mapping[str, Any]
    quantised: bool = False
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    megatron: bool = True
    fsdp: bool = True
    adapter: bool = False
    drafts: bool = False
    stores: bool = False
    only: str = ""

    def obstacle(self, engine: str, trainer: str) -> str:
        """Return the reason why the case cannot run, or an empty string."""
        if trainer == "megatron" and not self.megatron:
            return "megatron_model.py does not build it"
        if trainer == "fsdp" and not self.fsdp:
            return "transformers does not build all of it"
        if self.only and engine != self.only:
            return f"the case is for {self.only}"
        if self.adapter and engine == "sglang":
            return "Windlass refuses --adapter for SGLang"
        return ""

    def write_config(self, folder: Path, *, quantised: bool) -> None:
        """Create `folder` with config.json."""
        folder.mkdir()
        config = dict(self.config)
        if quantised:
            config["quantization_config"] = (
                block_float8.DEEPSEEK
                if "kv_lora_rank" in config
                else block_float8.settings(
                    config["num_hidden_layers"], routed="num_experts" in config
                )
            )
        (folder / "config.json").write_text(json.dumps(config))


_LLAMA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": HEAD,
    "rope_theta": 5e5,
}
_GEMMA3: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "intermediate_size": 3072,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_MIXTRAL: dict[str, Any] = {
    **_COMMON,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": HEAD,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
    "sliding_window": None,
}
_GPT_OSS: dict[str, Any] = {
    **_COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
}
_GLM4_MOE: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": HEAD,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1e6,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}
_QWEN3_NEXT: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "full_attention_interval": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}

CASES: Mapping[str, Case] = {
    "dense": Case(_QWEN3),
    "experts": Case(_QWEN3_EXPERTS),
    "qwen3-4b": Case(model_config("qwen3-4b")),
    "qwen3-30b-a3b": Case(model_config("qwen3-30b-a3b")),
    "qwen3-30b-a3b-24-layers": Case({**model_config("qwen3-30b-a3b"), "num_hidden_layers": 24}),
    "qwen3-30b-a3b-2-layers": Case({**model_config("qwen3-30b-a3b"), "num_hidden_layers": 2}),
    "expert-parallel": Case(
        _QWEN3_EXPERTS,
        flags={"vllm": ("--enable-expert-parallel",), "sglang": ("--ep-size", "2")},
    ),
    "tied": Case({**_QWEN3, "tie_word_embeddings": True}, megatron=False),
    "latent": Case(_DEEPSEEK, megatron=False),
    "block-fp8": Case(_QWEN3_EXPERTS, quantised=True),
    "deepseek-v3": Case(_DEEPSEEK_V3, quantised=True, flags={"vllm": _DRAFTING}, fsdp=False),
    "kimi-k2": Case(_KIMI_K2, quantised=True, fsdp=False),
    "adapter": Case(_QWEN3, megatron=False, adapter=True),
    "llama": Case(_LLAMA, megatron=False),
    "gemma-3": Case(_GEMMA3, megatron=False),
    "mixtral": Case(_MIXTRAL, megatron=False),
    "gpt-oss": Case(_GPT_OSS, megatron=False),
    "glm-4.5-moe": Case(_GLM4_MOE, megatron=False),
    # Without this flag vLLM compiles a kernel of FlashInfer on these GPUs.
    "qwen3-next": Case(
        _QWEN3_NEXT, flags={"vllm": ("--gdn-prefill-backend", "triton")}, megatron=False
    ),
    "frozen-draft": Case(
        _QWEN3,
        flags={
            "vllm": ("--speculative-config", json.dumps(_FROZEN)),
            "sglang": (
                *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", DRAFT),
                *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
                *("--speculative-num-draft-tokens", "4"),
            ),
        },
        megatron=False,
        drafts=True,
    ),
    "ngram": Case(
        _QWEN3,
        flags={
            "vllm": ("--speculative-config", json.dumps(_NGRAM)),
            "sglang": ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
        },
        megatron=False,
        drafts=True,
    ),
    # The caches on the GPU have room for two or three of the long prompts.
    "host-cache": Case(
        _QWEN3,
        flags={
            "vllm": (
                *("--kv-transfer-config", json.dumps(_STORE)),
                *("--block-size", "16", "--num-gpu-blocks-override", "66"),
            ),
            "sglang": (
                *("--enable-hierarchical-cache", "--hicache-ratio", "4"),
                *("--hicache-write-policy", "write_through", "--max-total-tokens", "1100"),
            ),
        },
        megatron=False,
        stores=True,
    ),
    "dp-attention": Case(
        _QWEN3_EXPERTS,
        flags={"sglang": ("--dp-size", "2", "--enable-dp-attention")},
        only="sglang",
    ),
}
FAMILIES = ("llama", "gemma-3", "mixtral", "gpt-oss", "glm-4.5-moe", "qwen3-next", "latent")
"""Cases with the most different layouts, dtypes or names; `latent` is DeepSeek-V3."""
