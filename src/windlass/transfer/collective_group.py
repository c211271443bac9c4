"""Broadcast groups on torch.distributed, beside the user's own: gloo or NCCL.

A group is a `ProcessGroup` object of its own on a store of its own. It never enters torch's
registry, so the user's default group and its numbering are untouched.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

from windlass.config import CollectiveFabric
from windlass.errors import ConfigError, PeerTimeout, PlanError, TransferFailed
from windlass.net.addresses import listen
from windlass.net.clock import Deadline
from windlass.transfer.bindings import GroupOffer

__all__ = ["Rendezvous", "TorchBroadcastGroup", "join_group"]

MIN_TIMEOUT_S = 0.05
BACKLOG = 1024


@final
class Rendezvous:
    """A store that the source hosts: bound to a free port of `host` alone, and then published.

    Raises:
        ConfigError: `host` is no address of this host.
        TransferFailed: the store does not start.
    """

    def __init__(self, host: str, deadline_s: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # By itself the store listens on every address of the host.
        listener = listen(host, 0, "rendezvous")
        port = int(listener.getsockname()[1])
        try:
            listener.listen(BACKLOG)
            self.store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=deadline_s),
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, OSError) as error:
            raise TransferFailed(f"rendezvous: does not start: {error}") from error

    @property
    def port(self) -> int:
        """The bound port."""
        port: int = self.store.port
        return port


def join_group(
    offer: GroupOffer,
    worker: str,
    *,
    fabric: CollectiveFabric,
    num_buffers: int,
    signature: str,
    host: str,
    deadline: Deadline,
    hosted: Rendezvous | None = None,
) -> TorchBroadcastGroup:
    """Enter a group: agree on what it carries, then connect. All members call it.

    Args:
        offer: the group.
        worker: this member.
        fabric: what carries the bytes.
        num_buffers: broadcasts that may be under way.
        signature: what this member means to send or receive; see `signature_of_offer`.
        host: own address, that the other members can reach.
        deadline: for all of it.
        hosted: the store, at the source.

    Raises:
        PlanError: a member has another signature; no collective has begun.
        PeerTimeout: a member did not come.
        TransferFailed: connecting failed.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    rank = offer.members.index(worker)
    try:
        store = (
            hosted.store
            if hosted is not None
            else TCPStore(
                offer.host,
                offer.port,
                is_master=False,
                timeout=timedelta(seconds=max(deadline.remaining_s, MIN_TIMEOUT_S)),
            )
        )
        _agree(store, offer, rank, signature, deadline)
        process_group = _connect(
            PrefixStore(offer.name, store), rank, len(offer.members), fabric, host, deadline
        )
    except RuntimeError as error:
        if deadline.remaining_s == 0 or "timed out" in str(error).lower():
            raise PeerTimeout(
                f"group {offer.name}: not all of {', '.join(offer.members)} came within "
                f"{deadline.seconds:.3g} s"
            ) from error
        raise TransferFailed(f"group {offer.name}: {_first_line(error)}") from error
    return TorchBroadcastGroup(
        offer.name, process_group, store, fabric, rank, max(offer.bucket_nbytes), num_buffers
    )


def _agree(store: Any, offer: GroupOffer, rank: int, signature: str, deadline: Deadline) -> None:
    keys = [f"{offer.name}/agree/{other}" for other in range(len(offer.members))]
    store.set(keys[rank], signature)
    store.wait(keys, timedelta(seconds=max(deadline.remaining_s, MIN_TIMEOUT_S)))
    found = {
        worker: store.get(key).decode() for worker, key in zip(offer.members, keys, strict=True)
    }
    # The hosting rank may close the store only when all have read.
    arrived = f"{offer.name}/read"
    if store.add(arrived, 1) == len(offer.members):
        store.set(f"{arrived}/all", "")
    store.wait([f"{arrived}/all"], timedelta(seconds=max(deadline.remaining_s, MIN_TIMEOUT_S)))
    if len(set(found.values())) > 1:
        said = ", ".join(f"{worker} {digest[:12]}" for worker, digest in found.items())
        raise PlanError(
            f"group {offer.name}: members must agree on names, dtypes, sizes, order and buckets, "
            f"got {said}"
        )


