"""Completions of the rollout controller beside AReaL's own runner and Ray's queue, in one run and by turns.

Every way delivers answers of 128 tokens with logprobs and versions, and every answer is checked.

- Windlass: controller and worker process, as in `bench_rollout.py`.
- AReaL's `AsyncTaskRunner` (1.0.4), alone: its tasks make the answers in its own thread, without a worker process.
- AReaL's `BatchTaskDispatcher` on our controller and worker: see `rollout_load.ArealCollector`.
- Ray's `ray.util.queue.Queue`: an actor makes the answers, with one queue for requests and one for answers, and
  batches of at most 64. It neither retries nor remembers anything.

    python benchmarks/bench_queues.py --json FILE [--areal FOLDER] [--ray FOLDER] [--runs N] [--outstanding N]
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench_rollout import Sample, machine_row, row, static_rig
from harness import Row, median_p95, parser, report
from rollout_load import (
    LOGPROBS,
    VERSIONS,
    ArealCollector,
    CallbackCollector,
    MakeCollector,
    areal_classes,
    tokens_of,
)

HERE = Path(__file__).resolve().parent
RATE_PER_S = 300.0
BATCH = 64
WITHIN_S = 120.0
Answer = tuple[int, tuple[int, ...], tuple[float, ...], tuple[int, ...], float]


def answer_to(prompt: int) -> Answer:
    return prompt, tokens_of(prompt), LOGPROBS, VERSIONS, time.time()


def seen(answer: Answer, at: float) -> float:
    """Check an answer; return its latency."""
    prompt, tokens, logprobs, versions, finished_at = answer
    if (tokens, logprobs, versions) != (tokens_of(prompt), LOGPROBS, VERSIONS):
        raise SystemExit(f"wrong answer to {prompt}")
    return at - finished_at


def sample_of(latencies_s: list[float], cpu: float, wall: float) -> Sample:
    return Sample(latencies_s, time.process_time() - cpu, time.monotonic() - wall)


# --- the controller, also with AReaL's dispatcher -----------------------------------------------


async def _controller(
    make: MakeCollector, outstanding: int, count: int, rate: float | None
) -> Sample:
    workflow = "instant" if rate is None else "held"
    async with static_rig(make, workflow, outstanding) as rig:
        if rate is not None:
            await rig.worker.ask(f"until {outstanding} 0")
        await rig.run(count, rate=rate)
        return await rig.run(count, rate=rate)


def controller(make: MakeCollector, outstanding: int, count: int, rate: float | None) -> Sample:
    return asyncio.run(_controller(make, outstanding, count, rate))


# --- AReaL's runner alone ---------------------------------------------------------------------------


def areal_runner(outstanding: int, count: int, rate: float | None) -> Sample:
    """Run tasks in AReaL's runner, with a constant number of them outstanding."""
    module = importlib.import_module("areal.infra.async_task_runner")
    runner = module.AsyncTaskRunner(max_queue_size=1 << 20)
    runner.initialize(logging.getLogger("areal"))
    waiting: list[Any] = []
    prompts = iter(range(1 << 30))

    async def task(prompt: int) -> Answer:
        if rate is not None:
            future = asyncio.get_running_loop().create_future()
            waiting.append(future)
            await future
        return answer_to(prompt)

    def submit() -> None:
        prompt = next(prompts)
        runner.submit(task, prompt, task_id=prompt)

    def release() -> None:
        due, chance = time.monotonic(), random.Random(1)
        for _ in range(2 * count):
            due += chance.expovariate(rate or 1.0)
            time.sleep(max(0.0, due - time.monotonic()))
            while not waiting and not stop.is_set():
                time.sleep(0.001)
            if stop.is_set():
                return
            future = waiting.pop(chance.randrange(len(waiting)))
            runner._loop.call_soon_threadsafe(future.set_result, None)

    stop = threading.Event()
    releasing = threading.Thread(target=release, daemon=True)
    try:
        for _ in range(outstanding):
            submit()
        if rate is not None:
            ends = time.monotonic() + WITHIN_S
            while len(waiting) < outstanding and time.monotonic() < ends:
                time.sleep(0.01)
            releasing.start()
        for is_counted in (False, True):
            latencies: list[float] = []
            cpu, wall = time.process_time(), time.monotonic()
            while len(latencies) < count:
                for found in runner.wait(1, timeout=WITHIN_S):
                    latencies.append(seen(found, time.time()))
                    submit()
            if is_counted:
                return sample_of(latencies, cpu, wall)
        raise AssertionError("unreachable")
    finally:
        stop.set()
        runner.destroy()


