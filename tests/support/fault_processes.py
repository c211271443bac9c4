"""Processes of `test_faults.py`: a controller with its owner, trainer ranks, engines.

An engine generates from the memory that updates write: each token *is* the version of the whole
memory, and its label is the version that the engine claims. `MIXED` is a token of a mixture.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from aiohttp import web
from kill_at import KillAt
from weight_rank import part_of

import windlass
from windlass.config import ControlConfig, PauseMode
from windlass.control.engine_agent import EngineAgent
from windlass.control.trainer_agent import TrainerAgent
from windlass.engines.client import EngineClient, EngineWeights
from windlass.engines.embedded.sleep import SleepingHooks, SleepingWeights
from windlass.errors import RoundAborted
from windlass.layout.manifest import Role
from windlass.rollout import RolloutConfig, SamplingParams, StalenessPolicy
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.arena import Arena, aligned_offsets
from windlass.transfer.base import ParameterMemory
from windlass.transports.base import OneSidedTransport
from windlass.transports.registry import create_transport, parse_transport

TOKEN = "secret of the test"
NUM_TRAINERS = 2
GROUP_SIZE = 2
NUM_TOKENS = 16
DRAIN_S = 180.0
MIXED = 1_000_000
PER_VERSION = 1_000_000
"""Difference between elements of successive versions."""


# --- engines --------------------------------------------------------------------------------


class Generator:
    """Weights of a rank and the tokens that it makes of them; `EngineHooks`."""

    def __init__(self, worker: str, token_s: float, transport: OneSidedTransport) -> None:
        self._token_s = token_s
        self.part = part_of(worker, Role.ENGINE, 0, 1)
        empty = {name: tensor.numpy() for name, tensor in self.part.empty().items()}
        offsets, total = aligned_offsets(array.nbytes for array in empty.values())
        self.arena = Arena(transport, total)
        self.memory: dict[str, Any] = {}
        for offset, (name, array) in zip(offsets, empty.items(), strict=True):
            place = self.arena.bytes[offset : offset + array.nbytes].view(array.dtype)
            self.memory[name] = place.reshape(array.shape)
            self.memory[name][...] = array
        self.loop = asyncio.new_event_loop()
        self.going = asyncio.Event()
        self._lock = threading.Lock()
        self._paused, self._version = True, -1
        self._whole: dict[int, dict[str, Any]] = {}

    def held(self) -> int:
        """Return the version of every byte; -1 if no byte is written yet, `MIXED` for several versions."""
        first = int(self.memory["embed"].flat[0])
        if first == -1:
            return -1 if all((m == -1).all() for m in self.memory.values()) else MIXED
        version = (first - 1) // PER_VERSION
        whole = self._whole.setdefault(version, self.part.of(version))
        same = (np.array_equal(memory, whole[name]) for name, memory in self.memory.items())
        return version if all(same) else MIXED

    def token(self) -> tuple[int, int] | None:
        """Return (version in memory, version that the engine claims); None while paused."""
        with self._lock:
            return None if self._paused else (self.held(), self._version)

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        with self._lock:
            self._paused = True
        self.loop.call_soon_threadsafe(self.going.clear)

    def resume(self, deadline_s: float) -> None:
        with self._lock:
            self._paused = False
        self.loop.call_soon_threadsafe(self.going.set)

    def finalise(self) -> None:
        pass

    def set_version(self, version: int, deadline_s: float) -> None:
        with self._lock:
            self._version = version

    # --- SGLang's /generate

    async def generate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        made: list[tuple[int, int]] = []
        await self.going.wait()
        while len(made) < body["sampling_params"]["max_new_tokens"]:
            await asyncio.sleep(self._token_s)
            token = self.token()
            if token is None:
                break
            made.append(token)
        whole = len(made) == body["sampling_params"]["max_new_tokens"]
        meta = {
            "finish_reason": {"type": "length" if whole else "abort"},
            "output_token_logprobs": [[-0.5, token, None] for token, _ in made],
            "output_token_versions": [version for _, version in made],
        }
        return web.json_response({"output_ids": [token for token, _ in made], "meta_info": meta})

    def serve(self) -> str:
        """Serve in a daemon thread and return the URL."""
        address: list[str] = []
        ready = threading.Event()

        async def begin() -> None:
            app = web.Application(client_max_size=1 << 26)
            app.add_routes([web.post("/generate", self.generate)])
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
            address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")

        def run() -> None:
            asyncio.set_event_loop(self.loop)
            self.loop.run_until_complete(begin())
            ready.set()
            self.loop.run_forever()

        threading.Thread(target=run, daemon=True).start()
        assert ready.wait(30)
        return address[0]


def run_engine(pipe: Connection, name: str, url: str, token_s: float, transport_name: str) -> None:
    """Serve until the pipe closes. Messages: ("arm", command, pid), ("held",) or ("sleep",)."""
    torch.set_num_threads(1)
    transport = create_transport(parse_transport(transport_name))
    generator = Generator(f"{name}/0", token_s, transport)
    addresses = [array.ctypes.data for array in generator.memory.values()]
    weights = SleepingWeights(
        generator.arena,
        generator.part.manifest,
        addresses,
        lambda: addresses,
        may_sleep=True,
    )

    def pause_and_sleep(mode: PauseMode, deadline_s: float) -> None:
        generator.pause("sleep", mode, deadline_s)
        weights.sleep()

    hooks = SleepingHooks(generator, weights, pause_and_sleep)
    handlers: list[KillAt] = []

    def intercept(agent: EngineAgent) -> KillAt:
        handlers.append(KillAt(agent))
        return handlers[0]

    client = EngineClient(
        EngineWeights(
            manifest=generator.part.manifest,
            addresses=addresses,
            regions=(generator.arena.region,),
        ),
        transport=transport,
        hooks=hooks,
        sleeper=hooks,
        controller=url,
        token=TOKEN,
        url=generator.serve(),
        can_send=False,
        intercept=intercept,
    )
    (handler,), agent = handlers, client.agent
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        if message[0] == "arm":
            handler.arm(*message[1:])
            pipe.send("armed")
        elif message[0] == "sleep":
            hooks.sleep(PauseMode.ABORT, 10.0)
            pipe.send("asleep")
        else:
            pipe.send((agent.served_version, generator.held(), agent.mixed_weights))
    client.close()


# --- trainers -------------------------------------------------------------------------------


def run_trainer(pipe: Connection, index: int, url: str, transport_name: str) -> None:
    """Train until the pipe closes. Messages: ("arm", command, pid) or ("publish", version).

    Before engines resume, the trainer spoils its weights in `release`: nothing may read them any more.
    """
    torch.set_num_threads(1)
    part = part_of(f"trainer/{index}", Role.TRAINER, index, NUM_TRAINERS)
    memory = {name: tensor.numpy() for name, tensor in part.empty().items()}
    parameters = [ParameterMemory(a.ctypes.data, a.nbytes) for a in memory.values()]
    handlers: list[KillAt] = []

    def release() -> None:
        for array in memory.values():
            array[...] = -2

    def intercept(agent: TrainerAgent) -> KillAt:
        handlers.append(KillAt(agent))
        return handlers[0]

    trainer = TrainerClient(
        TrainerWeights(
            manifest=part.manifest,
            parameters=lambda: parameters,
            release=release if transport_name == "pull" else None,
        ),
        transport=create_transport(parse_transport(transport_name)),
        controller=url,
        token=TOKEN,
        world_size=NUM_TRAINERS,
        job="ranks that come back one by one",
        intercept=intercept,
    )
    (handler,) = handlers
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        if message[0] == "arm":
            handler.arm(*message[1:])
            pipe.send("armed")
            continue
        version = message[1]
        for name, values in part.of(version).items():
            memory[name][...] = values
        try:
            report = trainer.publish(version, deadline_s=60).result()
        except RoundAborted as error:
            pipe.send(("aborted", str(error), ()))
        except windlass.WindlassError as error:
            pipe.send((type(error).__name__, str(error), ()))
        else:
            pipe.send(("published", "", tuple(report.left_out)))
    trainer.close()


# --- the controller and its owner -----------------------------------------------------------


class Owner:
    """Owner of rollouts: requests groups, stores each group, and remembers its requests across kills."""

    def __init__(
        self, controller: windlass.Controller, folder: Path, outstanding_groups: int
    ) -> None:
        self.rollouts, self.outstanding_groups = controller.rollouts, outstanding_groups
        self.wanted, self.store = folder / "wanted", folder / "store"
        self.draining = False
        self.drained = asyncio.Event()
        self.changed = asyncio.Event()

    def begin(self) -> None:
        """Continue where an earlier process was killed."""
        have = stored(self.store)
        self.rollouts.acknowledge(line["tasks"][0] for line in have)
        there = {line["serial"] for line in have}
        there |= {handle.metadata for handle in self.rollouts.recovered.groups.values()}
        self.num_wanted = self.wanted.stat().st_size if self.wanted.exists() else 0
        self.num_stored = len(have)
        for serial in range(self.num_wanted):
            if serial not in there:
                self._submit(serial)

    def _submit(self, serial: int) -> None:
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS)
        self.rollouts.submit_group((serial + 1,), GROUP_SIZE, sampling, metadata=serial)

    def top_up(self) -> None:
        while not self.draining and self.num_wanted - self.num_stored < self.outstanding_groups:
            add(self.wanted, b".")
            self._submit(self.num_wanted)
            self.num_wanted += 1

    async def run(self) -> None:
        """Run until drained: every requested group is in the store."""
        self.begin()
        while True:
            self.top_up()
            if self.draining and self.num_stored == self.num_wanted:
                self.drained.set()
                return
            (group,) = await self.rollouts.next_batch(1, deadline_s=200)
            line = {
                "serial": group.metadata,
                "tasks": [rollout.task_id for rollout in group.rollouts],
                "tokens": [rollout.output_ids for rollout in group.rollouts],
                "versions": [rollout.versions for rollout in group.rollouts],
            }
            add(self.store, json.dumps(line).encode() + b"\n")
            self.num_stored += 1
            self.rollouts.acknowledge([group.rollouts[0].task_id])


def stored(path: Path) -> list[dict[str, Any]]:
    """Return the groups in the store; each line was written in one call."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def run_controller(
    pipe: Connection, port: int, folder: Path, config: ControlConfig, outstanding_groups: int
) -> None:
    """Serve ("fleet", engines, workers), ("serving", version, engines), ("stats",) and ("drain",)."""
    asyncio.run(_control(pipe, port, folder, config, outstanding_groups))


