"""The checkpoint engine `windlass` of verl: whole tensors from the actor's rank 0 to every rollout rank.

    actor_rollout_ref.rollout.checkpoint_engine.backend=windlass
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=windlass.integrations.verl

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

from windlass.config import UpdateMode, take_name
from windlass.errors import ConfigError
from windlass.integrations.bucket_stream import (
    BucketReceiver,
    BucketSender,
    StreamAddress,
    StreamReport,
    StreamSettings,
)
from windlass.transports.registry import parse_transport

__all__ = ["WindlassCheckpointEngine"]

Weights = Generator[tuple[str, torch.Tensor], None, None]


def _gpu_of(device: str) -> int:
    if device not in {"auto", "cpu", "cuda"}:
        raise ConfigError(
            f"checkpoint_engine.engine_kwargs.windlass.device must be auto, cpu or cuda, got {device!r}"
        )
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return -1
    return torch.cuda.current_device()


@final
@CheckpointEngineRegistry.register("windlass")
class WindlassCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl has no types
    """One rank's end. verl makes one in every actor rank and in every rollout rank.

    The actor's rank 0 sends and hosts the fleet's controller; other actor ranks take part in the gathers
    only. What is open stays open between updates, unless `rebuild_group`.

    Args:
        bucket_size: bytes of a bucket, at most; two of them at the sender, one at every receiver.
        is_master: given to the actor's rank 0 by verl.
        transport: see `connect_trainer`. mode, deadline_s: see `StreamSettings`.
        device: where buckets lie: `cuda`, `cpu`, or `auto`: on this process's GPU if it has one.
        rebuild_group: give memory back and close connections after every update.

    Raises:
        ConfigError: an argument is out of range. TransportUnavailable: see `parse_transport`.
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
        settings = StreamSettings(
            bucket_nbytes=bucket_size,
            transport=parse_transport(transport),
            mode=take_name("checkpoint_engine.engine_kwargs.windlass.mode", mode, UpdateMode),
            gpu=_gpu_of(device),
            deadline_s=deadline_s,
        )
        self._settings, self._rebuild_group = settings, rebuild_group
        self._is_master = is_master
        self._sender: BucketSender | None = None
        self._receiver: BucketReceiver | None = None

    def prepare(self) -> dict[str, Any]:
        """Say how this rank is reached: the sender's address, or a receiver's name.

        Raises:
            ConfigError, TransportUnavailable, TransferFailed: see `BucketSender.open`.
        """
        if not self._is_master:
            if self._receiver is None:
                self._receiver = BucketReceiver(self._settings)
            return {"member": self._receiver.name}
        if self._sender is None:
            host = ray.util.get_node_ip_address().strip("[]")
            self._sender = BucketSender(self._settings, host=host)
        return {"address": msgspec.to_builtins(self._sender.open())}

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
        if role == "send" and self._sender is not None:
            self._sender.wait_for(members)
        elif role == "receive" and self._receiver is not None:
            self._receiver.connect(msgspec.convert(address, StreamAddress))

    def finalize(self) -> None:
        """Verl calls it after every update that did not fail."""
        if self._rebuild_group:
            self.close()

    def close(self) -> None:
        """End every connection, free the buckets. Idempotent; `prepare` opens again."""
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()

    @torch.no_grad()
    async def send_weights(
        self,
        weights: Weights,
        global_steps: int | None = None,  # noqa: ARG002 - verl's interface
    ) -> dict[str, float]:
        """Send every tensor; on other actor ranks, take part in the gathers.

        Args:
            weights: of `get_per_tensor_param`, collective over the actor ranks.
            global_steps: verl's step; versions here count buckets.

        Returns:
            Figures for verl's trainer to log; empty on ranks that send nothing.

        Raises:
            PeerUnreachable, RoundAborted, PeerTimeout, UnsupportedLayout: see `BucketSender.send`; the
                receivers have been told before the rest of `weights` is taken.
        """
        tensors = ensure_async_iterator(weights)
        try:
            if self._sender is not None:
                return _metrics(await self._sender.send(tensors))
        finally:
            # The other actor ranks go on with gathers that wait for this one, whatever has failed here.
            async for _ in tensors:
                pass
        return {}

    def receive_weights(
        self,
        global_steps: int | None = None,  # noqa: ARG002 - verl's interface
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Return an iterator of (name, tensor); a tensor is valid until the next one is asked for.

        Raises:
            ConfigError: `prepare` was not called.
            PeerUnreachable, PeerTimeout, ProtocolError: from the iterator; see `BucketReceiver.receive`.
        """
        if self._receiver is None:
            raise ConfigError("receive_weights: prepare must have been called")
        return self._receiver.receive()


def _metrics(report: StreamReport) -> dict[str, float]:
    return {
        "windlass/seconds": report.seconds,
        "windlass/fill_s": report.fill_s,
        "windlass/update_s": report.update_s,
        "windlass/wire_s": report.wire_s,
        "windlass/nbytes": float(report.nbytes),
        "windlass/num_buckets": float(report.num_buckets),
    }
