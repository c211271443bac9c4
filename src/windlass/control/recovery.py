"""Recovery: bring engines that are behind up to the published version, and resume engines that stayed paused.

`CatchUps` brings a newcomer (an engine that is behind) up to the published version. A trainer changes its weights after
each publish, but an engine keeps its weights until the next version. The newcomer therefore gets the weights from an
engine that serves the version (the donor), in an ordinary round whose sources are the ranks of the donor. No other
engine is paused, and the trainers take no part.

If no engine serves the version, the trainers send it again while they wait for rollouts. They still have the published
weights, because without engines no rollouts arrive and the trainers make no step.

`ResumeRetries` repeats the command to resume for engine ranks that did not resume, for example because the engine's own
server did not answer. Their weights are whole and of one version. The repetitions end when the rank resumes, when it
loses its connection, or after `MAX_ATTEMPTS` commands. Until the rank resumes, its engine gets no traffic.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from windlass.config import ControlConfig, PhaseDeadlines
from windlass.control.backend import Backend
from windlass.control.changes import Changes, Tasks
from windlass.control.connect_messages import Identity
from windlass.control.connector import Connector
from windlass.control.delivery import reply_budget_s
from windlass.control.engine_channel import WELCOME_SEQ
from windlass.control.engine_state import EngineStatus
from windlass.control.fleet import PROBE_SEQ, Agent, Group, HalfPublished
from windlass.control.journal import JournalKind
from windlass.control.members import Members
from windlass.control.messages import SLEEPS, Abort, Done, Publish, Result
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.round_runner import RoundRunner
from windlass.control.run import Run
from windlass.control.session import RankCaller, describe, failures_of
from windlass.errors import PeerUnreachable, PlanError, WindlassError
from windlass.layout.manifest import Role, ShardManifest
from windlass.net.clock import Backoff
from windlass.net.messages import Envelope, Reply
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import Planner

_log = logging.getLogger(__name__)
KEPT_ATTEMPTS = 1024
"""Number of engines whose attempts the controller remembers.

It forgets the oldest engines first, because most of them have left for good.
"""
BACKOFF = Backoff(1.0, 30.0)
MAX_ATTEMPTS = 8
"""Maximum number of attempts to bring an engine up to one version, and of repeated commands to resume a rank.

