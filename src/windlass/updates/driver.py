"""Carries out one round: the machine's instructions out, replies and deadlines in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never, final

from windlass.config import ControlConfig, DiskBackend, PhaseDeadlines, XcclBackend
from windlass.errors import PeerUnreachable
from windlass.net.logs import log_fields
from windlass.updates.binding import Binding
from windlass.updates.comparisons import Comparison
from windlass.updates.messages import Envelope, Pause, Publish, Reply, UpdateReport
from windlass.updates.round_types import (
    AgentLost,
    Blocked,
    DeadlinePassed,
    EnterPhase,
    Event,
    Finish,
    Instruction,
    Phase,
    Replied,
    RoundSpec,
    Send,
)
from windlass.updates.rounds import RoundMachine
from windlass.updates.session import AgentSession

__all__ = ["RoundDriver", "RoundResult", "report_of", "spec_of"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """How the round ended, and the times that only the driver can see, in seconds.

    `late`: replies that arrived while the round was ending, which the machine has not seen.
    """

    finish: Finish
    late: tuple[Replied, ...]
    update_s: float
    pause_s: float
    phase_s: dict[str, float]


def spec_of(
    version: int,
    lineage: str,
    binding: Binding,
    config: ControlConfig,
    comparison: Comparison | None,
) -> RoundSpec:
    """The round that publishes `version` of the run `lineage` to a bound fleet.

    Args:
        version: to publish.
        lineage: of the run that publishes it.
        binding: of the fleet.
        config: mode, deadlines, retries.
        comparison: of what trainers hold in common; None for none in this round.
    """
    replicated = None if comparison is None else binding.replicated
    turn = 0 if comparison is None else comparison.turn
    period = 1
    if comparison is not None and replicated is not None and not comparison.is_first:
        period = replicated.period(binding.sent_nbytes)
    return RoundSpec(
        version=version,
        mode=config.mode,
        pause_mode=config.pause_mode,
        trainers=binding.trainers,
        engines=binding.engines,
        links=binding.links,
        max_rewrites=config.max_rewrites,
        pause_s=config.deadlines.pause_s,
        write_s=config.deadlines.write_s,
        publish_s=config.deadlines.publish_s,
        collective=isinstance(config.backend, XcclBackend),
        lands_live=not isinstance(config.backend, DiskBackend),
        relay=binding.relay,
        replicated=replicated,
        turn=turn,
        period=period,
        lineage=lineage,
    )


def report_of(version: int, serving: tuple[str, ...], result: RoundResult) -> UpdateReport:
    """What the trainers are told of a round."""
    finish = result.finish
    return UpdateReport(
        version=version,
        outcome=finish.outcome,
        reason=finish.reason,
        engines=serving,
        left_out=dict(finish.reasons),
        nbytes=finish.nbytes,
        wire_s=finish.wire_s,
        update_s=result.update_s,
        pause_s=result.pause_s,
        phase_s=result.phase_s,
        digest_ok=finish.digest_ok,
        pack_s=finish.pack_s,
        compared=finish.compared,
        compare_s=finish.compare_s,
    )


@final
class RoundDriver:
    """One round. `run` once; `post` and `on_reply` from the same loop at any time."""

    def __init__(
        self,
        spec: RoundSpec,
        *,
        epoch: int,
        round_number: int,
        deadlines: PhaseDeadlines,
        sessions: Mapping[str, AgentSession],
        clock: Callable[[], float],
        on_phase: Callable[[Phase], None],
    ) -> None:
        """`on_phase` may raise OSError: the phase does not begin then. `DONE` ends every round."""
        self._machine = RoundMachine(spec)
        self._version = spec.version
        self._epoch, self._round = epoch, round_number
        self._deadlines = deadlines
        # Pinned: a process that takes over a name during the round is no part of it.
        self._sessions = dict(sessions)
        self._clock = clock
        self._on_phase = on_phase
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._phase_began = 0.0
        self._phase: Phase | None = None
        self._phase_s: dict[str, float] = {}
        self._pause_began: dict[str, float] = {}
        self._publishing: set[tuple[str, int]] = set()
        self._pause_s = 0.0

    def post(self, event: Event) -> None:
        """Queue an event."""
        self._events.put_nowait(event)

    def on_reply(self, worker: str, reply: Reply) -> None:
        """Queue a reply if it belongs to this round."""
        if (reply.epoch, reply.round) == (self._epoch, self._round):
            if (worker, reply.seq) in self._publishing and worker in self._pause_began:
                paused_s = self._clock() - self._pause_began[worker]
                self._pause_s = max(self._pause_s, paused_s)
            self.post(Replied(worker, reply.seq, reply.result))

    async def run(self) -> RoundResult:
        """Drive the machine until it finishes. Every phase has a deadline, so this ends."""
        with log_fields(round_number=self._round, version=self._version):
            try:
                result = await self._run()
            finally:
                self._on_phase(Phase.DONE)
            finish = result.finish
            _log.info("round %s in %.3f s %s", finish.outcome.value, result.update_s, finish.reason)
        return result

    async def _run(self) -> RoundResult:
        began = self._clock()
        finish = await self._carry_out(self._machine.start())
        while finish is None:
            finish = await self._carry_out(self._machine.handle(await self._events.get()))
        self._leave_phase()
        late = [self._events.get_nowait() for _ in range(self._events.qsize())]
        return RoundResult(
            finish=finish,
            late=tuple(event for event in late if isinstance(event, Replied)),
            update_s=self._clock() - began,
            pause_s=self._pause_s,
            phase_s=dict(self._phase_s),
        )

    async def _carry_out(self, instructions: list[Instruction]) -> Finish | None:
        finish: Finish | None = None
        for instruction in instructions:
            match instruction:
                case EnterPhase():
                    try:
                        self._enter(instruction.phase, instruction.entry)
                    except OSError as error:
                        # What follows in `instructions` belongs to the phase: none of it is sent.
                        reason = f"phase {instruction.phase} cannot be recorded: {error}"
                        return await self._carry_out(self._machine.handle(Blocked(reason)))
                case Send():
                    await self._send(instruction)
                case Finish():
                    finish = instruction
                case _:
                    assert_never(instruction)
        return finish

    async def _send(self, send: Send) -> None:
        session = self._sessions.get(send.worker)
        if isinstance(send.command, Pause):
            self._pause_began.setdefault(send.worker, self._clock())
        elif isinstance(send.command, Publish):
            self._publishing.add((send.worker, send.seq))
        try:
            if session is None:
                raise PeerUnreachable(f"{send.worker}: not connected")  # noqa: TRY301
            await session.send(Envelope(self._epoch, self._round, send.seq, send.command))
        except PeerUnreachable as error:
            if send.expects_reply:
                self.post(AgentLost(send.worker, str(error)))

    def _enter(self, phase: Phase, entry: int) -> None:
        self._leave_phase()
        _log.debug("phase %s", phase.value)
        self._on_phase(phase)
        self._phase, self._phase_began = phase, self._clock()
        self._timer = asyncio.get_running_loop().call_later(
            _deadline_of(phase, self._deadlines), self.post, DeadlinePassed(entry)
        )

    def _leave_phase(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._phase is not None:
            spent = self._clock() - self._phase_began
            self._phase_s[self._phase] = self._phase_s.get(self._phase, 0.0) + spent
            self._phase = None


def _deadline_of(phase: Phase, deadlines: PhaseDeadlines) -> float:
    match phase:
        case Phase.PREPARE:
            return max(deadlines.prepare_s, deadlines.pause_s)
        case Phase.WRITE:
            return deadlines.write_s
        case Phase.VERIFY:
            return deadlines.verify_s
        case Phase.PAUSE:
            return deadlines.pause_s
        case Phase.APPLY:
            return deadlines.apply_s
        case Phase.PUBLISH | Phase.DONE:
            return deadlines.publish_s
        case _:
            assert_never(phase)
