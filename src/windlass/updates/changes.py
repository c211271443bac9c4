"""Waiting for a change: with a deadline for coroutines, by callbacks for the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TypeVarTuple, final

from windlass.errors import PeerTimeout

_log = logging.getLogger(__name__)
_Ts = TypeVarTuple("_Ts")


def tell(listeners: Iterable[Callable[[*_Ts], None]], *args: *_Ts) -> None:
    """Call all listeners; what one of them raises is logged, and touches nobody else."""
    for listener in listeners:
        try:
            listener(*args)
        # The boundary of a listener: trainers would wait for their report, engines stay paused.
        except Exception:  # noqa: BLE001
            _log.exception("listener %s", listener)


@final
class Changes:
    """What synchronous code brings about, for coroutines that wait and for listeners. One event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the loop at every change."""
        self._listeners.append(listener)

    def notify(self) -> None:
        """Something has changed: all that wait look again, and listeners are called."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        tell(self._listeners)

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