def _connect(
    store: Any, rank: int, size: int, fabric: CollectiveFabric, host: str, deadline: Deadline
) -> Any:
    from torch.distributed import ProcessGroupGloo

    timeout = timedelta(seconds=max(deadline.remaining_s, MIN_TIMEOUT_S))
    if fabric is CollectiveFabric.GLOO:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timeout
        return ProcessGroupGloo(store, rank, size, options)
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("XcclBackend: fabric nccl needs a CUDA device, none was found")
    from torch.distributed import ProcessGroupNCCL

    nccl = ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, nccl)


@final
class TorchBroadcastGroup:
    """One member of a group: all enter a broadcast together, from rank 0 into all others.

    It owns its buffers, so that what is outside needs to know only host addresses; NCCL's device
    buffers mirror the host's. Used by one thread.
    """

    def __init__(
        self,
        name: str,
        process_group: Any,
        store: Any,
        fabric: CollectiveFabric,
        rank: int,
        buffer_nbytes: int,
        num_buffers: int,
    ) -> None:
        import torch

        self._name = name
        self._process_group = process_group
        self._store = store  # hosts the store as long as the group lives
        self._is_root = rank == 0
        on_gpu = fabric is CollectiveFabric.NCCL
        self._host = [
            torch.zeros(buffer_nbytes, dtype=torch.uint8, pin_memory=on_gpu)
            for _ in range(num_buffers)
        ]
        self._device = (
            [torch.empty(buffer_nbytes, dtype=torch.uint8, device="cuda") for _ in self._host]
            if on_gpu
            else self._host
        )
        self._on_gpu = on_gpu
        self._works: list[tuple[Any, int] | None] = [None] * num_buffers
        self._broken = False

    @property
    def num_buffers(self) -> int:
        """How many broadcasts may be under way."""
        return len(self._host)

    @property
    def broken(self) -> bool:
        """Whether the group has failed: it never works again, another one must be formed."""
        return self._broken

    def buffer(self, slot: int) -> int:
        """Host address of a buffer. Not to be touched between `start` and `finish`."""
        return int(self._host[slot].data_ptr())

    def start(self, slot: int, nbytes: int, deadline_s: float) -> None:
        """Begin to broadcast the first `nbytes` of a buffer, from the root into all others.

        Raises:
            TransferFailed: the group is broken.
        """
        import torch.distributed as dist

        if self._broken:
            raise TransferFailed(f"group {self._name}: is broken")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=max(deadline_s, MIN_TIMEOUT_S))
        view = self._device[slot][:nbytes]
        try:
            if self._on_gpu and self._is_root:
                view.copy_(self._host[slot][:nbytes], non_blocking=True)
            self._works[slot] = (self._process_group.broadcast([view], options), nbytes)
        except RuntimeError as error:
            self.abort()
            raise TransferFailed(f"group {self._name}: {_first_line(error)}") from error

    def finish(self, slot: int, deadline_s: float) -> None:
        """Return once the buffer's bytes are there (or, at the root, may be overwritten).

        Raises:
            TransferFailed: a member is gone or late; the group is broken.
        """
        started, self._works[slot] = self._works[slot], None
        if started is None:
            return
        work, nbytes = started
        try:
            work.wait(timedelta(seconds=max(deadline_s, MIN_TIMEOUT_S)))
            if self._on_gpu and not self._is_root:
                self._host[slot][:nbytes].copy_(self._device[slot][:nbytes])
        except RuntimeError as error:
            self.abort()
            raise TransferFailed(f"group {self._name}: {_first_line(error)}") from error

    def abort(self) -> None:
        """Close every connection, so that the other members notice. Idempotent."""
        if self._broken:
            return
        self._broken = True
        self._works = [None] * len(self._works)
        self._process_group.abort()
        # The last reference: its sockets close, and the other members notice.
        self._process_group = self._store = None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
