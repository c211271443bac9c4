"""The second clock: when all trainer ranks stand still with a version, it becomes a round.

The coordinator owns what a controller knows of its fleet, and runs one round at a time. Who is in the fleet
is the affair of `members`, what of it is bound that of `connector`, and who is behind that of `recovery`.
Everything happens in one event loop; nothing here is shared with rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar, final

import msgspec

from windlass.config import ControlConfig
from windlass.errors import PeerTimeout, ProtocolError, RoundAborted
from windlass.layout.naming.patterns import patterns_of, said
from windlass.net.logs import log_fields
from windlass.net.messages import Reply
from windlass.planning.planner import plan_transfer
from windlass.updates.binding import Binding, Planner
from windlass.updates.changes import Changes, tell
from windlass.updates.comparisons import Comparisons
from windlass.updates.connector import Connector
from windlass.updates.driver import RoundDriver
from windlass.updates.fleet import Agent, EngineInfo
from windlass.updates.journal import JournalKind
from windlass.updates.links import Link
from windlass.updates.members import Members
from windlass.updates.messages import Announce, Result, Withdraw
from windlass.updates.publish_requests import (
    KEPT_REPORTS,
    CalledUpdate,
    PendingPublish,
    PublishRequests,
)
from windlass.updates.recovery import CatchUps, ResumeRetries
from windlass.updates.report import (
    RoundOutcome,
    UpdateReport,
    failed_report,
    report_of,
    told_to_trainers,
)
from windlass.updates.rounds import AgentLost, Finish, Phase, RoundSpec, unchanged_reason
from windlass.updates.run import Run
from windlass.updates.session import AgentSession
from windlass.wording import listed

_log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_ATTEMPTS_WITHOUT_ENGINES = 3
"""Times that one version is tried again after all engines have ended in its round."""


NAME_MISSING_S = 15.0
"""Seconds between the log lines that name the trainer ranks that a publish waits for."""


@final
class Coordinator:
    """Turns announced versions into rounds, one at a time.

    Args:
        config: mode, deadlines, retries.
        journal_path: where rounds are recorded; None keeps them in memory.
        planner: compiles plans; a parameter so that tests can fail it.

    Attributes:
        run: which versions are out. fleet: who is connected, and what they hold.
        members: their connections. connector: what of the fleet is bound. catch_ups: who is behind.
        changes: wakes up whoever waits for the fleet or for a version.
        lock: held while a round runs, or the fleet is bound.
        reports: of the newest `KEPT_REPORTS` updates; `num_updates` counts all.

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
        self.config = config
        self.run = Run(journal_path)
        self.fleet = self.run.fleet
        self.changes = Changes()
        self.members = Members(self, config)
        self.connector = Connector(self, config, planner)
        self.catch_ups = CatchUps(self, config, planner)
        self._resume_retries = ResumeRetries(self, config.deadlines)
        self._requests = PublishRequests()
        # Logs the trainer ranks that a publish waits for.
        self._naming: asyncio.TimerHandle | None = None
        self._comparisons = Comparisons(config.compare_share)
        self.lock = asyncio.Lock()
        self._driver: RoundDriver | None = None
        self._copied: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self.is_ending = False
        self._update_listeners: list[Callable[[UpdateReport], None]] = []
        self._phase_listeners: list[Callable[[int, Phase], None]] = []
        self._still: list[Callable[[], bool]] = []
        self.num_updates = 0
        # Of the links of the version that was published last.
        self._digests: Mapping[Link, str] = {}
        self.reports: deque[UpdateReport] = deque(maxlen=KEPT_REPORTS)

    # --- what others ask ---------------------------------------------------------------------

    @property
    def in_round(self) -> bool:
        """Whether engines are being updated now; those of the round are not routable meanwhile."""
        return self._driver is not None

    def routable(self) -> tuple[EngineInfo, ...]:
        """Engines that may be given traffic: complete, whole, at the published version."""
        return self.fleet.routable()

    def on_update(self, listener: Callable[[UpdateReport], None]) -> None:
        """Call `listener` in the loop after every round."""
        self._update_listeners.append(listener)

    def on_phase(self, listener: Callable[[int, Phase], None]) -> None:
        """Call `listener(version, phase)` in the loop when a round enters a phase."""
        self._phase_listeners.append(listener)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the loop when engines come, go, or change version."""
        self.changes.subscribe(callback)

    def stands_still_if(self, holds: Callable[[], bool]) -> None:
        """Add a condition under which all trainer ranks wait, with the weights that they published last."""
        self._still.append(holds)

    @property
    def trainers_stand_still(self) -> bool:
        """Whether all trainer ranks are known to wait with the weights of the published version."""
        trainers = self.fleet.trainers()
        return (
            trainers is not None
            and trainers.complete
            and trainers.identities == self.members.published_by
            and any(holds() for holds in self._still)
        )

    def serve_again(self) -> None:
        """Bring engines up from the trainers if no engine serves the published version any more."""
        if self.fleet.unserved:
            self.catch_ups.settle_soon()

    # --- what members say, and what their coming and going means ------------------------------

    def announced(self, session: AgentSession, frame: Announce) -> None:
        """A trainer rank stands still with a version; the last one begins the update.

        Raises:
            ProtocolError: it is no trainer rank.
        """
        trainers, hello = self.fleet.trainers(), session.agent.hello
        if trainers is None or (hello.group, hello.role) != (trainers.name, trainers.role):
            raise ProtocolError(f"{session.peer}: only a trainer may announce a version")
        pending = PendingPublish(
            trainer=session.agent.identity, version=frame.version, attempt=frame.attempt
        )
        report = self._requests.receive(pending)
        if report is not None:
            self.spawn(self.members.report_to(session.agent.identity, report))
        elif (
            trainers.complete
            and self._requests.num_waiting >= trainers.world_size  # else nobody is asked, each time
            and (all_of_them := self._requests.pop_all(trainers.workers))
        ):
            self._stop_naming()
            with log_fields(version=frame.version):  # which the new task keeps
                self.spawn(self._update(all_of_them))
        elif self._naming is None:
            self._naming = self._name_missing_later()

    def _name_missing_later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(NAME_MISSING_S, self._name_missing_ranks)

    def _name_missing_ranks(self) -> None:
        """Log the ranks that a publish waits for, and again later while a rank waits."""
        self._naming = None
        if self._requests.num_waiting:
            if missing := self._missing_ranks():
                _log.warning("publish waits for %s", missing)
            self._naming = self._name_missing_later()

    def _stop_naming(self) -> None:
        if self._naming is not None:
            self._naming.cancel()
            self._naming = None

    def _missing_ranks(self) -> str:
        """Return the trainer ranks that have not announced a version, each with the reason; empty if all have."""
        trainers = self.fleet.trainers()
        workers = () if trainers is None else trainers.workers
        idle = [worker for worker in workers if not self._requests.is_waiting(worker)]
        reasons = ((self.fleet.away(), "not connected"), (idle, "has not called publish"))
        return "; ".join(f"{listed(names)} ({reason})" for names, reason in reasons if names)

    def withdraw(self, session: AgentSession, frame: Withdraw) -> None:
        """End the announcement of a trainer rank whose caller waits no longer, and send it the missing ranks."""
        missing = self._missing_ranks()
        given_up = self._requests.give_up(session.peer, frame.attempt)
        if given_up is not None:
            report = failed_report(given_up.version, f"it waited for {missing}" if missing else "")
            report = msgspec.structs.replace(report, attempt=frame.attempt)
            self.spawn(self.members.report_to(session.agent.identity, report))

    def replied(self, session: AgentSession, reply: Reply[Result]) -> None:
        """An agent has answered a command."""
        if self._resume_retries.heard(session.agent, reply):
            self.changes.notify()
        if self._driver is not None:
            self._driver.on_reply(session, reply)

    def lost(self, agent: Agent, reason: str, *, ended: bool) -> None:
        """An agent is not connected any more; `ended` by its own side."""
        self._requests.withdraw(agent.hello.worker)
        self._resume_retries.forget(agent.identity)
        self.catch_ups.lost(agent, ended=ended)
        if self._driver is not None:
            self._driver.post(AgentLost(agent.hello.worker, reason))

    # --- an update ---------------------------------------------------------------------------

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
            trainers = self.fleet.trainers()
            if trainers is None or not trainers.complete:
                return ()
            agents = trainers.agents.values()
            return tuple(PendingPublish(trainer=a.identity, version=version) for a in agents)

        try:
            await self.changes.until(
                lambda: bool(ranks()),
                deadline_s,
                lambda: (
                    f"publish: all trainer ranks must be connected within {deadline_s} s, missing: "
                    f"{listed(self.fleet.away()) or 'all'}"
                ),
            )
        except PeerTimeout as error:
            return failed_report(version, str(error))
        return await self._update(ranks(), copied)

    async def _update(
        self, ranks: tuple[PendingPublish, ...], copied: asyncio.Event | None = None
    ) -> UpdateReport:
        version = max(rank.version for rank in ranks)
        async with self.lock:
            self._copied = copied
            attempts = self._attempt_until_whole(ranks, version)
            report = await report_of(lambda: version, attempts)
        told = told_to_trainers(report)
        answers = [(rank.trainer, self._requests.answer(rank, told)) for rank in ranks]
        self.end_update(report)
        for trainer, answer in answers:
            await self.members.report_to(trainer, answer)
        return report

    def end_update(self, report: UpdateReport) -> None:
        """An update has ended, whoever drove it: everybody who looks at updates is told."""
        self.reports.append(report)
        self.num_updates += 1
        self.changes.notify()
        tell(self._update_listeners, report)
        if report.left_out:
            self.catch_ups.settle_soon()

    async def _attempt_until_whole(
        self, ranks: tuple[PendingPublish, ...], version: int
    ) -> UpdateReport:
        """Try again where all engines ended in the round, or where the group of a collective broke.

        Trainers stand still all the while. One-sided writes and files need no second attempt for one
        engine: there an engine that fails takes no other one with it.
        """
        report = await self._attempt(ranks, version)
        for _ in range(MAX_ATTEMPTS_WITHOUT_ENGINES):
            if report.outcome is RoundOutcome.PUBLISHED or not self._have_ended(report.left_out):
                break
            _log.warning("version %s: waiting for an engine: %s", version, report.reason)
            # Engines may have been told to serve it: it is the same version still.
            report = await self._attempt(ranks, version, is_again=True)
        if not self.config.backend.traits.collective:
            return report
        for _ in range(self.config.max_rewrites):
            if report.outcome is RoundOutcome.PUBLISHED or Phase.PUBLISH in report.phase_s:
                break
            if report.unchanged:  # another attempt would send the same
                break
            _log.warning("version %s: group formed anew: %s", report.version, report.reason)
            self.connector.binding = None
            report = await self._attempt(ranks, version)
        if report.outcome is not RoundOutcome.PUBLISHED or report.left_out:
            self.connector.binding = None
        return report

    def _have_ended(self, left_out: Collection[str]) -> bool:
        """Return whether no engine is there any more after a round that left these out."""
        bound = self.connector.binding
        return (
            bool(left_out)
            and bound is not None
            and all(self._has_ended(bound, name) for name in bound.engines)
        )

    def _has_ended(self, bound: Binding, name: str) -> bool:
        engine = self.fleet.group_of(name)
        return engine is None or engine.identities.isdisjoint(
            bound.identities_of(bound.engines[name])
        )

    async def _attempt(
        self, ranks: tuple[PendingPublish, ...], version: int, *, is_again: bool = False
    ) -> UpdateReport:
        versions = {rank.trainer[0]: rank.version for rank in ranks}
        if len(set(versions.values())) > 1:
            return failed_report(version, f"trainer ranks announced different versions: {versions}")
        if not is_again and (refusal := self.run.refusal(version)):
            return failed_report(version, refusal)
        binding = await self.connector.until_enough()
        moved = {rank.trainer for rank in ranks} - binding.signature
        if moved or len(ranks) != len(binding.trainers):
            names = sorted(name for name, _ in moved)
            said = (
                f"new are {names}"
                if names
                else f"{len(ranks)} announced, {len(binding.trainers)} are here"
            )
            return failed_report(
                version, f"trainer ranks came or went since they announced: {said}"
            )
        costs = self.connector.pop_costs()
        report = await self.run_round(version, self.run.lineage, binding, is_new=True)
        if report.outcome is RoundOutcome.PUBLISHED:
            self.members.published_by = binding.identities_of(binding.trainers)
        unused, kept = _num_by_pattern(binding.unused), _num_by_pattern(binding.stays)
        return msgspec.structs.replace(report, bound=costs, unused=unused, kept=kept)

    # --- a round -----------------------------------------------------------------------------

    async def run_round(
        self, version: int, lineage: str, binding: Binding, *, is_new: bool = False
    ) -> UpdateReport:
        """Have the sources of `binding` write `version`, of the run `lineage`, into its engines.

        `is_new`: trainers publish the version; otherwise engines are brought up to it.

        Raises:
            RoundAborted: the round cannot be recorded.
        """
        replicated, turn, period = self._comparisons.of_round(version, binding)
        spec = RoundSpec(
            version=version,
            lineage=lineage,
            config=self.config,
            traits=self.config.backend.traits,
            trainers=binding.trainers,
            engines=binding.engines,
            links=frozenset(binding.links),
            relay=binding.relay,
            replicated=replicated,
            turn=turn,
            period=period,
            sent_before=self._sent_before(binding) if is_new else None,
        )
        return await self.finish_round(self.start_round(spec, binding))

    def _sent_before(self, binding: Binding) -> dict[Link, str]:
        """Return the digests of the links to engines that serve what these trainers published last."""
        if self.members.published_by != binding.identities_of(binding.trainers):
            return {}
        serving = {engine.name for engine in self.routable()}
        workers = {w for name, own in binding.engines.items() if name in serving for w in own}
        return {link: digest for link, digest in self._digests.items() if link[1] in workers}

    def start_round(self, spec: RoundSpec, binding: Binding) -> RoundDriver:
        """Put a round on record and make it the running one; `finish_round` must follow.

        Raises:
            RoundAborted: it cannot be recorded.
        """
        round_id = self.run.new_round()
        try:
            self.run.record(JournalKind.ROUND_BEGAN, spec.version, tuple(binding.engines))
        except OSError as error:
            raise RoundAborted(f"the round cannot be recorded: {error}") from error
        # Of a push no bytes are live before APPLY: what cannot be recorded then changes nothing.
        pushed = spec.traits.driven_by_trainer
        reserves_in = Phase.APPLY if pushed else Phase.PUBLISH
        self._driver = driver = RoundDriver(
            spec,
            binding,
            round_id=round_id,  # a Hello may bring a higher epoch meanwhile
            sessions=self.members.sessions,
            clock=time.perf_counter,
            on_phase=lambda phase: self._on_phase(driver.version, phase, reserves_in),
        )
        return driver

    def _on_phase(self, version: int, phase: Phase, reserves_in: Phase) -> None:
        if phase is Phase.WRITE and self._copied is not None:
            self._copied.set()
        if phase is reserves_in:
            self.run.reserve(version)
        tell(self._phase_listeners, version, phase)

    async def finish_round(self, driver: RoundDriver) -> UpdateReport:
        """Drive a round to its end; put on record, and in the fleet, what it leaves behind."""
        try:
            finish = await driver.run()
        finally:
            self._driver = None
        report, binding = finish.report, driver.binding
        is_published = report.outcome is RoundOutcome.PUBLISHED
        # A copy of another run's version is no news, and a job of this run may have come meanwhile.
        if is_published and driver.spec.lineage == self.run.lineage:
            self.fleet.published, self.fleet.lineage = report.version, self.run.lineage
        self.members.set_silent_aside(driver.sessions, finish.silent, report.left_out)
        self.fleet.note_round(finish, binding, driver.round_id, driver.spec.lineage, driver.late)
        self.run.record_quarantine()
        if binding.replicated is not None:
            self._comparisons.conclude(
                compare_s=report.compare_s, update_s=report.update_s, is_published=is_published
            )
        if is_published and driver.spec.sent_before is not None:
            self._digests = finish.digests
        if driver.spec.sent_before is not None:
            report = self._with_suspicions(report, finish)
        if is_published:
            self.connector.note_carried(finish.carried)
            self.run.record_outcome(JournalKind.PUBLISHED, report.version, report.engines)
        else:
            self.run.record_outcome(JournalKind.ROUND_ENDED, report.version, (), report.reason)
        return report

    def _with_suspicions(self, report: UpdateReport, finish: Finish) -> UpdateReport:
        """Return the report with what looks like a mistake of the trainer; warn of it when it begins."""
        last = self.reports[-1] if self.reports else report
        unchanged = last.unchanged + 1 if finish.is_unchanged else 0
        if unchanged == 1 and report.outcome is RoundOutcome.PUBLISHED:
            _log.warning("%s", unchanged_reason(report.version))
        found = finish.non_finite
        if found and not last.non_finite:
            _log.warning(
                "version %d: %s of the trainers contain NaN or infinity",
                report.version,
                said(found),
            )
        return msgspec.structs.replace(
            report, unchanged=unchanged, non_finite=_num_by_pattern(found)
        )

    # --- tasks -------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Have the loop do `work`, until the coordinator is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._is_closed:  # connections end after it: what their loss begins must not last
            task.cancel()
        return task

    def expect_departures(self) -> None:
        """Note that the job is over: from now on, a member that leaves is not worth a line of the log."""
        self.is_ending = True

    async def close(self) -> None:
        """Stop rounds and close every connection. Idempotent."""
        self._is_closed = True
        self.expect_departures()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Side by side: an agent that does not answer costs its deadline, and each would.
        closing = (session.close() for session in list(self.members.sessions.values()))
        await asyncio.gather(*closing, return_exceptions=True)
        self._stop_naming()
        self.run.journal.close()


def _num_by_pattern(names: Collection[str]) -> dict[str, int]:
    return {pattern: len(of) for pattern, of in patterns_of(sorted(names)).items()}
