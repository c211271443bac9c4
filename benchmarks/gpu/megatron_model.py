"""Qwen3 and DeepSeek-V3 models of Megatron-core: `GPTModel`, local layer specs, no Transformer Engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from windlass.layout.manifest import ShardManifest
from windlass.memory.torch_dtypes import torch_dtype


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Qwen3 model, with the names of its config.json. `num_experts` 0: dense."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    num_experts: int
    vocab: int = 151936
    head: int = 128


def start_parallel(tp: int, ep: int) -> None:
    """Make Megatron's groups from all ranks of the default group. All ranks must call this together."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)


def build(sizes: Sizes, tp: int, ep: int) -> torch.nn.Module:
    """Build this rank's part on the current GPU in bfloat16, with uninitialised values."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        **_common(tp),
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.key_value_heads,
        "kv_channels": sizes.head,
        "ffn_hidden_size": sizes.inner,
    }
    if sizes.num_experts:
        values |= {
            **_routed(ep),
            "num_moe_experts": sizes.num_experts,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": sizes.inner,
            "moe_layer_freq": [1] * sizes.layers,
        }
    config = TransformerConfig(**values)
    layers = (
        get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        if sizes.num_experts
        else get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=sizes.vocab,
        max_sequence_length=4096,
        pre_process=True,
        post_process=True,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    module: torch.nn.Module = model.cuda().bfloat16()
    return module


def _common(tp: int) -> dict[str, Any]:
    """Return the settings that all models share."""
    return {
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "tensor_model_parallel_size": tp,
    }


def _routed(ep: int) -> dict[str, Any]:
    """Return the settings of models with experts."""
    return {
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_load_balancing_type": "none",
    }


class _NoCore(torch.nn.Module):
    """Placeholder of the core of attention, which has no weights. Megatron's local core has no latent attention."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


class _Duplicated(torch.nn.Module):
    """Replacement of Transformer Engine's linear layer that is replicated on every tensor-parallel rank.

    Real jobs use that layer for the down projections of latent attention. Megatron's local spec splits their rows, and
    half of 576 rows is not a multiple of 128.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype)
        )


def build_latent(config: Mapping[str, Any], tp: int, ep: int) -> torch.nn.Module:
    """Build this rank's part of DeepSeek-V3 or Kimi-K2, including layers for multi-token prediction. It cannot run.

    Args:
        config: content of config.json.
        tp: number of tensor-parallel ranks.
        ep: number of expert-parallel ranks.
    """
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    for name in ("TEColumnParallelLinear", "Linear"):
        # This is true without Transformer Engine.
        if not isinstance(vars(multi_latent_attention)[name], type):
            setattr(multi_latent_attention, name, type(name, (), {}))
    vars(multi_latent_attention)["TELinear"] = _Duplicated
    dense, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
    further = config["num_nextn_predict_layers"]
    groups = config["n_group"]
    made = MLATransformerConfig(
        **_common(tp),
        **_routed(ep),
        num_layers=layers,
        mtp_num_layers=further or None,
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        ffn_hidden_size=config["intermediate_size"],
        multi_latent_attention=True,
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_head_dim=config["qk_nope_head_dim"],
        qk_pos_emb_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        rope_type="rope",
        num_moe_experts=config["n_routed_experts"],
        moe_router_topk=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=config["moe_intermediate_size"]
        * config["n_shared_experts"],
        moe_layer_freq=[0] * dense + [1] * (layers - dense),
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=groups if groups > 1 else None,
        moe_router_group_topk=config["topk_group"] if groups > 1 else None,
    )
    block = get_gpt_decoder_block_spec(made, use_transformer_engine=False)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = _NoCore
        attention.linear_q_down_proj = attention.linear_kv_down_proj = _Duplicated
    predictors = (
        get_gpt_mtp_block_spec(made, block, use_transformer_engine=False) if further else None
    )
    module: torch.nn.Module = GPTModel(
        config=made,
        transformer_layer_spec=block,
        mtp_block_spec=predictors,
        vocab_size=-(-config["vocab_size"] // (128 * tp)) * 128 * tp,
        max_sequence_length=4096,
        pre_process=True,
        post_process=True,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    module = module.cuda().bfloat16()
    for name, buffer in module.named_buffers():
        if name.endswith("expert_bias"):
            buffer.data = buffer.data.float()
    return module


def train_step(model: torch.nn.Module, vocab: int, learning_rate: float) -> float:
    """Run forward, backward and a plain SGD step on 64 tokens; return the loss. TP ranks must call this together.

    The model is in eval mode, because Megatron's MoE layer needs sequence parallelism to train with TP, and its norm
    without Transformer Engine does not support that. No layer has dropout, so nothing else differs.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    # Megatron reads this name, and does not set it without Transformer Engine.
    vars(moe_utils).setdefault("te_general_gemm", None)
    model.eval()
    ids = torch.arange(64, device="cuda").reshape(1, -1) * 31 % vocab
    mask = torch.triu(torch.ones(1, 1, 64, 64, dtype=torch.bool, device="cuda"), 1)
    place = torch.arange(64, device="cuda").reshape(1, -1)
    loss = model(ids, place, mask, labels=ids.roll(-1)).float().mean()
    loss.backward()
    group = parallel_state.get_tensor_model_parallel_group()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            # These gradients come only from the rank's heads.
            if "q_layernorm" in name or "k_layernorm" in name:
                dist.all_reduce(parameter.grad, group=group)
            # These gradients are equal on all ranks except for rounding.
            elif "layernorm" in name or "router" in name:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=group)
            parameter.sub_(parameter.grad, alpha=learning_rate)
            parameter.grad = None
    return float(loss.detach())


def gather(
    described: Any, tensors: list[torch.Tensor], group: Any = None
) -> list[tuple[str, torch.Tensor]]:
    """Return all full checkpoint tensors on rank 0, assembled by the manifests. All ranks must call this together.

    Args:
        described: result of `describe_megatron_trainer` on this rank.
        tensors: this rank's parameters in manifest order.
        group: the ranks 0, 1, ... of the model; None for all ranks.
    """
    rank, device = dist.get_rank(), tensors[0].device
    encoded: list[bytes] = [b""] * dist.get_world_size(group)
    dist.all_gather_object(encoded, described.manifest.encode(), group=group)
    manifests = [ShardManifest.decode(one) for one in encoded]
    full: dict[str, torch.Tensor] = {}
    held: set[tuple[str, tuple[int, ...]]] = set()
    for owner, manifest in enumerate(manifests):
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        index_of = {p.name: index for index, p in enumerate(manifest.parameters)}
        dtypes = {p.name: torch_dtype(p.dtype) for p in manifest.parameters}
        for shard in manifest.shards():
            name, box, dtype = shard.tensor, shard.box, dtypes[shard.parameter]
            # Skip replicas.
            if (name, box.offsets) in held:
                continue
            held.add((name, box.offsets))
            if rank == owner:
                flat = tensors[index_of[shard.parameter]].detach().reshape(-1)
                itemsize = flat.element_size()
                strides = [s // itemsize for s in shard.strides_bytes]
                part = flat.as_strided(box.sizes, strides, shard.offset_bytes // itemsize)
                if owner != 0:
                    dist.send(part.contiguous(), 0, group=group)
                    continue
            elif rank == 0:
                part = torch.empty(box.sizes, dtype=dtype, device=device)
                dist.recv(part, owner, group=group)
            else:
                continue
            if name not in full:
                full[name] = torch.empty(shapes[name], dtype=dtype, device=device)
            place = tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
            full[name][place] = part
    if device.type == "cuda":
        torch.cuda.synchronize()
    return list(full.items())
