"""Closes the connection of an agent at a chosen command, from the process of the controller."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.control.members import Members
from windlass.control.messages import Command
from windlass.control.session import AgentSession
from windlass.net.messages import Envelope, Reply


def cut_off(
    monkeypatch: pytest.MonkeyPatch, worker: str, *, at: type[Command], answered: bool
) -> None:
    """Close the connection of a rank once: before it gets the command `at`, or when its answer arrives, which is then lost."""
    send, received = AgentSession.send, Members.received
    sent: list[AgentSession] = []

    async def send_or_close(session: AgentSession, frame: Any, **deadline: float) -> None:
        is_due = isinstance(frame, Envelope) and isinstance(frame.command, at)
        if is_due and session.peer == worker and not sent:
            sent.append(session)
            if not answered:
                await session.close()
        await send(session, frame, **deadline)

    async def lose_answer(members: Members, session: AgentSession, frame: Any) -> None:
        if answered and session in sent and isinstance(frame, Reply):
            await session.close()
            return
        await received(members, session, frame)

    monkeypatch.setattr(AgentSession, "send", send_or_close)
    monkeypatch.setattr(Members, "received", lose_answer)
