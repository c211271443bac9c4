"""Connections of agents: admit agents, assign them to their groups, and close refused or replaced connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from windlass.config import ControlConfig
from windlass.control.changes import Changes, Tasks
from windlass.control.connect_messages import CannotJoin, Hello, Identity, Welcome
from windlass.control.fleet import MAX_REASON_LENGTH, PROBE_SEQ, Agent, Group
from windlass.control.messages import (
    AGENT_FRAMES,
    MAX_COUNT,
    AgentFrame,
    Announce,
    Done,
    Failure,
    Result,
    Withdraw,
)
from windlass.control.report import UpdateReport
from windlass.control.run import Run
from windlass.control.session import AgentSession
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

_log = logging.getLogger(__name__)
KEPT_REFUSALS = 256
"""Number of newest refusals that a controller shows; each reason has at most 2,000 characters."""


class AgentLostListener(Protocol):
    """A function that is called when an agent's connection is lost."""

    def __call__(self, agent: Agent, reason: str, *, ended: bool) -> None:
        """Handle the loss of an agent's connection.

        Args:
            agent: the agent, which is no longer in the fleet.
            reason: why the connection is lost, in one line.
            ended: whether the agent's process, not the controller, closed the connection.
        """


@dataclass(frozen=True, kw_only=True)
class MemberEvents:
    """Functions that `Members` calls in the controller's loop.

    Attributes:
        announced: called when a trainer rank announces a version; may raise ProtocolError.
        gave_up: called when a trainer rank withdraws its announcement.
        replied: called with an agent's answer to a command.
        lost: called when an agent has lost its connection.
        bring_up: called when the fleet may need a new binding, or engines may be behind the published version.
        in_round: returns whether a round runs.
    """

    announced: Callable[[AgentSession, Announce], None]
    gave_up: Callable[[AgentSession, Withdraw], None]
    replied: Callable[[AgentSession, Reply[Result]], None]
    lost: AgentLostListener
    bring_up: Callable[[], None]
    in_round: Callable[[], bool]


