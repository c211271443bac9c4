"""One NIXL agent and its peers: each native write from its beginning to its end, or until it is given up."""

from __future__ import annotations

import base64
import binascii
import contextlib
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn, final

import msgspec
import numpy as np

from windlass.errors import (
    DECODE_ERRORS,
    PeerUnreachable,
    RegionError,
    TransferFailed,
    TransferOutcomeUnknown,
)
from windlass.memory.ranges import Pieces
from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, PeerEndpoint, RemoteRegion
from windlass.transports.liveness import PeerLiveness
from windlass.transports.nixl.config import NixlWire
from windlass.transports.nixl.native import NativeAgent, NativeHandle, may_use_tcp, new_write
from windlass.transports.regions import overlaps

GRACE_S = 0.25
"""How long after an error the kernel may take to tell that the peer's process has ended."""
CONNECTIONS = 3
"""To one peer, in one write, before it counts as unreachable."""
FIRST_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3
"""NIXL has no event for the end of a transfer: looking is the only way. The liveness of the peer is an
event, and the wait between two looks is on that."""
_MAX_KEY_CHARS = 1 << 20
_WORD_NBYTES = np.array([8], np.uint64)


class NixlKey(msgspec.Struct, frozen=True, array_like=True):
    """NIXL's metadata for one region, and a word that peers may write first.

    `step_nbytes`: the region is registered in steps of it; 0 for at once. `gpu`: -1 for host memory.
    """

    metadata: bytes
    scratch: int
    step_nbytes: int = 0
    gpu: int = -1


@final
class NixlAgent:
    """The native agent of a transport, used by several threads at once.

    Args:
        native: writes; kept until whoever closes deletes it.
        errors: what its calls raise.
        gpu: whose memory it registers, -1 for host memory.
        wire: that UCX is limited to.
        scratch: address of a word of its own, which is registered.

    Attributes:
        lock: around every use of the agent, whose calls are not thread-safe, and of every peer.
        closed: nothing is begun any more.
    """

    def __init__(
        self,
        native: NativeAgent,
        errors: tuple[type[Exception], ...],
        gpu: int,
        wire: NixlWire,
        scratch: int,
    ) -> None:
        self.native, self.errors = native, errors
        self.gpu, self.wire, self.scratch = gpu, wire, scratch
        self.lock = threading.Lock()
        self.closed = False

    @contextlib.contextmanager
    def held(self, deadline: Deadline) -> Iterator[None]:
        """Hold the lock of an open transport.

        Raises:
            TransferFailed: the transport is closed, or the lock was not to be had by the deadline.
        """
        if not self.lock.acquire(timeout=deadline.remaining_s):
            raise TransferFailed(
                f"{deadline.purpose}: other writes took the deadline of {deadline.seconds} s; "
                "nothing more was sent"
            )
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
        if self.closed:
            raise TransferFailed(f"{deadline.purpose}: the transport is closed")


