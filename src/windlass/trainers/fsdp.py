"""The PyTorch trainer adapter: FSDP2, tensor parallel, both, or a plain module."""

from __future__ import annotations

import glob
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from windlass.config import ReplicaPlace
from windlass.control.connect_messages import ALLOW_UNUSED_VARIABLE, JOB_VARIABLE
from windlass.envs import environment_value
from windlass.errors import ConfigError
from windlass.layout.manifest import Role, ShardManifest
from windlass.layout.naming.stacked import StackedRule
from windlass.memory.cuda.driver import gpu_of
from windlass.trainers.client import TrainerClient, TrainerWeights
from windlass.transfer.dtensor import (
    HeldTensor,
    LiveTensors,
    NameMap,
    describe_module,
    local_tensor,
    own_tensors,
)
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
) -> TrainerClient:
    """Connect this rank with what was described; arguments and errors are `connect_trainer`'s."""
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
    """Return the checked patterns of the argument `what`.

    Raises:
        ConfigError: a single string, or something that is no string.
    """
    if isinstance(patterns, str) or not all(
        isinstance(p, str) and p for p in list[object](patterns)
    ):
        raise ConfigError(
            f"{what}: must be a sequence of patterns, got {patterns!r}; pass `{what}=('value_head.*',)`"
        )
    return tuple(patterns)


def _launched_patterns() -> tuple[str, ...]:
    """Return the patterns of `trainer.allow_unused` in the file of `windlass launch`."""
    return tuple(environment_value(ALLOW_UNUSED_VARIABLE).split())


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def step_stream(memory_at: int) -> Callable[[], int] | None:
    """The current stream of the calling thread on the GPU of this memory; None for host memory."""
    if not memory_at or (ordinal := gpu_of(memory_at)) < 0:
        return None
    return lambda: int(torch.cuda.current_stream(ordinal).cuda_stream)


def shared_job() -> str:
    """The same for all ranks of this process group and for no other; empty without one.

    The first rank that asks makes it. Asks the group's store, over the network; no collective.

    Raises:
        ConfigError: the store cannot be asked.
    """
    if not _is_distributed():
        return ""
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        found = _get_default_store().compare_set("windlass/job", "", secrets.token_hex(8))
    except RuntimeError as error:
        raise ConfigError(
            f"connect_trainer: the store of torch.distributed must keep a key for all ranks, or "
            f"WINDLASS_JOB be set: {error}"
        ) from error
    return str(found, "ascii")


def describe_trainer(
    module: torch.nn.Module,
    *,
    group: str,
    name_map: NameMap | None,
    stacked: Sequence[StackedRule] | None = None,
) -> TrainerWeights:
    """Describe this rank's part of `module`. Not collective. See `describe_module`.

    Raises:
        UnsupportedLayout: a placement that cannot be described.
    """
    worker = f"{group}/{dist.get_rank() if _is_distributed() else 0}"
    manifest = describe_module(module, worker, Role.TRAINER, name_map=name_map, stacked=stacked)
    held = own_tensors(module, name_map, role=Role.TRAINER)
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
    """Return patterns of the tensors that engines need not take: buffers, and second names of one memory."""
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
    rows = zip(manifest.table.tensor.tolist(), manifest.table.parameter.tolist(), strict=True)
    names = {manifest.tensors[t].name for t, p in rows if manifest.parameters[p].name in spared}
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
    group: str = "trainer",
    replica: ReplicaPlace = ReplicaPlace.OFF,
    allow_unused: Sequence[str] = (),
    keep: Sequence[str] = (),
    connect_deadline_s: float = 60.0,
) -> TrainerClient:
    """Connect this rank of a PyTorch trainer (FSDP2, tensor parallel, both, or neither).

    Called by every rank; not collective, gathers nothing. Rank and world size come from
    `torch.distributed` where it is initialised, and its store tells the ranks of this start of the
    trainers from those of any other one, unless WINDLASS_JOB does.

    Args:
        module: the model being trained; its DTensor parameters are described where they lie.
        controller: address of the controller.
        token: its secret.
        group: name of the trainer job.
        transport: name or configuration; `auto` offers every one that starts here and moves memory of the
            weights' kind, and each link takes the fastest that both its ends have.
        arena_nbytes: memory for packed bytes; 0 for as much as one update packs.
        name_map: from parameter name to checkpoint name, None for what is left out; identity when
            omitted. `adapter_names()` keeps a LoRA adapter and nothing else.
        stacked: experts that the framework stacks; `TRANSFORMERS_EXPERTS` when omitted. A model of transformers
            with neither is published as `save_pretrained` writes it: names, and what is fused or taken apart.
        replica: keep a copy of what is sent as it lies, as large as that, so that `begin_publish` need
            not wait for the fleet, and parameters are never registered. HOST: in host memory, pinned
            where weights are on a GPU (`cuda_ipc`). DEVICE: on the weights' GPU. AUTO: the one of the
            weights' kind. OFF: none. A place or its name.
        allow_unused: patterns (`fnmatch`) of tensors that engines need not take: a value head, the vision tower of a
            model whose text part is served. Any other tensor that no engine takes is refused before anything is
            sent. Buffers, rotary tables and layers that predict further tokens (MTP) need no pattern.
        keep: patterns (`fnmatch`) of tensors that engines keep as they are, if no trainer has them: the vision tower of a
            model whose text part is trained, a frozen half. Any other tensor that has no source is refused. Engines
            verify by digests that what they keep has not changed since the trainers connected.
        connect_deadline_s: how long to wait for the controller.

    Raises:
        ConfigError: `module` is no module, `controller` no URL, `transport` no transport (or none that
            can send from such a replica), or `arena_nbytes` too small.
        UnsupportedLayout: a parameter whose placement or dtype cannot be described.
        TransportUnavailable, AuthenticationError, ProtocolError, PeerTimeout: see there.
    """
    described = describe_trainer(module, group=group, name_map=name_map, stacked=stacked)
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
