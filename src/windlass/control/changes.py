"""Notification of coroutines about changes, and tasks that end with the controller. Everything runs in one event loop."""

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
    """Condition variable of one event loop: synchronous code reports a change, and waiting coroutines check again."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the event loop at every `notify`."""
        self._listeners.append(listener)

    def notify(self) -> None:
        """Wake all waiting coroutines, so that they check their condition again, and call the listeners."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        tell(self._listeners)

    async def until(
        self, holds: Callable[[], bool], deadline_s: float, message: Callable[[], str]
    ) -> None:
        """Return once `holds()` is true. `holds` is called at once and after every `notify`, and may raise.

        Raises:
            PeerTimeout: `holds()` was not true within `deadline_s`; the text of the error is `message()`.
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
    """Tasks of one event loop that `close` cancels, at the end of the controller."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(self._tasks)

    def spawn(self, work: Coroutine[object, object, _T]) -> asyncio.Task[_T]:
        """Run a coroutine as a task, which `close` cancels. After `close` a new task is cancelled at once."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Connections are closed after `close`, and the loss of a connection may spawn tasks.
        if self._is_closed:
            task.cancel()
        return task

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended. Idempotent."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
