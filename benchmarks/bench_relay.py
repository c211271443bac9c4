"""Relay compared with direct writes, catch-up of a new engine, and recovery after each kind of failure.

Every rank is a process. `limited_rank.LimitedLink` limits the rate of its writes by `cma`, so that links and not the
memory of this machine are the bottleneck. Receiving is not limited. The benchmark compares every engine byte after
every run.

It also simulates up to 1 024 replicas with NICs of 50 GB/s.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import xxhash

import windlass
from harness import Row, median_p95, parser, report
from limited_rank import ROW_NBYTES, values
from tools.plan.simulate import simulate_wire
from tools.plan.simulate_relay import simulate_relay
from tools.plan.synthesis import engine_manifests, trainer_manifests
from tools.plan.topology import parse_topology
from windlass.config import ControlConfig, P2pBackend, PhaseDeadlines, RelayShape, UpdateMode
from windlass.control.round_state import Phase
from windlass.planning.planner import plan_transfer
from windlass.planning.relay import RelayGroup, stripes_of

ROOT = Path(__file__).parents[1]
TOKEN = "secret of the benchmark"
RATE = 16_000_000
"""Bytes per second of a process's link."""
NUM_ROWS = 32 * 1024 * 1024 // ROW_NBYTES
NBYTES = NUM_ROWS * ROW_NBYTES
COPY_S = NBYTES / RATE
CHUNK = 1 << 20
RUNS = 5
NUM_TRAINERS = 1
WRITE_S = 90.0


class Rank:
    """Process with a limited link."""

    def __init__(self, *words: str) -> None:
        command = (sys.executable, str(ROOT / "benchmarks/limited_rank.py"))
        self.process = subprocess.Popen(
            (*command, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _read(self) -> Any:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit("a rank ended")
            # Native libraries also log to stdout.
            if line[0] in '[{"n':
                try:
                    return json.loads(line)
                except ValueError:
                    continue

    async def read(self) -> Any:
        return await asyncio.to_thread(self._read)

    def send(self, name: str, argument: object = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, argument]) + "\n")
        self.process.stdin.flush()

    async def ask(self, name: str, argument: object = None) -> Any:
        self.send(name, argument)
        return await self.read()

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def config(shape: RelayShape, num_engines: int) -> ControlConfig:
    return ControlConfig(
        mode=UpdateMode.STAGED,
        backend=P2pBackend(relay=shape, relay_chunk_nbytes=CHUNK),
        min_engines=num_engines,
        deadlines=PhaseDeadlines(write_s=WRITE_S),
    )


class Job:
    """Trainers and engines of a controller."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url, self.stack = url, stack
        self.trainers: list[Rank] = []
        self.engines: dict[str, Rank] = {}
        self.version = -1

    def start(self, *words: str) -> Rank:
        rank = Rank(*words)
        self.stack.callback(rank.close)
        return rank

    def start_engine(self, name: str) -> Rank:
        return self.start("engine", name, str(RATE), self.url, TOKEN, str(NUM_ROWS))

    def start_trainer(self, index: int) -> Rank:
        return self.start("trainer", str(index), str(NUM_TRAINERS), str(RATE), self.url, TOKEN, str(NUM_ROWS))  # fmt: skip

    async def assemble(self, num_engines: int) -> None:
        self.trainers = [self.start_trainer(i) for i in range(NUM_TRAINERS)]
        self.engines = {f"engine{i}": self.start_engine(f"engine{i}") for i in range(num_engines)}
        for rank in (*self.trainers, *self.engines.values()):
            await rank.read()
        for rank in (*self.engines.values(), *self.trainers):
            await rank.ask("connect")

    async def publish(self) -> dict[str, Any]:
        self.version += 1
        answers = await asyncio.gather(*(t.ask("publish", self.version) for t in self.trainers))
        return dict(answers[0])

    async def check(self, *names: str) -> None:
        expected = xxhash.xxh3_128_hexdigest(values(self.version, 0, NUM_ROWS).tobytes())
        for name in names or tuple(self.engines):
            version, digest = await self.engines[name].ask("digest")
            if (version, digest) != (self.version, expected):
                raise SystemExit(f"{name}: wrong bytes in version {self.version}")


async def relay_or_direct(shape: RelayShape, num_engines: int) -> list[float]:
    """Return the seconds of the write phase, per run."""
    with ExitStack() as stack:
        async with windlass.Controller(
            token=TOKEN, config=config(shape, num_engines)
        ) as controller:
            job = Job(controller.url, stack)
            await job.assemble(num_engines)
            found = []
            for run in range(RUNS + 1):
                answer = await job.publish()
                if answer.get("left_out", "error"):
                    raise SystemExit(f"{shape}, {num_engines} engines: {answer}")
                await job.check()
                # The first run connects.
                if run:
                    found.append(float(answer["write_s"]))
            return found


class Measured:
    """Results of one run of `failures`: seconds by (case, metric), and their references."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], tuple[float, str, float]] = {}

    def note(
        self, case: str, metric: str, value: float, reference: str, reference_value: float
    ) -> None:
        self.found[(case, metric)] = (value, reference, reference_value)


