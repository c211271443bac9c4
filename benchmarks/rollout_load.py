"""Rollout workers and dispatchers for `bench_rollout.py`.

The worker is the real worker process. Its two workflows answer with 128 tokens and their logprobs
and versions: `instant` at once, `held` when the benchmark lets it go, so that what an engine
costs is not measured and the number of outstanding rollouts stays what the case says.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable

from windlass.rollout import Rollout, RolloutController, RolloutHandle, SamplingParams, Workflow
from windlass.rollout.messages import Partial, Turn
from windlass.rollout.worker import run_rollout_worker
from windlass.rollout.workflows import WorkflowContext

NUM_TOKENS = 128
SAMPLING = SamplingParams(max_new_tokens=NUM_TOKENS)
LOGPROBS = tuple(-index / 1024 for index in range(NUM_TOKENS))
VERSIONS = (0,) * NUM_TOKENS
POLL_S = 0.05


def tokens_of(prompt: int) -> tuple[int, ...]:
    """The answer to a prompt; no token occurs in two answers."""
    return tuple(range(prompt * NUM_TOKENS, (prompt + 1) * NUM_TOKENS))


# --- the worker process ------------------------------------------------------------------------


def answer(context: WorkflowContext) -> None:
    prompt = context.arguments
    assert isinstance(prompt, int)
    output = Partial(tokens_of(prompt), LOGPROBS, VERSIONS)
    context.turns.append(Turn((prompt, 1), output, "length"))


async def instant(context: WorkflowContext) -> None:
    answer(context)


class Held:
    """Attempts that wait; lines on stdin say how many are let go, a line on stdout that it is done."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []
        self.arrived = asyncio.Event()
        self.random = random.Random(1)
        self.served: asyncio.Task[None] | None = None

    async def workflow(self, context: WorkflowContext) -> None:
        if self.served is None:
            self.served = asyncio.create_task(self.serve())
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        self.arrived.set()
        await future
        answer(context)

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
        """Poisson arrivals: bursts included, as rollouts of different lengths end."""
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
    workflows: dict[str, Workflow] = {"held": Held().workflow, "instant": instant}
    return run_rollout_worker(workflows, arguments)


# --- the two ways to collect --------------------------------------------------------------------


class Collector:
    """Keeps the number of outstanding rollouts, checks each answer, notes when it was seen."""

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

    def seen(self, rollout: Rollout) -> None:
        self.latencies_s.append(time.time() - rollout.finished_at)
        prompt = rollout.metadata
        assert isinstance(prompt, int)
        (turn,) = rollout.turns
        if turn.prompt_ids != (prompt, 1) or turn.output != (
            Partial(tokens_of(prompt), LOGPROBS, VERSIONS)
        ):
            raise SystemExit(f"rollout {rollout.task_id}: wrong answer to {prompt}")
        if not self.closed:
            self.add()
        if len(self.latencies_s) >= self.wanted:
            self.reached.set()

    def begin(self, count: int) -> None:
        """Forget what was seen; `reached` is set after `count` more."""
        self.wanted, self.latencies_s = count, []
        self.reached.clear()

    def add(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        self.closed = True


class CallbackCollector(Collector):
    """What the library does: the completion's callback resolves the future."""

    def add(self) -> None:
        self.submit().add_done_callback(self._done)

    def _done(self, future: asyncio.Future[Rollout]) -> None:
        if not future.cancelled():
            self.seen(future.result())


class PollingCollector(Collector):
    """A task per rollout and `asyncio.wait` over all of them with a timeout of 50 ms.

    Runs on the same controller, worker and callbacks, without the further threads and queues
    that dispatchers of this kind put behind it: what it costs on top is the polling alone.
    """

    def __init__(self, controller: RolloutController, workflow: str) -> None:
        super().__init__(controller, workflow)
        self.running: set[asyncio.Task[Rollout]] = set()
        self.loop_task = asyncio.create_task(self.loop())

    def add(self) -> None:
        self.running.add(asyncio.create_task(self._result(self.submit())))

    @staticmethod
    async def _result(handle: RolloutHandle) -> Rollout:
        return await handle

    async def loop(self) -> None:
        while True:
            if not self.running:
                await asyncio.sleep(POLL_S)
                continue
            done, _ = await asyncio.wait(
                self.running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
            self.running -= done
            for task in done:
                self.seen(task.result())

    async def stop(self) -> None:
        await super().stop()
        self.loop_task.cancel()
        for task in self.running:
            task.cancel()
        await asyncio.gather(self.loop_task, *self.running, return_exceptions=True)


MakeCollector = Callable[[RolloutController, str], Collector]

if __name__ == "__main__":
    sys.exit(worker_main(sys.argv[1:]))
