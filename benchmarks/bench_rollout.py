"""Latency and cost from "the worker has the answer" to "the future is resolved".

This process is the controller; a real worker process sends real callbacks, and every answer is checked. Completions are
Poisson arrivals at 300/s, and once at 150/s. With `--areal` the reference is AReaL's own dispatcher with the same
controller, worker and callbacks; benchmarks/README.md describes its installation. `bench_xccl.py` runs at the end, so
that its rows are from the same run.

    python benchmarks/bench_rollout.py --json FILE [--areal FOLDER] [--only PART ...]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from harness import Row, median_p95, parser, report
from rollout_load import (
    NUM_TOKENS,
    ArealCollector,
    CallbackCollector,
    Collector,
    MakeCollector,
    areal_classes,
)
from windlass import Controller
from windlass.config import ControlConfig, UpdateMode
from windlass.envs import temporary_values
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    RolloutConfig,
    RolloutController,
    StalenessPolicy,
    StaticEngines,
    mount_rollout_routes,
)

CASES = ((64, 300.0), (2048, 300.0), (8192, 300.0), (32768, 300.0), (8192, 150.0))
"""Outstanding rollouts and completions per second of each case."""
RATE_PER_S = 300.0
NUM_RUNS = 5
NUM_UPDATE_RUNS = 9
NUM_TLS_TURNS = 3
NUM_COMPLETIONS = 600
FULL_SPEED_OUTSTANDING = 4096
FULL_SPEED_COMPLETIONS = 20_000
IDLE_OUTSTANDING = 8192
IDLE_S = 5.0
PARTS = ["latency", "throughput", "journal", "tls", "idle", "update", "xccl"]
AREAL = "AReaL's BatchTaskDispatcher"
HERE = Path(__file__).resolve().parent
DEADLINE_S = 120.0
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}

SMALL_MODEL = {**MODEL, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
"""Small model with the same number of tensors, so that the cost of an update is its control."""
UPDATE_PERIOD_S = 0.075
"""Interval of updates. It equals the time of one update of the large model on the reference machine."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Result of one run: latency of each completion, and costs of the controller's process."""

    latencies_s: list[float]
    cpu_s: float
    wall_s: float

    def quantile_ms(self, share: float) -> float:
        return sorted(self.latencies_s)[int(share * (len(self.latencies_s) - 1))] * 1e3

    def cpu_percent(self) -> float:
        return 100 * self.cpu_s / self.wall_s

    def cpu_us_each(self) -> float:
        return self.cpu_s / len(self.latencies_s) * 1e6

    def per_second(self) -> float:
        return len(self.latencies_s) / self.wall_s


