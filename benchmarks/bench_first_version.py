"""Time of the first version after joining, for a mixture of experts, split by step.

The controller runs in this process. Every trainer rank and engine rank is a separate process with a real client, over
the transport `cma`. Names, layers, experts and splits equal Qwen3-30B-A3B: FSDP2 ranks have transformers' stacked
experts, split along dim 0. The engine has fused parameters, split by tensor parallelism or expert parallelism. Matrices
are tiny, so the time is for plans, messages and tables, not for bytes.

On GPUs both ends build tables of pieces for the kernels that store. Here every rank builds them after the last version,
which needs no GPU.

The reference of each figure is one trainer rank with an engine of one rank. Every engine checks every byte of every version.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import multiprocessing
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import windlass.transfer.bind
import windlass.transfer.destination
from harness import Row, median_p95, parser, report
from windlass.config import ControlConfig
from windlass.control.coordinator import Coordinator
from windlass.control.routes import mount_updates
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.memory.cuda.pieces import block_tables
from windlass.net.server import ControlServer
from windlass.planning.plan import TransferPlan
from windlass.testing.resting_engine import RestingEngine
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.base import OneSidedTransport
from windlass.transports.registry import create_transport, parse_transport

TOKEN = "benchmark"
DEADLINE_S = 120.0
HIDDEN, INNER, HEADS, KV, VOCAB = 32, 16, 64, 8, 256
"""Rows and columns of Qwen3-30B-A3B, reduced."""

Elements = npt.NDArray[Any]
Figures = dict[str, tuple[float, str]]
"""Metric -> value and unit."""


@dataclass(frozen=True)
class Setting:
    """Number of ranks on each side, and the model. `expert_parallel`: engine ranks have whole experts."""

    num_trainers: int
    num_engine_ranks: int
    layers: int
    experts: int
    dtype: DType = DType.BFLOAT16
    expert_parallel: bool = False

    @property
    def case(self) -> str:
        """Return the name of the setting in rows."""
        engine = f"{'EP' if self.expert_parallel else 'TP'}{self.num_engine_ranks}"
        return (
            f"{self.num_trainers} trainer ranks in {self.dtype} -> {engine}, {self.layers} layers of "
            f"{self.experts} experts"
        )


@dataclass(frozen=True)
class Piece:
    """Checkpoint tensor in a parameter. `cut`: dim that is split over engine ranks; -1 for none."""

    tensor: str
    shape: tuple[int, ...]
    cut: int = 0


def parameters_of(setting: Setting, *, of_trainer: bool) -> Iterator[tuple[str, list[list[Piece]]]]:
    """Yield each parameter with the pieces of each of its experts, or with one list of pieces."""
    yield "embed", [[Piece("model.embed_tokens.weight", (VOCAB, HIDDEN))]]
    for layer in range(setting.layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}", [[Piece(f"{at}.{norm}.weight", (HIDDEN,), -1)]]
        heads = {"q": HEADS, "k": KV, "v": KV}
        qkv = [Piece(f"{at}.{name}_proj.weight", (rows, HIDDEN)) for name, rows in heads.items()]
        for fused in [[piece] for piece in qkv] if of_trainer else [qkv]:
            yield fused[0].tensor, [fused]
        yield f"{at}.o_proj", [[Piece(f"{at}.o_proj.weight", (HIDDEN, HEADS), 1)]]
        yield f"{at}.gate", [[Piece(f"{at}.gate.weight", (setting.experts, HIDDEN), -1)]]
        experts = [f"{at}.mlp.experts.{expert}" for expert in range(setting.experts)]
        w13 = [
            [Piece(f"{e}.{name}_proj.weight", (INNER, HIDDEN)) for name in ("gate", "up")]
            for e in experts
        ]
        yield f"{at}.w13", w13
        yield f"{at}.w2", [[Piece(f"{e}.down_proj.weight", (HIDDEN, INNER), 1)] for e in experts]
    yield "norm", [[Piece("model.norm.weight", (HIDDEN,), -1)]]
    yield "lm_head", [[Piece("lm_head.weight", (VOCAB, HIDDEN))]]


class Weights:
    """Weights of one rank in host memory, and their description."""

    def __init__(self, setting: Setting, role: Role, index: int) -> None:
        is_trainer = role is Role.TRAINER
        world = setting.num_trainers if is_trainer else setting.num_engine_ranks
        self.dtype = setting.dtype if is_trainer else DType.BFLOAT16
        builder = ManifestBuilder(f"{role}/{index}", role)
        self.memory: list[Elements] = []
        self.shards: list[list[tuple[Piece, Box]]] = []
        for name, items in parameters_of(setting, of_trainer=is_trainer):
            whole = len(items) > 1 and (is_trainer or setting.expert_parallel)
            own = items[len(items) * index // world : len(items) * (index + 1) // world]
            shards = [
                (piece, box_of(piece, 0 if is_trainer else piece.cut, 1 if whole else world, index))
                for item in (own if whole else items)
                for piece in item
            ]
            numel = sum(box.numel for _, box in shards)
            builder.add_parameter(name, nbytes=numel * self.dtype.itemsize, dtype=self.dtype)
            offset = 0
            for piece, box in shards:
                builder.add_shard(piece.tensor, piece.shape, box, name, offset_bytes=offset)
                offset += box.numel * self.dtype.itemsize
            self.memory.append(np.zeros(numel, np.dtype(f"u{self.dtype.itemsize}")))
            self.shards.append(shards)
        self.manifest = builder.build()
        self.places = tuple(ParameterMemory(int(m.ctypes.data), m.nbytes) for m in self.memory)

    def wanted(self, version: int) -> Iterator[Elements]:
        """Yield the expected values of each parameter; a cast from float32 keeps them."""
        for shards in self.shards:
            bits = np.concatenate([values(piece, box, version) for piece, box in shards])
            yield bits if self.dtype is DType.BFLOAT16 else bits.astype(np.uint32) << 16

    def fill(self, version: int) -> None:
        """Write the weights of `version`."""
        for memory, wanted in zip(self.memory, self.wanted(version), strict=True):
            memory[:] = wanted

    def holds(self, version: int) -> bool:
        """Return whether these are the weights of `version`."""
        pairs = zip(self.memory, self.wanted(version), strict=True)
        return all((memory == wanted).all() for memory, wanted in pairs)


def box_of(piece: Piece, dim: int, world: int, index: int) -> Box:
    """Return a rank's box of a piece, or the whole piece if `dim` is -1."""
    offsets, sizes = [0] * len(piece.shape), list(piece.shape)
    if dim >= 0 and piece.cut >= 0 and world > 1:
        sizes[dim] //= world
        offsets[dim] = index * sizes[dim]
    return Box(tuple(offsets), tuple(sizes))


