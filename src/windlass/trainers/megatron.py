"""The Megatron-core trainer adapter (0.16). It describes local shards in place and gathers no weights.

Tensor, pipeline (with virtual stages), expert and expert-tensor parallelism divide the weights among ranks. Context- and
data-parallel ranks have the same weights, and the planner chooses which of them sends. The adapter reads layer numbers
from the layer modules, so it supports any pipeline layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    TorchFullyShardedDataParallel,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from windlass.config import ReplicaPlace
from windlass.errors import ConfigError, ManifestError, UnsupportedLayout
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.layout.naming.place import Coords, Geometry, place
from windlass.layout.naming.rules import Family
from windlass.layout.naming.tables import FAMILIES
from windlass.memory.torch_dtypes import dtype_of
from windlass.trainers.client import TrainerClient, TrainerWeights
from windlass.trainers.fsdp import connect_described
from windlass.transfer.dtensor import HeldTensor, LiveTensors, check_memory, refuse_freed
from windlass.transports.registry import TransportConfig

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BUFFERS = ("mlp.router.expert_bias",)
"""Suffixes of the buffers that checkpoints contain."""
_LAYER = re.compile(
    r"(decoder\.layers\.\d+|mtp\.layers\.\d+(?=\.transformer_layer))(?:\.transformer_layer)?"
)
"""Pattern of the name of a decoder layer, or of the transformer layer inside an MTP block, which predicts further tokens."""


def connect_megatron_trainer(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    family: str | Family,
    vocab_size: int,
    controller: str,
    token: str,
    transport: str | TransportConfig = "auto",
    arena_nbytes: int = 0,
    use_main_params: bool = False,
    ignore: Sequence[str] = (),
    group: str = "trainer",
    replica: ReplicaPlace = ReplicaPlace.OFF,
    allow_unused: Sequence[str] = (),
    keep: Sequence[str] = (),
    connect_deadline_s: float = 60.0,
) -> TrainerClient:
    """Connect this rank of a Megatron-core trainer.

    Every rank calls this after `parallel_state.initialize_model_parallel`. The call is not collective and gathers no
    weights. Rank and world size come from `torch.distributed`.

    Args:
        model: a `GPTModel`, wrapped or not, or the list of model chunks of virtual stages.
        family: `model_type` of the checkpoint, or a naming table of the caller.
        vocab_size: vocabulary size of the checkpoint, without Megatron's padding.
        controller: address of the controller.
        token: secret of the controller.
        transport: name or configuration; see `connect_trainer`.
        arena_nbytes: memory for packed bytes; 0 for as much as one update packs.
        use_main_params: publish the optimizer's fp32 copies, not the bf16 parameters.
        ignore: prefixes of parameters that no engine needs (`mtp.`).
        group: name of the trainer job.
        replica: see `connect_trainer`.
        allow_unused: see `connect_trainer`.
        keep: see `connect_trainer`.
        connect_deadline_s: seconds to wait for the controller.

    Raises:
        UnsupportedLayout, ManifestError: see `describe_megatron_trainer`.
        ConfigError: `controller` is not a URL, `transport` not a transport, or `arena_nbytes` is too small.
        TransportUnavailable, AuthenticationError, ProtocolError, PeerTimeout: see `connect_trainer`.
    """
    described = describe_megatron_trainer(
        model,
        family=family,
        vocab_size=vocab_size,
        group=group,
        use_main_params=use_main_params,
        ignore=ignore,
    )
    return connect_described(
        described,
        transport,
        controller,
        token,
        arena_nbytes=arena_nbytes,
        replica=replica,
        allow_unused=allow_unused,
        keep=keep,
        connect_deadline_s=connect_deadline_s,
    )


def describe_megatron_trainer(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    family: str | Family,
    vocab_size: int,
    group: str = "trainer",
    use_main_params: bool = False,
    ignore: Sequence[str] = (),
) -> TrainerWeights:
    """Describe this rank's part of the model. Not collective.

    Raises:
        UnsupportedLayout: the naming table has no rule for a parameter, or no table describes the kind of attention or
            MLP; the distributed optimizer keeps the fp32 copies as flat ranges; parameters are in fp8; or a wrapper
            splits parameters over data-parallel ranks.
        ManifestError: the shape of a parameter contradicts the configuration.
    """
    chunks = _chunks_of(model)
    _refuse_wrappers(chunks)
    table = FAMILIES.find(family) if isinstance(family, str) else family
    config = _unwrap(chunks[0]).config
    geometry = _geometry(config, vocab_size)
    coords = megatron_coords()
    tied = bool(_unwrap(chunks[0]).share_embeddings_and_output_weights)
    builder = ManifestBuilder(f"{group}/{dist.get_rank()}", Role.TRAINER)
    holds_embedding = False

    def walk() -> list[HeldTensor]:
        return [
            HeldTensor(name, name, tensor, by_fsdp=False)
            for name, tensor in _held(chunks, use_main_params, tuple(ignore))
        ]

    for held in walk():
        name, tensor = held.name, held.tensor
        check_memory(name, tensor)
        if type(tensor.detach()) is not torch.Tensor:
            raise UnsupportedLayout(
                f"parameter {name!r} must be a plain tensor, got {type(tensor.detach()).__name__}: no naming table "
                "describes tensors whose memory has another form than their dtype, such as fp8 with scales"
            )
        if not tensor.is_contiguous():
            raise UnsupportedLayout(
                f"parameter {name!r} must be contiguous, got strides {tuple(tensor.stride())}"
            )
        placed = place(table, name, tuple(tensor.shape), geometry, coords)
        itemsize = tensor.element_size()
        builder.add_parameter(
            name,
            nbytes=tensor.nbytes,
            dtype=dtype_of(name, tensor),
            padding_nbytes=placed.padding * itemsize,
        )
        for shard in placed.shards:
            target = _EMBEDDING if tied and shard.tensor == _HEAD else shard.tensor
            holds_embedding |= target == _EMBEDDING
            builder.add_shard(
                target,
                shard.global_shape,
                shard.box,
                name,
                offset_bytes=shard.offset * itemsize,
                strides_bytes=tuple(step * itemsize for step in shard.strides),
            )
    if tied and holds_embedding:
        builder.add_alias(_HEAD, _EMBEDDING)
    tensors = LiveTensors(chunks, walk)
    return TrainerWeights(
        manifest=builder.build(),
        parameters=tensors.locate,
        read=tensors.read,
        watch=tensors.watch,
        changed=tensors.changed,
        make_whole=lambda: make_whole(chunks),
    )


def make_whole(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Gather the stepped parameters that the distributed optimizer leaves to the next forward pass.

    With `overlap_param_gather=True`, `optimizer.step` updates on each rank only the parameters that this rank steps;
    the rank has old values of all others. `TrainerClient` calls this function before it publishes. A caller that reads
    the parameters itself, for a `WeightGroup` or for files, must call it first.

    Collective over the data-parallel ranks of each chunk; it runs in the calling thread. The next forward pass uses
    the gathered parameters and does not gather them again.

    Args:
        model: as for `connect_megatron_trainer`.

    Raises:
        PlanError: the memory of a parameter buffer is freed.
    """
    for chunk in _lazily_gathered(_chunks_of(model)):
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            refuse_freed("of a parameter buffer", buffer.param_data)
        chunk.start_param_sync(force_sync=True)


