"""The checkpoint engine `windlass` of verl: whole tensors from the actor's rank 0 to every rollout rank.

The interface is verl's `CheckpointEngine` (verl 0.9.1, `verl/checkpoint_engine/base.py`); there
`CheckpointEngineManager.update_weights` calls `prepare`, `build_topology`, `init_process_group`, then
`send_weights` and `receive_weights`, then `finalize`, for every update.
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
    """One rank's end. verl makes one in every actor rank and in every rollout rank.

    The actor's rank 0 sends and hosts the fleet's controller; other actor ranks take part in the gathers
    only. What is open stays open between updates, unless `rebuild_group`.

    Args:
        bucket_size: bytes of a bucket, at most; two of them at the sender, one at every receiver.
        is_master: given to the actor's rank 0 by verl.
        transport, mode, device, deadline_s: see `StreamEnd`.
        rebuild_group: give memory back and close connections after every update.

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
        """Say how this rank is reached: the sender's address, or a receiver's name.

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
        """Say who sends, and to whom; runs in verl's driver.

        Raises:
            ConfigError: not one answer of `prepare` per rank, or rank 0 of the actor does not send.
        """
        if len(metadata) != actor_wg_world_size + rollout_world_size or not rollout_world_size:
            raise ConfigError(
                f"build_topology: metadata must be of {actor_wg_world_size} actor and at least one rollout "
                f"rank, got {len(metadata)} of {actor_wg_world_size} + {rollout_world_size}"
            )
        if "address" not in metadata[0]:
            raise ConfigError(
                "build_topology: the actor's rank 0 must have been made with is_master=True"
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
        """Connect; collective over the sender and all receivers.

        Args:
            role: `send`, `receive`, or `gather` for an actor rank that does neither.
            address: of the sender.
            members: names of all receivers.

        Raises:
            EngineRefused, PeerTimeout: see `BucketSender.wait_for` and `BucketReceiver.connect`.
        """
        if role == "send":
            self._end.sender.wait_for(members)
        elif role == "receive":
            self._end.receiver.connect(msgspec.convert(address, StreamAddress))

    def finalize(self) -> None:
        """Verl calls it after every update that did not fail."""
        if self._rebuild_group:
            self._end.close()

    @torch.no_grad()
    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,  # noqa: ARG002 - verl's interface
    ) -> dict[str, float]:
        """Send every tensor; on other actor ranks, take part in the gathers.

        Args:
            weights: of `get_per_tensor_param`, collective over the actor ranks.
            global_steps: verl's step; versions here count buckets.

        Returns:
            Figures for verl's trainer to log; empty on ranks that send nothing.

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
        """Yield (name, tensor); a tensor is valid until the next one is asked for.

        Raises:
            ConfigError, PeerUnreachable, PeerTimeout, ProtocolError: see `BucketReceiver.receive`.
        """
        async for bucket in self._end.receiver.receive():
            for name, tensor in bucket:
                yield name, tensor
