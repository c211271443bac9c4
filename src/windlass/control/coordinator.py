"""The control plane: trainers announce a version, and the coordinator publishes it.

Start reading at `Coordinator._publish`, which calls the steps of a publish in order. The steps are in these modules. A
module imports only modules above it in this list. It calls the modules below through functions that the coordinator
passes to it.

- `run.Run`: versions, the journal, and the fleet (`fleet.Fleet`): the connected ranks and the version that each has.
- `members.Members`: connections of the agents.
- `connector.Connector`: makes the ranks bind a plan: memory and links.
- `round_runner.RoundRunner`: runs rounds (`driver.RoundDriver`, `rounds.RoundMachine`).
- `recovery.CatchUps`: rounds that bring engines to the published version. `recovery.ResumeRetries`: repeated commands
  to resume.

All of this runs in one event loop. Code for rollouts shares no state with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import final

import msgspec

from windlass.config import ControlConfig
from windlass.control.backend import backend_of
from windlass.control.changes import Changes, Tasks, tell
from windlass.control.connector import Connector
from windlass.control.fleet import Agent
from windlass.control.members import MemberEvents, Members
from windlass.control.messages import Announce, Result, Withdraw
from windlass.control.publish_requests import (
    KEPT_REPORTS,
    CalledUpdate,
    MissingRanks,
    PendingPublish,
    PublishRequests,
    check_same_ranks,
    check_same_version,
    until_connected,
)
from windlass.control.recovery import CatchUps, ResumeRetries
from windlass.control.report import (
    RoundOutcome,
    UpdateReport,
    failed_report,
    report_of,
    told_to_trainers,
)
from windlass.control.round_runner import RoundRunner
from windlass.control.round_state import Phase
from windlass.control.rounds import AgentLost
from windlass.control.run import Run
from windlass.control.session import AgentSession
from windlass.control.suspicions import num_by_pattern
from windlass.errors import PeerTimeout, ProtocolError, RoundAborted
from windlass.layout.naming.patterns import said
from windlass.net.logs import log_fields
from windlass.net.messages import Reply
from windlass.planning.planner import Planner, plan_transfer

_log = logging.getLogger(__name__)
MAX_ATTEMPTS_WITHOUT_ENGINES = 3
"""Maximum number of further attempts to publish a version after an attempt in which all engine processes ended."""


@final
class Coordinator:
    """Publisher of the versions that trainers announce. It publishes one version at a time.

    Args:
        config: mode, deadlines, retries.
        journal_path: file for the journal of the rounds; None keeps it in memory.
        planner: compiles plans; a parameter so that tests can make it fail.

    Attributes:
        config: mode, deadlines, retries.
        run, fleet, members, connector, rounds, catch_ups, resume_retries: see the docstring of this module.
        changes: notice of every change of the fleet or of the published version.
        routable, subscribe: see `Fleet.routable` and `Changes.subscribe`.
        tasks: background tasks, which `close` cancels.
        requests: publish requests of the trainer ranks.
        reports: reports of the newest `KEPT_REPORTS` updates, the oldest first.
        num_updates: number of updates since the controller started, including failed updates.

    Raises:
        ConfigError: the journal cannot be opened, read or written.
    """

    def __init__(
        self,
        config: ControlConfig,
        *,
        journal_path: Path | None = None,
        planner: Planner = plan_transfer,
    ) -> None:
        self.config = config
        self.run = run = Run(journal_path)
        self.fleet = run.fleet
        self.changes, self.tasks = changes, tasks = Changes(), Tasks()
        self.routable, self.subscribe = run.fleet.routable, changes.subscribe
        events = MemberEvents(
            announced=self._announced,
            gave_up=self._gave_up,
            replied=self._replied,
            lost=self._lost,
            bring_up=lambda: self.catch_ups.bring_up_soon(),  # noqa: PLW0108 - set below
            in_round=lambda: self.in_round,
        )
        self.members = members = Members(run, changes, tasks, config, events)
        backend = backend_of(config.backend)
        self.connector = bound = Connector(run, members, changes, config, backend, planner)
        self.rounds = rounds = RoundRunner(run, members, bound, config, backend)
        self.catch_ups = CatchUps(
            rounds, run, members, bound, changes, tasks, config, backend, planner
        )
        self.resume_retries = ResumeRetries(run, members, tasks, rounds.lock, config.deadlines)
        self.requests = PublishRequests()
        self._missing = MissingRanks(self.fleet, self.requests)
        self._update_listeners: list[Callable[[UpdateReport], None]] = []
        self.num_updates = 0
        self.reports: deque[UpdateReport] = deque(maxlen=KEPT_REPORTS)

    # --- questions and listeners -------------------------------------------------------------

    @property
    def in_round(self) -> bool:
        """Whether a round runs now, including driven rounds and catch-ups."""
        return self.rounds.driver is not None

    def on_update(self, listener: Callable[[UpdateReport], None]) -> None:
        """Call `listener(report)` in the event loop after every update, even if the update failed."""
        self._update_listeners.append(listener)

    # --- a publish: who asks for it ----------------------------------------------------------

    def _announced(self, session: AgentSession, frame: Announce) -> None:
        """Record that a trainer rank has announced a version. If all trainer ranks have announced it now, publish it.

        If the rank repeats an announcement whose update has already ended, send the report of this update again.

        Raises:
            ProtocolError: the sender is not a trainer rank.
        """
        trainers, hello = self.fleet.trainers(), session.agent.hello
        if trainers is None or (hello.group, hello.role) != (trainers.name, trainers.role):
            raise ProtocolError(f"{session.peer}: only a trainer may announce a version")
        pending = PendingPublish(
            trainer=session.agent.identity, version=frame.version, attempt=frame.attempt
        )
        report = self.requests.receive(pending)
        if report is not None:
            self.tasks.spawn(self.members.report_to(session.agent.identity, report))
        elif (
            trainers.complete
            # This test is cheaper than `pop_all`.
            and self.requests.num_waiting >= trainers.world_size
            and (announced := self.requests.pop_all(trainers.workers))
        ):
            self._missing.stop()
            # The new task inherits the log field.
            with log_fields(version=frame.version):
                self.tasks.spawn(self._publish(announced))
        else:
            self._missing.name_later()

    def _gave_up(self, session: AgentSession, frame: Withdraw) -> None:
        """Drop the announcement of a trainer rank that no longer waits for the report, unless the update has begun.

        After dropping the announcement, send the rank a report with outcome FAILED. The report names the ranks that
        have not announced.
        """
        missing = self._missing.text()
        given_up = self.requests.give_up(session.peer, frame.attempt)
        if given_up is not None:
            report = failed_report(
                given_up.version, f"the update waited for {missing}" if missing else ""
            )
            report = msgspec.structs.replace(report, attempt=frame.attempt)
            self.tasks.spawn(self.members.report_to(session.agent.identity, report))

    def publish(self, version: int, *, deadline_s: float) -> CalledUpdate:
        """Start to publish a version that no trainer rank announces, and return at once.

        `TrainController`, which runs in this process, calls this method. Before the call, all trainer ranks must have
        prepared the version (`TrainerClient.prepare_publish`). They must keep their weights unchanged until the update has
        ended (with replicas: until `CalledUpdate.copied` is set).

        Args:
            version: the version to publish.
            deadline_s: seconds to wait until all trainer ranks are connected. The round has its own deadlines.
        """
        copied = asyncio.Event()
        # The new task inherits the log field.
        with log_fields(version=version):
            report = self.tasks.spawn(self._publish_connected(version, deadline_s, copied))
        return CalledUpdate(copied, report)

    async def _publish_connected(
        self, version: int, deadline_s: float, copied: asyncio.Event
    ) -> UpdateReport:
        """Wait until all trainer ranks are connected, publish, and return the report.

        If they are not connected within `deadline_s`, return a report with outcome FAILED, and do not set `copied`.
        """
        try:
            ranks = await until_connected(self.fleet, self.changes, version, deadline_s)
        except PeerTimeout as error:
            return failed_report(version, str(error))
        return await self._publish(ranks, copied)

    # --- a publish: its steps, in their order ------------------------------------------------

    async def _publish(
        self, announced: tuple[PendingPublish, ...], copied: asyncio.Event | None = None
    ) -> UpdateReport:
        """Publish a version that all trainer ranks have announced or prepared; return the report.

        Also send the report to the ranks, and call the listeners with it. If the update fails, raise nothing: the report
        contains the text of the error.

        Args:
            announced: one request per trainer rank.
            copied: event that is set when the round enters WRITE. By then, ranks with replicas have copied their weights.
        """
        version = max(rank.version for rank in announced)
        # Catch-ups and bindings of the fleet hold the same lock.
        async with self.rounds.lock:
            attempts = self._attempt_until_whole(announced, version, copied)
            report = await report_of(lambda: version, attempts)
        told = told_to_trainers(report)
        answers = [(rank.trainer, self.requests.answer(rank, told)) for rank in announced]
        self.end_update(report)
        for trainer, answer in answers:
            await self.members.report_to(trainer, answer)
        return report

    async def _attempt_until_whole(
        self, announced: tuple[PendingPublish, ...], version: int, copied: asyncio.Event | None
    ) -> UpdateReport:
        """Try to publish a version, repeat failed attempts in two cases, and return the report of the last attempt.

        - All engine processes ended during the attempt: wait for engines and repeat the attempt, at most
          `MAX_ATTEMPTS_WITHOUT_ENGINES` times.
        - The backend cannot use the binding any more (`Backend.is_spent`): bind again and repeat the attempt, at most
          `ControlConfig.max_rewrites` times.

        Trainers keep their weights unchanged during all attempts. For arguments see `_publish`.

        Raises:
            RoundAborted: the ranks announced different versions, or the version is stale.
            WindlassError: see `_attempt`.
        """
        check_same_version(announced)
        # Later attempts skip this check, because an earlier attempt may have reserved the version.
        if refusal := self.run.refusal(version):
            raise RoundAborted(refusal)
        report = await self._attempt(announced, version, copied)
        for _ in range(MAX_ATTEMPTS_WITHOUT_ENGINES):
            bound = self.connector.binding
            if (
                report.outcome is RoundOutcome.PUBLISHED
                or not report.left_out
                or bound is None
                or not self.fleet.has_lost_all(bound)
            ):
                break
            _log.warning("version %s: waiting for an engine: %s", version, report.reason)
            report = await self._attempt(announced, version, copied)
        for _ in range(self.config.max_rewrites):
            has_ended = report.outcome is RoundOutcome.PUBLISHED or Phase.PUBLISH in report.phase_s
            # With `unchanged` > 0 the round was refused, because its bytes equal the previous version. Another attempt
            # would be refused for the same reason.
            if not self.connector.drop_if_spent(report) or has_ended or report.unchanged:
                return report
            _log.warning(
                "version %s: the next attempt binds the fleet again: %s", version, report.reason
            )
            report = await self._attempt(announced, version, copied)
        self.connector.drop_if_spent(report)
        return report

    async def _attempt(
        self, announced: tuple[PendingPublish, ...], version: int, copied: asyncio.Event | None
    ) -> UpdateReport:
        """Bind the fleet if its ranks have changed, then run one round that publishes a version.

        Some engines may need values that only other engines have (`Fleet.must_catch_up`). Copy these values before the
        round.

        For arguments see `_publish`.

        Raises:
            RoundAborted: trainer ranks changed after the announcements, or the journal cannot be written.
            WindlassError: too few engines are connected, or the fleet cannot be bound.
        """
        binding = await self.connector.until_enough()
        await self.catch_ups.complete_half_published()
        if self.fleet.must_catch_up(binding):
            await self.catch_ups.bring_up()
            binding = await self.connector.until_enough()
            for name, kept in self.fleet.must_catch_up(binding).items():
                text = self.fleet.note_old_tensors(name, said(kept))
                _log.warning("engine %s: %s", name, text)
        check_same_ranks(announced, binding)
        costs = self.connector.pop_costs()
        spec = self.rounds.spec_of(version, self.run.lineage, binding, is_new=True)
        driver = self.rounds.start(spec, binding, copied)
        report = await self.rounds.finish(driver)  # PREPARE, PAUSE, WRITE, VERIFY, APPLY, PUBLISH
        return msgspec.structs.replace(
            report,
            bound=costs,
            unused=num_by_pattern(binding.unused),
            kept=num_by_pattern(binding.kept),
        )

    def end_update(self, report: UpdateReport) -> None:
        """Store the report of an update that has ended, wake coroutines that wait for changes, and call the listeners.

        If the update left out engines, also start a task that brings them up to the published version.
        """
        self.reports.append(report)
        self.num_updates += 1
        self.changes.notify()
        tell(self._update_listeners, report)
        if report.left_out:
            self.catch_ups.bring_up_soon()

    # --- agents that answer and agents that go -----------------------------------------------

    def _replied(self, session: AgentSession, reply: Reply[Result]) -> None:
        """Pass an agent's answer to `resume_retries` and to the running round.

        If the answer shows that the rank has started or stopped generating, wake the coroutines that wait for changes.
        """
        if self.resume_retries.on_reply(session.agent, reply):
            self.changes.notify()
        if self.rounds.driver is not None:
            self.rounds.driver.on_reply(session, reply)

    def _lost(self, agent: Agent, reason: str, *, ended: bool) -> None:
        """Drop the publish request of an agent that has lost its connection, and stop repeating commands to it.

        Also reset the count of failed attempts to bring up its engine, and queue an `AgentLost` event for the running
        round.

        `ended` says whether the agent's process, not the controller, closed the connection.
        """
        self.requests.withdraw(agent.hello.worker)
        self.resume_retries.forget(agent.identity)
        self.catch_ups.lost(agent, ended=ended)
        if self.rounds.driver is not None:
            self.rounds.driver.post(AgentLost(agent.hello.worker, reason))

    async def close(self) -> None:
        """Cancel rounds and background tasks, and close every agent's connection and the journal. Idempotent."""
        self.members.expect_departures()
        await self.tasks.close()
        await self.members.close()
        self._missing.stop()
        self.run.journal.close()
