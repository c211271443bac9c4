"""An engine rank's session with the controller: it goes on by itself when that is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import final

import aiohttp
import msgspec

from windlass.control.client import AGENTS_PATH, AgentChannel, CommandHandler
from windlass.control.connect_messages import CannotJoin, Hello
from windlass.control.messages import Command, Done, Probe
from windlass.errors import PeerUnreachable
from windlass.net.messages import PROTOCOL_VERSION, Envelope, Reply, encode
from windlass.net.sockets import open_http, send_frame

_log = logging.getLogger(__name__)
WELCOME_SEQ = 0
"""Of a reply that answers the welcome; commands count from 1."""
CANNOT_JOIN_S = 10.0


def report_cannot_join(url: str, token: str, engine: str, reason: str) -> None:
    """Have whoever waits for an engine hear why it does not come. Blocks.

    Raises:
        PeerUnreachable: the controller was not reached within 10 s.
    """

    async def report() -> None:
        async with (
            asyncio.timeout(CANNOT_JOIN_S),
            open_http(token, to_controller=True) as http,
            http.ws_connect(url.rstrip("/") + AGENTS_PATH) as socket,
        ):
            await send_frame(socket, encode(CannotJoin(PROTOCOL_VERSION, engine, reason)))
            await socket.receive()  # the end of the connection: it has been read

    try:
        asyncio.run(report())
    except (OSError, aiohttp.ClientError) as error:  # a TimeoutError is an OSError
        raise PeerUnreachable(f"controller {url}: {type(error).__name__}: {error}") from error


@final
class EngineChannel(AgentChannel):
    """An engine rank's session.

    Args:
        url, token, hello, handler: see `AgentChannel`.
        on_disconnect: called in the channel's thread when a connection that was welcomed is lost,
            before the first attempt to connect again; again at the next welcome if it raised. What
            came of that is sent to the controller (`Done.not_resumed`).
        on_command: called in the channel's thread with a command, its epoch and its round, as it
            comes in and before it waits for its turn; must not block.
    """

    def __init__(
        self,
        url: str,
        token: str,
        hello: Callable[[], Hello],
        handler: CommandHandler,
        *,
        on_disconnect: Callable[[], None],
        on_command: Callable[[Command, int, int], None] | None = None,
    ) -> None:
        super().__init__(url, token, hello, handler)
        self._on_disconnect, self._on_command = on_disconnect, on_command
        self._not_resumed = ""

    def hello(self) -> Hello:
        return msgspec.structs.replace(super().hello(), not_resumed=self._not_resumed)

    def on_call(self, call: Envelope[Command | Probe]) -> None:
        if self._on_command is not None and not isinstance(call.command, Probe):
            self._on_command(call.command, call.epoch, call.round)

    async def on_welcome(self) -> None:
        if self._not_resumed:  # no command of this connection has come: no round is open here yet
            await self._loop.run_in_executor(self._executor, self.on_lost)

    async def on_connected(self) -> None:
        """Say how the engine is now, whatever stored replies say."""
        epoch, round_number = self._store.newest
        await self.send(
            Reply(epoch, round_number, WELCOME_SEQ, Done(not_resumed=self._not_resumed))
        )

    def on_lost(self) -> None:
        with self._executing:  # whatever begins after this is refused
            try:
                self._on_disconnect()
                self._not_resumed = ""
            # The boundary of the engine: one that cannot be resumed now must come back all the same.
            except Exception as error:  # noqa: BLE001
                self._not_resumed = f"{type(error).__name__}: {error}"
                _log.exception("on_disconnect")
