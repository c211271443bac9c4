"""Chaos with real processes: `python tests/support/chaos_real.py --rounds 50 --transport cma`.

This process is the controller. Trainers, engines and a rollout worker are separate processes. They
are killed, stopped, cut off, or run out of descriptors while versions are published. The
controller itself runs out of disk or of descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec
from chaos_agent import ANNOUNCE_S

from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode
from windlass.control.coordinator import Coordinator
from windlass.control.journal import JournalEntry, JournalKind
from windlass.control.report import UpdateReport
from windlass.control.round_state import Phase
from windlass.control.routes import mount_updates, status_of
from windlass.errors import EngineRefused, PeerTimeout, RolloutError
from windlass.net.server import ControlServer
from windlass.rollout import mount_rollout_routes
from windlass.rollout.batches import BatchQueue
from windlass.rollout.controller import RolloutController
from windlass.rollout.handles import Rollout, RolloutConfig
from windlass.rollout.staleness import StalenessPolicy
from windlass.sampling import SamplingParams

TOKEN = "a shared secret"
ENGINES = ("a", "b", "c")
NUM_TOKENS = 8
MAX_STALENESS = 1
SETTLED_AFTER = 8
"""Rounds before the first measurement of memory and descriptors."""
MEMORY_NBYTES = 24 << 20
CALM_S = 180.0
"""Seconds after the last fault within which all engines must serve a new version, on a busy machine too."""
CATCH_UP_S = 15.0
DEADLINES = PhaseDeadlines(
    connect_s=10, prepare_s=6, pause_s=4, write_s=6, verify_s=4, apply_s=4, publish_s=4, fleet_s=20
)


class Broken(Exception):
    """Error for an invariant that does not hold."""


class Proxy:
    """Proxy between one agent and the controller. It can cut connections, and hold back all data."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def swallow(self, on: bool) -> None:
        """Pass no data while `on`; pass the held data afterwards."""
        (self._open.clear if on else self._open.set)()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        self._writers -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class Agent:
    """A process that can be restarted."""

    def __init__(self, run: Run, role: str, name: str, index: int) -> None:
        self._run, self.role, self.name, self.index = run, role, name, index
        self.proxy = Proxy(run.port)
        self.process: asyncio.subprocess.Process | None = None
        self.stopped = False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        if not self.proxy.port:
            await self.proxy.start()
        url = f"http://127.0.0.1:{self.proxy.port}"
        environment = {**os.environ, "WINDLASS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        if self.role == "worker":
            arguments = ["-m", "windlass.rollout.worker", "--controller", url]
            arguments += ["--name", self.name]
        else:
            script = str(Path(__file__).with_name("chaos_agent.py"))
            kind, parent = self._run.transport, str(os.getpid())
            arguments = [script, self.role, url, TOKEN, self.name, str(self.index), kind, parent]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
        )

    async def replace(self) -> None:
        """Kill the process, and start another one."""
        self.kill()
        if self.process is not None:
            await self.process.wait()
        await self.start()

    async def line(self, deadline_s: float) -> str:
        """Return the next line that the process prints; empty at its end."""
        assert self.process is not None
        assert self.process.stdout is not None
        async with asyncio.timeout(deadline_s):
            return (await self.process.stdout.readline()).decode().strip()

    def say(self, text: str) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
        self.stopped = False

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            os.kill(self.pid, number)
            self.stopped = number == signal.SIGSTOP

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None