def values(piece: Piece, box: Box, version: int) -> Elements:
    """Return the bits of a box in bfloat16. Elements, tensors and versions differ."""
    index = np.arange(math.prod(piece.shape)).reshape(piece.shape)
    found = 0x3F00 + (index * 3 + zlib.crc32(piece.tensor.encode()) + version * 7) % 251
    own = tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))
    return found[own].astype(np.uint16).ravel()


class Timers:
    """Timers of functions of this process, by step."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)

    def time(self, holder: Any, name: str, step: str) -> None:
        """Replace a function by a wrapper that adds its seconds to `step`."""
        function = inspect.getattr_static(holder, name)
        call: Callable[..., Any] = getattr(function, "__func__", function)

        @functools.wraps(call)
        def timed(*args: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **keywords)
            finally:
                self.seconds[step] += time.perf_counter() - began

        setattr(holder, name, classmethod(timed) if function is not call else timed)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        found, self.seconds = self.seconds, defaultdict(float)
        return dict(found)


def connect_engine(
    weights: Weights, setting: Setting, url: str, transport: OneSidedTransport
) -> EngineClient:
    regions = [transport.register(place.address, place.nbytes) for place in weights.places]
    return EngineClient(
        EngineWeights(
            manifest=weights.manifest,
            addresses=[place.address for place in weights.places],
            regions=regions,
        ),
        transport=transport,
        hooks=RestingEngine(),
        controller=url,
        token=TOKEN,
        world_size=setting.num_engine_ranks,
        connect_deadline_s=DEADLINE_S,
    )


def connect_trainer(
    weights: Weights, setting: Setting, url: str, transport: OneSidedTransport
) -> TrainerClient:
    return TrainerClient(
        TrainerWeights(manifest=weights.manifest, parameters=lambda: weights.places),
        transport=transport,
        controller=url,
        token=TOKEN,
        world_size=setting.num_trainers,
        job="benchmark",
        connect_deadline_s=DEADLINE_S,
    )


def run_rank(setting: Setting, role: Role, index: int, url: str, pipe: Connection) -> None:
    """Run one rank and carry out the commands of the pipe."""
    torch.set_num_threads(1)
    timers = Timers()
    timers.time(TransferPlan, "decode", "rank, decode the plan")
    for module in (windlass.transfer.bind, windlass.transfer.destination):
        timers.time(module, "bind_links", "rank, bind ops")
    timers.time(windlass.transfer.bind, "check_binding", "rank, check addresses")
    timers.time(Receiver, "connect", "engine rank, bind the plan")
    timers.time(Sender, "connect", "trainer rank, bind the plan")
    timers.time(Sender, "prepare", "trainer rank, pack and hash")
    timers.time(Receiver, "verify", "engine rank, verify")
    weights, transport = Weights(setting, role, index), create_transport(parse_transport("cma"))
    trainer: TrainerClient | None = None
    engine: EngineClient | None = None
    pipe.send(None)
    while True:
        match pipe.recv():
            case "connect":
                if role is Role.TRAINER:
                    trainer = connect_trainer(weights, setting, url, transport)
                else:
                    engine = connect_engine(weights, setting, url, transport)
                pipe.send(None)
            case "fill", int(version):
                weights.fill(version)
                pipe.send(None)
            case "publish", int(version) if trainer is not None:
                pipe.send(trainer.publish(version, deadline_s=DEADLINE_S).result())
            case "holds", int(version):
                pipe.send(weights.holds(version))
            case "steps":
                pipe.send(timers.take())
            case "tables":
                pipe.send(tables_of(trainer, engine, len(weights.memory)))
            case told:
                raise ValueError(f"told {told}")


def tables_of(
    trainer: TrainerClient | None, engine: EngineClient | None, num_parameters: int
) -> tuple[int, float]:
    """Return the number of a rank's ops, and the seconds to build their tables of pieces."""
    if trainer is not None:
        programs = trainer._sender.links.programs
    else:
        assert engine is not None
        programs = engine._receiver.destination.programs
    targets = np.zeros(1 << 16, np.uint64)
    sources = None if trainer is None else np.zeros(num_parameters, np.uint64)
    began = time.perf_counter()
    for program in programs.values():
        block_tables(program, sources, targets)
    return sum(len(program.ops) for program in programs.values()), time.perf_counter() - began


