"""State machine of a round: one attempt to publish one version.

The machine has no clock, socket, or task. `handle(event)` returns instructions, and the driver carries them out (the
sans-I/O style of python-hyper/h11 and of dask's worker state machine). This file decides which engines publish. Steps
that depend on how bytes travel belong to the backend: `delivery.Delivery` and its subclasses.

    in_place:  PREPARE (trainers pack, engines pause) -> WRITE -> VERIFY -> APPLY -> PUBLISH
    staged:    PREPARE -> WRITE (engines generate) -> VERIFY -> PAUSE -> APPLY -> PUBLISH
    driven:    PREPARE (engines pause) -> WRITE (until `Sent`) -> VERIFY -> APPLY -> PUBLISH

Failures and their consequences:

- An engine that dies, or does not answer by the deadline, is left out. The round continues with the other engines.
- If a rank of an engine with several ranks loses its connection while it is paused, all ranks of this engine stay paused
  until the next version. The lost rank does not learn how the round ends. In PUBLISH all ranks have the version, so the
  controller completes the engine when the rank has connected again (`Finish.applied`).
- A link that failed, or that delivered bytes with the wrong digest, is written again, at most `max_rewrites` times.
  After that its engine is left out. In `staged` mode this engine generates with the old weights, and the round ends if every
  engine has such a link.
- A link with an unknown outcome is never written again. Its engine is left out and quarantined.
- If trainers hold different bytes of the same box, the round ends before any link is written.
- A trainer that fails before it has written ends the round. `in_place` engines that may hold mixed weights stay
  paused, and all other engines generate with the old version. `Finish.unsettled` names the trainers that were writing.
- A reply that does not fit its command is a failure, and so is a reply that omits a link. An engine enters APPLY only
  with every link written and every digest confirmed.
- A phase that the controller cannot record does not begin, and the round ends.
- A failure after some engine has published does not undo the publication.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from windlass.config import ControlConfig, Reaction, UpdateMode
from windlass.control.delivery import Delivery, Findings, Order, reply_budget_s
from windlass.control.links import Link, LinkLedger
from windlass.control.messages import (
    ABORT_NOTICE,
    Abort,
    Apply,
    Command,
    Done,
    Failure,
    FailureKind,
    Pause,
    Prepare,
    Prepared,
    Publish,
    Release,
    Result,
    Verified,
    Verify,
)
from windlass.control.report import Figures, Measure, RoundOutcome, UpdateReport
from windlass.control.round_state import (
    PHASE_TRANSITIONS,
    EngineOutcome,
    Phase,
    RoundEngine,
    RoundEngines,
)
from windlass.control.suspicions import is_unchanged, unchanged_reason
from windlass.errors import ProtocolError
from windlass.planning.replicated import DIGESTED, Replicated, decode_digested
from windlass.transfer.bindings import Carried, LinkOutcome, LinkStatus, Written


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSpec:
    """Specification of a round.

    Attributes:
        version: version to publish; -1 until `Sent` names it, in a driven round.
        config: mode, deadlines, rewrites.
        trainers: source workers.
        engines: engine name -> its rank workers.
        links: (source, destination) pairs of workers between which bytes are sent.
        delivery: delivery of the bytes. It stores state of this round, so each round needs a new one.
        releasing: trainers that free memory after VERIFY, before any engine publishes.
        replicated: boxes that several trainers hold and must agree about; None if this round compares nothing.
        turn: number of earlier comparisons of `replicated`; selects the pieces that this round compares.
        period: number of rounds after which every piece has been compared once.
        lineage: identity of the run that `version` belongs to.
        sent_before: link -> digest in the version that engines serve now; empty if other trainers sent that version. None
            if the round publishes no new version.
    """

    version: int
    config: ControlConfig
    engines: Mapping[str, tuple[str, ...]]
    trainers: tuple[str, ...] = ()
    links: frozenset[tuple[str, str]] = frozenset()
    delivery: Delivery = field(default_factory=Delivery)
    releasing: tuple[str, ...] = ()
    replicated: Replicated | None = None
    turn: int = 0
    period: int = 1
    lineage: str = ""
    sent_before: Mapping[Link, str] | None = None


# --- events --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replied:
    """Reply of an agent to the command with number `seq`."""

    worker: str
    seq: int
    result: Result


@dataclass(frozen=True, slots=True)
class AgentLost:
    """Loss of an agent's connection: the process is dead or unreachable."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """End of the deadline of the phase with this `EnterPhase.entry`; ignored after that phase."""

    entry: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Request to end the round.

    Attributes:
        reason: reason for the reports and the log.
        is_blocked: True if the controller could not record the phase that was just entered. The phase has then not begun,
            and none of its commands was sent. False if the caller of a driven round has failed.
    """

    reason: str
    is_blocked: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """Notice of a driven round's caller (`driven.DrivenRound`): all bytes of `version` are sent."""

    version: int