class Run:
    """One run: a fleet, a stream of rollouts, and a fault in most rounds."""

    def __init__(self, seed: int, transport: str, mode: UpdateMode, folder: Path) -> None:
        self.draw = random.Random(seed)
        self.transport = transport
        self.journal = folder / "journal"
        self.coordinator = Coordinator(
            ControlConfig(mode=mode, deadlines=DEADLINES, heartbeat_s=3.0),
            journal_path=self.journal,
        )
        self.server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        mount_updates(self.coordinator, self.server)
        policy = StalenessPolicy(max_staleness=MAX_STALENESS, batch_size=8, max_concurrent=16)
        policy.max_resubmits = 1000
        self.policy = policy
        self.rollouts = RolloutController(
            self.coordinator,
            policy,
            token=TOKEN,
            config=RolloutConfig(
                max_attempts=1000,
                attempt_deadline_s=20,
                engine_grace_s=5,
                worker_lease_s=4,
                worker_grace_s=6,
            ),
        )
        mount_rollout_routes(self.server, self.rollouts, BatchQueue())
        self.agents: dict[str, Agent] = {}
        self.broken: list[str] = []
        self.reports: list[UpdateReport] = []
        self.faults: list[str] = []
        self.delivered: set[str] = set()
        self.num_rollouts = 0
        self._at: tuple[Phase, Callable[[], None]] | None = None
        self._repairs: set[asyncio.Task[None]] = set()
        self._lives: set[asyncio.Task[None]] = set()
        self._producing = True
        self.version = -1

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(":")[2])

    # --- set-up ------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.server.start()
        await self.rollouts.__aenter__()
        self.coordinator.rounds.on_phase(self._on_phase)
        self.coordinator.on_update(self.reports.append)
        for index in range(2):
            self.agents[f"trainer/{index}"] = Agent(self, "trainer", f"trainer/{index}", index)
        for name in ENGINES:
            self.agents[name] = Agent(self, "engine", name, 0)
        self.agents["worker"] = Agent(self, "worker", "worker", 0)
        await asyncio.gather(*(agent.start() for agent in self.agents.values()))
        await self._everybody(ENGINES)
        self._lives = {
            asyncio.create_task(self._produce()),
            asyncio.create_task(self._consume()),
        }

    async def _everybody(self, engines: tuple[str, ...]) -> None:
        await self.coordinator.members.wait_for_fleet(
            num_trainers=2, engines=engines, deadline_s=90.0
        )

    async def close(self) -> None:
        for task in (*self._lives, *self._repairs):
            task.cancel()
        await asyncio.gather(*self._lives, *self._repairs, return_exceptions=True)
        for agent in self.agents.values():
            agent.kill()
        for agent in self.agents.values():
            if agent.process is not None:
                await agent.process.wait()
            await agent.proxy.close()
        await self.rollouts.close()
        await self.coordinator.close()
        await self.server.close()

    # --- rollouts ----------------------------------------------------------------------------------

    async def _produce(self) -> None:
        number = 0
        while self._producing:
            await self.rollouts.wait_for_room(deadline_s=600.0)
            number += 1
            prompt = (1 + number % 500, number)
            self.rollouts.submit_group(prompt, 2, SamplingParams(max_new_tokens=NUM_TOKENS))
            await asyncio.sleep(0.02)

    async def _consume(self) -> None:
        while True:
            try:
                groups = await self.rollouts.next_batch(1, deadline_s=5.0)
            except PeerTimeout:
                continue
            except RolloutError as error:
                self.broken.append(str(error))
                return
            for group in groups:
                for rollout in group.rollouts:
                    self._check_rollout(rollout)

    def _check_rollout(self, rollout: Rollout) -> None:
        self.num_rollouts += 1
        if rollout.task_id in self.delivered:
            self.broken.append(f"rollout {rollout.task_id} was delivered twice")
        self.delivered.add(rollout.task_id)
        first, length = rollout.prompt_ids[0], len(rollout.prompt_ids)
        if rollout.output_ids != tuple(first * 1000 + length + i for i in range(NUM_TOKENS)):
            self.broken.append(f"rollout {rollout.task_id} has wrong tokens")
        if not set(rollout.versions) <= self.durable():
            self.broken.append(f"rollout {rollout.task_id} has tokens of {set(rollout.versions)}")
        if self.policy.version - min(rollout.versions) > MAX_STALENESS:
            self.broken.append(f"rollout {rollout.task_id} is too stale: {rollout.versions}")

    def durable(self) -> set[int]:
        """Return the versions that the journal on disk records as published or being published."""
        whole, _, _ = self.journal.read_bytes().rpartition(b"\n")
        entries = [msgspec.json.decode(line, type=JournalEntry) for line in whole.split(b"\n")]
        kinds = {JournalKind.PUBLISHING, JournalKind.PUBLISHED}
        return {entry.version for entry in entries if entry.kind in kinds}

    # --- rounds ------------------------------------------------------------------------------------

    async def round(self) -> None:
        """Publish one version, with a fault in a random phase."""
        self.version += 1
        self._arm()
        answers = await asyncio.gather(*(self._announce(i) for i in range(2)))
        self._at = None
        await asyncio.gather(*self._repairs)
        if not any(answer.startswith(f"{self.version} published") for answer in answers):
            self.faults[-1] += f" ({answers[0][:60]})"
        await self._check_engines()
        if (lost := self.rollouts.stats().lost) != 0:
            self.broken.append(f"{lost} rollouts are lost")
        if self.broken:
            raise Broken("; ".join(self.broken[:5]))

    async def _announce(self, index: int) -> str:
        trainer = self.agents[f"trainer/{index}"]
        trainer.say(str(self.version))
        began = time.monotonic()
        try:
            while line := await trainer.line(ANNOUNCE_S + 60.0):
                if line.startswith(f"{self.version} "):
                    return line
        except TimeoutError:
            waited = time.monotonic() - began
            self.broken.append(f"{trainer.name} waited {waited:.0f} s for a report")
        return f"{self.version} none: the process died"

    async def _check_engines(self) -> None:
        """Check that every routed engine serves exactly the published version, and resumes."""
        async with aiohttp.ClientSession() as http:
            for engine in self.coordinator.routable():
                agent = self.agents[engine.name]
                if not agent.alive or agent.stopped:
                    continue
                try:
                    state = await self._state(http, engine.url)
                except (aiohttp.ClientError, TimeoutError):
                    # The engine was killed a moment ago.
                    continue
                if engine not in self.coordinator.routable():
                    continue
                wanted = {"paused": False, "label": engine.version, "content": engine.version}
                if state != wanted:
                    self.broken.append(f"engine {engine} is {state}")

    async def _state(self, http: aiohttp.ClientSession, url: str) -> object:
        """Return the state of an engine once it is not paused, or after ten seconds."""
        timeout = aiohttp.ClientTimeout(total=20.0)
        state: dict[str, object] = {}
        for _ in range(100):
            async with http.get(f"{url}/state", timeout=timeout) as response:
                state = await response.json()
            if not state["paused"]:
                return state
            # The engine's resume command is on its way.
            await asyncio.sleep(0.1)
        return state

    # --- faults -----------------------------------------------------------------------------------

    def _arm(self) -> None:
        phase = self.draw.choice(
            [Phase.PREPARE, Phase.WRITE, Phase.VERIFY, Phase.APPLY, Phase.PUBLISH]
        )
        kinds = ["kill", "kill", "stop", "cut", "swallow", "disk", "files", "own files", "none"]
        kind = self.draw.choice(kinds)
        names = list(self.agents)
        victim = self.agents[self.draw.choice([*names, *ENGINES])]
        self.faults.append(
            f"{kind} {victim.name if kind not in {'disk', 'own files'} else ''} {phase}"
        )
        self._at = (phase, lambda: self._spawn(kind, victim))

    def _on_phase(self, version: int, phase: Phase) -> None:
        if self._at is not None and self._at[0] is phase:
            _, act = self._at
            self._at = None
            act()

    def _spawn(self, kind: str, victim: Agent) -> None:
        if kind == "kill":
            victim.kill()
        elif kind == "stop":
            victim.signal(signal.SIGSTOP)
        elif kind == "cut":
            victim.proxy.cut()
        elif kind == "swallow":
            victim.proxy.swallow(True)
        elif kind == "disk":
            _limit(resource.RLIMIT_FSIZE, self.journal.stat().st_size + 40)
        elif kind == "own files":
            _limit(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")))
            victim.proxy.cut()
        elif kind == "files" and victim.alive:
            resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (8, _hard(resource.RLIMIT_NOFILE)))
            victim.proxy.cut()
        task = asyncio.create_task(self._repair(kind, victim))
        self._repairs.add(task)
        task.add_done_callback(self._repairs.discard)

    async def _repair(self, kind: str, victim: Agent) -> None:
        await asyncio.sleep(self.draw.uniform(0.05, 1.5) if kind != "swallow" else 5.0)
        if kind == "kill":
            await victim.replace()
            if victim.role == "trainer":
                # The round has failed, and the next round waits for this rank's announcement.
                return
        elif kind == "stop":
            victim.signal(signal.SIGCONT)
        elif kind == "swallow":
            victim.proxy.swallow(False)
        elif kind == "disk":
            _limit(resource.RLIMIT_FSIZE, None)
        elif kind == "own files":
            _limit(resource.RLIMIT_NOFILE, None)
        elif kind == "files" and victim.alive:
            hard = _hard(resource.RLIMIT_NOFILE)
            resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (hard, hard))

    # --- the end -------------------------------------------------------------------------------------

    async def calm(self) -> None:
        """End all faults. Check that all engines serve one version and that all rollouts end."""
        _limit(resource.RLIMIT_FSIZE, None)
        _limit(resource.RLIMIT_NOFILE, None)
        for agent in self.agents.values():
            agent.proxy.swallow(False)
            if agent.stopped:
                agent.signal(signal.SIGCONT)
            if not agent.alive:
                await agent.start()
        try:
            async with asyncio.timeout(CALM_S):
                while not await self._publish_to_all():
                    pass
        except TimeoutError:
            raise Broken(f"no calm: {status_of(self.coordinator)}") from None
        await self._check_engines()
        self._producing = False
        for _ in range(60):
            if not self.rollouts.stats().outstanding:
                break
            self.version += 1
            await asyncio.gather(*(self._announce(i) for i in range(2)))
            await asyncio.sleep(0.5)
        else:
            raise Broken(f"rollouts do not end: {self.rollouts.stats()}")
        if self.broken:
            raise Broken("; ".join(self.broken[:5]))

    async def _publish_to_all(self) -> bool:
        """Publish a version to the whole fleet, and return whether all engines serve it.

        First replace engines that are quarantined or refused, as an operator does. An engine that misses a deadline on a
        busy machine may catch up within `CATCH_UP_S`.
        """
        coordinator = self.coordinator
        gone = {group.name for group in coordinator.fleet.engines() if group.quarantined}
        gone |= {engine for engine, _ in coordinator.members.refused()}
        for name in gone.intersection(ENGINES):
            await self.agents[name].replace()
        await self._everybody(ENGINES)
        self.version += 1
        await asyncio.gather(*(self._announce(i) for i in range(2)))
        if coordinator.fleet.published < self.version:
            return False
        try:
            await coordinator.members.wait_for_version(
                self.version, engines=ENGINES, deadline_s=CATCH_UP_S
            )
        except (PeerTimeout, EngineRefused):
            return False
        return True


