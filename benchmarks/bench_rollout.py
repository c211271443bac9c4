"""From "the worker has the answer" to "the future is resolved", and what it costs.

A real worker process and an engine process that holds every request and lets one go at a
time, so that the number of outstanding rollouts stays what the case says. The reference
is the same controller with a polling collector on top, as rollout dispatchers are commonly
written: `asyncio.wait` over all running tasks with a timeout of 50 ms.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from harness import Row, median_p95, parser, report
from windlass.control.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    Rollout,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    mount_rollout_routes,
)

OUTSTANDING = (64, 2048, 8192)
NUM_RUNS = 5
NUM_COMPLETIONS = 300
RATE_PER_S = 300.0
NUM_TOKENS = 128
SOURCE = str(Path(__file__).resolve().parents[1] / "src")
DEADLINE_S = 120.0


# --- the engine process ---------------------------------------------------------------------


class DrippingEngine:
    """Holds every request; `POST /drip` lets random ones go at a steady rate."""

    def __init__(self) -> None:
        self.held: dict[str, asyncio.Future[None]] = {}
        self.arrived = asyncio.Condition()
        self.random = random.Random(1)

    async def generate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held[body["rid"]] = future
        async with self.arrived:
            self.arrived.notify_all()
        await future
        first = body["input_ids"][0]
        ids = [first * NUM_TOKENS + index for index in range(NUM_TOKENS)]
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "output_token_versions": [0] * NUM_TOKENS,
        }
        return web.json_response(body=msgspec.json.encode({"output_ids": ids, "meta_info": meta}))

    async def wait(self, request: web.Request) -> web.Response:
        wanted = int(request.query["held"])
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.held) >= wanted)
        return web.Response()

    async def drip(self, request: web.Request) -> web.Response:
        count, rate = int(request.query["count"]), float(request.query["rate"])
        loop = asyncio.get_running_loop()
        start = loop.time()
        for index in range(count):
            await asyncio.sleep(max(0.0, start + index / rate - loop.time()))
            rid = self.random.choice(list(self.held))
            self.held.pop(rid).set_result(None)
        return web.Response()


async def engine_process() -> None:
    engine = DrippingEngine()
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            web.post("/generate", engine.generate),
            web.get("/wait", engine.wait),
            web.post("/drip", engine.drip),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


# --- the two ways to collect ----------------------------------------------------------------


@dataclass(slots=True)
class Sample:
    latencies_s: list[float]
    cpu_s: float
    wall_s: float


class Collector:
    """Keeps the number of outstanding rollouts and notes when each completion was seen."""

    def __init__(self, controller: RolloutController) -> None:
        self.controller = controller
        self.latencies: list[float] = []
        self.prompts = 0
        self.wanted = 0
        self.reached = asyncio.Event()

    def seen(self, rollout: Rollout) -> None:
        self.latencies.append(time.time() - rollout.finished_at)
        first = rollout.prompt_ids[0] * NUM_TOKENS
        if rollout.output_ids != tuple(range(first, first + NUM_TOKENS)):
            raise RuntimeError(f"rollout {rollout.task_id}: wrong tokens")
        self.add()
        if len(self.latencies) >= self.wanted:
            self.reached.set()

    async def collect(self, count: int) -> None:
        self.wanted = count
        self.latencies = []
        self.reached.clear()

    def add(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        return None


class CallbackCollector(Collector):
    def add(self) -> None:
        self.prompts += 1
        handle = self.controller.submit(
            (self.prompts, 1), SamplingParams(max_new_tokens=NUM_TOKENS)
        )

        def done(future: asyncio.Future[Rollout]) -> None:
            if not future.cancelled():
                self.seen(future.result())

        handle.add_done_callback(done)


class PollingCollector(Collector):
    def __init__(self, controller: RolloutController) -> None:
        super().__init__(controller)
        self.running: set[asyncio.Task[Rollout]] = set()
        self.loop_task = asyncio.create_task(self.loop())

    def add(self) -> None:
        self.prompts += 1
        handle = self.controller.submit(
            (self.prompts, 1), SamplingParams(max_new_tokens=NUM_TOKENS)
        )

        async def wait() -> Rollout:
            return await handle

        self.running.add(asyncio.create_task(wait()))

    async def loop(self) -> None:
        while True:
            if not self.running:
                await asyncio.sleep(0.05)
                continue
            done, _ = await asyncio.wait(
                self.running, timeout=0.05, return_when=asyncio.FIRST_COMPLETED
            )
            self.running -= done
            for task in done:
                self.seen(task.result())

    async def stop(self) -> None:
        self.loop_task.cancel()
        for task in self.running:
            task.cancel()
        await asyncio.gather(self.loop_task, *self.running, return_exceptions=True)


async def measure(
    make: Callable[[RolloutController], Collector], outstanding: int, engine_url: str
) -> list[Sample]:
    token = secrets.token_hex(8)
    os.environ["WINDLASS_TOKEN"] = token
    engines = StaticEngines([("engine", engine_url, 0)])
    async with AsyncExitStack() as stack:
        controller = await stack.enter_async_context(
            RolloutController(engines, StalenessPolicy.unbounded(outstanding), token=token)
        )
        server = ControlServer(host="127.0.0.1", port=0, token=token)
        mount_rollout_routes(server, controller, BatchQueue())
        await server.start()
        stack.push_async_callback(server.close)
        worker = await start("-m", "windlass.rollout.worker", "--controller", server.url,
                             "--name", "w", "--max-concurrent", str(outstanding))  # fmt: skip
        stack.push_async_callback(end, worker)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        collector = make(controller)
        stack.push_async_callback(collector.stop)
        for _ in range(outstanding):
            collector.add()
        samples = []
        for _ in range(NUM_RUNS):
            async with asyncio.timeout(DEADLINE_S):
                async with session.get(f"{engine_url}/wait?held={outstanding}") as response:
                    response.raise_for_status()
                await collector.collect(NUM_COMPLETIONS)
                cpu, wall = time.process_time(), time.monotonic()
                drip = f"{engine_url}/drip?count={NUM_COMPLETIONS}&rate={RATE_PER_S}"
                async with session.post(drip) as response:
                    response.raise_for_status()
                await collector.reached.wait()
            samples.append(
                Sample(
                    collector.latencies[:],
                    time.process_time() - cpu,
                    time.monotonic() - wall,
                )
            )
        stats = controller.stats()
        if stats.lost or stats.retried:
            raise RuntimeError(f"lost {stats.lost}, retried {stats.retried}")
    return samples


async def start(*arguments: str, read: bool = False) -> asyncio.subprocess.Process:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env=environment,
        stdout=asyncio.subprocess.PIPE if read else asyncio.subprocess.DEVNULL,
        stderr=None if read else asyncio.subprocess.DEVNULL,
    )


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def case(make: Callable[[RolloutController], Collector], outstanding: int) -> list[Sample]:
    engine = await start(__file__, "--engine", read=True)
    try:
        if engine.stdout is None:
            raise RuntimeError("engine: no stdout")
        url = (await asyncio.wait_for(engine.stdout.readline(), 20)).decode().strip()
        return await measure(make, outstanding, url)
    finally:
        await end(engine)


def rows_of(outstanding: int, ours: list[Sample], theirs: list[Sample]) -> list[Row]:
    rows = []

    def quantile(sample: Sample, share: float) -> float:
        return sorted(sample.latencies_s)[int(share * (len(sample.latencies_s) - 1))] * 1e3

    metrics: list[tuple[str, str, Callable[[Sample], float]]] = [
        ("completion latency p50", "ms", lambda sample: quantile(sample, 0.50)),
        ("completion latency p99", "ms", lambda sample: quantile(sample, 0.99)),
        ("controller CPU per completion", "us", lambda s: s.cpu_s / len(s.latencies_s) * 1e6),
        ("controller CPU", "% of a core", lambda s: 100 * s.cpu_s / s.wall_s),
    ]
    for metric, unit, value_of in metrics:
        value, worst = median_p95([value_of(sample) for sample in ours])
        reference, reference_worst = median_p95([value_of(sample) for sample in theirs])
        name = "asyncio.wait over all, 50 ms"
        for kind, a, b in (("median", value, reference), ("p95", worst, reference_worst)):
            rows.append(
                Row(
                    case=f"{outstanding} outstanding",
                    metric=f"{metric}, {kind} of {NUM_RUNS} runs",
                    value=a,
                    unit=unit,
                    reference=name,
                    reference_value=b,
                    ratio=a / b,
                )
            )
    return rows


def main() -> None:
    if "--engine" in sys.argv:
        asyncio.run(engine_process())
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    arguments = parser(__doc__ or "").parse_args()
    rows: list[Row] = []
    for outstanding in OUTSTANDING:
        ours = asyncio.run(case(CallbackCollector, outstanding))
        theirs = asyncio.run(case(PollingCollector, outstanding))
        rows += rows_of(outstanding, ours, theirs)
    report(rows, arguments.json, f"rollout completions at {RATE_PER_S:.0f}/s, {NUM_TOKENS} tokens")


if __name__ == "__main__":
    main()
