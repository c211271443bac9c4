"""Recipe of the demo, and its problem without a tokenizer: the model repeats the operand that the prompt selects.

A prompt of this problem is `[operator, a, b, go]`. The right answer repeats `a` if the operator is FIRST, and `b` if the operator is
SECOND. The other operand gets partial credit, so that a model can be trained from scratch.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import msgspec

from windlass.control.report import UpdateReport
from windlass.control.round_state import Phase
from windlass.controller import Controller
from windlass.engines.spec import ENGINES
from windlass.errors import WindlassError
from windlass.jobs.config import LaunchConfig
from windlass.jobs.recipe import Recipe, Task
from windlass.jobs.schedulers.base import Scheduler
from windlass.rollout.handles import RolloutGroup
from windlass.rollout.messages import TrainingSample

NUM_SYMBOLS = 10
FIRST, SECOND, GO = NUM_SYMBOLS, NUM_SYMBOLS + 1, NUM_SYMBOLS + 2
"""Token ids of the two operators, and of the end of a prompt. The operands are the token ids below them."""
WRONG_OPERAND_CREDIT = 0.2
"""Credit of a token that is the other operand."""


def sample_prompt(generator: random.Random) -> tuple[int, ...]:
    """Return a prompt of four tokens with two different symbols."""
    first, second = generator.sample(range(NUM_SYMBOLS), 2)
    return (generator.choice((FIRST, SECOND)), first, second, GO)


def reward(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
    """Return the mean credit per answer token: 1 for the selected operand, `WRONG_OPERAND_CREDIT` for the other, else 0."""
    operator, first, second, _ = prompt_ids
    wanted, other = (first, second) if operator == FIRST else (second, first)
    credit = sum(
        1.0 if token == wanted else WRONG_OPERAND_CREDIT if token == other else 0.0
        for token in output_ids
    )
    return credit / max(len(output_ids), 1)


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem that the model learns to solve.

    Attributes:
        prompt: function of a random generator that returns the token ids of a prompt.
        reward: function of the token ids of a prompt and of an answer that returns the answer's reward, at most 1.
    """

    prompt: Callable[[random.Random], tuple[int, ...]]
    reward: Callable[[Sequence[int], Sequence[int]], float]