class Child:
    """Child process that reads commands on stdin and answers with lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, *command: str, token: str, niceness: int = 0) -> Child:
        environment = {**os.environ, "WINDLASS_TOKEN": token, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(HERE.parent / "src")
        return cls(
            await asyncio.create_subprocess_exec(
                *("nice", "-n", str(niceness), sys.executable, *command),
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def ask(self, line: str) -> None:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{line}\n".encode())
        if not await asyncio.wait_for(stdout.readline(), DEADLINE_S):
            raise SystemExit(f"{line!r}: the process ended")

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


# --- one controller, one worker, one collector ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rig:
    """Controller with `outstanding` rollouts; a completed rollout is replaced."""

    collector: Collector
    worker: Child
    outstanding: int

    async def run(self, count: int, *, rate: float | None) -> Sample:
        """Wait for `count` completions, at `rate` per second or as fast as possible."""
        if rate is not None:
            await self.worker.ask(f"until {self.outstanding - 64} 0")
        self.collector.begin(count)
        cpu, wall = time.process_time(), time.monotonic()
        async with asyncio.timeout(DEADLINE_S):
            if rate is not None:
                await self.worker.ask(f"drip {count} {rate}")
            await self.collector.reached.wait()
        return Sample(
            self.collector.latencies_s[:count], time.process_time() - cpu, time.monotonic() - wall
        )

    def check(self) -> None:
        stats = self.collector.controller.stats()
        if stats.lost or stats.failed or stats.retried or stats.cancelled:
            raise SystemExit(f"rollouts got lost: {stats}")


@contextlib.asynccontextmanager
async def loaded(
    make: MakeCollector, workflow: str, outstanding: int, controller: RolloutController, url: str,
    token: str,
) -> AsyncIterator[Rig]:  # fmt: skip
    async with AsyncExitStack() as stack:
        arguments = ("--controller", url, "--name", "w", "--max-concurrent", str(outstanding))
        worker = await Child.start(str(HERE / "rollout_load.py"), *arguments, token=token)
        stack.push_async_callback(worker.end)
        collector = make(controller, workflow)
        stack.push_async_callback(collector.stop)
        for _ in range(outstanding):
            collector.add()
        rig = Rig(collector, worker, outstanding)
        yield rig
        rig.check()


@contextlib.asynccontextmanager
async def static_rig(
    make: MakeCollector, workflow: str, outstanding: int, *, journal: bool = False
) -> AsyncIterator[Rig]:
    token = secrets.token_hex(8)
    engines = StaticEngines([("engine", "http://unused", 0)])
    policy = StalenessPolicy.unbounded(outstanding)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = RolloutConfig(journal=folder / "journal" if journal else None)
        controller = await stack.enter_async_context(
            RolloutController(engines, policy, token=token, config=config)
        )
        server = ControlServer(host="127.0.0.1", port=0, token=token)
        mount_rollout_routes(server, controller, BatchQueue())
        await server.start()
        try:
            async with loaded(make, workflow, outstanding, controller, server.url, token) as rig:
                yield rig
                rig.collector.closed = True
        finally:
            await server.close()


async def latency(
    make: MakeCollector, outstanding: int, rate: float, *, journal: bool = False
) -> list[Sample]:
    async with static_rig(make, "held", outstanding, journal=journal) as rig:
        await rig.worker.ask(f"until {outstanding} 0")
        runs = [await rig.run(NUM_COMPLETIONS, rate=rate) for _ in range(NUM_RUNS + 1)]
    return runs[1:]


async def throughput(make: MakeCollector, *, journal: bool = False) -> list[Sample]:
    async with static_rig(make, "instant", FULL_SPEED_OUTSTANDING, journal=journal) as rig:
        runs = [await rig.run(FULL_SPEED_COMPLETIONS, rate=None) for _ in range(NUM_RUNS + 1)]
    return runs[1:]


async def idle() -> list[float]:
    """Return the load of an idle controller, in percent of a core."""
    percents = []
    async with static_rig(CallbackCollector, "held", IDLE_OUTSTANDING) as rig:
        await rig.worker.ask(f"until {IDLE_OUTSTANDING} 0")
        for _ in range(NUM_RUNS):
            cpu, wall = time.process_time(), time.monotonic()
            await asyncio.sleep(IDLE_S)
            percents.append(100 * (time.process_time() - cpu) / (time.monotonic() - wall))
    return percents


# --- with updates in flight -----------------------------------------------------------------------


class Publisher:
    """Real trainer process and embedded engine process, updated over `cma`.

    They represent other hosts, so they have a lower priority than the controller and the worker (nice 19). With 100 MB
    a kernel copy still occupies one of two cores at times; with the small model it does not.
    """

    def __init__(self, trainer: Child, controller: Controller) -> None:
        self.trainer, self.controller = trainer, controller
        self.version = -1
        self.durations_s: list[float] = []

    async def publish_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            began = time.monotonic()
            await self.publish()
            await asyncio.sleep(max(0.0, began + UPDATE_PERIOD_S - time.monotonic()))

    async def publish(self) -> None:
        self.version += 1
        began = time.monotonic()
        await self.trainer.ask(str(self.version))
        await self.controller.wait_for_version(self.version, deadline_s=DEADLINE_S)
        self.durations_s.append(time.monotonic() - began)


async def during_updates(
    outstanding: int, model: dict[str, Any]
) -> tuple[list[Sample], list[Sample], list[float]]:
    """Alternate runs without and with updates; return both and the seconds per update."""
    quiet, updating = [], []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_text(json.dumps(model))
        token = secrets.token_hex(8)
        controller = await stack.enter_async_context(
            Controller(
                token=token,
                config=ControlConfig(mode=UpdateMode.STAGED),
                staleness=StalenessPolicy.unbounded(outstanding),
            )
        )
        engine = await Child.start(
            *("-m", "windlass.engines.embedded", "--name", "engine", "--dtype", "bfloat16"),
            *("--model", str(folder / "config.json"), "--controller", controller.url),
            token=token,
            niceness=34,
        )
        stack.push_async_callback(engine.end)
        trainer = await Child.start(
            *(str(HERE / "rollout_trainer.py"), controller.url, str(folder / "config.json")),
            token=token,
            niceness=34,
        )
        stack.push_async_callback(trainer.end)
        await controller.wait_for_fleet(num_trainers=1, engines=["engine"], deadline_s=DEADLINE_S)
        publisher = Publisher(trainer, controller)
        await publisher.publish()
        rig = await stack.enter_async_context(
            loaded(
                CallbackCollector, "held", outstanding, controller.rollouts, controller.url, token
            )
        )
        await rig.worker.ask(f"until {outstanding} 0")
        await rig.run(NUM_COMPLETIONS, rate=RATE_PER_S)
        publisher.durations_s.clear()
        for _ in range(NUM_UPDATE_RUNS):
            quiet.append(await rig.run(NUM_COMPLETIONS, rate=RATE_PER_S))
            stop = asyncio.Event()
            publishing = asyncio.create_task(publisher.publish_until(stop))
            updating.append(await rig.run(NUM_COMPLETIONS, rate=RATE_PER_S))
            stop.set()
            await publishing
        rig.check()
        rig.collector.closed = True
    return quiet, updating, publisher.durations_s


# --- rows -----------------------------------------------------------------------------------------


def row(
    case: str, metric: str, unit: str, value: float, reference: str, reference_value: float
) -> Row:
    return Row(case, metric, value, unit, reference, reference_value)


LATENCY_METRICS: list[tuple[str, str, Callable[[Sample], float]]] = [
    ("completion latency p50", "ms", lambda sample: sample.quantile_ms(0.50)),
    ("completion latency p99", "ms", lambda sample: sample.quantile_ms(0.99)),
    ("controller CPU per completion", "us", Sample.cpu_us_each),
    ("controller CPU", "% of a core", Sample.cpu_percent),
]
FULL_SPEED_METRICS: list[tuple[str, str, Callable[[Sample], float]]] = [
    ("completions", "1/s", Sample.per_second),
    ("controller CPU per completion", "us", Sample.cpu_us_each),
]
GOALS = {"completion latency p99": 2.0, "controller CPU": 15.0}


def latency_rows(
    outstanding: int, rate: float, ours: Sequence[Sample], theirs: Sequence[Sample]
) -> list[Row]:
    """Return rows. Without AReaL `theirs` is empty, and the reference is the slowest run."""
    case, rows = f"{outstanding} outstanding, {rate:.0f}/s", []
    for metric, unit, value_of in LATENCY_METRICS:
        found = median_p95([value_of(sample) for sample in ours])
        slowest = max(value_of(sample) for sample in ours)
        what, reference = "slowest run", (slowest, slowest)
        if theirs:
            what, reference = AREAL, median_p95([value_of(sample) for sample in theirs])
        for kind, a, b in zip(("median", "p95"), found, reference, strict=True):
            name = f"{metric}, {kind} of {NUM_RUNS} runs"
            rows.append(row(case, name, unit, a, what, b))
        if metric in GOALS and outstanding == 8192:
            rows.append(row(case, f"{metric}, median", unit, found[0], "goal", GOALS[metric]))
    return rows


def throughput_rows(ours: Sequence[Sample], theirs: Sequence[Sample]) -> list[Row]:
    case, rows = f"full speed, {FULL_SPEED_OUTSTANDING} outstanding", []
    rate, cpu = median_p95([s.per_second() for s in ours])[0], median_p95([s.cpu_us_each() for s in ours])[0]  # fmt: skip
    slowest = min(s.per_second() for s in ours)
    rows.append(row(case, "completions, median", "1/s", rate, "goal", 10_000.0))
    rows.append(row(case, "completions, slowest run", "1/s", slowest, "goal", 10_000.0))
    worst = max(s.cpu_us_each() for s in ours)
    rows.append(row(case, "controller CPU per completion, median", "us", cpu, "worst run", worst))
    if theirs:
        reference = median_p95([s.per_second() for s in theirs])[0]
        reference_cpu = median_p95([s.cpu_us_each() for s in theirs])[0]
        rows.append(row(case, "completions, median", "1/s", rate, AREAL, reference))
        rows.append(row(case, "controller CPU per completion", "us", cpu, AREAL, reference_cpu))
    return rows


def tls_rows() -> list[Row]:
    """Run the same two processes with and without TLS, alternately, because the machine's speed varies."""
    # Imported here because it needs trustme, and no other part does.
    from certificates import Authority

    plain: list[Sample] = []
    secured: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        certificate = Authority(Path(folder)).issue()
        for _ in range(NUM_TLS_TURNS):
            plain += asyncio.run(throughput(CallbackCollector))
            with temporary_values(certificate):
                secured += asyncio.run(throughput(CallbackCollector))
    case, rows = f"full speed, {FULL_SPEED_OUTSTANDING} outstanding, TLS", []
    for metric, unit, value_of in FULL_SPEED_METRICS:
        a, b = (median_p95([value_of(s) for s in each])[0] for each in (secured, plain))
        rows.append(row(case, f"{metric}, median", unit, a, "no TLS", b))
    return rows


