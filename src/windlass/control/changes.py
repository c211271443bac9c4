"""Waiting for the fleet to change: a condition for coroutines, callbacks for the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TypeVarTuple, final

from windlass.errors import PeerTimeout

__all__ = ["Changes", "tell"]

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
    """Of one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the loop at every change."""
        self._listeners.append(listener)

    async def notify(self) -> None:
        """Something has changed."""
        async with self._changed:
            self._changed.notify_all()
        tell(self._listeners)

    async def until(
        self, holds: Callable[[], bool], deadline_s: float, message: Callable[[], str]
    ) -> None:
        """Return once `holds()`; it is asked at every change.

        Raises:
            PeerTimeout: with `message()`, after `deadline_s`.
        """
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(holds)
        except TimeoutError:
            raise PeerTimeout(message()) from None
