"""One rank of a real Megatron-core model on gloo, filled from a checkpoint by plain torch code.

This code cuts the checkpoint without the naming tables: it uses Megatron's own
`tensor_model_parallel` and `partition_dim` marks and its own layer numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from hf_settings import Settings, settings_of
from local_modules import Norm, with_attention, with_norms

from tools.plan.families import ModelSpec, modules

PADDED_TO = 8


@dataclass(frozen=True)
class Case:
    """A model and its parallel layout.

    Attributes:
        config: `config.json` of the model, for tests that check more than bytes.
        mtp: layers that predict further tokens, after the layers of `spec`.
    """

    name: str
    spec: ModelSpec
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    cp: int = 1
    wrapped: bool = False
    main_params: bool = False
    config: dict[str, Any] | None = None
    dtype: torch.dtype = torch.float32
    mtp: int = 0

    @property
    def held(self) -> ModelSpec:
        """Return the spec of the checkpoint: layers for further tokens are normal layers with `predictors`."""
        layers = self.spec.num_hidden_layers + self.mtp
        return msgspec.structs.replace(self.spec, num_hidden_layers=layers)

    @property
    def predictors(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the additional tensors of layers for further tokens."""
        hidden, layers = self.spec.hidden_size, self.spec.num_hidden_layers
        return {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(layers, layers + self.mtp)
            for name, shape in (
                ("enorm", (hidden,)),
                ("hnorm", (hidden,)),
                ("eh_proj", (hidden, 2 * hidden)),
                ("shared_head.norm", (hidden,)),
            )
        }


def checkpoint(
    spec: ModelSpec, predictors: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, torch.Tensor]:
    """Return tensors with distinct elements, each exact in float32."""
    shapes = {t.name: t.shape for module in modules(spec) for t in module.tensors}
    values: dict[str, torch.Tensor] = {}
    first = 1
    for name, shape in {**shapes, **(predictors or {})}.items():
        numel = torch.Size(shape).numel()
        values[name] = torch.arange(first, first + numel, dtype=torch.float32).reshape(shape)
        first += numel
    assert first < 1 << 24
    return values


def start_parallel(case: Case) -> None:
    """Start Megatron's process groups for the layout of the case; collective."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )


def run(rank: int, world_size: int, cases: list[Case], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    from windlass.jobs.megatron_cpu import install

    install()
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )

    from windlass.trainers.megatron import describe_megatron_trainer

    for case in cases:
        start_parallel(case)
        chunks = build(case)
        hf = checkpoint(case.held, case.predictors)
        for chunk in chunks:
            fill(chunk, hf)
        models = chunks
        # The wrapper moves parameters into one buffer.
        if case.wrapped:
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
            models = [DistributedDataParallel(c.config, ddp, c) for c in chunks]
        tensors = all_tensors(chunks)
        # Megatron's mixed-precision optimizer keeps its fp32 copies there.
        if case.main_params:
            for tensor in tensors:
                vars(tensor)["main_param"] = tensor.detach().clone()
                tensor.data.zero_()
            tensors = [vars(tensor)["main_param"] for tensor in tensors]
        described = describe_megatron_trainer(
            models[0] if len(models) == 1 else models,
            family=case.spec.family,
            vocab_size=case.spec.vocab_size,
            use_main_params=case.main_params,
        )
        memory = {
            parameter.name: chunk_memory.address
            for parameter, chunk_memory in zip(
                described.manifest.parameters, described.parameters(), strict=True
            )
        }
        by_address = {tensor.data_ptr(): tensor for tensor in tensors}
        stored = [by_address[address].detach().clone() for address in memory.values()]
        assert len(stored) == len(tensors), "every parameter is described"
        torch.save(stored, Path(folder) / f"{case.name}-{rank}.pt")
        (Path(folder) / f"{case.name}-{rank}.manifest").write_bytes(described.manifest.encode())
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


def all_tensors(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    found = [p for chunk in chunks for n, p in chunk.named_parameters() if not is_unused(chunk, n)]
    return found + [
        b for chunk in chunks for n, b in chunk.named_buffers() if n.endswith("expert_bias")
    ]


def is_unused(chunk: Any, name: str) -> bool:
    """Return whether a parameter is an output matrix in a chunk that uses its copy of the tied embedding instead."""
    tied = chunk.share_embeddings_and_output_weights
    return bool(tied and chunk.mtp_process and name == "output_layer.weight")


def build(case: Case) -> list[torch.nn.Module]:
    config = config_of(case)
    stages = range(case.vpp) if case.vpp else [None]
    return [build_chunk(case, config, stage) for stage in stages]


def settings_for(case: Case) -> Settings:
    if case.config is not None:
        return settings_of(case.config)
    latent = {"rope_type": "rope"} if case.spec.kv_lora_rank else {}
    return Settings({"qk_layernorm": True, **latent})


def config_of(case: Case) -> Any:
    """Return Megatron's configuration."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    make = MLATransformerConfig if case.spec.kv_lora_rank else TransformerConfig
    return make(**(sizes_of(case) | settings_for(case).config))