def journal_rows(
    without: Sequence[Sample],
    journal: Sequence[Sample],
    full_speed_without: Sequence[Sample],
    full_speed_journal: Sequence[Sample],
) -> list[Row]:
    case, rows, reference = "with a journal", [], "no journal"
    for metric, unit, value_of in LATENCY_METRICS:
        a, b = (median_p95([value_of(s) for s in each])[0] for each in (journal, without))
        rows.append(row(f"8192 outstanding, {RATE_PER_S:.0f}/s, {case}", metric, unit, a, reference, b))  # fmt: skip
    a, b = (
        median_p95([s.per_second() for s in each])[0]
        for each in (full_speed_journal, full_speed_without)
    )
    full_speed = f"full speed, {FULL_SPEED_OUTSTANDING} outstanding, {case}"
    rows.append(row(full_speed, "completions, median", "1/s", a, reference, b))
    return rows


def update_rows(
    outstanding: int,
    what: str,
    quiet: Sequence[Sample],
    updating: Sequence[Sample],
    seconds: Sequence[float],
) -> list[Row]:
    case, rows = f"{outstanding} outstanding, {RATE_PER_S:.0f}/s, updates of {what}", []
    for share in (0.50, 0.99):
        without = median_p95([s.quantile_ms(share) for s in quiet])[0]
        during = median_p95([s.quantile_ms(share) for s in updating])[0]
        name = f"completion latency p{share * 100:.0f}"
        runs = f"median of {len(updating)} runs"
        rows.append(row(case, f"{name}, {runs}", "ms", during, "no update", without))
        if share > 0.9:
            rows.append(row(case, f"{name}, added", "ms", during - without, "goal", 1.0))
    rows.append(row(case, f"update, median of {len(seconds)}", "s", median_p95(seconds)[0], "p95", median_p95(seconds)[1]))  # fmt: skip
    return rows


