"""Controller side of `push`: leaders (trainer ranks that send) drive a round (one update) themselves, call by call.

    pause_generation      the first leader begins the round; engines pause (PREPARE)
    init group, update    all engines carry out one call at a time (WRITE)
    continue_generation   the last leader ends the round: VERIFY that all tensors arrived, APPLY, PUBLISH

Engines collect the tensors in a shadow copy, so a failed call leaves the old version whole. The last
`continue_generation` then ends the round and names the failed call. Collectives run one at a time, in one order for
all engines, so that they cannot deadlock. The leaders declare this order (`PushOrder`); otherwise it is the order in
which the calls arrive at the controller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import ClassVar, assert_never, final

import msgspec
from aiohttp import web

from windlass.config import PushBackend, UpdateMode
from windlass.control import driven
from windlass.control.coordinator import Coordinator
from windlass.control.delivery import Delivery, Findings, Order
from windlass.control.driven import DrivenRound
from windlass.control.messages import BeginDriven, Command, Done, Result
from windlass.control.push_messages import (
    AliveCall,
    CallbackAnswer,
    CallbackRequest,
    ContinueCall,
    JoinPushGroup,
    MembersCall,
    PauseCall,
    PushCommand,
    ReadFiles,
    ReceiveTensors,
)
from windlass.control.report import Measure, RoundOutcome
from windlass.control.round_state import Phase
from windlass.control.session import describe, failures_of
from windlass.errors import DECODE_ERRORS, ProtocolError, RoundAborted, WindlassError
from windlass.net.messages import check_name

REMEMBERED = 4096
"""Number of newest answers that the controller keeps for repeated requests."""
MAX_CALL_S = 86400
"""Largest deadline of a call, in seconds."""
WATCH_EVERY_S = 0.25
"""Seconds between two checks that the leaders have reported within their leases."""


@final
class PushOrder:
    """Order of the leaders' calls: grants one turn at a time, in one event loop.

    Args:
        num_leaders: number of leaders that take part. The calls of all leaders wait for a leader that has not called yet.
    """

    def __init__(self, num_leaders: int) -> None:
        self.num_leaders = num_leaders
        self._next = (0, 0)
        self._ended: set[int] = set()
        self._waiting: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._failure = ""

    @property
    def over(self) -> bool:
        """Whether every leader has ended."""
        return len(self._ended) == self.num_leaders

    @asynccontextmanager
    async def turn(self, leader: int, number: int) -> AsyncIterator[None]:
        """Wait until it is the turn of call `number` of `leader`, run the block, and pass the turn to the next call.

        The order is: call 0 of leader 0, call 0 of leader 1, and so on, then call 1 of leader 0. If a leader has ended,
        skip it.

        Raises:
            RoundAborted: the turn has passed or was requested before, or `fail` was called.
        """
        call = (number, leader)
        if call < self._next or call in self._waiting:
            raise RoundAborted(
                f"callback: call {number} of leader {leader} was sent twice or too late; the next call must be call "
                f"{self._next[0]} of leader {self._next[1]}"
            )
        if call > self._next and not self._failure:
            turn = asyncio.get_running_loop().create_future()
            self._waiting[call] = turn
            try:
                await turn
            finally:
                self._waiting.pop(call, None)
        if self._failure:
            raise RoundAborted(f"callback: the update has failed already: {self._failure}")
        try:
            yield
        finally:
            self._advance()

    def end(self, leader: int) -> str:
        """Record that `leader` makes no more calls. Idempotent.

        If a call of this leader still waits for its turn, all calls fail.

        Returns:
            Reason why calls fail; empty if they do not fail.
        """
        if early := [number for number, other in self._waiting if other == leader]:
            self.fail(f"callback: stage {leader} ended before its call {min(early)}")
        self._ended.add(leader)
        if self._next[1] == leader and not self.over:
            self._advance()
        return self._failure

    def fail(self, reason: str) -> None:
        """Fail all waiting and all later calls, and wake the waiting calls. A repeated call keeps the first `reason`."""
        self._failure = self._failure or reason
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_result(None)

    def _advance(self) -> None:
        """Set `_next` to the next call of a leader that has not ended, and wake that call if it waits for its turn."""
        number, leader = self._next
        while not self.over:
            number, leader = (
                (number, leader + 1) if leader + 1 < self.num_leaders else (number + 1, 0)
            )
            if leader not in self._ended:
                break
        self._next = (number, leader)
        turn = self._waiting.get(self._next)
        if turn is not None and not turn.done():
            turn.set_result(None)


@final
class PushDelivery(Delivery):
    """Delivery by the trainer's own calls: they send whole tensors into a shadow copy of every engine rank.

    WRITE lasts until `sent`. Every engine rank verifies that all tensors have arrived. If an engine answers with a
    failure before APPLY, the round publishes nothing, because the engine's group is broken.
    """

    reserves_in: ClassVar[Phase] = Phase.APPLY

    def __init__(self) -> None:
        self._has_sent = False
        self._measured = {Measure.WIRE_S: 0.0, Measure.NBYTES: 0.0}

    def prepare(self, engines: Collection[str]) -> tuple[Order, ...]:
        """Return the commands that tell each engine rank to begin to collect tensors."""
        return tuple(Order(worker, BeginDriven(PushBackend())) for worker in engines)

    def unlinked(self, engines: Collection[str]) -> Collection[str]:
        """Return all engine ranks.

        The leaders send the tensors themselves, so the transfer plan has no writes (links) to these ranks. Each rank must
        still verify that all tensors have arrived.
        """
        return engines

    @property
    def awaited(self) -> str:
        """Reason to report if WRITE ends at its deadline; empty after `sent` was called."""
        return "" if self._has_sent else "not every leader called continue_generation"

    def sent(self) -> None:
        """Record that the leaders have sent all tensors, so that WRITE may end."""
        self._has_sent = True

    @property
    def measures(self) -> Mapping[Measure, float]:
        """Seconds and bytes of all broadcasts, as the controller has measured them; the ranks do not report them."""
        return {measure: value for measure, value in self._measured.items() if value}

    def note(self, nbytes: int, wire_s: float) -> None:
        """Add the bytes and seconds of one broadcast to `measures`."""
        self._measured[Measure.NBYTES] += nbytes
        self._measured[Measure.WIRE_S] += wire_s

    def changes_live(self, mode: UpdateMode) -> bool:  # noqa: ARG002
        """Return False: the tensors arrive in a shadow copy, so live weights change only in APPLY."""
        return False

    def survives_failure(self, phase: Phase) -> bool:
        """Return whether the round continues for the other engines after one engine has failed in `phase`.

        In PREPARE and VERIFY, return False. In WRITE, return True: the leader's call marks the update as failed, so the
        round will publish nothing. From APPLY on, return True: the round leaves out only the failed engine.
        """
        return phase not in {Phase.PREPARE, Phase.VERIFY}

    def answered(self, worker: str, command: Command, result: Result) -> Findings | None:  # noqa: ARG002
        """Return an empty `Findings` if the rank answered `BeginDriven` with `Done`, otherwise None."""
        return Findings() if (type(command), type(result)) == (BeginDriven, Done) else None


@final
class _Push:
    """One round driven by leaders: the leaders that take part, the order of their calls, and the first failure."""

    def __init__(self, round_: DrivenRound, delivery: PushDelivery) -> None:
        self.round, self._delivery = round_, delivery
        self.is_ending = False
        self.failure = ""
        self._leaders: set[str] = set()
        # Leader that has sent all its tensors -> their version.
        self._sent: dict[str, int] = {}
        self._has_begun = False
        self._order: PushOrder | None = None
        self._stages: dict[str, int] = {}
        self._lease_s: dict[str, float] = {}
        self._silent_s: dict[str, float] = {}

    def join(self, leader: str, call: PauseCall) -> None:
        """Add a leader to the round. The first leader decides whether all leaders must declare a stage.

        Args:
            leader: name of the leader.
            call: the leader's call.

        Raises:
            RoundAborted: the leaders declare different numbers of stages, or the stage is taken or out of range.
        """
        stage, num_stages = call.stage, call.num_stages
        if not self._has_begun and num_stages:
            self._order = PushOrder(num_stages)
        self._has_begun = True
        agreed = 0 if self._order is None else self._order.num_leaders
        if num_stages != agreed:
            raise RoundAborted(
                f"callback: num_stages must be {agreed} as in the first leader's call, got {num_stages}"
            )
        others = {s for name, s in self._stages.items() if name != leader}
        if agreed and (not 0 <= stage < agreed or stage in others):
            raise RoundAborted(
                f"callback: stage must be in [0, {agreed}) and differ from the other leaders' stages {sorted(others)}, got {stage}"
            )
        self._leaders.add(leader)
        self._lease_s[leader] = call.lease_s
        self._silent_s[leader] = 0.0
        if agreed:
            self._stages[leader] = stage

    def note_alive(self, leader: str) -> None:
        """Record that the process of a leader is alive. Do nothing if the leader has not joined or has ended."""
        if leader in self._leaders:
            self._silent_s[leader] = 0.0

    def watch(self, passed_s: float) -> str:
        """Add `passed_s` to the time since the last report, for every leader that has not ended.

        Returns:
            Reason why the update must end; empty if every leader has reported within its lease.
        """
        for leader in sorted(self._leaders):
            self._silent_s[leader] += passed_s
            if 0 < (lease_s := self._lease_s[leader]) < self._silent_s[leader]:
                return (
                    f"{leader} has not reported for {lease_s:g} s, so its process has probably died"
                )
        return ""

    def has_left(self, leader: str) -> bool:
        """Return whether a leader has sent all its tensors in this round."""
        return leader in self._sent

    def leave(self, leader: str, version: int) -> bool:
        """Record that a leader has sent all its tensors. Return whether all leaders of the round have sent theirs.

        If the leaders declared stages, return True only after the leader of every stage has sent its tensors. If the
        leaders have sent tensors of different versions, the update fails.

        Raises:
            RoundAborted: the leader has not joined the round.
        """
        self._require_joined(leader, self._leaders | self._sent.keys())
        if version < 0:
            self.fail(f"{leader} has no version to publish")
        self._sent.setdefault(leader, version)
        if len(sent := {*self._sent.values(), version}) > 1:
            self.fail(f"callback: version must be equal for all leaders, got {sorted(sent)}")
        self._leaders.discard(leader)
        if self._order is None:
            return not self._leaders
        if leader in self._stages and (reason := self._order.end(self._stages[leader])):
            self.fail(reason)
        return self._order.over

    def turn(self, leader: str, number: int) -> AbstractAsyncContextManager[None]:
        """Return an async context manager that waits for the turn of call `number` of a leader.

        If the leaders declared no stages, the context manager does not wait.

        Raises:
            RoundAborted: the leader has not joined the round. Entering the context manager raises the errors of
                `PushOrder.turn`.
        """
        self._require_joined(leader, self._leaders)
        if self._order is None:
            return nullcontext()
        return self._order.turn(self._stages[leader], number)

    @staticmethod
    def _require_joined(leader: str, joined: Collection[str]) -> None:
        """Raise RoundAborted unless `leader` is in `joined`."""
        if leader not in joined:
            raise RoundAborted(f"callback: {leader} must call pause_generation first")

    def fail(self, reason: str) -> None:
        """Mark the update as failed, so that later calls fail too. Only the first reason is kept."""
        self.failure = self.failure or reason
        if self._order is not None:
            self._order.fail(self.failure)

    async def call(self, command: PushCommand, deadline_s: float) -> None:
        """Send a command to every engine rank of the round, and wait until all ranks have carried out the command.

        Raises:
            RoundAborted: a rank failed or did not answer within `deadline_s`, or an earlier call failed.
        """
        if self.failure:
            raise RoundAborted(f"callback: the update has failed already: {self.failure}")
        began_s, num_ranks = time.perf_counter(), len(self.round.workers)
        results = await self.round.call(command, deadline_s)
        if isinstance(command, ReceiveTensors):
            nbytes = num_ranks * sum(tensor.nbytes for tensor in command.tensors)
            self._delivery.note(nbytes, time.perf_counter() - began_s)
        if failed := failures_of(results, Done):
            raise RoundAborted("; ".join(f"{w}: {describe(r)}" for w, r in failed.items()))


@final
class PushUpdates:
    """Server of the `RolloutCallback` calls, in the event loop of the coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._lock = asyncio.Lock()
        self._answers: dict[str, asyncio.Task[CallbackAnswer]] = {}
        self._latest: _Push | None = None

    def routes(self) -> list[web.RouteDef]:
        """Return the route `POST /v1/callback`."""
        return [web.post("/v1/callback", self._serve)]

    async def _serve(self, request: web.Request) -> web.Response:
        """Carry out a call in a new task, and return the answer. Answer a malformed request with status 400.

        A request that repeats an id gets the answer of the first request with this id. The server remembers the newest
        `REMEMBERED` ids.
        """
        try:
            asked = msgspec.msgpack.decode(await request.read(), type=CallbackRequest)
            _check(asked)
        except (*DECODE_ERRORS, ProtocolError) as error:
            raise web.HTTPBadRequest(text=f"callback: {error}") from error
        task = self._answers.get(asked.request_id)
        if task is None:
            task = self._coordinator.tasks.spawn(self._answer(asked))
            self._answers[asked.request_id] = task
            while len(self._answers) > REMEMBERED:
                oldest = next(iter(self._answers))
                if not self._answers[oldest].done():
                    break
                del self._answers[oldest]
        # A caller that disconnects and repeats its request gets the result of the same call.
        answer = await asyncio.shield(task)
        return web.Response(body=msgspec.msgpack.encode(answer))

    async def _answer(self, asked: CallbackRequest) -> CallbackAnswer:
        """Carry out a call within its deadline, and return its answer. If the call fails, mark the running update as failed."""
        push = self._latest
        try:
            async with asyncio.timeout(asked.deadline_s):
                return CallbackAnswer(members=await self.carry_out(asked))
        except TimeoutError:
            error = f"PeerTimeout: the controller did not finish {type(asked.call).__name__} within {asked.deadline_s} s"
        except WindlassError as caught:
            error = f"{type(caught).__name__}: {caught}"
        if push is not None and push is self._latest and not isinstance(asked.call, MembersCall):
            push.fail(error)
        return CallbackAnswer(error=error)

    async def carry_out(self, asked: CallbackRequest) -> tuple[str, ...]:
        """Carry out a leader's call. For a `MembersCall`, return the engine ranks of the running update, else ().

        Raises:
            RoundAborted: no update is running, the update or the call failed, or the version was not published.
            PeerUnreachable: no complete engine is connected.
        """
        call, deadline_s = asked.call, asked.deadline_s
        match call:
            case PauseCall():
                while not await self._pause(asked.leader, call, deadline_s):
                    pass
            case ContinueCall():
                await self._continue(asked.leader, call.version, deadline_s)
            case MembersCall():
                return self._running().round.workers
            case AliveCall():
                # The update may have ended, which is no error.
                if self._latest is not None:
                    self._latest.note_alive(asked.leader)
            case JoinPushGroup() | ReceiveTensors() | ReadFiles():
                await self._call_all(asked, call)
            case _:
                assert_never(call)
        return ()

    def _running(self) -> _Push:
        """Return the running update; raise RoundAborted if no update is running."""
        if self._latest is None or self._latest.round.report.done():
            raise RoundAborted("callback: no update is running; call pause_generation first")
        return self._latest

    async def _pause(self, leader: str, call: PauseCall, deadline_s: float) -> bool:
        """Begin a round, or join the running round if its engines still wait for tensors; return True.

        If the running round is in another phase, or the leader has sent all its tensors in this round, wait until the
        round has ended, and return False: the caller must try again.
        """
        async with self._lock:
            latest = self._latest
            if latest is None or latest.round.report.done():
                await self._begin(leader, call, deadline_s)
                return True
            can_join = latest.round.is_writing and not latest.is_ending
            if can_join and not latest.has_left(leader):
                latest.join(leader, call)
                return True
        # The engines of the ending round resume soon, so the leader must not treat them as paused.
        await asyncio.wait({latest.round.report})
        return False

    async def _begin(self, leader: str, call: PauseCall, deadline_s: float) -> None:
        """Begin a round, wait until its engines have paused, add its first leader, and start to watch the leases.

        If this fails, give the round up.
        """
        delivery = PushDelivery()
        begun = await driven.begin(
            self._coordinator, delivery, pause_s=deadline_s, session_s=call.session_s
        )
        self._latest = push = _Push(begun, delivery)
        try:
            await begun.until_paused()
            push.join(leader, call)
        except BaseException:
            # After any exception, no leader has joined, so no leader would end the round.
            push.is_ending = True
            begun.give_up("pause_generation failed")
            raise
        self._coordinator.tasks.spawn(self._watch(push))

    async def _watch(self, push: _Push) -> None:
        """End the round when a leader has not reported within its lease."""
        while not (await asyncio.wait({push.round.report}, timeout=WATCH_EVERY_S))[0]:
            # Count `WATCH_EVERY_S` even if this event loop was blocked for longer. While it was
            # blocked, it could not receive the leaders' reports.
            if reason := push.watch(WATCH_EVERY_S):
                push.fail(reason)
                push.is_ending = True
                push.round.give_up(reason)
                return

    async def _call_all(self, asked: CallbackRequest, command: PushCommand) -> None:
        """Wait for the call's turn and until earlier commands have ended. Then send the command to all engine ranks.

        This makes all engine ranks carry out the commands of all leaders in the same order.

        Raises:
            RoundAborted: no update is running, the leader has not joined it, the update has ended before the command was
                sent, or the call failed.
        """
        push = self._running()
        async with push.turn(asked.leader, asked.number), self._lock:
            # While the call waited, its update may have ended, and another update may have begun.
            if push.round.report.done():
                raise RoundAborted("callback: the update of this call has ended")
            await push.call(command, asked.deadline_s)

    async def _continue(self, leader: str, version: int, deadline_s: float) -> None:
        """Record that a leader has sent all its tensors, and wait until the round has ended. The last leader ends the round.

        A negative version makes the update fail. So does a version that differs from the other leaders' version.

        Raises:
            RoundAborted: no update is running, the leader has not joined it, or the version was not published.
        """
        push = self._running()
        if push.leave(leader, version) and not push.is_ending:
            # End the round in a separate task, because it must end even if the caller stops waiting.
            push.is_ending = True
            self._coordinator.tasks.spawn(self._end(push, version, deadline_s))
        report = await asyncio.shield(push.round.report)
        if report.outcome is not RoundOutcome.PUBLISHED:
            raise RoundAborted(f"version {version} was not published: {report.reason}")

    async def _end(self, push: _Push, version: int, deadline_s: float) -> None:
        """Let the round verify and publish the version after all earlier commands have ended.

        If the update failed or the run refuses the version, give the round up instead.
        """
        async with self._lock:
            if reason := push.failure or self._coordinator.run.refusal(version):
                push.round.give_up(reason)
            else:
                push.round.end(version, deadline_s)


def _check(asked: CallbackRequest) -> None:
    """Raise ProtocolError if a name of a request is invalid, or a duration is not in (0, `MAX_CALL_S`].

    Only `lease_s` may be 0: the leader then has no lease.
    """
    check_name(asked.request_id, "request_id")
    check_name(asked.leader, "leader")
    seconds = [("deadline_s", asked.deadline_s)]
    match asked.call:
        case PauseCall(session_s=session_s, lease_s=lease_s):
            seconds.append(("session_s", session_s))
            if lease_s:
                seconds.append(("lease_s", lease_s))
        case JoinPushGroup(deadline_s=deadline_s) | ReceiveTensors(deadline_s=deadline_s):
            seconds.append(("deadline_s", deadline_s))
        case _:
            pass
    for name, value in seconds:
        # NaN must fail too: a NaN deadline would break the order of the event loop's timers.
        if not 0 < value <= MAX_CALL_S:
            raise ProtocolError(f"{name} must be in (0, {MAX_CALL_S}], got {value}")
