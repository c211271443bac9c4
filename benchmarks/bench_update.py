"""Time of a whole update on CPU: Windlass against a gather and broadcast, in one run.

Two trainer processes have a model with Qwen's shapes, split by rows (FSDP2). Two engine processes have it split for
tensor parallelism: column-parallel layers by rows, row-parallel layers by columns. The same processes update the same
bytes

- with Windlass (prepare, write, verify with digests, apply) over `cma`, and over Mooncake TCP;
- with an all-gather of every full tensor, a gloo broadcast, and a copy of each engine's slice.

After every run the benchmark compares every engine byte with the trainers' values.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from harness import Row, median_p95, parser, report
from windlass.config import UpdateMode
from windlass.errors import TransportUnavailable
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory.room import used_nbytes
from windlass.memory.torch_dtypes import torch_dtype
from windlass.observability.ceilings import measure_memcpy_gbps
from windlass.planning.order import staggered
from windlass.planning.planner import plan_transfer
from windlass.transfer.arena import Arena
from windlass.transfer.base import ParameterMemory
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.registry import create_transport, parse_transport

NUM_TRAINERS = NUM_ENGINE_RANKS = 2
HIDDEN, INTERMEDIATE, LAYERS = 1024, 3072, 8
DTYPE = DType.BFLOAT16
DEADLINE_S = 120.0


def tensors() -> dict[str, tuple[tuple[int, int], int]]:
    """Return name -> (shape, dim that tensor parallelism splits)."""
    found = {}
    for layer in range(LAYERS):
        for name, shape, dim in (
            ("q_proj", (HIDDEN, HIDDEN), 0),
            ("k_proj", (HIDDEN // 2, HIDDEN), 0),
            ("v_proj", (HIDDEN // 2, HIDDEN), 0),
            ("o_proj", (HIDDEN, HIDDEN), 1),
            ("gate_proj", (INTERMEDIATE, HIDDEN), 0),
            ("up_proj", (INTERMEDIATE, HIDDEN), 0),
            ("down_proj", (HIDDEN, INTERMEDIATE), 1),
        ):
            found[f"layers.{layer}.{name}"] = (shape, dim)
    return found


def box_of(shape: tuple[int, int], dim: int, rank: int, world_size: int) -> Box:
    size = shape[dim] // world_size
    offsets, sizes = [0, 0], list(shape)
    offsets[dim], sizes[dim] = rank * size, size
    return Box(tuple(offsets), tuple(sizes))


def value(index: int, shape: tuple[int, int], run: int) -> torch.Tensor:
    """Return the full tensor of a run. Rows, columns and runs differ."""
    rows = torch.arange(shape[0])[:, None] * 7 + index * 13 + run * 31
    return ((rows + torch.arange(shape[1])[None, :] * 3) % 251).to(torch_dtype(DTYPE))


@dataclass
class Rank:
    """Shards of one process, in registered memory."""

    manifest: ShardManifest
    arena: Arena
    views: dict[str, torch.Tensor]
    boxes: dict[str, Box]


def build_rank(role: Role, rank: int, transport_name: str) -> Rank:
    transport = create_transport(parse_transport(transport_name))
    worker = f"{role}/{rank}"
    builder = ManifestBuilder(worker, role)
    boxes = {
        name: box_of(shape, 0 if role is Role.TRAINER else dim, rank, 2)
        for name, (shape, dim) in tensors().items()
    }
    arena = Arena(transport, sum(box.numel * DTYPE.itemsize for box in boxes.values()))
    memory, offset, views = torch.from_numpy(arena.bytes), 0, {}
    for name, box in boxes.items():
        nbytes = box.numel * DTYPE.itemsize
        views[name] = memory[offset : offset + nbytes].view(torch_dtype(DTYPE)).view(box.sizes)
        builder.add_parameter(name, nbytes=nbytes, dtype=DTYPE)
        builder.add_shard(name, tensors()[name][0], box, name)
        offset += nbytes
    return Rank(builder.build(), arena, views, boxes)


def fill(rank: Rank, run: int) -> None:
    for index, (name, (shape, _)) in enumerate(tensors().items()):
        rank.views[name].copy_(value(index, shape, run)[slices(rank.boxes[name])])


def holds(rank: Rank, run: int) -> bool:
    return all(
        torch.equal(rank.views[name], value(index, shape, run)[slices(rank.boxes[name])])
        for index, (name, (shape, _)) in enumerate(tensors().items())
    )


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))


def broadcast_update(rank: Rank, role: Role) -> None:
    """Gather every full tensor, broadcast it and copy the slice: the usual update without Windlass."""
    for name, (shape, _) in tensors().items():
        full = torch.empty(shape, dtype=torch_dtype(DTYPE))
        if role is Role.TRAINER:
            parts = list(full.chunk(NUM_TRAINERS))
            dist.all_gather(parts, rank.views[name], group=TRAINER_GROUP)
        dist.broadcast(full, src=0)
        if role is Role.ENGINE:
            rank.views[name].copy_(full[slices(rank.boxes[name])])


TRAINER_GROUP: Any = None


def serve(role: Role, rank: int, transport_name: str, store: str, pipe: Connection) -> None:
    """Run a trainer or engine process and carry out the parent's commands."""
    global TRAINER_GROUP
    torch.set_num_threads(1)
    world_rank = rank + (NUM_TRAINERS if role is Role.ENGINE else 0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world_rank, world_size=4)
    TRAINER_GROUP = dist.new_group(list(range(NUM_TRAINERS)))
    try:
        me = build_rank(role, rank, transport_name)
    except TransportUnavailable as error:
        pipe.send(("unavailable", str(error)))
        return
    transport = me.arena._transport
    addresses = [view.data_ptr() for view in me.views.values()]
    receiver = Receiver(transport, me.manifest, addresses, (me.arena.region,))
    places = [ParameterMemory(v.data_ptr(), v.nbytes) for v in me.views.values()]
    if role is Role.TRAINER:
        # The sender itself registers the parameters that it reads in place.
        transport.unregister(me.arena.region)
    sender = Sender(transport, me.manifest, lambda: places)
    actions: dict[str, Callable[..., Any]] = {
        "connect_engine": receiver.connect,
        "connect_trainer": sender.connect,
        "prepare": sender.prepare,
        "write": lambda peers: sender.write(0, peers, DEADLINE_S),
        "verify": receiver.verify,
        "apply": receiver.apply,
        "fill": lambda run: fill(me, run),
        "holds": lambda run: holds(me, run),
        "broadcast": lambda: broadcast_update(me, role),
        "resident": lambda: used_nbytes(-1),
    }
    pipe.send(("ready", me.manifest))
    while (request := pipe.recv()) is not None:
        name, arguments = request
        pipe.send(("ok", actions[name](*arguments)))
    dist.destroy_process_group()