# --- Ray's queue -------------------------------------------------------------------------------------


class RayWorker:
    """Ray actor that answers requests."""

    def serve(self, requests: Any, answers: Any, count: int, rate: float | None) -> None:
        chance, due, done = random.Random(1), time.monotonic(), 0
        while done < count:
            if rate is None:
                num = min(requests.qsize(), BATCH)
                if not num:
                    time.sleep(0.0005)
                    continue
                prompts = requests.get_nowait_batch(num)
            else:
                due += chance.expovariate(rate)
                time.sleep(max(0.0, due - time.monotonic()))
                prompts = [requests.get()]
            answers.put_nowait_batch([answer_to(prompt) for prompt in prompts])
            done += len(prompts)


def ray_queue(outstanding: int, count: int, rate: float | None) -> Sample:
    """Keep a constant number of requests outstanding in one queue of Ray, and take the answers from another."""
    import ray
    from ray.util.queue import Queue

    requests, answers = Queue(), Queue()
    worker = ray.remote(RayWorker).remote()
    prompts = iter(range(1 << 30))
    requests.put_nowait_batch([next(prompts) for _ in range(outstanding)])
    serving = worker.serve.remote(requests, answers, 2 * count, rate)
    try:
        for is_counted in (False, True):
            latencies: list[float] = []
            cpu, wall = time.process_time(), time.monotonic()
            while len(latencies) < count:
                if rate is None:
                    num = min(answers.qsize(), BATCH)
                    found = answers.get_nowait_batch(num) if num else []
                else:
                    found = [answers.get(timeout=WITHIN_S)]
                at = time.time()
                latencies += [seen(each, at) for each in found]
                if found:
                    requests.put_nowait_batch([next(prompts) for _ in found])
            if is_counted:
                return sample_of(latencies, cpu, wall)
        raise AssertionError("unreachable")
    finally:
        ray.cancel(serving, force=False)
        for each in (requests, answers):
            each.shutdown(force=True)
        ray.kill(worker)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--areal", type=Path, help="folder with an installation of areal")
    options.add_argument("--ray", type=Path, help="folder with an installation of ray")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--outstanding", type=int, default=2048)
    options.add_argument("--count", type=int, default=5000, help="completions at full speed")
    options.add_argument("--paced", type=int, default=600, help="completions at 300 per second")
    arguments = options.parse_args()
    ways: dict[str, Callable[[int, int, float | None], Sample]] = {
        "Windlass": partial(controller, CallbackCollector)
    }
    if arguments.areal is not None:
        made = partial(ArealCollector, areal_classes(arguments.areal))
        ways["AReaL's dispatcher, our controller"] = partial(controller, made)
        ways["AReaL's AsyncTaskRunner, no worker"] = areal_runner
    if arguments.ray is not None:
        # Ray's own worker processes import these, too.
        paths = [str(arguments.ray), str(HERE), str(HERE.parents[0] / "src")]
        paths.append(str(HERE.parents[0] / "tests" / "support"))
        os.environ["PYTHONPATH"] = ":".join(paths)
        # Ray's workers have a niceness of 15 by default, and would hardly run on a busy machine.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        sys.path.append(str(arguments.ray))
        import ray

        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        ways["Ray's queue"] = ray_queue
    rows: list[Row] = [machine_row("before")]
    fast: dict[str, list[Sample]] = {name: [] for name in ways}
    paced: dict[str, list[Sample]] = {name: [] for name in ways}
    for _ in range(arguments.runs):
        for name, run in ways.items():
            fast[name].append(run(arguments.outstanding, arguments.count, None))
            paced[name].append(run(arguments.outstanding, arguments.paced, RATE_PER_S))
    outstanding = f"{arguments.outstanding} outstanding"
    runs = f"median of {arguments.runs} runs"
    for name in ways:
        rate, ours = (median_p95([s.per_second() for s in fast[n]])[0] for n in (name, "Windlass"))
        rows.append(row(f"full speed, {outstanding}", f"{name}: completions, {runs}", "1/s", rate, "Windlass", ours))  # fmt: skip
        for share in (0.50, 0.99):
            value, ours = (
                median_p95([s.quantile_ms(share) for s in paced[n]])[0] for n in (name, "Windlass")
            )
            metric = f"{name}: latency p{share * 100:.0f}, {runs}"
            rows.append(row(f"{RATE_PER_S:g}/s, {outstanding}", metric, "ms", value, "Windlass", ours))  # fmt: skip
    rows.append(machine_row("after"))
    report(rows, arguments.json, "completions of 128 tokens")


if __name__ == "__main__":
    main()
