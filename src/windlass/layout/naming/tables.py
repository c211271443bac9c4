"""The families. Names of the local spec and of the Transformer Engine spec side by side.

To add a family: list what differs from an existing one. To add a name: one `Rule`.
"""

from __future__ import annotations

from windlass.errors import ConfigError
from windlass.layout.naming.rules import Cut, Family, Rule

__all__ = ["FAMILIES", "family_named"]


def _layer(name: str, *tensors: str, cut: Cut = Cut.WHOLE) -> Rule:
    """A rule for a parameter of one decoder layer."""
    return Rule(
        f"decoder.layers.{{layer}}.{name}",
        tuple(f"model.layers.{{layer}}.{tensor}" for tensor in tensors),
        cut,
    )


def _linear(name: str, *tensors: str, cut: Cut, bias_cut: Cut) -> tuple[Rule, ...]:
    """A weight and its bias."""
    return (
        _layer(f"{name}.weight", *(f"{tensor}.weight" for tensor in tensors), cut=cut),
        _layer(f"{name}.bias", *(f"{tensor}.bias" for tensor in tensors), cut=bias_cut),
    )


_ENDS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Cut.VOCAB),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Cut.WHOLE),
    Rule("output_layer.weight", ("lm_head.weight",), Cut.VOCAB),
)

_NORMS = (
    _layer("input_layernorm.weight", "input_layernorm.weight"),
    _layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    _layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
)

_OUTPUT = _linear("self_attention.linear_proj", "self_attn.o_proj", cut=Cut.ROW, bias_cut=Cut.WHOLE)

_GROUPED_QUERY = (
    *_linear(
        "self_attention.linear_qkv",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        cut=Cut.QKV,
        bias_cut=Cut.QKV,
    ),
    _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    *_OUTPUT,
)

_LATENT = (
    _layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", cut=Cut.COLUMN),
    _layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", cut=Cut.LATENT),
    _layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", cut=Cut.COLUMN),
    _layer(
        "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        cut=Cut.LATENT,
    ),
    _layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", cut=Cut.COLUMN),
    _layer("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    _layer("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    _layer("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    _layer("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    *_OUTPUT,
)


def _gated(name: str, tensor: str) -> tuple[Rule, ...]:
    """A gated MLP."""
    return (
        *_linear(
            f"{name}.linear_fc1",
            f"{tensor}.gate_proj",
            f"{tensor}.up_proj",
            cut=Cut.GLU,
            bias_cut=Cut.GLU,
        ),
        *_linear(f"{name}.linear_fc2", f"{tensor}.down_proj", cut=Cut.ROW, bias_cut=Cut.WHOLE),
    )


def _experts(tensor: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Routed experts: one parameter each (both spellings), or all of a rank in two matrices."""
    pair = (f"{tensor}.{{expert}}.{gate}.weight", f"{tensor}.{{expert}}.{up}.weight")
    last = f"{tensor}.{{expert}}.{down}.weight"
    return (
        _layer("mlp.experts.linear_fc1.weight{expert}", *pair, cut=Cut.GLU),
        _layer("mlp.experts.local_experts.{expert}.linear_fc1.weight", *pair, cut=Cut.GLU),
        _layer("mlp.experts.linear_fc2.weight{expert}", last, cut=Cut.ROW),
        _layer("mlp.experts.local_experts.{expert}.linear_fc2.weight", last, cut=Cut.ROW),
        _layer("mlp.experts.weight1", *pair, cut=Cut.GROUPED_GLU),
        _layer("mlp.experts.weight2", last, cut=Cut.GROUPED_ROW),
    )


_DENSE = (*_ENDS, *_NORMS, *_GROUPED_QUERY, *_gated("mlp", "mlp"))
_SPARSE = (
    _layer("mlp.router.weight", "mlp.gate.weight"),
    *_experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
)
_SHARED = (
    _layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    *_gated("mlp.shared_experts", "mlp.shared_experts"),
)
_MIXTRAL = (
    _layer("mlp.router.weight", "block_sparse_moe.gate.weight"),
    *_experts("block_sparse_moe.experts", "w1", "w3", "w2"),
)
_DEEPSEEK = (*_ENDS, *_NORMS, *_LATENT, *_gated("mlp", "mlp"), *_SPARSE, *_SHARED)

FAMILIES = {
    family.name: family
    for family in (
        Family("llama", _DENSE),
        Family("qwen2", _DENSE),
        Family("qwen3", _DENSE),
        Family("qwen3_moe", (*_DENSE, *_SPARSE)),
        Family("glm4_moe", (*_DENSE, *_SPARSE, *_SHARED)),
        Family("deepseek_v3", _DEEPSEEK),
        Family("kimi_k2", _DEEPSEEK),
        Family("mixtral", (*_ENDS, *_NORMS, *_GROUPED_QUERY, *_MIXTRAL)),
    )
}
"""By the `model_type` of the checkpoint's `config.json`."""


def family_named(name: str) -> Family:
    """A family of `FAMILIES`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in FAMILIES:
        raise ConfigError(f"family: must be one of {', '.join(FAMILIES)} or a Family, got {name!r}")
    return FAMILIES[name]
