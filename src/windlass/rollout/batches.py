"""Training batches, from the controller's owner to the trainer ranks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from windlass.errors import ConfigError, PeerTimeout, StaleMessage
from windlass.rollout.handles import RolloutGroup
from windlass.rollout.messages import TrainingBatch, TrainingSample

__all__ = ["BatchQueue", "training_samples"]


def training_samples(group: RolloutGroup, rewards: Sequence[float]) -> tuple[TrainingSample, ...]:
    """A group's samples with their rewards.

    Raises:
        ConfigError: not one reward per sample.
    """
    if len(rewards) != len(group.rollouts):
        raise ConfigError(
            f"group {group.group_id}: rewards must have {len(group.rollouts)} entries, "
            f"got {len(rewards)}"
        )
    return tuple(
        TrainingSample(
            prompt_ids=rollout.prompt_ids,
            output_ids=rollout.output_ids,
            logprobs=rollout.logprobs,
            versions=rollout.versions,
            reward=reward,
            group_id=group.group_id,
            engine=rollout.engine,
        )
        for rollout, reward in zip(group.rollouts, rewards, strict=True)
    )


class BatchQueue:
    """Hands each trainer rank its shard of each step's batch; same question, same answer.

    A group is never split between ranks: rank r of n gets groups r, r + n, r + 2n, ... in
    the order in which they were put.

    Args:
        keep_steps: steps that can still be asked for again; older ones are forgotten when a
            newer one is put.
    """

    def __init__(self, *, keep_steps: int = 2) -> None:
        if keep_steps < 1:
            raise ConfigError(f"BatchQueue: keep_steps must be >= 1, got {keep_steps}")
        self._keep_steps = keep_steps
        self._batches: OrderedDict[int, tuple[tuple[TrainingSample, ...], ...]] = OrderedDict()
        self._world_size: dict[int, int] = {}
        self._last_step = -1
        self._highest_requested = -1
        self._changed = asyncio.Condition()
        self._listeners: list[Callable[[Sequence[TrainingSample]], None]] = []

    def on_put(self, listener: Callable[[Sequence[TrainingSample]], None]) -> None:
        """Call `listener` in the loop with the samples of every batch that is put."""
        self._listeners.append(listener)

    async def put(self, step: int, groups: Iterable[Sequence[TrainingSample]]) -> None:
        """Answer everybody who waits for `step`.

        Raises:
            ConfigError: the step is not above every earlier one, or there is no group.
        """
        batch = tuple(tuple(group) for group in groups)
        if step <= self._last_step:
            raise ConfigError(f"BatchQueue: step must be > {self._last_step}, got {step}")
        if not batch:
            raise ConfigError(f"BatchQueue: step {step} needs at least one group, got none")
        async with self._changed:
            self._batches[step] = batch
            self._last_step = step
            while len(self._batches) > self._keep_steps:
                forgotten, _ = self._batches.popitem(last=False)
                self._world_size.pop(forgotten, None)
            self._changed.notify_all()
        samples = [sample for group in batch for sample in group]
        for listener in self._listeners:
            listener(samples)

    async def requested(self, step: int, *, deadline_s: float) -> None:
        """Return once a rank has asked for `step`.

        An owner that draws the batch only then checks its age when it is really consumed.

        Raises:
            PeerTimeout: no rank asked within `deadline_s`.
        """
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: self._highest_requested >= step)
        except TimeoutError as error:
            newest = "none" if self._highest_requested < 0 else f"step {self._highest_requested}"
            raise PeerTimeout(
                f"batch: no trainer rank asked for step {step} within {deadline_s} s; "
                f"the newest that was asked for: {newest}"
            ) from error

    async def shard(
        self, step: int, rank: int, world_size: int, *, deadline_s: float
    ) -> TrainingBatch:
        """A rank's shard, once the step was put.

        Raises:
            ConfigError: rank outside [0, world_size), or another world size than before.
            StaleMessage: the step was forgotten.
            PeerTimeout: the step was not put within `deadline_s`.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"batch: rank must be in [0, {world_size}), got {rank}")
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                self._highest_requested = max(self._highest_requested, step)
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self._last_step >= step)
        except TimeoutError as error:
            raise PeerTimeout(f"batch: step {step} within {deadline_s} s, got none") from error
        if step not in self._batches:
            raise StaleMessage(f"batch: step must be one of {list(self._batches)}, got {step}")
        agreed = self._world_size.setdefault(step, world_size)
        if agreed != world_size:
            raise ConfigError(
                f"batch: world_size of step {step} must be {agreed}, got {world_size}"
            )
        shard = self._batches[step][rank::world_size]
        return TrainingBatch(step, tuple(sample for group in shard for sample in group))
