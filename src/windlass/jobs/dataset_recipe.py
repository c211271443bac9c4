"""A recipe whose tasks are the rows of a data set."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from windlass.errors import ConfigError
from windlass.jobs.config import LaunchConfig
from windlass.jobs.data import DataSection, Row, load_rows
from windlass.jobs.recipe import Recipe, Task
from windlass.rollout.text import Chat, Message


class DatasetRecipe(Recipe):
    """`Recipe` with a task for each row of the data set of `[data]`, in a new random order in each epoch.

    The metadata of a task is its row, for the reward: `rollout.metadata["answer"]`. The job needs `[rewards]`, or a
    subclass that defines `rewards`. A job that continues from a checkpoint neither repeats nor skips a row.
    """

    _config: LaunchConfig
    _epoch = _index = 0
    _loaded: tuple[int, bool, int] | None = None
    """Epoch within which an earlier job stopped, and its values of `shuffle` and `seed`; None if there is none."""

    def check(self, config: LaunchConfig) -> None:
        """Store the settings, load the data sets, and make a task of each data set's first row.

        A subclass that overrides this method must call `super().check(config)`.

        Raises:
            ConfigError: a data set cannot be read or has no rows, its first row lacks a column, or the job has no tokenizer
                for prompts of text.
        """
        self._config = config
        self._check_row("path", self.rows)
        if not config.evaluation.every:
            return
        if not self.data.evaluation:
            raise ConfigError(
                f"data.evaluation must be given with evaluation.every = {config.evaluation.every}, got ''"
            )
        self._check_row("evaluation", self.evaluation_rows)

    def _check_row(self, key: str, rows: Sequence[Row]) -> None:
        """Check that the first row has all columns that the settings name, and that `task` accepts the row.

        Raises:
            ConfigError: there are no rows, the first row lacks a column, or its prompt needs a tokenizer that the job does
                not have. `task` may raise other errors.
        """
        if not len(rows):
            raise ConfigError(f"data.{key} must have at least one row, got none")
        row = rows[0]
        for column in self.data.columns:
            if column not in row:
                raise ConfigError(
                    f"data.columns must name columns of data.{key}, got {column!r}; the columns are {sorted(row)}"
                )
        task, rollout = self.task(row), self._config.rollout
        has_tokenizer = rollout.tokenizer or "--tokenizer" in rollout.worker_arguments
        if task.prompt and not task.workflow and not has_tokenizer:
            raise ConfigError(
                "rollout.tokenizer must be the folder of the model's tokenizer, because the rows of [data] are text or "
                "messages, got ''"
            )

    @property
    def data(self) -> DataSection:
        """Settings of the data set.

        Raises:
            ConfigError: the job has no table `[data]`.
        """
        if self._config.data is None:
            raise ConfigError("data: the job of a DatasetRecipe must have a table [data], got none")
        return self._config.data

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Rows of the data set. A subclass may replace them, for example to filter or to generate rows.

        Raises:
            ConfigError: the data set cannot be loaded; see `load_rows`.
        """
        return load_rows(self.data.path, name=self.data.name, split=self.data.split)

    @cached_property
    def evaluation_rows(self) -> Sequence[Row]:
        """Rows of evaluations. A subclass may replace them.

        Raises:
            ConfigError: the data set cannot be loaded; see `load_rows`.
        """
        data = self.data
        return load_rows(data.evaluation, name=data.name, split=data.evaluation_split)

    def task(self, row: Row) -> Task:
        """Return the task of a row. A subclass may override it, for example to run a workflow."""
        return Task(prompt=self.prompt(row), metadata=dict(row))

    def prompt(self, row: Row) -> str | Sequence[Message] | Chat:
        """Return the prompt of a row from the column `data.prompt`.

        A list counts as messages; its items are not checked here. With `data.chat`, a text becomes a user's message, after a
        message with `data.system` if there is one.

        Raises:
            ConfigError: the row lacks this column, or the column contains neither a text nor a list with items.
        """
        data = self.data
        value = row.get(data.prompt)
        if isinstance(value, list) and value:
            return tuple(value)
        if not isinstance(value, str):
            raise ConfigError(
                f"data.prompt must name a column that contains text or messages, got {data.prompt!r} with the value {value!r}; "
                f"the columns are {sorted(row)}"
            )
        if not data.chat:
            return value
        user: Message = {"role": "user", "content": value}
        return ({"role": "system", "content": data.system}, user) if data.system else (user,)

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks of the rows from the current position on, epoch by epoch. Each task advances the position.

        Raises:
            ConfigError: `task` refuses a row; the message contains the number of the row.
        """
        data = self.data
        for epoch in itertools.count(self._epoch):
            if data.epochs and epoch >= data.epochs:
                return
            order: Sequence[int] = range(len(self.rows))
            is_shuffled, seed = self._order_of(epoch)
            if is_shuffled:
                order = random.Random(f"{seed}/{epoch}").sample(order, len(order))  # noqa: S311
            for index in range(self._index, len(order)):
                # After the last row of an epoch, the position is the first row of the next epoch.
                is_last = index + 1 == len(order)
                self._epoch, self._index = (epoch + 1, 0) if is_last else (epoch, index + 1)
                yield self._task_of(order[index])

    def _task_of(self, number: int) -> Task:
        """Return the task of a row. If `task` refuses the row, raise ConfigError with the row's number."""
        row = self.rows[number]
        try:
            return self.task(row)
        except ConfigError as error:
            raise ConfigError(f"row {number} of {self.data.path!r} (from 0): {error}") from error

    def _order_of(self, epoch: int) -> tuple[bool, int]:
        """Return the values of `shuffle` and `seed` for an epoch."""
        if self._loaded is not None and self._loaded[0] == epoch:
            return self._loaded[1:]
        return self.data.shuffle, self.data.seed

    def state(self) -> object:
        """Return the position after the newest task, `shuffle` and `seed` of this epoch, and the number of rows."""
        is_shuffled, seed = self._order_of(self._epoch)
        return {
            "epoch": self._epoch,
            "index": self._index,
            "num_rows": len(self.rows),
            "shuffle": is_shuffled,
            "seed": seed,
        }

    def load(self, state: Any) -> None:
        """Set the position; see `Recipe.load`.

        An epoch that has begun keeps its order, even if `data.shuffle` or `data.seed` has changed since. The new values
        apply to the next epoch.

        Raises:
            ConfigError: the data set's number of rows has changed.
        """
        if (num_rows := len(self.rows)) != state["num_rows"]:
            raise ConfigError(
                f"data.path must have the {state['num_rows']} rows that the checkpoint's data set had, got {num_rows}"
            )
        self._epoch, self._index = state["epoch"], state["index"]
        # Checkpoints of earlier releases have no order.
        if self._index and "seed" in state:
            self._loaded = self._epoch, state["shuffle"], state["seed"]

    def evaluation_tasks(self) -> Iterable[Task]:
        """Return the tasks of all rows of evaluations."""
        return [self.task(row) for row in self.evaluation_rows]
