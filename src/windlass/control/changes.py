"""Condition variable and background tasks of the controller. All code here runs in one event loop."""

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
    """Call every listener with `args`. If a listener raises, log the exception and call the next listener."""
    for listener in listeners:
        try:
            listener(*args)
        # The caller may be in a round, with paused engines and waiting trainers, and must not fail here.
        except Exception:  # noqa: BLE001
            _log.exception("the listener %s raised an error", listener)


@final
class Changes:
    """Condition variable for coroutines. Any code of the event loop may call `notify`; it needs no lock.

    `len` is the number of waiting coroutines.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the event loop at every `notify`."""
        self._listeners.append(listener)

    def notify(self) -> None:
        """Make all waiting coroutines check their condition again, and call the listeners."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        tell(self._listeners)

    async def until(
        self, holds: Callable[[], bool], deadline_s: float, message: Callable[[], str]
    ) -> None:
        """Wait until `holds()` returns True.

        Args:
            holds: function that checks the condition; called at once and after every `notify`. If `holds` raises an
                exception, `until` raises it too.
            deadline_s: seconds to wait.
            message: function that returns the text of the PeerTimeout; called at the deadline.

        Raises:
            PeerTimeout: `holds()` did not return True within `deadline_s`.
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
    """Background tasks of the controller. `len` and iteration give the tasks that have not ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(self._tasks)

    def spawn(self, work: Coroutine[object, object, _T]) -> asyncio.Task[_T]:
        """Run a coroutine as a task that `close` cancels. If `close` was called before, cancel the new task at once."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The controller closes its connections after it has called `close`. A lost connection may then spawn a task.
        if self._is_closed:
            task.cancel()
        return task

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended. Idempotent."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
