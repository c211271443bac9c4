"""Time that an update stops a trainer rank, with and without a replica.

One trainer process, one engine process, and a controller in this process. The weights are `--mib` of bfloat16 that
need no packing, so a replica costs most. Updates are staged, over `cma`. In one run, `publish` without a replica
returns when the engine serves the version; `publish(copy=True)` with a replica returns when the weights are copied and
hashed. After every update the benchmark compares the engine's bytes with the version. After `publish(copy=True)` the trainer
overwrites its weights before the comparison.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

import windlass
from harness import Row, median_p95, parser, report
from windlass.config import ControlConfig, ReplicaPlace, UpdateMode
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.observability.ceilings import measure_memcpy_gbps
from windlass.testing.resting_engine import RestingEngine
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transports.cma import CmaConfig
from windlass.transports.cuda_ipc import CudaIpcConfig
from windlass.transports.registry import create_transport

TOKEN = "of a benchmark"
COLS, PARAMETER_ROWS = 1024, 4096
DEADLINE_S = 120.0


def manifest(worker: str, role: Role, count: int) -> ShardManifest:
    shape = (PARAMETER_ROWS, COLS)
    builder = ManifestBuilder(worker, role)
    for index in range(count):
        builder.add_parameter(f"w{index}", nbytes=PARAMETER_ROWS * COLS * 2, dtype=DType.BFLOAT16)
        builder.add_shard(f"w{index}", shape, Box.full(shape), f"w{index}")
    return builder.build()


def value(index: int, version: int, device: str = "cpu") -> torch.Tensor:
    """Return a different pattern for every parameter and version. Adjacent elements differ."""
    numbers = torch.arange(PARAMETER_ROWS * COLS, dtype=torch.int32, device=device)
    return ((numbers * 7 + index * 13 + version * 31) % 251).to(torch.bfloat16)


def zeros(count: int, device: str = "cpu") -> list[torch.Tensor]:
    """Return the parameters of one rank."""
    shape = (PARAMETER_ROWS * COLS,)
    return [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(count)]


def run_engine(pipe: Connection, url: str, count: int, device: str = "cpu") -> None:
    torch.set_num_threads(1)
    tensors = zeros(count, device)
    config = CmaConfig() if device == "cpu" else CudaIpcConfig()
    transport = create_transport(config, memory_at=tensors[0].data_ptr())
    with EngineClient(
        EngineWeights(
            manifest=manifest("engine/0", Role.ENGINE, count),
            addresses=[t.data_ptr() for t in tensors],
            regions=[transport.register(t.data_ptr(), t.nbytes) for t in tensors],
        ),
        transport=transport,
        hooks=RestingEngine(),
        controller=url,
        token=TOKEN,
    ):
        pipe.send("ready")
        while (version := pipe.recv()) is not None:
            held = enumerate(tensors)
            pipe.send(all(torch.equal(t, value(i, version, device)) for i, t in held))


def run_trainer(pipe: Connection, url: str, count: int, replica: bool) -> None:
    torch.set_num_threads(1)
    tensors = zeros(count)
    with TrainerClient(
        TrainerWeights(
            manifest=manifest("trainer/0", Role.TRAINER, count),
            parameters=lambda: [ParameterMemory(t.data_ptr(), t.nbytes) for t in tensors],
        ),
        transport=create_transport(CmaConfig()),
        controller=url,
        token=TOKEN,
        replica=ReplicaPlace.AUTO if replica else ReplicaPlace.OFF,
    ) as trainer:
        pipe.send("ready")
        while (version := pipe.recv()) is not None:
            for index, tensor in enumerate(tensors):
                tensor.copy_(value(index, version))
            began = time.perf_counter()
            if not replica:
                trainer.publish(version, deadline_s=DEADLINE_S)
                stood = whole = time.perf_counter() - began
            else:
                pending = trainer.publish(version, deadline_s=DEADLINE_S, wait=False, copy=True)
                stood = time.perf_counter() - began
                for tensor in tensors:
                    tensor.zero_()
                pending.result(deadline_s=DEADLINE_S)
                whole = time.perf_counter() - began
            pipe.send((stood, whole))


async def measure(count: int, num_runs: int, replica: bool) -> list[tuple[float, float]]:
    """Return (seconds that the trainer was stopped, seconds until the version was served) per run."""
    context = mp.get_context("spawn")
    config = ControlConfig(mode=UpdateMode.STAGED)
    found: list[tuple[float, float]] = []
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        pipes: list[Connection] = []
        processes: list[Any] = []
        for target, more in ((run_engine, ()), (run_trainer, (replica,))):
            ours, theirs = context.Pipe()
            arguments = (theirs, controller.url, count, *more)
            processes.append(context.Process(target=target, args=arguments))
            processes[-1].start()
            pipes.append(ours)
        engine, trainer = pipes
        for pipe in pipes:
            await asyncio.to_thread(pipe.recv)
        # The first run is a warm-up.
        for version in range(num_runs + 1):
            trainer.send(version)
            times = await asyncio.to_thread(trainer.recv)
            engine.send(version)
            if not await asyncio.to_thread(engine.recv):
                raise SystemExit(f"version {version}: wrong bytes")
            found += [times] if version else []
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            await asyncio.to_thread(process.join, 30)
    return found


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--mib", type=int, default=256)
    arguments.add_argument("--runs", type=int, default=9)
    args = arguments.parse_args()
    count = max(args.mib * (1 << 20) // (PARAMETER_ROWS * COLS * 2), 1)
    nbytes = count * PARAMETER_ROWS * COLS * 2
    without = asyncio.run(measure(count, args.runs, replica=False))
    with_replica = asyncio.run(measure(count, args.runs, replica=True))
    copy_ms = 1e3 * nbytes / (1e9 * measure_memcpy_gbps())
    case = f"{nbytes >> 20} MiB bfloat16, staged, cma"
    rows = []
    publish = median_p95([stood for stood, _ in without])
    begin = median_p95([stood for stood, _ in with_replica])
    whole = median_p95([served for _, served in with_replica])
    for index, name in enumerate(("median", "p95")):
        for metric, times, reference, beside in (
            (
                "publish(copy=True): the trainer stands still",
                begin,
                "publish",
                1e3 * publish[index],
            ),
            ("publish(copy=True) to served", whole, "publish", 1e3 * publish[index]),
            (
                "publish(copy=True): the trainer stands still",
                begin,
                "one memcpy of the bytes",
                copy_ms,
            ),
        ):
            rows.append(Row(case, f"{metric}, {name}", 1e3 * times[index], "ms", reference, beside))
    report(rows, args.json, "A trainer with a replica")


if __name__ == "__main__":
    main()
