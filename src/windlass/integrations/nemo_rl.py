"""The checkpoint engine of NeMo-RL: whole tensors from the policy's rank 0 to every vLLM rank.

    policy.generation.refit_transport: "windlass.integrations.nemo_rl:WindlassCheckpointEngine"

The interface is NeMo-RL's `CheckpointEngine` (NVIDIA-NeMo/RL, main at 7ea279abf, `nemo_rl/utils/checkpoint_engines/base.py`);
its `CheckpointEngineWeightSynchronizer` calls `prepare` and `init_..._process_group` once, or after every `finalize`,
then `send_weights` and `receive_weight_batches` for every update.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator
from datetime import timedelta
from typing import Any, final

import msgspec
import ray
import torch
import torch.distributed as dist
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine
from torch._C._distributed_c10d import TCPStore

from windlass.errors import ConfigError, PeerUnreachable
from windlass.integrations.bucket_stream import StreamAddress, StreamEnd

__all__ = ["WindlassCheckpointEngine"]

ADDRESS = "windlass/address"
CONNECT_S = 60.0


@final
class WindlassCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # NeMo-RL is not typed here
    """One rank's end. NeMo-RL makes one in every policy rank and in every vLLM rank, and does not say in which.

    The policy's rank 0 sends and hosts the fleet's controller; other policy ranks take part in the gathers only. The
    address, with a token of a receiver's role, reaches vLLM's ranks through a store of torch.distributed.

    Args:
        bucket_size: bytes of a bucket, at most; two of them at the sender, one at every receiver.
        release_after_refit: NeMo-RL's, which calls `finalize` by it.
        transport, mode, device, deadline_s: see `StreamEnd`.

    Raises:
        ConfigError, TransportUnavailable: see `StreamEnd`.
    """

    def __init__(
        self,
        bucket_size: int,
        *,
        release_after_refit: bool = False,  # noqa: ARG002
        transport: str = "auto",
        mode: str = "in_place",
        device: str = "auto",
        deadline_s: float = 600.0,
    ) -> None:
        self._end = StreamEnd(
            bucket_size,
            transport=transport,
            mode=mode,
            device=device,
            deadline_s=deadline_s,
            option="policy.generation.refit_cfg",
        )
        self._store: TCPStore | None = None
        self._address: StreamAddress | None = None  # of the sender, on a rank that receives

    def prepare(self) -> dict[str, Any]:
        """Say what this rank is called as a receiver, and where its store is, should it be the sender."""
        host = ray.util.get_node_ip_address().strip("[]")
        if self._store is None and dist.get_rank() == 0:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port = 0 if self._store is None else self._store.port
        return {"member": self._end.receiver.name, "host": host, "port": port}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[dict[str, Any]],
    ) -> None:
        """On the policy's rank 0: connect with all receivers.

        Args:
            worker_rank: of this one.
            train_world_size: ranks of the policy, whose answers of `prepare` come first in `metadata`.
            rollout_world_size: the others.
            metadata: of all ranks.

        Raises:
            ConfigError: not one answer per rank, or none of a receiver.
            EngineRefused, PeerTimeout: see `BucketSender.wait_for`.
        """
        if len(metadata) != train_world_size + rollout_world_size or not rollout_world_size:
            raise ConfigError(
                f"metadata must be of {train_world_size} policy and at least one vLLM rank, got "
                f"{len(metadata)} of {train_world_size} + {rollout_world_size}"
            )
        if worker_rank or self._store is None:
            return
        address = self._end.sender.open(metadata[0]["host"])
        self._store.set(ADDRESS, msgspec.json.encode(address).decode())
        self._end.sender.wait_for([rank["member"] for rank in metadata[train_world_size:]])

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,  # noqa: ARG002
        train_world_size: int,  # noqa: ARG002
        rollout_world_size: int,  # noqa: ARG002
        metadata: list[dict[str, Any]],
    ) -> None:
        """Connect with the sender.

        Args:
            rollout_rank: not used, as the next two.
            train_world_size: see there.
            rollout_world_size: see there.
            metadata: of all ranks.

        Raises:
            PeerUnreachable: the sender's store, or the sender, could not be reached, or has failed.
            AuthenticationError, ProtocolError, PeerTimeout: see `BucketReceiver.connect`.
        """
        sender = metadata[0]
        try:
            store = TCPStore(
                sender["host"],
                sender["port"],
                is_master=False,
                timeout=timedelta(seconds=CONNECT_S),
            )
            address = store.get(ADDRESS)
        except RuntimeError as error:
            raise PeerUnreachable(f"the policy's rank 0: its store: {error}") from error
        self._address = msgspec.json.decode(address, type=StreamAddress)
        self._end.receiver.connect(self._address)

    def finalize(self) -> None:
        """End every connection, free the buckets. Idempotent; `prepare` begins anew."""
        self._end.close()
        self._store = None

    @torch.no_grad()
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Send every tensor; on other policy ranks, take part in the gathers.

        Raises:
            PeerUnreachable, RoundAborted, PeerTimeout, UnsupportedLayout: see `StreamEnd.send`.
        """
        await self._end.send(_one_by_one(weights))

    async def receive_weight_batches(
        self,
    ) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield (name, tensor)s, bucket by bucket; they are valid until the next bucket is asked for.

        Raises:
            ConfigError, PeerUnreachable, PeerTimeout, ProtocolError: see `BucketReceiver.receive`.
        """
        async for bucket in self._end.receiver.receive():
            yield bucket
        if self._address is not None:
            self._end.receiver.connect(
                self._address
            )  # for the next stream, of which nothing else tells


async def _one_by_one(
    weights: Generator[tuple[str, torch.Tensor], None, None],
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        yield name, tensor
