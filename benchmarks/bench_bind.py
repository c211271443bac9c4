"""Time to bind a restarted engine in a fleet of 256 engines.

This process runs the real coordinator. One other process runs every trainer rank and engine rank with the real clients
(`TrainerClient`, `EngineClient`) over the in-process transport. The model has the layers of Qwen3-0.6B with small
dims: fused parameters, casts from float32. The benchmark restarts engines, and for comparison binds the whole fleet
again. After each of the two it compares every engine with the trainers' bytes.

All ranks share one process and its cores, so binding the whole fleet is slower here than with one host per engine. The
controller's commands and their bytes are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.pool
import sys
import time
from collections.abc import Awaitable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import numpy as np
import numpy.typing as npt
from memory_transport import MemoryTransport

from harness import Row, median_p95, parser, report
from windlass.config import ControlConfig, PhaseDeadlines
from windlass.control.coordinator import Coordinator
from windlass.control.messages import Command
from windlass.control.routes import mount_updates
from windlass.control.session import AgentSession
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.net.messages import encode
from windlass.net.server import ControlServer
from windlass.testing.resting_engine import RestingEngine
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory

TOKEN = "benchmark"
DEADLINE_S = 300.0
NUM_TRAINERS = 2
LAYERS, HIDDEN, HEADS, KV, MLP = 28, 32, 64, 32, 96
"""Dims of Qwen3-0.6B. All but the number of layers are divided by 32."""

Elements = npt.NDArray[Any]


def layer_parameters(layer: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return parameter of an engine -> its stacked checkpoint tensors and their shapes."""
    at = f"model.layers.{layer}"
    return {
        f"{at}.qkv_proj": {
            f"{at}.q_proj": (HEADS, HIDDEN),
            f"{at}.k_proj": (KV, HIDDEN),
            f"{at}.v_proj": (KV, HIDDEN),
        },
        f"{at}.o_proj": {f"{at}.o_proj": (HIDDEN, HEADS)},
        f"{at}.gate_up_proj": {f"{at}.gate_proj": (MLP, HIDDEN), f"{at}.up_proj": (MLP, HIDDEN)},
        f"{at}.down_proj": {f"{at}.down_proj": (HIDDEN, MLP)},
        **{
            f"{at}.{norm}": {f"{at}.{norm}": (HIDDEN,)}
            for norm in ("input_norm", "post_norm", "q_norm", "k_norm")
        },
    }


PARAMETERS = {"model.embed_tokens": {"model.embed_tokens": (4096, HIDDEN)}} | {
    name: tensors for layer in range(LAYERS) for name, tensors in layer_parameters(layer).items()
}
SHAPES = {name: shape for tensors in PARAMETERS.values() for name, shape in tensors.items()}


def truth(version: int) -> dict[str, Elements]:
    """Return float32 values that a cast to bfloat16 keeps. Elements, and versions, differ."""
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        index = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(shape)
        bits = (0x3F00 + (index * 3 + number * 5 + version * 7) % 251).astype(np.uint32) << 16
        found[name] = bits.view(np.float32)
    return found


