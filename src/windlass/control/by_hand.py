"""Updates that trainer heads drive themselves, call by call, as one transaction for the fleet.

    pause_generation      of the first head: no round runs from now on; every engine comes to rest
    init group, update    one at a time, to all engines at once
    continue_generation   of the last head: apply and publish everywhere, or nowhere

Engines gather what comes in a shadow, so that a call that fails leaves the old version whole: the
last `continue_generation` then aborts, and says which call failed. Collectives go one at a time,
in one order for all engines: the order that the heads declare (`DeclaredOrder`), or, if they
declare none, that in which the controller takes them up. Two heads that arrive in opposite order
at two engines cannot happen, and no ring of waiting forms.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol, assert_never, final

import msgspec
from aiohttp import web

from windlass.config import ControlConfig
from windlass.control.by_hand_order import DeclaredOrder
from windlass.control.callback_messages import (
    CallbackAnswer,
    CallbackRequest,
    ContinueCall,
    DiskCall,
    DistributedCall,
    GroupCall,
    MembersCall,
    PauseCall,
)
from windlass.control.fleet import Group
from windlass.control.messages import (
    Abort,
    Apply,
    BeginByHand,
    Command,
    Done,
    Failure,
    JoinByHand,
    Pause,
    Publish,
    Result,
    TakeFiles,
    TakeTensors,
)
from windlass.control.session import AgentSession
from windlass.errors import DECODE_ERRORS, PeerUnreachable, RoundAborted, WindlassError

__all__ = ["HandDrivenOwner", "HandDrivenUpdates"]

_log = logging.getLogger(__name__)

REMEMBERED = 4096
"""Answers that are kept for calls that are asked again."""


class HandDrivenOwner(Protocol):
    """What the coordinator lends."""

    async def begin_by_hand(
        self,
    ) -> tuple[tuple[int, int], dict[str, Group], dict[str, AgentSession]]:
        """Wait for the running round, let none begin; (epoch, round), engines, and sessions.

        Raises:
            PeerUnreachable: there is no complete engine.
        """
        ...

    async def end_by_hand(
        self, version: int | None, served: tuple[str, ...], tainted: tuple[str, ...]
    ) -> None:
        """Let rounds begin again; `version` is published if it is not None."""
        ...

    def check_version(self, version: int) -> None:
        """Refuse a version that is not newer than all before.

        Raises:
            RoundAborted: it is not.
        """
        ...


@final
class _Update:
    """One transaction: who takes part, which heads have paused, and what went wrong."""

    def __init__(
        self, place: tuple[int, int], groups: Mapping[str, Group], sessions: dict[str, AgentSession]
    ) -> None:
        self.place = place
        self.engines = {name: group.workers for name, group in groups.items()}
        self.sessions = sessions
        self.heads: set[str] = set()
        self.joined = False
        self.order: DeclaredOrder | None = None
        self.stages: dict[str, int] = {}
        self.failure = ""
        self.seq = 0
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None

    def join(self, head: str, stage: int, num_stages: int) -> None:
        """A head takes part; all of them declare an order, or none.

        Raises:
            RoundAborted: heads that do not agree, or a stage that is taken or out of range.
        """
        if not self.joined and num_stages:
            self.order = DeclaredOrder(num_stages)
        self.joined = True
        agreed = 0 if self.order is None else self.order.num_heads
        if num_stages != agreed:
            raise RoundAborted(f"callback: num_stages must be {agreed} as before, got {num_stages}")
        others = {s for h, s in self.stages.items() if h != head}
        if agreed and (not 0 <= stage < agreed or stage in others):
            raise RoundAborted(
                f"callback: stage must be in [0, {agreed}) and not in {sorted(others)}, got {stage}"
            )
        self.heads.add(head)
        if agreed:
            self.stages[head] = stage

    def leave(self, head: str) -> bool:
        """A head has sent everything; returns whether all have."""
        self.heads.discard(head)
        if self.order is None:
            return not self.heads
        if head in self.stages:
            try:
                self.order.end(self.stages[head])
            except RoundAborted as error:
                self.fail(str(error))
                self.order.end(self.stages[head])
        return self.order.over

    def turn(self, head: str, number: int) -> AbstractAsyncContextManager[None]:
        """The turn of a call; at once when no order was declared."""
        if self.order is None:
            return nullcontext()
        if head not in self.stages:
            raise RoundAborted(f"callback: {head} must call pause_generation first")
        return self.order.turn(self.stages[head], number)

    def fail(self, reason: str) -> None:
        """The update will not be published; the first reason is kept."""
        self.failure = self.failure or reason
        if self.order is not None:
            self.order.fail(self.failure)

    @property
    def workers(self) -> tuple[str, ...]:
        """All engine ranks, in an order that is the same for everybody."""
        return tuple(worker for name in sorted(self.engines) for worker in self.engines[name])


@final
class HandDrivenUpdates:
    """The lane of `RolloutCallback`. Everything happens in the coordinator's loop.

    Args:
        owner: the coordinator.
        config: pause mode and deadlines.
    """

    def __init__(self, owner: HandDrivenOwner, config: ControlConfig) -> None:
        self._owner, self._config = owner, config
        self._lane = asyncio.Lock()
        self._answers: dict[str, asyncio.Task[CallbackAnswer]] = {}
        self._update: _Update | None = None

    def routes(self) -> list[web.RouteDef]:
        """`POST /v1/callback`."""
        return [web.post("/v1/callback", self._serve)]

    async def close(self) -> None:
        """Cancel what is under way. Idempotent."""
        if self._update is not None and self._update.timer is not None:
            self._update.timer.cancel()
        for task in self._answers.values():
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)

    async def _serve(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.msgpack.decode(await request.read(), type=CallbackRequest)
        except DECODE_ERRORS as error:
            raise web.HTTPBadRequest(text=f"callback: {error}") from error
        task = self._answers.get(asked.request_id)
        if task is None:
            task = asyncio.create_task(self._answer(asked))
            self._answers[asked.request_id] = task
            while len(self._answers) > REMEMBERED:
                oldest = next(iter(self._answers))
                if not self._answers[oldest].done():
                    break
                del self._answers[oldest]
        # A caller that hangs up and asks again finds the same call, not a second one.
        answer = await asyncio.shield(task)
        return web.Response(body=msgspec.msgpack.encode(answer))

    async def _answer(self, asked: CallbackRequest) -> CallbackAnswer:
        try:
            async with asyncio.timeout(asked.deadline_s):
                return CallbackAnswer(members=await self._carry_out(asked))
        except TimeoutError:
            error = (
                f"PeerTimeout: {type(asked.call).__name__}: not done within {asked.deadline_s} s"
            )
        except WindlassError as caught:
            error = f"{type(caught).__name__}: {caught}"
        if self._update is not None and not isinstance(asked.call, MembersCall):
            self._update.fail(error)
        return CallbackAnswer(error=error)

    async def _carry_out(self, asked: CallbackRequest) -> tuple[str, ...]:
        call, deadline_s = asked.call, asked.deadline_s
        match call:
            case PauseCall():
                async with self._lane:
                    await self._pause(asked.head, call, deadline_s)
            case ContinueCall():
                await self._continue(asked.head, call.version, deadline_s)
            case MembersCall():
                return self._running().workers
            case GroupCall():
                await self._tell_all(asked, JoinByHand(call.offer, call.fabric, deadline_s))
            case DistributedCall():
                command = TakeTensors(call.group, call.tensors, deadline_s)
                await self._tell_all(asked, command)
            case DiskCall():
                await self._tell_all(asked, TakeFiles(call.folder))
            case _:
                assert_never(call)
        return ()

    def _running(self) -> _Update:
        if self._update is None:
            raise RoundAborted("callback: no update is under way: call pause_generation first")
        return self._update

    async def _pause(self, head: str, call: PauseCall, deadline_s: float) -> None:
        update = self._update
        if update is None:
            place, groups, sessions = await self._owner.begin_by_hand()
            self._update = update = _Update(place, groups, sessions)
            update.timer = asyncio.get_running_loop().call_later(
                call.session_s, self._expire, update
            )
            await self._tell(update, BeginByHand(), deadline_s)
            await self._tell(update, Pause(self._config.pause_mode, deadline_s), deadline_s)
        update.join(head, call.stage, call.num_stages)

    async def _tell_all(self, asked: CallbackRequest, command: Command) -> None:
        """One collective at a time: the order is the same at every engine."""
        async with self._running().turn(asked.head, asked.number), self._lane:
            update = self._running()
            if update.failure:
                raise RoundAborted(f"callback: the update has failed already: {update.failure}")
            await self._tell(update, command, asked.deadline_s)

    async def _tell(self, update: _Update, command: Command, deadline_s: float) -> None:
        results = await self._call(update, update.workers, command, deadline_s)
        failed = [f"{w}: {_why(r)}" for w, r in results.items() if not isinstance(r, Done)]
        if failed:
            raise RoundAborted("; ".join(failed))

    async def _continue(self, head: str, version: int, deadline_s: float) -> None:
        update = self._running()
        if update.leave(head):
            async with self._lane:
                if self._update is update:
                    await self._finish(update, version, deadline_s)
        failure = await asyncio.shield(update.ended)
        if failure:
            raise RoundAborted(f"version {version} was not published: {failure}")

    async def _finish(self, update: _Update, version: int, deadline_s: float) -> None:
        if not update.failure:
            try:
                self._owner.check_version(version)
            except RoundAborted as error:
                update.failure = str(error)
        if update.failure:
            await self._abort(update, update.failure)
            return
        applied = await self._call(update, update.workers, Apply(version), deadline_s)
        bad = {w: _why(r) for w, r in applied.items() if not isinstance(r, Done)}
        if len(bad) == len(update.workers):
            await self._abort(update, "; ".join(f"{w}: {r}" for w, r in bad.items()))
            return
        lost = {name for name, workers in update.engines.items() if set(workers) & set(bad)}
        good = [w for name, ws in update.engines.items() if name not in lost for w in ws]
        published = await self._call(update, good, Publish(version), deadline_s)
        for name, workers in update.engines.items():
            if any(not isinstance(published.get(w), Done) for w in workers):
                lost.add(name)
        for name in lost:
            for worker in update.engines[name]:
                await self._farewell(update, worker, "could not apply the update", tainted=True)
        served = tuple(sorted(set(update.engines) - lost))
        await self._end(update, version if served else None, served, tuple(sorted(lost)), "")

    async def _abort(self, update: _Update, reason: str) -> None:
        for worker in update.workers:
            await self._farewell(update, worker, reason, tainted=False)
        await self._end(update, None, (), (), reason)

    async def _end(
        self,
        update: _Update,
        version: int | None,
        served: tuple[str, ...],
        tainted: tuple[str, ...],
        reason: str,
    ) -> None:
        if update.timer is not None:
            update.timer.cancel()
        self._update = None
        if version is None and not reason:
            reason = f"no engine could apply it: {', '.join(tainted)}"
        update.ended.set_result(reason)
        await self._owner.end_by_hand(version, served, tainted)

    def _expire(self, update: _Update) -> None:
        """The heads have vanished: nobody will end this."""
        if self._update is update:
            key = f"expired/{update.place}"
            self._answers[key] = asyncio.create_task(self._give_up(update))

    async def _give_up(self, update: _Update) -> CallbackAnswer:
        async with self._lane:
            if self._update is update:
                await self._abort(
                    update, "the heads did not continue within the session's deadline"
                )
        return CallbackAnswer()

    async def _farewell(self, update: _Update, worker: str, reason: str, *, tainted: bool) -> None:
        update.seq += 1
        session = update.sessions.get(worker)
        if session is None:
            return
        try:
            await session.call((*update.place, update.seq), Abort(reason, tainted))
        except PeerUnreachable as error:
            _log.info("%s", error)
        session.forget((*update.place, update.seq))

    async def _call(
        self,
        update: _Update,
        workers: tuple[str, ...] | list[str],
        command: Command,
        deadline_s: float,
    ) -> dict[str, Result | str]:
        answers = await asyncio.gather(
            *(self._one(update, worker, command, deadline_s) for worker in workers)
        )
        return dict(zip(workers, answers, strict=True))

    async def _one(
        self, update: _Update, worker: str, command: Command, deadline_s: float
    ) -> Result | str:
        update.seq += 1
        key = (*update.place, update.seq)
        session = update.sessions.get(worker)
        if session is None:
            return "not connected"
        try:
            async with asyncio.timeout(deadline_s):
                return await (await session.call(key, command))
        except TimeoutError:
            return f"no answer within {deadline_s} s"
        except PeerUnreachable as error:
            return str(error)
        finally:
            session.forget(key)


def _why(result: Result | str) -> str:
    if isinstance(result, Failure):
        return result.message
    return result if isinstance(result, str) else f"answered {type(result).__name__}"
