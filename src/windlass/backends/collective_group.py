"""Broadcast groups on torch.distributed (gloo or NCCL) that are separate from the user's groups.

Each group is a `ProcessGroup` object with its own store. It is not entered into torch's registry,
so the user's default group and its numbering do not change.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from windlass.config import CollectiveFabric
from windlass.envs import temporary_values
from windlass.errors import ConfigError, PeerTimeout, PlanError, TransferError, TransferFailed
from windlass.net.addresses import listen
from windlass.net.clock import Deadline
from windlass.transfer.arena import keep_mapped
from windlass.transfer.bindings import GroupOffer

if TYPE_CHECKING:
    import torch

    from windlass.memory.cuda.gpu import Gpu

MIN_TIMEOUT_S = 0.05
"""Shortest timeout that is passed to torch."""
BACKLOG = 1024
"""Number of members whose connections to the store may wait to be accepted."""
ABORT_S = 2.0
"""Seconds that kernels have to end after their communicator is aborted."""
STEP_S, MIN_STEP_S = 0.2, 0.001
"""Longest and shortest step, in seconds, in which a broadcast of gloo is awaited."""
RELEASE_S = 2.0
"""Seconds to connect to the store of this process."""
_RELEASED = "released"
"""Signature that no member has."""


@final
class Rendezvous:
    """Store that the source hosts. It is bound to a free port of `host` only, before the port is published.

    Raises:
        ConfigError: `host` is not an address of this host.
        TransferFailed: the store does not start.
    """

    def __init__(self, host: str, deadline_s: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # If TCPStore creates the listener, it listens on every address of the host.
        listener = listen(host, 0, "rendezvous")
        self.port = int(listener.getsockname()[1])
        try:
            listener.listen(BACKLOG)
            self.store = TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=deadline_s),
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, OSError) as error:
            raise TransferFailed(f"the group's store cannot start on {host}: {error}") from error
        self._host = host

    def release(self, offer: GroupOffer) -> None:
        """End the waits of all members that are forming a group. They raise PlanError, because signatures differ.

        Any thread may call this. Do nothing if the store cannot be reached.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with contextlib.suppress(RuntimeError):
            # A client runs one call at a time, and `self.store` may be in the call that this method must end.
            store = TCPStore(
                self._host, self.port, is_master=False, timeout=timedelta(seconds=RELEASE_S)
            )
            for key in _agree_keys(offer):
                store.set(key, _RELEASED)
            store.set(_all_read_key(offer), "")


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
    gpu: Gpu | None = None,
) -> TorchBroadcastGroup:
    """Enter a broadcast group. Collective: all members call this. The members first compare `signature`, then connect.

    Args:
        offer: description of the group, from the member that sends (the source).
        worker: name of this member; it must be in `offer.members`.
        fabric: gloo or NCCL.
        num_buffers: number of broadcasts that may run at the same time.
        signature: digest of the content that this member expects; see `signature_of_offer`.
        host: address of this member, for gloo's connections.
        deadline: deadline of the whole call.
        hosted: store of the group. The source hosts the store and passes it here; the other members pass None.
        gpu: GPU whose kernels fill and empty this member's buffers; None for buffers in host memory.

    Raises:
        ConfigError: the fabric is NCCL, and torch finds no CUDA device.
        PlanError: a member has a different signature. The group was not formed.
        PeerTimeout: a member did not join by the deadline.
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
            PrefixStore(offer.name, store),
            rank,
            len(offer.members),
            fabric,
            host,
            deadline,
            gpu,
        )
    except RuntimeError as error:
        if deadline.remaining_s == 0 or "timed out" in str(error).lower():
            raise PeerTimeout(
                f"group {offer.name}: not all of {', '.join(offer.members)} joined within "
                f"{deadline.seconds:.3g} s"
            ) from error
        raise TransferFailed(f"group {offer.name}: {_first_line(error)}") from error
    return TorchBroadcastGroup(
        offer.name,
        process_group,
        store,
        fabric,
        rank,
        max(offer.bucket_nbytes),
        num_buffers,
        gpu,
    )


def _agree(store: Any, offer: GroupOffer, rank: int, signature: str, deadline: Deadline) -> None:
    """Exchange the signatures of all members through the store, and compare them. Collective.

    Raises:
        PlanError: a member has another signature.
        RuntimeError: a member did not arrive by the deadline.
    """
    keys = _agree_keys(offer)
    store.set(keys[rank], signature)
    store.wait(keys, timedelta(seconds=max(deadline.remaining_s, MIN_TIMEOUT_S)))
    found = {
        worker: store.get(key).decode() for worker, key in zip(offer.members, keys, strict=True)
    }
    # The rank that hosts the store must not close it before all members have read the signatures.
    if store.add(f"{offer.name}/read", 1) == len(offer.members):
        store.set(_all_read_key(offer), "")
    store.wait([_all_read_key(offer)], timedelta(seconds=max(deadline.remaining_s, MIN_TIMEOUT_S)))
    if _RELEASED in found.values():
        raise PlanError(f"group {offer.name}: the source has given up to form the group")
    if len(set(found.values())) > 1:
        said = ", ".join(f"{worker} {digest[:12]}" for worker, digest in found.items())
        raise PlanError(
            f"group {offer.name}: members must expect equal buckets (tensor names, dtypes, sizes and order), got different "
            f"signatures: {said}"
        )


def _agree_keys(offer: GroupOffer) -> list[str]:
    """Return the store's keys for the signatures of the members, in the order of the members."""
    return [f"{offer.name}/agree/{rank}" for rank in range(len(offer.members))]