async def _newcomer(job: Job, controller: windlass.Controller, said: Measured) -> None:
    """Measure a warm new engine, from its first frame until it is routable at the published version."""
    newcomer = job.start_engine("newcomer")
    await newcomer.read()
    routable = asyncio.Event()
    coordinator = controller.coordinator

    def on_change() -> None:
        if "newcomer" in {engine.name for engine in coordinator.routable()}:
            routable.set()

    coordinator.subscribe(on_change)
    began = time.perf_counter()
    await newcomer.ask("connect")
    await asyncio.wait_for(routable.wait(), 60)
    took = time.perf_counter() - began
    job.engines["newcomer"] = newcomer
    await job.check("newcomer")
    said.note(
        "a newcomer, from its first frame", "routable", took, "one copy over its link", COPY_S
    )


async def _lost_engine(
    job: Job, controller: windlass.Controller, said: Measured, plain: float, *, stop: bool
) -> None:
    """Kill or stop a relaying engine in the middle of the write phase."""
    num_engines, victim = len(job.engines), next(iter(job.engines))
    rank = job.engines[victim]
    _in_mid_write(job, controller, rank.stop if stop else rank.kill)
    answer = await job.publish()
    if victim not in answer["left_out"]:
        raise SystemExit(f"engine lost: {answer}")
    job.engines.pop(victim)
    rank.close()
    others = [name for name in job.engines if name not in answer["left_out"]]
    await job.check(*others)
    what = "stopped" if stop else "killed"
    said.note(
        f"a relay of {num_engines} engines {what} in mid write", "update",
        float(answer["update_s"]), "update without it", plain,
    )  # fmt: skip
    # Its children in the relay are complete again with the next version.
    answer = await job.publish()
    routed = {engine.name for engine in controller.coordinator.routable()}
    # These engines are quarantined, because writes of the stopped engine may still arrive.
    for name in set(job.engines) - routed:
        job.engines.pop(name).close()
    await job.check()
    said.note(
        f"a relay of {num_engines} engines {what} in mid write", "the next update",
        float(answer["update_s"]), "update without it", plain,
    )  # fmt: skip


def _in_mid_write(job: Job, controller: windlass.Controller, act: Callable[[], None]) -> None:
    """Call `act` once, half a copy's time after the start of the next version's write phase."""
    wanted = job.version + 1
    loop = asyncio.get_running_loop()

    def on_phase(version: int, phase: Phase) -> None:
        if version == wanted and phase is Phase.WRITE:
            loop.call_later(COPY_S / 2, act)

    controller.coordinator.rounds.on_phase(on_phase)


async def _lost_trainer(
    job: Job, controller: windlass.Controller, said: Measured, plain: float
) -> None:
    """Kill a trainer in the middle of the write phase; a warm trainer replaces it."""
    spare = job.start_trainer(0)
    await spare.read()
    over = asyncio.Event()
    killed_at = over_at = 0.0
    victim = job.trainers[0]

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.perf_counter()
        victim.kill()

    def on_update(_report: object) -> None:
        nonlocal over_at
        over_at = over_at or time.perf_counter()
        over.set()

    _in_mid_write(job, controller, kill)
    controller.coordinator.on_update(on_update)
    job.version += 1
    victim.send("publish", job.version)
    await asyncio.wait_for(over.wait(), 120)
    victim.close()
    job.trainers[0] = spare
    await spare.ask("connect")
    await job.publish()
    recovered = time.perf_counter() - killed_at
    await job.check()
    case = "a trainer killed in mid write"
    said.note(case, "round over", over_at - killed_at, "update", plain)
    said.note(case, "a warm one has published the next version", recovered, "update", plain)


async def failures_once(*, stop: bool) -> Measured:
    """Cause every kind of failure at a known moment and measure its cost.

    `stop`: also stop an engine, which costs a whole deadline.
    """
    said = Measured()
    with ExitStack() as stack:
        journal = Path(stack.enter_context(_folder())) / "journal"
        arguments: dict[str, Any] = {"token": TOKEN, "journal_path": journal}
        controller = windlass.Controller(**arguments, config=config(RelayShape.CHAIN, 1))
        await controller.__aenter__()
        job = Job(controller.url, stack)
        await job.assemble(4)
        await job.publish()
        plain = float((await job.publish())["update_s"])
        await job.check()
        await _newcomer(job, controller, said)
        await _lost_engine(job, controller, said, plain, stop=False)
        await _lost_trainer(job, controller, said, plain)
        # Restart the controller on the same port.
        port = int(controller.url.rpartition(":")[2])
        began = time.perf_counter()
        await controller.__aexit__(None, None, None)
        controller = windlass.Controller(**arguments, port=port, config=config(RelayShape.CHAIN, 1))
        await controller.__aenter__()
        try:
            await controller.wait_for_fleet(
                num_trainers=NUM_TRAINERS, engines=tuple(job.engines), deadline_s=60
            )
            back = time.perf_counter() - began
            answer = await job.publish()
            if answer.get("left_out", "error"):
                raise SystemExit(f"controller restart: {answer}")
            whole = time.perf_counter() - began
            await job.check()
            said.note("controller restarted", "all ranks are back", back, "update", plain)
            said.note("controller restarted", "the next version is published", whole, "update", plain)  # fmt: skip
            if stop:
                await _lost_engine(job, controller, said, plain, stop=True)
        finally:
            await controller.__aexit__(None, None, None)
    return said


