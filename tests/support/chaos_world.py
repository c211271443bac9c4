"""A fleet in memory that runs a schedule, and the invariants that are checked after every step."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import random
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from chaos_controller import HEARTBEAT_S, ROUND_BOUND_S, ControllerProcess
from chaos_intruders import Intruder
from chaos_processes import EngineProcess, Process, TrainerProcess, WorkerProcess
from chaos_schedule import (
    CONTROLLER,
    ENGINES,
    TRAINERS,
    Event,
    Intrusion,
    Kind,
    Schedule,
    WireFault,
)
from chaos_weights import engine_bytes
from fleet_rules import FleetRules
from memory_transport import MemoryFabric
from simulated_loop import SimulatedLoop
from simulated_network import MessageFault, SimulatedNetwork

from windlass.control import journal
from windlass.control import members as members_module
from windlass.control.connect_messages import ConnectTrainer
from windlass.control.journal import JournalEntry, JournalKind
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.routes import status_of
from windlass.errors import ConfigError, WindlassError
from windlass.layout.manifest import ShardManifest
from windlass.net import journal_file
from windlass.net.addresses import free_port
from windlass.net.listener import STRANGER_S
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer

ANNOUNCE_S = 90.0
"""Seconds that a trainer waits for the end of a round; longer than any round takes."""
REST_S = 30.0
"""Seconds that a routed engine may stay paused outside a round, until the round's last messages arrive."""
QUIET_S = 8.0
"""Seconds after a round until these messages must have arrived, if nothing is wrong."""
CALM_S = 400.0
UNDISTURBED_S = 60.0
"""Longest time from a version's announcement to its report, if intruders are the only fault."""
MAX_EPOCH = 1 << 26
"""Bound of epochs: no schedule reaches it by bindings, or by intruders that claim an epoch."""
KEPT_REFUSALS = 40
CALM_ATTEMPTS = 8
_PLANS: dict[tuple[str, ...], TransferPlan] = {}
_CONTENTS: dict[tuple[int, int], dict[bytes, int]] = {}


class Violation(Exception):
    """Error for an invariant that does not hold."""


@dataclass
class Result:
    """Result of a run. `violation` is empty if every invariant held."""

    schedule: Schedule
    violation: str = ""
    num_rounds: int = 0
    num_published: int = 0
    num_rollouts: int = 0
    num_messages: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    simulated_s: float = 0.0
    num_restarts: int = 0
    trace: list[str] = field(default_factory=list)


