"""The controller's end of the agents' sessions: who is let in, and what is sent to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol, final
from urllib.parse import urlsplit

from aiohttp import web

from windlass.config import ControlConfig
from windlass.errors import ConfigError, PeerUnreachable, ProtocolError
from windlass.layout.manifest import Role
from windlass.net.access import Access
from windlass.net.addresses import HOST_VARIABLE, check_url, is_loopback, is_wildcard
from windlass.net.messages import PROTOCOL_VERSION, Envelope, Garbled, Reply, check_name
from windlass.net.rpc import Session, host_of, serve
from windlass.net.server import CALLER
from windlass.net.sockets import SEND_DEADLINE_S
from windlass.updates.fleet import PROBE_SEQ, Agent, Fleet, Identity
from windlass.updates.messages import (
    AGENT_FRAMES,
    AgentFrame,
    Announce,
    CannotJoin,
    Command,
    Hello,
    Probe,
    Result,
    UpdateReport,
    Welcome,
    Withdraw,
)

__all__ = [
    "AgentOwner",
    "AgentSession",
    "check_published",
    "probe_held",
    "report_to",
    "serve_agent",
]

_log = logging.getLogger(__name__)


@final
class AgentSession(Session[Command | Probe, Result]):
    """One agent's connection. A process that connects again gets another one.

    Args:
        socket: of the connection. agent: at its other end.
        send_deadline_s: see `Session`.

    Attributes:
        host: address of the agent's host; empty for this one.
    """

    def __init__(
        self,
        socket: web.WebSocketResponse,
        agent: Agent,
        *,
        send_deadline_s: float = SEND_DEADLINE_S,
    ) -> None:
        super().__init__(agent.hello.worker, socket, send_deadline_s=send_deadline_s)
        self.agent = agent
        self.host = host_of(socket)

    @property
    def worker(self) -> str:
        """The agent's identity."""
        return self.peer

    async def probe(self, place: tuple[int, int]) -> None:
        """Ask for an answer to come after all that are due; see `Fleet.settle`."""
        try:
            await self.send(Envelope(*place, PROBE_SEQ, Probe()))
        except PeerUnreachable:
            return  # whoever comes back is asked again


class AgentOwner(Protocol):
    """Who the agents belong to."""

    async def admit(self, hello: Hello, socket: web.WebSocketResponse) -> AgentSession:
        """Let in a rank.

        Raises:
            ProtocolError: it does not belong here, or not yet (`MustWait`).
            PlanError: its manifest contradicts itself.
        """
        ...

    def failed_to_join(self, frame: CannotJoin) -> None:
        """An engine will not come, as its own side says."""
        ...

    async def admitted(self, session: AgentSession) -> None:
        """The rank has been sent its welcome."""
        ...

    async def received(
        self, session: AgentSession, frame: Announce | Withdraw | Reply[Result]
    ) -> None:
        """Take a frame.

        Raises:
            ProtocolError: it does not belong here.
        """
        ...

    async def lost(self, session: AgentSession, reason: str, *, ended: bool = False) -> None:
        """The connection is over. May come more than once.

        `ended` by the agent's side, as it is when a process ends; not because of its silence.
        """
        ...


async def serve_agent(
    request: web.Request, owner: AgentOwner, config: ControlConfig, welcome: Welcome
) -> web.WebSocketResponse:
    """Serve one connection until it ends; what one agent does wrong touches no other."""
    return await serve(
        request,
        _Entrance(owner, welcome),
        AGENT_FRAMES,
        heartbeat_s=config.heartbeat_s,
        max_nbytes=config.max_message_nbytes,
    )


@final
class _Entrance:
    """Sees that frames come in the order of the protocol, and from whom they say."""

    def __init__(self, owner: AgentOwner, welcome: Welcome) -> None:
        self._owner, self._welcome = owner, welcome

    async def admit(
        self, first: AgentFrame, socket: web.WebSocketResponse
    ) -> tuple[AgentSession, Welcome] | None:
        match first:
            case CannotJoin():
                check_name(first.group, "group")
                if first.protocol_version != PROTOCOL_VERSION:
                    raise ProtocolError(
                        f"{first.group}: protocol_version must be {PROTOCOL_VERSION}, "
                        f"got {first.protocol_version}"
                    )
                _check_role(first.group, Role.ENGINE, CALLER.get())
                self._owner.failed_to_join(first)
                return None
            case Hello():
                _check_names(first)
                _check_role(first.worker, first.role, CALLER.get())
                return await self._owner.admit(first, socket), self._welcome
            case _:
                raise ProtocolError(f"the first frame must be Hello, got {type(first).__name__}")

    async def admitted(self, session: AgentSession, _socket: web.WebSocketResponse) -> None:
        await self._owner.admitted(session)

    async def received(self, session: AgentSession, frame: AgentFrame) -> None:
        if isinstance(frame, Hello | CannotJoin):
            raise Garbled(f"{session.worker}: Hello may be sent only once")
        await self._owner.received(session, frame)

    async def lost(self, session: AgentSession, reason: str, *, ended: bool) -> None:
        await self._owner.lost(session, reason, ended=ended)


def _check_names(hello: Hello) -> None:
    check_name(hello.group, "group")
    check_name(hello.worker, "worker")
    if hello.worker != f"{hello.group}/{hello.rank}":
        raise ProtocolError(
            f"{hello.worker}: worker must be group/rank, '{hello.group}/{hello.rank}'"
        )


def _check_role(who: str, role: Role, access: Access) -> None:
    if access is not Access.OWNER and access.value != role.value:
        raise ProtocolError(f"{who}: /v1/agents: a token of role {access} may not join as {role}")


def check_published(hello: Hello, host: str) -> None:
    """Others send requests, with a token, where an engine says that it serves.

    Args:
        hello: of the engine.
        host: that it has connected from; empty for this one.

    Raises:
        ProtocolError: its URL is no plain address of a server, or, on another host, of none there.
    """
    if not hello.url:
        return
    try:
        check_url(hello.url, f"{hello.worker}: url")
    except ConfigError as error:
        raise ProtocolError(str(error)) from error
    named = urlsplit(hello.url).hostname or ""
    if host and (is_loopback(named) or is_wildcard(named)):
        raise ProtocolError(
            f"{hello.worker} on host {host}: url must be reachable from other hosts, got "
            f"{hello.url!r}; --host, --advertise-host or {HOST_VARIABLE} sets it"
        )


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
