"""The checkpoint engine `windlass_shards` of verl: every actor rank's shards, straight into vLLM's own memory.

    actor_rollout_ref.rollout.checkpoint_engine.backend=windlass_shards
    actor_rollout_ref.rollout.checkpoint_manager_class=windlass.integrations.verl.ShardCheckpointManager

verl 0.9.1 hands its training engine to a backend where a manager asks for the mode `delta_sharded`, whatever the
backend is called (`ActorRolloutRefWorker.update_weights`, `verl/workers/engine_workers.py`). The engine exports what
each rank holds, and which part of which tensor that is (`BaseEngine.get_per_tensor_param_shard`,
`verl/workers/engine/spec.py`). Nothing is gathered, and nothing passes through verl's rollout workers: vLLM receives
by its weight-transfer backend "windlass".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, TypedDict, final

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from verl.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
)
from verl.utils.ray_utils import auto_await

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


class Sent(TypedDict):
    """What one actor rank answers to its manager, by Ray.

    Attributes:
        metrics: for verl's trainer to log. left_out: URLs of servers that do not serve the weights, and why.
    """

    metrics: dict[str, float]
    left_out: dict[str, str]


@final
class _Shards:
    """A copy of what verl exports of this rank, at addresses that stay; `module` says what of."""

    def __init__(self, engine: BaseEngine) -> None:
        self.module = TensorModule()
        self._copies: dict[str, torch.Tensor] = {}
        for name, shard, spec in engine.get_per_tensor_param_shard()[0]:
            self._copies[name] = shard.clone()
            self.module.place(name, _described(name, self._copies[name], spec))

    def copy_from(self, engine: BaseEngine) -> None:
        """Copy what verl exports now.

        Raises:
            UnsupportedLayout: it is not what was exported first.
        """
        left = {*self._copies}
        for name, shard, _ in engine.get_per_tensor_param_shard()[0]:
            if name not in left or shard.shape != self._copies[name].shape:
                raise UnsupportedLayout(
                    f"parameter {name!r}: verl must export the shards of the first update, got one of "
                    f"{tuple(shard.shape)}"
                )
            left.remove(name)
            self._copies[name].copy_(shard)
        if left:
            raise UnsupportedLayout(f"verl must export {sorted(left)}, as for the first update")


def _described(name: str, shard: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return `shard`, which is flat, as the part of a tensor that it is.

    Raises:
        UnsupportedLayout: a part that `spec` does not say in placements of torch.
    """
    if any(extra is not None for extra in (spec.place, spec.to_hf_chunk, spec.hf_slots)):
        raise UnsupportedLayout(
            f"parameter {name!r}: verl's training engine must export it under its name in the checkpoint, with torch's "
            "placements, as FSDP's does, got one that it converts on the way: use backend=windlass"
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
    """One actor rank's end; in rollout ranks, where verl makes one as well, it does nothing.

    Memory: a copy of this rank's shards as verl exports them (bfloat16), from the first update on.

    Args:
        bucket_size: not used, as `is_master`: every rank sends its own.
        transport, deadline_s: see `WeightSync`.
        mode: see `ControlConfig`.

    Raises:
        ConfigError: there is no such mode.
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
        self._shards: _Shards | None = None
        self._sync: WeightSync | None = None
        self._version = 0

    def set_servers(self, servers: Sequence[str]) -> None:
        """Name the servers of the next updates; the same on every rank.

        Args:
            servers: their URLs.
        """
        if tuple(servers) != self._servers:
            self.finalize()
            self._servers = tuple(servers)

    @torch.no_grad()
    async def send_weights(self, weights: BaseEngine, global_steps: int | None = None) -> Sent:  # noqa: ARG002
        """Have every server serve the weights as they are now, as version 1, 2 and so on. Collective.

        The first call after `set_servers` has them join.

        Args:
            weights: verl's training engine.
            global_steps: verl's step; the manager tells it to verl's servers.

        Raises:
            ConfigError: `weights` are gathered tensors, which verl's own manager hands over.
            UnsupportedLayout: a parameter that verl's engine exports in another way than FSDP's does.
            EngineRefused, RoundAborted, PeerUnreachable, PeerTimeout: see `WeightSync` and its `send_weights`.
        """
        from verl.workers.engine import BaseEngine

        if not isinstance(weights, BaseEngine):
            _refuse_manager()
        # In this thread, which has this rank's GPU as its current one; the rest waits for others.
        if self._shards is None:
            self._shards = _Shards(weights)
        else:
            self._shards.copy_from(weights)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._version += 1
        return await asyncio.to_thread(self._send, self._shards.module)

    def _send(self, module: torch.nn.Module) -> Sent:
        if self._sync is None:
            self._sync = WeightSync(
                module,
                servers=self._servers,
                config=self._config,
                transport=self._transport,
                pause=None,  # verl's manager does
                deadline_s=self._deadline_s,
            )
        sent = self._sync.send_weights(self._version)
        metrics = {
            "windlass/update_s": sent.report.update_s,
            "windlass/wire_s": sent.report.wire_s,
            "windlass/nbytes": float(sent.report.nbytes),
        }
        return {"metrics": metrics, "left_out": dict(sent.left_out)}

    def finalize(self) -> None:
        """Leave the servers, which go on with what they have. Idempotent."""
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.shutdown()

    def prepare(self) -> NoReturn:
        """Refuse: verl's own manager calls it first, and would call the methods below after.

        Raises:
            ConfigError: always.
        """
        _refuse_manager()

    build_topology = init_process_group = receive_weights = prepare


def _refuse_manager() -> NoReturn:
    raise ConfigError(
        f"checkpoint_engine.backend={BACKEND} must have rollout.checkpoint_manager_class="
        "windlass.integrations.verl.ShardCheckpointManager, and a trainer of verl's that reads it"
    )


class ShardCheckpointManager(CheckpointEngineManager):  # type: ignore[misc]
    """verl's manager, whose updates go from actor ranks to vLLM servers alone.

    Requests are aborted before an update and go on after it, by verl's own calls, so that verl's labels of tokens stay
    true. The servers are verl's, of `rollout.name=vllm`, with
    `rollout.engine_kwargs.vllm.weight_transfer_config={backend: windlass}`, without sleep mode, and with
    VLLM_SERVER_DEV_MODE=1 in the environment.
    """

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Have every replica serve the actor's weights as they are now, as one transaction.

        Args:
            global_steps: that tokens are labelled with from now on; None for no change.

        Returns:
            Figures for verl's trainer to log.

        Raises:
            ConfigError: a replica that is no vLLM.
            PeerUnreachable: a replica does not serve the weights; quotes the reason. It is not resumed; the others
                serve them. After `remove_replicas` the next update goes on without it.
            ray.exceptions.RayTaskError: of what `ShardCheckpointEngine.send_weights` raises. As with verl's own
                manager no replica is resumed before an update that succeeds.
        """
        others = {replica.config.name for replica in self.replicas} - {"vllm"}
        if others:
            raise ConfigError(f"rollout.name must be vllm with {BACKEND}, got {sorted(others)}")
        replicas = {f"http://{replica.server_address}": replica for replica in self.replicas}
        num_ranks = self.actor_wg.world_size
        await asyncio.gather(
            *self.actor_wg.execute_checkpoint_engine(
                method=["set_servers"] * num_ranks, servers=[[*replicas]] * num_ranks
            )
        )
        await self.abort_replicas()
        sent: list[Sent] = await asyncio.gather(
            *self.actor_wg.update_weights(global_steps=global_steps, mode=HANDS_OVER_ENGINE)
        )
        left_out = sent[0]["left_out"]
        serving = [replica for url, replica in replicas.items() if url not in left_out]
        if global_steps is not None:
            await asyncio.gather(
                *(
                    replica.server_handle.set_global_steps.remote(global_steps)
                    for replica in serving
                )
            )
        await asyncio.gather(*(replica.resume_generation() for replica in serving))
        if left_out:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in left_out.items())
            raise PeerUnreachable(
                f"replicas do not serve the weights of step {global_steps}: {reasons}"
            )
        return sent[0]["metrics"]
