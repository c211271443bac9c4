"""Rollout workers and dispatchers for `bench_rollout.py`.

The worker is the real worker process. Its two workflows answer with 128 tokens and their logprobs and versions:
`instant` at once, `held` when the benchmark releases it. So the figures contain no cost of an engine, and the number of
outstanding rollouts is constant.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from windlass.rollout import (
    Rollout,
    RolloutController,
    RolloutHandle,
    SamplingParams,
    Workflow,
    run_rollout_worker,
)
from windlass.rollout.messages import Partial, Turn
from windlass.rollout.workflows import WorkflowContext

NUM_TOKENS = 128
SAMPLING = SamplingParams(max_new_tokens=NUM_TOKENS)
LOGPROBS = tuple(-index / 1024 for index in range(NUM_TOKENS))
VERSIONS = (0,) * NUM_TOKENS
TURN_LOGPROBS, TURN_VERSIONS = LOGPROBS[:4], VERSIONS[:4]
UNBOUNDED = 1 << 20
SESSION_TURNS, TURN_TOKENS = 50, 4
"""Turns of a session, and generated tokens of a turn."""


def tokens_of(prompt: int) -> tuple[int, ...]:
    """Return the answer to a prompt. No two answers have a common token."""
    return tuple(range(prompt * NUM_TOKENS, (prompt + 1) * NUM_TOKENS))


# --- the worker process ------------------------------------------------------------------------


def answer(context: WorkflowContext) -> None:
    prompt = context.arguments
    assert isinstance(prompt, int)
    output = Partial(tokens_of(prompt), LOGPROBS, VERSIONS)
    context.turns.append(Turn((prompt, 1), output, "length"))


async def instant(context: WorkflowContext) -> None:
    answer(context)


def session_turn(prompt: int, number: int) -> Turn:
    """Return a turn of a session. No two turns have a common token."""
    first = (prompt * SESSION_TURNS + number) * TURN_TOKENS
    tokens = tuple(range(first, first + TURN_TOKENS))
    output = Partial(tokens, TURN_LOGPROBS, TURN_VERSIONS)
    return Turn((prompt, number), output, "stop")


class Held:
    """Attempts that wait. A line on stdin gives the number to release; a line on stdout reports the end."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []
        self.arrived = asyncio.Event()
        self.random = random.Random(1)
        self.served: asyncio.Task[None] | None = None

    async def workflow(self, context: WorkflowContext) -> None:
        await self.wait()
        answer(context)

    async def wait(self) -> None:
        if self.served is None:
            self.served = asyncio.create_task(self.serve())
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        self.arrived.set()
        await future

    async def session(self, context: WorkflowContext) -> None:
        """Wait before the last turn of a session."""
        prompt = context.arguments
        assert isinstance(prompt, int)
        context.turns += [session_turn(prompt, number) for number in range(SESSION_TURNS - 1)]
        await self.wait()
        context.turns.append(session_turn(prompt, SESSION_TURNS - 1))

    async def serve(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while line := await reader.readline():
            action, number, rate = line.decode().split()
            if action == "until":
                while len(self.waiting) < int(number):
                    self.arrived.clear()
                    await self.arrived.wait()
            else:
                await self.drip(int(number), float(rate))
            print("done", flush=True)

    async def drip(self, count: int, rate: float) -> None:
        """Release attempts as Poisson arrivals: rollouts of different lengths also end in bursts."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in range(count):
            due += self.random.expovariate(rate)
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            while not self.waiting:
                self.arrived.clear()
                await self.arrived.wait()
            index = self.random.randrange(len(self.waiting))
            self.waiting[index], self.waiting[-1] = self.waiting[-1], self.waiting[index]
            self.waiting.pop().set_result(None)


def worker_main(arguments: list[str]) -> int:
    held = Held()
    workflows: dict[str, Workflow] = {
        "held": held.workflow,
        "session": held.session,
        "instant": instant,
    }
    return run_rollout_worker(workflows, arguments)


# --- the two ways to collect --------------------------------------------------------------------


class Collector:
    """Collector that keeps the number of outstanding rollouts constant, checks answers and records latencies."""

    def __init__(self, controller: RolloutController, workflow: str) -> None:
        self.controller = controller
        self.workflow = workflow
        self.latencies_s: list[float] = []
        self.prompts = 0
        self.wanted = 0
        self.closed = False
        self.reached = asyncio.Event()

    def submit(self) -> RolloutHandle:
        self.prompts += 1
        return self.controller.submit_workflow(
            self.workflow, self.prompts, SAMPLING, metadata=self.prompts
        )

    def seen(self, rollout: Rollout, at: float = 0.0) -> None:
        self.latencies_s.append((at or time.time()) - rollout.finished_at)
        self.check(rollout)
        if not self.closed:
            self.add()
        if len(self.latencies_s) >= self.wanted:
            self.reached.set()

    def check(self, rollout: Rollout) -> None:
        """Compare an answer with the answer that the worker gave."""
        prompt = rollout.metadata
        assert isinstance(prompt, int)
        (turn,) = rollout.turns
        if turn.prompt_ids != (prompt, 1) or turn.output != (
            Partial(tokens_of(prompt), LOGPROBS, VERSIONS)
        ):
            raise SystemExit(f"rollout {rollout.task_id}: wrong answer to {prompt}")

    def begin(self, count: int) -> None:
        """Clear the latencies; `reached` is set after `count` further answers."""
        self.wanted, self.latencies_s = count, []
        self.reached.clear()

    def add(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        self.closed = True


class CallbackCollector(Collector):
    """Windlass's own way: the completion's callback resolves the future."""

    def add(self) -> None:
        self.submit().add_done_callback(self._done)

    def _done(self, future: asyncio.Future[Rollout]) -> None:
        if not future.cancelled():
            self.seen(future.result())


class SessionCollector(CallbackCollector):
    """Collector of sessions with `SESSION_TURNS` turns."""

    def check(self, rollout: Rollout) -> None:
        prompt = rollout.metadata
        assert isinstance(prompt, int)
        if rollout.turns != tuple(session_turn(prompt, n) for n in range(SESSION_TURNS)):
            raise SystemExit(f"rollout {rollout.task_id}: wrong turns of {prompt}")


def areal_classes(folder: Path) -> tuple[type[Any], type[Any]]:
    """Return AReaL's own `BatchTaskDispatcher` and `StalenessManager` from its package.

    Args:
        folder: folder in which the package is installed. Other imports of `areal/__init__.py` (launchers, trainers,
            Ray) are skipped, because these classes do not use them.
    """
    sys.path.append(str(folder))
    for name in ("areal", "areal.infra"):
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    executor = importlib.import_module("areal.infra.workflow_executor")
    manager = importlib.import_module("areal.infra.staleness_manager")
    return executor.BatchTaskDispatcher, manager.StalenessManager


@dataclass(frozen=True, slots=True)
class ArealTask:
    """Input of AReaL's dispatcher."""

    task_id: int


class ArealCollector(Collector):
    """AReaL's dispatcher with the same controller, worker and callbacks.

    Each task submits a rollout and waits for a future that the completion's callback resolves from another thread, like
    the tasks of AReaL's `RolloutController`. Those tasks then fetch the result by another HTTP call, which is omitted
    here. The latency of a rollout ends when `wait_results` returns it.
    """

    def __init__(
        self, classes: tuple[type[Any], type[Any]], controller: RolloutController, workflow: str
    ) -> None:
        super().__init__(controller, workflow)
        make_dispatcher, make_manager = classes
        self.loop = asyncio.get_running_loop()
        self.manager = make_manager(self, UNBOUNDED, 1, UNBOUNDED)
        self.dispatcher = make_dispatcher(UNBOUNDED, self.task, self.manager)
        self.dispatcher.initialize(logging.getLogger("areal"))
        self.num_tasks = 0
        self.thread = threading.Thread(target=self.collect, daemon=True)
        self.thread.start()

    def get_version(self) -> int:
        return 0

    def add(self) -> None:
        self.num_tasks += 1
        self.dispatcher.submit_task_input(ArealTask(self.num_tasks))

    def task(self, _task: ArealTask) -> Callable[[], Awaitable[Rollout]]:
        async def submit_then_wait() -> Rollout:
            theirs = asyncio.get_running_loop()
            future: asyncio.Future[Rollout] = theirs.create_future()

            def done(ours: asyncio.Future[Rollout]) -> None:
                if not ours.cancelled() and not self.closed:
                    theirs.call_soon_threadsafe(future.set_result, ours.result())

            self.loop.call_soon_threadsafe(lambda: self.submit().add_done_callback(done))
            rollout = await future
            self.manager.on_rollout_accepted()
            return rollout

        return submit_then_wait

    def collect(self) -> None:
        """Collect results in a separate thread, like a training loop with AReaL."""
        while not self.closed:
            for rollout in self.dispatcher.wait_results(1, timeout=1.0, raise_timeout=False):
                at = time.time()
                self.loop.call_soon_threadsafe(self.seen, rollout, at)

    async def stop(self) -> None:
        await super().stop()
        await asyncio.to_thread(self.thread.join, 5.0)
        await asyncio.to_thread(self.dispatcher.destroy)


MakeCollector = Callable[[RolloutController, str], Collector]

if __name__ == "__main__":
    sys.exit(worker_main(sys.argv[1:]))