Event = Replied | AgentLost | DeadlinePassed | GiveUp | Sent


# --- instructions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Instruction to send a command. `expects_reply` is false for notices: the round does not await their replies."""

    worker: str
    seq: int
    command: Command
    expects_reply: bool = True


@dataclass(frozen=True, slots=True)
class EnterPhase:
    """Instruction to begin a phase and its deadline. `entry` distinguishes a phase from its repetition."""

    phase: Phase
    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End of the round, with its outcome.

    Attributes:
        report: report for the trainers, without times and transports, which only the driver knows.
        engines: engine -> its outcome.
        mixed: engines with live weights that may be of two versions, quarantined or not.
        applied: engines of `mixed` that left the round in PUBLISH. All their ranks have the version, and some may serve it.
        unsettled: worker that has not answered a write command -> engines that its bytes may still reach.
        silent: engine ranks that did not answer by a deadline.
        carried: link -> bytes and seconds, for links that were measured one by one.
        digests: digests of the links of engines that published.
        is_unchanged: whether no byte differs from the previous version.
        non_finite: trainer parameters that contain NaN or infinity.
    """

    report: UpdateReport
    engines: Mapping[str, EngineOutcome]
    mixed: frozenset[str]
    applied: frozenset[str] = frozenset()
    unsettled: Mapping[str, tuple[str, ...]]
    silent: frozenset[str]
    carried: Mapping[Link, Carried]
    digests: Mapping[Link, str] = field(default_factory=dict)
    is_unchanged: bool = False
    non_finite: frozenset[str] = frozenset()


Instruction = Send | EnterPhase | Finish


# --- the machine ---------------------------------------------------------------------------


class RoundMachine:
    """State machine of one round. Call `start` once, then `handle` for every event until it returns `Finish`.

    An exception of `start` or `handle` is a bug of the machine, for example a transition that `PHASE_TRANSITIONS` or
    `OUTCOME_TRANSITIONS` lacks. The caller then ends the round with `abandon`.

    Attributes:
        version: version to publish; -1 if it is not known yet.
        phase: current phase. Only the machine changes it.
        engines: engines of the round, with their outcomes.
        pending: sequence number of a command that waits for its reply -> worker and command.
    """

    def __init__(self, spec: RoundSpec) -> None:
        self._spec, self._config = spec, spec.config
        self.version = spec.version
        self.engines = RoundEngines(spec.engines)
        self.phase = self._phase_before = Phase.PREPARE
        self._is_blocked = self._is_broken = False
        # If an engine hangs, its agent needs time to report this before the deadline of the phase.
        self._go_on_s = reply_budget_s(spec.config.deadlines.publish_s)
        self._entry = 0
        self._seq = 0
        self.pending: dict[int, tuple[str, Command]] = {}
        self._delivery = spec.delivery
        self._links = LinkLedger(spec.links, self._delivery.unlinked(self.engines.of))
        # Commands whose replies may still arrive, although their engine has been left out.
        self._late: dict[int, tuple[str, Command]] = {}
        parts = () if spec.replicated is None else spec.replicated.parts
        self._digested = {worker: np.zeros(0, DIGESTED) for worker in parts}
        self._lost_trainers: set[str] = set()
        self._applied: set[str] = set()
        self._silent: set[str] = set()
        self._rewrites_left = spec.config.max_rewrites
        self._wrote = self._has_paused = False
        self._digest_ok = True
        self._figures = Figures()
        self._non_finite: set[str] = set()
        self._out: list[Instruction] = []

    @property
    def _awaited(self) -> str:
        return self._delivery.awaited if self.phase is Phase.WRITE else ""

    def start(self) -> list[Instruction]:
        """Begin the round with the phase PREPARE; return the first instructions."""
        self._announce_phase()
        for trainer in self._spec.trainers:
            period = self._spec.period if trainer in self._digested else 0
            is_new = self._spec.sent_before is not None
            reaction = self._config.non_finite if is_new else Reaction.OFF
            self._send(trainer, Prepare(self.version, self._spec.turn, period, reaction))
        self._order(self._delivery.prepare(self.engines.active_workers))
        if self._config.mode is UpdateMode.IN_PLACE:
            self._send_engines(Pause(self._config.pause_mode, self._config.deadlines.pause_s))
        self._advance()
        return self._pop_instructions()

    def handle(self, event: Event) -> list[Instruction]:
        """Process one event; return the instructions that follow from it. The last instruction of a round is `Finish`.

        If the round has ended already, ignore the event and return no instructions.
        """
        if self.phase is Phase.DONE:
            return []
        match event:
            case Replied():
                worker, command = self.pending.get(event.seq, ("", None))
                if command is None or worker != event.worker:
                    worker, command = self._late.get(event.seq, ("", None))
                    if command is not None and worker == event.worker:
                        self._on_late(worker, command, event.result)
                    # Otherwise the reply is a duplicate.
                else:
                    del self.pending[event.seq]
                    self._on_result(worker, command, event.result)
            case AgentLost():
                self._on_lost(event.worker, event.reason)
            case DeadlinePassed():
                if event.entry == self._entry:
                    self._on_deadline()
            case GiveUp():
                self._is_blocked = event.is_blocked
                self._give_up(event.reason)
            case Sent():
                if self._awaited:
                    self.version = event.version
                    self._delivery.sent()
            case _:
                assert_never(event)
        self._advance()
        return self._pop_instructions()

    def abandon(self, reason: str) -> list[Instruction]:
        """End the round after an exception of `start` or `handle`; return the last instructions.

        After such an exception, the contents of the engines are unknown. So `Finish.mixed` names every engine that has
        not left the round. These engines stay paused until a later round has written a version to them. As in every
        round, `Finish.unsettled` names the workers that have not answered a write.
        """
        self._is_broken = True
        kept = (Abort, *self._delivery.notices)
        self._out = [i for i in self._out if isinstance(i, Send) and isinstance(i.command, kept)]
        self._give_up(reason)
        return self._pop_instructions()

    # --- replies -----------------------------------------------------------------------------

    def _on_result(self, worker: str, command: Command, result: Result) -> None:
        if isinstance(result, Done | Written):
            self._figures.note_memory(worker, result.memory_nbytes)
        match command, result:
            case _, Failure():
                self._on_failure(worker, command, result)
            case _, Written() if worker in self._links.in_flight:
                self._on_written(worker, result)
            case Verify(), Verified():
                if not self._links.verify(worker, result.mismatched):
                    reason = (
                        f"{worker} reported wrong bytes from workers without a link to this rank"
                    )
                    self._drop(self.engines.of[worker], reason)
            case Prepare(), Prepared() if worker in self._digested:
                self._on_prepared(worker, command, result)
            case Prepare(), Done() if worker not in self._digested:
                pass
            case Publish(), Done():
                self._publish_first(self.engines[self.engines.of[worker]], worker)
            case ((Pause() | Apply() | Release()), Done()):
                # Nothing is left to do: `handle` has removed the command from `pending`.
                pass
            case _ if (found := self._delivery.answered(worker, command, result)) is not None:
                self._on_findings(worker, found)
            case _:
                text = f"unexpected answer {type(result).__name__} to {type(command).__name__}"
                self._on_failure(worker, command, Failure(FailureKind.FAILED, text))

    def _on_late(self, worker: str, command: Command, result: Result) -> None:
        """Process the reply of a rank that has left the round. Its bytes may still arrive in memory of other engines."""
        found = self._delivery.answered(worker, command, result)
        self._delivery.ended(worker, command)
        for reached, reason in () if found is None else found.unknown.items():
            self._drop(self.engines.of[reached], reason, unknown=True)

    def _on_failure(self, worker: str, command: Command, failure: Failure) -> None:
        unknown = failure.kind is FailureKind.UNKNOWN
        if worker in self.engines.of and not self._delivery.survives_failure(self.phase):
            self._give_up(f"{worker}: {failure.message}")
        elif worker in self.engines.of:
            self._drop(self.engines.of[worker], failure.message, unknown=unknown)
            self._delivery.ended(worker, command)
        else:
            asked = self._links.answered(worker)
            quarantined = {self.engines.of[d] for d in asked} if unknown else set()
            self._give_up(f"{worker}: {failure.message}", quarantined)

    def _on_prepared(self, trainer: str, command: Prepare, prepared: Prepared) -> None:
        try:
            self._digested[trainer] = decode_digested(prepared.digested)
        except ProtocolError as error:
            self._on_failure(trainer, command, Failure(FailureKind.FAILED, str(error)))
        else:
            self._figures.measure(Measure.COMPARE_S, trainer, prepared.compare_s)

    def _on_written(self, trainer: str, written: Written) -> None:
        self._figures.measure(Measure.WIRE_S, trainer, written.wire_s)
        self._figures.measure(Measure.PACK_S, trainer, written.pack_s)
        self._figures.measure(Measure.REGISTER_S, trainer, written.register_s)
        self._non_finite.update(written.non_finite)
        asked = self._links.answered(trainer)
        for link in written.links:
            if link.destination in asked:
                self._on_link(trainer, link)

    def _on_link(self, trainer: str, link: LinkOutcome) -> None:
        worker = link.destination
        engine = self.engines.of[worker]
        self._figures.measure(Measure.NBYTES, trainer, link.nbytes)
        self._figures.carry((trainer, worker), link.nbytes, link.wire_s)
        match link.status:
            case LinkStatus.OK:
                self._links.written((trainer, worker), link.digest)
            case LinkStatus.FAILED:
                self._links.failed((trainer, worker), link.error)
                self._order(self._delivery.link_failed((trainer, worker)))
            case LinkStatus.UNREACHABLE:
                self._drop(engine, f"{trainer} cannot reach {worker}: {link.error}")
            case LinkStatus.UNKNOWN:
                self._drop(engine, f"{trainer} -> {worker}: {link.error}", unknown=True)
            case _:
                assert_never(link.status)

    def _on_findings(self, worker: str, found: Findings) -> None:
        for measure, value in found.measures.items():
            self._figures.measure(measure, worker, value)
        for link, carried in found.carried.items():
            self._figures.carry(link, carried.nbytes, carried.wire_s)
        self._order(found.orders)
        for reached, reason in found.unknown.items():
            self._drop(self.engines.of[reached], reason, unknown=True)

    def _on_lost(self, worker: str, reason: str) -> None:
        if worker in self.engines.of:
            self._drop(self.engines.of[worker], f"{worker}: {reason}", lost=worker)
        elif worker in self._spec.trainers:
            self._lost_trainers.add(worker)
            # A trainer that has answered its write command is needed only if links must be written again.
            if self.phase is Phase.PREPARE or worker in self._links.in_flight:
                self._give_up(f"{worker}: {reason}")
            # Do not wait for the lost trainer. Only its answer to `Release` can still be missing. Its memory becomes free
            # anyway when its process ends.
            self.pending = {seq: sent for seq, sent in self.pending.items() if sent[0] != worker}

    def _on_deadline(self) -> None:
        late = list(dict.fromkeys(worker for worker, _ in self.pending.values()))
        if self._awaited:
            self._give_up(f"{self._awaited} within the session's deadline")
            return
        reason = f"no answer in phase {self.phase} by its deadline"
        trainers = [worker for worker in late if worker not in self.engines.of]
        if trainers:
            self._give_up(f"{', '.join(trainers)}: {reason}")
            return
        self._silent.update(late)
        for worker in late:
            self._drop(self.engines.of[worker], f"{worker}: {reason}")

    # --- phases ------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Enter the next phase if all awaited replies have arrived, and pass through phases that await no reply.

        End the round if no engine is left. In a driven round, stay in WRITE until `Sent`.
        """
        while not self.pending and self.phase is not Phase.DONE:
            if not self.engines.active:
                reasons = "; ".join(f"{name}: {why}" for name, why in self.engines.reasons.items())
                self._finish(
                    RoundOutcome.FAILED, f"no engine is left: {reasons or 'none took part'}"
                )
                return
            if self._awaited:
                return
            self._next_phase()

    def _next_phase(self) -> None:
        match self.phase:
            case Phase.PREPARE:
                replicated = self._spec.replicated
                if replicated is not None and (why := replicated.disagreement(self._digested)):
                    self._give_up(why)
                    return
                self._write(self._links.unwritten(self.engines.active_workers))
            case Phase.WRITE | Phase.VERIFY:
                self._after_delivery()
            case Phase.PAUSE:
                self._apply()
            case Phase.APPLY:
                self._enter(Phase.PUBLISH)
                self._publish()
            case Phase.PUBLISH:
                for engine in self.engines.active:
                    engine.end(EngineOutcome.PUBLISHED)
                self._finish(RoundOutcome.PUBLISHED, "")
            case Phase.DONE:
                return
            case _:
                assert_never(self.phase)

    def _publish(self) -> None:
        for engine in self.engines.active:
            for worker in engine.workers[1:] or engine.workers:
                self._send(worker, self._publish_of(engine))

    def _publish_of(self, engine: RoundEngine) -> Publish:
        # The ranks of an engine resume in two steps, within one deadline of the phase.
        deadline_s = self._go_on_s / min(len(engine.workers), 2)
        return Publish(self.version, deadline_s, self._spec.lineage)

    def _publish_first(self, engine: RoundEngine, worker: str) -> None:
        """Send `Publish` to the first rank of an engine once all its other ranks have published.

        The first rank reports to the engine's server whether the engine is held. If the controller dies between two
        `Publish` commands, this rank is then still paused, and the server refuses requests with the reason. Otherwise a
        request would wait for the other ranks, which are paused.
        """
        first = engine.workers[0]
        published = {w for w, command in self.pending.values() if isinstance(command, Publish)}
        if worker != first and published.isdisjoint(engine.workers):
            self._send(first, self._publish_of(engine))

    def _after_delivery(self) -> None:
        """Take the next step after all replies of WRITE or VERIFY.

        If links to active engines are unwritten, write them (again). Otherwise, if engine ranks have not verified, enter
        VERIFY. Otherwise all bytes are correct: enter PAUSE (`staged`) or APPLY, or refuse a version that changes no byte.
        """
        active = self.engines.active_workers
        is_free, incomplete = self._delivery.pop_incomplete()
        self._links.forget(incomplete)
        if missing := self._links.unwritten(active):
            if is_free and not self._lost_trainers & set(missing):
                self._write(missing)
            else:
                self._write_again(missing)
        elif unverified := self._links.unverified(active):
            self._enter(Phase.VERIFY)
            for worker in unverified:
                self._send(worker, Verify(self.version, self._links.expected(worker)))
        elif self._config.unchanged is Reaction.REFUSE and self._is_unchanged():
            self._refuse_unchanged()
        elif self._config.mode is UpdateMode.STAGED:
            self._enter(Phase.PAUSE)
            self._send_engines(Pause(self._config.pause_mode, self._config.deadlines.pause_s))
        else:
            self._apply()

    def _apply(self) -> None:
        """Enter APPLY. Every byte is verified and no link is written any more, so trainers may free their weights."""
        self._enter(Phase.APPLY)
        self._send_engines(Apply(self.version))
        for trainer in self._spec.releasing:
            if trainer not in self._lost_trainers:
                self._send(trainer, Release())

    def _is_unchanged(self) -> bool:
        if self._config.unchanged is Reaction.OFF:
            return False
        sent = [self._links.digests_to(engine.workers) for engine in self.engines]
        return is_unchanged(sent, self._spec.sent_before or {})

    def _refuse_unchanged(self) -> None:
        """End the round and publish nothing, because the version changes no byte.

        First leave out each engine with a link that `sent_before` lacks, because the round may have changed its weights.
        All other engines have verified that they have the bytes of the previous version. Their weights are not mixed,
        and they resume.
        """
        reason = unchanged_reason(self.version)
        before = self._spec.sent_before or {}
        for engine in self.engines:
            if self._links.digests_to(engine.workers).keys() - before.keys():
                self._drop(engine.name, reason)
        self._wrote = False
        self._give_up(f"{reason}; ControlConfig(unchanged='warn') publishes it and logs a warning")

    def _write(self, links: Mapping[str, tuple[str, ...]]) -> None:
        self._enter(Phase.WRITE)
        self._wrote = True
        # Sources get less time than the phase, so that they can report the other links even if one link is stuck.
        orders = self._delivery.write(
            links,
            ledger=self._links,
            active=self.engines.active_workers,
            version=self.version,
            deadline_s=reply_budget_s(self._config.deadlines.write_s),
        )
        self._order(orders)

    def _write_again(self, missing: Mapping[str, tuple[str, ...]]) -> None:
        gone = self._lost_trainers & set(missing)
        if self._rewrites_left and not gone:
            self._rewrites_left -= 1
            self._write(missing)
            return
        self._digest_ok = False
        pairs = [(source, name) for source, names in sorted(missing.items()) for name in names]
        links, error = ", ".join(f"{s} -> {d}" for s, d in pairs), self._links.why(pairs)
        why = f"{', '.join(sorted(gone))} has disconnected" if gone else "no rewrite is left"
        reason = ": ".join(
            filter(None, (f"links failed or had wrong digests, and {why}", links, error))
        )
        incomplete = {self.engines.of[d] for names in missing.values() for d in names}
        if self._config.mode is UpdateMode.STAGED and len(incomplete) == len(self.engines.active):
            self._give_up(reason)
            return
        for engine in sorted(incomplete):
            self._drop(engine, reason)

    # --- endings -----------------------------------------------------------------------------

    def _drop(self, name: str, reason: str, *, unknown: bool = False, lost: str = "") -> None:
        """Leave one engine out and continue the round.

        If the engine has left already, quarantine it if `unknown` is True, and do nothing otherwise.

        Args:
            name: the engine.
            reason: reason for the report.
            unknown: whether bytes may still arrive in the engine's memory. The engine is then quarantined.
            lost: rank that has lost its connection and therefore gets no `Abort`; empty for none.
        """
        engine = self.engines[name]
        if engine.outcome is not EngineOutcome.ACTIVE:
            if unknown:
                engine.end(EngineOutcome.QUARANTINED, reason)
            return
        if self.phase is Phase.PUBLISH and not unknown:
            self._applied.add(name)
        self._leave(engine, reason, unknown=unknown, lost=lost)
        for seq in [seq for seq, (w, _) in self.pending.items() if w in engine.workers]:
            self._late[seq] = self.pending.pop(seq)

    def _leave(
        self, engine: RoundEngine, reason: str, *, unknown: bool = False, lost: str = ""
    ) -> None:
        # The lost rank may be alive and paused, and then it waits for the next version. So the other ranks wait too.
        is_split = bool(lost) and self._has_paused and len(engine.workers) > 1
        engine.mixed = self._is_broken or is_split or self._may_be_mixed()
        outcome = EngineOutcome.MIXED if engine.mixed else EngineOutcome.LEFT_OUT
        engine.end(EngineOutcome.QUARANTINED if unknown else outcome, reason)
        for worker in engine.workers:
            self._order(self._delivery.left(worker, lost=worker == lost))
        for worker in engine.workers:
            if worker != lost:
                notice = Abort(ABORT_NOTICE, engine.mixed, self._go_on_s)
                self._send(worker, notice, expects_reply=False)

    def _may_be_mixed(self) -> bool:
        """Return whether an engine that leaves the round now may have mixed weights.

        If writes change live weights, return True after the first write. Otherwise return True from APPLY on. If the
        controller could not record the present phase (`GiveUp.is_blocked`), the previous phase counts.
        """
        if self._delivery.changes_live(self._config.mode):
            return self._wrote
        begun = self._phase_before if self._is_blocked else self.phase
        return begun in {Phase.APPLY, Phase.PUBLISH}

    def _give_up(self, reason: str, quarantined: Collection[str] = ()) -> None:
        """End the round for all engines, without a published version.

        Args:
            reason: reason for the report.
            quarantined: engines to quarantine, because bytes may still arrive in their memory.
        """
        self.pending.clear()
        for name in quarantined:
            self._drop(name, reason, unknown=True)
        for engine in self.engines.active:
            self._leave(engine, reason)
        mixed = any(engine.mixed for engine in self.engines)
        self._finish(RoundOutcome.FAILED if mixed else RoundOutcome.ABORTED, reason)

    def _finish(self, outcome: RoundOutcome, reason: str) -> None:
        for trainer in () if outcome is RoundOutcome.PUBLISHED else self._spec.trainers:
            self._send(trainer, Abort(ABORT_NOTICE), expects_reply=False)
        writing = self._delivery.unsettled() | self._links.in_flight
        report = UpdateReport(
            version=self.version,
            outcome=outcome,
            reason=reason,
            engines=tuple(engine.name for engine in self.engines.published),
            left_out=self.engines.reasons,
            measures=self._figures.of_round(self._delivery.measures),
            memory=self._figures.memory,
            digest_ok=self._digest_ok,
        )
        self._move(Phase.DONE)
        self._out.append(
            Finish(
                report=report,
                engines=self.engines.outcomes,
                mixed=frozenset(engine.name for engine in self.engines if engine.mixed),
                applied=frozenset(self._applied),
                unsettled={
                    source: tuple(sorted({self.engines.of[d] for d in destinations}))
                    for source, destinations in writing.items()
                },
                silent=frozenset(self._silent),
                carried=self._figures.carried,
                digests=self._links.digests_to(
                    w for e in self.engines.published for w in e.workers
                ),
                is_unchanged=self._is_unchanged(),
                non_finite=frozenset(self._non_finite),
            )
        )

    def _send_engines(self, command: Command) -> None:
        self._has_paused |= isinstance(command, Pause)
        for worker in self.engines.active_workers:
            self._send(worker, command)

    def _order(self, orders: Iterable[Order]) -> None:
        for order in orders:
            if order.destinations:
                self._links.ask(order.worker, order.destinations)
            self._send(order.worker, order.command, expects_reply=order.expects_reply)

    def _send(self, worker: str, command: Command, *, expects_reply: bool = True) -> None:
        self._seq += 1
        if expects_reply:
            self.pending[self._seq] = (worker, command)
        self._out.append(Send(worker, self._seq, command, expects_reply))

    def _enter(self, phase: Phase) -> None:
        self._move(phase)
        self._announce_phase()

    def _move(self, phase: Phase) -> None:
        """Set the phase. Only this method sets the phase.

        Raises:
            RuntimeError: `PHASE_TRANSITIONS` does not allow this phase after the present phase.
        """
        if phase not in PHASE_TRANSITIONS[self.phase]:
            raise RuntimeError(f"phase {self.phase} must not become {phase}")
        self._phase_before, self.phase = self.phase, phase

    def _announce_phase(self) -> None:
        self._entry += 1
        self._out.append(EnterPhase(self.phase, self._entry))

    def _pop_instructions(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out
