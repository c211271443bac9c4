"""The order in which the calls of several heads are carried out, declared by the heads themselves.

Each head says which of how many it is (its pipeline stage, say) and numbers its calls. The calls
then go in the order (number, head), whatever the order in which they arrive: call 0 of head 0,
call 0 of head 1, ..., call 1 of head 0. A head that has ended is passed over, so heads need not
make the same number of calls. Trainers that do their own part in this order cannot wait for each
other in a ring.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final

from windlass.errors import RoundAborted

__all__ = ["DeclaredOrder"]


@final
class DeclaredOrder:
    """Grants one turn at a time; all in one event loop.

    Args:
        num_heads: that take part; the turn of one that has not come yet is waited for.
    """

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self._place = (0, 0)
        self._ended: set[int] = set()
        self._waiting: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._failure = ""

    @property
    def over(self) -> bool:
        """Whether every head has ended."""
        return len(self._ended) == self.num_heads

    @asynccontextmanager
    async def turn(self, head: int, number: int) -> AsyncIterator[None]:
        """Wait for the turn of call `number` of `head`; the next one comes when the block ends.

        Raises:
            RoundAborted: the turn has passed or is asked for twice, or `fail` was called.
        """
        place = (number, head)
        if place < self._place or place in self._waiting:
            raise RoundAborted(
                f"callback: call {number} of stage {head} comes twice or too late, "
                f"call {self._place[0]} of stage {self._place[1]} is next"
            )
        if place > self._place and not self._failure:
            turn = asyncio.get_running_loop().create_future()
            self._waiting[place] = turn
            try:
                await turn
            finally:
                self._waiting.pop(place, None)
        if self._failure:
            raise RoundAborted(f"callback: the update has failed already: {self._failure}")
        try:
            yield
        finally:
            self._advance()

    def end(self, head: int) -> None:
        """`head` makes no more calls. Idempotent.

        Raises:
            RoundAborted: a call of it still waits for its turn, which it gives up with this.
        """
        early = [number for number, other in self._waiting if other == head]
        if early and not self._failure:
            raise RoundAborted(f"callback: stage {head} ended before its call {min(early)}")
        self._ended.add(head)
        if self._place[1] == head and not self.over:
            self._advance()

    def fail(self, reason: str) -> None:
        """Nobody waits for a turn any more."""
        self._failure = self._failure or reason
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_result(None)

    def _advance(self) -> None:
        number, head = self._place
        while not self.over:
            number, head = (number, head + 1) if head + 1 < self.num_heads else (number + 1, 0)
            if head not in self._ended:
                break
        self._place = (number, head)
        turn = self._waiting.get(self._place)
        if turn is not None and not turn.done():
            turn.set_result(None)
