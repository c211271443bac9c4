"""The recipe: the part of a launched job that the user writes and that runs in the controller's process."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import itertools
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import msgspec

from windlass.controller import Controller
from windlass.errors import ConfigError, WindlassError, text_of
from windlass.files import raised_at, run_file
from windlass.jobs.config import LaunchConfig
from windlass.jobs.schedulers.base import Scheduler
from windlass.net.logs import TRACEBACK_EVERY_S, LineLimit
from windlass.rollout.batches import check_groups, training_samples
from windlass.rollout.handles import Rollout, RolloutGroup
from windlass.rollout.messages import TrainingSample
from windlass.rollout.reward_process import import_function
from windlass.rollout.rewards import ProcessRewards
from windlass.rollout.text import Chat, Message, with_plain_images
from windlass.rollout.values import encode_plain, encode_value
from windlass.rollout.workflows import Workflow

if TYPE_CHECKING:
    from windlass.jobs.results import JobSummary, StepResult

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

tracebacks = LineLimit(TRACEBACK_EVERY_S)
"""Limit on the logged tracebacks of the recipe's exceptions."""
MODULE = "windlass_launched_recipe"
"""Name of the module that the user's file becomes."""
HOOKS = ("before_step", "after_step", "ended")
"""Methods of a recipe that the job awaits."""
_END = object()
"""Value that marks the end of the tasks. It is not None, because a recipe may yield None by mistake."""


@dataclass(frozen=True, slots=True)
class Task:
    """One group to generate: samples of a prompt, or runs of a workflow.

    Attributes:
        prompt_ids: tokens of a plain prompt.
        workflow: name of a workflow; empty for a plain prompt.
        arguments: arguments of the workflow.
        metadata: value returned with the group.
        prompt: text, messages or a `Chat` in place of `prompt_ids`. The job needs `rollout.tokenizer`.
    """

    prompt_ids: tuple[int, ...] = ()
    workflow: str = ""
    arguments: object = None
    metadata: object = None
    prompt: str | Sequence[Message] | Chat = ""


