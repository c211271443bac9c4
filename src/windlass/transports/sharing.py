"""Copying that several threads share, and that is over when it has returned, whatever goes wrong."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import final


def share(jobs: Iterable[Callable[[], object]], threads: Executor, num_helpers: int) -> None:
    """Carry out all jobs, by this thread and as many others as there are.

    Returns or raises once every job that began is over. After one has raised no other begins. An
    executor that gets no thread has queued its call all the same: what comes late finds nothing to do.

    Args:
        jobs: in any order, side by side.
        threads: of the helpers.
        num_helpers: at most so many beside this thread.

    Raises:
        BaseException: what the first job raised that did.
    """
    work = _Work(jobs)
    try:
        for _ in range(num_helpers):
            threads.submit(work.help)
    except RuntimeError:  # no thread is to be had, or the executor is closed: fewer hands
        pass
    work.help()
    work.finish()


@final
class _Work:
    """Jobs that are left, under way or failed."""

    def __init__(self, jobs: Iterable[Callable[[], object]]) -> None:
        self._left = deque(jobs)
        self._num_under_way = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def help(self) -> None:
        """Carry out jobs until none is left."""
        while (job := self._next_job()) is not None:
            error: BaseException | None = None
            try:
                job()
            # The boundary of a thread: the caller raises it, an interrupt of its own thread too.
            except BaseException as found:  # noqa: BLE001
                error = found
            self._note_end(error)

    def finish(self) -> None:
        """Return or raise once nothing is under way any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_under_way)
            if self._error is not None:
                raise self._error

    def _next_job(self) -> Callable[[], object] | None:
        with self._changed:
            if not self._left:
                return None
            self._num_under_way += 1
            return self._left.popleft()

    def _note_end(self, error: BaseException | None) -> None:
        with self._changed:
            self._num_under_way -= 1
            if error is not None:
                self._left.clear()
                self._error = self._error or error
            self._changed.notify_all()
