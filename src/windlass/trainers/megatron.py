"""Trainer adapter for Megatron-core (0.16 to 0.18). It describes each rank's shards and gathers no weights.

Weights may be sharded by tensor, pipeline (with virtual stages), expert and expert-tensor parallelism. Context- and
data-parallel ranks have equal weights, and the planner chooses the ranks that send. The adapter reads layer numbers from
the layers themselves, so it supports any pipeline layout.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    TorchFullyShardedDataParallel,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from windlass.config import ReplicaPlace
from windlass.errors import ConfigError, ManifestError, PlanError, UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.layout.naming.place import Coords, Geometry, Placed, PlacedShard, place
from windlass.layout.naming.rules import Family
from windlass.layout.naming.tables import BUILT_IN, FAMILIES
from windlass.trainers.client import TrainerClient
from windlass.trainers.exporter import Exporter, add_placed, captured_export, refuse_strided
from windlass.trainers.fsdp import connect_described
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.dtensor import HeldTensor, LiveTensors, check_memory, refuse_freed
from windlass.transports.registry import TransportConfig

_log = logging.getLogger(__name__)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_VOCABULARY = ("embedding.word_embeddings.", "output_layer.")
"""Prefixes of parameters with one row per token of the vocabulary, which Megatron pads."""
ROUTER_BIASES = ("mlp.router.expert_bias",)
"""Suffixes of the names of the biases of routers, the only buffers that checkpoints contain. Megatron trains with them in
float32."""
_OTHER_VALUES = {
    "layernorm_zero_centered_gamma": "Megatron adds 1 to the weights of norms, and engines do not",
    "rotary_interleaved": "Megatron rotates neighbouring elements of a head, and engines rotate its halves",
}
"""Settings of Megatron with which built-in naming tables would publish wrong values -> the reason."""
_LAYER = re.compile(r"(?:decoder|mtp)\.layers\.\d+")
"""Pattern of the names of decoder layers and of MTP layers (multi-token prediction)."""


def connect_megatron_trainer(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    vocab_size: int,
    controller: str,
    token: str,
    family: str | Family | None = None,
    exporter: Exporter | None = None,
    transport: str | TransportConfig = "auto",
    arena_nbytes: int = 0,
    use_main_params: bool = False,
    copy_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ignore: Sequence[str] = (),
    group: str = "trainer",
    replica: ReplicaPlace = ReplicaPlace.OFF,
    allow_unused: Sequence[str] = (),
    keep: Sequence[str] = (),
    connect_deadline_s: float = 60.0,
) -> TrainerClient:
    """Connect this rank of a Megatron-core trainer.

    Every trainer rank must call this after `parallel_state.initialize_model_parallel`. Without `exporter`, the call is
    not collective and gathers no weights. Rank and world size come from `torch.distributed`.

    Args:
        model: a `GPTModel`, wrapped or not, or the list of model chunks of virtual stages.
        vocab_size: vocabulary size of the checkpoint, without Megatron's padding.
        controller: address of the controller.
        token: secret of the controller.
        family: `model_type` in the checkpoint's config.json, or a naming table. With `exporter`, the table is used only
            if the exporter computes values or leaves out a parameter.
        exporter: the framework's own exporter, such as `bridge.export_weights` of mbridge. Windlass runs the exporter a
            few times while the parameters contain element numbers instead of weights. The results show where the exporter
            copies each element.
        transport: name or configuration; see `connect_trainer`.
        arena_nbytes: see `connect_trainer`.
        use_main_params: True to publish the optimizer's fp32 copies, False to publish the bf16 parameters.
        copy_of: function that takes a parameter or buffer of the model, and returns the tensor to publish in its place
            (of the same shape and dtype). Pass it if the model has no memory during `publish`, such as with
            torch_memory_saver. With `copy_of`, `publish` does not call `make_whole`, so the copies must be made after the
            parameters were gathered.
        ignore: name prefixes of parameters to leave out, for example `mtp.`.
        group: name of the trainer job.
        replica: see `connect_trainer`.
        allow_unused: see `connect_trainer`.
        keep: see `connect_trainer`.
        connect_deadline_s: seconds to wait for the controller, and for other ranks in each collective of `exporter`.

    Raises:
        UnsupportedLayout, ManifestError, PlanError: see `describe_megatron_trainer`.
        ConfigError: neither `family` nor `exporter` is given, `copy_of` is given with `use_main_params`, `controller` is
            not a URL, `transport` is not a transport, or `arena_nbytes` is too small.
        TransportUnavailable, AuthenticationError, ProtocolError, PeerTimeout: see `connect_trainer`.
    """
    described = describe_megatron_trainer(
        model,
        vocab_size=vocab_size,
        family=family,
        exporter=exporter,
        group=group,
        use_main_params=use_main_params,
        copy_of=copy_of,
        ignore=ignore,
        exporter_deadline_s=connect_deadline_s,
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
    vocab_size: int,
    family: str | Family | None = None,
    exporter: Exporter | None = None,
    group: str = "trainer",
    use_main_params: bool = False,
    copy_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ignore: Sequence[str] = (),
    exporter_deadline_s: float = 60.0,
) -> TrainerWeights:
    """Describe this rank's shards of the model. Collective only with `exporter`.

    For arguments see `connect_megatron_trainer`.

    Raises:
        ConfigError: neither `family` nor `exporter` is given, or `copy_of` is given with `use_main_params`.
        PlanError: `copy_of` returned a tensor of another shape or dtype.
        UnsupportedLayout: the naming table has no rule for a parameter; no table describes the model's attention or
            MLP, or a built-in table describes other values; the exporter computes values or leaves out a parameter, and
            there is no table; with `use_main_params`, the distributed optimizer keeps the fp32 copies as flat ranges;
            parameters are in fp8; or a wrapper shards parameters over data-parallel ranks.
        ManifestError: the shape of a parameter contradicts the configuration.
        PeerTimeout: another rank did not run the exporter within `exporter_deadline_s`.
    """
    chunks = _chunks_of(model)
    _refuse_wrappers(chunks)
    if copy_of is not None and use_main_params:
        raise ConfigError(
            "copy_of: must be None with use_main_params=True, got a function; leave it out, because the optimizer's fp32 "
            "copies keep their memory during `publish`"
        )
    tied = bool(_unwrap(chunks[0]).share_embeddings_and_output_weights)
    builder = ManifestBuilder(f"{group}/{dist.get_rank()}", Role.TRAINER)
    holds_embedding = False
    _widen_biases(chunks)

    def walk() -> list[HeldTensor]:
        held = _held(chunks, use_main_params, tuple(ignore))
        if copy_of is not None:
            held = ((name, _copy(name, tensor, copy_of)) for name, tensor in held)
        return [HeldTensor(name, name, tensor, by_fsdp=False) for name, tensor in held]

    held_here = walk()
    for held in held_here:
        _check_plain(held)
    placed = _placed(chunks, held_here, vocab_size, family, exporter, ignore, exporter_deadline_s)
    for held in held_here:
        boxes = placed[held.name]
        if tied:
            boxes = _under_one_name(boxes)
            holds_embedding |= any(shard.tensor == _EMBEDDING for shard in boxes.shards)
        add_placed(builder, held.name, held.tensor, boxes)
    if tied and holds_embedding:
        builder.add_alias(_HEAD, _EMBEDDING)
    tensors = LiveTensors(chunks, walk)
    return TrainerWeights(
        manifest=builder.build(),
        parameters=tensors.locate,
        read=tensors.read,
        watch=tensors.watch,
        changed=tensors.changed,
        make_whole=(lambda: make_whole(chunks)) if copy_of is None else None,
    )


def _copy(
    name: str, tensor: torch.Tensor, copy_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the tensor to publish in place of `tensor`. Raise PlanError if the two differ in shape or dtype."""
    found = copy_of(tensor)
    if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
        raise PlanError(
            f"copy_of: {name!r} must be {tensor.dtype} of shape {tuple(tensor.shape)}, got {found.dtype} of shape "
            f"{tuple(found.shape)}"
        )
    return found


