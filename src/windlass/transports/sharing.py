"""Share jobs, such as copies, between several threads, and wait for all of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor


def share(jobs: Iterable[Callable[[], object]], threads: Executor, num_helpers: int) -> None:
    """Run all jobs, in this thread and in up to `num_helpers` threads of the executor.

    Before this function returns or raises, all started jobs have ended. After a job raises, no more jobs start. If the
    executor is busy, a helper thread may start so late that no job is left. It then does nothing.

    Raises:
        BaseException: the exception of the first job that raised.
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
            # `share` raises this error after all jobs have ended. The error may be an interrupt of this thread.
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
    # The executor cannot start a thread, or is closed. Run with fewer helpers.
    except RuntimeError:
        pass
    work()
    with changed:
        changed.wait_for(lambda: not num_under_way)
        if errors:
            raise errors[0]