def check_whole(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Raise an error if `make_whole` was not called since the last optimizer step of a model. Not collective.

    Raises:
        ConfigError: parameters of this rank may have the values of an earlier step.
    """
    for chunk in _lazily_gathered(_chunks_of(model)):
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                raise ConfigError(
                    "overlap_param_gather: parameters of the last step must be gathered before they are "
                    "read: call windlass.trainers.megatron.make_whole(model) on every rank"
                )


def _chunks_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    chunks = (model,) if isinstance(model, torch.nn.Module) else tuple(model)
    if not chunks:
        raise ManifestError("model must have at least one chunk, got none")
    return chunks


def _lazily_gathered(chunks: Sequence[torch.nn.Module]) -> Iterator[DistributedDataParallel]:
    for wrapper in _wrappers(chunks):
        if isinstance(wrapper, DistributedDataParallel):
            options = wrapper.ddp_config
            if options.use_distributed_optimizer and options.overlap_param_gather:
                yield wrapper


def _refuse_wrappers(chunks: Sequence[torch.nn.Module]) -> None:
    """Refuse wrappers whose parameters `make_whole` cannot gather or no naming table describes."""
    for wrapper in _wrappers(chunks):
        if isinstance(wrapper, FullyShardedDataParallel | TorchFullyShardedDataParallel):
            raise UnsupportedLayout(
                f"model must not be wrapped in {type(wrapper).__name__}: it cuts parameters over "
                "data-parallel ranks, which no naming table describes; use DistributedDataParallel"
            )
        if isinstance(wrapper, DistributedDataParallel) and wrapper.ddp_config.fp8_param_gather:
            raise UnsupportedLayout(
                "fp8_param_gather must be False, got True: parameters in fp8 are published as bytes "
                "without their scales; keep parameters in bfloat16"
            )


def megatron_coords() -> Coords:
    """Return the position of this rank on the axes that split parameters, from Megatron's parallel state."""
    state = parallel_state
    return Coords(
        tp=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        ep=(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        etp=(
            state.get_expert_tensor_parallel_rank(),
            state.get_expert_tensor_parallel_world_size(),
        ),
    )


def _main_param(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return the optimizer's fp32 copy of a parameter, or the parameter itself if it is fp32 and has no copy."""
    extra = parameter.__dict__
    if extra.get("main_param_sharded"):
        raise UnsupportedLayout(
            f"use_main_params: parameter {name!r}: the distributed optimizer keeps flat "
            "ranges of it, which are not a box of a tensor; publish the model parameters"
        )
    main: torch.Tensor | None = extra.get("main_param")
    if main is None and parameter.dtype is not torch.float32:
        raise UnsupportedLayout(
            f"use_main_params: parameter {name!r} has no fp32 copy; call after the "
            "optimizer is made, with bf16 or fp16 set in its configuration"
        )
    return parameter if main is None else main


def _held(
    chunks: Sequence[torch.nn.Module], use_main_params: bool, ignore: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield global name and tensor of all parameters and buffers of the checkpoint, chunk by chunk."""
    for chunk in map(_unwrap, chunks):
        numbers = _layer_numbers(chunk)
        for local_name, parameter in chunk.named_parameters():
            name = _global_name(local_name, numbers)
            if not name.startswith(ignore):
                main = use_main_params and parameter.requires_grad
                yield name, _main_param(name, parameter) if main else parameter
        for local_name, buffer in chunk.named_buffers():
            name = _global_name(local_name, numbers)
            if name.endswith(_BUFFERS) and not name.startswith(ignore):
                yield name, buffer


def _wrappers(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield the data-parallel, precision and compile wrappers of each chunk from the outside in, and then its model."""
    for chunk in chunks:
        inner: torch.nn.Module | None = chunk
        while inner is not None:
            yield inner
            inner = inner._modules.get("module", inner._modules.get("_orig_mod"))


def _unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    return list(_wrappers([chunk]))[-1]


def _layer_numbers(chunk: torch.nn.Module) -> dict[str, int]:
    """Return name of each layer in the chunk -> its number in the whole model, from 0. MTP layers are numbered last."""
    return {
        found[1]: int(module.layer_number) - 1
        for name, module in chunk.named_modules()
        if isinstance(module, TransformerLayer) and (found := _LAYER.fullmatch(name))
    }


def _global_name(name: str, numbers: dict[str, int]) -> str:
    found = re.match(r"((?:decoder|mtp)\.layers)\.\d+(?=\.)", name)
    if found is None:
        return name
    return f"{found[1]}.{numbers[found.group()]}{name[found.end() :]}"


def _geometry(config: object, vocab_size: int) -> Geometry:
    values = vars(config)
    if not values["gated_linear_unit"]:
        raise UnsupportedLayout(
            "gated_linear_unit must be True, as in every naming table, got False"
        )
    if values.get("attention_output_gate"):
        raise UnsupportedLayout(
            "attention_output_gate must be False, as in every naming table, got True"
        )
    heads = int(values["num_attention_heads"])
    groups = int(values["num_query_groups"] or heads)
    latent: tuple[tuple[str, int], ...] = ()
    if values["multi_latent_attention"]:
        latent = (
            ("kv_a_proj_with_mqa.weight", values["kv_lora_rank"] + values["qk_pos_emb_head_dim"]),
            ("q_a_proj.weight", values["q_lora_rank"] or 0),
        )
    return Geometry(
        num_query_groups=groups,
        queries_per_group=heads // groups,
        head_dim=int(values["kv_channels"]),
        vocab_size=vocab_size,
        hidden_size=int(values["hidden_size"]),
        num_experts=int(values["num_moe_experts"] or 0),
        latent_rows=latent,
    )