def _all_read_key(offer: GroupOffer) -> str:
    """Return the store's key that exists once all members have read the signatures."""
    return f"{offer.name}/read/all"


def _connect(
    store: Any,
    rank: int,
    size: int,
    fabric: CollectiveFabric,
    host: str,
    deadline: Deadline,
    gpu: Gpu | None,
) -> Any:
    """Return a new process group of gloo or NCCL, with all connections open. Collective.

    Raises:
        ConfigError: the fabric is NCCL, and torch finds no CUDA device.
        RuntimeError: the members could not connect by the deadline.
    """
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
    # By default NCCL's watchdog ends the trainer process when an engine ends. Switch the watchdog
    # off: the group's members enforce deadlines themselves.
    with temporary_values({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}):
        group = ProcessGroupNCCL(store, rank, size, nccl)
    # Connect now: by default NCCL connects in the first broadcast, while engines are paused.
    group.eager_connect_single_device(torch.device("cuda", _ordinal(gpu)))
    return group


def _ordinal(gpu: Gpu | None) -> int:
    """Return the ordinal of `gpu`, or of torch's current GPU if `gpu` is None."""
    import torch

    return torch.cuda.current_device() if gpu is None else gpu.device.ordinal


@final
class TorchBroadcastGroup:
    """One member of a group. All members enter a broadcast together; rank 0 sends to all others.

    The group owns its buffers. Without `gpu` they are in host memory, and NCCL's device buffers are
    copied to and from pinned buffers. With `gpu`, kernels fill and empty the buffers: NCCL sends
    and receives device buffers directly, and gloo's buffers are pinned memory that kernels can
    access. Kernels and broadcasts run in order in the stream of `gpu`, and only `drain` waits for
    them. Used by one thread, but any thread may call `abort`.

    Attributes:
        broken: True after a failure. The group cannot be used again; a new group must be formed.
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
        gpu: Gpu | None,
    ) -> None:
        import torch

        self._name = name
        self._process_group = process_group
        # This reference keeps the store open during the life of the group.
        self._store = store
        self._is_root = rank == 0
        self._is_nccl = fabric is CollectiveFabric.NCCL
        self._gpu = gpu
        self._ordinal = _ordinal(gpu) if self._is_nccl or gpu is not None else -1
        is_mirrored = self._is_nccl and gpu is None
        self._wire = [
            torch.empty(buffer_nbytes, dtype=torch.uint8, device=f"cuda:{self._ordinal}")
            if self._is_nccl
            else torch.zeros(buffer_nbytes, dtype=torch.uint8, pin_memory=gpu is not None)
            for _ in range(num_buffers)
        ]
        self._buffers = (
            [torch.zeros(buffer_nbytes, dtype=torch.uint8, pin_memory=True) for _ in self._wire]
            if is_mirrored
            else self._wire
        )
        self._is_mirrored = is_mirrored
        self._works: list[tuple[Any, int] | None] = [None] * num_buffers
        self._lock = threading.Lock()
        self.broken = False

    @property
    def num_buffers(self) -> int:
        """Number of broadcasts that may run at the same time."""
        return len(self._wire)

    def buffer(self, slot: int) -> int:
        """Return the address of buffer `slot`. The caller must not use the buffer between `start` and `finish`."""
        return int(self._buffers[slot].data_ptr())

    def put(self, slot: int, offset: int, tensor: torch.Tensor) -> None:
        """Copy a contiguous tensor to byte `offset` of buffer `slot`.

        On a GPU, the copy is queued in the group's stream, after all work that is now queued in the caller's current
        stream.

        Raises:
            TransferFailed: the group is broken. A broadcast that failed may still read the buffer.
        """
        self._require_whole()
        nbytes = tensor.numel() * tensor.element_size()
        place = self._buffers[slot][offset : offset + nbytes].view(tensor.dtype)
        with self._stream():
            place.view(tensor.shape).copy_(tensor.detach())

    def read(self, slot: int, offset: int, nbytes: int) -> bytes:
        """Return bytes of buffer `slot`. No broadcast of this buffer may run."""
        with self._stream():
            return self._buffers[slot][offset : offset + nbytes].cpu().numpy().tobytes()

    def _require_whole(self) -> None:
        """Raise TransferFailed if the group is broken."""
        if self.broken:
            raise TransferFailed(f"group {self._name} is broken after an earlier failure")

    def start(self, slot: int, nbytes: int, deadline_s: float) -> None:
        """Begin to broadcast the first `nbytes` of buffer `slot`, from rank 0 to all other members.

        All members must call this with the same `slot` and `nbytes`, in the same order. The buffer must not change
        before the broadcast has ended. The broadcast fails after `deadline_s` or `MIN_TIMEOUT_S`, whichever is longer.
        With Gloo and a GPU, `deadline_s` also limits the wait for the kernels that fill the buffer.

        Raises:
            TransferFailed: the group was already broken, the kernels did not end in time, or the broadcast cannot
                begin. The group is broken afterwards.
        """
        import torch.distributed as dist

        self._require_whole()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=max(deadline_s, MIN_TIMEOUT_S))
        view = self._wire[slot][:nbytes]
        try:
            if not self._is_nccl and self._gpu is not None:
                # Gloo does not use streams, so the kernels must have ended.
                self._gpu.finish(deadline_s)
            # With the lock, this thread never has the last reference to a process group that another thread aborts: to
            # drop it takes as long as the broadcasts that gloo has begun.
            with self._lock, self._stream():
                self._require_whole()
                if self._is_mirrored and self._is_root:
                    view.copy_(self._buffers[slot][:nbytes], non_blocking=True)
                self._works[slot] = (self._process_group.broadcast([view], options), nbytes)
        except RuntimeError as error:
            self.abort()
            raise TransferFailed(f"group {self._name}: {_first_line(error)}") from error

    def finish(self, slot: int, deadline_s: float) -> None:
        """Finish the broadcast of buffer `slot`. Work that the caller queues after this call may read the buffer.

        On rank 0, this work may also overwrite the buffer. If no broadcast of this buffer was started, do nothing.

        With `gpu` and NCCL, this call returns at once and ignores `deadline_s`. Later work in the stream of `gpu` waits
        for the broadcast, and `drain` reports a late broadcast. In all other cases, this call waits until the broadcast
        has ended.

        Raises:
            TransferFailed: the process of a member has ended, or this call waited longer than `deadline_s`. The group is
                then broken.
        """
        started, self._works[slot] = self._works[slot], None
        if started is None:
            return
        work, nbytes = started
        try:
            with self._stream():
                if self._is_nccl and self._gpu is not None:
                    # Only the stream waits here, not this thread; `drain` enforces the deadline.
                    work.wait()
                elif self._is_nccl:
                    work.wait(timedelta(seconds=max(deadline_s, MIN_TIMEOUT_S)))
                else:
                    self._wait(work, Deadline.after(max(deadline_s, MIN_TIMEOUT_S), "broadcast"))
                if self._is_mirrored and not self._is_root:
                    self._buffers[slot][:nbytes].copy_(self._wire[slot][:nbytes])
        except RuntimeError as error:
            self.abort()
            raise TransferFailed(f"group {self._name}: {_first_line(error)}") from error

    def _wait(self, work: Any, deadline: Deadline) -> None:
        """Wait for a broadcast of gloo. Gloo's own wait does not end if another thread calls `abort`, so wait in steps.

        Raises:
            RuntimeError: the broadcast failed or did not end by the deadline, or another thread has aborted the group.
        """
        while not self.broken:
            step_s = min(STEP_S, deadline.remaining_s)
            try:
                work.wait(timedelta(seconds=max(step_s, MIN_STEP_S)))
            except RuntimeError:
                if work.is_completed() or not deadline.remaining_s:
                    raise
            else:
                return
        raise RuntimeError("the group was aborted")

    def drain(self, deadline_s: float) -> None:
        """Wait until the GPU has ended all work in the group's stream: the broadcasts and the copy kernels.

        Without `gpu`, do nothing, because `finish` has already waited for each broadcast.

        Raises:
            TransferFailed: a broadcast or a kernel failed, or did not end within `deadline_s`; the group is broken.
            TransferOutcomeUnknown: kernels of earlier work on this GPU may still run.
        """
        if self._gpu is None:
            return
        # Leave time to abort and to report the failure.
        left_s = max(deadline_s - 2 * ABORT_S, deadline_s / 2)
        try:
            self._gpu.wait_or_leave(self._gpu.stream.record(), left_s)
        except TransferFailed:
            self.abort()
            raise

    def abort(self) -> None:
        """Abort the group, so that the broadcasts of all members fail. Idempotent. Any thread may call this.

        If the NCCL communicator or kernels on the group's GPU do not end within `ABORT_S`, the buffers stay allocated until
        this process ends, and the group's `Gpu` refuses later work. If the communicator does not end, its connections also
        stay open.
        """
        with self._lock:
            if self.broken:
                return
            self.broken = True
        self._works = [None] * len(self._works)
        held = (self._process_group, self._store, self._wire, self._buffers)
        # Drop this object's references to the group and the store. Their sockets close with the last reference.
        self._process_group = self._store = None
        if not self._is_nccl:
            held[0].abort()
        elif not _has_ended(held[0].abort, ABORT_S):
            keep_mapped(held)
            if self._gpu is not None:
                self._gpu.distrust(f"group {self._name}: NCCL did not end within {ABORT_S} s")
            return
        if self._gpu is None:
            return
        try:
            # Wait for the kernels that use the buffers. NCCL's kernels end when their communicator is aborted.
            self._gpu.finish(ABORT_S)
        except TransferError:
            keep_mapped(held)

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager in which torch queues work in the stream of `gpu`.

        This stream first waits for the work in the current stream. Without `gpu`, torch uses the current stream of the
        device. For host memory, the context manager does nothing.
        """
        if self._ordinal < 0:
            return contextlib.nullcontext()
        import torch

        if self._gpu is None:
            return torch.cuda.device(self._ordinal)
        device = torch.device("cuda", self._ordinal)
        stream = torch.cuda.ExternalStream(self._gpu.stream.handle, device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)


def _has_ended(abort: Callable[[], None], deadline_s: float) -> bool:
    """Call `abort` in a daemon thread; return whether it ended within `deadline_s`. Ignore a RuntimeError that it raises."""
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            # The communicator may have failed already.
            abort()
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    return ended.wait(deadline_s)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its class if the text is empty."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
