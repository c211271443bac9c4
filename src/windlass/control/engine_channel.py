"""Session of an engine rank with the controller. If the connection is lost, the rank resumes its engine by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import final

import aiohttp
import msgspec

from windlass.control.client import AGENTS_PATH, AgentChannel, CommandHandler
from windlass.control.connect_messages import CannotJoin, Hello
from windlass.control.messages import Command, Done, Probe
from windlass.errors import PeerUnreachable, WindlassError
from windlass.net.messages import PROTOCOL_VERSION, Envelope, Reply, encode
from windlass.net.sockets import open_http, send_frame

_log = logging.getLogger(__name__)
WELCOME_SEQ = 0
"""Sequence number of the reply that an engine rank sends after each `Welcome`; the numbers of commands start at 1."""
CANNOT_JOIN_S = 10.0
"""Deadline of `report_cannot_join` in seconds."""


def report_cannot_join(url: str, token: str, engine: str, reason: str) -> None:
    """Report to the controller that an engine cannot join. Callers of `wait_for_fleet` then get the reason. Blocks.

    Args:
        url: the controller's address.
        token: token for the role of an engine.
        engine: name of the engine.
        reason: why it cannot join.

    Raises:
        ConfigError: see `client_context`.
        PeerUnreachable: the controller could not be reached, or did not close the connection within `CANNOT_JOIN_S`.
    """

    async def report() -> None:
        async with (
            asyncio.timeout(CANNOT_JOIN_S),
            open_http(token, to_controller=True) as http,
            http.ws_connect(url.rstrip("/") + AGENTS_PATH) as socket,
        ):
            await send_frame(socket, encode(CannotJoin(PROTOCOL_VERSION, engine, reason)))
            # The controller closes the connection after it has read the frame, so wait for this.
            await socket.receive()

    try:
        asyncio.run(report())
    # OSError includes TimeoutError.
    except (OSError, aiohttp.ClientError) as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, TimeoutError):
            reason = f"no answer within {CANNOT_JOIN_S:g} s"
        raise PeerUnreachable(f"the report did not reach controller {url}: {reason}") from error


@final
class EngineChannel(AgentChannel):
    """Session of an engine rank.

    Args:
        url: see `AgentChannel`.
        token: see `AgentChannel`.
        hello: see `AgentChannel`.
        handler: see `AgentChannel`.
        on_disconnect: function that resumes the engine. The channel calls it when a welcomed connection is lost, before
            it connects again. If it raises, the channel calls it again after the next `Welcome`, and reports to the
            controller whether the engine has resumed (`Done.not_resumed`).
        on_welcome: function that the channel calls after each `Welcome`, before any command. None to call nothing.
        on_command: function that gets each command, its epoch and its round at arrival, while an earlier command may
            still be running. The channel calls it in its event loop, so it must not block. None to call nothing.
        executor: see `Client`.
        loop: see `Client`.
    """

    def __init__(
        self,
        url: str,
        token: str,
        hello: Callable[[], Hello],
        handler: CommandHandler,
        *,
        on_disconnect: Callable[[], None],
        on_welcome: Callable[[], None] | None = None,
        on_command: Callable[[Command, int, int], None] | None = None,
        executor: Executor | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(url, token, hello, handler, executor=executor, loop=loop)
        self._on_disconnect, self._on_command = on_disconnect, on_command
        self._when_welcomed = on_welcome
        self._not_resumed = ""

    def hello(self) -> Hello:
        return msgspec.structs.replace(super().hello(), not_resumed=self._not_resumed)

    def on_call(self, call: Envelope[Command | Probe]) -> None:
        if self._on_command is not None and not isinstance(call.command, Probe):
            self._on_command(call.command, call.epoch, call.round)

    async def on_welcome(self) -> None:
        # No command of this connection has arrived yet, so no round needs this engine paused.
        if self._not_resumed:
            await self._loop.run_in_executor(self._executor, self.on_lost)
        if self._when_welcomed is not None:
            await self._loop.run_in_executor(self._executor, self._when_welcomed)

    async def on_connected(self) -> None:
        """Report to the controller whether the engine generates now.

        Before this report, the channel has sent stored replies again. These are older, so their `Done.not_resumed` may be
        outdated.
        """
        epoch, round_number = self.stored.newest
        await self.send(
            Reply(epoch, round_number, WELCOME_SEQ, Done(not_resumed=self._not_resumed))
        )

    def on_lost(self) -> None:
        """Wait for the running command, and resume the engine.

        If the engine does not resume, store the reason for the next `Hello`.
        """
        # The channel refuses commands of this connection that have not begun, so wait only for the running command.
        with self._executing:
            try:
                self._on_disconnect()
                self._not_resumed = ""
            # The engine's code may raise any exception. The rank must connect again in any case.
            except Exception as error:  # noqa: BLE001
                self._not_resumed = f"{type(error).__name__}: {error}"
                # A WindlassError, for example of an engine that sleeps, is no bug, so log no
                # traceback.
                _log.warning(
                    "after the connection to the controller was lost: %s",
                    error,
                    exc_info=not isinstance(error, WindlassError),
                )
