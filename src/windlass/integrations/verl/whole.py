"""Checkpoint engine `windlass` for verl: sends whole tensors from the actor's rank 0 to every rollout rank.

The interface is verl's `CheckpointEngine` (verl 0.9.1, `verl/checkpoint_engine/base.py`). For every update,
`CheckpointEngineManager.update_weights` calls `prepare`, `build_topology` and `init_process_group`, then
`send_weights` and `receive_weights`, then `finalize`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any, final

import msgspec
import ray
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from windlass.errors import ConfigError
from windlass.integrations.bucket_stream import StreamAddress, StreamEnd

__all__ = ["WindlassCheckpointEngine"]


@final
@CheckpointEngineRegistry.register("windlass")
class WindlassCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl has no types
    """Checkpoint engine of one rank. verl creates one in every actor rank and in every rollout rank.

    The actor's rank 0 sends the tensors and hosts the controller. Other actor ranks only take part in the gathers.
    Connections and buckets stay open between updates, unless `rebuild_group` is set.

    Memory: two buckets at the sender; one bucket at every receiver, or two with the mode `staged`.

    Args:
        bucket_size: maximum size of a bucket in bytes.
        is_master: whether this rank is the actor's rank 0; verl sets it.
        transport, mode, device, deadline_s: see `StreamEnd`.
        rebuild_group: whether to free the buckets and close the connections after every update.

    Raises:
        ConfigError, TransportUnavailable: see `StreamEnd`.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        transport: str = "auto",
        mode: str = "in_place",
        device: str = "auto",
        deadline_s: float = 600.0,
        rebuild_group: bool = False,
    ) -> None:
        self._end = StreamEnd(
            bucket_size,
            transport=transport,
            mode=mode,
            device=device,
            deadline_s=deadline_s,
            option="checkpoint_engine.engine_kwargs.windlass",
        )
        self._is_master, self._rebuild_group = is_master, rebuild_group

    def prepare(self) -> dict[str, Any]:
        """Return this rank's entry for `build_topology`: the sender's address if `is_master`, else the receiver's name.

        Raises:
            ConfigError, TransportUnavailable, TransferFailed: see `BucketSender.open`.
        """
        if not self._is_master:
            return {"member": self._end.receiver.name}
        host = ray.util.get_node_ip_address().strip("[]")
        return {"address": msgspec.to_builtins(self._end.sender.open(host))}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for actor ranks and for rollout ranks. Runs in verl's driver.

        Args:
            actor_wg_world_size: number of actor ranks.
            rollout_world_size: number of rollout ranks, at least 1.
            metadata: result of `prepare` of each actor rank, then of each rollout rank.

        Raises:
            ConfigError: `metadata` does not have one result per rank, or the actor's rank 0 is not the sender.
        """
        if len(metadata) != actor_wg_world_size + rollout_world_size or not rollout_world_size:
            raise ConfigError(
                f"build_topology: metadata must have one entry for each actor rank and each rollout rank, got "
                f"{len(metadata)} entries for {actor_wg_world_size} + {rollout_world_size} ranks"
            )
        if "address" not in metadata[0]:
            raise ConfigError(
                "build_topology: the checkpoint engine of the actor's rank 0 must have is_master=True"
            )
        address = metadata[0]["address"]
        members = [rank["member"] for rank in metadata[actor_wg_world_size:]]

        def kwargs(roles: list[str]) -> dict[str, list[Any]]:
            return {
                "role": roles,
                "address": [address] * len(roles),
                "members": [members] * len(roles),
            }

        idle = ["gather"] * (actor_wg_world_size - 1)
        return kwargs(["send", *idle]), kwargs(["receive"] * rollout_world_size)

    def init_process_group(self, role: str, address: dict[str, Any], members: list[str]) -> None:
        """Connect a receiver to the sender, or make the sender wait for all receivers.

        Args:
            role: `send`, `receive`, or `gather` for actor ranks that only take part in gathers.
            address: address of the sender.
            members: names of all receivers.

        Raises:
            EngineRefused, PeerTimeout: see `BucketSender.wait_for`.
            WindlassError: any error of `BucketReceiver.connect`.
        """
        if role == "send":
            self._end.sender.wait_for(members)
        elif role == "receive":
            self._end.receiver.connect(msgspec.convert(address, StreamAddress))

    def finalize(self) -> None:
        """Close this rank's connections if `rebuild_group` is set. verl calls this after every successful update."""
        if self._rebuild_group:
            self._end.close()

    @torch.no_grad()
    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,  # noqa: ARG002 - verl's interface
    ) -> dict[str, float]:
        """Send every tensor from the actor's rank 0. Collective: other actor ranks only take part in the gathers.

        Args:
            weights: tensors of verl's `get_per_tensor_param`; reading them is collective over the actor ranks.
            global_steps: verl's training step; not used, because versions count buckets.

        Returns:
            Metrics for verl's trainer to log; empty on ranks that send nothing.

        Raises:
            PeerUnreachable, RoundAborted, PeerTimeout, UnsupportedLayout: see `StreamEnd.send`.
        """
        report = await self._end.send(ensure_async_iterator(weights))
        if report is None:
            return {}
        return {
            "windlass/seconds": report.seconds,
            "windlass/fill_s": report.fill_s,
            "windlass/update_s": report.update_s,
            "windlass/wire_s": report.wire_s,
            "windlass/nbytes": float(report.nbytes),
            "windlass/num_buckets": float(report.num_buckets),
        }

    async def receive_weights(
        self,
        global_steps: int | None = None,  # noqa: ARG002 - verl's interface
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield each tensor with its name. A tensor is valid until the caller requests the next one.

        Args:
            global_steps: verl's training step; not used.

        Raises:
            ConfigError, PeerUnreachable, PeerTimeout, ProtocolError: see `BucketReceiver.receive`.
        """
        async for bucket in self._end.receiver.receive():
            for name, tensor in bucket:
                yield name, tensor
