"""Prevent SystemExit in a task of a workflow from ending the worker process.

asyncio passes SystemExit and KeyboardInterrupt of any task on to the code that runs the event loop. If a tool of a workflow
called `sys.exit` in a task of `asyncio.gather`, the worker would end, with all its rollouts. Each worker that repeats the
rollout would end too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from types import CoroutineType
from typing import Any, final

from windlass.errors import RolloutError, text_of

ENDS_LOOP = (SystemExit, KeyboardInterrupt)
"""Exceptions that end the event loop if a task raises them."""
_in_workflow: ContextVar[bool] = ContextVar("windlass_in_workflow", default=False)


def contain_tasks() -> None:
    """Convert SystemExit and KeyboardInterrupt to `RolloutError` in all tasks that the calling task creates from now on."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    if not isinstance(before, _Factory):
        loop.set_task_factory(_Factory(before))  # type: ignore[arg-type]
    _in_workflow.set(True)


def contained(error: BaseException) -> RolloutError:
    """Return the error that takes the place of an exception that would end the event loop."""
    return RolloutError(f"the workflow raised {type(error).__name__}: {text_of(error)}")


@final
class _Factory:
    """Task factory that wraps the coroutines of workflows' tasks, and leaves all other tasks unchanged.

    Args:
        before: previous task factory of the loop; None for asyncio's own.
    """

    def __init__(self, before: Callable[..., Any] | None) -> None:
        self._create = before or _create

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        # Later versions of Python pass further settings of a task.
        **settings: Any,
    ) -> Any:
        """Create a task; see `asyncio.loop.set_task_factory`."""
        if not _in_workflow.get() or not isinstance(coroutine, Coroutine):
            return self._create(loop, coroutine, **settings)
        wrapped = _converted(coroutine)
        if isinstance(coroutine, CoroutineType) and isinstance(wrapped, CoroutineType):
            # `repr(task)` contains the name of the coroutine.
            wrapped.__qualname__ = coroutine.__qualname__
        task = self._create(loop, wrapped, **settings)
        # If the task is cancelled before its first step, the inner coroutine never starts.
        task.add_done_callback(lambda _: coroutine.close())
        return task


def _create(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **settings: Any
) -> Any:
    """Create a task as asyncio does without a task factory."""
    return asyncio.Task(coroutine, loop=loop, **settings)


async def _converted(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await a coroutine, and convert an exception that would end the loop."""
    try:
        return await coroutine
    except ENDS_LOOP as error:
        raise contained(error) from error