class Fleet:
    """Processes of all ranks."""

    def __init__(self, setting: Setting, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: dict[Role, list[Connection]] = {Role.TRAINER: [], Role.ENGINE: []}
        self.processes = []
        counts = {Role.TRAINER: setting.num_trainers, Role.ENGINE: setting.num_engine_ranks}
        for role, index in [(role, i) for role, count in counts.items() for i in range(count)]:
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(setting, role, index, url, theirs))
            process.start()
            self.processes.append(process)
            self.pipes[role].append(ours)

    def send(self, told: object, *roles: Role) -> None:
        for role in roles or self.pipes:
            for pipe in self.pipes[role]:
                pipe.send(told)

    async def receive(self, *roles: Role) -> list[Any]:
        pipes = [pipe for role in roles or self.pipes for pipe in self.pipes[role]]
        return [await asyncio.to_thread(pipe.recv) for pipe in pipes]

    async def ask(self, told: object, *roles: Role) -> list[Any]:
        self.send(told, *roles)
        return await self.receive(*roles)

    async def steps(self) -> dict[str, float]:
        """Return the seconds of the slowest rank since the last call, by step."""
        found: dict[str, float] = {}
        for rank in await self.ask("steps"):
            for step, seconds in rank.items():
                found[step] = max(found.get(step, 0.0), seconds)
        return found

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


