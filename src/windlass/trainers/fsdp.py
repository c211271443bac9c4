"""Trainer adapter for PyTorch modules: with FSDP2, tensor parallelism, both, or neither."""

from __future__ import annotations

import glob
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from windlass.config import ReplicaPlace
from windlass.control.connect_messages import ALLOW_UNUSED_VARIABLE, JOB_VARIABLE
from windlass.envs import environment_value
from windlass.errors import ConfigError
from windlass.layout.manifest import Role, ShardManifest
from windlass.layout.naming.stacked import StackedRule
from windlass.memory.cuda.driver import gpu_of
from windlass.trainers.client import TrainerClient
from windlass.trainers.exporter import Exporter, exported_manifest
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.dtensor import (
    HeldTensor,
    LiveTensors,
    NameMap,
    describe_module,
    local_tensor,
    own_tensors,
)
from windlass.transfer.saved_names import without_marks
from windlass.transfer.what_acts import refuse_kept, refuse_originals, refuse_rewritten
from windlass.transports.registry import TransportConfig, create_transport, parse_transport


def connect_described(
    weights: TrainerWeights,
    transport: str | TransportConfig,
    controller: str,
    token: str,
    *,
    arena_nbytes: int,
    replica: ReplicaPlace,
    allow_unused: Sequence[str],
    keep: Sequence[str],
    connect_deadline_s: float,
    release: Callable[[], None] | None = None,
) -> TrainerClient:
    """Create the transport of this trainer rank, and connect the rank to the controller.

    `weights` is the description that a trainer adapter has made. The patterns of `allow_unused` and of the job file are
    added to the patterns in `weights`. For the other arguments and for errors see `connect_trainer`.
    """
    allowed = (
        *weights.allow_unused,
        *patterns_from("allow_unused", allow_unused),
        *_launched_patterns(),
    )
    config = parse_transport(transport)
    memory_at = next((memory.address for memory in weights.parameters() if memory.nbytes), 0)
    return TrainerClient(
        replace(
            weights,
            step_stream=step_stream(memory_at),
            allow_unused=allowed,
            keep=patterns_from("keep", keep),
            release=release,
        ),
        transport=create_transport(config, towards=controller, memory_at=memory_at),
        controller=controller,
        token=token,
        job=environment_value(JOB_VARIABLE) or shared_job(),
        world_size=dist.get_world_size() if _is_distributed() else 1,
        arena_nbytes=arena_nbytes,
        replica=replica,
        connect_deadline_s=connect_deadline_s,
    )


