"""Time of large tensors from a rollout worker to two trainer ranks, beside memcpy and Ray's object store.

A batch has 8 tensors, 4 for each rank. *Held* is the time until the source process has stored the whole batch and the
controller knows of it. *Fetched* is the time from then until both ranks have all arrays and have read every byte once:
Windlass checks the digests, and for Ray the ranks compute the same digest. Windlass, Ray and memcpy take turns. After every
run, the digests of all arrays are compared with those of the source.

    python benchmarks/bench_batches.py --json FILE [--gb 1 4] [--runs N] [--ray FOLDER] [--inline-gb 0.25]
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from batch_load import RayRank, RaySource, elements
from harness import Row, median_p95, parser, report
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    TrainingSample,
    mount_rollout_routes,
    training_samples,
)

HERE = Path(__file__).resolve().parent
NUM_TENSORS, NUM_RANKS = 8, 2
DEADLINE_S = 600.0
SAMPLING = SamplingParams(max_new_tokens=1)
SMALL = TrainingSample(
    prompt_ids=(1,),
    output_ids=(1,),
    logprobs=(0.0,),
    versions=(0,),
    reward=0.0,
    group_id=0,
    engine="engine",
)
Times = dict[str, list[float]]


def numbers_of(rank: int) -> list[int]:
    return list(range(rank, NUM_TENSORS, NUM_RANKS))


def add(times: Times, name: str, seconds: float) -> None:
    times.setdefault(name, []).append(seconds)


def memcpy(nbytes: int, times: Times) -> None:
    """Copy as many bytes as a batch has with one thread, into memory that has its pages, at most 512 MB at a time."""
    part = min(nbytes, 512_000_000)
    source, target = np.ones(part, np.uint8), np.ones(part, np.uint8)
    began = time.monotonic()
    for _ in range(nbytes // part):
        np.copyto(target, source)
    add(times, "memcpy", (time.monotonic() - began) * nbytes / (nbytes // part * part))


class Windlass:
    """Controller in this process, with a worker and two ranks in processes of their own."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack, self.step = stack, -1

    async def start(self, inline_nbytes: int) -> None:
        token = secrets.token_hex(8)
        engines = StaticEngines([("engine", "http://unused", 0)])
        self.rollouts = await self.stack.enter_async_context(
            RolloutController(engines, StalenessPolicy.unbounded(64), token=token)
        )
        self.batches = BatchQueue(inline_nbytes=inline_nbytes)
        self.stack.callback(self.batches.close)
        server = ControlServer(host="127.0.0.1", port=0, token=token)
        mount_rollout_routes(server, self.rollouts, self.batches)
        await server.start()
        self.stack.push_async_callback(server.close)
        inline = ("--inline-nbytes", str(inline_nbytes))
        self.token = token
        self.worker = await self.spawn("worker", "--controller", server.url, "--name", "w", *inline)
        self.ranks = [
            await self.spawn("rank", server.url, str(rank), str(NUM_RANKS))
            for rank in range(NUM_RANKS)
        ]
        await self.rollouts.wait_for_workers(1, deadline_s=DEADLINE_S)

    async def spawn(self, *words: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(HERE / "batch_load.py"), *words),
            env={
                **os.environ,
                "WINDLASS_TOKEN": self.token,
                "PYTHONPATH": str(HERE.parent / "src"),
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )

        async def end() -> None:
            if process.returncode is None:
                process.kill()
            await process.communicate()

        self.stack.push_async_callback(end)
        return process

    async def run(self, nbytes: int, times: Times, digests: dict[str, str], name: str) -> None:
        began = time.monotonic()
        for number in range(NUM_TENSORS):
            self.rollouts.submit_workflow_group(
                "make", [number, nbytes // NUM_TENSORS], 1, SAMPLING, metadata=number
            )
        found = await self.rollouts.next_batch(NUM_TENSORS, deadline_s=DEADLINE_S)
        held = time.monotonic()
        groups = sorted(found, key=lambda group: str(group.metadata))
        self.step += 1
        await self.batches.put(self.step, [training_samples(group, [1.0]) for group in groups])
        answers = await asyncio.gather(*[self.fetch(rank) for rank in self.ranks])
        check(answers, digests)
        ended = max(answer["ended"] for answer in answers)
        add(times, f"{name} held", held - began)
        add(times, f"{name} fetched", ended - held)
        add(times, f"{name} total", ended - began)
        # The queue keeps two batches for ranks that ask again. Two small ones let the worker free this batch.
        del found, groups
        for _ in range(2):
            self.step += 1
            await self.batches.put(self.step, [[SMALL]])

    async def fetch(self, rank: asyncio.subprocess.Process) -> Any:
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write(f"{self.step}\n".encode())
        line = await asyncio.wait_for(rank.stdout.readline(), DEADLINE_S)
        if not line:
            raise SystemExit("a trainer rank has ended, see its error above")
        return json.loads(line)


def check(answers: list[Any], digests: dict[str, str]) -> None:
    """Compare the digests of all arrays of all ranks with those of the source."""
    found: dict[str, str] = {}
    for answer in answers:
        found |= {str(number): digest for number, digest in answer["digests"].items()}
    if found != digests:
        raise SystemExit(f"wrong bytes: got digests {found}, expected {digests}")


class Ray:
    """The same with Ray's object store: an actor that puts arrays, and two that get them."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        # Ray's own worker processes import these, too.
        paths = [str(folder), str(HERE), str(HERE.parent / "src")]
        os.environ["PYTHONPATH"] = ":".join(paths)
        # Ray's workers have a niceness of 15 by default, and would hardly run on a busy machine.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        sys.path.append(str(folder))
        import ray

        self.ray = ray
        # Two batches: the store frees the arrays of a run a little after the run.
        store_nbytes = max(int(2.2 * nbytes), 200 << 20)
        ray.init(
            "local",
            num_cpus=4,
            object_store_memory=store_nbytes,
            include_dashboard=False,
            log_to_driver=False,
        )
        self.source = ray.remote(RaySource).remote()
        self.ranks = [ray.remote(RayRank).remote() for _ in range(NUM_RANKS)]

    def run(self, nbytes: int, times: Times, digests: dict[str, str]) -> None:
        ray = self.ray
        began = time.monotonic()
        refs = ray.get(self.source.put.remote(list(range(NUM_TENSORS)), nbytes // NUM_TENSORS))
        held = time.monotonic()
        answers = ray.get(
            [
                rank.get.remote(numbers_of(n), [[refs[each] for each in numbers_of(n)]])
                for n, rank in enumerate(self.ranks)
            ]
        )
        check(answers, digests)
        ended = max(answer["ended"] for answer in answers)
        add(times, "Ray held", held - began)
        add(times, "Ray fetched", ended - held)
        add(times, "Ray fetched, not read", max(answer["got"] for answer in answers) - held)
        add(times, "Ray total", ended - began)

    def close(self) -> None:
        self.ray.shutdown()


def expected(nbytes: int) -> tuple[int, dict[str, str]]:
    """Return the size of each tensor of a batch of `nbytes` bytes, and the digest of each tensor by its number."""
    tensor_nbytes = nbytes // NUM_TENSORS // 8 * 8
    digests = {
        str(number): xxhash.xxh3_128_hexdigest(elements(number, tensor_nbytes))
        for number in range(NUM_TENSORS)
    }
    return tensor_nbytes, digests


async def measure(nbytes: int, runs: int, ray: Ray | None) -> Times:
    """Run all ways by turns. The first run of each is not counted: its memory is new."""
    tensor_nbytes, digests = expected(nbytes)
    times: Times = {}
    async with AsyncExitStack() as stack:
        ours = Windlass(stack)
        await ours.start(1 << 16)
        for run in range(runs + 1):
            await asyncio.to_thread(memcpy, nbytes, times)
            await ours.run(tensor_nbytes * NUM_TENSORS, times, digests, "Windlass")
            if ray is not None:
                await asyncio.to_thread(ray.run, tensor_nbytes * NUM_TENSORS, times, digests)
            if run == 0:
                first = {f"{name}, first run": seconds for name, seconds in times.items()}
                times = first
    return times


async def measure_inline(nbytes: int) -> Times:
    """Send a batch through the controller, as before tensors were held."""
    tensor_nbytes, digests = expected(nbytes)
    times: Times = {}
    async with AsyncExitStack() as stack:
        ours = Windlass(stack)
        await ours.start(1 << 40)
        await ours.run(tensor_nbytes * NUM_TENSORS, times, digests, "through the controller")
        return times


def rows_of(gb: float, times: Times, runs: int) -> list[Row]:
    case, rows = f"{gb:g} GB to {NUM_RANKS} ranks", []

    def one(metric: str, value: float, reference: str, other: float) -> None:
        rows.append(Row(case, metric, value, "s", reference, other))

    memcpy_s = median_p95(times["memcpy"])
    for stage in ("held", "fetched", "total"):
        found = median_p95(times[f"Windlass {stage}"])
        peer = times.get(f"Ray {stage}")
        reference, other = ("Ray", median_p95(peer)) if peer else ("memcpy, one thread", memcpy_s)
        for kind, ours, theirs in zip(("median", "p95"), found, other, strict=True):
            one(f"{stage}, {kind} of {runs} runs", ours, reference, theirs)
    total = median_p95(times["Windlass total"])[0]
    one("total, median", total, "memcpy, one thread", memcpy_s[0])
    if plain := times.get("Ray fetched, not read"):
        fetched = median_p95(times["Windlass fetched"])[0]
        one("fetched, median", fetched, "Ray, bytes not read", median_p95(plain)[0])
    first = times["Windlass total, first run"][0]
    peer = times.get("Ray total, first run", [total])
    one("total, first run", first, "Ray" if "Ray total" in times else "median", peer[0])
    return rows


def machine_row(when: str) -> Row:
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return Row("machine", f"load average, 1 min, {when}", load, "processes", "cores", cores)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--gb", type=float, nargs="+", default=[1.0, 4.0])
    options.add_argument("--runs", type=int, default=9)
    options.add_argument("--ray", type=Path, help="folder with an installation of ray")
    options.add_argument(
        "--inline-gb", type=float, default=0.0, help="batch through the controller"
    )
    arguments = options.parse_args()
    rows = [machine_row("before")]
    for gb in arguments.gb:
        nbytes = int(gb * 1e9)
        ray = Ray(arguments.ray, nbytes) if arguments.ray else None
        try:
            times = asyncio.run(measure(nbytes, arguments.runs, ray))
        finally:
            if ray is not None:
                ray.close()
        rows += rows_of(gb, times, arguments.runs)
    if arguments.inline_gb:
        times = asyncio.run(measure_inline(int(arguments.inline_gb * 1e9)))
        case = f"{arguments.inline_gb:g} GB through the controller"
        total = times["through the controller total"][0]
        copied = arguments.inline_gb / 10.0
        rows.append(Row(case, "total", total, "s", "memcpy at 10 GB/s", copied))
    rows.append(machine_row("after"))
    report(rows, arguments.json, f"batches of {NUM_TENSORS} tensors, every byte checked")


if __name__ == "__main__":
    main()
