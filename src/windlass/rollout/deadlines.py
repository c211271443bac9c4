"""Deadlines of one length, of which tens of thousands run at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar, final

__all__ = ["Deadlines", "Ticket"]

T = TypeVar("T")


@final
class Ticket(Generic[T]):
    """One running deadline. `ends` is in seconds of the loop's clock."""

    __slots__ = ("_running", "ends", "item")

    def __init__(self, item: T, ends: float, running: dict[Ticket[T], None]) -> None:
        self.item = item
        self.ends = ends
        self._running = running

    def cancel(self) -> None:
        """It will not pass. Idempotent."""
        self._running.pop(self, None)


@final
class Deadlines(Generic[T]):
    """Calls `passed` with every item whose deadline passes.

    All have one length and therefore pass in the order in which they were started: a queue and
    one timer of the loop serve them all, and starting or cancelling one costs no heap operation.

    Args:
        length_s: of every deadline.
        passed: called in the event loop.
    """

    def __init__(self, length_s: float, passed: Callable[[T], None]) -> None:
        self._length_s = length_s
        self._passed = passed
        self._running: dict[Ticket[T], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self, item: T) -> Ticket[T]:
        """A deadline for `item`, from now."""
        loop = asyncio.get_running_loop()
        ticket = Ticket(item, loop.time() + self._length_s, self._running)
        self._running[ticket] = None
        if self._timer is None:
            self._timer = loop.call_at(ticket.ends, self._look)
        return ticket

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._running:
            first = next(iter(self._running))
            if first.ends > loop.time():
                self._timer = loop.call_at(first.ends, self._look)
                return
            first.cancel()
            self._passed(first.item)