@final
class NixlPeer:
    """One incarnation of one peer. Guarded by the agent's `lock`, but for `liveness`."""

    def __init__(self, agent: NixlAgent, endpoint: PeerEndpoint, liveness: PeerLiveness) -> None:
        self.liveness = liveness
        self.keys: dict[str, tuple[NixlKey, ...]] = {}
        """Of regions that NIXL knows."""
        self.confirmed = False
        """A word has arrived over the wire that was asked for."""
        self._agent, self._endpoint = agent, endpoint
        self._calls: dict[object, Pieces] = {}
        """Under way, in any thread."""
        self._calls_ended = threading.Condition(agent.lock)
        self._connection = 1
        self._open: dict[NativeHandle, Pieces] = {}
        """Given up, and not over: several threads may write at once."""
        self._unknown_reason = ""
        self._late = False
        self._words: list[NativeHandle] = []
        """Late ones, which nobody waits for."""

    @property
    def is_in_use(self) -> bool:
        """Whether NIXL may still work for this peer, in any thread."""
        return bool(self._calls or self._words)

    @contextlib.contextmanager
    def call(self, pieces: Pieces) -> Iterator[None]:
        """Be around a native call, from before it begins to its end. Enter under the lock, leave without."""
        mark = object()
        self._calls[mark] = pieces
        try:
            yield
        finally:
            with self._calls_ended:
                del self._calls[mark]
                self._calls_ended.notify_all()

    def is_open(self) -> bool:
        """Return whether a transfer that was given up may still be going on; forget those that are done."""
        for handle in list(self._open):
            try:
                done = self._agent.native.check_xfer_state(handle) == "DONE"
            except self._agent.errors:
                done = self._late = False  # no error of NIXL is a fence
            if done:
                del self._open[handle]
        if not self._open:
            self._unknown_reason, self._late = "", False
        return bool(self._open)

    def touches(self, region: MemoryRegion) -> bool:
        """Return whether a call under way, or one that was given up and is not over, reads the region."""
        self.is_open()
        return any(
            overlaps(region, local, nbytes)
            for local, _, nbytes in (*self._calls.values(), *self._open.values())
        )

    def refuse_open(self, deadline: Deadline) -> None:
        """Ask before anything is begun.

        Raises:
            PeerUnreachable: the process has ended; its peer may have been forgotten by now.
            TransferOutcomeUnknown: a transfer that was given up may go on.
        """
        if self.liveness.has_ended(reconnect=False):
            raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
        if self.is_open():
            raise TransferOutcomeUnknown(f"an earlier write is open: {self._unknown_reason}")

    def wait_for_late(self, deadline: Deadline) -> None:
        """Give an earlier transfer that is only late the time of this one to end. Takes the lock."""
        pause_s = FIRST_PAUSE_S
        while deadline.remaining_s > 0:
            with self._agent.held(deadline):
                if not (self.is_open() and self._late):
                    return
            if self.liveness.wait_ended(pause_s):
                return
            pause_s = min(pause_s * 2, 10 * MAX_PAUSE_S)

    def load(self, regions: Iterable[RemoteRegion]) -> None:
        """Have NIXL know the regions.

        Raises:
            RegionError: a key cannot be read, or is of another process.
        """
        for region in regions:
            if region.key not in self.keys:
                keys = decode_keys(region)
                self._add(keys)
                self.keys[region.key] = tuple(keys)

    def _add(self, keys: Sequence[NixlKey]) -> None:
        address = self._endpoint.address
        for key in keys:
            try:
                name = self._agent.native.add_remote_agent(key.metadata)
            except self._agent.errors as error:
                raise RegionError(f"nixl: key of {address}: {error}") from error
            if (name.decode() if isinstance(name, bytes) else name) != self._endpoint.incarnation:
                raise RegionError(f"nixl: key of {address} is of another process")

    def _new_write(self, pieces: Pieces, gpus: tuple[int, int]) -> NativeHandle:
        return new_write(self._agent.native, self._endpoint.incarnation, pieces, gpus)

    def write(self, pieces: Pieces, deadline: Deadline) -> None:
        """Carry out one native transfer, from its start to its end. Takes the lock.

        Raises:
            PeerUnreachable: the peer's process is gone.
            TransferFailed: not begun.
            TransferOutcomeUnknown: given up, or an earlier one was and is not over.
        """
        with contextlib.ExitStack() as under_way:
            with self._agent.held(deadline):
                self.refuse_open(deadline)
                deadline.check_before_more()
                under_way.enter_context(self.call(pieces))
                handle = self._post(pieces, deadline)
                done = self._is_done(handle, pieces, deadline)
            pause_s = FIRST_PAUSE_S
            while not done:
                ended = self.liveness.wait_ended(pause_s)
                with self._agent.lock:
                    done = self._look_again(handle, pieces, deadline, has_ended=ended)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)

    def _post(self, pieces: Pieces, deadline: Deadline) -> NativeHandle:
        # One agent registers one kind of memory.
        gpu = max(key.gpu for keys in self.keys.values() for key in keys)
        try:
            handle = self._new_write(pieces, (self._agent.gpu, gpu))
        except self._agent.errors as error:
            if self.liveness.wait_ended(GRACE_S):
                raise PeerUnreachable(f"{deadline.purpose}: the process is gone") from error
            raise TransferFailed(f"{deadline.purpose}: not begun: {error}") from error
        try:
            self._agent.native.transfer(handle)
        except self._agent.errors as error:
            self._explain(handle, pieces, deadline, error)
        return handle

    def _is_done(self, handle: NativeHandle, pieces: Pieces, deadline: Deadline) -> bool:
        try:
            state = self._agent.native.check_xfer_state(handle)
        except self._agent.errors as error:
            self._explain(handle, pieces, deadline, error)
        if state == "ERR":
            self._explain(handle, pieces, deadline, None)
        return state == "DONE"

    def _look_again(
        self, handle: NativeHandle, pieces: Pieces, deadline: Deadline, *, has_ended: bool
    ) -> bool:
        """Return whether it is done; give it up where nobody may wait for it any longer."""

        def give_up(why: str) -> str:
            return self._give_up(handle, pieces, f"{deadline.purpose}: {why}")

        if self._agent.closed:
            raise TransferOutcomeUnknown(give_up("the transport was closed; bytes may still land"))
        if self._is_done(handle, pieces, deadline):
            return True
        if has_ended:
            raise PeerUnreachable(give_up("the process is gone"))
        if deadline.remaining_s == 0:
            # One that failed in another thread may never end.
            self._late = self._late or not self._open
            raise TransferOutcomeUnknown(
                give_up(f"not over within {deadline.seconds} s; bytes may still land")
            )
        return False

    def _explain(
        self, handle: NativeHandle, pieces: Pieces, deadline: Deadline, error: Exception | None
    ) -> NoReturn:
        """Make one of our errors of a native one in mid-transfer; nothing else does."""
        if self.liveness.wait_ended(GRACE_S):
            why = f"{deadline.purpose}: the process is gone"
            raise PeerUnreachable(self._give_up(handle, pieces, why)) from error
        why = f"{deadline.purpose}: {error or 'error'}; bytes may still land"
        raise TransferOutcomeUnknown(self._give_up(handle, pieces, why)) from error

    def _give_up(self, handle: NativeHandle, pieces: Pieces, why: str) -> str:
        """Keep a transfer until it is over; return what to say of it."""
        local, remote, nbytes = pieces
        self._open[handle] = (local.copy(), remote.copy(), nbytes.copy())
        self._unknown_reason = why
        return why

    def reach(self, deadline: Deadline) -> None:
        """See that the connection is whole, or make another: the peer may have cut it. Takes the lock.

        Raises:
            PeerUnreachable: neither; nothing of the batch was sent.
        """
        for _ in range(CONNECTIONS):
            connection = self._connection
            if self._word_arrives(deadline):
                return
            if not may_use_tcp(self._agent.wire):
                break
            self._reconnect(connection, deadline)
        raise PeerUnreachable(
            f"{deadline.purpose}: no connection holds; nothing of the batch was sent"
        )

    def _word_arrives(self, deadline: Deadline) -> bool:
        """Return whether a word that nobody reads gets there; a late one does no harm.

        Raises:
            PeerUnreachable: the process is gone, or it was not there by the deadline.
        """
        (*_, last), *_ = self.keys.values()
        here, there = (np.array([a], np.uint64) for a in (self._agent.scratch, last.scratch))
        word = here, there, _WORD_NBYTES
        handle: NativeHandle | None = None
        pause_s, state = FIRST_PAUSE_S, ""
        with contextlib.ExitStack() as call:
            while state != "DONE":
                with self._agent.held(deadline):
                    if handle is None:
                        # Under an open write no new connection is made.
                        self.refuse_open(deadline)
                        call.enter_context(self.call(word))
                    try:
                        if handle is None:
                            handle = self._new_write(word, (-1, -1))
                            self._agent.native.transfer(handle)
                        state = self._agent.native.check_xfer_state(handle)
                    except self._agent.errors:
                        state = "ERR"
                if self.liveness.wait_ended(GRACE_S if state == "ERR" else pause_s):
                    self._agent.refuse_closed(deadline)
                    raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
                if state == "ERR":
                    return False
                if handle is not None and state != "DONE" and deadline.remaining_s == 0:
                    self._words.append(handle)
                    raise PeerUnreachable(
                        f"{deadline.purpose}: no answer within {deadline.seconds} s; nothing of the "
                        "batch was sent"
                    )
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
        return True

    def _reconnect(self, connection: int, deadline: Deadline) -> None:
        refused: tuple[type[Exception], ...] = (*self._agent.errors, RegionError)
        with self._agent.held(deadline):
            # Others take the lock meanwhile: to part from a peer under a transfer is not safe.
            self._calls_ended.wait_for(
                lambda: not self._calls or self._connection != connection, deadline.remaining_s
            )
            if self._connection != connection and not self._agent.closed:
                return  # another thread has
            if self._calls or self._agent.closed:
                raise PeerUnreachable(f"{deadline.purpose}: other writes go on; nothing was sent")
            self.refuse_open(deadline)
            try:
                self._connection += 1
                self._agent.native.remove_remote_agent(self._endpoint.incarnation)
                for keys in self.keys.values():
                    self._add(keys)
            except refused as error:
                raise PeerUnreachable(f"{deadline.purpose}: {error}; nothing was sent") from error


