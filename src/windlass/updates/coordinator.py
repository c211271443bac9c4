"""The asyncio driver of weight updates: connections in, rounds out.

It owns the fleet, compiles bindings when the fleet has changed, and carries out the
instructions of one `RoundMachine` at a time. Everything happens in one event loop; nothing
here is shared with rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

import msgspec
from aiohttp import web

from windlass.config import PUSH_TRAITS, ControlConfig, UpdateMode
from windlass.errors import (
    ConfigError,
    EngineRefused,
    PeerTimeout,
    PeerUnreachable,
    PlanError,
    ProtocolError,
    RoundAborted,
    WindlassError,
)
from windlass.layout.manifest import Role
from windlass.net.logs import log_fields, printable
from windlass.net.messages import Garbled, MustWait, Refused, Reply, RoundId
from windlass.net.rpc import host_of, serve
from windlass.net.server import ControlServer
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.updates.binding import (
    Binding,
    EnginesUnbound,
    FleetBinder,
    Link,
    Planner,
    signature_of,
)
from windlass.updates.changes import Changes, tell
from windlass.updates.comparisons import Comparisons
from windlass.updates.connect_messages import CannotJoin, Hello, Welcome
from windlass.updates.driver import RoundDriver, RoundResult
from windlass.updates.fleet import PROBE_SEQ, EngineInfo, EngineState, Fleet, Group, Identity
from windlass.updates.journal import Journal, JournalEntry, JournalKind
from windlass.updates.messages import (
    AGENT_FRAMES,
    MAX_COUNT,
    MAX_REASON_LENGTH,
    AgentFrame,
    Announce,
    Withdraw,
)
from windlass.updates.publish_requests import KEPT_REPORTS, PendingPublish, PublishRequests
from windlass.updates.push import PushUpdates
from windlass.updates.recovery import CatchUps, ResumeRetries
from windlass.updates.report import BindCost, RoundOutcome, UpdateReport
from windlass.updates.rounds import (
    AgentLost,
    EngineOutcome,
    Phase,
    RoundSpec,
    reply_budget_s,
)
from windlass.updates.session import (
    AgentSession,
    check_first,
    check_published,
    probe_held,
    report_to,
    shortened,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_LATE = 2
"""Times that an engine may not answer when it is bound; one that is late again is refused."""
KEPT_REFUSALS = 1024
TOLD_COSTS = 64
"""Ranks whose costs of connecting are in the report that every trainer rank gets."""
MAX_EPOCHS_AHEAD = 1 << 20
"""By which agents may be ahead of what a controller knows: bindings are not recorded."""


@dataclass(frozen=True, slots=True)
class CalledUpdate:
    """A version that the controller's own process publishes.

    Attributes:
        copied: set once no trainer rank reads its weights any more, where all send from replicas.
        report: how it ended.
    """

    copied: asyncio.Event
    report: asyncio.Task[UpdateReport]


@final
class Coordinator:
    """Owns the fleet, and runs one round at a time.

    Args:
        config: mode, deadlines, retries.
        journal_path: where rounds are recorded; None keeps them in memory.
        planner: compiles plans; a parameter so that tests can fail it.

    Attributes:
        lock: held while a round runs, or the fleet is bound.
        reports: of the newest `KEPT_REPORTS` updates; `num_updates` counts all.
        binds: engines that are bound just now.

    Raises:
        ConfigError: the journal cannot be used.
    """

    def __init__(
        self,
        config: ControlConfig,
        *,
        journal_path: Path | None = None,
        planner: Planner = plan_transfer,
    ) -> None:
        self._config = config
        self._planner = planner
        self._journal = Journal(journal_path)
        known = self._journal.summary
        self._published, self._reserved = known.published, known.reserved
        self._round_id = RoundId(self._journal.start(), known.round)
        self._lineage = known.lineage
        self._fleet = Fleet(known.quarantined)
        self._fleet.lineage = self._lineage
        self._has_bound = False
        self._published_by: frozenset[Identity] = frozenset()
        self._sessions: dict[str, AgentSession] = {}
        self._requests = PublishRequests()
        self._copied: asyncio.Event | None = None
        self._binding: Binding | None = None
        self._bind_costs: dict[str, BindCost] = {}
        self._catch_ups = CatchUps(self, self._fleet, config, planner)
        self._resume_retries = ResumeRetries(self, self._sessions, config.deadlines)
        self._comparisons = Comparisons(config.compare_share)
        self._refusals: dict[str, tuple[str, str]] = {}
        self._unbindable = ""
        self._settles = False
        self._driver: RoundDriver | None = None
        self.lock = asyncio.Lock()
        self._changes = Changes()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._update_listeners: list[Callable[[UpdateReport], None]] = []
        self._phase_listeners: list[Callable[[int, Phase], None]] = []
        self._pushes = PushUpdates(self)
        self.num_updates = 0
        self._reached: dict[Link, float] = {}
        self.binds: tuple[str, ...] = ()
        self.reports: deque[UpdateReport] = deque(maxlen=KEPT_REPORTS)

    # --- what others ask ---------------------------------------------------------------------

    @property
    def published_version(self) -> int:
        """The version that the fleet serves; -1 before the first."""
        return self._published

    @property
    def epoch(self) -> int:
        """Grows with every binding and with every start of a controller."""
        return self._round_id.epoch

    @property
    def lineage(self) -> str:
        """Of the run whose versions this controller publishes; see `Welcome`."""
        return self._lineage

    def routable(self) -> tuple[EngineInfo, ...]:
        """Engines that may be given traffic: complete, whole, at the published version."""
        return self._fleet.routable(self._published)

    def engines(self) -> tuple[EngineState, ...]:
        """All engines of which a rank is connected, routable or not."""
        return self._fleet.states(self._published)

    @property
    def in_round(self) -> bool:
        """Whether engines are being updated now; those of the round are not routable meanwhile."""
        return self._driver is not None

    def on_update(self, listener: Callable[[UpdateReport], None]) -> None:
        """Call `listener` in the loop after every round."""
        self._update_listeners.append(listener)

    def on_phase(self, listener: Callable[[int, Phase], None]) -> None:
        """Call `listener(version, phase)` in the loop when a round enters a phase."""
        self._phase_listeners.append(listener)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the loop when engines come, go, or change version."""
        self._changes.subscribe(callback)

    def status(self) -> dict[str, object]:
        """What `/v1/status` answers."""
        return {
            "epoch": self._round_id.epoch,
            "round": self._round_id.round,
            "published_version": self._published,
            "mode": self._config.mode.value,
            "engines": self._fleet.describe(self._published),
            "refused": {who: printable(reason) for who, (_, reason) in self._refusals.items()},
            "trainers": list(t.workers) if (t := self._fleet.trainers()) is not None else [],
            "in_round": self.in_round,
            "updates": self.num_updates,
            "links": [] if self._binding is None else self._binding.describe_links(self._reached),
        }

    def missing(self, num_trainers: int, engines: Sequence[str]) -> list[str]:
        """Who of a fleet is not connected with all ranks yet, for a person."""
        return self._fleet.missing(num_trainers, engines)

    async def wait_for_fleet(
        self, *, num_trainers: int, engines: Sequence[str], deadline_s: float
    ) -> None:
        missing = partial(self.missing, num_trainers, engines)

        def there() -> bool:
            self._check_none_refused("wait_for_fleet", {*missing()} & {*engines})
            return not missing()

        await self._changes.until(
            there,
            deadline_s,
            lambda: f"wait_for_fleet: missing after {deadline_s} s: {', '.join(missing())}",
        )

    async def wait_for_version(
        self, version: int, *, engines: Sequence[str] = (), deadline_s: float
    ) -> None:
        def behind() -> list[str]:
            return sorted(set(engines) - {engine.name for engine in self.routable()})

        def served() -> bool:
            if self._published >= version and not behind():
                return True
            self._check_none_refused("wait_for_version", behind())
            if self._unbindable:
                raise EngineRefused(f"wait_for_version: no engine is bound: {self._unbindable}")
            return False

        await self._changes.until(
            served,
            deadline_s,
            lambda: (
                f"wait_for_version: {version} was not published and served within {deadline_s} s; "
                f"published is {self._published}, behind it {', '.join(behind()) or 'nobody'}"
            ),
        )

    def _check_none_refused(self, call: str, engines: Iterable[str]) -> None:
        """Of engines that are not there.

        Raises:
            EngineRefused: one of them will not come: whoever waits is told why.
        """
        for engine, reason in self._refusals.values():
            if engine in engines:
                raise EngineRefused(f"{call}: engine {engine} was refused: {reason}")

    def _failed_to_join(self, frame: CannotJoin) -> None:
        reason = frame.message[:MAX_REASON_LENGTH]
        _log.error("engine %s cannot join: %s", frame.group, reason)
        group = self._fleet.group_of(frame.group)
        if group is None or not group.complete:  # else another try to start it has failed
            self._note_refusal(frame.group, frame.group, reason)

    def _note_refusal(self, who: str, engine: str, reason: str) -> None:
        """`who` is a rank or the engine; until it comes anew."""
        self._refusals[who] = engine, reason
        if len(self._refusals) > KEPT_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
        self._changes.notify()

    # --- connections -------------------------------------------------------------------------

    def mount(self, server: ControlServer) -> None:
        """Add `/v1/agents` and `/v1/status` to a server that has not started."""
        agents = web.get("/v1/agents", self._serve_agent)
        status = web.get("/v1/status", self._serve_status)
        server.add_routes((agents, status, *self._pushes.routes()))

    async def _serve_status(self, _request: web.Request) -> web.Response:
        return web.json_response(self.status())

    async def _serve_agent(self, request: web.Request) -> web.StreamResponse:
        config = self._config
        return await serve(
            request,
            self,
            AGENT_FRAMES,
            heartbeat_s=config.heartbeat_s,
            max_nbytes=config.max_message_nbytes,
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
            if hello.role is Role.ENGINE and hello.worker not in self._sessions:
                self._note_refusal(hello.worker, hello.group, f"{type(error).__name__}: {error}")
            raise
        for who in (hello.worker, hello.group):
            self._refusals.pop(who, None)
        self._unbindable = ""
        return session, Welcome(self.epoch, self._lineage)

    async def _admit(self, hello: Hello, socket: web.WebSocketResponse) -> AgentSession:
        self._check_past(hello)
        check_published(hello, host_of(socket))
        old = self._sessions.get(hello.worker)
        if old is not None and old.agent.hello.incarnation == hello.incarnation:
            # The process noticed before we did that its connection had broken.
            await self.lost(old, "replaced by a newer connection of the same process")
            self.spawn(old.close())
        if hello.role is Role.TRAINER:
            self._fleet.check(hello)  # before anybody is sent away for it
            await self._free_name(hello)
            await self._make_room(hello)
        session = AgentSession(socket, self._fleet.admit(hello))
        self._sessions[hello.worker] = session
        # Agents refuse what is older than what they have seen, whoever sent it.
        self._round_id = self._round_id._replace(epoch=max(self.epoch, hello.epoch))
        self._note_served(hello)
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
        if self._fleet.lineage != self._lineage:  # what those have said is not this job's past
            self._published = self._reserved = -1
            self._fleet.lineage = self._lineage
        if rivals is not None:
            reason = self._fleet.replace_job(hello.job)
            _log.warning("%s: %s", ", ".join(rivals.workers), reason)
            await self._send_away(rivals.workers, reason)

    def _keeps_place(self, job: Group) -> bool:
        of_this_run = job.identities <= self._published_by or all(
            agent.hello.lineage in {"", self._lineage} for agent in job.agents.values()
        )
        writing = self._driver is not None or not job.identities.isdisjoint(self._fleet.held)
        return writing or (job.complete and of_this_run)

    def _check_past(self, hello: Hello) -> None:
        """What an agent says of earlier controllers must be possible.

        Raises:
            ProtocolError: it is not, or it is of a trainer rank of another run.
        """
        for name, value, least in (
            ("epoch", hello.epoch, 0),
            ("round", hello.round, 0),
            ("served_version", hello.served_version, -1),
        ):
            if not least <= value <= MAX_COUNT:
                raise ProtocolError(
                    f"{hello.worker}: {name} must be in [{least}, 2^53), got {value}"
                )
        if hello.epoch > self.epoch + MAX_EPOCHS_AHEAD:
            raise ProtocolError(
                f"{hello.worker}: epoch must be at most {MAX_EPOCHS_AHEAD} above that of this "
                f"controller, {self.epoch}, got {hello.epoch}"
            )
        ours = hello.lineage in {"", self._lineage}
        if hello.role is Role.TRAINER and not ours and self._journal.is_kept:
            raise ProtocolError(
                f"{hello.worker}: has trained for run {hello.lineage}, the journal of this "
                f"controller is of run {self._lineage}: start the trainers anew, or the controller "
                "with the journal of that run"
            )

    def _note_served(self, hello: Hello) -> None:
        """What may have been published in this run and is served was published.

        Nobody but its trainers is believed by a controller that has no journal, and those only
        until something is bound: an engine may be of any run.
        """
        version = hello.served_version
        if hello.lineage == self._lineage:
            known = version <= self._reserved and not hello.mixed_weights
        else:
            known = hello.role is Role.TRAINER and not (self._journal.is_kept or self._has_bound)
            known &= self._published < 0 or hello.lineage == self._fleet.lineage
        if known and version > self._published:
            _log.info("%s says that version %s is published", hello.worker, version)
            self._published, self._fleet.lineage = version, hello.lineage
            self._reserved = max(self._reserved, version)

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
            self.settle_soon()

    async def received(self, session: AgentSession, frame: AgentFrame) -> None:
        match frame:
            case Reply():
                frame = shortened(frame)
                session.on_reply((frame.epoch, frame.round, frame.seq), frame.result)
                if self._resume_retries.heard(session.agent, frame):
                    self._changes.notify()
                if self._driver is not None:
                    self._driver.on_reply(session, frame)
                if frame.seq == PROBE_SEQ and session.agent.silent:
                    session.agent.silent = ""
                    self._changes.notify()
                    self.settle_soon()
                identity, result = session.agent.identity, frame.result
                if self._fleet.settle(identity, frame.round_id, frame.seq, result):
                    self._record_quarantine()
                    self._changes.notify()
                    self.settle_soon()
            case Announce():
                self._on_announce(session, frame)
            case Withdraw():
                self._requests.give_up(session.worker, frame.attempt)
            case Hello() | CannotJoin():
                raise Garbled(f"{session.worker}: Hello may be sent only once")

    async def lost(self, session: AgentSession, reason: str, *, ended: bool = False) -> None:
        worker = session.worker
        if self._sessions.get(worker) is not session:
            return
        del self._sessions[worker]
        self._requests.withdraw(worker)
        self._fleet.remove(session.agent)
        self._catch_ups.forget(session.agent.hello.group)
        self._resume_retries.forget(session.agent.identity)
        if ended and session.agent.hello.role is Role.ENGINE:
            self._catch_ups.lost(session.agent.identity)
        session.fail_calls(reason)
        if self._driver is not None:
            self._driver.post(AgentLost(worker, reason))
        _log.info("agent %s lost: %s", worker, reason)
        self._changes.notify()

    # --- the first clock -----------------------------------------------------------------------

    async def _settle(self) -> None:
        """As soon as no round runs: bring newcomers up, and bind, so that the next round need not."""
        async with self.lock:
            self._settles = False  # what changes from here on is for the next one
            await self._catch_ups.bring_up()
            trainers = self._fleet.trainers()
            if trainers is None or not trainers.complete or not self._fleet.writable_engines():
                return
            try:
                await self._ensure_bound()
            except WindlassError as error:
                _log.warning("binding failed, the next round tries again: %s", error)
                if isinstance(error, PlanError | ConfigError):  # and will fail again
                    self._unbindable = f"{type(error).__name__}: {error}"
                    self._changes.notify()

    async def copy(self, donor: Group, newcomer: Group, plan: TransferPlan) -> UpdateReport:
        """Have `donor` write the published version into `newcomer`, while no other round runs.

        Raises:
            WindlassError: somebody did not bind.
        """
        if self._binding is not None:  # the newcomer's memory is bound to another plan now
            self._binding = self._binding.without((newcomer.name,))
        try:
            binding = await self._bind(donor, (newcomer,), lambda _sources, _destinations: plan)
        except EnginesUnbound as error:
            # What it refuses of a peer it may take from the trainers.
            await self._part_with(EnginesUnbound({}, error.late))
            raise
        report = await self._run_round(self._published, self._fleet.lineage, binding)
        self._changes.notify()
        return report

    def settle_soon(self) -> None:
        """Bind, bring newcomers up and have engines go on, as soon as no round runs."""
        if self._fleet.held:
            self.spawn(probe_held(self._fleet, self._sessions))
        if not self._settles:  # one that waits for its turn does it for all who come meanwhile
            self._settles = True
            self.spawn(self._settle())

    async def _ensure_bound(self) -> Binding:
        trainers, engines = self._fleet.trainers(), self._fleet.writable_engines()
        if trainers is None or not trainers.complete:
            raise PeerUnreachable("connect: no complete group of trainers is connected")
        if not engines:
            raise PeerUnreachable("connect: no complete engine is connected")
        wanted = signature_of([trainers, *engines])
        held = self._binding
        if held is not None and held.signature == wanted and not held.ended:
            return held
        self._binding = None
        try:
            self._binding = await self._bind(trainers, engines, self._planner, held)
        except EnginesUnbound as error:
            self._binding = error.kept
            await self._part_with(error)
            return await self._ensure_bound()
        self._bind_costs |= self._binding.costs
        return self._binding

    async def _bind(
        self,
        sources: Group,
        engines: Sequence[Group],
        planner: Planner,
        held: Binding | None = None,
    ) -> Binding:
        round_id = self.new_epoch()
        self._has_bound, self._unbindable = True, ""
        self._fleet.bound_since(round_id.epoch)
        binder = FleetBinder(
            trainers=sources,
            engines=engines,
            sessions=self._sessions,
            planner=planner,
            mode=self._config.mode,
            backend=self._config.backend,
            round_id=round_id,
            deadline_s=self._config.deadlines.connect_s,
            held=held,
        )
        self.binds = tuple(engine.name for engine in engines)
        self._changes.notify()
        try:
            return await binder.bind()
        finally:
            self.binds = ()
            self._changes.notify()

    def new_epoch(self) -> RoundId:
        """A round id above all that were used, of another binding than all before."""
        self._round_id = self._round_id.next_epoch()
        return self._round_id

    async def _part_with(self, unbound: EnginesUnbound) -> None:
        """Who was late takes part again once it answers, but not for ever; who said no is refused."""
        refused = unbound.refusals
        for worker, reason in unbound.late.items():
            session = self._sessions.get(worker)
            if session is None:
                continue
            session.agent.num_late += 1
            if session.agent.num_late > MAX_LATE:
                refused.setdefault(session.agent.hello.group, reason)
            else:
                self._set_aside(session, reason)
        for name, reason in refused.items():
            group = self._fleet.group_of(name)
            if group is not None:
                _log.error("engine %s refused: %s", name, reason)
                await self._send_away(group.workers, reason)
                self._note_refusal(name, name, reason)

    def _set_aside(self, session: AgentSession, reason: str) -> None:
        """Nothing waits for this engine rank again before it has answered."""
        _log.warning("%s", reason)
        session.agent.silent = reason
        self._changes.notify()
        self.spawn(session.probe(self._round_id))

    async def _send_away(self, workers: Sequence[str], reason: str) -> None:
        found = [self._sessions[worker] for worker in workers if worker in self._sessions]
        for session in found:
            await self.lost(session, reason)  # all of them, before anything is waited for
        for session in found:
            try:
                await session.send(Refused(reason))
            except PeerUnreachable:
                _log.info("%s is gone before it was refused", session.worker)
            self.spawn(session.close())

    # --- the second clock ----------------------------------------------------------------------

    def _on_announce(self, session: AgentSession, frame: Announce) -> None:
        trainers, hello = self._fleet.trainers(), session.agent.hello
        if trainers is None or (hello.group, hello.role) != (trainers.name, trainers.role):
            raise ProtocolError(f"{session.worker}: only a trainer may announce a version")
        pending = PendingPublish(
            trainer=session.agent.identity, version=frame.version, attempt=frame.attempt
        )
        report = self._requests.receive(pending)
        if report is not None:
            self.spawn(report_to(self._sessions, session.agent.identity, report))
        elif (
            trainers.complete
            and self._requests.num_waiting >= trainers.world_size  # else nobody is asked, each time
            and (all_of_them := self._requests.pop_all(trainers.workers))
        ):
            with log_fields(version=frame.version):  # which the new task keeps
                self.spawn(self._update(all_of_them))

    def begin_publish(self, version: int, *, deadline_s: float) -> CalledUpdate:
        """Publish what all trainer ranks stand still with.

        Args:
            version: that all of them are prepared for (`TrainerClient.prepare_publish`).
            deadline_s: for a rank to come back whose connection is lost just now.
        """
        copied = asyncio.Event()
        with log_fields(version=version):  # which the new task keeps
            return CalledUpdate(copied, self.spawn(self._publish(version, deadline_s, copied)))

    async def _publish(
        self, version: int, deadline_s: float, copied: asyncio.Event
    ) -> UpdateReport:
        def ranks() -> tuple[PendingPublish, ...]:
            trainers = self._fleet.trainers()
            if trainers is None or not trainers.complete:
                return ()
            agents = trainers.agents.values()
            return tuple(PendingPublish(trainer=a.identity, version=version) for a in agents)

        try:
            await self._changes.until(
                lambda: bool(ranks()),
                deadline_s,
                lambda: f"publish: not all trainer ranks were connected within {deadline_s} s",
            )
        except PeerTimeout as error:
            return _failed(version, str(error))
        return await self._update(ranks(), copied)

    async def _update(
        self, ranks: tuple[PendingPublish, ...], copied: asyncio.Event | None = None
    ) -> UpdateReport:
        version = max(rank.version for rank in ranks)
        async with self.lock:
            self._copied = copied
            try:
                report = await self._attempt_until_whole(ranks, version)
            except WindlassError as error:
                report = _failed(version, f"{type(error).__name__}: {error}")
            # The boundary of a round: whatever it is, trainers must not wait for their deadline.
            except Exception as error:  # noqa: BLE001
                _log.exception("version %s", version)
                report = _failed(version, f"{type(error).__name__}: {error}")
        told = _told_to_trainers(report)
        answers = [(rank.trainer, self._requests.answer(rank, told)) for rank in ranks]
        self._note_update(report)
        for trainer, answer in answers:
            await report_to(self._sessions, trainer, answer)
        if report.left_out:
            self.settle_soon()
        return report

    def _note_update(self, report: UpdateReport) -> None:
        """An update has ended, whoever drove it: everybody who looks at updates is told."""
        self.reports.append(report)
        self.num_updates += 1
        self._changes.notify()
        tell(self._update_listeners, report)

    async def _attempt_until_whole(
        self, ranks: tuple[PendingPublish, ...], version: int
    ) -> UpdateReport:
        """A broken group serves nobody: form it anew from whoever is left, and send again.

        Trainers stand still all the while. One-sided writes and files need no second attempt: there
        an engine that fails takes no other one with it.
        """
        report = await self._attempt(ranks, version)
        if not self._config.backend.traits.collective:
            return report
        for _ in range(self._config.max_rewrites):
            if report.outcome is RoundOutcome.PUBLISHED or Phase.PUBLISH in report.phase_s:
                break
            _log.warning("version %s: group formed anew: %s", report.version, report.reason)
            self._binding = None
            report = await self._attempt(ranks, version)
        if report.outcome is not RoundOutcome.PUBLISHED or report.left_out:
            self._binding = None
        return report

    async def _attempt(self, ranks: tuple[PendingPublish, ...], version: int) -> UpdateReport:
        versions = {rank.trainer[0]: rank.version for rank in ranks}
        if len(set(versions.values())) > 1:
            return _failed(version, f"trainer ranks announced different versions: {versions}")
        if refusal := self.refusal(version):
            return _failed(version, refusal)
        binding = await self._bind_enough()
        moved = {rank.trainer for rank in ranks} - binding.signature
        if moved or len(ranks) != len(binding.trainers):
            names = sorted(name for name, _ in moved)
            said = (
                f"new are {names}"
                if names
                else f"{len(ranks)} announced, {len(binding.trainers)} are here"
            )
            return _failed(version, f"trainer ranks came or went since they announced: {said}")
        costs, self._bind_costs = self._bind_costs, {}
        report = await self._run_round(version, self._lineage, binding)
        report = msgspec.structs.replace(report, bound=costs)
        if report.outcome is RoundOutcome.PUBLISHED:
            self._published_by = binding.identities_of(binding.trainers)
        return report

    def refusal(self, version: int) -> str:
        """Why a version must not be published; empty if it may."""
        newest = max(self._published, self._reserved)
        if version <= newest:
            return f"stale version: it must be > {newest}, which is or may have been published"
        return "" if version <= MAX_COUNT else f"version must be < 2^53, got {version}"

    async def _run_round(self, version: int, lineage: str, binding: Binding) -> UpdateReport:
        comparison, replicated, period = None, binding.replicated, 1
        if replicated is not None:
            sources = binding.identities_of(binding.trainers)
            comparison = self._comparisons.begin(version, sources)
            if comparison is not None and not comparison.is_first:
                period = replicated.period(binding.sent_nbytes)
        spec = RoundSpec(
            version=version,
            lineage=lineage,
            config=self._config,
            traits=self._config.backend.traits,
            trainers=binding.trainers,
            engines=binding.engines,
            links=frozenset(binding.links),
            relay=binding.relay,
            replicated=None if comparison is None else replicated,
            turn=0 if comparison is None else comparison.turn,
            period=period,
        )
        return await self._finish_round(self._start_round(spec, binding))

    async def begin_push(
        self, pause_s: float, session_s: float
    ) -> tuple[RoundDriver, asyncio.Task[UpdateReport]]:
        """Wait for the running round, then begin one whose Write phase the trainer drives.

        Args:
            pause_s: from now until every engine has paused, or is left out.
            session_s: for the leaders to send everything, after that.

        Raises:
            PeerUnreachable: there is no complete engine.
            RoundAborted: the round cannot be recorded.
        """
        began_s = time.monotonic()
        await self.lock.acquire()
        try:
            left_s = pause_s - (time.monotonic() - began_s)
            driver = self._start_push(left_s, session_s)
        except BaseException:
            self.lock.release()
            raise
        return driver, self.spawn(self._finish_push(driver))

    def _start_push(self, pause_s: float, session_s: float) -> RoundDriver:
        groups = sorted(self._fleet.writable_engines(), key=lambda group: group.name)
        if not groups:
            raise PeerUnreachable("pause_generation: no complete engine is connected")
        self._binding = None  # engines are bound anew by the next plan
        engines = {group.name: group.workers for group in groups}
        # Who does not pause costs itself its place, and the leader still gets an answer.
        prepare_s = reply_budget_s(pause_s)
        deadlines = msgspec.structs.replace(
            self._config.deadlines,
            prepare_s=prepare_s,
            pause_s=reply_budget_s(prepare_s),
            write_s=session_s,
        )
        # Engines stand still while bytes come, though these land in a shadow copy.
        config = msgspec.structs.replace(
            self._config, mode=UpdateMode.IN_PLACE, deadlines=deadlines
        )
        spec = RoundSpec(
            version=-1, lineage=self._lineage, config=config, traits=PUSH_TRAITS, engines=engines
        )
        return self._start_round(spec, Binding(signature=signature_of(groups), engines=engines))

    async def _finish_push(self, driver: RoundDriver) -> UpdateReport:
        try:
            report = await self._finish_round(driver)
        # The boundary of a round, as in `_update`: the leaders must be told.
        except Exception as error:  # noqa: BLE001
            _log.exception("version %s", driver.version)
            report = _failed(driver.version, f"{type(error).__name__}: {error}")
        finally:
            self.lock.release()
        self._note_update(report)
        if report.left_out:
            self.settle_soon()
        return report

    def _start_round(self, spec: RoundSpec, binding: Binding) -> RoundDriver:
        """Put a round on record and make it the running one.

        Raises:
            RoundAborted: it cannot be recorded.
        """
        self._round_id = self._round_id.next_round()
        try:
            self._journal_round(JournalKind.ROUND_BEGAN, spec.version, tuple(binding.engines))
        except OSError as error:
            raise RoundAborted(f"the round cannot be recorded: {error}") from error
        # Of a push no bytes are live before APPLY: what cannot be recorded then changes nothing.
        pushed = spec.traits.driven_by_trainer
        reserves_in = Phase.APPLY if pushed else Phase.PUBLISH
        self._driver = driver = RoundDriver(
            spec,
            binding,
            round_id=self._round_id,  # a Hello may bring a higher epoch meanwhile
            sessions=self._sessions,
            clock=time.perf_counter,
            on_phase=lambda phase: self._on_phase(driver.version, phase, reserves_in),
        )
        return driver

    async def _finish_round(self, driver: RoundDriver) -> UpdateReport:
        try:
            result = await driver.run()
        finally:
            self._driver = None
        published = result.finish.outcome is RoundOutcome.PUBLISHED
        # A copy of another run's version is no news, and a job of this run may have come meanwhile.
        if published and driver.spec.lineage == self._lineage:
            self._published, self._fleet.lineage = result.finish.version, self._lineage
        for worker in sorted(result.finish.silent):
            session = driver.sessions[worker]
            if self._sessions.get(worker) is session:
                reasons = result.finish.reasons
                self._set_aside(
                    session, reasons.get(session.agent.hello.group, f"{worker}: no answer")
                )
        return self._conclude(driver, result)

    def _on_phase(self, version: int, phase: Phase, reserves_in: Phase) -> None:
        if phase is Phase.WRITE and self._copied is not None:
            self._copied.set()
        if phase is reserves_in:
            # On disk before any engine can serve it.
            self._journal_round(JournalKind.PUBLISHING, version, ())
            self._reserved = version
        tell(self._phase_listeners, version, phase)

    async def _bind_enough(self) -> Binding:
        while True:
            await self._wait_for_engines()
            binding = await self._ensure_bound()
            if len(binding.engines) >= self._config.min_engines:
                return binding  # else some were refused on the way: wait for others

    async def _wait_for_engines(self) -> None:
        needed, deadline_s = self._config.min_engines, self._config.deadlines.fleet_s

        def there() -> int:
            return len(self._fleet.writable_engines())

        def refused() -> list[tuple[str, str]]:
            return sorted({*self._refusals.values()})

        await self._changes.until(
            lambda: there() >= needed,
            deadline_s,
            lambda: (
                f"publish: needs {needed} engines, {there()} were there after {deadline_s} s"
                + "".join(f"; {engine} was refused: {why}" for engine, why in refused())
            ),
        )

    def _conclude(self, driver: RoundDriver, result: RoundResult) -> UpdateReport:
        """Put on record, and in the fleet, what a round leaves behind."""
        binding, finish, report = driver.binding, result.finish, result.report()
        self._note_outcomes(driver, result)
        self._record_quarantine()
        is_published = finish.outcome is RoundOutcome.PUBLISHED
        if binding.replicated is not None:
            self._comparisons.conclude(
                compare_s=report.compare_s, update_s=report.update_s, is_published=is_published
            )
        if is_published:
            self._note_speeds(binding, report.engines, finish.wire_s)
            self._journal_outcome(JournalKind.PUBLISHED, finish.version, report.engines)
        else:
            self._journal_outcome(JournalKind.ROUND_ENDED, finish.version, (), finish.reason)
        return msgspec.structs.replace(report, transports=binding.links_by_transport)

    def _note_speeds(
        self, binding: Binding, engines: Sequence[str], wire_s: Mapping[str, float]
    ) -> None:
        """Note what each link reached: its bytes, over the seconds that its source spent on all of its links."""
        known = {} if self._binding is None else self._binding.links
        self._reached = {link: gbps for link, gbps in self._reached.items() if link in known}
        served = {worker for name in engines for worker in binding.engines[name]}
        self._reached |= {
            (source, worker): nbytes / wire_s[source] / 1e9
            for (source, worker), nbytes in binding.links.items()
            if worker in served and wire_s.get(source, 0.0) > 0
        }

    def _note_outcomes(self, driver: RoundDriver, result: RoundResult) -> None:
        """Note who serves what, who may hold two versions, and whose bytes are still under way."""
        finish, fleet = result.finish, self._fleet
        binding, round_id = driver.binding, driver.round_id
        for name, outcome in finish.engines.items():
            bound = binding.identities_of(binding.engines[name])
            if outcome is EngineOutcome.QUARANTINED:
                fleet.quarantine(bound)
            group = fleet.group_of(name)
            # A process that came meanwhile under a name of the round took no part in it.
            if group is None or group.identities != bound:
                continue
            group.mixed_weights |= name in finish.mixed
            group.left_out = finish.reasons.get(name, "")
            if outcome is EngineOutcome.PUBLISHED:
                group.version, group.lineage = finish.version, driver.spec.lineage
                group.mixed_weights = False
                for agent in group.agents.values():
                    agent.num_late = 0
        incarnations = dict(binding.signature)
        for source, engines in finish.unsettled.items():
            reached = binding.identities_of(
                w for engine in engines for w in binding.engines[engine]
            )
            fleet.hold((source, incarnations[source]), round_id, reached)
        for late in result.late:
            if late.worker in finish.unsettled:
                identity = (late.worker, incarnations[late.worker])
                fleet.settle(identity, round_id, late.seq, late.result)

    def note_given_up(self, worker: str, reason: str) -> None:
        """A rank did not go on, though it was told as often as is tried."""
        self._journal_outcome(JournalKind.NOT_RESUMED, self._published, (worker,), reason)

    def _record_quarantine(self) -> None:
        """A controller that is started after this one must not have those written either."""
        for worker, incarnation in sorted(
            self._fleet.quarantined - self._journal.summary.quarantined.keys()
        ):
            self._journal_outcome(JournalKind.QUARANTINED, self._reserved, (worker,), incarnation)

    def _journal_outcome(
        self, kind: JournalKind, version: int, engines: tuple[str, ...], detail: str = ""
    ) -> None:
        """What is done cannot be undone for want of a disk; PUBLISHING is on it already."""
        try:
            self._journal_round(kind, version, engines, detail)
        except OSError as error:
            _log.error("journal: %s of version %s is not recorded: %s", kind, version, error)

    def _journal_round(
        self, kind: JournalKind, version: int, engines: tuple[str, ...], detail: str = ""
    ) -> None:
        self._journal.append(JournalEntry(kind, *self._round_id, version, engines, detail))

    def spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Have the loop do `work`, until the coordinator is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._is_closed:  # connections end after it: what their loss begins must not last
            task.cancel()
        return task

    async def close(self) -> None:
        """Stop rounds and close every connection. Idempotent."""
        await self._pushes.close()
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Side by side: an agent that does not answer costs its deadline, and each would.
        closing = (session.close() for session in list(self._sessions.values()))
        await asyncio.gather(*closing, return_exceptions=True)
        self._journal.close()


def _failed(version: int, reason: str) -> UpdateReport:
    """The report of a version for which no round was begun."""
    return UpdateReport(version=version, outcome=RoundOutcome.FAILED, reason=reason)


def _told_to_trainers(report: UpdateReport) -> UpdateReport:
    """Without what connecting most of many ranks cost: told to each of them it grows with their square."""
    slowest = sorted(report.bound, key=lambda worker: -report.bound[worker].bind_s)
    told = {worker: report.bound[worker] for worker in slowest[:TOLD_COSTS]}
    return msgspec.structs.replace(report, bound=told)
