"""Cost of comparing replicated weights between trainer ranks, compared with the update.

Two trainer processes have the same `--mib` of bfloat16, and each sends half of it. All weights are replicated, so the
comparison is as large as possible. There is one engine process, and a controller in this process. Weights are in host
memory, over `cma`, or with `--device cuda` on the GPUs in turn, over `cuda_ipc`. Every update reports its time and the
time of its comparison. `share` is the fraction of time that the updates spent comparing, without the first, which
compares everything; its reference is the share that the controller allows. After each update every rank computes the
digests again, first of a sample and then of everything.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

import windlass
from bench_replica import (
    COLS,
    DEADLINE_S,
    PARAMETER_ROWS,
    TOKEN,
    manifest,
    run_engine,
    value,
    zeros,
)
from harness import Row, median_p95, parser, report
from windlass.config import ControlConfig, UpdateMode
from windlass.layout.manifest import Role
from windlass.planning.replicated import find_replicated
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transfer.replicated_digests import ReplicatedDigests
from windlass.transports.cma import CmaConfig
from windlass.transports.cuda_ipc import CudaIpcConfig
from windlass.transports.registry import create_transport

NUM_TRAINERS = 2


def run_trainer(pipe: Connection, url: str, count: int, device: str, rank: int) -> None:
    torch.set_num_threads(1)
    tensors = zeros(count, device)
    config = CmaConfig() if device == "cpu" else CudaIpcConfig()
    memory = [ParameterMemory(t.data_ptr(), t.nbytes) for t in tensors]
    manifests = [manifest(f"trainer/{r}", Role.TRAINER, count) for r in range(NUM_TRAINERS)]
    found = find_replicated(manifests)
    digests = ReplicatedDigests(manifests[rank], lambda: memory)
    digests.bind(found.parts[f"trainer/{rank}"].tobytes())
    period = found.period(found.nbytes // NUM_TRAINERS)
    with TrainerClient(
        TrainerWeights(
            manifest=manifests[rank],
            parameters=lambda: memory,
        ),
        transport=create_transport(config, memory_at=tensors[0].data_ptr()),
        controller=url,
        token=TOKEN,
        job="benchmark",
        world_size=NUM_TRAINERS,
    ) as trainer:
        pipe.send("ready")
        while (version := pipe.recv()) is not None:
            for index, tensor in enumerate(tensors):
                tensor.copy_(value(index, version, device))
            done = trainer.publish(version, deadline_s=DEADLINE_S).result()
            times = []
            # After this call a rank prepares the boxes of the next turn.
            digests.take(version - 1, period)
            digests.cut_ahead()
            for turn, every in ((version, period), (0, 1)):
                began = time.perf_counter()
                digests.take(turn, every)
                times.append(time.perf_counter() - began)
            pipe.send((done.update_s, *times, done.compare_s, done.compared))


async def measure(
    count: int, num_runs: int, mode: UpdateMode, devices: Sequence[str]
) -> list[tuple[float, ...]]:
    """Return (update, sample, everything, comparison in the update, whether it compared) per run, of the slowest rank.

    Times are in seconds. `devices`: of the trainers, then of the engine.
    """
    context = mp.get_context("spawn")
    found: list[tuple[float, ...]] = []
    async with windlass.Controller(token=TOKEN, config=ControlConfig(mode=mode)) as controller:
        pipes: list[Connection] = []
        processes: list[Any] = []
        starts: list[tuple[Any, tuple[Any, ...]]] = [(run_engine, (devices[-1],))]
        starts += [(run_trainer, (devices[rank], rank)) for rank in range(NUM_TRAINERS)]
        for target, more in starts:
            ours, theirs = context.Pipe()
            arguments = (theirs, controller.url, count, *more)
            processes.append(context.Process(target=target, args=arguments))
            processes[-1].start()
            pipes.append(ours)
        engine, *trainers = pipes
        for pipe in pipes:
            await asyncio.to_thread(pipe.recv)
        # The first update compares everything.
        for version in range(num_runs + 1):
            for trainer in trainers:
                trainer.send(version)
            times = [await asyncio.to_thread(trainer.recv) for trainer in trainers]
            engine.send(version)
            if not await asyncio.to_thread(engine.recv):
                raise SystemExit(f"version {version}: wrong bytes")
            slowest = tuple(max(column) for column in zip(*times, strict=True))
            found += [slowest] if version else []
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            await asyncio.to_thread(process.join, 30)
    return found


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--mib", type=int, default=256)
    arguments.add_argument("--runs", type=int, default=9)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = arguments.parse_args()
    devices, place = ["cpu"] * (NUM_TRAINERS + 1), ""
    if args.device == "cuda":
        num_gpus = torch.cuda.device_count()
        devices = [f"cuda:{index % num_gpus}" for index in range(NUM_TRAINERS + 1)]
        place = f", {torch.cuda.get_device_name(0)}, trainers and engine on GPUs " + ", ".join(
            device.removeprefix("cuda:") for device in devices
        )
    count = max(args.mib * (1 << 20) // (PARAMETER_ROWS * COLS * 2), 1)
    rows = []
    for mode in (UpdateMode.STAGED, UpdateMode.IN_PLACE):
        runs = asyncio.run(measure(count, args.runs, mode, devices))
        update_s, _, _, compare_s, compared = (list(column) for column in zip(*runs, strict=True))
        update, sample, everything = (
            median_p95(list(column)) for column in list(zip(*runs, strict=True))[:3]
        )
        case = f"{count * PARAMETER_ROWS * COLS * 2 >> 20} MiB bfloat16 at 2 ranks, {mode.value}{place}"
        for metric, times in (("sample", sample), ("everything, first update", everything)):
            for index, name in enumerate(("median", "p95")):
                value_ms, update_ms = 1e3 * times[index], 1e3 * update[index]
                rows.append(Row(case, f"{metric}, {name}", value_ms, "ms", "update", update_ms))
        allowed, share = 100 * ControlConfig().compare_share, 100 * sum(compare_s) / sum(update_s)
        metric = f"share, {sum(map(bool, compared))} of {len(runs)} updates compared"
        rows.append(Row(case, metric, share, "%", "allowed", allowed))
    report(rows, args.json, "Comparing replicas")


if __name__ == "__main__":
    main()
