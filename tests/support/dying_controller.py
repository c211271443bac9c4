"""A controller that is killed when the first rank has answered `Publish`, before it sends this command to another rank."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import windlass
from windlass.config import ControlConfig
from windlass.control.messages import Publish
from windlass.control.session import AgentSession
from windlass.net.messages import Envelope


@dataclass
class ControllerSettings:
    """Settings of a controller process; `dies` selects whether the first `Publish` ends it."""

    port: int
    token: str
    journal: Path
    config: ControlConfig
    dies: bool


def run_controller(pipe: Connection, settings: ControllerSettings) -> None:
    """Serve until the pipe closes. Answer each version with whether the engine serves it within 30 s."""
    if settings.dies:
        send, on_reply = AgentSession.send, AgentSession.on_reply
        publishing: set[AgentSession] = set()

        async def send_one(session: AgentSession, frame: Any, **deadline: float) -> None:
            await send(session, frame, **deadline)
            if isinstance(frame, Envelope) and isinstance(frame.command, Publish):
                publishing.add(session)
                await asyncio.Event().wait()

        def die(session: AgentSession, *answer: Any) -> None:
            if session in publishing:
                os.kill(os.getpid(), signal.SIGKILL)
            on_reply(session, *answer)

        AgentSession.send = send_one  # type: ignore[method-assign, assignment]
        AgentSession.on_reply = die  # type: ignore[method-assign, assignment]
    asyncio.run(_serve(pipe, settings))


async def _serve(pipe: Connection, settings: ControllerSettings) -> None:
    async with windlass.Controller(
        token=settings.token,
        port=settings.port,
        config=settings.config,
        journal_path=settings.journal,
    ) as controller:
        pipe.send(controller.url)
        while (version := await asyncio.to_thread(pipe.recv)) is not None:
            try:
                await controller.wait_for_version(version, engines=["engine"], deadline_s=30)
                pipe.send("served")
            except windlass.WindlassError as error:
                pipe.send(str(error))