def _under_one_name(placed: Placed) -> Placed:
    """Rename the output matrix of a model with tied embeddings to the name of the embedding, and drop duplicate boxes."""
    shards = (
        replace(shard, tensor=_EMBEDDING) if shard.tensor == _HEAD else shard
        for shard in placed.shards
    )
    return Placed(tuple(dict.fromkeys(shards)), placed.padding)


def _check_plain(held: HeldTensor) -> None:
    """Raise UnsupportedLayout unless a tensor is a plain tensor with its elements in row-major order."""
    name, tensor = held.name, held.tensor
    check_memory(name, tensor)
    if type(tensor.detach()) is not torch.Tensor:
        raise UnsupportedLayout(
            f"parameter {name!r} must be a plain tensor, got {type(tensor.detach()).__name__}: Windlass cannot "
            "publish a tensor subclass, such as fp8 values with scales; keep parameters in bfloat16 or float32"
        )
    refuse_strided({name: tensor})


def _placed(
    chunks: Sequence[torch.nn.Module],
    held_here: Sequence[HeldTensor],
    vocab_size: int,
    family: str | Family | None,
    exporter: Exporter | None,
    ignore: Sequence[str],
    deadline_s: float,
) -> dict[str, Placed]:
    """Map the name of each tensor of `held_here` to the boxes of checkpoint tensors that the tensor contains.

    The boxes come from the exporter. They come from the naming table `family` instead if there is no exporter, or if the
    exporter computes values or leaves out a parameter.

    Raises:
        ConfigError: there is neither an exporter nor a naming table.
        UnsupportedLayout: neither the exporter nor the naming table can describe a parameter.
        ConfigError, PeerTimeout: see `captured_export`.
    """
    if exporter is not None:
        # The exporter reads the model's parameters. If the optimizer's copies are published instead, the result is valid
        # for these copies too: their elements have the same order.
        tensors = dict(_held(chunks, use_main_params=False, ignore=tuple(ignore)))
        try:
            found = captured_export(
                tensors,
                lambda: exporter([_unwrap(chunk) for chunk in chunks]),
                required=[n for n, t in tensors.items() if isinstance(t, torch.nn.Parameter)],
                deadline_s=deadline_s,
            )
            nothing = Placed((), 0)
            return {
                held.name: _without_padding(held, found.get(held.name, nothing), vocab_size)
                for held in held_here
            }
        except UnsupportedLayout as error:
            if family is None:
                raise
            _log.warning(
                "the exporter cannot be used, so the naming table of %s is used: %s", family, error
            )
    if family is None:
        raise ConfigError(
            "connect_megatron_trainer: family or exporter must be given; pass the checkpoint's `model_type` as "
            "`family`, or `exporter=bridge.export_weights`"
        )
    table = FAMILIES.find(family) if isinstance(family, str) else family
    _refuse_other_values(table, _unwrap(chunks[0]).config)
    geometry, coords = _geometry(_unwrap(chunks[0]).config, vocab_size), megatron_coords()
    return {
        held.name: place(table, held.name, tuple(held.tensor.shape), geometry, coords)
        for held in held_here
    }


