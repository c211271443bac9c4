"""Checkpoint engine `windlass_shards` for verl: vLLM gets every actor rank's shards directly into its memory.

    actor_rollout_ref.rollout.checkpoint_engine.backend=windlass_shards

If actor and rollout have their own GPUs, actor ranks write the shards. If they share GPUs (verl's default placement,
`hybrid_engine`), vLLM sleeps while the actor trains, and reads the shards when it wakes.

verl 0.9.1 passes its training engine to any checkpoint engine if the manager requests the mode `delta_sharded`
(`ActorRolloutRefWorker.update_weights`, `verl/workers/engine_workers.py`). The training engine exports each rank's
shards, and the position of each shard in its tensor (`BaseEngine.get_per_tensor_param_shard`,
`verl/workers/engine/spec.py`). No rank gathers tensors, and no weights pass through verl's rollout workers: vLLM
receives the weights through its weight-transfer backend "windlass".

The separate placement also needs `rollout.checkpoint_manager_class=windlass.integrations.verl.ShardCheckpointManager`. For
the shared placement, verl's `ppo/v1` trainers have no such option: they set the backend `naive` and create
`CheckpointEngineManager`. So this module makes that class create a `ShardCheckpointManager` if the replicas' own
configuration has this backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, final

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
)
from verl.utils.device import get_torch_device, set_expandable_segments
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.replica import RolloutMode

from windlass.config import ControlConfig, UpdateMode, take_name
from windlass.errors import ConfigError, PeerUnreachable, UnsupportedLayout
from windlass.integrations.tensor_module import TensorModule
from windlass.integrations.vllm import WeightSync

if TYPE_CHECKING:
    from verl.workers.engine import BaseEngine
    from verl.workers.engine.spec import ShardSpec

__all__ = ["ShardCheckpointEngine", "ShardCheckpointManager"]

BACKEND = "windlass_shards"
HANDS_OVER_ENGINE = "delta_sharded"
"""Mode in which verl passes its training engine to `send_weights`, instead of gathered tensors."""


class Sent(TypedDict):
    """Result that one actor rank returns to its manager through Ray.

    Attributes:
        metrics: metrics for verl's trainer to log.
        left_out: URL of a server that does not serve the weights -> reason.
    """

    metrics: dict[str, float]
    left_out: dict[str, str]


@final
class _Shards:
    """Copies of the shards that verl exports on this rank. They keep their addresses until `free`.

    Attributes:
        module: module that contains the copies as parameters, under verl's names.
    """

    def __init__(self) -> None:
        self.module = TensorModule()
        self._copies: dict[str, torch.Tensor] = {}

    def copy_from(self, engine: BaseEngine) -> None:
        """Export the shards, and overwrite the copies with them. Allocate the copies if they have no memory.

        Raises:
            UnsupportedLayout: names or shapes differ from those of the copies, or Windlass cannot describe a parameter.
        """
        exported = engine.get_per_tensor_param_shard()[0]
        if not self._copies:
            copies = {name: (shard.clone(), spec) for name, shard, spec in exported}
            for name, (copy, spec) in copies.items():
                self.module.place(name, _described(name, copy, spec))
            self._copies = {name: copy for name, (copy, _) in copies.items()}
            return
        left = {*self._copies}
        for name, shard, _ in exported:
            if name not in left or shard.shape != self._copies[name].shape:
                raise UnsupportedLayout(
                    f"verl must export the same parameters and shapes in every update, got {name!r} of shape "
                    f"{tuple(shard.shape)}, unlike in the first update"
                )
            left.remove(name)
            copy = self._copies[name]
            copy.untyped_storage().resize_(copy.nbytes)
            copy.copy_(shard)
        if left:
            raise UnsupportedLayout(
                f"verl must export the same parameters in every update, got no {sorted(left)}"
            )

    @property
    def is_free(self) -> bool:
        """Whether the copies have no memory."""
        return not any(copy.untyped_storage().nbytes() for copy in self._copies.values())

    def free(self) -> None:
        """Free the memory of the copies. Keep the tensors, because a fleet may change between two updates. Idempotent."""
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)


def _described(name: str, shard: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return a view of the flat tensor `shard` in its original shape, as a `DTensor` if the parameter has a mesh.

    Raises:
        UnsupportedLayout: according to `spec`, the parameter must be converted to its form in the checkpoint.
    """
    if any(extra is not None for extra in (spec.place, spec.to_hf_chunk, spec.hf_slots)):
        raise UnsupportedLayout(
            f"parameter {name!r}: verl's engine must export parameters as they are in the checkpoint (as the FSDP engine "
            "does), got a parameter that must be converted; set checkpoint_engine.backend=windlass"
        )
    if spec.mesh is None:
        return shard.view(spec.full_shape)
    shape, _ = compute_local_shape_and_global_offset(spec.full_shape, spec.mesh, spec.placements)
    whole = torch.empty(spec.full_shape, device="meta")
    return DTensor.from_local(
        shard.view(shape),
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


@final
@CheckpointEngineRegistry.register(BACKEND)
class ShardCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl has no types
    """Checkpoint engine of one actor rank. verl creates one in every rollout rank too, where it does nothing.

    Memory: a copy of this rank's shards as verl exports them (bfloat16). If the servers share the actor's GPUs, the copy
    exists only during updates; otherwise it stays from the first update on.

    Args:
        bucket_size: not used, because shards are not sent in buckets.
        is_master: not used, because every rank sends its own shards.
        transport: see `WeightSync`; `auto` is `pull` if the servers share the actor's GPUs.
        deadline_s: see `WeightSync`.
        mode: see `ControlConfig`.

    Raises:
        ConfigError: `mode` is not a name of an update mode.
    """

    def __init__(
        self,
        bucket_size: int,  # noqa: ARG002
        is_master: bool = False,  # noqa: ARG002
        *,
        transport: str = "auto",
        mode: str = "in_place",
        deadline_s: float = 600.0,
    ) -> None:
        taken = take_name("checkpoint_engine.engine_kwargs.windlass_shards.mode", mode, UpdateMode)
        self._config = ControlConfig(mode=taken)
        self._transport, self._deadline_s = transport, deadline_s
        self._servers: tuple[str, ...] = ()
        self._shares_gpus = self._only_joins = False
        self._shards = _Shards()
        self._sync: WeightSync | None = None
        self._version = 0

    def set_servers(
        self, servers: Sequence[str], shares_gpus: bool, only_joins: bool = False
    ) -> None:
        """Set the servers that `send_weights` updates. Every rank must pass the same servers in the same order.

        If the servers change, this rank disconnects from the previous servers.

        Args:
            servers: URLs of the servers.
            shares_gpus: whether the servers are on the actor's GPUs.
            only_joins: whether `send_weights` only connects to the servers, and publishes nothing.
        """
        self._only_joins = only_joins
        if tuple(servers) != self._servers:
            self.finalize()
            self._servers, self._shares_gpus = tuple(servers), shares_gpus

    @torch.no_grad()
    async def send_weights(self, weights: BaseEngine, global_steps: int | None = None) -> Sent:  # noqa: ARG002
        """Publish the current weights to every server. Collective over the actor ranks.

        The first published version is 1, the next version is 2, and so on. If this rank is not connected to the servers,
        connect first. If `set_servers` was called with `only_joins`, connect and publish nothing.

        Args:
            weights: verl's training engine.
            global_steps: verl's training step; not used, because the manager sends it to verl's servers.

        Raises:
            ConfigError: `weights` are gathered tensors, as verl's own manager passes them.
            UnsupportedLayout: verl's training engine does not export parameters as verl's FSDP engine does.
            EngineRefused, RoundAborted, PeerUnreachable, PeerTimeout: see `WeightSync` and its `send_weights`.
        """
        from verl.workers.engine import BaseEngine

        if not isinstance(weights, BaseEngine):
            _refuse_manager()
        if self._shares_gpus:
            # Mapping memory of expandable segments takes longer. verl's own update also switches them off.
            set_expandable_segments(False)
            get_torch_device().empty_cache()
        try:
            # Copy in this thread, in which this rank's GPU is the current device. The update runs in another thread,
            # because it waits for other ranks and would block the event loop.
            self._shards.copy_from(weights)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            # Raise the version before `_send` connects: connecting may fail on some ranks only, and all ranks must still
            # agree on the version.
            if not self._only_joins:
                self._version += 1
            return await asyncio.to_thread(self._send, weights, _current_gpu())
        finally:
            if self._shares_gpus:
                # A failed round may not have called `_free`.
                self._free(weights, _current_gpu())
                set_expandable_segments(True)

    def _send(self, engine: BaseEngine, gpu: int) -> Sent:
        """Connect to the servers unless this rank is connected. Then publish the shards, but not if `only_joins` is set.

        For the errors, see `send_weights`.
        """
        if self._sync is None:
            is_automatic = self._shares_gpus and self._transport == "auto"
            self._sync = WeightSync(
                self._shards.module,
                servers=self._servers,
                config=self._config,
                transport="pull" if is_automatic else self._transport,
                # verl's manager pauses and resumes the servers.
                pause=None,
                release=partial(self._free, engine, gpu) if self._shares_gpus else None,
                deadline_s=self._deadline_s,
            )
        if self._only_joins:
            return {"metrics": {}, "left_out": {}}
        sent = self._sync.send_weights(self._version)
        metrics = {
            "windlass/update_s": sent.report.update_s,
            "windlass/wire_s": sent.report.wire_s,
            "windlass/nbytes": float(sent.report.nbytes),
        }
        return {"metrics": metrics, "left_out": dict(sent.left_out)}

    def _free(self, engine: BaseEngine, gpu: int) -> None:
        """Free the copies, and offload the actor's parameters if verl's `param_offload` is set. Idempotent.

        During an update, a thread of the trainer client calls this method before servers allocate their KV caches.
        """
        if self._shards.is_free:
            return
        # A new thread has GPU 0 as its current device.
        with nullcontext() if gpu < 0 else torch.cuda.device(gpu):
            if engine.is_param_offload_enabled:
                engine.to("cpu", model=True, optimizer=False, grad=False)
            self._shards.free()
            get_torch_device().synchronize()
            get_torch_device().empty_cache()

    def finalize(self) -> None:
        """Disconnect from the servers, which keep their weights and continue to serve. Idempotent."""
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.shutdown()

    def prepare(self) -> NoReturn:
        """Refuse verl's own manager, which would call this method first.

        Raises:
            ConfigError: always.
        """
        _refuse_manager()

    build_topology = init_process_group = receive_weights = prepare


def _current_gpu() -> int:
    """Return the ordinal of this thread's GPU; -1 without GPUs."""
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def _refuse_manager() -> NoReturn:
    """Raise ConfigError, because verl uses this checkpoint engine without `ShardCheckpointManager`."""
    raise ConfigError(
        f"checkpoint_engine.backend={BACKEND} needs rollout.checkpoint_manager_class="
        "windlass.integrations.verl.ShardCheckpointManager, and a verl trainer that reads this option"
    )


class ShardCheckpointManager(CheckpointEngineManager):  # type: ignore[misc]
    """verl's checkpoint engine manager, with updates that go directly from actor ranks to vLLM servers.

    Configure the servers with `rollout.name=vllm`, `rollout.engine_kwargs.vllm.weight_transfer_config={backend: windlass}`
    and VLLM_SERVER_DEV_MODE=1 in the environment.

    Servers with their own GPUs must have no sleep mode. The manager aborts their requests before an update and continues them
    afterwards through verl's own calls, so verl labels tokens with the correct step. Servers on the actor's GPUs
    (`hybrid_engine`) sleep between updates, and each update wakes them.
    """

    _joined: tuple[str, ...] = ()

    @property
    def _shares_gpus(self) -> bool:
        """Whether the servers are on the actor's GPUs."""
        return any(replica.rollout_mode is RolloutMode.HYBRID for replica in self.replicas)

    def _urls(self) -> tuple[str, ...]:
        return tuple(f"http://{replica.server_address}" for replica in self.replicas)

    @auto_await  # type: ignore[untyped-decorator]
    async def sleep_replicas(self) -> None:
        """Make all replicas sleep. If replicas on the actor's GPUs have not joined the fleet yet, first let them join.

        Raises:
            see `update_weights`.
        """
        # A server that sleeps cannot join, because joining needs the values of all tensors.
        if self._shares_gpus and self._joined != self._urls():
            await self._send(None, only_joins=True)
        await super().sleep_replicas()

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Publish the actor's current weights to every replica in one transaction.

        Replicas on the actor's GPUs may sleep. The update wakes their weights, fills the weights, lets the actor offload
        its parameters if verl's `param_offload` is set, and then wakes the KV caches.

        Args:
            global_steps: step with which verl labels tokens after the update; None to keep the current label.

        Returns:
            Metrics for verl's trainer to log.

        Raises:
            ConfigError: a replica does not run vLLM.
            PeerUnreachable: a replica does not serve the weights; the message has the reason. This replica stays paused, and
                all other replicas serve the weights. Call `remove_replicas` to continue without this replica.
            ray.exceptions.RayTaskError: `ShardCheckpointEngine.send_weights` raised an error. All replicas then stay
                paused until an update succeeds, as with verl's own manager.
        """
        shares_gpus = self._shares_gpus
        replicas = dict(zip(self._urls(), self.replicas, strict=True))
        sent = await self._send(global_steps)
        left_out = sent["left_out"]
        serving = [replica for url, replica in replicas.items() if url not in left_out]
        if global_steps is not None:
            await asyncio.gather(
                *(
                    replica.server_handle.set_global_steps.remote(global_steps)
                    for replica in serving
                )
            )
        if not shares_gpus:
            await asyncio.gather(*(replica.resume_generation() for replica in serving))
        if left_out:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in left_out.items())
            raise PeerUnreachable(
                f"replicas do not serve the weights of step {global_steps}: {reasons}"
            )
        return sent["metrics"]

    async def _send(self, global_steps: int | None, *, only_joins: bool = False) -> Sent:
        """Call `send_weights` of every actor rank, and return the result of rank 0.

        For the errors, see `update_weights`.

        Args:
            global_steps: see `update_weights`.
            only_joins: see `ShardCheckpointEngine.set_servers`.
        """
        others = {replica.config.name for replica in self.replicas} - {"vllm"}
        if others:
            raise ConfigError(f"rollout.name must be vllm with {BACKEND}, got {sorted(others)}")
        urls, shares_gpus = self._urls(), self._shares_gpus
        num_ranks = self.actor_wg.world_size
        await asyncio.gather(
            *self.actor_wg.execute_checkpoint_engine(
                method=["set_servers"] * num_ranks,
                servers=[urls] * num_ranks,
                shares_gpus=[shares_gpus] * num_ranks,
                only_joins=[only_joins] * num_ranks,
            )
        )
        if not shares_gpus:
            await self.abort_replicas()
        sent: list[Sent] = await asyncio.gather(
            *self.actor_wg.update_weights(global_steps=global_steps, mode=HANDS_OVER_ENGINE)
        )
        self._joined = urls
        return sent[0]


def _new_manager(
    cls: type[CheckpointEngineManager],
    config: Any = None,
    actor_wg: object = None,  # noqa: ARG001
    replicas: Sequence[Any] = (),
) -> CheckpointEngineManager:
    """Create a `ShardCheckpointManager` if the replicas use this backend on the actor's GPUs, otherwise a `cls` object.

    For replicas on the actor's GPUs, verl's `ppo/v1` changes the backend in the manager's configuration to `naive`. So read
    the user's choice from the configuration of the replicas.
    """
    chosen = {replica.config.checkpoint_engine.backend for replica in replicas}
    is_ours = cls is CheckpointEngineManager and chosen == {BACKEND} and config.backend == "naive"
    return object.__new__(ShardCheckpointManager if is_ours else cls)


CheckpointEngineManager.__new__ = _new_manager
