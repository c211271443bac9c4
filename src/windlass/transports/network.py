"""Base classes of transports between hosts: common settings, and writes through a library.

A library such as NIXL performs a write as native calls (`NativeCall`), which have no deadline. The
writing thread waits for each call until the call ends, the deadline passes or the peer's process ends. If
the thread then does not know the outcome, the call is given up: bytes may still arrive, even if the library
reports an error. The transport keeps the call and the memory that it reads until the call ends, and begins
no other write to this peer before that. RDMA verbs do not identify the process that owns a queue pair, so
`liveness.py` identifies each peer and watches its process. Derived classes define the calls, how the end of
a call is detected, and how a peer is checked before the first byte is sent.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

import msgspec

from windlass.errors import (
    ConfigError,
    PeerUnreachable,
    RegionError,
    TransferError,
    TransferFailed,
    TransferOutcomeUnknown,
)
from windlass.layout.columns import UInt64Array
from windlass.memory.ranges import (
    Pieces,
    calls,
    cut_at_edges,
    edges_of,
    merge_adjacent,
    split_pieces,
)
from windlass.net.addresses import own_address
from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, WriteBatch
from windlass.transports.liveness import LivenessListener, PeerLiveness
from windlass.transports.peers import PeerEndpoint, RemoteRegion
from windlass.transports.region_transport import RegionTransport
from windlass.transports.regions import overlaps
from windlass.transports.registry import TransportConfig
from windlass.transports.traits import MemoryType

GRACE_S = 0.25
"""Seconds to wait after a failed call. If the call failed because the peer's process ended, the kernel reports the end
within this time."""
FIRST_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3
"""Shortest and longest pause between two checks of a call, for libraries that do not report the end of a call. The
end of the peer's process ends a pause at once."""
_CAP_IPC_LOCK = 14
"""Number of the Linux capability to lock any amount of memory."""


class NetworkConfig(TransportConfig, frozen=True):
    """Settings common to transports between hosts.

    Attributes:
        host: address at which peers reach this process; empty for `addresses.own_address`.
        device: comma-separated names of NICs in the form of the transport; empty for all. Each write is
            spread over these NICs.
        max_registration_nbytes: largest size of one registration; a larger region is registered in
            steps. 0 for the transport's own limit.
        gpu: ordinal of the GPU whose memory is registered; -1 for host memory. Kernels that change this
            memory must have ended before a write begins.
    """

    memory: ClassVar[frozenset[MemoryType]] = frozenset(MemoryType)
    between_hosts: ClassVar[bool] = True

    host: str = ""
    device: str = ""
    max_registration_nbytes: int = 0
    gpu: int = -1

    def __post_init__(self) -> None:
        if self.gpu < -1:
            raise ConfigError(f"gpu: must be -1 or the ordinal of a GPU, got {self.gpu}")
        nbytes = self.max_registration_nbytes
        if nbytes < 0 or nbytes % 4096:
            raise ConfigError(
                f"max_registration_nbytes: must be 0 or a positive multiple of 4096, got {nbytes}"
            )

    def placed(self, *, towards: str, gpu: int) -> Self:
        """Return these settings with a host and a GPU.

        Args:
            towards: URL of the controller. If no host is configured, use this machine's address on the route to the
                controller.
            gpu: GPU ordinal that replaces the configured one; -1 to keep the configured one.

        Raises:
            ConfigError, PeerUnreachable: this machine has no address on that route; see `own_address`.
        """
        return msgspec.structs.replace(
            self,
            host=self.host or own_address(towards),
            gpu=self.gpu if gpu < 0 else gpu,
        )


class Outcome(Enum):
    """Known state of a native call."""

    PENDING = auto()
    DONE = auto()
    FAILED = auto()


