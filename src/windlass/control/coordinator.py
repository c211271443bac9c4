"""The asyncio driver of weight updates: connections in, rounds out.

It owns the fleet, compiles bindings when the fleet has changed, and carries out the
instructions of one `RoundMachine` at a time. Everything happens in one event loop; nothing
here is shared with the rollout lanes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import final

from aiohttp import WSMsgType, web

from windlass.config import ControlConfig
from windlass.control.binding import Binding, Planner, bind_fleet, find_unplannable, signature_of
from windlass.control.driver import RoundDriver, RoundResult
from windlass.control.fleet import EngineInfo, Fleet, Group
from windlass.control.journal import Journal, JournalEntry, JournalKind
from windlass.control.messages import (
    Announce,
    Hello,
    Refused,
    Reply,
    RoundOutcome,
    UpdateReport,
    Welcome,
    decode_agent_frame,
    encode,
)
from windlass.control.round_types import AgentLost, EngineFate, Phase, RoundSpec
from windlass.control.server import ControlServer
from windlass.control.session import AgentSession
from windlass.errors import PeerTimeout, PeerUnreachable, PlanError, ProtocolError, WindlassError
from windlass.planning.planner import plan_transfer

__all__ = ["Coordinator", "EngineInfo"]

_log = logging.getLogger(__name__)


@final
class Coordinator:
    """See the module.

    Args:
        config: mode, deadlines, retries.
        journal_path: where rounds are recorded; None keeps them in memory.
        planner: compiles plans; a parameter so that tests can fail it.

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
        self._config = config
        self._planner = planner
        self._journal = Journal(journal_path)
        self._epoch = self._journal.last_epoch + 1
        self._round = self._journal.last_round
        self._published = self._journal.published_version
        self._journal.append(
            JournalEntry(JournalKind.STARTED, self._epoch, self._round, self._published)
        )
        self._fleet = Fleet()
        self._sessions: dict[str, AgentSession] = {}
        self._announced: dict[str, int] = {}
        self._binding: Binding | None = None
        self._driver: RoundDriver | None = None
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._update_listeners: list[Callable[[UpdateReport], None]] = []
        self._fleet_listeners: list[Callable[[], None]] = []
        self._phase_listeners: list[Callable[[int, Phase], None]] = []
        self.reports: list[UpdateReport] = []

    # --- what others ask ---------------------------------------------------------------------

    @property
    def published_version(self) -> int:
        """The version that the fleet serves; -1 before the first."""
        return self._published

    @property
    def epoch(self) -> int:
        """Grows with every binding and with every start of a controller."""
        return self._epoch

    def routable(self) -> tuple[EngineInfo, ...]:
        """Engines that may be given traffic: complete, untainted, at the published version."""
        return self._fleet.routable(self._published)

    def on_update(self, listener: Callable[[UpdateReport], None]) -> None:
        """Call `listener` in the loop after every round."""
        self._update_listeners.append(listener)

    def on_phase(self, listener: Callable[[int, Phase], None]) -> None:
        """Call `listener(version, phase)` in the loop when a round enters a phase."""
        self._phase_listeners.append(listener)

    def subscribe(self, callback: Callable[[], None]) -> object:
        """Call `callback` in the loop when engines come, go, or change version."""
        self._fleet_listeners.append(callback)
        return None

    def status(self) -> dict[str, object]:
        """What `/v1/status` answers."""
        return {
            "epoch": self._epoch,
            "round": self._round,
            "published_version": self._published,
            "mode": self._config.mode.value,
            "engines": [
                {
                    "name": g.name,
                    "url": g.url,
                    "version": g.version,
                    "ranks": len(g.agents),
                    "world_size": g.world_size,
                    "tainted": g.tainted,
                    "poisoned": g.poisoned,
                    "refused": g.refused,
                    "routable": any(e.name == g.name for e in self.routable()),
                }
                for g in self._fleet.engines()
            ],
            "trainers": list(t.workers) if (t := self._fleet.trainers()) is not None else [],
            "in_round": self._driver is not None,
            "updates": len(self.reports),
        }

    async def wait_for_fleet(
        self, *, num_trainers: int, engines: Sequence[str], deadline_s: float
    ) -> None:
        """Return once all trainer ranks and all ranks of the named engines are connected.

        Raises:
            PeerTimeout: names who is missing after `deadline_s`.
        """

        def missing() -> list[str]:
            trainers = self._fleet.trainers()
            there = len(trainers.agents) if trainers is not None else 0
            names = [f"trainers ({there} of {num_trainers})"] if there < num_trainers else []
            for name in engines:
                group = self._fleet.group_of(name)
                if group is None or not group.complete:
                    names.append(name)
            return names

        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: not missing())
        except TimeoutError:
            raise PeerTimeout(
                f"wait_for_fleet: missing after {deadline_s} s: {', '.join(missing())}"
            ) from None

    async def wait_for_version(self, version: int, deadline_s: float) -> None:
        """Return once `version` or a later one is published.

        Raises:
            PeerTimeout: it was not within `deadline_s`.
        """
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: self._published >= version)
        except TimeoutError:
            raise PeerTimeout(
                f"wait_for_version: {version} was not published within {deadline_s} s, "
                f"the fleet serves {self._published}"
            ) from None

    # --- connections -------------------------------------------------------------------------

    def mount(self, server: ControlServer) -> None:
        """Add `/v1/agents` and `/v1/status` to a server that has not started."""
        server.add_routes(
            [web.get("/v1/agents", self._serve_agent), web.get("/v1/status", self._serve_status)]
        )

    async def _serve_status(self, _request: web.Request) -> web.Response:
        return web.json_response(self.status())

    async def _serve_agent(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            heartbeat=self._config.heartbeat_s, max_msg_size=self._config.max_message_nbytes
        )
        await socket.prepare(request)
        session: AgentSession | None = None
        reason = "connection closed"
        try:
            session = await self._admit(socket)
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    raise ProtocolError(f"{session.worker}: frames must be binary")  # noqa: TRY301
                self._on_frame(session, message.data)
        except ProtocolError as error:
            reason = str(error)
            await socket.send_bytes(encode(Refused(reason)))
        except PlanError as error:
            reason = f"{type(error).__name__}: {error}"
            await socket.send_bytes(encode(Refused(reason)))
        finally:
            if session is not None:
                await self._lose(session, reason)
            await socket.close()
        return socket

    async def _admit(self, socket: web.WebSocketResponse) -> AgentSession:
        try:
            data = await socket.receive_bytes(timeout=self._config.heartbeat_s)
        except (TypeError, TimeoutError) as error:
            raise ProtocolError(f"the first frame must be a binary Hello: {error}") from error
        hello = decode_agent_frame(data)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first frame must be Hello, got {type(hello).__name__}")
        session = AgentSession(socket, self._fleet.admit(hello))
        self._sessions[hello.worker] = session
        await socket.send_bytes(encode(Welcome(self._epoch)))
        _log.info("agent %s of %s connected", hello.worker, hello.group)
        await self._notify()
        self._bind_soon()
        return session

    def _on_frame(self, session: AgentSession, data: bytes) -> None:
        frame = decode_agent_frame(data)
        match frame:
            case Reply():
                session.on_reply((frame.epoch, frame.round, frame.seq), frame.result)
                if self._driver is not None:
                    self._driver.on_reply(session.worker, frame)
            case Announce():
                self._on_announce(session, frame.version)
            case Hello():
                raise ProtocolError(f"{session.worker}: Hello may be sent only once")

    async def _lose(self, session: AgentSession, reason: str) -> None:
        worker = session.worker
        self._sessions.pop(worker, None)
        self._announced.pop(worker, None)
        self._fleet.remove(session.agent)
        session.fail_waiting(reason)
        if self._driver is not None:
            self._driver.post(AgentLost(worker, reason))
        _log.info("agent %s lost: %s", worker, reason)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
        for listener in self._fleet_listeners:
            listener()

    # --- the first clock -----------------------------------------------------------------------

    def _bind_soon(self) -> None:
        """Bind as soon as nothing else runs, so that the next round finds it done."""
        trainers = self._fleet.trainers()
        if trainers is None or not trainers.complete or not self._fleet.writable_engines():
            return
        self._spawn(self._bind_quietly())

    async def _bind_quietly(self) -> None:
        async with self._lock:
            try:
                await self._ensure_bound()
            except WindlassError as error:
                _log.warning("binding failed, the next round tries again: %s", error)

    async def _ensure_bound(self) -> Binding:
        trainers, engines = self._fleet.trainers(), self._fleet.writable_engines()
        if trainers is None or not trainers.complete:
            raise PeerUnreachable("connect: no complete group of trainers is connected")
        if not engines:
            raise PeerUnreachable("connect: no complete engine is connected")
        wanted = signature_of([trainers, *engines])
        if self._binding is not None and self._binding.signature == wanted:
            return self._binding
        self._binding = None
        self._epoch += 1
        self._round += 1
        try:
            self._binding = await bind_fleet(
                trainers=trainers,
                engines=engines,
                sessions=self._sessions,
                planner=self._planner,
                mode=self._config.mode,
                epoch=self._epoch,
                round_number=self._round,
                deadline_s=self._config.deadlines.connect_s,
            )
        except PlanError:
            refused = await find_unplannable(trainers, engines, self._planner)
            if not refused:
                raise
            await self._refuse(refused)
            return await self._ensure_bound()
        except KeyError as error:
            raise PeerUnreachable(f"connect: {error} went away") from error
        return self._binding

    async def _refuse(self, reasons: dict[str, str]) -> None:
        for name, reason in reasons.items():
            group = self._fleet.group_of(name)
            if group is None:
                continue
            group.refused = reason
            _log.error("engine %s refused: %s", name, reason)
            for worker in group.workers:
                session = self._sessions.get(worker)
                if session is not None:
                    await session.send(Refused(reason))

    # --- the second clock ----------------------------------------------------------------------

    def _on_announce(self, session: AgentSession, version: int) -> None:
        trainers = self._fleet.trainers()
        if trainers is None or session.worker not in trainers.workers:
            raise ProtocolError(f"{session.worker}: only a trainer may announce a version")
        if self.reports and self.reports[-1].version == version == self._published:
            self._spawn(self._report(self.reports[-1], [session.worker]))
            return
        self._announced[session.worker] = version
        if trainers.complete and set(trainers.workers) <= set(self._announced):
            versions = {worker: self._announced[worker] for worker in trainers.workers}
            self._announced.clear()
            self._spawn(self._update(versions))

    async def _update(self, versions: dict[str, int]) -> None:
        workers = list(versions)
        version = max(versions.values())
        async with self._lock:
            try:
                report = await self._attempt(versions, version)
            except WindlassError as error:
                report = _given_up(version, f"{type(error).__name__}: {error}")
        self.reports.append(report)
        await self._notify()
        for listener in self._update_listeners:
            listener(report)
        await self._report(report, workers)

    async def _attempt(self, versions: dict[str, int], version: int) -> UpdateReport:
        if len(set(versions.values())) > 1:
            return _given_up(version, f"trainer ranks announced different versions: {versions}")
        if version <= self._published:
            return _given_up(
                version, f"version must be greater than the published {self._published}"
            )
        await self._wait_for_engines()
        binding = await self._ensure_bound()
        self._round += 1
        spec = RoundSpec(
            version=version,
            mode=self._config.mode,
            pause_mode=self._config.pause_mode,
            trainers=binding.trainers,
            engines=binding.engines,
            links=binding.links,
            max_rewrites=self._config.max_rewrites,
            pause_s=self._config.deadlines.pause_s,
            write_s=self._config.deadlines.write_s,
        )
        self._journal_round(JournalKind.ROUND_BEGAN, version, tuple(binding.engines))
        self._driver = RoundDriver(
            spec,
            epoch=self._epoch,
            round_number=self._round,
            deadlines=self._config.deadlines,
            sessions=self._sessions,
            clock=time.perf_counter,
            on_phase=lambda phase: self._on_phase(version, phase),
        )
        try:
            result = await self._driver.run()
        finally:
            self._driver = None
        return self._conclude(version, result)

    def _on_phase(self, version: int, phase: Phase) -> None:
        if phase is Phase.PUBLISH:
            # On disk before any engine can serve it.
            self._journal_round(JournalKind.PUBLISHING, version, ())
        for listener in self._phase_listeners:
            listener(version, phase)

    async def _wait_for_engines(self) -> None:
        needed, deadline_s = self._config.min_engines, self._config.deadlines.fleet_s

        def enough() -> bool:
            return len(self._fleet.writable_engines()) >= needed

        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(enough)
        except TimeoutError:
            raise PeerTimeout(
                f"publish: needs {needed} engines, {len(self._fleet.writable_engines())} were there "
                f"after {deadline_s} s"
            ) from None

    def _conclude(self, version: int, result: RoundResult) -> UpdateReport:
        finish = result.finish
        for name, fate in finish.fates.items():
            group = self._fleet.group_of(name)
            if group is not None:
                _mark(group, fate, version)
        published = finish.outcome is RoundOutcome.PUBLISHED
        serving = tuple(n for n, f in finish.fates.items() if f is EngineFate.PUBLISHED)
        if published:
            self._published = version
            self._journal_round(JournalKind.PUBLISHED, version, serving)
        else:
            self._journal_round(JournalKind.ROUND_ENDED, version, (), finish.reason)
        if any(fate is EngineFate.POISONED for fate in finish.fates.values()):
            self._binding = None
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
        )

    def _journal_round(
        self, kind: JournalKind, version: int, engines: tuple[str, ...], detail: str = ""
    ) -> None:
        self._journal.append(JournalEntry(kind, self._epoch, self._round, version, engines, detail))

    async def _report(self, report: UpdateReport, workers: Sequence[str]) -> None:
        for worker in workers:
            session = self._sessions.get(worker)
            if session is None:
                continue
            try:
                await session.send(report)
            except PeerUnreachable as error:
                _log.warning("report of version %s: %s", report.version, error)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop rounds and close every connection. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in list(self._sessions.values()):
            await session.close()
        self._journal.close()


def _mark(group: Group, fate: EngineFate, version: int) -> None:
    match fate:
        case EngineFate.PUBLISHED:
            group.version, group.tainted = version, False
        case EngineFate.TAINTED:
            group.tainted = True
        case EngineFate.POISONED:
            group.poisoned = group.tainted = True
        case _:
            return


def _given_up(version: int, reason: str) -> UpdateReport:
    return UpdateReport(
        version=version,
        outcome=RoundOutcome.FAILED,
        reason=reason,
        engines=(),
        left_out={},
        nbytes=0,
        wire_s=0.0,
        update_s=0.0,
        pause_s=0.0,
        phase_s={},
        digest_ok=True,
    )