class World:
    """One run of one schedule."""

    def __init__(self, schedule: Schedule, folder: Path, *, verbose: bool = False) -> None:
        self.schedule = schedule
        self.verbose = verbose
        self.draw = random.Random(schedule.seed + 1)
        self.network = SimulatedNetwork(schedule.seed)
        self.loop = SimulatedLoop(self.network)
        self.fabric = MemoryFabric()
        self.journal_path = folder / "journal"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.disk_full = 0
        self.injected = Counter[str]()
        self.num_restarts = 0
        self.processes: dict[str, Process] = {}
        self.engines: list[EngineProcess] = []
        self._groups: dict[str, list[EngineProcess]] = {}
        self.trace: list[str] = []
        self._numbers = itertools.count(1)
        self._ports = itertools.count(30_000)
        self._violation = ""
        self._failed = asyncio.Event()
        self._requests: set[str] = set()
        self.attempts: dict[str, int] = {}
        """Task id -> newest attempt with a request to an engine."""
        self._durable: set[int] = set()
        self.journal_changed = False
        self._steps = 0
        self._rules = FleetRules()
        self._entries: list[JournalEntry] = []
        self._target = -1
        self._standing = False
        self._background: set[asyncio.Task[Any]] = set()
        self._published_reports: dict[int, int] = {}
        self._last_round_s = 0.0
        self._calm = False
        self._foreign: set[str] = set()

    # --- small things for the processes --------------------------------------------------------

    def next_number(self) -> int:
        return next(self._numbers)

    def next_port(self) -> int:
        return next(self._ports)

    @staticmethod
    def planner(
        sources: Sequence[ShardManifest], destinations: Sequence[ShardManifest]
    ) -> TransferPlan:
        """Return the plan of the real planner, cached per list of workers."""
        key = (*(m.worker for m in sources), "->", *(m.worker for m in destinations))
        if key not in _PLANS:
            _PLANS[key] = plan_transfer(sources, destinations)
        return _PLANS[key]

    @staticmethod
    def version_of(content: bytes, rank: int, world_size: int) -> int | None:
        known = _CONTENTS.setdefault((rank, world_size), {})
        if not known:
            for version in range(250):
                known[engine_bytes(version, rank, world_size)] = version
        return known.get(content)

    @property
    def controller(self) -> ControllerProcess:
        found = self.processes[CONTROLLER]
        assert isinstance(found, ControllerProcess)
        return found

    @property
    def trainers(self) -> list[TrainerProcess]:
        found = (p for p in self.processes.values() if isinstance(p, TrainerProcess))
        return [trainer for trainer in found if not trainer.is_rival]

    def engine(self, name: str) -> EngineProcess:
        """Return the process that has this name now."""
        found = self.processes[name]
        assert isinstance(found, EngineProcess)
        return found

    def ranks_of(self, group: str) -> list[EngineProcess]:
        return self._groups.get(group, [])

    @contextmanager
    def disk(self) -> Iterator[None]:
        """Simulate the disk of this world inside the block."""
        original = journal_file.write_all
        limits = journal.COMPACT_NBYTES, journal.KEPT_ENTRIES
        # Compact the journal every few rounds.
        journal.COMPACT_NBYTES, journal.KEPT_ENTRIES = 3000, 7
        kept, members_module.KEPT_REFUSALS = members_module.KEPT_REFUSALS, KEPT_REFUSALS

        def write_all(descriptor: int, data: bytes) -> None:
            self.journal_changed = True
            if self.disk_full:
                # A nearly full disk takes a part of the data first.
                original(descriptor, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(descriptor, data)

        journal_file.write_all = write_all
        try:
            yield
        finally:
            journal_file.write_all = original
            members_module.KEPT_REFUSALS = kept
            journal.COMPACT_NBYTES, journal.KEPT_ENTRIES = limits

    def note(self, text: str) -> None:
        line = f"{self.loop.time():9.4f} {text}"
        self.trace.append(line)
        if self.verbose:
            print(line)

    def violate(self, text: str) -> None:
        """Record that an invariant does not hold, and end the run."""
        if not self._violation:
            self._violation = f"at {self.loop.time():.4f} s: {text}"
            self.note(f"VIOLATION {text}")
            self._failed.set()

    # --- invariants ------------------------------------------------------------------------------

    def durable(self) -> set[int]:
        """Return the versions that the journal on disk records as published or being published."""
        if self.journal_changed:
            self.journal_changed = False
            self._read_journal()
        return self._durable

    def _read_journal(self) -> None:
        data = self.journal_path.read_bytes()
        whole, _, _ = data.rpartition(b"\n")
        entries = [
            msgspec.json.decode(line, type=JournalEntry) for line in whole.split(b"\n") if line
        ]
        if self._entries:
            # A compaction keeps the newest entries unchanged: continue after the last known entry.
            last = len(entries) - entries[::-1].index(self._entries[-1])
            entries = entries[last:]
        for entry in entries:
            self._entries.append(entry)
            self._check_entry(entry)

    def _check_entry(self, entry: JournalEntry) -> None:
        if entry.kind is JournalKind.PUBLISHING:
            unfinished = self._unfinished()
            if unfinished not in {None, entry.version}:
                self.violate(f"version {entry.version} is published while {unfinished} is")
        if entry.kind in {JournalKind.PUBLISHING, JournalKind.PUBLISHED}:
            self._durable.add(entry.version)

    def _unfinished(self) -> int | None:
        """Return the version of the round that was running before the journal's last entry."""
        running: int | None = None
        for entry in self._entries[-4:-1]:
            match entry.kind:
                case JournalKind.ROUND_BEGAN:
                    running = entry.version
                case JournalKind.PUBLISHED | JournalKind.ROUND_ENDED | JournalKind.STARTED:
                    running = None
                case JournalKind.PUBLISHING | JournalKind.QUARANTINED | JournalKind.NOT_RESUMED:
                    pass
        return running

    def token_version(self, ranks: Sequence[EngineProcess]) -> int:
        """Check the token that these ranks make now, and return its label."""
        contents = {rank.content() for rank in ranks}
        label = ranks[0].version
        if contents != {label}:
            self.violate(f"{ranks[0].group} makes a token of {contents}, labelled {label}")
        if label not in self.durable():
            self.violate(f"{ranks[0].group} makes a token of unpublished version {label}")
        return label

    def saw_request(self, rid: str) -> None:
        if rid in self._requests:
            self.violate(f"engine request {rid} came twice: its attempt was run twice")
        self._requests.add(rid)
        task_id, attempt, _ = rid.rsplit("-", 2)
        self.attempts[task_id] = int(attempt)

    def on_update(self, report: UpdateReport) -> None:
        self.note(f"report {report.version} {report.outcome} {report.reason} {report.left_out}")
        if report.reason.startswith("internal error"):
            self.violate(f"version {report.version}: {report.reason}")
        if self.schedule.only_intruders:
            self._check_undisturbed(report)
        if report.outcome is not RoundOutcome.PUBLISHED:
            return
        if report.version <= max(self._published_reports, default=-1):
            self.violate(f"version {report.version} was published again or too late")
        self._published_reports[report.version] = len(report.engines)

    def _check_undisturbed(self, report: UpdateReport) -> None:
        """Check that the version is published to every engine, despite the intruders."""
        if report.reason.startswith("stale version"):
            # The version is already published: the schedule ended before the trainers got the
            # report.
            return
        hurt = set(report.left_out) & set(ENGINES)
        if report.outcome is not RoundOutcome.PUBLISHED or hurt:
            self.violate(
                f"with nothing wrong but intruders version {report.version} is {report.outcome}: "
                f"{report.reason} {report.left_out}"
            )

    def check(self) -> None:
        """Check the invariants; the loop calls this after every turn."""
        if self._violation or CONTROLLER not in self.processes:
            return
        controller = self.controller
        coordinator = controller.coordinator
        now_s = self.loop.time()
        if not controller.host.alive:
            self._check_engines(None)
            return
        in_round = coordinator.rounds.driver is not None
        if in_round:
            self._last_round_s = now_s
        if not in_round:
            controller.round_began_s = -1.0
        elif controller.round_began_s < 0:
            controller.round_began_s = now_s
        elif now_s - controller.round_began_s > ROUND_BOUND_S + 1.0:
            self.violate(f"a round lasts longer than {ROUND_BOUND_S} s")
        published = coordinator.fleet.published
        if published < controller.last_update:
            self.violate(f"published version fell from {controller.last_update} to {published}")
        controller.last_update = published
        controller.trainers_were_there |= coordinator.fleet.trainers() is not None
        if self.schedule.keeps_writes:
            quarantined = {worker for worker, _ in coordinator.fleet.quarantined}
            if wrong := quarantined & {rank.name for rank in self.engines}:
                self.violate(f"with nothing wrong but intruders these are quarantined: {wrong}")
        if coordinator.run.round_id.epoch > MAX_EPOCH:
            self.violate(f"epoch {coordinator.run.round_id.epoch}")
        self._check_engines(None if in_round else published)
        for rule in (*self._rules.broken(coordinator.fleet), *controller.rounds.broken()):
            self.violate(rule)
        self._steps += 1
        # A loss is permanent, so a check in every 16th step finds it as well.
        if self._steps % 16 == 0 and (lost := controller.rollouts.stats().lost) != 0:
            self.violate(f"{lost} rollouts are lost")

    def _check_engines(self, published: int | None) -> None:
        """Check the engines. `published` is None during a round, or if no controller is alive."""
        durable = self.durable()
        for rank in self.engines:
            if not rank.paused and rank.version >= 0 and rank.host.alive:
                if (content := rank.content()) != rank.version:
                    self.violate(f"{rank.name} serves {content}, labelled {rank.version}")
                if rank.version not in durable:
                    self.violate(f"{rank.name} serves unpublished version {rank.version}")
        if published is None:
            return
        coordinator = self.controller.coordinator
        for engine in coordinator.routable():
            group = coordinator.fleet.group_of(engine.name)
            for rank in self._groups.get(engine.name, ()):
                known = group is not None and group.agents.get(rank.rank)
                if rank.host.alive and known and known.hello.incarnation == rank.incarnation:
                    self._check_routed(rank, published)

    def _check_routed(self, rank: EngineProcess, published: int) -> None:
        if rank.agent.served_version != published or rank.content() != published:
            self.violate(
                f"{rank.name} is routed as {published}, holds {rank.content()} and says "
                f"{rank.agent.served_version}"
            )
        if rank.paused:
            paused_s = self.loop.time() - max(rank.paused_since_s, self._quiet_since_s(rank))
            if not rank.misled and paused_s > REST_S:
                self.violate(f"{rank.name} is routed and paused for {paused_s:.1f} s")

    def _quiet_since_s(self, rank: EngineProcess) -> float:
        """Return the latest time at which this rank was paused, stalled or cut off from the controller."""
        if rank.host.stalled or not self.network.together(rank.name, CONTROLLER):
            rank.paused_since_s = self.loop.time()
        return rank.paused_since_s

    # --- processes -------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a process, or restart it after a kill."""
        old = self.processes.get(name)
        if old is not None and old.host.alive:
            return
        with self.network.acting_as(self.network.host(name)):
            process = self._make(name)
            self.processes[name] = process
            self.engines = [p for p in self.processes.values() if isinstance(p, EngineProcess)]
            self._groups = {
                group: [rank for rank in self.engines if rank.group == group] for group in ENGINES
            }
            process.start()

    def _make(self, name: str) -> Any:
        group, _, rank = name.partition("/")
        foreign = name in self._foreign
        self._foreign.discard(name)
        if name == CONTROLLER:
            return ControllerProcess(self)
        if group == "trainer":
            trainer = TrainerProcess(self, int(rank))
            trainer.hold(max(self._target, 0))
            return trainer
        if group == "worker":
            return WorkerProcess(self, int(rank))
        return EngineProcess(self, group, int(rank), ENGINES[group], foreign=foreign)

    def kill(self, name: str) -> None:
        process = self.processes[name]
        if not process.host.alive:
            return
        if name == CONTROLLER:
            self.durable()
        process.kill()
        self.num_restarts += 1
        self._spawn(self._bury(process))

    async def _bury(self, process: Process) -> None:
        await process.buried()

    def kill_soon(self, name: str, restart_s: float) -> None:
        """Kill and restart a process; may be called in one of its own jobs."""
        self.loop.call_soon(self._kill_and_restart, name, restart_s)

    def _kill_and_restart(self, name: str, restart_s: float) -> None:
        self.kill(name)
        self.loop.call_later(restart_s, self._restart, name)

    def _restart(self, name: str) -> None:
        if not self._calm or not self.processes[name].host.alive:
            try:
                self.start(name)
            # The disk is full. The operator tries again.
            except ConfigError:
                self.loop.call_later(1.0, self._restart, name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        with self.network.acting_as(self.network.host("reaper")):
            task = self.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # --- events ----------------------------------------------------------------------------------

    def happen(self, event: Event) -> None:
        """Carry out one event."""
        self.note(f"event {event.kind} {event.who} {event.other} {event.fault} {event.amount}")
        if event.kind is Kind.INTRUDE:
            self._intrude(event.fault)
        else:
            self._strike(event)

    def _strike(self, event: Event) -> None:
        host = self.processes[event.who].host
        # The transport and the network count these faults when they take effect.
        if event.kind not in {Kind.MESSAGE, Kind.WIRE}:
            self.injected[event.kind.value] += 1
        match event.kind:
            case Kind.KILL:
                self._kill_and_restart(event.who, event.amount)
            case Kind.STALL:
                host.stall()
                self.loop.call_later(event.amount, host.wake)
            case Kind.PART:
                self.network.part(event.who, event.other)
                self.loop.call_later(event.amount, self.network.rejoin, event.who, event.other)
            case Kind.RESET:
                self.network.cut(event.who, event.other)
            case Kind.MESSAGE:
                self.network.disturb(event.who, event.other, MessageFault(event.fault), event.count)
                for name in (event.who, event.other):
                    process = self.processes[name]
                    if isinstance(process, EngineProcess):
                        process.misled = True
            case Kind.WIRE:
                transport = self.processes[event.who].transport
                assert transport is not None
                faults = transport.faults.setdefault(event.other, deque())
                faults.extend([WireFault(event.fault)] * event.count)
            case Kind.SLOW:
                host.job_range_s = (0.0, event.amount)
                self.loop.call_later(5.0, self._normal_speed, host)
            case Kind.DISK_FULL:
                self.disk_full += 1
                self.loop.call_later(event.amount, self._disk_has_room)
            case Kind.NO_DESCRIPTORS:
                host.no_descriptors = True
                self.loop.call_later(event.amount, self._descriptors_again, host)
            case Kind.FOREIGN:
                self._foreign.add(event.who)
                self._kill_and_restart(event.who, event.amount)
            case Kind.RIVAL:
                self._kill_and_restart(event.who, event.amount)
                self._compete(event.who, event.fault)
            case Kind.INTRUDE:
                raise ValueError("an intruder strikes nobody")

    def _intrude(self, what: str) -> None:
        self.injected[f"intrude {what}"] += 1
        intruder = Intruder(self, what, self.next_number())
        intruder.host.spawn(intruder.run(), what)

    def _compete(self, trainer: str, of: str) -> None:
        """Start a rank of another job, which takes that name as soon as it can, until calm begins."""
        name = trainer.replace("trainer", "rival")
        if name in self.processes or not self.controller.host.alive:
            return
        with self.network.acting_as(self.network.host(name)):
            rival = TrainerProcess(self, int(name[-1]), rival=of)
            self.processes[rival.name] = rival
            rival.start()
            rival.host.spawn(self._announce_as(rival), "announces")

    async def _announce_as(self, rival: TrainerProcess) -> None:
        """Announce the same version as the trainers, again and again."""
        while True:
            await asyncio.sleep(0.3)
            rival.hold(max(self._target, 0))
            try:
                rival.conversation.begin_announcement(self._target)
            except WindlassError:
                return

    @staticmethod
    def _normal_speed(host: Any) -> None:
        host.job_range_s = (0.0005, 0.02)

    @staticmethod
    def _descriptors_again(host: Any) -> None:
        host.no_descriptors = False

    def _disk_has_room(self) -> None:
        self.disk_full = max(0, self.disk_full - 1)

    # --- the training job --------------------------------------------------------------------------

    async def _train(self) -> None:
        """Publish version after version, by all ranks, as fast as reports arrive."""
        while True:
            await self._publish_next()
            await asyncio.sleep(self.draw.uniform(0.0, 0.3))

    async def _publish_next(self) -> set[RoundOutcome]:
        """Publish the next version, and return when every rank has its report."""
        began_s = self.loop.time()
        if not self._standing:
            self._target += 1
            for trainer in self.trainers:
                trainer.hold(self._target)
        self._standing = True
        # A rank without a report must keep its weights, and needs the others to announce again.
        while True:
            outcomes = await asyncio.gather(*(self._announce(name) for name in TRAINERS))
            if None not in outcomes:
                self._standing = False
                took_s = self.loop.time() - began_s
                if self.schedule.only_intruders and took_s > UNDISTURBED_S:
                    self.violate(f"version {self._target} took {took_s:.1f} s")
                return {outcome for outcome in outcomes if outcome is not None}

    async def _announce(self, name: str) -> RoundOutcome | None:
        trainer = self.processes[name]
        assert isinstance(trainer, TrainerProcess)
        if not trainer.host.alive:
            await asyncio.sleep(0.5)
            return None
        began_s = self.loop.time()
        try:
            announced = trainer.conversation.begin_announcement(self._target)
        except WindlassError:
            await asyncio.sleep(0.5)
            return None
        try:
            async with asyncio.timeout(ANNOUNCE_S if self._calm else 10.0):
                report = await asyncio.wrap_future(announced.report)
        except (TimeoutError, WindlassError):
            if trainer.host.alive:
                trainer.conversation.withdraw(announced)
            await asyncio.sleep(0.2)
            return None
        if self.loop.time() - began_s > ANNOUNCE_S + 1.0:
            self.violate(f"{name} waited {self.loop.time() - began_s:.1f} s for a report")
        return report.outcome

    # --- a run -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the schedule, then a calm phase: repair every fault and check that the fleet recovers."""
        self.start(CONTROLLER)
        await self.controller.ready.wait()
        for name in ("trainer/0", "trainer/1", "a/0", "b/0", "b/1", "c/0", "worker/0", "worker/1"):
            self.start(name)
        training = self._spawn(self._train())
        for event in self.schedule.events:
            self.loop.call_at(event.at_s, self.happen, event)
        failed = self._spawn(self._wait_failed())
        await asyncio.wait([failed], timeout=self.schedule.duration_s)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        if not self._violation:
            calm = self._spawn(self._calm_down())
            await asyncio.wait([failed, calm], return_when=asyncio.FIRST_COMPLETED)
            if not self._violation:
                await calm
            calm.cancel()
        failed.cancel()

    async def _wait_failed(self) -> None:
        await self._failed.wait()

    async def _calm_down(self) -> None:
        self.note("calm")
        self._calm = True
        self.network.calm()
        self.disk_full = 0
        for rival in [p for p in self.processes.values() if isinstance(p, TrainerProcess)]:
            if rival.is_rival:
                self._check_rival(rival)
                self.kill(rival.name)
                del self.processes[rival.name]
        for process in self.processes.values():
            if process.transport is not None:
                process.transport.faults.clear()
        crowded = any(event.fault == Intrusion.CROWD for event in self.schedule.events)
        await asyncio.sleep(STRANGER_S + 4.0 if crowded else 4.0)
        for name, process in list(self.processes.items()):
            if not process.host.alive:
                self.start(name)
        await self._everybody_is_there()
        if self.schedule.seed % 3 == 0:
            await self._rest()
        self._replace_quarantined()
        await self._everybody_is_there()
        deadline_s = self.loop.time() + CALM_S
        for _ in range(CALM_ATTEMPTS):
            self.network.calm()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._publish_next()
            except TimeoutError:
                self.violate(f"no calm: version {self._target} has no end within {CALM_S} s")
                return
            await asyncio.sleep(3.0)
            if self._whole():
                break
            self._replace_quarantined()
        else:
            self.violate(
                f"no calm: after {CALM_ATTEMPTS} attempts {self._describe()}, want {self._target}"
            )
            return
        await self._rollouts_end(deadline_s)
        self._check_bounded()

    def _check_rival(self, rival: TrainerProcess) -> None:
        """Check that a rival of another run was neither admitted nor told to wait."""
        welcomed, said = rival.conversation.welcomed, rival.conversation.last_error
        let_in = welcomed.done() and welcomed.exception() is None
        if rival.is_foreign and (let_in or "must wait" in said):
            self.violate(f"{rival.name} of another run may train: {said}")

    async def _rest(self) -> None:
        """Publish nothing for a while, and check that routed engines resume without another round."""
        self._last_round_s = self.loop.time()
        for _ in range(10):
            await asyncio.sleep(self._last_round_s + QUIET_S - self.loop.time())
            if self.loop.time() - self._last_round_s >= QUIET_S:
                break
        else:
            # Pending announcements still cause rounds.
            return
        for engine in self.controller.coordinator.routable():
            for rank in self.ranks_of(engine.name):
                if rank.paused and not rank.misled:
                    self.violate(f"{rank.name} is routed and stays paused though nothing is wrong")

    def _describe(self) -> str:
        return str(status_of(self.controller.coordinator)["engines"])

    async def _everybody_is_there(self) -> None:
        await self.controller.ready.wait()
        try:
            await self.controller.coordinator.members.wait_for_fleet(
                num_trainers=len(TRAINERS), engines=tuple(ENGINES), deadline_s=60.0
            )
        except WindlassError as error:
            self.violate(f"no calm: {error}")

    def _replace_quarantined(self) -> None:
        """Restart quarantined engines, as an operator does."""
        for group in self.controller.coordinator.fleet.engines():
            if group.quarantined:
                for rank in self.ranks_of(group.name):
                    self._kill_and_restart(rank.name, 0.5)

    def _whole(self) -> bool:
        routed = {e.name: e.version for e in self.controller.coordinator.routable()}
        ours = {name: version for name, version in routed.items() if name in ENGINES}
        return ours == dict.fromkeys(ENGINES, self._target) and not any(
            rank.paused for rank in self.engines
        )

    async def _rollouts_end(self, deadline_s: float) -> None:
        controller = self.controller
        controller.producing = False
        while (stats := controller.rollouts.stats()).outstanding:
            if self.loop.time() > deadline_s:
                self.violate(f"rollouts do not end: {stats}")
                return
            # The staleness bound admits more rollouts only with newer versions.
            await self._publish_next()
            await asyncio.sleep(2.0)

    def _check_bounded(self) -> None:
        """Check that nothing is kept of work that has ended."""
        coordinator = self.controller.coordinator
        num_agents = len(TRAINERS) + len(self.engines)
        ours = [
            s for s in coordinator.members.sessions.values() if not s.peer.startswith("intruder")
        ]
        num_intruders = sum(event.kind is Kind.INTRUDE for event in self.schedule.events)
        num_agents += num_intruders
        counts = {
            "refusals": (len(coordinator.members.refusals), KEPT_REFUSALS),
            "sessions": (len(coordinator.members.sessions), num_agents),
            # The controller tries to bind a misfit again and again.
            "tasks": (len(coordinator.tasks), max(4, num_intruders + 1)),
            "holds": (len(coordinator.fleet.holds), 0),
            "waiting": (sum(not _brings_up(command) for s in ours for command in s.unanswered), 0),
        }
        # One WebSocket per agent, and the watch and idle connections of the rollout lane.
        counts["connections"] = (self.network.num_connections, 2 * (num_agents + 40))
        for trainer in self.trainers:
            counts[f"replies {trainer.name}"] = (len(trainer.conversation.stored), 64)
        for what, (count, bound) in counts.items():
            if count > bound:
                self.violate(f"{count} {what} are kept, at most {bound}")

    def result(self) -> Result:
        self.durable()
        began = [e for e in self._entries if e.kind is JournalKind.ROUND_BEGAN]
        return Result(
            schedule=self.schedule,
            violation=self._violation,
            num_rounds=len(began),
            num_published=len(self._published_reports),
            num_rollouts=len(self._requests),
            num_messages=self.network.num_messages,
            injected=self.injected
            + Counter({f"message {fault}": n for fault, n in self.network.injected.items()}),
            simulated_s=self.loop.time(),
            num_restarts=self.num_restarts,
            trace=self.trace,
        )

    async def bury_all(self) -> None:
        """End all processes and tasks of the run."""
        # If the run ended early, its remaining events may start more processes.
        while alive := [process for process in self.processes.values() if process.host.alive]:
            alive[0].kill()
            await alive[0].buried()
        await asyncio.gather(*self._background, return_exceptions=True)


def _brings_up(command: object) -> bool:
    """Return whether a command connects a rank only to intruders, which the controller tries again
    and again."""
    return isinstance(command, ConnectTrainer) and all(
        binding.worker.startswith("intruder") for binding in command.bindings
    )


def run_schedule(schedule: Schedule, *, verbose: bool = False) -> Result:
    """Run one schedule from beginning to end. The result depends on the schedule alone."""
    random.seed(schedule.seed)
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="windlass-chaos-", dir=shm if shm.is_dir() else None))
    world = World(schedule, folder, verbose=verbose)
    logging.disable(logging.CRITICAL)
    try:
        with world.network.http(), world.disk():
            asyncio.set_event_loop(world.loop)
            world.loop.after_step = world.check
            try:
                world.loop.run_until_complete(world.run())
            except WindlassError as error:
                world.violate(f"{type(error).__name__}: {error}")
            result = world.result()
            world.loop.after_step = None
            world.loop.run_until_complete(world.bury_all())
        return result
    finally:
        logging.disable(logging.NOTSET)
        asyncio.set_event_loop(None)
        _end_tasks(world.loop)
        world.loop.close()
        shutil.rmtree(folder, ignore_errors=True)


def _end_tasks(loop: SimulatedLoop) -> None:
    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    if pending:
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())


__all__ = ["HEARTBEAT_S", "Result", "Violation", "World", "run_schedule"]