class Fleet:
    """The four processes, which receive commands together."""

    def __init__(self, transport_name: str, store: str) -> None:
        context = mp.get_context("spawn")
        self.pipes: dict[str, Connection] = {}
        self.processes = []
        for role in (Role.TRAINER, Role.ENGINE):
            for rank in range(2):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve, args=(role, rank, transport_name, store, theirs)
                )
                process.start()
                self.pipes[f"{role}/{rank}"] = ours
                self.processes.append(process)
        answers = {worker: pipe.recv() for worker, pipe in self.pipes.items()}
        unavailable = [text for state, text in answers.values() if state == "unavailable"]
        if unavailable:
            raise TransportUnavailable(unavailable[0])
        self.manifests = {worker: manifest for worker, (_, manifest) in answers.items()}
        self.trainers = [w for w in self.pipes if w.startswith("trainer")]
        self.engines = [w for w in self.pipes if w.startswith("engine")]

    def ask(self, workers: list[str], name: str, *arguments: Any) -> dict[str, Any]:
        for worker in workers:
            self.pipes[worker].send((name, arguments))
        return {worker: self.pipes[worker].recv()[1] for worker in workers}

    def ask_each(self, name: str, arguments: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        for worker, values in arguments.items():
            self.pipes[worker].send((name, values))
        return {worker: self.pipes[worker].recv()[1] for worker in arguments}

    def connect(self, mode: UpdateMode = UpdateMode.IN_PLACE) -> int:
        """Plan and bind all links, and return the bytes of an update."""
        plan = plan_transfer(
            [self.manifests[w] for w in self.trainers], [self.manifests[w] for w in self.engines]
        )
        bindings = self.ask_each(
            "connect_engine",
            {w: (plan.parts(sending=False, all_names=True)[w], mode) for w in self.engines},
        )
        self.ask_each(
            "connect_trainer",
            {
                w: (plan.parts(sending=True, all_names=True)[w], tuple(bindings.values()))
                for w in self.trainers
            },
        )
        return plan.nbytes

    def windlass(self) -> dict[str, float]:
        """Run one update and return the seconds per stage."""
        marks = [time.perf_counter()]
        self.ask(self.trainers, "prepare")
        marks.append(time.perf_counter())
        orders = staggered(dict.fromkeys(self.trainers, self.engines))
        sent = self.ask_each("write", {name: (order,) for name, order in orders.items()})
        marks.append(time.perf_counter())
        expected: dict[str, dict[str, str]] = {w: {} for w in self.engines}
        for trainer, result in sent.items():
            for link in result.links:
                expected[link.destination][trainer] = link.digest
        wrong = self.ask_each("verify", {w: (0, expected[w]) for w in self.engines})
        if any(wrong.values()):
            raise SystemExit(f"digests differ: {wrong}")
        marks.append(time.perf_counter())
        self.ask(self.engines, "apply")
        marks.append(time.perf_counter())
        names = ("prepare", "write", "verify", "apply")
        return dict(zip(names, (b - a for a, b in itertools.pairwise(marks)), strict=True))

    def broadcast(self) -> dict[str, float]:
        began = time.perf_counter()
        self.ask([*self.trainers, *self.engines], "broadcast")
        return {"broadcast": time.perf_counter() - began}

    def timed(self, update: Callable[[], dict[str, float]], runs: int, first: int) -> list[dict[str, float]]:  # fmt: skip
        found = [self.once(update, run) for run in range(first, first + runs + 1)]
        # The first run touches memory.
        return found[1:]

    def once(self, update: Callable[[], dict[str, float]], run: int) -> dict[str, float]:
        """Let trainers make version `run`, update, check every byte, and return the seconds per stage."""
        self.ask(self.trainers, "fill", run)
        stages = update()
        if not all(self.ask(self.engines, "holds", run).values()):
            raise SystemExit(f"run {run}: the engines do not hold the trainers' bytes")
        return stages

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.send(None)
        for process in self.processes:
            process.join()


def main() -> None:
    import tempfile

    arguments = parser(__doc__ or "").parse_args()
    runs = 7
    ceiling = measure_memcpy_gbps()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet("cma", f"{directory}/cma")
        nbytes = fleet.connect()
        ours = fleet.timed(fleet.windlass, runs, 1)
        today = fleet.timed(fleet.broadcast, runs, 100)
        fleet.close()
        totals = [sum(stages.values()) for stages in ours]
        theirs = [sum(stages.values()) for stages in today]
        add(rows, "gather + gloo broadcast + load", theirs, nbytes, ceiling, None)
        add(rows, "windlass cma", totals, nbytes, ceiling, theirs)
        for stage in ours[0]:
            median = median_p95([stages[stage] for stages in ours])[0]
            add_row(rows, "windlass cma", stage, median, "whole update", median_p95(totals)[0])
        try:
            fleet = Fleet("mooncake", f"{directory}/mooncake")
        except TransportUnavailable as error:
            print(f"mooncake: {error}")
        else:
            fleet.connect()
            moon = [sum(stages.values()) for stages in fleet.timed(fleet.windlass, runs, 200)]
            fleet.close()
            add(rows, "windlass mooncake tcp", moon, nbytes, ceiling, theirs)
    report(rows, arguments.json, f"one update of {nbytes / 1e6:.0f} MB, 2 trainers -> TP2 engine")


def add(
    rows: list[Row],
    case: str,
    seconds: list[float],
    nbytes: int,
    ceiling_gbps: float,
    reference: list[float] | None,
) -> None:
    """Add rows: median and p95 compared with memcpy of the same bytes, and the speed-up over `reference`."""
    median, p95 = median_p95(seconds)
    ideal = nbytes / ceiling_gbps / 1e9
    if reference is not None:
        add_row(rows, case, "update_median", median, "gather + broadcast", median_p95(reference)[0])
    add_row(rows, case, "update_median", median, "memcpy of the bytes", ideal)
    add_row(rows, case, "update_p95", p95, "memcpy of the bytes", ideal)


def add_row(
    rows: list[Row], case: str, metric: str, value: float, reference: str, reference_value: float
) -> None:
    """Add a row in seconds. The ratio is the value divided by the reference."""
    rows.append(Row(case, metric, value, "s", reference, reference_value))


if __name__ == "__main__":
    main()
