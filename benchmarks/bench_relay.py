"""Relay against direct, catch-up of a newcomer, and recovery after each kind of failure.

Every rank is a process; what it sends by `cma` first goes through a link of a fixed rate that
`limited_rank.LimitedLink` keeps, so that links and not the memory of this machine are the limit. What
a rank receives is not limited. Every engine byte is compared after every run.

Simulated as well, on NICs of 50 GB/s, up to 1 024 replicas.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import xxhash

import windlass
from harness import Row, median_p95, parser, report
from limited_rank import ROW_NBYTES, values
from windlass.config import ControlConfig, P2pBackend, PhaseDeadlines, RelayShape, UpdateMode
from windlass.control.round_types import Phase
from windlass.layout.synthesis import engine_manifests, trainer_manifests
from windlass.layout.topology import parse_topology
from windlass.planning.planner import plan_transfer
from windlass.planning.relay import RelayGroup, lanes_of
from windlass.planning.simulate import simulate_wire
from windlass.planning.simulate_relay import simulate_relay

ROOT = Path(__file__).parents[1]
TOKEN = "secret of the benchmark"
RATE = 16_000_000
"""Bytes per second that a process sends."""
NUM_ROWS = 32 * 1024 * 1024 // ROW_NBYTES
NBYTES = NUM_ROWS * ROW_NBYTES
COPY_S = NBYTES / RATE
CHUNK = 1 << 20
RUNS = 5
NUM_TRAINERS = 1


class Rank:
    """A process behind a link."""

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
            if line[0] in '[{"n':  # native libraries log to stdout as well
                try:
                    return json.loads(line)
                except ValueError:
                    continue

    async def read(self) -> Any:
        return await asyncio.to_thread(self._read)

    async def ask(self, name: str, argument: object = None) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, argument]) + "\n")
        self.process.stdin.flush()
        return await self.read()

    def kill(self) -> None:
        self.process.kill()

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
        deadlines=PhaseDeadlines(write_s=90.0),
    )


class Job:
    """Trainers and engines around a controller."""

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
    """Seconds of the write phase, per run."""
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
                if run:  # the first one connects
                    found.append(float(answer["write_s"]))
            return found


async def failures() -> list[Row]:
    """Kills at known moments, each with what it costs."""
    rows = []
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

        # A newcomer, warm: from its first frame to being routable at the published version.
        newcomer = job.start_engine("newcomer")
        await newcomer.read()
        routable, began = asyncio.Event(), time.perf_counter()
        coordinator = controller.coordinator

        def on_change() -> None:
            if "newcomer" in {engine.name for engine in coordinator.routable()}:
                routable.set()

        coordinator.subscribe(on_change)
        await newcomer.ask("connect")
        await asyncio.wait_for(routable.wait(), 60)
        caught_up = time.perf_counter() - began
        job.engines["newcomer"] = newcomer
        await job.check("newcomer")
        rows.append(
            _row("newcomer, from its first frame", "routable", caught_up, "one copy", COPY_S)
        )

        # An engine that passes on is killed in the middle of the write phase.
        def kill_soon(rank: Rank) -> None:
            def on_phase(version: int, phase: Phase) -> None:
                if version == job.version and phase is Phase.WRITE and rank.process.poll() is None:
                    asyncio.get_running_loop().call_later(COPY_S / 2, rank.kill)

            coordinator.on_phase(on_phase)

        victim = next(iter(job.engines))
        kill_soon(job.engines[victim])
        answer = await job.publish()
        if list(answer["left_out"]) != [victim]:
            raise SystemExit(f"engine kill: {answer}")
        job.engines.pop(victim)
        await job.check()
        rows.append(_row("a relay killed in mid write, 5 engines", "update", float(answer["update_s"]), "update without a kill", plain))  # fmt: skip

        # A trainer is killed in the middle of the write phase; a warm one takes its place.
        spare = job.start_trainer(0)
        await spare.read()
        before = await job.publish()
        kill_soon(job.trainers[0])
        over = asyncio.Event()
        coordinator.on_update(lambda _: over.set())
        job.version += 1
        victim_rank = job.trainers[0]
        assert victim_rank.process.stdin is not None
        victim_rank.process.stdin.write(json.dumps(["publish", job.version]) + "\n")
        victim_rank.process.stdin.flush()
        await asyncio.to_thread(victim_rank.process.wait)
        began = time.perf_counter()
        await over.wait()
        ended = time.perf_counter() - began
        job.trainers[0] = spare
        await spare.ask("connect")
        answer = await job.publish()
        recovered = time.perf_counter() - began
        await job.check()
        rows.append(_row("a trainer killed in mid write", "round over", ended, "update", float(before["update_s"])))  # fmt: skip
        rows.append(_row("a trainer killed in mid write", "a new one has published", recovered, "update", float(before["update_s"])))  # fmt: skip

        # The controller goes and comes back on the same port.
        port = int(controller.url.rpartition(":")[2])
        await controller.__aexit__(None, None, None)
        began = time.perf_counter()
        controller = windlass.Controller(**arguments, port=port, config=config(RelayShape.CHAIN, 1))
        await controller.__aenter__()
        stack.push(lambda *_: None)
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
        finally:
            await controller.__aexit__(None, None, None)
        rows.append(_row("controller restarted", "all ranks are back", back, "update", plain))
        rows.append(_row("controller restarted", "the next version is published", whole, "update", plain))  # fmt: skip
    return rows


@contextmanager
def _folder() -> Iterator[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield folder


def _row(case: str, metric: str, value: float, reference: str, reference_value: float) -> Row:
    return Row(case=case, metric=metric, value=value, unit="s", reference=reference,
               reference_value=reference_value, ratio=value / reference_value)  # fmt: skip


def simulated() -> list[Row]:
    """DeepSeek-V3 from 128 trainer ranks to engines of 32 ranks, 50 GB/s per rank."""
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
                group = RelayGroup(members, lanes_of(shape, num_replicas), 64 << 20)
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
        rows += asyncio.run(failures())
    if args.part in ("all", "simulated"):
        rows += simulated()
    report(rows, args.json, "relay, catch-up, recovery")


if __name__ == "__main__":
    main()
