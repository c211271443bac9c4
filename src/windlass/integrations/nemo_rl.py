"""Checkpoint engine for NeMo-RL: the policy's rank 0 sends whole tensors to every vLLM rank.

    policy.generation.refit_transport: "windlass.integrations.nemo_rl:WindlassCheckpointEngine"

The interface is NeMo-RL's `CheckpointEngine` (NVIDIA-NeMo/RL, main at 7ea279abf, `nemo_rl/utils/checkpoint_engines/base.py`).
Before the first update, and again after every `finalize`, NeMo-RL calls `prepare` and then, on each rank, either
`init_policy_process_group` or `init_rollout_process_group`. For every update, NeMo-RL calls `send_weights` on policy
ranks and `receive_weight_batches` on vLLM ranks.
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
    """Checkpoint engine of one rank. NeMo-RL creates one in every policy rank and every vLLM rank.

    The policy's rank 0 sends the tensors and hosts the controller. Other policy ranks only take part in the gathers. vLLM
    ranks get the controller's address and a token for receivers through a `TCPStore` of the policy's rank 0.

    Args:
        bucket_size: largest size of a bucket in bytes. The sender has two buckets; every receiver has one, or two with
            the mode `staged`.
        release_after_refit: not used: NeMo-RL calls `finalize` after an update if this option is set.
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
        # Address of the sender; None on policy ranks.
        self._address: StreamAddress | None = None

    def prepare(self) -> dict[str, Any]:
        """Return this rank's name as a receiver, its host, and the port of its store.

        The policy and vLLM have separate default process groups. Rank 0 of each group creates a store; other ranks return
        port 0. All ranks use the store of the policy's rank 0, and none uses the store of vLLM's rank 0.
        """
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
        """On the policy's rank 0, open the sender and wait for all receivers. On other ranks, only check the arguments.

        Args:
            worker_rank: rank of this process in the policy.
            train_world_size: number of policy ranks.
            rollout_world_size: number of vLLM ranks.
            metadata: results of `prepare` from all ranks, policy ranks first.

        Raises:
            ConfigError: `metadata` does not have one entry per rank, or there is no vLLM rank.
            PeerUnreachable, TransportUnavailable, TransferFailed: see `BucketSender.open`.
            EngineRefused, PeerTimeout: see `BucketSender.wait_for`.
        """
        if len(metadata) != train_world_size + rollout_world_size or not rollout_world_size:
            raise ConfigError(
                f"metadata must have one entry for each policy rank and each vLLM rank, got {len(metadata)} "
                f"entries for {train_world_size} + {rollout_world_size} ranks"
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
        """Read the sender's address from the store of the policy's rank 0, and connect to the sender.

        Args:
            rollout_rank: not used.
            train_world_size: not used.
            rollout_world_size: not used.
            metadata: results of `prepare` from all ranks; the first one is from the sender.

        Raises:
            PeerUnreachable: the sender or the store could not be reached, or has failed.
            AuthenticationError, ProtocolError: the sender refused this rank.
            PeerTimeout: the sender did not answer in time.
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
            raise PeerUnreachable(
                f"the store of the policy's rank 0 cannot be reached: {error}"
            ) from error
        self._address = msgspec.json.decode(address, type=StreamAddress)
        self._end.receiver.connect(self._address)

    def finalize(self) -> None:
        """Close every connection and free the buckets. Idempotent; NeMo-RL may call `prepare` again afterwards."""
        self._end.close()
        self._store = None

    @torch.no_grad()
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Send every tensor from the policy's rank 0. Other policy ranks only take part in the gathers.

        Raises:
            PeerUnreachable, RoundAborted, PeerTimeout, UnsupportedLayout: see `StreamEnd.send`.
        """
        await self._end.send(_one_by_one(weights))

    async def receive_weight_batches(
        self,
    ) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield (name, tensor) pairs, one list per bucket.

        Memory: tensors are valid until the caller requests the next bucket.

        Raises:
            ConfigError, PeerUnreachable, PeerTimeout, ProtocolError: see `BucketReceiver.receive`.
        """
        async for bucket in self._end.receiver.receive():
            yield bucket
        if self._address is not None:
            # NeMo-RL does not announce the next stream, so expect a stream from now on.
            self._end.receiver.connect(self._address)


async def _one_by_one(
    weights: Generator[tuple[str, torch.Tensor], None, None],
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of NeMo-RL's generator, because a stream needs an asynchronous iterator."""
    for name, tensor in weights:
        yield name, tensor