def failures() -> list[Row]:
    """Return median and p95 over `RUNS` runs, each with its own processes."""
    runs = [asyncio.run(failures_once(stop=run == 0)) for run in range(RUNS)]
    rows = []
    for case, metric in runs[0].found:
        values = [run.found[(case, metric)] for run in runs if (case, metric) in run.found]
        reference = values[0][1]
        reference_value, _ = median_p95([value[2] for value in values])
        median, slow = median_p95([value[0] for value in values])
        if len(values) == 1:
            once = f"{case}, write_s {WRITE_S:g} s, one run"
            rows.append(_row(once, metric, median, reference, reference_value))
            continue
        rows.append(_row(case, f"{metric}, median", median, reference, reference_value))
        rows.append(_row(case, f"{metric}, p95", slow, reference, reference_value))
    return rows


@contextmanager
def _folder() -> Iterator[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield folder


def _row(case: str, metric: str, value: float, reference: str, reference_value: float) -> Row:
    return Row(case, metric, value, "s", reference, reference_value)


def simulated() -> list[Row]:
    """Simulate DeepSeek-V3 from 128 trainer ranks to engines of 32 ranks, with 50 GB/s per rank."""
    text = (ROOT / "examples/topologies/deepseek-v3-128-to-128.toml").read_text()
    topology = parse_topology(text)
    engine = msgspec.structs.replace(topology.engine, replicas=1)
    topology = msgspec.structs.replace(topology, engine=engine)
    plan = plan_transfer(trainer_manifests(topology), engine_manifests(topology))
    fed = simulate_wire(plan, topology.fabric)
    slowest = int(fed.destination_finish_s.argmax())
    nbytes = int(plan.ops.nbytes[plan.ops.dst == slowest].sum())
    egress = plan.nbytes / len(plan.sources) / (topology.fabric.nic_gbytes_per_s * 1e9)
    rows = []
    for verify, of in ((300.0, "device"), (15.0, "one host core")):
        alone = max(fed.wire_s, nbytes / verify / 1e9)
        for num_replicas in (2, 8, 64, 1024):
            for shape in (RelayShape.CHAIN, RelayShape.TREE):
                members = tuple(f"{i}" for i in range(num_replicas))
                group = RelayGroup(members, stripes_of(shape, num_replicas), 64 << 20)
                run = simulate_relay(
                    group,
                    nbytes=nbytes,
                    fed_s=float(fed.destination_finish_s[slowest]),
                    nic_gbytes_per_s=topology.fabric.nic_gbytes_per_s,
                    verify_gbytes_per_s=verify,
                )
                case = f"simulated, DeepSeek-V3 128 -> {num_replicas} x 32, {shape}, {verify:g} GB/s hash ({of})"
                rows.append(_row(case, "wire", run.wire_s, "one replica", alone))
            if verify == 300.0:
                direct = max(fed.wire_s, egress * num_replicas)
                case = f"simulated, DeepSeek-V3 128 -> {num_replicas} x 32, direct"
                rows.append(_row(case, "wire, at best", direct, "one replica", fed.wire_s))
    return rows


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--part", choices=("all", "real", "failures", "simulated"), default="all")
    made.add_argument("--engines", type=int, nargs="*", default=[1, 2, 4, 8])
    args = made.parse_args()
    rows: list[Row] = []
    if args.part in ("all", "real"):
        alone = 0.0
        for num_engines in args.engines:
            for shape in (RelayShape.OFF, RelayShape.CHAIN, RelayShape.TREE):
                if num_engines == 1 and shape is not RelayShape.OFF:
                    continue
                median, slow = median_p95(asyncio.run(relay_or_direct(shape, num_engines)))
                alone = alone or median
                kind = "direct" if shape is RelayShape.OFF else f"relay, {shape}"
                case = f"{kind}, {num_engines} engine(s), {NBYTES / 1e6:.1f} MB at {RATE / 1e6:.0f} MB/s"
                rows.append(_row(case, "write phase, median", median, "one engine", alone))
                rows.append(_row(case, "write phase, p95", slow, "one engine", alone))
                print(case, median, slow, flush=True)
        rows.append(_row("one engine against its link", "write phase", alone, "bytes over the rate", COPY_S))  # fmt: skip
    if args.part in ("all", "failures"):
        rows += failures()
    if args.part in ("all", "simulated"):
        rows += simulated()
    report(rows, args.json, "relay, catch-up, recovery")


if __name__ == "__main__":
    main()
