"""Store of a peer's replies, so that the peer executes each call only once, and no call of a round that has passed."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar, final

from windlass.errors import StaleMessage
from windlass.net.messages import CallId, Reply, RoundId

ResultT = TypeVar("ResultT")


@final
class ReplyStore(Generic[ResultT]):
    """Replies to the calls of the newest two rounds. New calls of a round before the newest are refused as stale.

    Attributes:
        newest: (epoch, round) of the newest call that was looked up.
        newest_received: (epoch, round) of the newest call that has arrived, whether looked up or not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.newest: tuple[int, int] = (0, 0)
        self.newest_received: tuple[int, int] = (0, 0)
        self._void = self.newest_received
        self._replies: dict[CallId, Reply[ResultT]] = {}

    def __len__(self) -> int:
        return len(self._replies)

    def lookup(self, call_id: CallId) -> Reply[ResultT] | None:
        """Return the stored reply to a call; None for a new call, which the caller of this method must execute now.

        If this is the first call of a new round, drop the replies of all rounds except the previous round.

        Raises:
            StaleMessage: the call is new, and either `lookup` has already received a call of a later round, or `void`
                refuses the call's round.
        """
        epoch, round_number, _ = call_id
        round_id = epoch, round_number
        if call_id in self._replies:
            return self._replies[call_id]
        if round_id < self.newest or round_id <= self._void:
            raise StaleMessage(
                f"epoch {epoch} round {round_number} has passed, so this call is refused; the newest call was of "
                f"epoch {self.newest[0]} round {self.newest[1]}"
            )
        if round_id > self.newest:
            with self._lock:
                self._replies = {k: v for k, v in self._replies.items() if k[:2] == self.newest}
            self.newest = round_id
        return None

    def received(self, round_id: RoundId) -> None:
        """Record that a call of this round has arrived at this peer, even if earlier calls must be executed first."""
        self.newest_received = max(self.newest_received, round_id)

    def void(self) -> None:
        """Make `lookup` refuse new calls of all rounds up to the newest round that `received` has recorded.

        Call this when the connection is lost. The server then leaves this peer out of the running round, so the server's
        next call to this peer belongs to a later round.
        """
        self._void = self.newest_received

    def store(self, reply: Reply[ResultT]) -> None:
        """Store a reply, so that `lookup` returns it if the same call arrives again."""
        with self._lock:
            self._replies[reply.call_id] = reply

    def replies(self) -> list[Reply[ResultT]]:
        """Return every stored reply, in the order in which they were stored."""
        with self._lock:
            return list(self._replies.values())
