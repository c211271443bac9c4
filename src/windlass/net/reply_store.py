"""What a peer has answered: a call is carried out once, however often it is sent, and not after its time. No I/O."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar, final

from windlass.errors import StaleMessage
from windlass.net.messages import Reply

ResultT = TypeVar("ResultT")


@final
class ReplyStore(Generic[ResultT]):
    """Replies of the newest two rounds, and the rule that older calls are stale."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = (0, 0)
        self._received = self._void = (0, 0)
        self._replies: dict[tuple[int, int, int], Reply[ResultT]] = {}

    @property
    def newest(self) -> tuple[int, int]:
        """(epoch, round) of the newest call."""
        return self._newest

    def __len__(self) -> int:
        return len(self._replies)

    def lookup(self, epoch: int, round_number: int, seq: int) -> Reply[ResultT] | None:
        """The stored reply; None for a new call.

        Raises:
            StaleMessage: its round has passed.
        """
        round_id = (epoch, round_number)
        key = (*round_id, seq)
        if key in self._replies:
            return self._replies[key]
        if round_id < self._newest or round_id <= self._void:
            raise StaleMessage(
                f"epoch {epoch} round {round_number} has passed; the newest is {self._newest}"
            )
        if round_id > self._newest:
            with self._lock:
                self._replies = {k: v for k, v in self._replies.items() if k[:2] == self._newest}
            self._newest = round_id
        return None

    def received(self, epoch: int, round_number: int) -> None:
        """A call has come; it may have to wait for others."""
        self._received = max(self._received, (epoch, round_number))

    def void(self) -> None:
        """The connection is lost: what came over it and has not begun is not carried out.

        The server has left this peer out of that round; its next call is of a later one.
        """
        self._void = self._received

    def store(self, reply: Reply[ResultT]) -> None:
        """Remember a reply."""
        with self._lock:
            self._replies[reply.epoch, reply.round, reply.seq] = reply

    def replies(self) -> list[Reply[ResultT]]:
        """Every reply that is remembered, oldest first."""
        with self._lock:
            return list(self._replies.values())
