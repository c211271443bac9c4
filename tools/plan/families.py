"""Tables of the modules of model families: checkpoint names, shapes and splits.

The tables are detailed enough for realistic manifests of plans. Adapters of running frameworks do not use them: they
ask the framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from windlass.errors import ConfigError
from windlass.layout.dtypes import DType
from windlass.layout.manifest import TensorSpec

__all__ = ["FAMILIES", "AFTER_LAST", "ModelSpec", "Module", "Split", "modules"]

BEFORE_FIRST = -1
AFTER_LAST = 1 << 30


class Split(StrEnum):
    """Split of a module by tensor parallelism."""

    REPLICATED = "replicated"
    VOCAB = "vocab"
    COLUMN = "column"
    ROW = "row"
    QKV = "qkv"
    EXPERTS = "experts"


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Family and sizes, named as in the model's `config.json`.

    Attributes:
        first_k_dense_replace: number of dense layers at the front of a mixture of experts.
    """

    family: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    intermediate_size: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    n_routed_experts: int = 0
    moe_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    n_shared_experts: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    tie_word_embeddings: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """Tensors that an engine fuses into one parameter.

    Attributes:
        name: name of the engine's parameter.
        split: split by tensor parallelism.
        tensors: tensors in the order in which they are fused; for EXPERTS gate, up and down of each expert.
        layer: BEFORE_FIRST, a layer index, or AFTER_LAST.
        attention: whether the module is split over the attention ranks instead of all ranks.
        dtype: fixed element type, or None for the element type of the side.
        head_dim: rows per head, for QKV.
        num_kv_heads: number of key-value heads, for QKV.
    """

    name: str
    split: Split
    tensors: tuple[TensorSpec, ...]
    layer: int
    attention: bool = False
    dtype: DType | None = None
    head_dim: int = 0
    num_kv_heads: int = 0


@dataclass(frozen=True, slots=True)
class _Layer:
    """Builder of the modules of one layer."""

    spec: ModelSpec
    index: int
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", f"model.layers.{self.index}")

    def make(
        self,
        name: str,
        split: Split,
        *tensors: tuple[str, tuple[int, ...]],
        attention: bool = False,
    ) -> Module:
        specs = tuple(TensorSpec(f"{self.prefix}.{n}.weight", shape) for n, shape in tensors)
        return Module(f"{self.prefix}.{name}.weight", split, specs, self.index, attention)

    def norm(self, name: str, size: int) -> Module:
        return self.make(name, Split.REPLICATED, (name, (size,)))

    def mlp(self, prefix: str, inner: int) -> Iterator[Module]:
        hidden = self.spec.hidden_size
        yield self.make(
            f"{prefix}.gate_up_proj",
            Split.COLUMN,
            (f"{prefix}.gate_proj", (inner, hidden)),
            (f"{prefix}.up_proj", (inner, hidden)),
        )
        yield self.make(f"{prefix}.down_proj", Split.ROW, (f"{prefix}.down_proj", (hidden, inner)))

    def experts(self) -> Module:
        spec = self.spec
        up, down = (
            (spec.moe_intermediate_size, spec.hidden_size),
            (spec.hidden_size, spec.moe_intermediate_size),
        )
        tensors = [
            (f"mlp.experts.{expert}.{name}", shape)
            for expert in range(spec.n_routed_experts)
            for name, shape in (("gate_proj", up), ("up_proj", up), ("down_proj", down))
        ]
        return self.make("mlp.experts", Split.EXPERTS, *tensors)

    def feed_forward(self, *, correction_bias: bool) -> Iterator[Module]:
        spec = self.spec
        if not spec.n_routed_experts or self.index < spec.first_k_dense_replace:
            yield from self.mlp("mlp", spec.intermediate_size)
            return
        yield self.make(
            "mlp.gate",
            Split.REPLICATED,
            ("mlp.gate", (spec.n_routed_experts, spec.hidden_size)),
        )
        if correction_bias:
            name = f"{self.prefix}.mlp.gate.e_score_correction_bias"
            bias = TensorSpec(name, (spec.n_routed_experts,))
            yield Module(name, Split.REPLICATED, (bias,), self.index, dtype=DType.FLOAT32)
        yield self.experts()
        if spec.n_shared_experts:
            inner = spec.moe_intermediate_size * spec.n_shared_experts
            yield from self.mlp("mlp.shared_experts", inner)