class Recipe(ABC):
    """Base class of the user's code in a job. A recipe yields tasks and scores the answers.

    `tasks`, `state` and `load` run in a thread of their own. The methods that score or accept groups and answers run in
    up to `rollout.rewards_at_once` threads at a time. The methods for evaluations run in another thread. All other
    methods run in the controller's event loop.
    """

    @abstractmethod
    def tasks(self) -> Iterator[Task]:
        """Yield tasks. The job ends after the last task.

        The job submits each task as soon as the staleness bound (`rollout.max_staleness`) admits its group, and then takes
        the next task.

        Runs in a thread, so this method may block, for example while it reads a dataset.
        """

    def rewards(self, group: RolloutGroup) -> Sequence[float]:
        """Return the rewards of a finished group: one finite number per rollout, as a sequence, an array or a tensor.

        A recipe must define this method, unless the job has the table `[rewards]`. Such a job has already scored each
        rollout, and by default this method returns these scores (`Rollout.reward`).

        Runs in a thread, so this method may block, but it cannot use `signal.alarm`, which needs the main thread.
        """
        return [rollout.reward for rollout in group.rollouts if rollout.reward is not None]

    def samples(self, group: RolloutGroup) -> Sequence[TrainingSample]:
        """Return the samples of a group for the trainers: one per answer, or one per conversation.

        Return an empty sequence to decline the group, for example if all rewards are equal. The step then waits for a
        different group.

        Raises:
            ConfigError: see `training_samples`.
        """
        return training_samples(group, self.rewards(group))

    def accepts_group(self, group: RolloutGroup) -> bool:  # noqa: ARG002 - overriding it is a choice
        """Return whether to score a finished group; the job declines other groups. Runs in a thread."""
        return True

    def accepts(self, rollout: Rollout) -> bool:  # noqa: ARG002 - as above
        """Return whether the recipe accepts an answer, for example False if the answer was cut off. Runs in a thread.

        For each answer that the recipe does not accept, an engine generates a new answer, at most
        `rollout.max_rejections` times.
        """
        return True

    def accepts_scored(
        self,
        group: RolloutGroup,  # noqa: ARG002 - as above
        samples: Sequence[TrainingSample],  # noqa: ARG002 - as above
    ) -> bool:
        """Return whether to train on the samples of a scored group. Runs in a thread.

        If this method returns False, the group is declined, and the step waits for a different group. For DAPO's
        dynamic sampling, return `rewards_differ(samples)`.
        """
        return True

    def evaluation_tasks(self) -> Iterable[Task]:
        """Return the tasks of each evaluation. A job with `evaluation.every` > 0 needs this method. Runs in a thread.

        If a task names a workflow, `workflows` must return it, because evaluations run in the controller.
        """
        return ()

    def evaluation_metrics(self, groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
        """Return the metrics of an evaluation: by default, the mean reward. Runs in a thread.

        Args:
            groups: the answers to each task of `evaluation_tasks`, in the same order.
        """
        rewards = [float(reward) for group in groups for reward in self.rewards(group)]
        return {"reward": sum(rewards) / len(rewards)}

    def check(self, config: LaunchConfig) -> None:  # noqa: B027 - overriding it is a choice
        """Check the job's settings, before the job starts anything. `windlass launch --check` calls this method too.

        Raises:
            ConfigError: a setting is wrong for this recipe.
        """

    def started(  # noqa: B027 - as above
        self, config: LaunchConfig, controller: Controller, scheduler: Scheduler
    ) -> None:
        """Prepare the recipe, before the job starts trainers, engines and workers. Runs in the controller's event loop.

        Args:
            config: configuration of the job.
            controller: controller of the job. It is already running.
            scheduler: scheduler that will start the job's processes.
        """

    async def before_step(  # noqa: B027 - as above
        self, step: int, samples: Sequence[TrainingSample]
    ) -> None:
        """Handle the samples of step `step` (from 0) before the step begins. Runs in the controller's event loop."""

    async def after_step(  # noqa: B027 - as above
        self, step: int, result: StepResult
    ) -> None:
        """Handle the metrics of step `step` (counted from 0).

        Called when engines serve the step's weights, or as soon as the weights are copied to replicas that send them.
        Runs in the controller's event loop; the next step begins when this method returns. To generate with the new
        weights, call `evaluation` on the `Controller` that was passed to `started`.
        """

    async def ended(self, summary: JobSummary) -> None:  # noqa: B027 - as above
        """Handle the end of the job, while engines still serve the last version. Not called for a job that fails.

        Runs in the controller's event loop. SIGTERM or SIGINT to the job cancels this coroutine.
        """

    def state(self) -> object:
        """Return the recipe's position in its tasks, as a value that msgpack can encode; None if there is no state.

        Called after each task that `tasks` yields, in the same thread. The job writes the value to its checkpoints. The
        position must be after the yielded task, because the checkpoint also contains the yielded tasks that were not
        trained on. A job that continues from the checkpoint submits these tasks again.
        """
        return None

    def load(self, state: Any) -> None:  # noqa: B027 - as above
        """Set the recipe's position in its tasks to a value that `state` returned in an earlier job.

        Called before `tasks`, in the same thread, and only if the job continues from a checkpoint with such a value.
        """

    def workflows(self) -> Mapping[str, Workflow]:
        """Return workflows by name, for evaluations and for a job without worker processes (`rollout.num_workers = 0`).

        The controller's event loop runs these workflows. Other jobs do not call this method.
        """
        return {}


def find_recipe(
    file: Path, name: str, *, evaluates: bool = False, has_rewards: bool = False
) -> type[Recipe]:
    """Run the user's file and return the `Recipe` class `name`. The file may import modules in the same folder.

    Args:
        file: the user's file.
        name: name of the class.
        evaluates: whether the class must define `evaluation_tasks`.
        has_rewards: whether the job has the table `[rewards]`. If so, the class need not define `rewards`.

    Raises:
        ConfigError: there is no such file or class, the file raises an error, the class lacks a required method, or a
            hook of the class is not defined with `async def`.
    """
    module = run_file("recipe.file", file, MODULE)
    found = vars(module).get(name)
    if not (isinstance(found, type) and issubclass(found, Recipe)):
        known = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Recipe) and value is not Recipe
        ]
        raise ConfigError(
            f"recipe.name must be a windlass.jobs.Recipe class in {file.name}, got {name!r}; the file's Recipe classes are {known}"
        )
    plain = [each for each in HOOKS if not inspect.iscoroutinefunction(getattr(found, each))]
    if plain:
        raise ConfigError(
            f"recipe.name must be a class whose methods {plain} begin with `async def`, got {name!r}"
        )
    lacking = sorted(found.__abstractmethods__)
    if found.rewards is Recipe.rewards and not has_rewards:
        lacking.append("rewards")
    if lacking:
        raise ConfigError(
            f"recipe.name must be a class that defines {lacking}, got {name!r}, which does not"
        )
    if evaluates and found.evaluation_tasks is Recipe.evaluation_tasks:
        raise ConfigError(
            f"recipe.name must be a class that defines evaluation_tasks if evaluation.every > 0, got {name!r}, "
            "which does not"
        )
    return found


