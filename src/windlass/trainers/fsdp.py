"""The PyTorch trainer adapter: FSDP2, tensor parallel, both, or a plain module."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from windlass.errors import ConfigError
from windlass.layout.manifest import Role, ShardManifest
from windlass.layout.naming.stacked import StackedRule
from windlass.memory.cuda.driver import gpu_of
from windlass.transfer.base import ParameterMemory
from windlass.transfer.dtensor import LiveTensors, NameMap, describe_module, own_tensors


@dataclass(frozen=True, slots=True)
class DescribedTrainer:
    """One rank: what it holds, where it lies, and which rank it is.

    Its parameters are asked for anew for every update, because offloading rebinds storage. `make_whole`:
    see `TrainerClient.make_whole`.
    """

    manifest: ShardManifest
    tensors: LiveTensors
    rank: int
    world_size: int
    make_whole: Callable[[], None] | None = None

    def parameters(self) -> tuple[ParameterMemory, ...]:
        """Where they lie now, in manifest order.

        Raises:
            PlanError: they have another layout than when they were described.
        """
        return self.tensors.locate()

    @property
    def memory_at(self) -> int:
        """Where the first parameter that has bytes here lies now; 0 for a rank that holds none."""
        return next((memory.address for memory in self.parameters() if memory.nbytes), 0)


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
    if not (dist.is_available() and dist.is_initialized()):
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
) -> DescribedTrainer:
    """Describe this rank's part of `module`. Not collective. See `describe_module`.

    Raises:
        UnsupportedLayout: a placement that cannot be described.
    """
    distributed = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if distributed else 0
    world_size = dist.get_world_size() if distributed else 1
    manifest = describe_module(
        module, f"{group}/{rank}", Role.TRAINER, name_map=name_map, stacked=stacked
    )

    tensors = LiveTensors((module,), lambda: own_tensors(module, name_map))
    return DescribedTrainer(manifest, tensors, rank, world_size)