def _without_padding(held: HeldTensor, placed: Placed, vocab_size: int) -> Placed:
    """Leave out the rows of a vocabulary matrix after the first `vocab_size` rows.

    These rows are Megatron's padding, which some exporters do not remove.
    """
    if not held.name.startswith(_VOCABULARY):
        return placed
    shards: list[PlacedShard] = []
    padding = placed.padding
    for shard in placed.shards:
        shape, box = shard.global_shape, shard.box
        num_rows = max(0, min(box.sizes[0], vocab_size - box.offsets[0]))
        kept = Box(box.offsets, (num_rows, *box.sizes[1:]))
        padding += box.numel - kept.numel
        if num_rows:
            shape = (min(shape[0], vocab_size), *shape[1:])
            shards.append(replace(shard, global_shape=shape, box=kept))
    return Placed(tuple(shards), padding)


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
        ManifestError: `model` has no chunk.
    """
    for chunk in _lazily_gathered(_chunks_of(model)):
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            refuse_freed("of a parameter buffer", buffer.param_data)
        chunk.start_param_sync(force_sync=True)


def check_whole(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Check that `make_whole` was called since the last optimizer step of a model. Not collective.

    Raises:
        ConfigError: `make_whole` was not called, so parameters of this rank may have old values.
        ManifestError: `model` has no chunk.
    """
    for chunk in _lazily_gathered(_chunks_of(model)):
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                raise ConfigError(
                    "overlap_param_gather: parameters of the last step must be gathered before they are "
                    "read: call windlass.trainers.megatron.make_whole(model) on every rank"
                )


def _chunks_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    """Return the chunks of a model as a tuple. Raise ManifestError if there is none."""
    chunks = (model,) if isinstance(model, torch.nn.Module) else tuple(model)
    if not chunks:
        raise ManifestError("model must have at least one chunk, got none")
    return chunks