def load_recipe(
    file: Path, name: str, *, evaluates: bool = False, has_rewards: bool = False
) -> Recipe:
    """Return an instance of the recipe class; see `find_recipe`.

    Raises:
        ConfigError: as in `find_recipe`, or the class cannot be called without arguments.
    """
    kind = find_recipe(file, name, evaluates=evaluates, has_rewards=has_rewards)
    try:
        return kind()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"recipe.name must be a class that can be called without arguments, got {name!r}: "
            f"{raised_at(error, file)}"
        ) from error


def check_recipe(config: LaunchConfig) -> None:
    """Load the recipe's class as `find_recipe` does, and call `Recipe.check` if the class defines it.

    Raises:
        ConfigError: see `load_recipe`, or the recipe refuses the settings.
        WindlassError: `Recipe.check` raised another error.
    """
    file, name = Path(config.recipe.file), config.recipe.name
    limits = {"evaluates": config.evaluation.every > 0, "has_rewards": config.rewards is not None}
    if find_recipe(file, name, **limits).check is not Recipe.check:
        with recipe_code("check"):
            load_recipe(file, name, **limits).check(config)


def check_rewards(config: LaunchConfig) -> None:
    """Run the file of the job's reward function, if it has one; see `import_function`.

    Raises:
        ConfigError: see `import_function`.
    """
    if isinstance(config.rewards, ProcessRewards):
        rewards = with_file(config.rewards, config)
        import_function(Path(rewards.file), rewards.function)


def with_file(rewards: ProcessRewards, config: LaunchConfig) -> ProcessRewards:
    """Return the settings of a job's reward function. If they name no file, the function is in the recipe's file."""
    return msgspec.structs.replace(rewards, file=rewards.file or config.recipe.file)


def rewards_differ(samples: Sequence[TrainingSample]) -> bool:
    """Return whether the samples have at least two different rewards. Equal rewards give no gradient in GRPO."""
    return len({sample.reward for sample in samples}) > 1


def has_position(recipe: Recipe) -> bool:
    """Return whether the recipe keeps its position in its tasks, see `Recipe.state`."""
    return type(recipe).state is not Recipe.state


def has_filters(recipe: Recipe) -> bool:
    """Return whether the recipe has a filter before rewards."""
    kind = type(recipe)
    return kind.accepts is not Recipe.accepts or kind.accepts_group is not Recipe.accepts_group


def refused_by(recipe: Recipe, group: RolloutGroup) -> list[str] | None:
    """Return the ids of the rollouts that the recipe's `accepts` refuses; None if `accepts_group` refuses the group."""
    if not recipe.accepts_group(group):
        return None
    return [each.task_id for each in group.rollouts if not recipe.accepts(each)]


def score(recipe: Recipe, group: RolloutGroup) -> list[TrainingSample]:
    """Return the result of `recipe.samples` for a group; an empty list if `recipe.accepts_scored` refuses the samples.

    May block. Exceptions of the recipe are not converted.

    Raises:
        ConfigError: the recipe returned a value that is not a sequence of `TrainingSample`.
    """
    samples: object = recipe.samples(group)
    if not isinstance(samples, Iterable):
        raise ConfigError(
            f"recipe: samples of group {group.group_id} must be a sequence of TrainingSample, got {samples!r}"
        )
    (found,) = check_groups(f"recipe: samples of group {group.group_id}", [samples])
    return list(found) if found and recipe.accepts_scored(group, found) else []


