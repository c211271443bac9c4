"""Run rounds, one at a time: begin a round, drive it to its end, and record its outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import final

from windlass.config import ControlConfig
from windlass.control.backend import Backend
from windlass.control.binding import Binding
from windlass.control.changes import tell
from windlass.control.comparisons import Comparisons
from windlass.control.connector import Connector
from windlass.control.driver import RoundDriver
from windlass.control.journal import JournalKind
from windlass.control.links import Link
from windlass.control.members import Members
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.round_state import Phase
from windlass.control.rounds import RoundSpec
from windlass.control.run import Run
from windlass.control.suspicions import Suspicions
from windlass.errors import RoundAborted


@final
class RoundRunner:
    """Runner of rounds, one at a time. Its methods run in the controller's event loop.

    Args:
        run: versions, journal and fleet.
        members: connections of the agents.
        connector: bindings of the fleet.
        config: mode, deadlines, retries.
        backend: backend that moves the bytes.

    Attributes:
        lock: held by the task that runs a round or binds the fleet.
        driver: driver of the round that runs now; None while no round runs.
    """

    def __init__(
        self,
        run: Run,
        members: Members,
        connector: Connector,
        config: ControlConfig,
        backend: Backend,
    ) -> None:
        self._run, self._fleet = run, run.fleet
        self._members, self._connector = members, connector
        self._config, self._backend = config, backend
        self._comparisons = Comparisons(config.compare_share)
        self.lock = asyncio.Lock()
        self.driver: RoundDriver | None = None
        self._phase_listeners: list[Callable[[int, Phase], None]] = []
        self._suspicions = Suspicions()

    def on_phase(self, listener: Callable[[int, Phase], None]) -> None:
        """Call `listener(version, phase)` in the event loop whenever a round enters a phase, `Phase.DONE` included."""
        self._phase_listeners.append(listener)

    # --- a round, step by step ---------------------------------------------------------------

    def spec_of(
        self, version: int, lineage: str, binding: Binding, *, is_new: bool = False
    ) -> RoundSpec:
        """Return the specification of a round in which a binding's sources write a version into the binding's engines.

        Args:
            version: the version.
            lineage: the run that the version belongs to.
            binding: sources, engines and links.
            is_new: whether trainers publish a new version. False if the version is published already.
        """
        replicated, turn, period = self._comparisons.of_round(version, binding)
        return RoundSpec(
            version=version,
            lineage=lineage,
            config=self._config,
            trainers=binding.trainers,
            engines=binding.engines,
            links=frozenset(binding.links),
            delivery=self._backend.delivery(binding),
            releasing=self._fleet.releasing(binding.trainers),
            replicated=replicated,
            turn=turn,
            period=period,
            sent_before=self._sent_before(binding) if is_new else None,
        )

    def _sent_before(self, binding: Binding) -> dict[Link, str]:
        """Return link -> digest of its bytes in the last published version, for links to engines that serve this version.

        The result is empty if the trainer processes of `binding` are not those that published the last version.
        """
        if self._fleet.published_by != binding.identities_of(binding.trainers):
            return {}
        serving = {engine.name for engine in self._fleet.routable()}
        workers = {w for name, own in binding.engines.items() if name in serving for w in own}
        return self._suspicions.sent_before(workers)

    def start(
        self, spec: RoundSpec, binding: Binding, in_write: asyncio.Event | None = None
    ) -> RoundDriver:
        """Record in the journal that a round begins, and make it the running round. The caller must then call `finish`.

        `in_write` is set when the round enters WRITE. From then on, ranks that send from replicas do not read their
        weights any more.

        Raises:
            RoundAborted: the journal cannot be written.
        """
        round_id = self._run.new_round()
        try:
            self._run.record(JournalKind.ROUND_BEGAN, spec.version, tuple(binding.engines))
        except OSError as error:
            raise RoundAborted(f"the journal cannot record the round: {error}") from error

        def on_phase(phase: Phase) -> None:
            if phase is Phase.WRITE and in_write is not None:
                in_write.set()
            if phase is spec.delivery.reserves_in:
                self._run.reserve(driver.machine.version)
            tell(self._phase_listeners, driver.machine.version, phase)

        self.driver = driver = RoundDriver(
            spec,
            binding,
            round_id=round_id,  # `Run.round_id` may change during the round, by a Hello with a higher epoch
            sessions=self._members.sessions,
            clock=time.perf_counter,
            on_phase=on_phase,
        )
        return driver

    async def finish(self, driver: RoundDriver) -> UpdateReport:
        """Drive a round to its end, record its outcome in the fleet and in the journal, and return the report.

        For a new version, the report also contains signs of a mistake in the training (`Suspicions`).
        """
        try:
            finish = await driver.run()
        finally:
            self.driver = None
        report, binding, spec = finish.report, driver.binding, driver.spec
        is_published = report.outcome is RoundOutcome.PUBLISHED
        is_new = spec.sent_before is not None
        # A catch-up may have copied a version of an earlier run. If trainers of this run have joined during the round,
        # this version must not count as published.
        if is_published and spec.lineage == self._run.lineage:
            self._fleet.publish(report.version, self._run.lineage)
        self._members.set_silent_aside(driver.sessions, finish.silent, report.left_out)
        self._fleet.note_round(finish, binding, driver.round_id, spec.lineage, driver.late)
        self._run.record_quarantine()
        if binding.replicated is not None:
            self._comparisons.conclude(
                compare_s=report.compare_s, update_s=report.update_s, is_published=is_published
            )
        if is_new:
            report = self._suspicions.add_to(
                report, unchanged=finish.is_unchanged, non_finite=finish.non_finite
            )
        if is_published:
            if is_new:
                self._suspicions.digests = finish.digests
                self._fleet.published_by = binding.identities_of(binding.trainers)
                sources = (driver.sessions[worker].agent for worker in binding.trainers)
                self._fleet.published_from = tuple(agent.manifest for agent in sources)
            self._connector.note_carried(finish.carried)
            self._run.record_outcome(JournalKind.PUBLISHED, report.version, report.engines)
        else:
            self._run.record_outcome(JournalKind.ROUND_ENDED, report.version, (), report.reason)
        return report

    async def run_round(self, version: int, lineage: str, binding: Binding) -> UpdateReport:
        """Run a round that brings the engines of a binding up to a version that is published already; return the report.

        Raises:
            RoundAborted: the journal cannot be written.
        """
        return await self.finish(self.start(self.spec_of(version, lineage, binding), binding))