class Trainer:
    """Trainer rank with tensors split along dim 0."""

    def __init__(self, index: int, url: str) -> None:
        builder = ManifestBuilder(f"trainer/{index}", Role.TRAINER)
        self.rows: dict[str, slice] = {}
        self.weights: dict[str, Elements] = {}
        for name, shape in SHAPES.items():
            rows = shape[0] // NUM_TRAINERS
            self.rows[name] = slice(index * rows, (index + 1) * rows)
            self.weights[name] = np.zeros((rows, *shape[1:]), np.float32)
            builder.add_parameter(name, nbytes=self.weights[name].nbytes, dtype=DType.FLOAT32)
            box = Box((index * rows, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            builder.add_shard(name, shape, box, name)
        where = tuple(ParameterMemory(w.ctypes.data, w.nbytes) for w in self.weights.values())
        self.client = TrainerClient(
            TrainerWeights(manifest=builder.build(), parameters=lambda: where),
            transport=MemoryTransport(),
            controller=url,
            token=TOKEN,
            world_size=NUM_TRAINERS,
            job="benchmark",
            connect_deadline_s=DEADLINE_S,
        )

    def publish(self, version: int) -> tuple[str, ...]:
        for name, whole in truth(version).items():
            self.weights[name][:] = whole[self.rows[name]]
        return self.client.publish(version, deadline_s=DEADLINE_S).result().engines


class Engine:
    """Engine of one rank, in bfloat16."""

    def __init__(self, name: str, url: str) -> None:
        builder = ManifestBuilder(f"{name}/0", Role.ENGINE)
        self.memory: list[npt.NDArray[np.uint16]] = []
        for parameter, tensors in PARAMETERS.items():
            nbytes = sum(2 * int(np.prod(shape)) for shape in tensors.values())
            builder.add_parameter(parameter, nbytes=nbytes, dtype=DType.BFLOAT16)
            offset = 0
            for tensor, shape in tensors.items():
                box = Box(tuple(0 for _ in shape), shape)
                builder.add_shard(tensor, shape, box, parameter, offset_bytes=offset)
                offset += 2 * int(np.prod(shape))
            self.memory.append(np.zeros(nbytes // 2, np.uint16))
        transport = MemoryTransport()
        regions = [transport.register(m.ctypes.data, m.nbytes) for m in self.memory]
        self.client = EngineClient(
            EngineWeights(
                manifest=builder.build(),
                addresses=[m.ctypes.data for m in self.memory],
                regions=regions,
            ),
            transport=transport,
            hooks=RestingEngine(),
            controller=url,
            token=TOKEN,
            can_send=False,
            connect_deadline_s=DEADLINE_S,
        )

    def holds(self, wanted: Sequence[Elements]) -> bool:
        return all((w == held).all() for w, held in zip(wanted, self.memory, strict=True))


def served(version: int) -> list[Elements]:
    """Return the expected value of every parameter of an engine."""
    found = truth(version)
    return [
        np.concatenate([found[name].ravel().view(np.uint32) >> 16 for name in tensors])
        for tensors in PARAMETERS.values()
    ]


def run_ranks(pipe: Connection, url: str, num_engines: int) -> None:
    """Run the other process: start all ranks, then carry out the commands of the pipe."""
    engines = {f"engine-{i}": Engine(f"engine-{i}", url) for i in range(num_engines)}
    trainers = [Trainer(index, url) for index in range(NUM_TRAINERS)]
    pipe.send(sum(m.nbytes for m in engines["engine-0"].memory))
    while True:
        match told := pipe.recv():
            case "stop", name:
                engines.pop(name).client.close()
                pipe.send(True)
            case "start", name:
                engines[name] = Engine(name, url)
                pipe.send(True)
            case "publish", version:
                with multiprocessing.pool.ThreadPool(NUM_TRAINERS) as pool:
                    told_of = pool.map(lambda trainer: trainer.publish(version), trainers)
                wanted = served(version)
                whole = all(engine.holds(wanted) for engine in engines.values())
                pipe.send(whole and {len(names) for names in told_of} == {len(engines)})
            case _:
                raise ValueError(f"told {told}")


class Asked:
    """Counter of the coordinator's commands and their bytes."""

    def __init__(self) -> None:
        self.num, self.nbytes = 0, 0
        call = AgentSession.call

        def counted(session: AgentSession, key: Any, command: Command) -> Awaitable[Any]:
            self.num += 1
            self.nbytes += len(encode(command))
            return call(session, key, command)

        AgentSession.call = counted  # type: ignore[method-assign, assignment]

    def take(self) -> tuple[int, int]:
        found = self.num, self.nbytes
        self.num, self.nbytes = 0, 0
        return found


async def measure(num_engines: int, repeats: int) -> list[Row]:
    deadlines = PhaseDeadlines(connect_s=DEADLINE_S, fleet_s=DEADLINE_S)
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    coordinator = Coordinator(ControlConfig(deadlines=deadlines, min_engines=num_engines))
    mount_updates(coordinator, server)
    await server.start()
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    ranks = context.Process(target=run_ranks, args=(theirs, server.url, num_engines))
    ranks.start()

    async def tell(*told: object) -> Any:
        ours.send(told)
        return await asyncio.to_thread(ours.recv)

    nbytes = await asyncio.to_thread(ours.recv)
    version = 0
    assert await tell("publish", version), "an engine does not hold what was published"
    asked, came = Asked(), asyncio.Event()
    coordinator.subscribe(came.set)
    alone, whole, commands, sizes = [], [], [], []
    for turn in range(repeats):
        name = f"engine-{(turn * 37) % num_engines}"
        before = coordinator.fleet.find(f"{name}/0")
        await tell("stop", name)
        telling = asyncio.create_task(tell("start", name))
        while coordinator.fleet.find(f"{name}/0") in (None, before):
            came.clear()
            await came.wait()
        alone.append(await bound(coordinator))
        await telling
        commands.append(asked.take())
        coordinator.connector.binding = None
        whole.append(await bound(coordinator))
        sizes.append(asked.take())
        version += 1
        assert await tell("publish", version), "an engine does not hold what was published"
        asked.take()
        print(f"{turn}: {alone[-1]:.3f} s alone, {whole[-1]:.3f} s all", file=sys.stderr)
    # Closing hundreds of clients one by one takes longer than the rest.
    ranks.kill()
    await asyncio.to_thread(ranks.join, 60)
    await coordinator.close()
    await server.close()
    case = f"1 of {num_engines} engines started again, {NUM_TRAINERS} trainer ranks, {len(SHAPES)} tensors, {nbytes / 1e6:.1f} MB"
    return rows_of(case, alone, whole, commands, sizes)


async def bound(coordinator: Coordinator) -> float:
    """Wait until all connected ranks are bound, including bindings in progress; return the seconds."""
    began = time.perf_counter()
    async with coordinator.rounds.lock:
        await coordinator.connector.ensure_bound()
    return time.perf_counter() - began


def rows_of(
    case: str,
    alone: Sequence[float],
    whole: Sequence[float],
    commands: Sequence[tuple[int, int]],
    sizes: Sequence[tuple[int, int]],
) -> list[Row]:
    found: list[tuple[str, float, str, float]] = []
    reference = "all bound anew"
    for index, what in enumerate(("median", "p95")):
        ours, theirs = (1e3 * median_p95(seconds)[index] for seconds in (alone, whole))
        found.append((f"until it is bound, {what}", ours, "ms", theirs))
    for index, metric, unit, by in ((0, "commands", "", 1), (1, "bytes of commands", "kB", 1e3)):
        ours, theirs = (median_p95([c[index] for c in s])[0] / by for s in (commands, sizes))
        found.append((metric, ours, unit, theirs))
    return [
        Row(case, metric, ours, unit, reference, theirs) for metric, ours, unit, theirs in found
    ]


def main(argv: Sequence[str] | None = None) -> None:
    made: argparse.ArgumentParser = parser(__doc__.splitlines()[0])
    made.add_argument("--engines", type=int, default=256)
    made.add_argument("--repeats", type=int, default=11)
    options = made.parse_args(argv)
    rows = asyncio.run(measure(options.engines, options.repeats))
    report(rows, options.json, "binding")


if __name__ == "__main__":
    main()
