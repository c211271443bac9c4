"""Who is let in, whose place is whose, and who is sent away: the agents' connections."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from windlass.config import ControlConfig
from windlass.errors import (
    ConfigError,
    EngineRefused,
    PeerUnreachable,
    PlanError,
    ProtocolError,
)
from windlass.layout.manifest import Role
from windlass.net.access import Access
from windlass.net.addresses import HOST_VARIABLE, check_url, is_loopback, is_wildcard
from windlass.net.logs import printable
from windlass.net.messages import (
    Garbled,
    MustWait,
    Refused,
    Reply,
    check_name,
    check_version,
)
from windlass.net.rpc_server import host_of, serve
from windlass.net.server import CALLER
from windlass.updates.connect_messages import CannotJoin, Hello, Welcome
from windlass.updates.fleet import MAX_REASON_LENGTH, PROBE_SEQ, Group, Identity
from windlass.updates.messages import (
    AGENT_FRAMES,
    MAX_COUNT,
    AgentFrame,
    Announce,
    Done,
    Failure,
    Result,
    Withdraw,
)
from windlass.updates.report import UpdateReport
from windlass.updates.session import AgentSession

if TYPE_CHECKING:
    from windlass.updates.coordinator import Coordinator

_log = logging.getLogger(__name__)
KEPT_REFUSALS = 256
"""Refused ranks and engines whose reasons a controller shows; each reason has at most 2,000 characters."""


@final
class Members:
    """The agents that are connected, and the engines that will not be. In the coordinator's loop.

    Attributes:
        sessions: by worker.
        published_by: the trainers' processes that published the newest version.
        unbindable: why no engine is bound, where waiting does not help; else empty.
    """

    def __init__(self, coordinator: Coordinator, config: ControlConfig) -> None:
        self._coordinator, self._config = coordinator, config
        self._run, self._fleet = coordinator.run, coordinator.fleet
        self._changes = coordinator.changes
        self.sessions: dict[str, AgentSession] = {}
        self.published_by: frozenset[Identity] = frozenset()
        self.unbindable = ""
        self._refusals: dict[str, tuple[str, str]] = {}

    # --- who waits for them ------------------------------------------------------------------

    async def wait_for_fleet(
        self, *, num_trainers: int, engines: Sequence[str], deadline_s: float
    ) -> None:
        """See `Controller.wait_for_fleet`."""
        missing = partial(self._fleet.missing, num_trainers, engines)

        def there() -> bool:
            self._check_none_refused("wait_for_fleet", {*missing()} & {*engines})
            return not missing()

        await self._changes.until(
            there,
            deadline_s,
            lambda: (
                f"wait_for_fleet: missing after {deadline_s} s: {', '.join(missing().values())}"
            ),
        )

    async def wait_for_version(
        self, version: int, *, engines: Sequence[str] = (), deadline_s: float
    ) -> None:
        """See `Controller.wait_for_version`; an engine is refused here, too, where none can be bound."""
        fleet = self._fleet

        def behind() -> list[str]:
            return sorted(set(engines) - {engine.name for engine in fleet.routable()})

        def served() -> bool:
            if fleet.published >= version and not behind():
                return True
            self._check_none_refused("wait_for_version", behind())
            if self.unbindable:
                raise EngineRefused(f"wait_for_version: no engine is bound: {self.unbindable}")
            return False

        await self._changes.until(
            served,
            deadline_s,
            lambda: (
                f"wait_for_version: {version} was not published and served within {deadline_s} s; "
                f"published is {fleet.published}, behind it {', '.join(behind()) or 'nobody'}"
            ),
        )

    def _check_none_refused(self, call: str, engines: Iterable[str]) -> None:
        """Whoever waits for engines that are not there is told why one of them will not come."""
        for engine, reason in self.refused():
            if engine in engines:
                raise EngineRefused(f"{call}: engine {engine} was refused: {reason}")

    def refused(self) -> list[tuple[str, str]]:
        """Engines that will not come unless they are started anew, and why."""
        return sorted({*self._refusals.values()})

    def describe_refused(self) -> dict[str, str]:
        """Ranks and engines that were refused, as `/v1/status` shows them: name -> why."""
        return {who: printable(reason) for who, (_, reason) in self._refusals.items()}

    def _note_refusal(self, who: str, engine: str, reason: str) -> None:
        """`who` is a rank or the engine; until it comes anew."""
        self._refusals[who] = engine, reason
        if len(self._refusals) > KEPT_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
        self._changes.notify()

    # --- who comes ---------------------------------------------------------------------------

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """`/v1/agents`."""
        return await serve(
            request,
            self,
            AGENT_FRAMES,
            heartbeat_s=self._config.heartbeat_s,
            max_nbytes=self._config.max_message_nbytes,
        )

    async def admit(
        self, first: AgentFrame, socket: web.WebSocketResponse
    ) -> tuple[AgentSession, Welcome] | None:
        hello = check_first(first)
        if isinstance(hello, CannotJoin):
            self._failed_to_join(hello)
            return None
        try:
            session = await self._admit(hello, socket)
        except MustWait as error:
            _log.warning("refused for now: %s", error)
            raise
        except (ProtocolError, PlanError) as error:
            # A second process under the name of one that is there keeps nobody waiting.
            if hello.role is Role.ENGINE and hello.worker not in self.sessions:
                self._note_refusal(hello.worker, hello.group, f"{type(error).__name__}: {error}")
            raise
        for who in (hello.worker, hello.group):
            self._refusals.pop(who, None)
        self.unbindable = ""
        return session, Welcome(self._run.round_id.epoch, self._run.lineage)

    def _failed_to_join(self, frame: CannotJoin) -> None:
        reason = frame.message[:MAX_REASON_LENGTH]
        if self._refusals.get(frame.group) != (frame.group, reason):
            _log.error("engine %s cannot join: %s", frame.group, reason)
        group = self._fleet.group_of(frame.group)
        if group is None or not group.complete:  # else another try to start it has failed
            self._note_refusal(frame.group, frame.group, reason)

    async def _admit(self, hello: Hello, socket: web.WebSocketResponse) -> AgentSession:
        self._run.check_past(hello)
        check_published(hello, host_of(socket))
        old = self.sessions.get(hello.worker)
        if old is not None and old.agent.hello.incarnation == hello.incarnation:
            # The process noticed before we did that its connection had broken.
            await self.lost(old, "replaced by a newer connection of the same process")
            self._coordinator.spawn(old.close())
        if hello.role is Role.TRAINER:
            self._fleet.check(hello)  # before anybody is sent away for it
            await self._free_name(hello)
            await self._make_room(hello)
        session = AgentSession(socket, self._fleet.admit(hello))
        self.sessions[hello.worker] = session
        self._run.note_joined(hello)
        return session

    async def _free_name(self, hello: Hello) -> None:
        """Engines that have come first, under the name of the trainers' group, do not keep it."""
        group = self._fleet.group_of(hello.group)
        if group is not None and group.role is Role.ENGINE:
            reason = f"{group.name!r} is the name of the trainers' group"
            _log.warning("%s: %s", ", ".join(group.workers), reason)
            await self._send_away(group.workers, reason)

    async def _make_room(self, hello: Hello) -> None:
        """A job that is started anew replaces what is left of the one before.

        A whole job of this run keeps its place, and so does one whose bytes may be under way. Who
        has been connected before, to any controller, is not new and replaces nobody.
        """
        if hello.lineage or self._fleet.job in {None, hello.job}:
            return
        rivals = self._fleet.trainers()
        if rivals is not None and self._keeps_place(rivals):
            return
        self._run.forget_past()
        if rivals is not None:
            reason = self._fleet.replace_job(hello.job)
            _log.warning("%s: %s", ", ".join(rivals.workers), reason)
            await self._send_away(rivals.workers, reason)

    def _keeps_place(self, job: Group) -> bool:
        of_this_run = job.identities <= self.published_by or all(
            agent.hello.lineage in {"", self._run.lineage} for agent in job.agents.values()
        )
        writing = self._coordinator.in_round or not job.identities.isdisjoint(self._fleet.held)
        return writing or (job.complete and of_this_run)

    async def admitted(self, session: AgentSession) -> None:
        hello = session.agent.hello
        if hello.registered.num_regions:
            _log.info(
                "%s joins with %d bytes in %d regions, registered in %.3f s",
                *(hello.worker, hello.registered.nbytes),
                *(hello.registered.num_regions, hello.registered.seconds),
            )
        self._changes.notify()
        group = self._fleet.group_of(hello.group)
        if self._fleet.held or (group is not None and group.complete):
            self._coordinator.catch_ups.settle_soon()

    # --- what they say -----------------------------------------------------------------------

    async def received(self, session: AgentSession, frame: AgentFrame) -> None:
        match frame:
            case Reply():
                self._on_reply(session, shortened(frame))
            case Announce():
                self._coordinator.announced(session, frame)
            case Withdraw():
                self._coordinator.withdraw(session, frame)
            case Hello() | CannotJoin():
                raise Garbled(f"{session.peer}: Hello may be sent only once")

    def _on_reply(self, session: AgentSession, reply: Reply[Result]) -> None:
        session.on_reply(reply.call_id, reply.result)
        self._coordinator.replied(session, reply)
        if reply.seq == PROBE_SEQ and session.agent.silent:
            session.agent.silent = ""
            self._changes.notify()
            self._coordinator.catch_ups.settle_soon()
        if self._fleet.settle(session.agent.identity, reply.round_id, reply.seq, reply.result):
            self._run.record_quarantine()
            self._changes.notify()
            self._coordinator.catch_ups.settle_soon()

    async def report_to(self, trainer: Identity, report: UpdateReport) -> None:
        """Tell a trainer rank how its attempt ended, if that process is there."""
        session = self.sessions.get(trainer[0])
        if session is None or session.agent.identity != trainer:
            return  # if that process comes back it announces again, and is answered then
        try:
            await session.send(report)
        except PeerUnreachable as error:
            _log.warning("report of version %s: %s", report.version, error)

    async def probe_held(self) -> None:
        """Ask every trainer that owes the answer to a write whether it will come."""
        for identity, round_id in self._fleet.held.items():
            session = self.sessions.get(identity[0])
            if session is not None and session.agent.identity == identity:
                await session.probe(round_id)

    # --- who goes ----------------------------------------------------------------------------

    async def lost(self, session: AgentSession, reason: str, *, ended: bool = False) -> None:
        if self.sessions.get(session.peer) is not session:
            return
        del self.sessions[session.peer]
        self._fleet.remove(session.agent)
        session.fail_calls(reason)
        self._coordinator.lost(session.agent, reason, ended=ended)
        level = logging.DEBUG if self._coordinator.is_ending else logging.INFO
        _log.log(level, "agent %s lost: %s", session.peer, reason)
        is_wanted = not self._coordinator.is_ending
        if is_wanted and session.agent.hello.role is Role.ENGINE and self._fleet.unserved:
            _log.warning("%s: %s is gone", self._fleet.unserved, session.peer)
        self._changes.notify()

    async def refuse(self, engine: str, reason: str) -> None:
        """Send an engine away, and tell whoever waits for it, if it is there."""
        group = self._fleet.group_of(engine)
        if group is not None:
            _log.error("engine %s refused: %s", engine, reason)
            await self._send_away(group.workers, reason)
            self._note_refusal(engine, engine, reason)

    async def _send_away(self, workers: Sequence[str], reason: str) -> None:
        found = [self.sessions[worker] for worker in workers if worker in self.sessions]
        for session in found:
            await self.lost(session, reason)  # all of them, before anything is waited for
        for session in found:
            try:
                await session.send(Refused(reason))
            except PeerUnreachable:
                _log.info("%s is gone before it was refused", session.peer)
            self._coordinator.spawn(session.close())

    def set_aside(self, session: AgentSession, reason: str) -> None:
        """Nothing waits for this engine rank again before it has answered."""
        _log.warning("%s", reason)
        session.agent.silent = reason
        self._changes.notify()
        self._coordinator.spawn(session.probe(self._run.round_id))

    def set_silent_aside(
        self,
        sessions: Mapping[str, AgentSession],
        silent: Iterable[str],
        reasons: Mapping[str, str],
    ) -> None:
        """Set engine ranks aside that did not answer in a round, unless another process has their name by now."""
        for worker in sorted(silent):
            session = sessions[worker]
            if self.sessions.get(worker) is session:
                reason = reasons.get(session.agent.hello.group, f"{worker}: no answer")
                self.set_aside(session, reason)


