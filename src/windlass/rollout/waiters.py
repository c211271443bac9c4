"""Coroutines that wait for something that synchronous code brings about, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import final

from windlass.errors import PeerTimeout

__all__ = ["Waiters"]


@final
class Waiters:
    """Of one event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def notify(self) -> None:
        """Something has changed: all that wait look again."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def until(
        self, holds: Callable[[], bool], deadline_s: float, message: Callable[[], str]
    ) -> None:
        """Return once `holds()`; it is asked at once and at every `notify`, and may raise.

        Raises:
            PeerTimeout: with `message()`, after `deadline_s`.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while not holds():
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.add(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiting.discard(waiter)
        except TimeoutError:
            raise PeerTimeout(message()) from None
