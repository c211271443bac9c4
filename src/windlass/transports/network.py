"""What transports between hosts share: settings, and the way of a write through a library that knows no deadline.

A library is given native calls (`NativeCall`). Each is followed to its end, to the deadline or to the end of
the peer's process, whichever comes first. One whose outcome is unknown then is kept, with the memory that it
reads, until it is over, and the peer is closed to other writes for as long: an error of a library is no
fence. Verbs say nothing about the process behind a queue pair, so each peer's liveness is watched
(`liveness.py`). What differs between libraries is what a call is, how its end is seen, and how a peer proves
before the first byte that it can be reached.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
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
from windlass.transports.base import MemoryRegion, PeerEndpoint, RemoteRegion, WriteBatch
from windlass.transports.liveness import LivenessListener, PeerLiveness
from windlass.transports.region_transport import RegionTransport
from windlass.transports.regions import overlaps
from windlass.transports.registry import TransportConfig
from windlass.transports.traits import MemoryType

GRACE_S = 0.25
"""How long after an error the kernel may take to tell that the peer's process has ended."""
FIRST_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3
"""Between two looks at a call whose library has no event for its end. The end of the peer is an event, and
the wait is on that."""
_CAP_IPC_LOCK = 14


class NetworkConfig(TransportConfig, frozen=True):
    """Settings that transports between hosts have in common.

    Attributes:
        host: address that peers reach this process at; empty for `addresses.own_address`.
        device: comma-separated names of NICs, as the transport spells them; empty for all. Writes
            are striped over them.
        max_registration_nbytes: larger regions are registered in steps of this; 0 for the
            transport's own limit.
        gpu: ordinal of the GPU whose memory is registered; -1 for host memory. Work on that memory
            must be over before a write begins.
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
        """These settings with a host and a GPU; see `TransportConfig.create`."""
        return msgspec.structs.replace(
            self,
            host=self.host or own_address(towards),
            gpu=self.gpu if gpu < 0 else gpu,
        )


class Outcome(Enum):
    """What is known of a native call."""

    PENDING = auto()
    DONE = auto()
    FAILED = auto()


class NativeCall(ABC):
    """Something that a library has been given to do for a peer, guarded by the lock of that peer.

    Attributes:
        error: what the library said of it when it failed.
        wake: a descriptor that can be read from when it is over; -1 where only looking tells.
        is_late: given up for no other reason than that its deadline had passed.
    """

    def __init__(self, local: UInt64Array, nbytes: UInt64Array) -> None:
        self.local, self.nbytes = local.copy(), nbytes.copy()
        self.error = "error"
        self.wake = -1
        self.is_late = False

    @abstractmethod
    def look(self) -> Outcome:
        """Return what is known now."""

    @abstractmethod
    def cancel(self) -> bool:
        """Take it back; return whether that was in time, so that it never begins."""

    def stop_waiting(self) -> None:
        """Nobody waits for it any more, whether it is over or not."""
        return


class NetworkPeer(ABC):
    """Calls to one incarnation of one peer. Thread-safe.

    Args:
        liveness: of its process; closed with this object.
        lock: of this peer; of the transport where the library's calls are not thread-safe.

    Attributes:
        is_closed: the transport is; nothing is begun any more, and whoever waits is told.
    """

    outlives_process: ClassVar[bool]
    """Whether a call that has failed may still read local memory when the peer's process is gone."""

    def __init__(
        self, endpoint: PeerEndpoint, liveness: PeerLiveness, lock: threading.RLock
    ) -> None:
        self.endpoint, self.liveness, self.lock = endpoint, liveness, lock
        self.is_closed = False
        self._ended = threading.Condition(lock)
        self._under_way: set[NativeCall] = set()
        """Some thread follows them."""
        self._given_up: dict[NativeCall, str] = {}
        """Nobody does, and bytes may still land; and what is said of each."""

    @abstractmethod
    def confirm(self, regions: Sequence[RemoteRegion], deadline: Deadline) -> None:
        """See that the process that is meant can be reached, before a byte of a batch is sent.

        Raises:
            PeerUnreachable: it cannot; nothing was sent.
            RegionError: the key of a region cannot be read.
            TransferFailed: the transport is closed.
            TransferOutcomeUnknown: an earlier write to it may go on.
        """

    @abstractmethod
    def step_nbytes(self, region: RemoteRegion) -> int:
        """Return the step in which the peer has registered a region; 0 for at once.

        Raises:
            RegionError: its key names none.
        """

    @abstractmethod
    def _begin(self, pieces: Pieces) -> NativeCall:
        """Begin a write. Holds the lock; an error of the library is what the call says when it is looked at."""

    @property
    def is_in_use(self) -> bool:
        """Whether the library works for this peer, in any thread."""
        return bool(self._under_way)

    def is_open(self) -> bool:
        """Return whether a call that was given up may go on; forget those that are over."""
        with self.lock:
            if self._given_up:
                has_ended = not self.outlives_process and self.liveness.has_ended(reconnect=False)
                for call in list(self._given_up):
                    outcome = call.look()
                    if outcome is Outcome.DONE or (outcome is Outcome.FAILED and has_ended):
                        del self._given_up[call]
            return bool(self._given_up)

    def touches(self, region: MemoryRegion) -> bool:
        """Return whether a call that is not over may read a byte of the region."""
        with self.lock:
            self.is_open()
            return any(
                overlaps(region, call.local, call.nbytes)
                for call in (*self._under_way, *self._given_up)
            )

    @contextlib.contextmanager
    def held(self, deadline: Deadline) -> Iterator[None]:
        """Hold the lock of an open peer.

        Raises:
            TransferFailed: the transport is closed, or the lock was not to be had by the deadline.
        """
        if not self.lock.acquire(timeout=deadline.remaining_s):
            raise self._crowded_out(deadline)
        try:
            self.refuse_closed(deadline)
            yield
        finally:
            self.lock.release()

    def refuse_closed(self, deadline: Deadline) -> None:
        """Ask before a peer counts as gone: its liveness is closed with the transport.

        Raises:
            TransferFailed: the transport is closed.
        """
        if self.is_closed:
            raise TransferFailed(f"{deadline.purpose}: the transport is closed")

    def refuse_open(self, deadline: Deadline) -> None:
        """Ask before anything is begun. Holds the lock.

        Raises:
            PeerUnreachable: the process has ended; its peer may have been forgotten by now.
            TransferFailed: the transport is closed.
            TransferOutcomeUnknown: a call that was given up may go on.
        """
        self.refuse_closed(deadline)
        if self.liveness.has_ended(reconnect=False):
            raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
        if self.is_open():
            why = next(iter(self._given_up.values()))
            raise TransferOutcomeUnknown(f"an earlier write is open: {why}")

    def write(self, pieces: Pieces, deadline: Deadline) -> None:
        """Carry out one native write, from its beginning to its end.

        Raises:
            PeerUnreachable: the peer's process is gone.
            TransferFailed: not begun, or refused by the peer; it is over.
            TransferOutcomeUnknown: given up, or an earlier one was and is not over.
        """
        with self.held(deadline):
            self.refuse_open(deadline)
            deadline.check_before_more()
            call = self._begin(pieces)
            self._under_way.add(call)
        try:
            outcome = self._follow(call, deadline)
            failure = None if outcome is Outcome.DONE else self._failure(call, outcome, deadline)
        except (
            BaseException
        ):  # such as an interrupt of this thread: nobody follows the call any more
            with self.lock:
                self._given_up[call] = f"{deadline.purpose}: interrupted; bytes may still land"
            raise
        finally:
            self._end(call)
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Let whoever waits go: to others the process counts as gone, unless `is_closed`. Idempotent."""
        self.liveness.close()

    def _follow(self, call: NativeCall, deadline: Deadline) -> Outcome:
        """Return the outcome of a call; PENDING if the deadline passed, the peer ended or this side closed."""
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
        """Make an exception of a write that was not done, and keep it if it may go on; nothing else does."""
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
                error, why = PeerUnreachable, "the process is gone"
            elif never_began:
                if not failed:
                    return self._crowded_out(deadline)
                error, why = TransferFailed, f"not begun: {call.error}"
            elif failed:
                why = call.error
            else:
                call.is_late, why = True, f"not over within {deadline.seconds} s"
            if error is TransferOutcomeUnknown:
                why += "; bytes may still land"
            if not never_began:
                self._given_up[call] = f"{purpose}: {why}"
            return error(f"{purpose}: {why}")

    def _crowded_out(self, deadline: Deadline) -> TransferFailed:
        return TransferFailed(
            f"{deadline.purpose}: other writes took the deadline of {deadline.seconds} s; "
            "nothing more was sent"
        )

    def _has_refused(self, call: NativeCall, deadline: Deadline) -> bool:  # noqa: ARG002
        """Return whether a call that has failed is over all the same, and no byte of it will land."""
        return False

    def _end(self, call: NativeCall) -> None:
        with self._ended:
            call.stop_waiting()
            self._under_way.discard(call)
            self._ended.notify_all()


PeerT = TypeVar("PeerT", bound=NetworkPeer)


class Limits(NamedTuple):
    """Of what a library is given in one native call: pieces, bytes of all, and bytes of each.

    Between calls a passed deadline is a clean failure, inside one it is unknown.
    """

    num_pieces: int
    nbytes: int
    piece_nbytes: int


class NetworkTransport(RegionTransport, Generic[PeerT]):
    """Base of transports whose registrations and writes are a library's.

    Derived classes start the library, then call `__init__` of this class.

    Args:
        liveness: what its peers watch; closed with the transport.
        step_nbytes: larger regions are registered in steps of this; 0 for at once.
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
        self._peers: dict[PeerEndpoint, PeerT] = {}
        self._closed = False

    def close(self) -> None:
        """See `OneSidedTransport.close`; what a write that is not over uses is kept until the process ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            spans = self._table.spans()
            self._table.clear()
            for peer in self._peers.values():
                peer.is_closed = True
        for peer in self._peers.values():
            peer.close()
        self._liveness.close()
        with self._lock, self._current():
            self._free_untouched(keep=True)
            self._close_library(spans)
            self._peers = {}

    @abstractmethod
    def _register_together(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Make one range or several known in one call of the library; the key of each. Holds the lock.

        Raises:
            RegionError: refused, with the first range for a name; none is registered.
        """

    def _register_all(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """See `RegionTransport`; what is refused together is tried one by one, which names it."""
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
        """Take a registration back that no write was ever given."""
        if (later := self._unregister(region)) is not None:
            later()

    @abstractmethod
    def _close_library(self, spans: Sequence[tuple[int, int]]) -> None:
        """Take back what is registered, `spans` among it, and end the library if nothing is under way."""

    @abstractmethod
    def _new_peer(self, endpoint: PeerEndpoint, liveness: PeerLiveness) -> PeerT:
        """Return the calls to a peer. Holds the lock."""

    def _listener_of(self, endpoint: PeerEndpoint) -> PeerEndpoint:
        """Return where a peer's liveness listener is, and what it sends."""
        return endpoint

    def _is_touched(self, region: MemoryRegion) -> bool:
        return any(peer.touches(region) for peer in self._peers.values())

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        peer = self._peer(batch.endpoint, deadline)
        peer.confirm(batch.regions, deadline)
        for pieces in self._calls(batch, [peer.step_nbytes(region) for region in batch.regions]):
            peer.write(pieces, deadline)

    def _peer(self, endpoint: PeerEndpoint, deadline: Deadline) -> PeerT:
        """Return a living peer, which is kept until it has ended."""
        with self._lock:
            found = self._peers.get(endpoint)
        if found is None:
            liveness = PeerLiveness(self._listener_of(endpoint), deadline)
            try:
                with self._lock:
                    self._refuse_closed(deadline)
                    self._forget_ended()
                    found = self._peers.get(endpoint)
                    if found is None:
                        found = self._peers[endpoint] = self._new_peer(endpoint, liveness)
            finally:
                if found is None or found.liveness is not liveness:
                    liveness.close()
        if found.liveness.has_ended():
            with self._lock:
                self._refuse_closed(deadline)
                self._forget_ended()
            raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
        return found

    def _refuse_closed(self, deadline: Deadline) -> None:
        if self._closed:
            raise TransferFailed(f"{deadline.purpose}: the transport is closed")

    def _forget_ended(self) -> None:
        """Close what leads to processes that have ended, unless a call to one is not over. Holds the lock.

        Whoever writes to one of them at this moment finds that it has ended.
        """
        for endpoint, peer in list(self._peers.items()):
            if peer.liveness.has_ended(reconnect=False) and not (peer.is_in_use or peer.is_open()):
                del self._peers[endpoint]
                peer.close()

    def _starts(self, address: int, nbytes: int) -> list[int]:
        """Return where the steps begin in which a local region is registered."""
        return [address, *edges_of(address, nbytes, self._step_nbytes)]

    def _steps(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the steps (start, stop) in which local regions are registered."""
        return [
            step
            for address, nbytes in spans
            for step in pairwise((*self._starts(address, nbytes), address + nbytes))
        ]

    def _calls(self, batch: WriteBatch, remote_steps: Sequence[int]) -> Iterator[Pieces]:
        """Yield what goes into one native call each; no piece crosses a seam between two registrations."""
        pieces = cut_at_edges(
            merge_adjacent(batch.local_addresses, batch.remote_addresses, batch.nbytes),
            local=[edge for span in self._table.spans() for edge in self._starts(*span)],
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
    """Return whether this process has CAP_IPC_LOCK, for which RLIMIT_MEMLOCK does not hold."""
    return bool(int(_status("CapEff"), 16) >> _CAP_IPC_LOCK & 1)


def check_lockable(nbytes: int, purpose: str) -> None:
    """Refuse what the kernel would refuse: pinned memory above RLIMIT_MEMLOCK.

    UCX tries again without end when the kernel refuses to pin, so the kernel is not left to refuse.

    Raises:
        RegionError: the limit is too small, and this process has no CAP_IPC_LOCK.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or locks_without_limit():
        return
    needed = int(_status("VmPin")) * 1024 + nbytes
    if needed > limit:
        raise RegionError(
            f"{purpose}: lockable memory must be >= {needed} bytes, got {limit}; see ulimit -l"
        )


def _status(key: str) -> str:
    """Return the number at `key` in what the kernel says of this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return text.partition(f"\n{key}:")[2].split(maxsplit=1)[0]