def check_first(first: AgentFrame) -> Hello | CannotJoin:
    """What the first frame of a connection must be, by itself and for the token that it came with.

    Raises:
        ProtocolError: it says nothing of who sends it, or what this token does not allow.
    """
    match first:
        case CannotJoin():
            check_name(first.group, "group")
            check_version(first.protocol_version, first.group)
            _check_role(first.group, Role.ENGINE)
        case Hello():
            check_name(first.group, "group")
            check_name(first.worker, "worker")
            if first.worker != f"{first.group}/{first.rank}":
                raise ProtocolError(
                    f"{first.worker}: worker must be group/rank, '{first.group}/{first.rank}'"
                )
            check_name(first.incarnation, f"{first.worker}: incarnation")
            for what, name in (
                ("host", first.host),
                ("lineage", first.lineage),
                ("job", first.job),
            ):
                if name:
                    check_name(name, f"{first.worker}: {what}")
            if not all(0 <= n <= MAX_COUNT for n in msgspec.structs.astuple(first.registered)):
                raise ProtocolError(
                    f"{first.worker}: registered must be numbers in [0, 2^53), got {first.registered}"
                )
            _check_role(first.worker, first.role)
        case _:
            raise ProtocolError(f"the first frame must be Hello, got {type(first).__name__}")
    return first


