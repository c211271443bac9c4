"""Native writes of one NIXL agent: each from its beginning to its end, or until it is given up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from windlass.errors import PeerUnreachable, TransferFailed, TransferOutcomeUnknown
from windlass.memory.ranges import Pieces
from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, PeerEndpoint
from windlass.transports.nixl.native import NativeAgent, NativeHandle, new_write
from windlass.transports.nixl.peer import NixlPeer

GRACE_S = 0.25
"""How long after an error the kernel may take to tell that the peer's process has ended."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A native write under way."""

    peer: NixlPeer
    handle: NativeHandle
    pieces: Pieces
    deadline: Deadline

    def give_up(self, why: str) -> str:
        """Keep it until it is over; what to say of it. Holds the lock."""
        local, remote, nbytes = self.pieces
        self.peer.open[self.handle] = (local.copy(), remote.copy(), nbytes.copy())
        self.peer.unknown_reason = f"{self.deadline.purpose}: {why}"
        return self.peer.unknown_reason


@final
class NixlCalls:
    """Of one agent, to any of its peers, by several threads at once.

    Args:
        agent: writes; kept until whoever closes deletes it.
        errors: what its calls raise.
        gpu: whose memory it registers, -1 for host memory.

    Attributes:
        lock: around every use of the agent, whose calls are not thread-safe, and of every peer.
        closed: nothing is begun any more.
    """

    def __init__(self, agent: NativeAgent, errors: tuple[type[Exception], ...], gpu: int) -> None:
        self.agent = agent
        self.errors = errors
        self.lock = threading.Lock()
        self.closed = False
        self._gpu = gpu

    def write(
        self,
        peer: NixlPeer,
        endpoint: PeerEndpoint,
        pieces: Pieces,
        deadline: Deadline,
    ) -> None:
        """One native transfer, from its start to its end.

        Raises:
            PeerUnreachable: the peer's process is gone.
            TransferFailed: not begun.
            TransferOutcomeUnknown: given up, or an earlier one was and is not over.
        """
        with contextlib.ExitStack() as under_way:
            with self.held(deadline):
                self.refuse_open(peer, deadline)
                deadline.check_before_more()
                under_way.enter_context(peer.call(pieces))
                call = self._post(peer, endpoint, pieces, deadline)
                done = self._look(call)
            pause_s = 20e-6
            while not done:
                # NIXL has no event for the end of a transfer: looking is the only way. The liveness
                # is an event, and the wait is on that.
                ended = peer.liveness.wait_ended(pause_s)
                with self.lock:
                    done = self._look_again(call, has_ended=ended)
                pause_s = min(pause_s * 2, 1e-3)

    def _post(
        self, peer: NixlPeer, endpoint: PeerEndpoint, pieces: Pieces, deadline: Deadline
    ) -> _Call:
        try:
            gpus = (self._gpu, peer.gpu)
            handle = new_write(self.agent, endpoint.incarnation, pieces, gpus)
        except self.errors as error:
            if peer.liveness.wait_ended(GRACE_S):
                raise PeerUnreachable(f"{deadline.purpose}: the process is gone") from error
            raise TransferFailed(f"{deadline.purpose}: not begun: {error}") from error
        call = _Call(peer, handle, pieces, deadline)
        try:
            self.agent.transfer(handle)
        except self.errors as error:
            self._explain(call, error)
        return call

    def _look(self, call: _Call) -> bool:
        """Whether the transfer is done. Holds the lock."""
        try:
            state = self.agent.check_xfer_state(call.handle)
        except self.errors as error:
            self._explain(call, error)
            return False
        if state == "ERR":
            self._explain(call, None)
        return state == "DONE"

    def _look_again(self, call: _Call, *, has_ended: bool) -> bool:
        """As `_look`; gives the transfer up where nobody may wait for it any longer."""
        if self.closed:
            raise TransferOutcomeUnknown(
                call.give_up("the transport was closed; bytes may still land")
            )
        if self._look(call):
            return True
        if has_ended:
            raise PeerUnreachable(call.give_up("the process is gone"))
        if call.deadline.remaining_s == 0:
            # One that failed in another thread may never end.
            call.peer.late = call.peer.late or not call.peer.open
            raise TransferOutcomeUnknown(
                call.give_up(f"not over within {call.deadline.seconds} s; bytes may still land")
            )
        return False

    def _explain(self, call: _Call, error: Exception | None) -> None:
        """The one place where a native error in mid-transfer becomes one of ours."""
        if call.peer.liveness.wait_ended(GRACE_S):
            raise PeerUnreachable(call.give_up("the process is gone")) from error
        raise TransferOutcomeUnknown(
            call.give_up(f"{error or 'error'}; bytes may still land")
        ) from error

    def is_open(self, peer: NixlPeer) -> bool:
        """Whether transfers that were given up may still be going on; closes those that are done.

        Holds the lock.
        """
        return peer.is_open(self.agent.check_xfer_state, self.errors)

    def touches(self, peer: NixlPeer, region: MemoryRegion) -> bool:
        """Whether a transfer to the peer that is not over reads the region. Holds the lock."""
        self.is_open(peer)
        return peer.touches(region)

    def wait_for_late(self, peer: NixlPeer, deadline: Deadline) -> None:
        """Give an earlier transfer that is only late the time of this one to end."""
        pause_s = 20e-6
        while deadline.remaining_s > 0:
            with self.held(deadline):
                if not (self.is_open(peer) and peer.late):
                    return
            if peer.liveness.wait_ended(pause_s):
                return
            pause_s = min(pause_s * 2, 1e-2)

    def refuse_open(self, peer: NixlPeer, deadline: Deadline) -> None:
        """To be asked before anything is begun. Holds the lock.

        Raises:
            PeerUnreachable: the process has ended; its peer may have been forgotten by now.
            TransferOutcomeUnknown: a transfer that was given up may go on.
        """
        if peer.liveness.has_ended(reconnect=False):
            raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
        if self.is_open(peer):
            raise TransferOutcomeUnknown(f"an earlier write is open: {peer.unknown_reason}")

    @contextlib.contextmanager
    def held(self, deadline: Deadline) -> Iterator[None]:
        """The lock of an open transport.

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
        """To be asked before a peer counts as gone: its liveness is closed with the transport.

        Raises:
            TransferFailed: the transport is closed.
        """
        if self.closed:
            raise TransferFailed(f"{deadline.purpose}: the transport is closed")
