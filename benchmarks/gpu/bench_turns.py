"""Turns of a trainer and an engine on one GPU: time of each part of a turn, and memory at each point.

    python benchmarks/gpu/bench_turns.py --gib 8 --turns 10 [--on-cpu] [--json FILE]

The engine's weights are in memory of CUDA's virtual memory management, as vLLM's sleep mode has them: asleep they keep
their addresses and have no pages. In each turn the engine sleeps, the trainer gets its weights onto the GPU, changes all of
them, and publishes; the engine wakes and reads them (transport `pull`); then the trainer frees its weights in `release`.
The engine fuses tensors that the trainer has apart, and has the norms in bfloat16, which the trainer has in float32. After
each turn the engine compares every element with its own calculation of the version. The reference is a copy of the same
bytes within the GPU. With `--expandable`, the trainer's weights are in torch's expandable segments. With `--on-cpu`, the same runs
in host memory.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import windlass
from harness import Row, median_p95, parser, report
from windlass.config import PauseMode
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory.place import memory_on
from windlass.memory.sleeping import SleepingMemory
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.arena import Arena
from windlass.transfer.base import ParameterMemory
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.registry import create_transport, parse_transport

TOKEN = "benchmark"
COLUMNS, ROWS, NUM_FUSED = 4096, 4096, 3
LAYER_NBYTES = NUM_FUSED * ROWS * COLUMNS * 2
GIB = 1 << 30


def describe(worker: str, role: Role, layers: int) -> ShardManifest:
    """Return the layout of a rank. Engines fuse three tensors and have norms in bfloat16."""
    is_engine = role is Role.ENGINE
    builder = ManifestBuilder(worker, role)
    whole = Box((0, 0), (ROWS, COLUMNS))
    norm = DType.BFLOAT16 if is_engine else DType.FLOAT32
    for layer in range(layers):
        if is_engine:
            builder.add_parameter(f"{layer}.fused", nbytes=LAYER_NBYTES, dtype=DType.BFLOAT16)
        for part in range(NUM_FUSED):
            name, nbytes = f"{layer}.{part}", ROWS * COLUMNS * 2
            if not is_engine:
                builder.add_parameter(name, nbytes=nbytes, dtype=DType.BFLOAT16)
            builder.add_shard(
                name,
                (ROWS, COLUMNS),
                whole,
                f"{layer}.fused" if is_engine else name,
                offset_bytes=part * nbytes if is_engine else 0,
            )
        builder.add_parameter(f"{layer}.norm", nbytes=COLUMNS * norm.itemsize, dtype=norm)
        builder.add_shard(f"{layer}.norm", (COLUMNS,), Box((0,), (COLUMNS,)), f"{layer}.norm")
    return builder.build()


def values(version: int, layer: int, part: int, device: str) -> torch.Tensor:
    """Return the values of a tensor in a version. Parts 0 to 2 are matrices, and part 3 is a norm."""
    numel = COLUMNS if part == NUM_FUSED else ROWS * COLUMNS
    first = (version * 7919 + layer * 104729 + part * 1299709) % (1 << 20)
    found = (torch.arange(first, first + numel, device=device) * 2654435761) % 32749
    shape = (COLUMNS,) if part == NUM_FUSED else (ROWS, COLUMNS)
    return (found.to(torch.float32) / 64 - 255).reshape(shape)


# --- memory that sleeps -----------------------------------------------------------------------


class Sleeping(Protocol):
    """Memory of the engine."""

    address: int
    region: MemoryRegion

    def sleep(self) -> None: ...
    def wake(self) -> None: ...


@final
class HostWeights:
    """Host memory that sleeps."""

    def __init__(self, transport: OneSidedTransport, nbytes: int) -> None:
        self._arena = Arena(transport, nbytes)
        self._memory = SleepingMemory(self._arena.address, nbytes)
        self.address, self.region = self._arena.address, self._arena.region

    def sleep(self) -> None:
        self._memory.sleep()

    def wake(self) -> None:
        self._memory.wake()


@final
class GpuWeights:
    """GPU memory that sleeps, as vLLM's `CuMemAllocator` has it: one range of addresses, and pages that come and go."""

    def __init__(self, transport: OneSidedTransport, nbytes: int) -> None:
        from windlass.memory.cuda.driver import Device, driver

        self._cuda, self._device = driver(), Device(0)
        self._prop = self._cuda.CUmemAllocationProp()
        self._prop.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._prop.location.id = 0
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(self._device.call("cuMemGetAllocationGranularity", self._prop, minimum))
        self._nbytes = -(-nbytes // step) * step
        self.address = int(self._device.call("cuMemAddressReserve", self._nbytes, 0, 0, 0))
        self._handle: Any = None
        self.wake()
        self.region = transport.register(self.address, nbytes)

    def sleep(self) -> None:
        if self._handle is not None:
            self._device.synchronize()
            self._device.call("cuMemUnmap", self.address, self._nbytes)
            self._device.call("cuMemRelease", self._handle)
            self._handle = None

    def wake(self) -> None:
        if self._handle is None:
            self._handle = self._device.call("cuMemCreate", self._nbytes, self._prop, 0)
            self._device.call("cuMemMap", self.address, self._nbytes, 0, self._handle, 0)
            access = self._cuda.CUmemAccessDesc()
            access.location = self._prop.location
            access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._device.call("cuMemSetAccess", self.address, self._nbytes, [access], 1)


def used_nbytes(on_cpu: bool) -> int:
    """Return the bytes of the GPU that are in use, by all processes; 0 on the CPU."""
    if on_cpu:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


# --- processes --------------------------------------------------------------------------------


@final
class Engine:
    """`EngineHooks` and `Sleeper` of an engine that only has weights."""

    def __init__(self, memory: Sleeping, on_cpu: bool) -> None:
        self.memory, self.is_empty, self._on_cpu = memory, False, on_cpu
        self.caches_nbytes = 0
        self.wake_s, self.resumed_nbytes = 0.0, 0
        self.resumed = threading.Event()

    def stays_awake(self) -> AbstractContextManager[None]:
        """Do nothing: this process sends no weights to other engines."""
        return nullcontext()

    def round_ended(self) -> None:
        """Do nothing: this process sleeps between rounds only."""

    def sleep(self, mode: PauseMode, deadline_s: float) -> None:  # noqa: ARG002
        self.is_empty = True
        self.memory.sleep()

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:  # noqa: ARG002
        began = time.perf_counter()
        self.memory.wake()
        self.wake_s = time.perf_counter() - began

    def finalise(self) -> None:
        self.is_empty = False

    def set_version(self, version: int, deadline_s: float) -> None: ...

    def resume(self, deadline_s: float) -> None:  # noqa: ARG002
        self.resumed_nbytes = used_nbytes(self._on_cpu)


def run_engine(pipe: Connection, url: str, layers: int, on_cpu: bool) -> None:
    """Run the engine. For each version, answer with the number of wrong elements, and times and memory."""
    gpu = -1 if on_cpu else 0
    manifest = describe("engine/0", Role.ENGINE, layers)
    transport = parse_transport("pull").create(towards=url, gpu=gpu)
    nbytes = sum(p.nbytes for p in manifest.parameters)
    memory: Sleeping = (HostWeights if on_cpu else GpuWeights)(transport, nbytes)
    addresses, at = [], memory.address
    for parameter in manifest.parameters:
        addresses.append(at)
        at += parameter.nbytes
    engine = Engine(memory, on_cpu)
    client = EngineClient(
        EngineWeights(manifest=manifest, addresses=addresses, regions=(memory.region,)),
        transport=transport,
        hooks=engine,
        sleeper=engine,
        controller=url,
        token=TOKEN,
        can_send=False,
    )
    place, device = memory_on(gpu), "cpu" if on_cpu else "cuda:0"
    pipe.send("ready")
    while (version := pipe.recv()) is not None:
        wrong = 0
        for layer in range(layers):
            at = addresses[2 * layer]
            for part in range(NUM_FUSED):
                held = place.view(at, (ROWS, COLUMNS), (2 * COLUMNS, 2), DType.BFLOAT16)
                expected = values(version, layer, part, device).to(torch.bfloat16)
                wrong += int((held != expected).sum())
                at += 2 * ROWS * COLUMNS
            held = place.view(addresses[2 * layer + 1], (COLUMNS,), (2,), DType.BFLOAT16)
            expected = values(version, layer, NUM_FUSED, device).to(torch.bfloat16)
            wrong += int((held != expected).sum())
        if not on_cpu:
            torch.cuda.empty_cache()
        pipe.send((wrong, client.agent.served_version, engine.wake_s, engine.resumed_nbytes))
    client.close()


def run_trainer(
    pipe: Connection, url: str, layers: int, on_cpu: bool, expandable: bool = False
) -> None:
    """Run the trainer. For each version, change all weights, publish, and answer with times and memory."""
    if expandable:
        # torch reads the variable when it first allocates.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    device = "cpu" if on_cpu else "cuda:0"
    manifest = describe("trainer/0", Role.TRAINER, layers)
    weights: list[torch.Tensor] = []
    used: dict[str, int] = {}

    def fill(version: int) -> None:
        weights[:] = [
            values(version, layer, part, device).to(
                torch.float32 if part == NUM_FUSED else torch.bfloat16
            )
            for layer in range(layers)
            for part in range(NUM_FUSED + 1)
        ]

    def locate() -> list[ParameterMemory]:
        return [ParameterMemory(w.data_ptr(), w.nbytes) for w in weights]

    def release() -> None:
        used["peak"] = used_nbytes(on_cpu)
        # The rows stay known as empty tensors until the next step.
        weights[:] = [torch.empty_like(w, device="meta") for w in weights]
        if not on_cpu:
            torch.cuda.empty_cache()
        used["released"] = used_nbytes(on_cpu)

    fill(0)
    transport = create_transport(
        parse_transport("pull"), towards=url, memory_at=weights[0].data_ptr()
    )
    client = TrainerClient(
        TrainerWeights(manifest=manifest, parameters=locate, release=release),
        transport=transport,
        controller=url,
        token=TOKEN,
    )
    pipe.send("ready")
    while (version := pipe.recv()) is not None:
        used["asleep"] = used_nbytes(on_cpu)
        fill(version)
        if not on_cpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        used["stepped"] = used_nbytes(on_cpu)
        began = time.perf_counter()
        update = client.publish(version, deadline_s=120).result()
        pipe.send((time.perf_counter() - began, update, dict(used)))
    client.close()


class Child:
    """Process that answers each message."""

    def __init__(self, target: Any, *arguments: object) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    async def read(self) -> Any:
        assert await asyncio.to_thread(self._pipe.poll, 240), "no answer within 240 s"
        return self._pipe.recv()

    async def ask(self, message: object) -> Any:
        self._pipe.send(message)
        return await self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(30)


def copy_s(nbytes: int, on_cpu: bool) -> float:
    """Return the median seconds of a copy of this many bytes within the memory."""
    device = "cpu" if on_cpu else "cuda:0"
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        if not on_cpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return median_p95(seconds)[0]


async def run(options: argparse.Namespace) -> None:
    """Run all turns, print each, and write the rows."""
    on_cpu = options.on_cpu
    layers = max(int(options.gib * GIB) // LAYER_NBYTES, 1)
    nbytes = layers * (LAYER_NBYTES + 2 * COLUMNS)
    ceiling_s = copy_s(nbytes, on_cpu)
    if not on_cpu:
        torch.cuda.empty_cache()
    children: list[Child] = []
    rows: list[tuple[float, float, float, float]] = []
    memory: list[dict[str, int]] = []
    async with windlass.Controller(token=TOKEN) as controller:
        try:
            engine = Child(run_engine, controller.url, layers, on_cpu)
            trainer = Child(run_trainer, controller.url, layers, on_cpu, options.expandable)
            children += [engine, trainer]
            assert [await child.read() for child in children] == ["ready"] * 2
            for version in range(options.turns + 1):
                began = time.perf_counter()
                if version:
                    await controller.sleep_engines()
                sleep_s = time.perf_counter() - began
                publish_s, update, used = await trainer.ask(version)
                wrong, served, wake_s, resumed = await engine.ask(version)
                assert (wrong, served) == (0, version), f"version {served}: {wrong} wrong elements"
                memory.append({**used, "resumed": resumed})
                rows.append((update.update_s, update.wire_s, wake_s, sleep_s))
                parts = {
                    "update": update.update_s,
                    "wire": update.wire_s,
                    "pack": update.measures["pack_s"],
                    "wake": wake_s,
                    "sleep": sleep_s,
                    "publish": publish_s,
                    **update.phase_s,
                }
                told = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in parts.items())
                held = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory[-1].items())
                print(f"version {version}: ms: {told}; GiB: {held}", flush=True)
        finally:
            for child in children:
                child.kill()
    where, later = "host" if on_cpu else "GPU", list(zip(*rows[1:], strict=True))
    case = f"{options.turns} turns, {nbytes / GIB:.2f} GiB, {where}"
    if options.expandable:
        case += ", expandable segments"
    names = ("update, median", "wire, median", "wake, median", "sleep, median")
    found = [
        Row(case, name, median_p95(series)[0], "s", "copy of the same bytes", ceiling_s)
        for name, series in zip(names, later, strict=True)
    ]
    if not on_cpu:
        last = memory[-1]
        found += [
            Row(case, f"memory, {point}", last[point] / GIB, "GiB", "weights", nbytes / GIB)
            for point in ("asleep", "stepped", "peak", "released", "resumed")
        ]
    report(found, options.json, "Turns of a trainer and an engine")


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--gib", type=float, default=8.0, help="size of the engine's weights")
    made.add_argument("--turns", type=int, default=10)
    made.add_argument("--on-cpu", action="store_true", help="the same in host memory")
    made.add_argument(
        "--expandable", action="store_true", help="the trainer uses torch's expandable segments"
    )
    asyncio.run(run(made.parse_args()))


if __name__ == "__main__":
    main()