def _qwen3_layer(spec: ModelSpec, index: int) -> Iterator[Module]:
    """Yield grouped-query attention with per-head norms, then a dense MLP or experts."""
    layer = _Layer(spec, index)
    hidden, head = spec.hidden_size, spec.head_dim
    q_rows, kv_rows = spec.num_attention_heads * head, spec.num_key_value_heads * head
    qkv = [
        TensorSpec(f"{layer.prefix}.self_attn.{name}_proj.weight", (rows, hidden))
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
    ]
    yield layer.norm("input_layernorm", hidden)
    yield Module(
        f"{layer.prefix}.self_attn.qkv_proj.weight",
        Split.QKV,
        tuple(qkv),
        index,
        attention=True,
        head_dim=head,
        num_kv_heads=spec.num_key_value_heads,
    )
    yield layer.norm("self_attn.q_norm", head)
    yield layer.norm("self_attn.k_norm", head)
    yield layer.make(
        "self_attn.o_proj", Split.ROW, ("self_attn.o_proj", (hidden, q_rows)), attention=True
    )
    yield layer.norm("post_attention_layernorm", hidden)
    yield from layer.feed_forward(correction_bias=False)


def _deepseek_v3_layer(spec: ModelSpec, index: int) -> Iterator[Module]:
    """Yield multi-head latent attention, then a dense MLP or experts with shared experts."""
    layer = _Layer(spec, index)
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    q_head = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    kv_head = spec.qk_nope_head_dim + spec.v_head_dim
    yield layer.norm("input_layernorm", hidden)
    yield layer.make(
        "self_attn.fused_qkv_a_proj_with_mqa",
        Split.REPLICATED,
        ("self_attn.q_a_proj", (spec.q_lora_rank, hidden)),
        ("self_attn.kv_a_proj_with_mqa", (spec.kv_lora_rank + spec.qk_rope_head_dim, hidden)),
    )
    yield layer.norm("self_attn.q_a_layernorm", spec.q_lora_rank)
    yield layer.norm("self_attn.kv_a_layernorm", spec.kv_lora_rank)
    for name, rows, columns in (
        ("self_attn.q_b_proj", heads * q_head, spec.q_lora_rank),
        ("self_attn.kv_b_proj", heads * kv_head, spec.kv_lora_rank),
    ):
        yield layer.make(name, Split.COLUMN, (name, (rows, columns)), attention=True)
    yield layer.make(
        "self_attn.o_proj",
        Split.ROW,
        ("self_attn.o_proj", (hidden, heads * spec.v_head_dim)),
        attention=True,
    )
    yield layer.norm("post_attention_layernorm", hidden)
    yield from layer.feed_forward(correction_bias=True)


@dataclass(frozen=True, slots=True)
class _Family:
    """Sizes that a family requires, and its kind of attention."""

    required: tuple[str, ...]
    mla: bool


_GQA = ("num_key_value_heads", "head_dim")
_MOE = ("n_routed_experts", "moe_intermediate_size")
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

FAMILIES = {
    "qwen3": _Family(("intermediate_size", *_GQA), mla=False),
    "qwen3_moe": _Family((*_GQA, *_MOE), mla=False),
    "deepseek_v3": _Family(("intermediate_size", *_MLA, *_MOE), mla=True),
    "kimi_k2": _Family(("intermediate_size", *_MLA, *_MOE), mla=True),
}
"""Known families."""


def modules(spec: ModelSpec) -> Iterator[Module]:
    """Yield every module of the model in execution order.

    Raises:
        ConfigError: the family is unknown, or a size that the family requires is missing.
    """
    family = FAMILIES.get(spec.family)
    if family is None:
        raise ConfigError(f"model.family must be one of {', '.join(FAMILIES)}, got {spec.family!r}")
    sizes = msgspec.structs.asdict(spec)
    for name in family.required:
        if sizes[name] < 1:
            raise ConfigError(
                f"model.{name} must be >= 1 for family {spec.family!r}, got {sizes[name]}"
            )
    vocabulary = (spec.vocab_size, spec.hidden_size)
    embed = TensorSpec("model.embed_tokens.weight", vocabulary)
    yield Module(embed.name, Split.VOCAB, (embed,), BEFORE_FIRST, attention=True)
    layer = _deepseek_v3_layer if family.mla else _qwen3_layer
    for index in range(spec.num_hidden_layers):
        yield from layer(spec, index)
    norm = TensorSpec("model.norm.weight", (spec.hidden_size,))
    yield Module(norm.name, Split.REPLICATED, (norm,), AFTER_LAST)
    if not spec.tie_word_embeddings:
        head = TensorSpec("lm_head.weight", vocabulary)
        yield Module(head.name, Split.VOCAB, (head,), AFTER_LAST, attention=True)
