"""Built-in workflow `agent`: an agent outside the worker claims the rollout, and its reward ends the rollout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from windlass.config import check_numbers
from windlass.rollout.chat.session import ChatSession

IDLE_S = 300.0
"""Default of `idle_s`."""


class _Context(Protocol):
    """Part of `WorkflowContext` that the workflow uses."""

    def chat_endpoint(
        self, *, request_sampling: bool = False
    ) -> AbstractAsyncContextManager[ChatSession]: ...

    async def offer(self, session: ChatSession) -> None: ...


class _Options:
    """Checked options of the workflow."""

    def __init__(self, idle_s: float) -> None:
        self.idle_s = idle_s
        check_numbers(self, {}, ("idle_s",), where="agent_workflow: ")


def agent_workflow(
    *, idle_s: float = IDLE_S, request_sampling: bool = False
) -> Callable[[_Context], Awaitable[Mapping[str, object]]]:
    """Return a workflow that an external agent runs.

    The rollout waits until an agent claims it with `POST /v1/sessions`. The agent then sends its requests with the
    session's key, and `POST /v1/sessions/{id}/reward` ends the rollout. The rollout's value has `reward`, `metadata` and
    `branches`.

    Args:
        idle_s: seconds after which an agent without requests counts as lost. The attempt then fails, and the controller
            tries the rollout again with a new key.
        request_sampling: see `WorkflowContext.chat_endpoint`.

    Raises:
        ConfigError: `idle_s` is not a positive number.
    """
    options = _Options(idle_s)

    async def agent(context: _Context) -> Mapping[str, object]:
        async with context.chat_endpoint(request_sampling=request_sampling) as session:
            await context.offer(session)
            await session.wait_for_reward(idle_s=options.idle_s)
        return session.result()

    return agent
