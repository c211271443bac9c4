"""Naming tables of families: names of Megatron-core's local spec and of its Transformer Engine spec.

To add a family, add the rules that differ from an existing family at the end of this file, or add
an entry point in the group `windlass.families` to another distribution. To add a name, add one
`Rule`.
"""

from __future__ import annotations

from dataclasses import replace

from windlass.layout.naming.rules import Cut, Family, Rule
from windlass.plugins import Registry


def layer(name: str, *tensors: str, cut: Cut = Cut.WHOLE) -> Rule:
    """Return the rule for a parameter that occurs in each decoder layer.

    Args:
        name: Megatron's name of the parameter within a layer.
        *tensors: checkpoint names of tensors within a layer, in the order of their rows in the parameter.
        cut: see `Cut`.
    """
    return Rule(
        f"decoder.layers.{{layer}}.{name}",
        tuple(f"model.layers.{{layer}}.{tensor}" for tensor in tensors),
        cut,
    )


def linear(name: str, *tensors: str, cut: Cut, bias_cut: Cut) -> tuple[Rule, ...]:
    """Return the rules for weight and bias of a linear module in each decoder layer. `name` and `tensors`: see `layer`."""
    return (
        layer(f"{name}.weight", *(f"{tensor}.weight" for tensor in tensors), cut=cut),
        layer(f"{name}.bias", *(f"{tensor}.bias" for tensor in tensors), cut=bias_cut),
    )


ENDS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Cut.VOCAB),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Cut.WHOLE),
    Rule("output_layer.weight", ("lm_head.weight",), Cut.VOCAB),
)

NORMS = (
    layer("input_layernorm.weight", "input_layernorm.weight"),
    layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
)

_OUTPUT = linear("self_attention.linear_proj", "self_attn.o_proj", cut=Cut.ROW, bias_cut=Cut.WHOLE)

GROUPED_QUERY = (
    *linear(
        "self_attention.linear_qkv",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        cut=Cut.QKV,
        bias_cut=Cut.QKV,
    ),
    layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    *_OUTPUT,
)

LATENT = (
    layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", cut=Cut.COLUMN),
    layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", cut=Cut.LATENT),
    layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", cut=Cut.COLUMN),
    layer(
        "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        cut=Cut.LATENT,
    ),
    layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", cut=Cut.COLUMN),
    layer("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    layer("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    layer("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    layer("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    *_OUTPUT,
)


def gated(name: str, tensor: str) -> tuple[Rule, ...]:
    """Return the rules for a gated MLP in each decoder layer.

    `name` is the module's name in Megatron, and `tensor` is its name in the checkpoint.
    """
    return (
        *linear(
            f"{name}.linear_fc1",
            f"{tensor}.gate_proj",
            f"{tensor}.up_proj",
            cut=Cut.GLU,
            bias_cut=Cut.GLU,
        ),
        *linear(f"{name}.linear_fc2", f"{tensor}.down_proj", cut=Cut.ROW, bias_cut=Cut.WHOLE),
    )


def experts(tensor: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the rules for routed experts. They cover the names of Megatron's TEGroupedMLP, SequentialMLP and GroupedMLP.

    Args:
        tensor: prefix of the experts' checkpoint names within a layer.
        gate: name of an expert's gate projection in the checkpoint, such as `gate_proj`.
        up: name of the up projection.
        down: name of the down projection.
    """
    pair = (f"{tensor}.{{expert}}.{gate}.weight", f"{tensor}.{{expert}}.{up}.weight")
    last = f"{tensor}.{{expert}}.{down}.weight"
    return (
        layer("mlp.experts.linear_fc1.weight{expert}", *pair, cut=Cut.GLU),
        layer("mlp.experts.local_experts.{expert}.linear_fc1.weight", *pair, cut=Cut.GLU),
        layer("mlp.experts.linear_fc2.weight{expert}", last, cut=Cut.ROW),
        layer("mlp.experts.local_experts.{expert}.linear_fc2.weight", last, cut=Cut.ROW),
        layer("mlp.experts.weight1", *pair, cut=Cut.GROUPED_GLU),
        layer("mlp.experts.weight2", last, cut=Cut.GROUPED_ROW),
    )


DENSE = (*ENDS, *NORMS, *GROUPED_QUERY, *gated("mlp", "mlp"))
SPARSE = (
    layer("mlp.router.weight", "mlp.gate.weight"),
    *experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
)
SHARED = (
    layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    *gated("mlp.shared_experts", "mlp.shared_experts"),
)
DEEPSEEK = (*ENDS, *NORMS, *LATENT, *gated("mlp", "mlp"), *SPARSE, *SHARED)


def with_predictors(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return `rules` and the rules of multi-token prediction (MTP) layers.

    In a checkpoint, the numbers of the MTP layers follow the numbers of the decoder layers. Megatron-core 0.17 renamed the
    decoder layer inside an MTP layer from `transformer_layer` to `mtp_model_layer`.
    """
    decoder, own = "decoder.layers.{layer}.", "mtp.layers.{layer}."
    at = "model.layers.{layer}."
    return (
        *rules,
        *(
            replace(rule, pattern=f"{own}{inner}.{rule.pattern.removeprefix(decoder)}")
            for inner in ("transformer_layer", "mtp_model_layer")
            for rule in rules
            if rule.pattern.startswith(decoder)
        ),
        Rule(f"{own}enorm.weight", (f"{at}enorm.weight",), Cut.WHOLE),
        Rule(f"{own}hnorm.weight", (f"{at}hnorm.weight",), Cut.WHOLE),
        Rule(f"{own}eh_proj.weight", (f"{at}eh_proj.weight",), Cut.COLUMN),
        Rule(f"{own}final_layernorm.weight", (f"{at}shared_head.norm.weight",), Cut.WHOLE),
    )


_MIXTRAL = (
    layer("mlp.router.weight", "block_sparse_moe.gate.weight"),
    *experts("block_sparse_moe.experts", "w1", "w3", "w2"),
)

LLAMA = Family("llama", DENSE)
QWEN2 = Family("qwen2", DENSE)
QWEN3 = Family("qwen3", DENSE)
QWEN3_MOE = Family("qwen3_moe", (*DENSE, *SPARSE))
GLM4_MOE = Family("glm4_moe", with_predictors((*DENSE, *SPARSE, *SHARED)))
MIXTRAL = Family("mixtral", (*ENDS, *NORMS, *GROUPED_QUERY, *_MIXTRAL))
DEEPSEEK_V3 = Family("deepseek_v3", with_predictors(DEEPSEEK))
KIMI_K2 = Family("kimi_k2", with_predictors(DEEPSEEK))

BUILT_IN = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GLM4_MOE, MIXTRAL, DEEPSEEK_V3, KIMI_K2)
"""Families of this module."""
FAMILIES: Registry[Family] = Registry(
    noun="family",
    kind=Family,
    built_in={family.name: f"{__name__}:{family.name.upper()}" for family in BUILT_IN},
    group="windlass.families",
)
"""All families, by the `model_type` of the checkpoint's `config.json`."""