def machine_row(when: str) -> Row:
    cores = len(os.sched_getaffinity(0))
    return row("machine", f"load average, 1 min, {when}", "processes", os.getloadavg()[0], "cores", cores)  # fmt: skip


def xccl_rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "xccl.json"
        command = [sys.executable, str(HERE / "bench_xccl.py"), "--json", str(path)]
        subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
        return [
            Row(**{**each, "case": f"xccl: {each['case']}"})
            for each in json.loads(path.read_text())
        ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    options.add_argument("--areal", type=Path, help="folder with an installation of areal")
    arguments = options.parse_args()
    wanted = arguments.only
    areal: MakeCollector | None = None
    if arguments.areal is not None:
        areal = partial(ArealCollector, areal_classes(arguments.areal))
    rows = [machine_row("before")]
    if "latency" in wanted:
        for outstanding, rate in CASES:
            ours = asyncio.run(latency(CallbackCollector, outstanding, rate))
            theirs = asyncio.run(latency(areal, outstanding, rate)) if areal else []
            rows += latency_rows(outstanding, rate, ours, theirs)
    if "throughput" in wanted:
        ours = asyncio.run(throughput(CallbackCollector))
        rows += throughput_rows(ours, asyncio.run(throughput(areal)) if areal else [])
    if "journal" in wanted:
        rows += journal_rows(
            asyncio.run(latency(CallbackCollector, 8192, RATE_PER_S)),
            asyncio.run(latency(CallbackCollector, 8192, RATE_PER_S, journal=True)),
            asyncio.run(throughput(CallbackCollector)),
            asyncio.run(throughput(CallbackCollector, journal=True)),
        )
    if "tls" in wanted:
        rows += tls_rows()
    if "idle" in wanted:
        median, worst = median_p95(asyncio.run(idle()))
        for kind, percent in (("median", median), ("p95", worst)):
            metric = f"idle controller CPU, {kind} of {NUM_RUNS} runs"
            rows.append(row(f"{IDLE_OUTSTANDING} outstanding", metric, "% of a core", percent, "goal", 1.0))  # fmt: skip
    if "update" in wanted:
        for what, model in (("110 MB on these cores", MODEL), ("0.4 MB", SMALL_MODEL)):
            rows += update_rows(8192, what, *asyncio.run(during_updates(8192, model)))
    if "xccl" in wanted:
        rows += xccl_rows()
    rows.append(machine_row("after"))
    report(rows, arguments.json, f"rollout completions of {NUM_TOKENS} tokens, Poisson arrivals")


if __name__ == "__main__":
    main()
