"""Native writes of one NIXL agent: each from its beginning to its end, or until it is given up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import final

from windlass.errors import PeerUnreachable, TransferFailed, TransferOutcomeUnknown
from windlass.telemetry.clock import Deadline
from windlass.transports.base import PeerEndpoint
from windlass.transports.nixl_native import NativeAgent, NativeHandle, new_write
from windlass.transports.nixl_peer import NixlPeer
from windlass.transports.splitting import Pieces

__all__ = ["GRACE_S", "NixlCalls"]

GRACE_S = 0.25
"""How long after an error the kernel may take to tell that the peer's process has ended."""


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
        with contextlib.ExitStack() as call:
            with self.held(deadline):
                self.refuse_open(peer, deadline)
                deadline.check_before_more()
                call.enter_context(peer.call())
                handle = self._post(peer, endpoint, pieces, deadline)
                done = self._look(peer, handle, deadline)
            pause_s = 20e-6
            while not done:
                # NIXL has no event for the end of a transfer: looking is the only way. The doorway
                # is an event, and the wait is on that.
                ended = peer.doorway.wait_ended(pause_s)
                with self.lock:
                    if ended and not self._look(peer, handle, deadline):
                        peer.open.append(handle)
                        peer.poison = f"{deadline.purpose}: the process is gone"
                        raise PeerUnreachable(peer.poison)
                    done = ended or self._look(peer, handle, deadline)
                    if not done and deadline.remaining_s == 0:
                        self._give_up(peer, handle, deadline)
                pause_s = min(pause_s * 2, 1e-3)

    def _post(
        self,
        peer: NixlPeer,
        endpoint: PeerEndpoint,
        pieces: Pieces,
        deadline: Deadline,
    ) -> NativeHandle:
        try:
            gpus = (self._gpu, peer.gpu)
            handle = new_write(self.agent, endpoint.incarnation, pieces, gpus)
        except self.errors as error:
            if peer.doorway.wait_ended(GRACE_S):
                raise PeerUnreachable(f"{deadline.purpose}: the process is gone") from error
            raise TransferFailed(f"{deadline.purpose}: not begun: {error}") from error
        try:
            self.agent.transfer(handle)
        except self.errors as error:
            self._explain(peer, handle, deadline, error)
        return handle

    def _look(self, peer: NixlPeer, handle: NativeHandle, deadline: Deadline) -> bool:
        """Whether the transfer is done. Holds the lock."""
        try:
            state = self.agent.check_xfer_state(handle)
        except self.errors as error:
            self._explain(peer, handle, deadline, error)
            return False
        if state == "ERR":
            self._explain(peer, handle, deadline, None)
        return state == "DONE"

    def _explain(
        self, peer: NixlPeer, handle: NativeHandle, deadline: Deadline, error: Exception | None
    ) -> None:
        """The one place where a native error in mid-transfer becomes one of ours."""
        peer.open.append(handle)
        if peer.doorway.wait_ended(GRACE_S):
            peer.poison = f"{deadline.purpose}: the process is gone"
            raise PeerUnreachable(peer.poison) from error
        peer.poison = f"{deadline.purpose}: {error or 'error'}; bytes may still land"
        raise TransferOutcomeUnknown(peer.poison) from error

    def _give_up(self, peer: NixlPeer, handle: NativeHandle, deadline: Deadline) -> None:
        """The deadline has passed in mid-transfer. Holds the lock."""
        peer.late = peer.late or not peer.open  # one that failed in another thread may never end
        peer.open.append(handle)
        peer.poison = (
            f"{deadline.purpose}: not over within {deadline.seconds} s; bytes may still land"
        )
        raise TransferOutcomeUnknown(peer.poison)

    def is_open(self, peer: NixlPeer) -> bool:
        """Whether transfers that were given up may still be going on; closes those that are done.

        Holds the lock.
        """
        return peer.is_open(self.agent.check_xfer_state, self.errors)

    def wait_for_late(self, peer: NixlPeer, deadline: Deadline) -> None:
        """Give an earlier transfer that is only late the time of this one to end."""
        pause_s = 20e-6
        while deadline.remaining_s > 0:
            with self.held(deadline):
                if not (self.is_open(peer) and peer.late):
                    return
            if peer.doorway.wait_ended(pause_s):
                return
            pause_s = min(pause_s * 2, 1e-2)

    def refuse_open(self, peer: NixlPeer, deadline: Deadline) -> None:
        """Nothing is begun while a transfer that was given up may go on. Holds the lock.

        Raises:
            PeerUnreachable, TransferOutcomeUnknown: one may.
        """
        if not self.is_open(peer):
            return
        if peer.doorway.has_ended(knock=False):
            raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
        raise TransferOutcomeUnknown(f"an earlier write is open: {peer.poison}")

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
            if self.closed:
                raise TransferFailed(f"{deadline.purpose}: the transport is closed")
            yield
        finally:
            self.lock.release()
