"""Model family `gyre`: a dense decoder with different checkpoint names.

`windlass.trainers.connect_megatron_trainer(model, family="gyre", ...)` publishes its weights under these names.
"""

from __future__ import annotations

from windlass.layout import Cut, Family, Rule

_LAYER, _AT = "decoder.layers.{layer}", "gyre.blocks.{layer}"

FAMILY = Family(
    "gyre",
    (
        Rule("embedding.word_embeddings.weight", ("gyre.tokens.weight",), Cut.VOCAB),
        Rule("output_layer.weight", ("gyre.logits.weight",), Cut.VOCAB),
        Rule("decoder.final_layernorm.weight", ("gyre.norm.weight",), Cut.WHOLE),
        Rule(f"{_LAYER}.input_layernorm.weight", (f"{_AT}.norm_1.weight",), Cut.WHOLE),
        Rule(f"{_LAYER}.pre_mlp_layernorm.weight", (f"{_AT}.norm_2.weight",), Cut.WHOLE),
        Rule(
            f"{_LAYER}.self_attention.linear_qkv.weight",
            (f"{_AT}.query.weight", f"{_AT}.key.weight", f"{_AT}.value.weight"),
            Cut.QKV,
        ),
        Rule(f"{_LAYER}.self_attention.linear_proj.weight", (f"{_AT}.mix.weight",), Cut.ROW),
        Rule(
            f"{_LAYER}.mlp.linear_fc1.weight", (f"{_AT}.gate.weight", f"{_AT}.up.weight"), Cut.GLU
        ),
        Rule(f"{_LAYER}.mlp.linear_fc2.weight", (f"{_AT}.down.weight",), Cut.ROW),
    ),
)
