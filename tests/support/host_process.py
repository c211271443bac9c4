"""One process of `test_hosts_*.py`: the controller, a trainer rank or an engine on a host.

Orders are JSON lines on stdin, answers are JSON lines on stdout, so they do not use the network.
While an engine is not paused, it reads its own weights again and again, and records every version
that is not the version it claims to serve.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import windlass
from windlass.config import ControlConfig, PauseMode
from windlass.control.client import CommandHandler
from windlass.control.engine_agent import EngineAgent
from windlass.control.messages import Command, Result
from windlass.control.routes import status_of
from windlass.control.trainer_agent import TrainerAgent
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transports.registry import create_transport, parse_transport

TOKEN = "secret of the test"
COLUMNS = 512
TENSORS = ("embed", "down", "gate")
ROW_PARALLEL = {"down"}
PER_VERSION = 10_000_000
MIXED = -2
LOOK_S = 0.02

_out = threading.Lock()


def say(**answer: Any) -> None:
    with _out:
        os.write(1, json.dumps(answer).encode() + b"\n")


def truth(version: int, rows: int) -> dict[str, npt.NDArray[np.int32]]:
    """Return the whole model. No two elements of any two versions are equal."""
    found, first = {}, 1 + version * PER_VERSION
    for name in TENSORS:
        found[name] = np.arange(first, first + rows * COLUMNS, dtype=np.int32).reshape(
            rows, COLUMNS
        )
        first += rows * COLUMNS
    return found


def shard(
    worker: str, role: Role, rows: int, index: int, parts: int
) -> tuple[ShardManifest, dict[str, tuple[slice, ...]]]:
    builder = ManifestBuilder(worker, role)
    places: dict[str, tuple[slice, ...]] = {}
    for name in TENSORS:
        shape = (rows, COLUMNS)
        dim = 1 if role is Role.ENGINE and name in ROW_PARALLEL else 0
        chunk = -(-shape[dim] // parts)
        offsets, sizes = [0, 0], list(shape)
        offsets[dim] = min(index * chunk, shape[dim])
        sizes[dim] = min((index + 1) * chunk, shape[dim]) - offsets[dim]
        box = Box(tuple(offsets), tuple(sizes))
        builder.add_parameter(name, nbytes=box.numel * 4, dtype=DType.INT32)
        builder.add_shard(name, shape, box, name)
        places[name] = tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
    return builder.build(), places


class HoldAt:
    """Handler that stops once before a command of one type, until the test lets it continue."""

    _handler: CommandHandler

    def __init__(self) -> None:
        self.command = ""
        self.go = threading.Event()

    def intercept(self, agent: EngineAgent | TrainerAgent) -> HoldAt:
        """Handle commands before this agent does."""
        self._handler = agent
        return self

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        if type(command).__name__ == self.command:
            self.command = ""
            say(event="reached")
            self.go.wait()
        return self._handler.handle(command, epoch=epoch, round_number=round_number)


class Engine:
    """`EngineHooks` that read the weights while the engine is not paused."""

    def __init__(self, rows: int) -> None:
        self.manifest, self.places = shard("", Role.ENGINE, rows, 0, 1)
        self.memory = {n: np.full((rows, COLUMNS), -1, np.int32) for n in TENSORS}
        self.rows = rows
        self._lock = threading.Lock()
        self._paused, self._version = True, -1
        self.wrong: list[tuple[int, int]] = []
        self.seen: list[int] = []
        self.num_looks = self.num_pauses = 0
        threading.Thread(target=self._look, daemon=True).start()

    def held(self) -> int:
        """Return the version of every byte; -1 if no byte is written yet, `MIXED` for several versions."""
        first = int(self.memory["embed"].flat[0])
        if first == -1:
            return -1 if all((m == -1).all() for m in self.memory.values()) else MIXED
        version = (first - 1) // PER_VERSION
        whole = truth(version, self.rows)
        same = (np.array_equal(m, whole[n]) for n, m in self.memory.items())
        return version if all(same) else MIXED

    def _look(self) -> None:
        while True:
            with self._lock:
                if not self._paused:
                    held = self.held()
                    self.num_looks += 1
                    if held != self._version:
                        self.wrong.append((self._version, held))
                    if not self.seen or self.seen[-1] != self._version:
                        self.seen.append(self._version)
            threading.Event().wait(LOOK_S)

    @property
    def paused(self) -> bool:
        with self._lock:
            return self._paused

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        with self._lock:
            self._paused = True
            self.num_pauses += 1

    def resume(self, deadline_s: float) -> None:
        with self._lock:
            self._paused = False

    def finalise(self) -> None:
        pass

    def set_version(self, version: int, deadline_s: float) -> None:
        with self._lock:
            self._version = version


Orders = dict[str, Callable[..., Any]]


def obey(orders: Orders) -> None:
    """Carry out orders until stdin ends, each in its own thread, because an order may block."""
    for line in sys.stdin:
        number, name, *arguments = json.loads(line)

        def carry_out(number: int = number, name: str = name, given: Any = arguments) -> None:
            try:
                say(id=number, value=orders[name](*given))
            except windlass.WindlassError as error:
                say(id=number, error=[type(error).__name__, str(error)])

        threading.Thread(target=carry_out, daemon=True).start()
    os._exit(0)


def holding(handler: HoldAt) -> Orders:
    def arm(command: str) -> None:
        handler.go.clear()
        handler.command = command

    return {"arm": arm, "go": handler.go.set}


def run_engine(name: str, url: str, transport_name: str, rows: int, advertised: str) -> None:
    engine = Engine(rows)
    engine.manifest, engine.places = shard(f"{name}/0", Role.ENGINE, rows, 0, 1)
    arrays = list(engine.memory.values())
    transport = create_transport(parse_transport(transport_name), towards=url)
    handler = HoldAt()
    agent = EngineClient(
        EngineWeights(
            manifest=engine.manifest,
            addresses=[a.ctypes.data for a in arrays],
            regions=[transport.register(a.ctypes.data, a.nbytes) for a in arrays],
        ),
        transport=transport,
        hooks=engine,
        controller=url,
        token=TOKEN,
        url=advertised,
        intercept=handler.intercept,
    ).agent
    say(event="ready", address=transport.endpoint().address)

    def state() -> dict[str, Any]:
        return {
            "served": agent.served_version,
            "held": engine.held(),
            "mixed_weights": agent.mixed_weights,
            "paused": engine.paused,
            "wrong": engine.wrong,
            "seen": engine.seen,
            "num_looks": engine.num_looks,
            "num_pauses": engine.num_pauses,
        }

    obey({**holding(handler), "state": state})


def run_trainer(url: str, transport_name: str, rows: int, index: int, parts: int) -> None:
    manifest, places = shard(f"trainer/{index}", Role.TRAINER, rows, index, parts)
    memory = {n: truth(0, rows)[n][places[n]].copy() for n in TENSORS}
    transport = create_transport(parse_transport(transport_name), towards=url)
    parameters = [ParameterMemory(a.ctypes.data, a.nbytes) for a in memory.values()]
    handler = HoldAt()
    trainer = TrainerClient(
        TrainerWeights(
            manifest=manifest,
            parameters=lambda: parameters,
        ),
        transport=transport,
        controller=url,
        token=TOKEN,
        world_size=parts,
        job="one start",
        intercept=handler.intercept,
    )
    say(event="ready", address=transport.endpoint().address)

    def publish(version: int, deadline_s: float) -> dict[str, Any]:
        for name, whole in truth(version, rows).items():
            memory[name][...] = whole[places[name]]
        report = trainer.publish(version, deadline_s=deadline_s).result()
        return {
            "left_out": sorted(report.left_out),
            "phase_s": {str(phase): s for phase, s in report.phase_s.items()},
        }

    obey({**holding(handler), "publish": publish})


async def run_controller(host: str, port: int, config: str, journal: str) -> None:
    loop = asyncio.get_running_loop()
    parsed = msgspec.json.decode(config, type=ControlConfig)
    async with windlass.Controller(
        token=TOKEN,
        host=host,
        port=port,
        config=parsed,
        journal_path=Path(journal) if journal else None,
    ) as controller:
        coordinator = controller.coordinator
        phases: list[tuple[int, str]] = []
        coordinator.rounds.on_phase(lambda version, phase: phases.append((version, phase.name)))
        changed = asyncio.Condition()

        async def notify() -> None:
            async with changed:
                changed.notify_all()

        tasks: set[asyncio.Task[None]] = set()

        def spread() -> None:
            tasks.add(task := loop.create_task(notify()))
            task.add_done_callback(tasks.discard)

        coordinator.subscribe(spread)

        async def fleet(num_trainers: int, engines: list[str], deadline_s: float) -> None:
            await controller.wait_for_fleet(
                num_trainers=num_trainers, engines=engines, deadline_s=deadline_s
            )

        def routed() -> list[str]:
            return sorted(engine.name for engine in coordinator.routable())

        async def serving(version: int, engines: list[str], deadline_s: float) -> list[str]:
            async with asyncio.timeout(deadline_s), changed:
                await changed.wait_for(
                    lambda: coordinator.fleet.published == version and routed() == engines
                )
            return routed()

        async def status() -> dict[str, Any]:
            return {"status": status_of(coordinator), "routed": routed(), "phases": phases}

        def called(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                future = asyncio.run_coroutine_threadsafe(function(*arguments), loop)
                try:
                    return future.result()
                except TimeoutError:
                    seen = asyncio.run_coroutine_threadsafe(status(), loop).result()
                    raise windlass.WindlassError(f"not in time: {seen}") from None

            return call

        say(event="ready", url=controller.url)
        orders: Orders = {"fleet": fleet, "serving": serving, "status": status}
        await asyncio.to_thread(obey, {name: called(f) for name, f in orders.items()})


def main() -> None:
    role, *given = sys.argv[1:]
    match role:
        case "controller":
            asyncio.run(run_controller(given[0], int(given[1]), given[2], given[3]))
        case "engine":
            run_engine(given[0], given[1], given[2], int(given[3]), given[4])
        case _:
            run_trainer(given[0], given[1], int(given[2]), int(given[3]), int(given[4]))


if __name__ == "__main__":
    main()