class NativeCall(ABC):
    """Operation of a library on a peer, such as a write. The lock of the peer guards it.

    Attributes:
        error: the library's description of a failure.
        wake: file descriptor that becomes readable when the call ends; -1 if `look` must be called to
            find out.
        is_late: whether the call was given up because its deadline passed, and for no other reason.
    """

    def __init__(self, local: UInt64Array, nbytes: UInt64Array) -> None:
        self.local, self.nbytes = local.copy(), nbytes.copy()
        self.error = "error"
        self.wake = -1
        self.is_late = False

    @abstractmethod
    def look(self) -> Outcome:
        """Return the state of the call. After FAILED, bytes may still arrive."""

    @abstractmethod
    def cancel(self) -> bool:
        """Cancel the call if it has not begun. Return whether the call will certainly never begin."""

    def stop_waiting(self) -> None:
        """Release resources that were only needed to wait for the end, such as `wake`. The call may still run."""
        return


class NetworkPeer(ABC):
    """Native calls to one incarnation of one peer. Thread-safe.

    Args:
        endpoint: endpoint of the peer.
        liveness: connection that detects the end of the peer's process; closed with this object.
        lock: lock of this peer, or of the whole transport if the library's calls are not
            thread-safe.

    Attributes:
        is_closed: whether the transport is closed. Then no call begins, and waiting threads get an
            error.
    """

    outlives_process: ClassVar[bool]
    """True if a failed call may still read local memory after the peer's process has ended."""

    def __init__(
        self, endpoint: PeerEndpoint, liveness: PeerLiveness, lock: threading.RLock
    ) -> None:
        self.endpoint, self.liveness, self.lock = endpoint, liveness, lock
        self.is_closed = False
        self._ended = threading.Condition(lock)
        self._under_way: set[NativeCall] = set()
        """Calls that a thread follows."""
        self._given_up: dict[NativeCall, str] = {}
        """Call that no thread follows although bytes may still arrive -> description of what happened."""

    @abstractmethod
    def confirm(self, regions: Sequence[RemoteRegion], deadline: Deadline) -> None:
        """Check that the intended process is reachable, before a byte of a batch is sent.

        Raises:
            PeerUnreachable: the process is not reachable; nothing was sent.
            RegionError: the key of a region is malformed.
            TransferFailed: the transport is closed.
            TransferOutcomeUnknown: an earlier write to this peer may still continue.
        """

    @abstractmethod
    def step_nbytes(self, region: RemoteRegion) -> int:
        """Return the size in bytes of each registration of a peer's region; 0 if the region is one registration.

        Raises:
            RegionError: the key of the region is malformed.
        """

    @abstractmethod
    def _begin(self, pieces: Pieces) -> NativeCall:
        """Begin a write, and return the call. The caller holds the lock.

        If the library reports an error, return a call whose `look` returns FAILED.
        """

    @property
    def is_in_use(self) -> bool:
        """True if a thread waits for the end of a call to this peer."""
        return bool(self._under_way)

    def is_open(self) -> bool:
        """Return whether a call that was given up may still run. First delete the records of calls that have ended."""
        with self.lock:
            if self._given_up:
                has_ended = not self.outlives_process and self.liveness.has_ended(reconnect=False)
                for call in list(self._given_up):
                    outcome = call.look()
                    if outcome is Outcome.DONE or (outcome is Outcome.FAILED and has_ended):
                        del self._given_up[call]
            return bool(self._given_up)

    def touches(self, region: MemoryRegion) -> bool:
        """Return whether an unfinished call may still read memory of the region."""
        with self.lock:
            self.is_open()
            return any(
                overlaps(region, call.local, call.nbytes)
                for call in (*self._under_way, *self._given_up)
            )

    @contextlib.contextmanager
    def held(self, deadline: Deadline) -> Iterator[None]:
        """Hold the lock of this peer inside the block.

        Raises:
            TransferFailed: the transport is closed, or other threads held the lock until the deadline.
        """
        if not self.lock.acquire(timeout=deadline.remaining_s):
            raise self._crowded_out(deadline)
        try:
            self.refuse_closed(deadline)
            yield
        finally:
            self.lock.release()

    def refuse_closed(self, deadline: Deadline) -> None:
        """Raise `TransferFailed` if the transport is closed.

        Call this before reporting that the peer has ended. The transport's `close` also closes `liveness`, which then
        reports that the peer has ended although the peer may still run.
        """
        if self.is_closed:
            raise TransferFailed(f"{deadline.purpose}: the transport is closed")

    def refuse_open(self, deadline: Deadline) -> None:
        """Check that a new call to this peer may begin. The caller holds the lock.

        Raises:
            PeerUnreachable: the peer's process has ended.
            TransferFailed: the transport is closed.
            TransferOutcomeUnknown: a call that was given up may still run.
        """
        self.refuse_closed(deadline)
        if self.liveness.has_ended(reconnect=False):
            raise PeerUnreachable(f"{deadline.purpose}: the peer's process has ended")
        if self.is_open():
            why = next(iter(self._given_up.values()))
            raise TransferOutcomeUnknown(f"an earlier write may still continue: {why}")

    def write(self, pieces: Pieces, deadline: Deadline) -> None:
        """Perform one native write from start to end. Raise like `perform`."""
        self.perform(partial(self._begin, pieces), deadline)

    def perform(self, begin: Callable[[], NativeCall], deadline: Deadline) -> None:
        """Begin one native call, and wait until it has ended.

        Args:
            begin: function that begins the call. It runs while this thread holds the lock of the peer.
            deadline: deadline of the call.

        Raises:
            PeerUnreachable: the peer's process has ended.
            TransferFailed: the call did not begin, or the peer refused it. No byte arrives later.
            TransferOutcomeUnknown: this call was given up, or an earlier call was given up and has not
                ended.
        """
        with self.held(deadline):
            self.refuse_open(deadline)
            deadline.check_before_more()
            call = begin()
            self._under_way.add(call)
        try:
            outcome = self._follow(call, deadline)
            failure = None if outcome is Outcome.DONE else self._failure(call, outcome, deadline)
        # After an interrupt or a similar exception, no thread waits for the call, and bytes may still arrive.
        except BaseException:
            with self.lock:
                self._given_up[call] = f"{deadline.purpose}: interrupted; bytes may still arrive"
            raise
        finally:
            self._end(call)
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Close `liveness`, which wakes the threads that wait for calls. Idempotent.

        These threads then raise `PeerUnreachable`. If the caller sets `is_closed` before this call, their errors say
        instead that the transport was closed.
        """
        self.liveness.close()

    def _follow(self, call: NativeCall, deadline: Deadline) -> Outcome:
        """Wait until a call has ended, and return its outcome.

        Return PENDING if the deadline passes, the peer ends or the transport closes before the call ends.
        """
        pause_s, has_ended = FIRST_PAUSE_S, False
        while True:
            with self.lock:
                outcome = call.look()
            if outcome is not Outcome.PENDING or has_ended or deadline.remaining_s == 0:
                return outcome
            has_ended = self.liveness.wait_ended(
                pause_s if call.wake < 0 else deadline.remaining_s, call.wake
            )
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    def _failure(self, call: NativeCall, outcome: Outcome, deadline: Deadline) -> TransferError:
        """Return the exception for a call whose outcome is not DONE.

        If the call began and the peer has not refused it, give it up (record it in `_given_up`).
        """
        purpose, failed = deadline.purpose, outcome is Outcome.FAILED
        if failed and self._has_refused(call, deadline):
            return TransferFailed(
                f"{purpose}: {self.endpoint.address} refused a piece ({call.error}); is the memory "
                "still registered there?"
            )
        has_ended = self.liveness.wait_ended(GRACE_S if failed else 0.0)
        with self.lock:
            never_began = call.cancel()
            error: type[TransferError] = TransferOutcomeUnknown
            if self.is_closed:
                why = "the transport was closed"
                error = TransferFailed if never_began else error
            elif has_ended:
                error, why = PeerUnreachable, "the peer's process has ended"
            elif never_began:
                if not failed:
                    return self._crowded_out(deadline)
                error, why = TransferFailed, f"the write did not begin: {call.error}"
            elif failed:
                why = call.error
            else:
                call.is_late, why = True, f"the write did not end within {deadline.seconds} s"
            if error is TransferOutcomeUnknown:
                why += "; bytes may still arrive"
            if not never_began:
                self._given_up[call] = f"{purpose}: {why}"
            return error(f"{purpose}: {why}")

    def _crowded_out(self, deadline: Deadline) -> TransferFailed:
        """Return the error for a write that could not begin because other writes to the peer took too long."""
        return TransferFailed(
            f"{deadline.purpose}: other writes took all of the deadline of {deadline.seconds} s; "
            "this write did not begin"
        )

    def _has_refused(self, call: NativeCall, deadline: Deadline) -> bool:  # noqa: ARG002
        """Return whether a failed call has certainly ended, so that no byte of it arrives later."""
        return False

    def _end(self, call: NativeCall) -> None:
        """Record that no thread waits for this call any more. Wake the threads that wait until no call is under way."""
        with self._ended:
            call.stop_waiting()
            self._under_way.discard(call)
            self._ended.notify_all()


PeerT = TypeVar("PeerT", bound=NetworkPeer)


class Limits(NamedTuple):
    """Limits of one native call: number of pieces, bytes in total, bytes of each piece.

    Small calls make clean failures more likely: if the deadline passes between two calls, no more bytes
    arrive; if it passes during a call, the outcome is unknown.
    """

    num_pieces: int
    nbytes: int
    piece_nbytes: int


class NetworkTransport(RegionTransport, Generic[PeerT]):
    """Base class of transports that register and write through a library.

    A derived class starts the library before it calls `__init__` of this class.

    Args:
        endpoint: endpoint of this transport.
        liveness: listener to which peers connect to detect the end of this process; closed with the
            transport.
        step_nbytes: largest size of one registration; a larger region is registered in steps. 0 for no
            limit.
        limits: limits of one native call.

    Attributes:
        peers: peers that this transport has written to and that have not ended.
    """

    def __init__(
        self,
        endpoint: PeerEndpoint,
        liveness: LivenessListener,
        step_nbytes: int,
        limits: Limits,
    ) -> None:
        super().__init__(endpoint)
        self._liveness, self._step_nbytes, self._limits = liveness, step_nbytes, limits
        self.peers: dict[PeerEndpoint, PeerT] = {}
        self._closed = False

    def close(self) -> None:
        """See `OneSidedTransport.close`. Memory of unfinished writes stays allocated until the process ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            spans = self.table.spans()
            self.table.clear()
            for peer in self.peers.values():
                peer.is_closed = True
        for peer in self.peers.values():
            peer.close()
        self._liveness.close()
        with self._lock, self._current():
            self._free_untouched(keep=True)
            self._close_library(spans)
            self.peers = {}

    @abstractmethod
    def _register_together(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Register ranges in one library call; return the key of each. The caller holds the lock.

        Raises:
            RegionError: the library refused a range, and no range is registered. The message names the first range.
        """

    def _register_all(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """See `RegionTransport`. If the library refuses the ranges together, register each range separately."""
        if len(spans) > 1:
            with contextlib.suppress(RegionError):
                return self._register_together(spans)
        keys: list[str] = []
        with contextlib.ExitStack() as undo:
            for span in spans:
                keys += self._register_together([span])
                undo.callback(self._take_back, self._region(span, keys[-1]))
            undo.pop_all()
        return keys

    def _take_back(self, region: MemoryRegion) -> None:
        """Undo a registration that no write has used yet."""
        if (later := self._unregister(region)) is not None:
            later()

    @abstractmethod
    def _close_library(self, spans: Sequence[tuple[int, int]]) -> None:
        """Unregister `spans` and all other memory; stop the library unless a call is unfinished."""

    @abstractmethod
    def _new_peer(self, endpoint: PeerEndpoint, liveness: PeerLiveness) -> PeerT:
        """Return a new object for the calls to a peer. The object closes `liveness`. The caller holds the lock.

        Raises:
            PeerUnreachable: the endpoint is malformed, or the library has no more memory for it.
            RegionError: memory cannot be registered for this peer.
        """

    def _listener_of(self, endpoint: PeerEndpoint) -> PeerEndpoint:
        """Return an endpoint with the address and the incarnation of a peer's liveness listener."""
        return endpoint

    def _is_touched(self, region: MemoryRegion) -> bool:
        """Return whether an unfinished call to a peer uses the region."""
        return any(peer.touches(region) for peer in self.peers.values())

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        """Connect to the peer if necessary, confirm its regions, and write the ranges in calls of allowed sizes."""
        peer = self._peer(batch.endpoint, deadline)
        peer.confirm(batch.regions, deadline)
        for pieces in self._calls(batch, [peer.step_nbytes(region) for region in batch.regions]):
            peer.write(pieces, deadline)

    def _peer(self, endpoint: PeerEndpoint, deadline: Deadline) -> PeerT:
        """Return the object for the calls to a peer. Create the object at the first write to the peer.

        Raises:
            PeerUnreachable: the peer's process has ended.
            TransferFailed: the transport is closed.
        """
        with self._lock:
            found = self.peers.get(endpoint)
        if found is None:
            liveness = PeerLiveness(self._listener_of(endpoint), deadline)
            try:
                with self._lock:
                    self._refuse_closed(deadline)
                    self._forget_ended()
                    found = self.peers.get(endpoint)
                    if found is None:
                        found = self.peers[endpoint] = self._new_peer(endpoint, liveness)
            finally:
                if found is None or found.liveness is not liveness:
                    liveness.close()
        if found.liveness.has_ended():
            with self._lock:
                self._refuse_closed(deadline)
                self._forget_ended()
            raise PeerUnreachable(f"{deadline.purpose}: the peer's process has ended")
        return found

    def _refuse_closed(self, deadline: Deadline) -> None:
        """Raise TransferFailed if the transport is closed."""
        if self._closed:
            raise TransferFailed(f"{deadline.purpose}: the transport is closed")

    def _forget_ended(self) -> None:
        """Close and remove each peer that has ended, unless it has unfinished calls. The caller holds the lock.

        If another thread is about to write to a removed peer, `refuse_open` raises in that thread.
        """
        for endpoint, peer in list(self.peers.items()):
            if peer.liveness.has_ended(reconnect=False) and not (peer.is_in_use or peer.is_open()):
                del self.peers[endpoint]
                peer.close()

    def _starts(self, address: int, nbytes: int) -> list[int]:
        """Return the start addresses of the registrations of a local region."""
        return [address, *edges_of(address, nbytes, self._step_nbytes)]

    def _steps(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the registrations (start, stop) of local regions."""
        return [
            step
            for address, nbytes in spans
            for step in pairwise((*self._starts(address, nbytes), address + nbytes))
        ]

    def _calls(self, batch: WriteBatch, remote_steps: Sequence[int]) -> Iterator[Pieces]:
        """Yield the pieces of each native call. Each piece is within one local and one remote registration."""
        pieces = cut_at_edges(
            merge_adjacent(batch.local_addresses, batch.remote_addresses, batch.nbytes),
            local=[edge for span in self.table.spans() for edge in self._starts(*span)],
            remote=[
                edge
                for region, step in zip(batch.regions, remote_steps, strict=True)
                for edge in (region.address, *edges_of(region.address, region.nbytes, step))
            ],
        )
        limits = self._limits
        local, remote, nbytes = split_pieces(*pieces, limits.piece_nbytes)
        for part in calls(nbytes, max_pieces=limits.num_pieces, max_nbytes=limits.nbytes):
            yield local[part], remote[part], nbytes[part]


def locks_without_limit() -> bool:
    """Return whether this process has CAP_IPC_LOCK, so that RLIMIT_MEMLOCK does not apply to it."""
    return bool(int(_status("CapEff"), 16) >> _CAP_IPC_LOCK & 1)


def check_lockable(nbytes: int, purpose: str) -> None:
    """Check that pinning `nbytes` more bytes stays within RLIMIT_MEMLOCK.

    Call this before a registration, because UCX retries for ever if the kernel refuses to pin memory.

    Raises:
        RegionError: the limit is too small, and this process has no CAP_IPC_LOCK.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or locks_without_limit():
        return
    needed = int(_status("VmPin")) * 1024 + nbytes
    if needed > limit:
        raise RegionError(
            f"{purpose}: the limit of locked memory must be >= {needed} bytes, got {limit}; raise it (`ulimit -l`)"
        )


def _status(key: str) -> str:
    """Return the number after `key` in /proc/self/status."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return text.partition(f"\n{key}:")[2].split(maxsplit=1)[0]