async def measure(setting: Setting) -> Figures:
    """Run one fleet for three versions."""
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    coordinator = Coordinator(ControlConfig())
    mount_updates(coordinator, server)
    await server.start()
    encode, parts = TransferPlan.encode, list[int]()

    def counted(plan: TransferPlan) -> bytes:
        encoded = encode(plan)
        parts.append(len(encoded))
        return encoded

    TransferPlan.encode = counted  # type: ignore[method-assign, assignment]
    fleet = Fleet(setting, server.url)
    try:
        await fleet.receive()
        await fleet.ask(("fill", 0), Role.TRAINER)
        began = time.perf_counter()
        await fleet.ask("connect")
        joined = time.perf_counter()
        first = (await fleet.ask(("publish", 0), Role.TRAINER))[0]
        ended = time.perf_counter()
        steps = await fleet.steps()
        later = []
        assert all(await fleet.ask(("holds", 0), Role.ENGINE)), "an engine has other weights"
        for version in (1, 2):
            await fleet.ask(("fill", version), Role.TRAINER)
            at = time.perf_counter()
            await fleet.ask(("publish", version), Role.TRAINER)
            later.append(time.perf_counter() - at)
            assert all(await fleet.ask(("holds", version), Role.ENGINE)), "other weights"
        tables = await fleet.ask("tables")
    finally:
        TransferPlan.encode = encode  # type: ignore[method-assign]
        fleet.kill()
        await coordinator.close()
        await server.close()
    found = {
        "connect to the end of the first version": ended - began,
        "connect": joined - began,
        "publish the first version": ended - joined,
        "publish the second version": later[0],
        "publish the third version": later[1],
        "controller, plan": max(cost.plan_s for cost in first.bound.values()),
        **{
            f"controller, bind {role} ranks": max(
                c.bind_s for w, c in first.bound.items() if w.startswith(role)
            )
            for role in ("engine", "trainer")
        },
        "round of the first version": first.update_s,
        **steps,
        "rank, build tables for GPU kernels": max(seconds for _, seconds in tables),
    }
    return {
        "ops of a rank": (max(count for count, _ in tables), ""),
        "parts of plans in messages": (sum(parts) / 1e6, "MB"),
        **{metric: (1e3 * seconds, "ms") for metric, seconds in found.items()},
    }


def median_of(runs: Sequence[Figures]) -> Figures:
    return {
        metric: (median_p95([run[metric][0] for run in runs])[0], unit)
        for metric, (_, unit) in runs[0].items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__ or "")
    made.add_argument("--layers", type=int, default=48)
    made.add_argument("--experts", type=int, default=128)
    made.add_argument("--runs", type=int, default=3)
    options = made.parse_args(argv)
    alone = Setting(1, 1, options.layers, options.experts)
    rows: list[Row] = []
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        one = replace(alone, dtype=dtype)
        two = replace(one, num_trainers=2, num_engine_ranks=2)
        runs: dict[Setting, list[Figures]] = {
            setting: [] for setting in (one, two, replace(two, expert_parallel=True))
        }
        for _ in range(options.runs):
            for setting, figures in runs.items():
                figures.append(asyncio.run(measure(setting)))
        reference = median_of(runs[one])
        for setting, figures in runs.items():
            for metric, (value, unit) in median_of(figures).items():
                rows.append(Row(setting.case, metric, value, unit, one.case, reference[metric][0]))
    report(rows, options.json, "first versions")


if __name__ == "__main__":
    main()