def forget_ended(peers: dict[PeerEndpoint, NixlPeer]) -> None:
    """Close the connections of processes that have ended. Called under the transport's lock.

    Whoever writes to one of them at this moment finds that it has ended. What UCX keeps of it stays:
    to have it forget a peer under an open transfer is not safe.
    """
    idle = {endpoint: peer for endpoint, peer in peers.items() if not peer.is_in_use}
    for endpoint in [e for e, p in idle.items() if p.liveness.has_ended(reconnect=False)]:
        if not peers[endpoint].is_open():
            peers.pop(endpoint).liveness.close()


def encode_keys(keys: Sequence[NixlKey]) -> str:
    """Return `RemoteRegion.key`."""
    return base64.b64encode(msgspec.msgpack.encode(keys)).decode()


def decode_keys(region: RemoteRegion) -> list[NixlKey]:
    """Return the keys of a region; at least one.

    Raises:
        RegionError: it has none that can be read.
    """
    if len(region.key) > _MAX_KEY_CHARS:
        raise RegionError(f"nixl: key must be <= {_MAX_KEY_CHARS} chars, got {len(region.key)}")
    try:
        raw = base64.b64decode(region.key, validate=True)
        keys = msgspec.msgpack.decode(raw, type=list[NixlKey])
    except (binascii.Error, *DECODE_ERRORS, ValueError) as error:
        raise RegionError(f"nixl: key of {region.address:#x} cannot be read: {error}") from error
    steps = [key.step_nbytes for key in keys]
    if not steps or any(0 < step < mmap.PAGESIZE or step < 0 for step in steps):
        raise RegionError(
            f"nixl: key of {region.address:#x} must name steps of 0 or >= {mmap.PAGESIZE}, got {steps}"
        )
    return keys