@final
class CallThread:
    """Daemon thread for user code that must always run in the same thread.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        """Run queued calls until `close`; the body of the thread."""
        while (call := self._calls.get()) is not None:
            call()

    async def call(self, what: str, call: Callable[[], _T]) -> _T:
        """Run `call` in the thread after all earlier calls, and return the result of `call`.

        Args:
            what: name of the code, for the error.
            call: the code.

        Raises:
            WindlassError: `call` raised an exception. A `WindlassError` is raised unchanged. Any other exception is
                converted to an error that names `what`.
        """
        result: Future[_T] = Future()
        # Make the future uncancellable: if the caller is cancelled, the thread still calls `set_result`.
        result.set_running_or_notify_cancel()
        self._calls.put(partial(_run_into, result, contextvars.copy_context(), what, call))
        return await asyncio.wrap_future(result)

    def close(self) -> None:
        """End the thread after all earlier calls. Idempotent."""
        self._calls.put(None)


async def in_thread(what: str, call: Callable[[], _T]) -> _T:
    """Run code of the recipe in a daemon thread. If the code hangs, the process can still exit.

    Args:
        what: name of the code in errors.
        call: the code.

    Raises:
        WindlassError: the code raised an exception. A `WindlassError` is raised unchanged. Any other exception (also
            SystemExit) is converted to an error that names `what`.
    """
    result: Future[_T] = Future()
    # Make the future uncancellable: if the caller is cancelled, the thread still calls `set_result`.
    result.set_running_or_notify_cancel()
    run = partial(_run_into, result, contextvars.copy_context(), what, call)
    threading.Thread(target=run, name="recipe", daemon=True).start()
    return await asyncio.wrap_future(result)


def _run_into(
    result: Future[_T], context: contextvars.Context, what: str, call: Callable[[], _T]
) -> None:
    """Run `call` in `context`, which has the caller's log fields, and store its result or error in the future `result`.

    If `call` raises an exception, store the error that `recipe_error` returns for it.
    """
    try:
        result.set_result(context.run(call))
    except BaseException as error:  # noqa: BLE001 - the boundary of user code
        result.set_exception(recipe_error(what, error))


def recipe_error(what: str, error: BaseException) -> WindlassError:
    """Convert an exception of the recipe to a `WindlassError`. `what` is the name of the recipe's code in the error.

    Return a `WindlassError` unchanged. For every other exception, log the traceback, but only once per
    `TRACEBACK_EVERY_S` for exceptions of one type from one line.
    """
    if isinstance(error, WindlassError):
        return error
    if num_alike := tracebacks.count_error(error):
        more = f" ({num_alike} calls raised in this way)" if num_alike > 1 else ""
        _log.error("recipe: %s raised%s", what, more, exc_info=error)
    text, remedy = text_of(error), ""
    if isinstance(error, ValueError) and "signal only works in main thread" in text:
        remedy = (
            "; the recipe is called in a thread, where signal.alarm cannot be used: give math_verify "
            "parsing_timeout=None and timeout_seconds=None, or use a process"
        )
    return WindlassError(f"recipe: {what} raised {type(error).__name__}: {text}{remedy}")


@contextmanager
def recipe_code(what: str) -> Iterator[None]:
    """Convert any exception that the recipe raises inside the block; a cancellation of the block passes through.

    Raises:
        WindlassError: the recipe raised an exception. A `WindlassError` is raised unchanged. Any other exception is
            converted to an error that names `what`.
    """
    try:
        yield
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        raise recipe_error(what, error) from error


def tasks_of(recipe: Recipe) -> Iterator[tuple[Task, bytes]]:
    """Yield each task of the recipe with the value that `Recipe.state` returns after the task.

    The value is encoded as msgpack; it is empty if `Recipe.state` returns None.

    Raises:
        WindlassError: the recipe raised an exception.
        ConfigError: the recipe yielded a value that is not a `Task`, or msgpack cannot encode the state.
    """
    with recipe_code("tasks"):
        tasks = iter(recipe.tasks())
    for number in itertools.count():
        with recipe_code("tasks"):
            task: object = next(tasks, _END)
        if task is _END:
            return
        if not isinstance(task, Task):
            raise ConfigError(f"recipe: tasks[{number}] must be a Task, got {task!r}")
        with recipe_code("state"):
            state = recipe.state()
        yield task, b"" if state is None else encode_value("recipe: state", state)


def encode_tasks(tasks: Iterable[Task]) -> tuple[bytes, list[ConfigError]]:
    """Encode tasks as msgpack for a checkpoint. Return the bytes, and an error for each task that is left out.

    A task is left out if msgpack cannot encode its arguments or its metadata. There is no limit of size.
    """
    encoded, errors = list[msgspec.Raw](), list[ConfigError]()
    for task in tasks:
        # Do not use `dataclasses.astuple`: it would also change dataclasses inside arguments and metadata to tuples.
        # msgspec encodes them as maps, as in messages to workers.
        fields = [getattr(task, field.name) for field in dataclasses.fields(Task)]
        try:
            # The last field is the prompt.
            fields[-1] = with_plain_images("task: prompt", task.prompt)
            encoded.append(msgspec.Raw(encode_plain("task", fields)))
        except ConfigError as error:
            errors.append(error)
    return msgspec.msgpack.encode(encoded), errors


def _decoded_prompt(prompt: Any) -> str | Sequence[Message] | Chat:
    """Return the prompt of a decoded task. msgpack has decoded a `Chat` as a mapping; other prompts are unchanged."""
    return msgspec.convert(prompt, Chat) if isinstance(prompt, dict) else prompt


def decode_tasks(encoded: bytes) -> list[Task]:
    """Decode the result of `encode_tasks`. Tuples in arguments and metadata become lists."""
    found = msgspec.msgpack.decode(encoded) if encoded else []
    return [
        Task(tuple(prompt_ids), workflow, arguments, metadata, *map(_decoded_prompt, prompt))
        for prompt_ids, workflow, arguments, metadata, *prompt in found
    ]
