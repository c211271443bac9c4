"""Driver of one round: carry out the instructions of the round's state machine, and pass it replies and deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import assert_never, final

import msgspec

from windlass.control.binding import Binding
from windlass.control.messages import Result
from windlass.control.report import wire_by_transport
from windlass.control.round_state import Phase, deadline_of
from windlass.control.round_times import RoundTimes
from windlass.control.rounds import (
    AgentLost,
    DeadlinePassed,
    EnterPhase,
    Event,
    Finish,
    GiveUp,
    Instruction,
    Replied,
    RoundMachine,
    RoundSpec,
    Send,
)
from windlass.control.session import AgentSession
from windlass.errors import PeerUnreachable
from windlass.net.logs import log_fields
from windlass.net.messages import Envelope, Reply, RoundId

_log = logging.getLogger(__name__)


@final
class RoundDriver:
    """Driver of one round. Call `run` once, and `post` and `on_reply` from the same loop at any time.

    Args:
        spec: specification of the round.
        binding: sources, engines and links of the round.
        round_id: id of the round, in each of its commands.
        sessions: rank -> its session. Ranks that connect later take no part.
        clock: function that returns seconds, for the times in the report.
        on_phase: function that is called before each phase begins, and with `DONE` at the end of every round. If it
            raises OSError, the phase does not begin and the round ends.

    Attributes:
        machine: state machine of the round.
        deadlines: deadlines of the phases that have not begun.
        late: replies that arrived while the round was ending, which the machine has not processed.
    """

    def __init__(
        self,
        spec: RoundSpec,
        binding: Binding,
        *,
        round_id: RoundId,
        sessions: Mapping[str, AgentSession],
        clock: Callable[[], float],
        on_phase: Callable[[Phase], None],
    ) -> None:
        self.machine = RoundMachine(spec)
        self.spec, self.binding = spec, binding
        self.round_id = round_id
        self.deadlines = spec.config.deadlines
        self.sessions = dict(sessions)
        self._on_phase = on_phase
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._times = RoundTimes(clock)
        self.late: tuple[Replied, ...] = ()

    def post(self, event: Event) -> None:
        """Queue an event for the state machine. `run` processes events in the order in which they were queued."""
        self._events.put_nowait(event)

    def on_reply(self, session: AgentSession, reply: Reply[Result]) -> None:
        """Queue a reply for the state machine.

        Ignore replies of other rounds, and replies from sessions that are not part of this round.
        """
        worker = session.peer
        if reply.round_id == self.round_id and self.sessions.get(worker) is session:
            self._times.answered(worker, reply.seq)
            self.post(Replied(worker, reply.seq, reply.result))

    async def run(self) -> Finish:
        """Run the machine until it finishes. Every phase has a deadline, so the round ends.

        Returns:
            Outcome of the machine, with the times and transports that only the driver knows.
        """
        with log_fields(round_number=self.round_id.round, version=self.machine.version):
            try:
                finish = await self._run()
            finally:
                self._on_phase(Phase.DONE)
            report = finish.report
            why = f": {report.reason}" if report.reason else ""
            _log.info("round %s in %.3f s%s", report.outcome.value, report.update_s, why)
        return finish

    async def _run(self) -> Finish:
        finish = await self._carry_out(self._next(self.machine.start))
        while finish is None:
            event = await self._events.get()
            finish = await self._carry_out(self._next(partial(self.machine.handle, event)))
        self._leave_phase()
        late = [self._events.get_nowait() for _ in range(self._events.qsize())]
        self.late = tuple(event for event in late if isinstance(event, Replied))
        report = msgspec.structs.replace(
            finish.report,
            measures=finish.report.measures | self._times.measures(),
            phase_s=self._times.phase_s,
            transports=dict(Counter(self.binding.transport_of.values())),
            wire=wire_by_transport(finish.carried, self.binding.transport_of),
        )
        return replace(finish, report=report)

    def _next(self, step: Callable[[], list[Instruction]]) -> list[Instruction]:
        """Run `step`, a call of the state machine, and return its instructions.

        An exception of the machine is a bug. Log the exception, and return the instructions that end the round as
        failed: trainers wait for the report, and the fleet must record which engines were written.
        """
        try:
            return step()
        except Exception as error:  # noqa: BLE001
            _log.exception("internal error in phase %s", self.machine.phase)
            return self.machine.abandon(f"internal error: {type(error).__name__}: {error}")

    async def _carry_out(self, instructions: list[Instruction]) -> Finish | None:
        finish: Finish | None = None
        for instruction in instructions:
            match instruction:
                case EnterPhase():
                    try:
                        self._enter(instruction.phase, instruction.entry)
                    except OSError as error:
                        # Drop the remaining instructions, because they belong to the phase that did not begin.
                        reason = f"the journal cannot record phase {instruction.phase}: {error}"
                        blocked = partial(self.machine.handle, GiveUp(reason, is_blocked=True))
                        return await self._carry_out(self._next(blocked))
                case Send():
                    await self._send(instruction)
                case Finish():
                    finish = instruction
                case _:
                    assert_never(instruction)
        return finish

    async def _send(self, send: Send) -> None:
        session = self.sessions.get(send.worker)
        self._times.sent(send.worker, send.seq, send.command)
        try:
            if session is None:
                raise PeerUnreachable(f"{send.worker}: not connected")  # noqa: TRY301
            await session.send(Envelope(*self.round_id, send.seq, send.command))
        except PeerUnreachable as error:
            if send.expects_reply:
                self.post(AgentLost(send.worker, str(error)))

    def _enter(self, phase: Phase, entry: int) -> None:
        self._leave_phase()
        _log.debug("phase %s", phase.value)
        self._on_phase(phase)
        self._times.enter(phase)
        self._timer = asyncio.get_running_loop().call_later(
            deadline_of(phase, self.deadlines), self.post, DeadlinePassed(entry)
        )

    def _leave_phase(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._times.leave()