def build_chunk(case: Case, config: Any, vp_stage: int | None) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = case.spec
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    if spec.kv_lora_rank or case.cp > 1:
        with_attention(block.layer_specs)
    if config.sequence_parallel:
        with_norms(block)
    further = None
    if case.mtp:
        further = get_gpt_mtp_block_spec(
            config, block, use_transformer_engine=False, vp_stage=vp_stage
        )
        if further is not None and config.sequence_parallel:
            for layer in further.layer_specs:
                for norm in ("enorm", "hnorm", "layer_norm"):
                    vars(layer.submodules)[norm] = Norm
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=block,
        mtp_block_spec=further,
        vocab_size=-(-spec.vocab_size // (PADDED_TO * case.tp)) * PADDED_TO * case.tp,
        max_sequence_length=32,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=spec.tie_word_embeddings,
        vp_stage=vp_stage,
        **settings_for(case).model,
    )
    return model


def sizes_of(case: Case) -> dict[str, Any]:
    """Return arguments of Megatron's configuration."""
    spec = case.spec
    sizes: dict[str, Any] = {
        "num_layers": spec.num_hidden_layers,
        **({"mtp_num_layers": case.mtp} if case.mtp else {}),
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "ffn_hidden_size": spec.intermediate_size or spec.moe_intermediate_size,
        "use_cpu_initialization": True,
        "pipeline_dtype": case.dtype,
        "params_dtype": case.dtype,
        "bf16": case.dtype is torch.bfloat16,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "context_parallel_size": case.cp,
        # Without it Megatron trains no experts on tensor-parallel ranks.
        "sequence_parallel": case.tp > 1 and spec.n_routed_experts > 0,
    }
    if spec.n_routed_experts:
        dense = spec.first_k_dense_replace
        sizes |= {
            "num_moe_experts": spec.n_routed_experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": spec.moe_intermediate_size,
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "moe_router_load_balancing_type": "none",
            "moe_layer_freq": [0] * dense + [1] * (spec.num_hidden_layers - dense),
        }
    if not spec.kv_lora_rank:
        return sizes | {"num_query_groups": spec.num_key_value_heads, "kv_channels": spec.head_dim}
    return sizes | {
        "q_lora_rank": spec.q_lora_rank or None,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_head_dim": spec.qk_nope_head_dim,
        "qk_pos_emb_head_dim": spec.qk_rope_head_dim,
        "v_head_dim": spec.v_head_dim,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": spec.moe_intermediate_size * spec.n_shared_experts,
        "multi_latent_attention": True,
    }