@final
class Members:
    """Registry of the agents' connections and of refused engines. Its methods run in the controller's event loop.

    Args:
        run: versions, journal and fleet.
        changes: notified when agents come, go or are refused.
        tasks: runs probes and the closing of connections in the background.
        config: limits and deadlines.
        events: functions that this object calls.

    Attributes:
        sessions: worker -> connection.
        unbindable: reason why no engine can be bound until another agent connects; else empty.
    """

    def __init__(
        self,
        run: Run,
        changes: Changes,
        tasks: Tasks,
        config: ControlConfig,
        events: MemberEvents,
    ) -> None:
        self._run, self._fleet = run, run.fleet
        self._changes, self._tasks = changes, tasks
        self._config, self._events = config, events
        self.sessions: dict[str, AgentSession] = {}
        self.unbindable = ""
        self.refusals: dict[str, tuple[str, str]] = {}
        """Name of a refused rank or engine -> engine and reason, at most `KEPT_REFUSALS`."""
        self._is_ending = False

    # --- callers that wait for agents --------------------------------------------------------

    async def wait_for_fleet(
        self, *, num_trainers: int, engines: Sequence[str], deadline_s: float
    ) -> None:
        """Wait until trainer ranks and engines are connected; see `Controller.wait_for_fleet`.

        Raises:
            PeerTimeout: members are still missing after `deadline_s`.
        """
        missing = partial(self._fleet.missing, num_trainers, engines)

        def there() -> bool:
            self._check_none_refused("wait_for_fleet", {*missing()} & {*engines})
            return not missing()

        await self._changes.until(
            there,
            deadline_s,
            lambda: (
                f"wait_for_fleet: still missing after {deadline_s} s: {', '.join(missing().values())}"
            ),
        )

    async def wait_for_version(
        self, version: int, *, engines: Sequence[str] = (), deadline_s: float
    ) -> None:
        """Wait until engines serve a version; see `Controller.wait_for_version`.

        Raises:
            EngineRefused: an engine of `engines` was refused, or no engine can be bound (`unbindable`).
            PeerTimeout: after `deadline_s`, the version is not published, or one of `engines` does not serve the
                published version.
        """
        fleet = self._fleet

        def behind() -> list[str]:
            return sorted(set(engines) - {engine.name for engine in fleet.routable()})

        def described() -> str:
            reasons = {state.name: state.reason for state in fleet.states()}
            texts = (f"{name} ({why})" if (why := reasons.get(name)) else name for name in behind())
            return ", ".join(texts) or "none"

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
                f"wait_for_version: version {version} must be published, and all of `engines` must serve the published "
                f"version, within {deadline_s} s; the published version is {fleet.published}; engines without this version: "
                f"{described()}"
            ),
        )

    def _check_none_refused(self, call: str, engines: Iterable[str]) -> None:
        """Raise EngineRefused if one of `engines` was refused. The message begins with `call`, the calling method's name."""
        for engine, reason in self.refused():
            if engine in engines:
                raise EngineRefused(f"{call}: engine {engine} was refused: {reason}")

    def refused(self) -> list[tuple[str, str]]:
        """Return (engine, reason) for each refused engine that has not connected since. Users must restart it."""
        return sorted({*self.refusals.values()})

    def describe_refused(self) -> dict[str, str]:
        """Return refused ranks and engines as `/v1/status` shows them: name -> reason."""
        return {who: printable(reason) for who, (_, reason) in self.refusals.items()}

    def _note_refusal(self, who: str, engine: str, reason: str) -> None:
        """Record why a rank of `engine`, or the engine itself, was refused.

        `who` is the name of the refused rank or engine. The record lasts until `who` is admitted.
        """
        self.refusals[who] = engine, reason
        if len(self.refusals) > KEPT_REFUSALS:
            del self.refusals[next(iter(self.refusals))]
        self._changes.notify()

    # --- agents that connect -----------------------------------------------------------------

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one agent's connection to `/v1/agents` until the connection ends."""
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
        """Admit the agent that sent `first` over `socket`: add its rank to the fleet and its session to `sessions`.

        Close an earlier connection of the same process. If the agent belongs to a new trainer job, disconnect the ranks
        of the previous job. Delete the recorded refusals of this rank and its engine, and clear `unbindable`. If an
        engine rank is refused for good and no other process is connected as this rank, record the reason: callers that
        wait for the engine then fail.

        Returns:
            The agent's session, and the answer to the agent; None if `first` is `CannotJoin`, which only reports why
            an engine cannot join.

        Raises:
            MustWait: the agent is refused now, and may try again later.
            ProtocolError, PlanError: the agent is refused, and must not try again.
        """
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
            # Do not fail callers that wait for this engine if another process is already connected as this rank.
            if hello.role is Role.ENGINE and hello.worker not in self.sessions:
                self._note_refusal(hello.worker, hello.group, f"{type(error).__name__}: {error}")
            raise
        for who in (hello.worker, hello.group):
            self.refusals.pop(who, None)
        self.unbindable = ""
        return session, Welcome(self._run.round_id.epoch, self._run.lineage)

    def _failed_to_join(self, frame: CannotJoin) -> None:
        """Log and record why an engine cannot join. Callers that wait for this engine then fail."""
        reason = frame.message[:MAX_REASON_LENGTH]
        if self.refusals.get(frame.group) != (frame.group, reason):
            _log.error("engine %s cannot join: %s", frame.group, reason)
        group = self._fleet.group_of(frame.group)
        # If all ranks of the engine are connected, the report comes from another process with the
        # engine's name. Callers that wait for the connected engine must not fail.
        if group is None or not group.complete:
            self._note_refusal(frame.group, frame.group, reason)

    async def _admit(self, hello: Hello, socket: web.WebSocketResponse) -> AgentSession:
        """Disconnect the agents that the sender of `hello` replaces, add the sender to the fleet, and return its session.

        The epoch and the published version of the run may rise to the values in the Hello (`Run.note_joined`).
        """
        self._run.check_past(hello)
        check_published(hello, host_of(socket))
        old = self.sessions.get(hello.worker)
        if old is not None and old.agent.hello.incarnation == hello.incarnation:
            # The agent noticed the broken connection before this controller did.
            await self.lost(old, "replaced by a newer connection of the same process")
            self._tasks.spawn(old.close())
        if hello.role is Role.TRAINER:
            # Check the Hello first, so that an agent with an invalid Hello disconnects no engine and no earlier job.
            self._fleet.check(hello)
            await self._free_name(hello)
            await self._make_room(hello)
        session = AgentSession(socket, self._fleet.admit(hello))
        self.sessions[hello.worker] = session
        self._run.note_joined(hello)
        return session

    async def _free_name(self, hello: Hello) -> None:
        """If an engine has the same name as the trainer group in `hello`, disconnect the engine."""
        group = self._fleet.group_of(hello.group)
        if group is not None and group.role is Role.ENGINE:
            reason = f"group must not be {group.name!r}, the name of the trainers' group"
            _log.warning("%s: %s", ", ".join(group.workers), reason)
            await self._send_away(group.workers, reason)

    async def _make_room(self, hello: Hello) -> None:
        """If `hello` is from a rank of a new trainer job, disconnect the ranks of the earlier job.

        Do nothing if all ranks of the earlier job are connected and belong to this run, or if the earlier job's writes may
        still be running: `Fleet.admit` then refuses the new rank. A rank whose Hello has a lineage was connected to a
        controller before, so it is not from a new job.
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
        """Return whether a new trainer job must wait for `job`.

        Return True if `job` may still write, or if all its ranks are connected and belong to this run.
        """
        of_this_run = job.identities <= self._fleet.published_by or all(
            agent.hello.lineage in {"", self._run.lineage} for agent in job.agents.values()
        )
        writing = self._events.in_round() or not job.identities.isdisjoint(self._fleet.held)
        return writing or (job.complete and of_this_run)

    async def admitted(self, session: AgentSession) -> None:
        """Log how much memory an admitted agent has registered, and notify the coroutines that wait for agents.

        If all ranks of the agent's group are now connected, or if a source has not answered a write, also call
        `MemberEvents.bring_up`. This call brings up engines, and sends a probe to each such source.
        """
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
            self._events.bring_up()

    # --- frames of agents --------------------------------------------------------------------

    async def received(self, session: AgentSession, frame: AgentFrame) -> None:
        """Handle one frame of an admitted agent.

        Raises:
            Garbled: the frame is a `Hello` or `CannotJoin`, but not the first frame of the connection.
            ProtocolError: an engine rank sent `Announce`, which only trainer ranks may send.
        """
        match frame:
            case Reply():
                self._on_reply(session, shortened(frame))
            case Announce():
                self._events.announced(session, frame)
            case Withdraw():
                self._events.gave_up(session, frame)
            case Hello() | CannotJoin():
                raise Garbled(
                    f"{session.peer}: {type(frame).__name__} may only be the first frame of a connection"
                )

    def _on_reply(self, session: AgentSession, reply: Reply[Result]) -> None:
        """Give an agent's answer to the call that waits for it, to the running round, and to the fleet.

        If the answer ends an exclusion (`set_aside`) or a hold, a round may now write to more engines: wake the
        coroutines that wait for changes, and start to bring up engines. Store new quarantines in the journal.
        """
        session.on_reply(reply.call_id, reply.result)
        self._events.replied(session, reply)
        if reply.seq == PROBE_SEQ and session.agent.silent:
            self._fleet.note_silent(session.agent, "")
            self._changes.notify()
            self._events.bring_up()
        if self._fleet.settle(session.agent.identity, reply.round_id, reply.seq, reply.result):
            self._run.record_quarantine()
            self._changes.notify()
            self._events.bring_up()

    async def report_to(self, trainer: Identity, report: UpdateReport) -> None:
        """Send the report of an update to the trainer process that announced it, if this process is connected."""
        session = self.sessions.get(trainer[0])
        if session is None or session.agent.identity != trainer:
            # A process that connects again repeats its announcement, and then gets its report.
            return
        try:
            await session.send(report)
        except PeerUnreachable as error:
            _log.warning("the report of version %s was not sent: %s", report.version, error)

    async def probe_held(self) -> None:
        """Send a probe to every connected source that has not answered a write.

        Agents answer in order, so the answer to the probe shows that the write has ended.
        """
        for identity, round_id in self._fleet.held.items():
            session = self.sessions.get(identity[0])
            if session is not None and session.agent.identity == identity:
                await session.probe(round_id)

    # --- agents that go ----------------------------------------------------------------------

    def expect_departures(self) -> None:
        """Record that the job is ending: from now on, log lost connections at level DEBUG."""
        self._is_ending = True

    async def lost(self, session: AgentSession, reason: str, *, ended: bool = False) -> None:
        """Remove a connection from `sessions`, and its agent from the fleet.

        If calls wait for the agent's answers, they raise PeerUnreachable. Then call `MemberEvents.lost`, and wake the
        coroutines that wait for changes.

        Args:
            session: the connection; a replaced connection is ignored.
            reason: why the connection is lost.
            ended: whether the agent's process, not the controller, closed the connection.
        """
        if self.sessions.get(session.peer) is not session:
            return
        del self.sessions[session.peer]
        self._fleet.remove(session.agent)
        session.fail_calls(reason)
        self._events.lost(session.agent, reason, ended=ended)
        level = logging.DEBUG if self._is_ending else logging.INFO
        _log.log(level, "agent %s lost: %s", session.peer, reason)
        is_engine = session.agent.hello.role is Role.ENGINE
        if is_engine and self._fleet.unserved and not self._is_ending:
            _log.warning("%s: %s has disconnected", self._fleet.unserved, session.peer)
        self._changes.notify()

    async def refuse(self, engine: str, reason: str) -> None:
        """Disconnect all ranks of an engine and record the reason; do nothing if no rank is connected.

        Callers that wait for this engine get EngineRefused with the reason.
        """
        group = self._fleet.group_of(engine)
        if group is not None:
            _log.error("engine %s refused: %s", engine, reason)
            await self._send_away(group.workers, reason)
            self._note_refusal(engine, engine, reason)

    async def _send_away(self, workers: Sequence[str], reason: str) -> None:
        """Remove these ranks from the fleet, send each a refusal with the reason, and close their connections.

        The connections close in background tasks. Ranks that are not connected are ignored.
        """
        found = [self.sessions[worker] for worker in workers if worker in self.sessions]
        for session in found:
            # Remove all agents from the fleet before the first `send`, which may wait for a slow peer.
            await self.lost(session, reason)
        for session in found:
            try:
                await session.send(Refused(reason))
            except PeerUnreachable:
                _log.info("%s has disconnected before it got its refusal", session.peer)
            self._tasks.spawn(session.close())

    def set_aside(self, session: AgentSession, reason: str) -> None:
        """Exclude a rank's engine from bindings and rounds, because the rank did not answer.

        Send the rank a probe in a task. Store the reason in `Agent.silent`, so that the engine gets no traffic. Wake
        the coroutines that wait for changes. The answer to the probe ends the exclusion.
        """
        self._fleet.note_silent(session.agent, reason)
        self._changes.notify()
        self._tasks.spawn(session.probe(self._run.round_id))

    def set_silent_aside(
        self,
        sessions: Mapping[str, AgentSession],
        silent: Iterable[str],
        reasons: Mapping[str, str],
    ) -> None:
        """Exclude (`set_aside`) each engine rank that did not answer in a round and still has the same connection.

        Args:
            sessions: rank -> its session in the round.
            silent: names of the ranks that did not answer.
            reasons: engine -> reason, from the report of the round.
        """
        for worker in sorted(silent):
            session = sessions[worker]
            if self.sessions.get(worker) is session:
                reason = reasons.get(session.agent.hello.group, f"{worker}: no answer")
                self.set_aside(session, reason)

    async def close(self) -> None:
        """Close every agent's connection. Idempotent."""
        # Close all connections at once, because each takes until a deadline to close if its agent does not answer.
        closing = (session.close() for session in list(self.sessions.values()))
        await asyncio.gather(*closing, return_exceptions=True)


