"""Copying that several threads share, and that is over when it has returned, whatever goes wrong."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor


def share(jobs: Iterable[Callable[[], object]], threads: Executor, num_helpers: int) -> None:
    """Carry out all jobs, by this thread and as many others as there are, at most `num_helpers`.

    Returns or raises once every job that began is over. After one has raised no other begins. An
    executor that gets no thread has queued its call all the same: what comes late finds nothing to do.

    Raises:
        BaseException: what the first job raised that did.
    """
    left, errors, changed = deque(jobs), list[BaseException](), threading.Condition()
    num_under_way = 0

    def work() -> None:
        nonlocal num_under_way
        while True:
            with changed:
                if not left:
                    return
                job = left.popleft()
                num_under_way += 1
            error: BaseException | None = None
            try:
                job()
            # The boundary of a thread: the caller raises it, an interrupt of its own thread too.
            except BaseException as found:  # noqa: BLE001
                error = found
            with changed:
                num_under_way -= 1
                if error is not None:
                    left.clear()
                    errors.append(error)
                changed.notify_all()

    try:
        for _ in range(num_helpers):
            threads.submit(work)
    except RuntimeError:  # no thread is to be had, or the executor is closed: fewer hands
        pass
    work()
    with changed:
        changed.wait_for(lambda: not num_under_way)
        if errors:
            raise errors[0]
