"""One agent's connection, seen from the coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import final

from aiohttp import web

from windlass.errors import PeerUnreachable
from windlass.net.sockets import SEND_DEADLINE_S, close_socket, send_frame
from windlass.updates.fleet import PROBE_SEQ, Agent, Fleet, Identity
from windlass.updates.messages import (
    Command,
    Envelope,
    Probe,
    Refused,
    Result,
    UpdateReport,
    encode,
)

__all__ = ["AgentSession", "CommandKey", "host_of", "probe_held", "report_to"]

_log = logging.getLogger(__name__)

CommandKey = tuple[int, int, int]
"""(epoch, round, seq)."""


@final
class AgentSession:
    """Sends frames and matches replies to whoever waits for them. One per connection.

    Args:
        socket: of the connection. agent: at its other end.
        send_deadline_s: for the agent to take a frame, or a part of a large one; the connection of
            one that does not is cut.

    Attributes:
        host: address of the agent's host; empty for this one.
        is_deaf: the connection was cut because the agent did not read; its process may live.
    """

    def __init__(
        self,
        socket: web.WebSocketResponse,
        agent: Agent,
        *,
        send_deadline_s: float = SEND_DEADLINE_S,
    ) -> None:
        self.agent = agent
        self._socket, self._send_deadline_s = socket, send_deadline_s
        self.host = host_of(socket)
        self.is_deaf = False
        self._waiting: dict[CommandKey, asyncio.Future[Result]] = {}

    @property
    def worker(self) -> str:
        """The agent's identity."""
        return self.agent.hello.worker

    async def send(self, frame: Envelope | UpdateReport | Refused) -> None:
        """Send a frame.

        Raises:
            PeerUnreachable: the connection is closed, or the agent does not read from it.
        """
        try:
            await send_frame(
                self._socket, encode(frame), self._send_deadline_s, on_cut=self._note_deaf
            )
        except (ConnectionError, RuntimeError) as error:
            raise PeerUnreachable(f"{self.worker}: connection is closed: {error}") from error

    def _note_deaf(self) -> None:
        self.is_deaf = True

    async def call(self, key: CommandKey, command: Command) -> asyncio.Future[Result]:
        """Send a command; the future resolves with its result, or fails with PeerUnreachable."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            await self.send(Envelope(*key, command))
        except PeerUnreachable:
            self._waiting.pop(key, None)
            raise
        return future

    def forget(self, key: CommandKey) -> None:
        """Nobody waits for this answer any more."""
        self._waiting.pop(key, None)

    def on_reply(self, key: CommandKey, result: Result) -> None:
        """Resolve whoever waits; an answer that nobody waits for is dropped."""
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(result)

    def fail_waiting(self, reason: str) -> None:
        """The connection is gone: nobody will answer."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerUnreachable(f"{self.worker}: {reason}"))
                future.exception()  # seen; whoever still waits gets it all the same
        self._waiting.clear()

    async def probe(self, place: tuple[int, int]) -> None:
        """Ask for an answer to come after all that are due; see `Fleet.settle`."""
        try:
            await self.send(Envelope(*place, PROBE_SEQ, Probe()))
        except PeerUnreachable:
            return  # whoever comes back is asked again

    async def close(self) -> None:
        """Close the connection."""
        await close_socket(self._socket)


def host_of(socket: web.WebSocketResponse) -> str:
    """The address that a connection comes from; empty where that is the controller's own."""
    peer, own = (socket.get_extra_info(name) for name in ("peername", "sockname"))
    return "" if peer is None or own is None or peer[0] == own[0] else str(peer[0])


async def probe_held(fleet: Fleet, sessions: Mapping[str, AgentSession]) -> None:
    """Ask every trainer that owes the answer to a write whether it will come."""
    for identity, place in fleet.held.items():
        session = sessions.get(identity[0])
        if session is not None and session.agent.identity == identity:
            await session.probe(place)


async def report_to(
    sessions: Mapping[str, AgentSession], trainer: Identity, report: UpdateReport
) -> None:
    """Tell a trainer rank how its attempt ended, if that process is there."""
    session = sessions.get(trainer[0])
    if session is None or session.agent.identity != trainer:
        return  # if that process comes back it announces again, and is answered then
    try:
        await session.send(report)
    except PeerUnreachable as error:
        _log.warning("report of version %s: %s", report.version, error)