def _check_role(who: str, role: Role) -> None:
    access = CALLER.get()
    if access is not Access.OWNER and access.value != role.value:
        raise ProtocolError(f"{who}: /v1/agents: a token of role {access} may not join as {role}")


def check_published(hello: Hello, host: str) -> None:
    """Others send requests, with a token, where an engine says that it serves.

    `host` is where it has connected from; empty for this one.

    Raises:
        ProtocolError: its URL is no plain address of a server, or, on another host, of none there.
    """
    if not hello.url:
        return
    try:
        # An engine's server may be somebody else's, who decides whether it speaks TLS.
        check_url(hello.url, f"{hello.worker}: url", may_be_plain=True)
    except ConfigError as error:
        raise ProtocolError(str(error)) from error
    named = urlsplit(hello.url).hostname or ""
    if host and (is_loopback(named) or is_wildcard(named)):
        raise ProtocolError(
            f"{hello.worker} on host {host}: url must be reachable from other hosts, got "
            f"{hello.url!r}; --host, --advertise-host or {HOST_VARIABLE} sets it"
        )


def shortened(reply: Reply[Result]) -> Reply[Result]:
    """Return a reply that says no more for a person than one reads: it is kept, and shown to many."""
    match reply.result:
        case Failure(message=text) as said if len(text) > MAX_REASON_LENGTH:
            short: Result = msgspec.structs.replace(said, message=text[:MAX_REASON_LENGTH])
        case Done(not_resumed=text) as said if len(text) > MAX_REASON_LENGTH:
            short = Done(not_resumed=text[:MAX_REASON_LENGTH])
        case _:
            return reply
    return msgspec.structs.replace(reply, result=short)