def _lazily_gathered(chunks: Sequence[torch.nn.Module]) -> Iterator[DistributedDataParallel]:
    """Yield the wrappers whose optimizer leaves the gathering of parameters to the next forward pass."""
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
                "data-parallel ranks, and Windlass cannot tell which part a rank has; use DistributedDataParallel"
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
        UnsupportedLayout: the distributed optimizer keeps the copy as flat ranges, or there is no copy and the parameter
            is not fp32.
    """
    extra = parameter.__dict__
    if extra.get("main_param_sharded"):
        raise UnsupportedLayout(
            f"use_main_params must be False, because the distributed optimizer keeps the fp32 copy of {name!r} as flat "
            "ranges, which are no boxes of a tensor, got True; publish the model parameters"
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
    """Yield (name, tensor) for all parameters of this rank, and for the buffers that checkpoints contain.

    Leave out an output layer that the model does not use. The layer numbers in the names count the layers of the whole
    model, not of the chunk.

    Args:
        chunks: model chunks of this rank.
        use_main_params: whether to yield the optimizer's fp32 copies of trained parameters.
        ignore: prefixes of the names to leave out.
    """
    for chunk in map(_unwrap, chunks):
        numbers, unused = _layer_numbers(chunk), _unused_output(chunk)
        for local_name, parameter in chunk.named_parameters():
            name = _global_name(local_name, numbers)
            if parameter is not unused and not name.startswith(ignore):
                main = use_main_params and parameter.requires_grad
                yield name, _main_param(name, parameter) if main else parameter
        for local_name, buffer in chunk.named_buffers():
            name = _global_name(local_name, numbers)
            if name.endswith(ROUTER_BIASES) and not name.startswith(ignore):
                yield name, buffer


def _widen_biases(chunks: Iterable[torch.nn.Module]) -> None:
    """Convert the biases of routers to float32, as Megatron does in the first forward pass.

    Megatron's wrapper for bfloat16 converts these buffers to bfloat16, and the first forward pass gives them new memory.
    A description of the bfloat16 buffers would not be valid after that pass.
    """
    for chunk in chunks:
        for name, buffer in chunk.named_buffers():
            if name.endswith(ROUTER_BIASES):
                buffer.data = buffer.data.float()


def _unused_output(chunk: Any) -> torch.Tensor | None:
    """Return the output matrix of a chunk if Megatron never uses it; otherwise None.

    With tied embeddings and MTP layers, the last pipeline stage has a copy of the embedding and uses it as output matrix.
    Megatron also allocates a separate output matrix in this stage, but never uses it.
    """
    if not (chunk.share_embeddings_and_output_weights and chunk.post_process):
        return None
    output: torch.Tensor | None = chunk.output_layer.weight
    return None if chunk.shared_embedding_or_output_weight() is output else output


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
    """Return the layers of a chunk: name in the chunk -> number of the layer in the whole model, from 0.

    Megatron-core numbers MTP layers from 1. A checkpoint numbers them after the decoder layers.
    """
    numbers = {}
    for name, module in chunk.named_modules():
        if not _LAYER.fullmatch(name):
            continue
        numbers[name] = int(module.layer_number) - 1
        if isinstance(module, MultiTokenPredictionLayer):
            numbers[name] += int(module.config.num_layers)
    return numbers


def _global_name(name: str, numbers: dict[str, int]) -> str:
    found = re.match(r"((?:decoder|mtp)\.layers)\.\d+(?=\.)", name)
    if found is None:
        return name
    return f"{found[1]}.{numbers[found.group()]}{name[found.end() :]}"


def _refuse_other_values(table: Family, config: object) -> None:
    """Raise UnsupportedLayout if parameters have other values than the checkpoint tensors of a built-in family.

    Naming tables copy elements. With these settings, Megatron's models compute something else from the same values.
    """
    if table.name not in {family.name for family in BUILT_IN}:
        return
    for name, meaning in _OTHER_VALUES.items():
        if vars(config).get(name):
            raise UnsupportedLayout(
                f"{name} must be False with the naming table of {table.name}, got True: {meaning}; pass a converter as "
                "`exporter` without `family`, or a `Family` with another name if your engines compute the same"
            )


def _geometry(config: object, vocab_size: int) -> Geometry:
    """Return the sizes that naming tables need, as Megatron's configuration of the model gives them.

    Raises:
        UnsupportedLayout: no naming table describes the model's attention or MLP.
    """
    values = vars(config)
    if not values["gated_linear_unit"]:
        raise UnsupportedLayout(
            "gated_linear_unit must be True, because naming tables describe only gated MLPs, got False; pass `exporter` "
            "instead of `family`"
        )
    if values.get("attention_output_gate"):
        raise UnsupportedLayout(
            "attention_output_gate must be False, because naming tables describe only attention without a gate, got "
            "True; pass `exporter` instead of `family`"
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