The number is limited, because no other round runs during an attempt.
"""


@dataclass(slots=True)
class _Attempts:
    """Attempts to bring one engine up to one version.

    Attributes:
        newcomer: processes of the engine.
        version: the version.
        clean: True if the engine had no mixed weights before the first attempt. Since then, only these attempts can have
            written into the engine, and no trainer.
        unable: donors from which the engine cannot get the same bytes as from the trainers, and the reason.
        failures: donor -> number of failed attempts with this donor.
        due_s: earliest time of the next attempt, on the loop's clock.
    """

    newcomer: frozenset[Identity]
    version: int
    clean: bool
    unable: dict[frozenset[Identity], str] = field(default_factory=dict)
    failures: Counter[frozenset[Identity]] = field(default_factory=Counter)
    due_s: float = 0.0


@final
class CatchUps:
    """Rounds that bring engines up to the published version. The methods run in the controller's event loop.

    A failed attempt is repeated after a delay, with the donor that has failed least often. An engine gets at most
    `MAX_ATTEMPTS` attempts for a version. When a rank of the engine loses its connection, the count starts again. No
    other round runs during an attempt.

    Args:
        rounds: runs the rounds.
        run: versions, journal and fleet.
        members: connections of the agents.
        connector: bindings of the fleet.
        changes: notified when an engine was brought up.
        tasks: run the attempts.
        config: deadlines.
        backend: backend that moves the bytes.
        planner: compiles plans between two engines.
    """

    def __init__(
        self,
        rounds: RoundRunner,
        run: Run,
        members: Members,
        connector: Connector,
        changes: Changes,
        tasks: Tasks,
        config: ControlConfig,
        backend: Backend,
        planner: Planner,
    ) -> None:
        self._rounds, self._run, self._fleet = rounds, run, run.fleet
        self._members, self._connector = members, connector
        self._changes, self._tasks = changes, tasks
        self._config, self._backend, self._planner = config, backend, planner
        self._attempts: dict[str, _Attempts] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._is_due = False
        self._conditions: list[Callable[[], bool]] = []

    # --- trainers that wait with the published weights ---------------------------------------

    def add_standstill_check(self, holds: Callable[[], bool]) -> None:
        """Add a condition. `trainers_stand_still` is True only if at least one of these conditions holds.

        Args:
            holds: function that returns True only while all trainer ranks wait and keep the weights that they published
                last.
        """
        self._conditions.append(holds)

    @property
    def trainers_stand_still(self) -> bool:
        """True if all trainer ranks wait and keep the weights of the published version. False if this is uncertain."""
        trainers = self._fleet.trainers()
        return (
            trainers is not None
            and trainers.complete
            and trainers.identities == self._fleet.published_by
            and any(holds() for holds in self._conditions)
        )

    def serve_again(self) -> None:
        """If a version is published and no engine serves it, let the trainers send it again; see `bring_up`."""
        if self._fleet.unserved:
            self.bring_up_soon()

    # --- bringing engines up -----------------------------------------------------------------

    def bring_up_soon(self) -> None:
        """Start a task that waits until no round runs, brings up engines that are behind, and binds the fleet.

        Do not start a second task while one task still waits. Also send a probe to each source that has not answered a
        write. Until the source answers, no round writes to the engines that its bytes may still reach.
        """
        if self._fleet.held:
            self._tasks.spawn(self._members.probe_held())
        if not self._is_due:
            self._is_due = True
            self._tasks.spawn(self._bring_up_and_bind())

    async def _bring_up_and_bind(self) -> None:
        """Wait for the lock of the rounds, bring up the engines that are behind, and bind the fleet for the next round."""
        async with self._rounds.lock:
            self._is_due = False
            await self.bring_up()
            await self._connector.bind_ahead()

    async def bring_up(self) -> None:
        """Bring up every writable engine that does not serve the published version, one at a time.

        First call `complete_half_published`. If no engine serves the version then, let the trainers send it again, unless
        they may have changed their weights (`trainers_stand_still` is False). The caller must hold the lock of the rounds.
        """
        await self.complete_half_published()
        if not any(map(self._fleet.serves, self._fleet.engines())):
            await self._bring_up_from_trainers()
        for engine in self._fleet.writable_engines():
            await self._bring_up(engine)

    async def complete_half_published(self) -> None:
        """Complete the engines in which only some ranks got the command to serve a version; see `Fleet.half_published`.

        The main loops of some ranks of such an engine are blocked, and the next pause would wait for the other ranks in
        vain. The caller must hold the lock of the rounds.
        """
        for name, half in self._fleet.half_published().items():
            await self._complete_publish(name, half)

    async def _complete_publish(self, name: str, half: HalfPublished) -> None:
        """Tell the ranks of an engine to serve the version that all of them have.

        The first rank gets the command last: it reports to the engine's server, which then accepts requests. If a rank does
        not serve the version, the engine keeps its state, and the next round writes all its weights.
        """
        fleet, version = self._fleet, half.version
        engine = fleet.group_of(name)
        if engine is None:
            return
        # The ranks resume in two steps, within one deadline.
        step_s = self._config.deadlines.publish_s / 2
        before, first = engine.identities, engine.workers[:1]
        command = Publish(version, reply_budget_s(step_s), fleet.lineage)
        caller = RankCaller(self._members.sessions, self._run.new_epoch())
        failures: dict[str, Result | WindlassError] = {}
        for step in (set(half.workers).difference(first), set(half.workers).intersection(first)):
            if not failures:
                answers = await caller.call(dict.fromkeys(sorted(step), command), step_s)
                failures = failures_of(answers, Done)
        if not failures and engine.identities == before and engine.complete:
            is_new = version > fleet.published
            fleet.note_all_serve(engine, version)
            if is_new:
                self._run.record_outcome(JournalKind.PUBLISHED, version, (name,))
            _log.info("%s: all ranks serve version %s now", name, version)
            self._changes.notify()
            return
        reason = "; ".join(f"{worker}: {describe(answer)}" for worker, answer in failures.items())
        _log.warning(
            "%s: only some ranks serve version %s: %s",
            *(name, version, reason or "a rank has disconnected"),
        )

    async def _bring_up_from_trainers(self) -> None:
        """Run a round in which the trainers send the published version again to all writable engines.

        Do nothing unless `trainers_stand_still`. After a failed round, do nothing until a delay has passed. Give up after
        `MAX_ATTEMPTS` failed rounds.
        """
        fleet = self._fleet
        trainers, engines = fleet.trainers(), fleet.writable_engines()
        if fleet.published < 0 or trainers is None or not engines:
            return
        if not self.trainers_stand_still:
            return
        members = trainers.identities.union(*(engine.identities for engine in engines))
        attempts = self._attempts_of(trainers.name, members, clean=True)
        if (
            attempts.failures.total() >= MAX_ATTEMPTS
            or asyncio.get_running_loop().time() < attempts.due_s
        ):
            return
        names = ", ".join(engine.name for engine in engines)
        _log.info("%s: the trainers send this version again to %s", fleet.unserved, names)
        try:
            # Boxes that several trainers hold were compared already when the version was published.
            binding = replace(await self._connector.ensure_bound(), replicated=None)
            report = await self._rounds.run_round(fleet.published, fleet.lineage, binding)
        except WindlassError as error:
            self._failed(trainers.name, attempts, trainers.identities, str(error))
            return
        self._changes.notify()
        if report.outcome is RoundOutcome.PUBLISHED:
            self._attempts.pop(trainers.name, None)
            return
        self._connector.drop_if_spent(report)
        self._failed(trainers.name, attempts, trainers.identities, report.reason)

    def lost(self, agent: Agent, *, ended: bool) -> None:
        """Reset the count of failed attempts for the group of a rank that has lost its connection.

        If the lost rank has not answered a write, its hold excludes the destinations of this write from rounds. If `ended`
        is True for an engine rank, also start a task that drops this hold after the deadline of writes, unless the process
        has connected again (`presume_ended`).

        Args:
            agent: the rank.
            ended: whether the rank's process, not the controller, closed the connection.
        """
        attempts = self._attempts.get(agent.hello.group)
        if attempts is not None:
            attempts.failures.clear()
            attempts.due_s = 0.0
        if ended and agent.hello.role is Role.ENGINE:
            self._tasks.spawn(self.presume_ended(agent.identity))

    async def _bring_up(self, newcomer: Group) -> None:
        """Copy the published version from another engine to `newcomer`, unless it serves this version already.

        Make one attempt. Do nothing if too many attempts have failed, or if the delay after the last failure has not
        passed. If no engine can be the donor, or if an absent trainer may still be writing into the engine, record this as
        the reason why the engine waits (`Group.catch_up`). After a failure, start a task that makes the next attempt later.
        """
        version = self._fleet.published
        if self._fleet.serves(newcomer):
            self._attempts.pop(newcomer.name, None)
            self._note(newcomer.name, "")
            return
        is_mixed = newcomer.status is EngineStatus.MIXED_WEIGHTS
        attempts = self._attempts_of(newcomer.name, newcomer.identities, clean=not is_mixed)
        # Before the first version no engine can be a donor, so skip the search. Its cost is
        # quadratic in the number of engines.
        if version < 0 or attempts.failures.total() >= MAX_ATTEMPTS:
            return
        if asyncio.get_running_loop().time() < attempts.due_s:
            return
        trainers = self._fleet.trainers()
        donors = list(filter(self._fleet.serves, self._fleet.engines()))
        candidates = sorted(
            (donor for donor in donors if donor.identities not in attempts.unable),
            key=lambda donor: attempts.failures[donor.identities],
        )
        if not candidates:
            reasons = {attempts.unable[donor.identities]: None for donor in donors}
            self._note_no_donor(newcomer, "; ".join(reasons))
            return
        is_writer_away = trainers is None or not trainers.complete
        if is_mixed and not attempts.clean and is_writer_away:
            away = ", ".join(self._fleet.away()) or "the trainers"
            self._note(newcomer.name, f"it waits for {away}, which may still write into it")
            return
        find, published_from = self._backend.find_donor, self._published_from()
        try:
            donor, plan = await asyncio.to_thread(
                find, newcomer, candidates, published_from, self._planner
            )
        except PlanError as error:
            attempts.unable.update((donor.identities, str(error)) for donor in candidates)
            self._note_no_donor(newcomer, str(error))
            return
        # Read this before the copy, because the group may change during the copy.
        donor_identities = donor.identities
        try:
            report = await self._copy(donor, newcomer, plan)
        except WindlassError as error:
            self._failed(newcomer.name, attempts, donor_identities, str(error))
            return
        if report.outcome is RoundOutcome.PUBLISHED:
            _log.info("%s caught up from %s", newcomer.name, donor.name)
            self._fleet.note_old_tensors(newcomer.name, "")
            self._attempts.pop(newcomer.name, None)
        else:
            self._failed(newcomer.name, attempts, donor_identities, report.reason)

    def _note_no_donor(self, newcomer: Group, reason: str) -> None:
        """Record that an engine waits for the next version, because no other engine can send it the published version.

        Args:
            newcomer: the engine that waits.
            reason: why the engines that serve the version cannot send it; empty if no engine serves it.
        """
        version = self._fleet.published
        why = f"no engine can send it version {version}: {reason or 'no engine serves it'}"
        self._note(newcomer.name, f"it waits for the next version, because {why}")

    def _note(self, name: str, text: str) -> None:
        """Record why an engine does not have the published version. Wake the coroutines that wait if the text has changed."""
        if self._fleet.note_catch_up(name, text):
            self._changes.notify()

    def _published_from(self) -> Sequence[ShardManifest]:
        """Return the manifests of the trainer ranks that published the version; empty if they are not known.

        A controller that started after the publication knows them only if these trainer ranks are connected: they report
        the version that they published. It must not use manifests of other trainers, because their dtypes may differ.
        """
        fleet = self._fleet
        if fleet.published_from:
            return fleet.published_from
        trainers = fleet.trainers()
        past = fleet.published, fleet.lineage
        if trainers is None or any((h.served_version, h.lineage) != past for h in trainers.hellos):
            return ()
        return trainers.manifests

    async def _copy(self, donor: Group, newcomer: Group, plan: TransferPlan) -> UpdateReport:
        """Bind two engines, run a round in which `donor` sends its weights to `newcomer`, and return the report.

        `bind_copy` removes `newcomer` from the fleet's binding. After the round, wake the coroutines that wait for changes.
        """
        fleet = self._fleet
        binding = await self._connector.bind_copy(donor, newcomer, lambda *_: plan)
        report = await self._rounds.run_round(fleet.published, fleet.lineage, binding)
        self._changes.notify()
        return report

    def _attempts_of(self, name: str, processes: frozenset[Identity], *, clean: bool) -> _Attempts:
        """Return the record of attempts for these processes and the published version. Store a new record if needed."""
        known, version = self._attempts.get(name), self._fleet.published
        if known is None or (known.newcomer, known.version) != (processes, version):
            known = _Attempts(processes, version, clean=clean)
            self._attempts[name] = known
            if len(self._attempts) > KEPT_ATTEMPTS:
                del self._attempts[next(iter(self._attempts))]
        return known

    def _failed(
        self, name: str, attempts: _Attempts, donor: frozenset[Identity], reason: str
    ) -> None:
        """Count a failed attempt, and start a task that tries again after a delay.

        If an earlier task for `name` still waits, cancel it.

        After `MAX_ATTEMPTS` failures, log a warning and start no task.
        """
        attempts.failures[donor] += 1
        self._fleet.note_catch_up(name, f"its catch-up failed: {reason}")
        self._changes.notify()
        num_failed = attempts.failures.total()
        delay_s = BACKOFF.after(num_failed)
        attempts.due_s = asyncio.get_running_loop().time() + delay_s
        if num_failed >= MAX_ATTEMPTS:
            _log.warning(
                "catch-up (%s) failed, no further attempt for this version: %s", name, reason
            )
            return
        _log.warning("catch-up (%s) failed, next attempt in %g s: %s", name, delay_s, reason)
        if (waiting := self._waiting.get(name)) is not None:
            # This task waits to repeat an attempt for an earlier version.
            waiting.cancel()
        self._waiting[name] = self._tasks.spawn(self._try_again(name, delay_s))

    async def _try_again(self, name: str, delay_s: float) -> None:
        """Wait for `delay_s` seconds, and start to bring up all engines that are behind.

        `name` is the name of the engine or of the trainer group that failed.
        """
        await asyncio.sleep(delay_s)
        del self._waiting[name]
        self.bring_up_soon()

    async def presume_ended(self, identity: Identity) -> None:
        """Wait for the deadline of writes. If the process is not connected then, drop its hold and bring up engines."""
        await asyncio.sleep(self._config.deadlines.write_s)
        agent = self._fleet.find(identity[0])
        away = agent is None or agent.identity != identity
        if away and self._fleet.release(identity):
            _log.info("%s did not connect again, so its writes count as ended", identity[0])
            self.bring_up_soon()


@final
class ResumeRetries:
    """Repeated commands to engine ranks that did not resume. The methods run in the controller's event loop.

    Args:
        run: versions, journal and fleet.
        members: connections of the agents.
        tasks: run the repetitions.
        lock: held while a round runs.
        deadlines: deadlines of the phases of a round.

    Attributes:
        deadline_s: seconds within which a rank must resume. This is less than the deadlines of PUBLISH and PAUSE, because
            a command to pause waits until the command to resume has ended.
    """

    def __init__(
        self,
        run: Run,
        members: Members,
        tasks: Tasks,
        lock: asyncio.Lock,
        deadlines: PhaseDeadlines,
    ) -> None:
        self._run, self._members, self._tasks, self._lock = run, members, tasks, lock
        self.deadline_s = reply_budget_s(min(deadlines.publish_s, deadlines.pause_s))
        self._retrying: dict[Identity, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._retrying)

    def on_reply(self, agent: Agent, reply: Reply[Result]) -> bool:
        """Store whether an engine rank generates (`Agent.not_resumed`), as its reply says, and update its engine's state.

        If the rank does not generate, start a task that repeats the command to resume. If the rank generates, or sleeps
        until the next round, cancel that task.

        `Done.not_resumed` reports whether the rank generates. Two kinds of `Done` are ignored, because they do not report
        the present state: the answer to a probe, and a stored answer that the rank repeats after it has connected again.

        Returns:
            Whether the rank has changed from generating to not generating, or back.
        """
        result = reply.result
        if not isinstance(result, Done) or agent.hello.role is not Role.ENGINE:
            return False
        is_repeated = reply.round_id <= (agent.hello.epoch, agent.hello.round)
        if reply.seq == PROBE_SEQ or (is_repeated and reply.seq != WELCOME_SEQ):
            return False
        before = agent.not_resumed
        self._run.fleet.note_not_resumed(agent, result.not_resumed)
        if not agent.not_resumed:
            self.forget(agent.identity)
        elif SLEEPS in agent.not_resumed:
            # Only a round wakes this engine, so do not repeat the command.
            self.forget(agent.identity)
        elif agent.identity not in self._retrying:
            _log.warning("%s did not resume: %s", agent.hello.worker, agent.not_resumed)
            self._retrying[agent.identity] = self._tasks.spawn(self._retry(agent))
        return bool(before) is not bool(agent.not_resumed)

    def forget(self, identity: Identity) -> None:
        """Stop the repeated commands to a process that has resumed or lost its connection. Idempotent."""
        if (task := self._retrying.pop(identity, None)) is not None:
            task.cancel()

    async def _retry(self, agent: Agent) -> None:
        """Send an engine rank up to `MAX_ATTEMPTS` commands to resume, each in a new epoch and while no round runs.

        `forget` cancels this task when the rank has resumed. If the rank has not resumed some seconds after the last
        command, log an error and store in the journal that the rank stays paused.
        """
        worker = agent.hello.worker
        for num_told in range(MAX_ATTEMPTS):
            await asyncio.sleep(BACKOFF.after(num_told + 1))
            # A running round may have paused the rank on purpose, so wait for its end.
            async with self._lock:
                again = Abort(f"resume again: {agent.not_resumed}", deadline_s=self.deadline_s)
                try:
                    session = self._members.sessions[worker]
                    await session.send(Envelope(*self._run.new_epoch(), 1, again))
                except PeerUnreachable as error:
                    # When the process connects again, it reports whether it generates.
                    _log.info("%s", error)
        await asyncio.sleep(BACKOFF.after(MAX_ATTEMPTS + 1))
        reason = agent.not_resumed
        _log.error(
            "%s stays paused until the next round, after %s commands to resume: %s",
            worker,
            MAX_ATTEMPTS,
            reason,
        )
        version = self._run.fleet.published
        self._run.record_outcome(JournalKind.NOT_RESUMED, version, (worker,), reason)
