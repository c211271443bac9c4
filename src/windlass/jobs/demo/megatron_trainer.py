"""Trainer rank of the demo with Megatron-core: the same model, loss and copies of versions as `trainer.py`.

The job starts `megatron_trainer.py MODEL VERSIONS_DIR [SEED [DEVICE [LEARNING_RATE]]]` once per rank. The ranks split the model by
tensor parallelism.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from windlass.envs import environment_value
from windlass.jobs.demo.trainer import (
    SavingEngine,
    build_model,
    default_learning_rate,
    groups_at_once,
    grpo_loss,
    run_rank,
    tokens_of,
)
from windlass.jobs.fsdp_engine import Samples
from windlass.jobs.megatron_engine import LossOf, MegatronEngine
from windlass.layout.box import Box
from windlass.trainers.megatron import describe_megatron_trainer


def megatron_config(config: Any, tensor_parallel: int) -> TransformerConfig:
    """Translate the transformers configuration of a dense model to Megatron-core's."""
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim,
        tensor_model_parallel_size=tensor_parallel,
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type == "qwen3",
        add_qkv_bias=config.model_type == "qwen2",
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        # These fusions need Apex or Transformer Engine.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def build_chunk(
    config: Any, settings: TransformerConfig, *, first: bool, last: bool, stage: int | None = None
) -> torch.nn.Module:
    """Build a model chunk from Megatron's own layer classes, which work without Apex and Transformer Engine.

    Args:
        config: transformers configuration of the model.
        settings: result of `megatron_config`.
        first: whether the chunk has the embedding.
        last: whether the chunk has the output layer. If so, every tensor-parallel rank returns the logits of the whole
            vocabulary, including Megatron's padding.
        stage: virtual pipeline stage.
    """
    size = settings.tensor_model_parallel_size
    model: torch.nn.Module = GPTModel(
        config=settings,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            settings, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
        ),
        vocab_size=-(-config.vocab_size // size) * size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=False,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        vp_stage=stage,
    )
    return model


def logits_of(model: torch.nn.Module, config: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, L, V) of tokens (B, L), without the logits of Megatron's padding."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    hidden = torch.ones(tokens.shape[1:] * 2, dtype=torch.bool, device=tokens.device).triu(1)
    logits: torch.Tensor = model(tokens, places, hidden[None, None])
    return logits[..., : config.vocab_size]


def parts(model: torch.nn.Module, config: Any) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Yield each part of the model on this rank: name of its checkpoint tensor, box in this tensor, and view of the memory."""
    manifest = describe_megatron_trainer(
        model, family=config.model_type, vocab_size=config.vocab_size
    ).manifest
    parameters = dict(model.named_parameters())
    for shard in manifest.shards():
        memory = parameters[shard.parameter].detach()
        itemsize = memory.element_size()
        yield (
            shard.tensor,
            shard.box,
            memory.as_strided(
                shard.box.sizes,
                [step // itemsize for step in shard.strides_bytes],
                memory.storage_offset() + shard.offset_bytes // itemsize,
            ),
        )


def _within(box: Box) -> tuple[slice, ...]:
    """Return the index of a box in its tensor: one slice per dimension."""
    return tuple(
        slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True)
    )


def fill(model: torch.nn.Module, config: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's parts of `weights`, the weights of the whole model, into the parameters of a Megatron-core model."""
    for name, box, memory in parts(model, config):
        memory.copy_(weights[name][_within(box)])


def gathered(
    model: torch.nn.Module, config: Any, shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Return the weights of the whole model. Collective over tensor-parallel ranks.

    Only the checker of the demo needs this gather; a weight update of Windlass gathers nothing.
    """
    device = next(model.parameters()).device
    whole = {name: torch.full(shape, -math.inf, device=device) for name, shape in shapes.items()}
    for name, box, memory in parts(model, config):
        whole[name][_within(box)] = memory
    for name in sorted(whole):
        # A rank has -inf for elements of other ranks. Each element has a value on at least one rank, and all values of one
        # element are equal.
        dist.all_reduce(
            whole[name],
            dist.ReduceOp.MAX,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
    return whole


def saving_engine(
    source: Path,
    versions_dir: Path,
    seed: int,
    device: str,
    learning_rate: float,
    *,
    publish_to_fleet: bool = True,
) -> SavingEngine:
    """Return the engine of a rank; for arguments see `windlass.jobs.demo.trainer.make_engine`."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start: Any = build_model(source)
    config, weights = start.config, {n: p.detach() for n, p in start.named_parameters()}
    shapes = {name: weight.shape for name, weight in weights.items()}
    # Every tensor-parallel rank must have whole key-value heads, so the tensor-parallel size must divide their number.
    # The other factor of the world size is the data-parallel size.
    tensor_parallel = math.gcd(int(environment_value("WORLD_SIZE")), config.num_key_value_heads)

    def chunk(
        settings: TransformerConfig, first: bool, last: bool, stage: int | None
    ) -> torch.nn.Module:
        model = build_chunk(config, settings, first=first, last=last, stage=stage)
        fill(model, config, weights)
        return model

    def forward(model: torch.nn.Module, groups: Samples) -> tuple[torch.Tensor, LossOf]:
        samples = [sample for group in groups for sample in group]
        tokens = tokens_of(samples, next(model.parameters()).device)
        logits = logits_of(model, config, tokens)
        return logits, lambda logits: grpo_loss(logits, samples)

    engine = MegatronEngine(
        config=megatron_config(config, tensor_parallel),
        model=chunk,
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=learning_rate or default_learning_rate(config.hidden_size),
            weight_decay=0.0,
            clip_grad=1.0,
            params_dtype=torch.float32,
        ),
        forward=forward,
        family=config.model_type,
        vocab_size=config.vocab_size,
        num_groups=groups_at_once(source),
        backend="gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl",
        device=device,
        seed=seed,
        publish_to_fleet=publish_to_fleet,
        transport=environment_value("WINDLASS_TRANSPORT") or "auto",
    )

    return SavingEngine(
        engine, lambda: gathered(engine.chunks[0].module, config, shapes), versions_dir
    )


if __name__ == "__main__":
    run_rank(saving_engine, *sys.argv[1:])