def check_first(first: AgentFrame) -> Hello | CannotJoin:
    """Check the first frame of a connection, and whether the token of the connection permits the agent's role.

    Raises:
        ProtocolError: the frame is of another type, has an invalid field, or needs another token.
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
                    f"{first.worker}: worker must be its group and rank, '{first.group}/{first.rank}'"
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
            raise ProtocolError(
                f"the first frame must be Hello or CannotJoin, got {type(first).__name__}"
            )
    return first


def _check_role(who: str, role: Role) -> None:
    access = CALLER.get()
    if access is not Access.OWNER and access.value != role.value:
        raise ProtocolError(f"{who}: /v1/agents: a token of role {access} may not join as {role}")


def check_published(hello: Hello, host: str) -> None:
    """Check the URL that an engine reports, because the controller and rollout workers send a token to it.

    Args:
        hello: the engine's first frame.
        host: address from which the engine has connected; empty if the engine is on the controller's host.

    Raises:
        ProtocolError: the URL is not a plain address of a server, or an engine on another host gives an address that
            only its own host can reach.
    """
    if not hello.url:
        return
    try:
        # Plain HTTP is valid, because the user decides whether the engine's server uses TLS.
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
    """Return a reply with its error text cut to `MAX_REASON_LENGTH` characters, because the controller stores the text."""
    match reply.result:
        case Failure(message=text) as said if len(text) > MAX_REASON_LENGTH:
            short: Result = msgspec.structs.replace(said, message=text[:MAX_REASON_LENGTH])
        case Done(not_resumed=text) as said if len(text) > MAX_REASON_LENGTH:
            short = Done(not_resumed=text[:MAX_REASON_LENGTH])
        case _:
            return reply
    return msgspec.structs.replace(reply, result=short)
