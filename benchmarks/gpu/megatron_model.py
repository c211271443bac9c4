"""Qwen3 models as Megatron-core builds them: `GPTModel`, local layer specs, no Transformer Engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from windlass.layout.manifest import ShardManifest


@dataclass(frozen=True)
class Sizes:
    """Of a Qwen3 model in a checkpoint's own words. `num_experts` 0: dense."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    num_experts: int
    vocab: int = 151936
    head: int = 128


def start_parallel(tp: int, ep: int) -> None:
    """Megatron's groups among all ranks of the default group; collective."""
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
    """This rank's part on the current GPU in bfloat16; values are whatever the memory held."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.key_value_heads,
        "kv_channels": sizes.head,
        "ffn_hidden_size": sizes.inner,
        "perform_initialization": False,
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
    if sizes.num_experts:
        values |= {
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": 1,
            "num_moe_experts": sizes.num_experts,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": sizes.inner,
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "moe_router_load_balancing_type": "none",
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


def train_step(model: torch.nn.Module, vocab: int, learning_rate: float) -> float:
    """Forward, backward and a plain SGD step on 64 tokens; the loss. Collective among TP ranks.

    In eval mode: Megatron's MoE layer wants sequence parallelism to train with TP, and its norm
    without Transformer Engine has none. No layer has dropout, so nothing else differs.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault(
        "te_general_gemm", None
    )  # read, and not set without Transformer Engine
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
            if "q_layernorm" in name or "k_layernorm" in name:  # of the rank's heads only
                dist.all_reduce(parameter.grad, group=group)
            elif "layernorm" in name or "router" in name:  # alike but for rounding
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=group)
            parameter.sub_(parameter.grad, alpha=learning_rate)
            parameter.grad = None
    return float(loss.detach())


def gather(
    described: Any, tensors: list[torch.Tensor], group: Any = None
) -> list[tuple[str, torch.Tensor]]:
    """All full checkpoint tensors on rank 0, box by box from where the manifests say; collective.

    Args:
        described: what `describe_megatron_trainer` gave on this rank.
        tensors: this rank's parameters in manifest order.
        group: the ranks 0, 1, ... that hold the model; all if it is None.
    """
    rank = dist.get_rank()
    encoded: list[bytes] = [b""] * dist.get_world_size(group)
    dist.all_gather_object(encoded, described.manifest.encode(), group=group)
    manifests = [ShardManifest.decode(one) for one in encoded]
    full: dict[str, torch.Tensor] = {}
    held: set[tuple[str, tuple[int, ...]]] = set()
    for owner, manifest in enumerate(manifests):
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        index_of = {p.name: index for index, p in enumerate(manifest.parameters)}
        for shard in manifest.shards():
            name, box = shard.tensor, shard.box
            if (name, box.offsets) in held:  # a replica
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
                part = torch.empty(box.sizes, dtype=torch.bfloat16, device="cuda")
                dist.recv(part, owner, group=group)
            else:
                continue
            if name not in full:
                full[name] = torch.empty(shapes[name], dtype=torch.bfloat16, device="cuda")
            place = tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
            full[name][place] = part
    torch.cuda.synchronize()
    return list(full.items())