async def _control(
    pipe: Connection, port: int, folder: Path, config: ControlConfig, outstanding_groups: int
) -> None:
    rollout_config = RolloutConfig(
        journal=folder / "rollouts.journal",
        acknowledge=True,
        max_attempts=200,
        retry_backoff_s=0.02,
        engine_grace_s=0.3,
        attempt_deadline_s=120.0,
    )
    async with windlass.Controller(
        token=TOKEN,
        port=port,
        config=config,
        staleness=StalenessPolicy.unbounded(outstanding_groups * GROUP_SIZE),
        journal_path=folder / "rounds.journal",
        rollout_config=rollout_config,
    ) as controller:
        owner = Owner(controller, folder, outstanding_groups)
        owning = asyncio.create_task(owner.run())
        pipe.send(controller.url)
        while (message := await asyncio.to_thread(pipe.recv)) is not None:
            match message[0]:
                case "fleet":
                    await controller.wait_for_fleet(
                        num_trainers=NUM_TRAINERS, engines=message[1], deadline_s=60
                    )
                    await controller.rollouts.wait_for_workers(message[2], deadline_s=60)
                    pipe.send("there")
                case "serving":
                    pipe.send(await _serving(controller, message[1], set(message[2])))
                case "stats":
                    pipe.send(msgspec.to_builtins(controller.rollouts.stats()))
                case _:  # drain
                    owner.draining = True
                    await asyncio.wait({owning}, timeout=DRAIN_S)
                    if owning.done():
                        owning.result()
                    pipe.send(msgspec.to_builtins(controller.rollouts.stats()))
        owning.cancel()
        await asyncio.gather(owning, return_exceptions=True)


async def _serving(controller: windlass.Controller, version: int, engines: set[str]) -> bool:
    """Wait until exactly these engines are routable, at this version."""
    reached = asyncio.Event()

    def look() -> None:
        routable = {engine.name: engine.version for engine in controller.coordinator.routable()}
        if routable == dict.fromkeys(engines, version):
            reached.set()

    controller.coordinator.subscribe(look)
    look()
    try:
        async with asyncio.timeout(60):
            await reached.wait()
    except TimeoutError:
        return False
    return True


def run_worker(pipe: Connection, name: str, url: str) -> None:
    """Run a rollout worker as `python -m windlass.rollout.worker` does; it ends by itself or is killed."""
    from windlass.rollout import run_rollout_worker

    os.environ["WINDLASS_TOKEN"] = TOKEN
    raise SystemExit(run_rollout_worker({}, ["--controller", url, "--name", name]))