REPEAT_OPERAND = Problem(sample_prompt, reward)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a job, from its first version to its last.

    Attributes:
        seconds: time between the two versions.
        samples_per_hour: trained samples per hour.
        tokens_per_s: trained tokens per second.
        mean_staleness: mean staleness of the samples, in versions.
        paused_share: share of the time that the slowest engine was paused, from the pause command on. The share
            includes the end of the step that the engine was running.
        idle_share: share of the time that trainers waited for answers.
        step_share: share of the time that trainers trained.
    """

    seconds: float
    samples_per_hour: float
    tokens_per_s: float
    mean_staleness: float
    paused_share: float
    idle_share: float
    step_share: float


@final
class PaceClock:
    """Clock that records when updates end and steps begin; updates and steps alternate."""

    def __init__(self) -> None:
        self._updates: list[tuple[float, float, float]] = []
        self._waited_s = 0.0
        self._num_samples = self._num_tokens = self._num_versions = 0

    def updated(self, update_s: float, pause_s: float) -> None:
        """Record that a version has just been published, and how long its update and its pause took.

        The first call starts the clock.
        """
        self._updates.append((time.monotonic(), update_s, pause_s))

    def stepping(self, samples: Sequence[TrainingSample], version: int) -> None:
        """Record that a step with these samples begins now, while engines serve `version`."""
        self._waited_s += time.monotonic() - self._updates[-1][0]
        self._num_samples += len(samples)
        self._num_tokens += sum(sample.num_trained for sample in samples)
        self._num_versions += sum(version - min(sample.versions) for sample in samples)

    def pace(self) -> Pace:
        """Return the speed of the job from its first to its newest version. At least two versions must be published."""
        seconds, later = self._updates[-1][0] - self._updates[0][0], self._updates[1:]
        updating_s = sum(update_s for _, update_s, _ in later)
        return Pace(
            seconds=seconds,
            samples_per_hour=3600 * self._num_samples / seconds,
            tokens_per_s=self._num_tokens / seconds,
            mean_staleness=self._num_versions / self._num_samples,
            paused_share=sum(pause_s for _, _, pause_s in later) / seconds,
            idle_share=self._waited_s / seconds,
            step_share=(seconds - self._waited_s - updating_s) / seconds,
        )


@final
class DemoRecipe(Recipe):
    """Recipe that yields prompts, scores answers, and records trained samples and updates. It may kill an engine.

    Args:
        seed: seed of the prompts.
        kill_engine_at: the recipe kills the last engine during the update to this version; 0 for never.
        problem: source of prompts and rewards.
        takes_turns: whether the engines sleep while the trainers step.

    Attributes:
        served: samples that trainers trained on.
        rewards_by_step: mean reward of each step.
        staleness: age in versions -> number of samples of that age when they were trained on.
        updates: reports of all rounds.
        events: one line per event.
        clock: clock of the job's pace.
        show: function that the controller's loop calls after every update and event.
    """

    def __init__(
        self,
        seed: int = 0,
        kill_engine_at: int = 0,
        problem: Problem = REPEAT_OPERAND,
        *,
        takes_turns: bool = False,
    ) -> None:
        self._takes_turns = takes_turns
        self._problem = problem
        self.served: list[TrainingSample] = []
        self.rewards_by_step: list[float] = []
        self.staleness: Counter[int] = Counter()
        self.updates: list[UpdateReport] = []
        self.events: list[str] = []
        self.show: Callable[[Controller], None] = lambda _: None
        self.clock = PaceClock()
        self._seed, self._kill_engine_at = seed, kill_engine_at
        self._kill: asyncio.Task[None] | None = None

    def tasks(self) -> Iterator[Task]:
        """Yield random prompts without end."""
        generator = random.Random(self._seed)  # noqa: S311 - prompts, not secrets
        while True:
            yield Task(prompt_ids=self._problem.prompt(generator))

    def rewards(self, group: RolloutGroup) -> Sequence[float]:
        """Return the problem's reward of each answer."""
        return [self._problem.reward(r.prompt_ids, r.output_ids) for r in group.rollouts]

    def started(self, config: LaunchConfig, controller: Controller, scheduler: Scheduler) -> None:
        """Store the arguments, and subscribe to the reports and phases of updates."""
        self._config, self._controller, self._scheduler = config, controller, scheduler
        controller.coordinator.on_update(self._on_update)
        controller.coordinator.rounds.on_phase(self._on_phase)

    async def before_step(self, step: int, samples: Sequence[TrainingSample]) -> None:
        """Record the samples of the step. If engines and trainers take turns, put the engines to sleep.

        If the demo kills an engine, wait before the last step until this engine has connected again. The killed engine
        cannot copy the last version from the other engine, which has another dtype. So it must take part in the last
        update.

        Raises:
            WindlassError: the demo should have killed an engine in an earlier update, but has not.
        """
        config, version = self._config, self._controller.coordinator.fleet.published
        self.clock.stepping(samples, version)
        self.served += samples
        self.rewards_by_step.append(sum(s.reward for s in samples) / len(samples))
        self.staleness.update(version - min(s.versions) for s in samples)
        if self._kill_engine_at and step == config.steps - 1:
            if self._kill is None:
                raise WindlassError(
                    f"demo: no engine was killed in an update to version {self._kill_engine_at}"
                )
            await self._kill
            await self._controller.wait_for_fleet(
                num_trainers=config.trainer.world_size,
                engines=[engine.name for engine in config.engines],
                deadline_s=config.start_deadline_s,
            )
            self._note("all engines are connected for the last version")
        if self._takes_turns:
            await self._controller.sleep_engines(config.update.pause_mode)

    def _on_update(self, report: UpdateReport) -> None:
        """Record the report of an update, and show it."""
        self.clock.updated(report.update_s, report.pause_s)
        self.updates.append(report)
        for name, reason in report.left_out.items():
            self._note(f"version {report.version} was published without {name}: {reason}")
        self.show(self._controller)

    def _on_phase(self, version: int, phase: Phase) -> None:
        """When the update to version `kill_engine_at` begins to write, start a task that kills the last engine."""
        if version == self._kill_engine_at and version and phase is Phase.WRITE and not self._kill:
            victim = self._config.engines[-1].name
            self._note(f"kill -9 {victim} in the middle of the update to version {version}")
            self._kill = asyncio.create_task(self._kill_engine(victim))

    async def _kill_engine(self, name: str) -> None:
        """Kill the process of the last engine (`name`), and wait until it has ended. The job starts it again."""
        engine = self._config.engines[-1]
        # For a server, the job's process is only the launcher, so SIGKILL would leave the server running. On SIGTERM
        # the launcher kills the server.
        is_engine = ENGINES.find(engine.kind).server is None
        await self._scheduler.signal(name, signal.SIGKILL if is_engine else signal.SIGTERM)
        await self._scheduler.wait(name)

    def _note(self, event: str) -> None:
        """Record an event, and show it."""
        self.events.append(event)
        self.show(self._controller)
