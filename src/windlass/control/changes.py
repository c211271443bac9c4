"""Changes that coroutines wait for and tasks that end with the controller, all in one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar, TypeVarTuple, final

from windlass.errors import PeerTimeout

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


def tell(listeners: Iterable[Callable[[*_Ts], None]], *args: *_Ts) -> None:
    """Call all listeners. An exception of one of them is logged and does not reach the others."""
    for listener in listeners:
        try:
            listener(*args)
        # A listener's exception must not end the round: trainers wait for their report, and engines are paused.
        except Exception:  # noqa: BLE001
            _log.exception("listener %s", listener)


@final
class Changes:
    """Wakes coroutines and listeners when synchronous code has changed something. One event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the loop at every change."""
        self._listeners.append(listener)

    def notify(self) -> None:
        """Have all waiting coroutines check their condition again, and call the listeners."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        tell(self._listeners)

    async def until(
        self, holds: Callable[[], bool], deadline_s: float, message: Callable[[], str]
    ) -> None:
        """Return once `holds()` is true. It is called at once and at every `notify`, and may raise.

        Raises:
            PeerTimeout: `holds()` was not true within `deadline_s`; its text is `message()`.
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


@final
class Tasks:
    """Tasks that end with the controller. One event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(self._tasks)

    def spawn(self, work: Coroutine[object, object, _T]) -> asyncio.Task[_T]:
        """Run a coroutine as a task, until `close`. After `close` the task is cancelled at once."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Connections end after `close`, and their loss may begin tasks.
        if self._is_closed:
            task.cancel()
        return task

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended. Idempotent."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
