"""The user's part of a launched job that runs in the controller's process."""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from windlass.controller import Controller
from windlass.errors import ConfigError
from windlass.jobs.config import LaunchConfig
from windlass.jobs.schedulers.base import Scheduler
from windlass.rollout.batches import training_samples
from windlass.rollout.handles import RolloutGroup
from windlass.rollout.messages import TrainingSample
from windlass.rollout.workflows import Workflow

_T = TypeVar("_T")
MODULE = "windlass_launched_recipe"


@dataclass(frozen=True, slots=True)
class Task:
    """One group to draw: samples of a prompt, or runs of a workflow.

    Attributes:
        prompt_ids: of a plain prompt. workflow: name; empty for a plain prompt.
        arguments: of the workflow. metadata: given back with the group.
    """

    prompt_ids: tuple[int, ...] = ()
    workflow: str = ""
    arguments: object = None
    metadata: object = None


class Recipe(ABC):
    """What is asked and how it is scored. Called from the controller's loop and one thread at a time."""

    @abstractmethod
    def tasks(self) -> Iterator[Task]:
        """Tasks, drawn as fast as the staleness bound admits them; the end ends the job."""

    @abstractmethod
    def rewards(self, group: RolloutGroup) -> Sequence[float]:
        """One per answer of a finished group. Runs in a thread, so it may take its time."""

    def samples(self, group: RolloutGroup) -> Sequence[TrainingSample]:
        """What the trainers get of a group; one sample per answer unless overridden.

        Nothing declines the group (all rewards are equal, say): another one takes its place.
        """
        return training_samples(group, self.rewards(group))

    def started(  # noqa: B027 - overriding it is a choice
        self, config: LaunchConfig, controller: Controller, scheduler: Scheduler
    ) -> None:
        """Look at the job, in the controller's loop: `controller` serves, and no process is started yet."""

    async def before_step(  # noqa: B027 - as above
        self, step: int, samples: Sequence[TrainingSample]
    ) -> None:
        """See what step `step`, from 0, trains on; it begins when this returns. In the controller's loop."""

    def workflows(self) -> Mapping[str, Workflow]:
        """Workflows that the controller's loop runs when there are no worker processes."""
        return {}


def find_recipe(file: Path, name: str) -> type[Recipe]:
    """Run the user's file and return its `Recipe` class of this name; modules next to the file can be imported.

    Raises:
        ConfigError: there is no such file or class, the file cannot be run, or the class lacks a method.
    """
    spec = importlib.util.spec_from_file_location(MODULE, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"recipe.file must be a Python file, got {str(file)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses look their own module up
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        # As for a script that Python is started with.
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"recipe.file must be a file that Python can run, got {str(file)!r}: "
            f"{raised_at(error, file)}"
        ) from error
    found = vars(module).get(name)
    if not (isinstance(found, type) and issubclass(found, Recipe)):
        known = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Recipe) and value is not Recipe
        ]
        raise ConfigError(
            f"recipe.name must be a windlass.jobs.Recipe class of {file.name}, which has {known}, got {name!r}"
        )
    if lacking := sorted(found.__abstractmethods__):
        raise ConfigError(f"recipe.name must be a class with {lacking}, got {name!r} without")
    return found


def load_recipe(file: Path, name: str) -> Recipe:
    """Return an instance of the recipe class; see `find_recipe`.

    Raises:
        ConfigError: as `find_recipe`; or the class cannot be made without arguments.
    """
    kind = find_recipe(file, name)
    try:
        return kind()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"recipe.name must be a class that is made without arguments, got {name!r}: "
            f"{raised_at(error, file)}"
        ) from error


def raised_at(error: BaseException, file: Path) -> str:
    """Return an exception's type and text, after the line of the user's file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"


async def in_thread(call: Callable[[], _T]) -> _T:
    """Run user code in a thread that ends with the process: code that hangs must not keep it."""
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()  # whoever waits may give up; the thread goes on
    context = contextvars.copy_context()  # the fields of log lines

    def run() -> None:
        try:
            result.set_result(context.run(call))
        # The boundary of user code: whatever it raises belongs to whoever waits.
        except Exception as error:  # noqa: BLE001
            result.set_exception(error)

    threading.Thread(target=run, name="recipe", daemon=True).start()
    return await asyncio.wrap_future(result)
