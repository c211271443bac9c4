"""What a peer has answered: a call is carried out once, however often it is sent, and not after its time. No I/O."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar, final

from windlass.errors import StaleMessage
from windlass.net.messages import CallId, Reply, RoundId

ResultT = TypeVar("ResultT")


@final
class ReplyStore(Generic[ResultT]):
    """Replies of the newest two rounds, and the rule that older calls are stale.

    Attributes:
        newest: (epoch, round) of the newest call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.newest: tuple[int, int] = (0, 0)
        self._received: tuple[int, int] = (0, 0)
        self._void = self._received
        self._replies: dict[CallId, Reply[ResultT]] = {}

    def __len__(self) -> int:
        return len(self._replies)

    def lookup(self, call_id: CallId) -> Reply[ResultT] | None:
        """The stored reply; None for a new call.

        Raises:
            StaleMessage: its round has passed.
        """
        epoch, round_number, _ = call_id
        round_id = epoch, round_number
        if call_id in self._replies:
            return self._replies[call_id]
        if round_id < self.newest or round_id <= self._void:
            raise StaleMessage(
                f"epoch {epoch} round {round_number} has passed; the newest is {self.newest}"
            )
        if round_id > self.newest:
            with self._lock:
                self._replies = {k: v for k, v in self._replies.items() if k[:2] == self.newest}
            self.newest = round_id
        return None

    def received(self, round_id: RoundId) -> None:
        """A call of it has come, and may have to wait for others."""
        self._received = max(self._received, round_id)

    def void(self) -> None:
        """The connection is lost: what came over it and has not begun is not carried out.

        The server has left this peer out of that round; its next call is of a later one.
        """
        self._void = self._received

    def store(self, reply: Reply[ResultT]) -> None:
        """Remember a reply."""
        with self._lock:
            self._replies[reply.call_id] = reply

    def replies(self) -> list[Reply[ResultT]]:
        """Every reply that is remembered, oldest first."""
        with self._lock:
            return list(self._replies.values())