def patterns_from(what: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Check a sequence of patterns, and return it as a tuple. `what` is the name of the argument, for errors.

    Raises:
        ConfigError: `patterns` is a string, or an element is empty or is not a string.
    """
    if isinstance(patterns, str) or not all(
        isinstance(p, str) and p for p in list[object](patterns)
    ):
        raise ConfigError(
            f"{what}: must be a sequence of patterns, got {patterns!r}; pass `{what}=('value_head.*',)`"
        )
    return tuple(patterns)


def _launched_patterns() -> tuple[str, ...]:
    """Return `trainer.allow_unused` of the job file, which `windlass launch` passes in an environment variable."""
    return tuple(environment_value(ALLOW_UNUSED_VARIABLE).split())


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def step_stream(memory_at: int) -> Callable[[], int] | None:
    """Return a function that returns the calling thread's current CUDA stream on one GPU.

    `memory_at` is an address on this GPU. Return None if it is 0 or an address in host memory.

    Raises:
        TransferFailed: the driver does not report the GPU of the address.
    """
    if not memory_at or (ordinal := gpu_of(memory_at)) < 0:
        return None
    return lambda: int(torch.cuda.current_stream(ordinal).cuda_stream)


def shared_job() -> str:
    """Return a random identity for the trainer job. All ranks of the default process group get the same identity.

    The first rank that calls this writes the identity into the store of `torch.distributed`; the other ranks read it. So
    the call is not collective. Without a process group, return an empty string.

    Raises:
        ConfigError: the store cannot be reached.
    """
    if not _is_distributed():
        return ""
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        found = _get_default_store().compare_set("windlass/job", "", secrets.token_hex(8))
    except RuntimeError as error:
        raise ConfigError(
            "connect_trainer: the store of torch.distributed must be reachable, or WINDLASS_JOB must be set: "
            f"{error}"
        ) from error
    return str(found, "ascii")


def describe_trainer(
    module: torch.nn.Module,
    *,
    group: str,
    name_map: NameMap | None,
    stacked: Sequence[StackedRule] | None = None,
    exporter: Exporter | None = None,
    exporter_deadline_s: float = 60.0,
    keep: Sequence[str] = (),
) -> TrainerWeights:
    """Describe this rank's shards of `module`. Collective only with `exporter`. For arguments see `connect_trainer`.

    Raises:
        ConfigError: `exporter` is given with `name_map` or `stacked`.
        UnsupportedLayout: the placement of a DTensor cannot be described; the module computes a published tensor from
            other parameters, for example with weight norm (`refuse_originals`); `state_dict` returns other values than the
            parameters have (`refuse_rewritten`); or the exporter yields computed values instead of elements of parameters.
        PlanError: `keep` matches a parameter that a PEFT adapter changes.
        PeerTimeout: another rank did not run the exporter within `exporter_deadline_s`.
    """
    if exporter is not None and (name_map is not None or stacked is not None):
        raise ConfigError(
            "exporter: must be given without name_map and stacked, because it names all tensors; leave them out"
        )
    worker = f"{group}/{dist.get_rank() if _is_distributed() else 0}"
    held = own_tensors(module, name_map, role=Role.TRAINER)
    if exporter is None:
        refuse_originals(module, {one.name: (one.tensor_name, one.tensor) for one in held})
        refuse_kept(module, {without_marks(one.name) for one in held}, keep)
        refuse_rewritten(module, {one.name: one.tensor for one in held})
        manifest = describe_module(module, worker, Role.TRAINER, name_map=name_map, stacked=stacked)
    else:
        manifest = exported_manifest(
            held, partial(exporter, [module]), worker, deadline_s=exporter_deadline_s
        )
    tensors = LiveTensors((module,), lambda: own_tensors(module, name_map), held)
    return TrainerWeights(
        manifest=manifest,
        parameters=tensors.locate,
        read=tensors.read,
        watch=tensors.watch,
        changed=tensors.changed,
        allow_unused=_harmless(held, manifest),
    )


def _harmless(tensors: Sequence[HeldTensor], manifest: ShardManifest) -> tuple[str, ...]:
    """Return patterns for the checkpoint names of tensors that engines need not have.

    These are buffers and tied weights (parameters that share memory). An engine may lack some names of a tied weight.
    """
    memory: dict[tuple[object, ...], str] = {}
    spared: set[str] = set()
    for held in tensors:
        local = local_tensor(held.tensor)
        at = (local.data_ptr(), local.dtype, local.shape, local.stride(), held.tensor.shape)
        if held.is_buffer:
            spared.add(held.name)
        elif local.numel() and memory.setdefault(at, held.name) != held.name:
            spared |= {held.name, memory[at]}
    if not spared:
        return ()
    names = {name for name, index in manifest.rows() if manifest.parameters[index].name in spared}
    return tuple(map(glob.escape, sorted(names)))


def connect_trainer(
    module: torch.nn.Module,
    *,
    controller: str,
    token: str,
    transport: str | TransportConfig = "auto",
    arena_nbytes: int = 0,
    name_map: NameMap | None = None,
    stacked: Sequence[StackedRule] | None = None,
    exporter: Exporter | None = None,
    group: str = "trainer",
    replica: ReplicaPlace = ReplicaPlace.OFF,
    allow_unused: Sequence[str] = (),
    keep: Sequence[str] = (),
    release: Callable[[], None] | None = None,
    connect_deadline_s: float = 60.0,
) -> TrainerClient:
    """Connect this rank of a PyTorch trainer (FSDP2, tensor parallel, both, or neither).

    Every trainer rank must call this. Without `exporter`, the call is not collective and gathers no weights. Rank and world
    size come from `torch.distributed` if it is initialised. WINDLASS_JOB identifies this launch of the trainer ranks. If the
    variable is not set, the ranks share a random identity through the store of `torch.distributed`.

    Args:
        module: model that is trained.
        controller: address of the controller.
        token: secret of the controller.
        group: name of the trainer job.
        transport: name or configuration of a transport. `auto` offers every transport that works on this machine; each
            link uses the fastest transport that both ranks offer.
        arena_nbytes: bytes of memory for packed data; 0 for as much as an update needs.
        name_map: function that takes the name of a parameter. It returns the name in checkpoints, or None to leave the
            parameter out. If omitted, names do not change. `adapter_names()` selects the tensors of a LoRA adapter.
        stacked: rules for parameters that contain the tensors of several experts; `TRANSFORMERS_EXPERTS` if omitted.
            If both `name_map` and `stacked` are omitted, tensors of a transformers model get the names and shapes that
            `save_pretrained` gives them.
        exporter: function that takes `[module]`, and yields the names and whole tensors of a checkpoint on every rank.
            Windlass runs the exporter a few times while the parameters contain element numbers instead of weights. The
            results show where the exporter copies each element.
        replica: memory for a copy of the weights, or OFF for no copy; see `ReplicaPlace`. The copy is as large as the
            weights. `publish(copy=True)` needs it.
        allow_unused: patterns (`fnmatch`) of trained tensors that engines need not have, such as a value head, or a
            vision tower if engines serve only the text part. If a trained tensor matches no pattern and no engine has
            it, the update fails before the first byte is sent. Buffers, rotary tables and MTP layers (multi-token
            prediction) need no pattern.
        keep: patterns (`fnmatch`) of engine tensors that trainers need not have, such as a vision tower if only the text
            part is trained. Engines verify by digests that these tensors do not change. If an engine has a tensor that
            matches no pattern and no trainer has it, the controller refuses the engine.
        release: function that frees memory of this rank, such as the weights on the GPU, for engines on the same GPU. A
            thread of the client calls it in every update, after the engines have verified their bytes and before they
            allocate their caches. After `release` the weights may change or move, even if `publish` has not returned yet.
        connect_deadline_s: seconds to wait for the controller, and for other ranks in each collective of `exporter`.

    Raises:
        ConfigError: `module` is not a module, `exporter` is given with `name_map` or `stacked`, `controller` is not a
            URL, `transport` is not a transport or cannot send from the requested replica, or `arena_nbytes` is too
            small.
        UnsupportedLayout: the placement or dtype of a parameter cannot be described.
        PlanError: `keep` matches a parameter that a PEFT adapter changes.
        TransportUnavailable: the transport cannot start on this machine.
        AuthenticationError, ProtocolError, PeerTimeout: see `TrainerClient`.
    """
    described = describe_trainer(
        module,
        group=group,
        name_map=name_map,
        stacked=stacked,
        exporter=exporter,
        exporter_deadline_s=connect_deadline_s,
        keep=keep,
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
        release=release,
        connect_deadline_s=connect_deadline_s,
    )