def _hard(kind: int) -> int:
    return resource.getrlimit(kind)[1]


_SOFT = {
    kind: resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
}


def _limit(kind: int, soft: int | None) -> None:
    """Lower a limit of this process; None restores it."""
    resource.setrlimit(kind, (_SOFT[kind] if soft is None else soft, _hard(kind)))


def _footprint() -> tuple[int, int]:
    """Return (resident bytes, descriptors) of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize(), len(os.listdir("/proc/self/fd"))


async def run(rounds: int, seed: int, transport: str, mode: UpdateMode) -> str:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        chaos = Run(seed, transport, mode, Path(folder))
        try:
            await chaos.start()
            early = (0, 0)
            for number in range(rounds):
                await chaos.round()
                print(f"round {number}: {chaos.faults[-1]}", flush=True)
                if number == SETTLED_AFTER:
                    await chaos._everybody(ENGINES)
                    early = _footprint()
            await chaos.calm()
            late = _footprint()
        finally:
            await chaos.close()
    published = sum(report.outcome.value == "published" for report in chaos.reports)
    said = (
        f"{transport} {mode.value}: {len(chaos.reports)} rounds, {published} published, "
        f"{chaos.num_rollouts} rollouts, {len(chaos.faults)} faults in "
        f"{time.monotonic() - began:.0f} s; memory {early[0] >> 20} -> {late[0] >> 20} MiB, "
        f"descriptors {early[1]} -> {late[1]}"
    )
    if rounds > SETTLED_AFTER and late[0] - early[0] > MEMORY_NBYTES:
        raise Broken(f"memory grows: {said}")
    if rounds > SETTLED_AFTER and late[1] - early[1] > 12:
        raise Broken(f"descriptors grow: {said}")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="cma")
    parser.add_argument("--mode", default="in_place")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    try:
        print(
            asyncio.run(
                run(options.rounds, options.seed, options.transport, UpdateMode(options.mode))
            )
        )
    except Broken as error:
        print(f"BROKEN: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
