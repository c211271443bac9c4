"""Updates that trainer heads drive themselves, call by call, as one transaction for the fleet.

    pause_generation      of the first head: no round runs from now on; every engine comes to rest
    init group, update    one at a time, to all engines at once
    continue_generation   of the last head: every engine says that all came, then apply and publish

Engines gather what comes in a shadow, so that a call that fails leaves the old version whole: the
last `continue_generation` then aborts, and says which call failed. Collectives go one at a time,
in one order for all engines: the order that the heads declare (`DeclaredOrder`), or, if they
declare none, that in which the controller takes them up. Two heads that arrive in opposite order
at two engines cannot happen, and no ring of waiting forms.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol, assert_never, final

import msgspec
from aiohttp import web

from windlass.config import ControlConfig
from windlass.errors import DECODE_ERRORS, PeerUnreachable, RoundAborted, WindlassError
from windlass.updates.callback_messages import (
    CallbackAnswer,
    CallbackRequest,
    ContinueCall,
    DiskCall,
    DistributedCall,
    GroupCall,
    MembersCall,
    PauseCall,
)
from windlass.updates.fleet import Group
from windlass.updates.messages import (
    FAREWELL,
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
    Verified,
    Verify,
)
from windlass.updates.push_command import DeclaredOrder
from windlass.updates.relay_round import time_to_act_s
from windlass.updates.session import AgentSession

__all__ = ["HandDrivenOwner", "HandDrivenUpdates"]

_log = logging.getLogger(__name__)

REMEMBERED = 4096
"""Answers that are kept for calls that are asked again."""


class HandDrivenOwner(Protocol):
    """What the coordinator lends."""

    @property
    def lineage(self) -> str:
        """Of the run whose versions are published."""
        ...

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
        self.ending = False
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
        if head not in self.heads:
            raise RoundAborted(f"callback: {head} must call pause_generation first")
        if self.order is None:
            return nullcontext()
        return self.order.turn(self.stages[head], number)

    def fail(self, reason: str) -> None:
        """The update will not be published; the first reason is kept."""
        self.failure = self.failure or reason
        if self.order is not None:
            self.order.fail(self.failure)

    @property
    def workers(self) -> tuple[str, ...]:
        """All engine ranks, in an order that is the same for everybody."""
        return self.ranks(())

    def ranks(self, without: Collection[str]) -> tuple[str, ...]:
        """The ranks of all engines but these, in the order of `workers`."""
        names = [name for name in sorted(self.engines) if name not in without]
        return tuple(worker for name in names for worker in self.engines[name])

    def blame(self, failed: Mapping[str, str]) -> dict[str, str]:
        """Engine -> why, of the ranks that failed."""
        return {
            name: _listed({w: failed[w] for w in workers if w in failed})
            for name, workers in self.engines.items()
            if failed.keys() & set(workers)
        }


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
                while not await self._pause(asked.head, call, deadline_s):
                    pass
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

    async def _pause(self, head: str, call: PauseCall, deadline_s: float) -> bool:
        """Begin or join; False after waiting for the end of one that could not be joined."""
        async with self._lane:
            ending = self._update
            if ending is None:
                await self._begin(head, call, deadline_s)
                return True
            if not ending.ending:
                ending.join(head, call.stage, call.num_stages)
                return True
        # Its engines go on soon, whatever becomes of it: nobody may take them for paused.
        await asyncio.shield(ending.ended)
        return False

    async def _begin(self, head: str, call: PauseCall, deadline_s: float) -> None:
        place, groups, sessions = await self._owner.begin_by_hand()
        self._update = update = _Update(place, groups, sessions)
        update.timer = asyncio.get_running_loop().call_later(call.session_s, self._expire, update)
        try:
            await self._tell(update, BeginByHand(), deadline_s)
            await self._tell(update, Pause(self._config.pause_mode, deadline_s), deadline_s)
            update.join(head, call.stage, call.num_stages)
        except BaseException:  # the deadline too: nobody has joined, so nobody would end it
            self._give_up_soon(update, "pause_generation failed")
            raise

    async def _tell_all(self, asked: CallbackRequest, command: Command) -> None:
        """One collective at a time: the order is the same at every engine."""
        async with self._running().turn(asked.head, asked.number), self._lane:
            update = self._running()
            if update.failure:
                raise RoundAborted(f"callback: the update has failed already: {update.failure}")
            await self._tell(update, command, asked.deadline_s)

    async def _tell(self, update: _Update, command: Command, deadline_s: float) -> None:
        results = await self._call(update, update.workers, command, deadline_s)
        if failed := _unlike(results, Done):
            raise RoundAborted(_listed(failed))

    async def _continue(self, head: str, version: int, deadline_s: float) -> None:
        update = self._running()
        if version < 0:
            update.fail(f"{head} has no version to publish")
        if update.leave(head) and not update.ending:
            # A task of its own: were it to end with the caller's deadline, an engine that has
            # applied could go on with weights of one version under the name of another.
            update.ending = True
            self._answers[f"end/{update.place}"] = asyncio.create_task(
                self._finish(update, version, deadline_s)
            )
        failure = await asyncio.shield(update.ended)
        if failure:
            raise RoundAborted(f"version {version} was not published: {failure}")

    async def _finish(self, update: _Update, version: int, deadline_s: float) -> CallbackAnswer:
        async with self._lane:
            if self._update is not update:
                return CallbackAnswer()
            away: dict[str, str] = {}
            mixed: dict[str, str] = {}
            reason = update.failure
            if not reason:
                reason = await self._find_incomplete(update, version, away, deadline_s)
            if not reason:
                reason = self._refusal(version)
            if reason:
                await self._abort(update, reason)
                return CallbackAnswer()
            publish = Publish(version, time_to_act_s(deadline_s), self._owner.lineage)
            for command in (Apply(version), publish):
                ranks = update.ranks({*away, *mixed})
                results = await self._call(update, ranks, command, deadline_s)
                mixed |= update.blame(_unlike(results, Done))
            for name, tainted in (*((n, False) for n in away), *((n, True) for n in mixed)):
                for worker in update.engines[name]:
                    await self._farewell(update, worker, tainted=tainted)
            served = tuple(sorted(set(update.engines) - {*away, *mixed}))
            reason = "" if served else f"no engine could apply it: {_listed(mixed)}"
            await self._end(update, version, served, tuple(sorted(mixed)), reason)
        return CallbackAnswer()

    async def _find_incomplete(
        self, update: _Update, version: int, away: dict[str, str], deadline_s: float
    ) -> str:
        """Why nothing may be applied; empty when all came. `away`: engines that do not answer."""
        results = await self._call(update, update.workers, Verify(version, {}), deadline_s)
        refused = {w: r.message for w, r in results.items() if isinstance(r, Failure)}
        if refused:
            return _listed(refused)
        away |= update.blame(_unlike(results, Verified))
        return "" if len(away) < len(update.engines) else f"no engine is left: {_listed(away)}"

    def _refusal(self, version: int) -> str:
        """Why the version must not be published; it is on record if it may."""
        try:
            self._owner.check_version(version)
        except RoundAborted as error:
            return str(error)
        return ""

    async def _abort(self, update: _Update, reason: str) -> None:
        for worker in update.workers:
            await self._farewell(update, worker, tainted=False)
        await self._end(update, -1, (), (), reason)

    async def _end(
        self,
        update: _Update,
        version: int,
        served: tuple[str, ...],
        tainted: tuple[str, ...],
        reason: str,
    ) -> None:
        if update.timer is not None:
            update.timer.cancel()
        self._update = None
        update.ended.set_result(reason)
        await self._owner.end_by_hand(version if served else None, served, tainted)

    def _expire(self, update: _Update) -> None:
        """The heads have vanished: nobody will end this."""
        if self._update is update:
            self._give_up_soon(update, "the heads did not continue within the session's deadline")

    def _give_up_soon(self, update: _Update, reason: str) -> None:
        update.ending = True
        self._answers[f"given up/{update.place}"] = asyncio.create_task(
            self._give_up(update, reason)
        )

    async def _give_up(self, update: _Update, reason: str) -> CallbackAnswer:
        async with self._lane:
            if self._update is update:
                await self._abort(update, reason)
        return CallbackAnswer()

    async def _farewell(self, update: _Update, worker: str, *, tainted: bool) -> None:
        update.seq += 1
        session = update.sessions.get(worker)
        if session is None:
            return
        farewell = Abort(FAREWELL, tainted, time_to_act_s(self._config.deadlines.publish_s))
        try:
            await session.call((*update.place, update.seq), farewell)
        except PeerUnreachable as error:
            _log.info("%s", error)
        session.forget((*update.place, update.seq))

    async def _call(
        self,
        update: _Update,
        workers: tuple[str, ...],
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


def _unlike(results: Mapping[str, Result | str], kind: type[Result]) -> dict[str, str]:
    """Rank -> why, of those that did not answer as they should."""
    return {w: _why(r) for w, r in results.items() if not isinstance(r, kind)}


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())


def _why(result: Result | str) -> str:
    if isinstance(result, Failure):
        return result.message
    return result if isinstance(result, str) else f"answered {type(result).__name__}"
