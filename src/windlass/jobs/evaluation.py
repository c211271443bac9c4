"""Evaluations of a launched job: rollouts with the weights of one version, in addition to rollouts for training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from windlass.controller import Controller
from windlass.errors import ConfigError, RolloutError, WindlassError
from windlass.jobs.config import LaunchConfig
from windlass.jobs.recipe import Recipe, Task, in_thread, recipe_code
from windlass.rollout.handles import Rollout, RolloutGroup
from windlass.rollout.rewards import RewardError, Scorer
from windlass.rollout.values import plain_number


async def evaluate(
    controller: Controller,
    recipe: Recipe,
    config: LaunchConfig,
    version: int,
    scorer: Scorer | None = None,
) -> dict[str, float]:
    """Generate answers to the recipe's evaluation tasks, and return the recipe's metrics of these answers.

    The caller must not start an update before this function returns.

    Args:
        controller: controller of the job.
        recipe: recipe of the job.
        config: configuration of the job.
        version: version that the engines serve.
        scorer: object that scores the answers; None if the recipe scores them. Answers that the scorer cannot score are
            left out, and the metric `unscored` counts them.

    Raises:
        ConfigError: the recipe returned no tasks, a value that is not a `Task`, or metrics that are not finite numbers.
        PeerTimeout: the answers were not complete within `evaluation.deadline_s`.
        RolloutError: a rollout failed, or no answer could be scored.
        WindlassError: the recipe raised an exception, or an answer has tokens of another version.
    """
    settings = config.evaluation
    tasks = await in_thread("evaluation_tasks", lambda: _checked_tasks(recipe))
    with recipe_code("workflows"):
        workflows = recipe.workflows()
    sampling = settings.sampling_of(config.rollout.sampling)
    async with controller.evaluation(
        workflows,
        max_concurrent=settings.max_concurrent,
        tokenizer=config.rollout.tokenizer,
    ) as evaluation:
        handles = []
        for task in tasks:
            if unknown := evaluation.refusal(task.workflow):
                raise ConfigError(f"recipe: evaluation_tasks: {unknown}")
            submit = (
                partial(evaluation.submit_workflow, task.workflow, task.arguments)
                if task.workflow
                else partial(evaluation.submit, task.prompt or task.prompt_ids)
            )
            handles += [
                submit(sampling, metadata=task.metadata) for _ in range(settings.samples_per_task)
            ]
        rollouts = await evaluation.wait(handles, deadline_s=settings.deadline_s)
    for rollout in rollouts:
        _check_version(rollout, version)
    size = settings.samples_per_task
    groups = [
        RolloutGroup(
            number,
            rollouts[number * size].prompt_ids,
            rollouts[number * size : (number + 1) * size],
            task.metadata,
        )
        for number, task in enumerate(tasks)
    ]
    num_unscored = 0
    if scorer is not None:
        groups = [await with_rewards(scorer, group) for group in groups]
        num_unscored = len(rollouts) - sum(len(group.rollouts) for group in groups)
        if num_unscored == len(rollouts):
            raise RolloutError(
                f"evaluation of version {version}: no answer could be scored; newest failure: "
                f"{scorer.counts.newest_failure}"
            )
    found = await in_thread(
        "evaluation_metrics", lambda: _checked_metrics(recipe.evaluation_metrics(groups))
    )
    return {**found, "unscored": float(num_unscored)} if num_unscored else found


async def with_rewards(scorer: Scorer, group: RolloutGroup) -> RolloutGroup:
    """Score the rollouts of a group. Return the group with rewards; leave out rollouts that could not be scored."""
    rewards = await scorer.score(group.rollouts)
    scored = tuple(
        msgspec.structs.replace(rollout, reward=reward)
        for rollout, reward in zip(group.rollouts, rewards, strict=True)
        if not isinstance(reward, RewardError)
    )
    return msgspec.structs.replace(group, rollouts=scored)


def _checked_tasks(recipe: Recipe) -> list[Task]:
    """Return the recipe's evaluation tasks. Raise `ConfigError` if there are none, or if a value is not a `Task`."""
    tasks: list[Any] = list(recipe.evaluation_tasks())
    if not tasks:
        raise ConfigError("recipe: evaluation_tasks must return at least one Task, got none")
    for number, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise ConfigError(f"recipe: evaluation_tasks[{number}] must be a Task, got {task!r}")
    return tasks


def _check_version(rollout: Rollout, version: int) -> None:
    """Raise `WindlassError` if an answer has tokens of another version."""
    if others := {*rollout.versions} - {version}:
        raise WindlassError(
            f"evaluation of version {version}: all tokens must be of this version, got tokens of {sorted(others)} "
            f"from engine {rollout.engine}"
        )


def _checked_metrics(metrics: object) -> dict[str, float]:
    """Return metrics as Python floats by name; raise `ConfigError` if they are not a mapping to finite numbers."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"recipe: evaluation_metrics must return a mapping of names to numbers, got {metrics!r}"
        )
    return {
        str(name): plain_number(f"recipe: evaluation_metrics: metric {name!r}", value)
        for name, value in metrics.items()
    }
