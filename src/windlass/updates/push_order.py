"""The order in which the calls of several leaders are carried out, declared by the leaders themselves.

Each leader says which of how many it is (its pipeline stage, say) and numbers its calls. The calls
then go in the order (number, leader), whatever the order in which they arrive: call 0 of leader
0, call 0 of leader 1, ..., call 1 of leader 0. A leader that has ended is passed over, so leaders need not
make the same number of calls. Trainers that do their own part in this order cannot wait for each
other in a ring.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final

from windlass.errors import RoundAborted

__all__ = ["PushOrder"]


@final
class PushOrder:
    """Grants one turn at a time; all in one event loop.

    Args:
        num_leaders: that take part; the turn of one that has not come yet is waited for.
    """

    def __init__(self, num_leaders: int) -> None:
        self.num_leaders = num_leaders
        self._next = (0, 0)
        self._ended: set[int] = set()
        self._waiting: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._failure = ""

    @property
    def over(self) -> bool:
        """Whether every leader has ended."""
        return len(self._ended) == self.num_leaders

    @asynccontextmanager
    async def turn(self, leader: int, number: int) -> AsyncIterator[None]:
        """Wait for the turn of call `number` of `leader`; the next one comes when the block ends.

        Raises:
            RoundAborted: the turn has passed or is asked for twice, or `fail` was called.
        """
        call = (number, leader)
        if call < self._next or call in self._waiting:
            raise RoundAborted(
                f"callback: call {number} of stage {leader} comes twice or too late, "
                f"call {self._next[0]} of stage {self._next[1]} is next"
            )
        if call > self._next and not self._failure:
            turn = asyncio.get_running_loop().create_future()
            self._waiting[call] = turn
            try:
                await turn
            finally:
                self._waiting.pop(call, None)
        if self._failure:
            raise RoundAborted(f"callback: the update has failed already: {self._failure}")
        try:
            yield
        finally:
            self._advance()

    def end(self, leader: int) -> None:
        """`leader` makes no more calls. Idempotent.

        Raises:
            RoundAborted: a call of it still waits for its turn, which it gives up with this.
        """
        early = [number for number, other in self._waiting if other == leader]
        if early and not self._failure:
            raise RoundAborted(f"callback: stage {leader} ended before its call {min(early)}")
        self._ended.add(leader)
        if self._next[1] == leader and not self.over:
            self._advance()

    def fail(self, reason: str) -> None:
        """Nobody waits for a turn any more."""
        self._failure = self._failure or reason
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_result(None)

    def _advance(self) -> None:
        number, leader = self._next
        while not self.over:
            number, leader = (
                (number, leader + 1) if leader + 1 < self.num_leaders else (number + 1, 0)
            )
            if leader not in self._ended:
                break
        self._next = (number, leader)
        turn = self._waiting.get(self._next)
        if turn is not None and not turn.done():
            turn.set_result(None)
