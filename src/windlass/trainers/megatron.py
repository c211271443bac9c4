"""Trainer adapter for Megatron-core (0.16). It describes each rank's shards and gathers no weights.

Weights may be sharded by tensor, pipeline (with virtual stages), expert and expert-tensor parallelism. Context- and
data-parallel ranks have equal weights, and the planner chooses the ranks that send. The adapter reads layer numbers from
the layers themselves, so it supports any pipeline layout.
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
"""Suffixes of the names of buffers that checkpoints contain."""
_LAYER = re.compile(
    r"(decoder\.layers\.\d+|mtp\.layers\.\d+(?=\.transformer_layer))(?:\.transformer_layer)?"
)
"""Pattern of the names of decoder layers, and of transformer layers inside MTP layers (which predict further tokens)."""


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

    Every trainer rank must call this after `parallel_state.initialize_model_parallel`. The call is not collective and
    gathers no weights. Rank and world size come from `torch.distributed`.

    Args:
        model: a `GPTModel`, wrapped or not, or the list of model chunks of virtual stages.
        family: `model_type` in the checkpoint's config.json, or a naming table.
        vocab_size: vocabulary size of the checkpoint, without Megatron's padding.
        controller: address of the controller.
        token: secret of the controller.
        transport: name or configuration; see `connect_trainer`.
        arena_nbytes: see `connect_trainer`.
        use_main_params: True to publish the optimizer's fp32 copies, False to publish the bf16 parameters.
        ignore: prefixes of the names of parameters to leave out (`mtp.`).
        group: name of the trainer job.
        replica: see `connect_trainer`.
        allow_unused: see `connect_trainer`.
        keep: see `connect_trainer`.
        connect_deadline_s: seconds to wait for the controller.

    Raises:
        UnsupportedLayout, ManifestError: see `describe_megatron_trainer`.
        ConfigError: `controller` is not a URL, `transport` is not a transport, or `arena_nbytes` is too small.
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
    """Describe this rank's shards of the model. Not collective. For arguments see `connect_megatron_trainer`.

    Raises:
        UnsupportedLayout: the naming table has no rule for a parameter; no table describes the model's attention or
            MLP; with `use_main_params`, the distributed optimizer keeps the fp32 copies as flat ranges; parameters are
            in fp8; or a wrapper shards parameters over data-parallel ranks.
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
    """Gather the parameters that the last optimizer step has changed on other data-parallel ranks.

    With `overlap_param_gather=True`, Megatron-core's distributed optimizer updates only this rank's share of the
    parameters, and gathers the other parameters in the next forward pass. This function gathers them now; the next
    forward pass does not gather them again. Collective over the data-parallel ranks of each chunk.

    `TrainerClient` calls this function before it publishes. Call it yourself before you read the parameters for a
    `WeightGroup` or for files.

    Args:
        model: as for `connect_megatron_trainer`.

    Raises:
        PlanError: the memory of a parameter buffer has been freed.
    """
    for chunk in _lazily_gathered(_chunks_of(model)):
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            refuse_freed("of a parameter buffer", buffer.param_data)
        chunk.start_param_sync(force_sync=True)


def check_whole(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Check that `make_whole` was called since the last optimizer step of a model. Not collective.

    Raises:
        ConfigError: `make_whole` was not called, so that parameters of this rank may have old values.
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
    """Raise UnsupportedLayout for a wrapper that shards parameters over data-parallel ranks or gathers them in fp8."""
    for wrapper in _wrappers(chunks):
        if isinstance(wrapper, FullyShardedDataParallel | TorchFullyShardedDataParallel):
            raise UnsupportedLayout(
                f"model must not be wrapped in {type(wrapper).__name__}: it shards parameters over "
                "data-parallel ranks, which no naming table describes; use DistributedDataParallel"
            )
        if isinstance(wrapper, DistributedDataParallel) and wrapper.ddp_config.fp8_param_gather:
            raise UnsupportedLayout(
                "fp8_param_gather must be False, got True: parameters in fp8 are published as bytes "
                "without their scales; keep parameters in bfloat16"
            )


def megatron_coords() -> Coords:
    """Return this rank's tensor-, expert- and expert-tensor-parallel (rank, size), from Megatron's parallel state."""
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
    """Return the optimizer's fp32 copy of a parameter; return the parameter itself if it is fp32 and has no copy.

    Raises:
        UnsupportedLayout: the distributed optimizer keeps the copy as flat ranges, or a parameter that is not fp32 has
            no copy.
    """
    extra = parameter.__dict__
    if extra.get("main_param_sharded"):
        raise UnsupportedLayout(
            f"use_main_params: parameter {name!r}: the distributed optimizer keeps its fp32 copy as flat "
            "ranges, which are not a box of a tensor; publish the model parameters"
        )
    main: torch.Tensor | None = extra.get("main_param")
    if main is None and parameter.dtype is not torch.float32:
        raise UnsupportedLayout(
            f"use_main_params: parameter {name!r} has no fp32 copy; create the optimizer first, "
            "with bf16 or fp16 set in its configuration"
        )
    return parameter if main is None else main


def _held(
    chunks: Sequence[torch.nn.Module], use_main_params: bool, ignore: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (global name, tensor) for all parameters, and for the buffers that checkpoints contain."""
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
    """Yield each chunk's wrappers (data-parallel, precision, compile), the outermost first, and then the chunk's model."""
    for chunk in chunks:
        inner: torch.nn.Module | None = chunk
        while inner is not None:
            yield inner
            inner = inner._modules.get("module", inner._modules.get("_orig_mod"))


def _unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    return list(_wrappers([chunk]))[-1]


def _layer_numbers(chunk: torch.nn.Module) -> dict[str, int]:
    """Return name of a layer in the chunk -> number of the layer in the whole model, from 0."""
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