def fill(chunk: torch.nn.Module, hf: dict[str, torch.Tensor]) -> None:
    """Cut the checkpoint by Megatron's marks."""
    from megatron.core import parallel_state as ps

    config = chunk.config
    tensors: dict[str, torch.Tensor] = dict(chunk.named_parameters())
    tensors |= {n: b for n, b in chunk.named_buffers() if n.endswith("expert_bias")}
    for name, tensor in tensors.items():
        parts = full_parts(chunk, name, hf, config)
        expert = ".local_experts." in name
        rank = ps.get_expert_tensor_parallel_rank() if expert else ps.get_tensor_model_parallel_rank()  # fmt: skip
        size = (
            ps.get_expert_tensor_parallel_world_size()
            if expert
            else ps.get_tensor_model_parallel_world_size()
        )
        if vars(tensor).get("tensor_model_parallel"):
            dim = vars(tensor)["partition_dim"]
            if "embedding" in name or "output_layer" in name:
                missing = tensor.shape[0] * size - parts[0].shape[0]
                parts = [torch.cat([parts[0], torch.full((missing, parts[0].shape[1]), -7.0)])]
            local = torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)
        else:
            local = torch.cat(parts)
        assert local.shape == tensor.shape, (name, local.shape, tensor.shape)
        tensor.data.copy_(-local if is_unused(chunk, name) else local)


def full_parts(
    chunk: torch.nn.Module, name: str, hf: dict[str, torch.Tensor], config: object
) -> list[torch.Tensor]:
    """Return tensors that are cut one by one and then stacked."""
    from megatron.core import parallel_state as ps

    ends = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if name in ends:
        tied = chunk.share_embeddings_and_output_weights and name == "output_layer.weight"
        return [hf["model.embed_tokens.weight" if tied else ends[name]]]
    within, rest = re.fullmatch(  # type: ignore[union-attr]
        r"((?:decoder|mtp)\.layers\.\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.*)", name
    ).groups()
    layer = vars(dict(chunk.named_modules())[within])["layer_number"] - 1
    if within.startswith("mtp."):
        layer += vars(config)["num_layers"]
        rest = rest.replace("final_layernorm", "shared_head.norm")
    at = f"model.layers.{layer}"
    if f"{at}.{rest}" in hf:
        return [hf[f"{at}.{rest}"]]
    if rest == "self_attention.linear_qkv.weight":
        head, groups = vars(config)["kv_channels"], vars(config)["num_query_groups"]
        q, k, v = (hf[f"{at}.self_attn.{x}_proj.weight"] for x in "qkv")
        rows = [x.reshape(groups, -1, head, x.shape[-1]) for x in (q, k, v)]
        return [torch.cat(rows, dim=1).reshape(-1, q.shape[-1])]
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc.)\.weight", rest)
    if expert is not None:
        number = int(expert.group(1)) + ps.get_expert_model_parallel_rank() * (
            vars(config)["num_moe_experts"] // ps.get_expert_model_parallel_world_size()
        )
        of = f"{at}.mlp.experts.{number}"
        names = ["gate_proj", "up_proj"] if expert.group(2) == "linear_fc1" else ["down_proj"]
        return [hf[f"{of}.{x}.weight"] for x in names]
    mlp = re.fullmatch(r"mlp\.(shared_experts\.)?(linear_fc.)\.weight", rest)
    if mlp is not None:
        names = ["gate_proj", "up_proj"] if mlp.group(2) == "linear_fc1" else ["down_proj"]
        return [hf[f"{at}.mlp.{mlp.group(1) or ''}{x}.weight"] for x in names]
    attention = {
        "linear_q_down_proj": "q_a_proj",
        "linear_q_up_proj": "q_b_proj",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
        "q_layernorm": "q_norm",
        "k_layernorm": "k_norm",
        "kv_layernorm": "kv_a_layernorm",
    }
    if vars(config)["multi_latent_attention"]:
        attention["q_layernorm"] = "q_a_layernorm"
    if rest.startswith("self_attention."):
        return [hf[f"{at}.self_attn.{attention[rest.split('.')[1]]}.weight"]]
    others = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    }
    return [hf[f"{at}.{others[rest]}"]]
