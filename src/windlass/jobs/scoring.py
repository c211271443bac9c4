"""Score groups in threads as soon as they are complete, and collect the groups of a training step."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import final

import msgspec

from windlass.errors import PeerTimeout, RolloutError, TrainerError
from windlass.jobs.config import RolloutSection
from windlass.jobs.recipe import Recipe, has_filters, in_thread, refused_by, score
from windlass.rollout.controller import RolloutController
from windlass.rollout.handles import GroupHandle, Rollout, RolloutGroup
from windlass.rollout.held import INLINE_NBYTES, held_of, is_large
from windlass.rollout.messages import TrainingSample
from windlass.rollout.rewards import RewardError, Scorer
from windlass.wording import counted

_log = logging.getLogger(__name__)
LOST = "the worker no longer has the tensors"
"""Reason for which rollouts with lost tensors are replaced."""
MIN_ALIKE = 8
"""Smallest number of rollouts that must fail in a row before a job fails. If a step has more than 4 groups, the number is
twice the groups of a step."""
MIN_SCORED = 64
"""Smallest number of scored rollouts from which the job computes the share of failed rewards. The number is twice the
rollouts of a step if that is more."""
MAX_REPLACED = 1024
"""If rollouts of a group are replaced, the job keeps the rewards of the group's other rollouts. It keeps them for this many
groups; in older groups, it scores these rollouts again."""

TakeTensors = Callable[[Sequence[Sequence[TrainingSample]]], Awaitable[frozenset[str]]]
"""Async function that lets trainer ranks fetch tensors, and returns the keys of lost tensors."""


@final
class Scoring:
    """Groups that the recipe scores as soon as they are complete, and their samples until a step takes them.

    A complete group stays in `rollouts` until a step takes it. If the group becomes too old before that, its samples
    are dropped.

    Args:
        rollouts: controller of the rollouts.
        recipe: recipe that scores groups, several at a time, each in a thread.
        config: settings with the number of groups per step and the deadlines.
        scorer: object that gives each rollout its `Rollout.reward` before the recipe makes samples; None for none. A
            rollout that it cannot score is replaced, and the rest of its group stays.
        declined: function that is called with the id of each group that the recipe declines.
        keeps_groups: whether groups that a step has taken are kept until `forget_taken`, so that `return_groups` can give
            them to steps again.
        take_tensors: async function that lets the trainer ranks fetch the large tensors of a step's groups, see
            `TrainController.take_tensors`. The groups are taken only if no tensor is lost.
        describe_tasks: function that returns a text if the job waits for the recipe's tasks; otherwise empty.
    """

    def __init__(
        self,
        rollouts: RolloutController,
        recipe: Recipe,
        config: RolloutSection,
        scorer: Scorer | None = None,
        declined: Callable[[int], None] = lambda _: None,
        describe_tasks: Callable[[], str] = lambda: "",
        take_tensors: TakeTensors | None = None,
        *,
        keeps_groups: bool = False,
    ) -> None:
        self._take_tensors = take_tensors
        self._declined, self._describe_tasks = declined, describe_tasks
        self._rollouts, self._recipe, self._config = rollouts, recipe, config
        self._scorer, self._num_scores = scorer, 0
        self._window = max(MIN_SCORED, 2 * config.groups_per_step * config.samples_per_group)
        self._first_failed: deque[bool] = deque(maxlen=self._window)
        """Whether the first score of each of the newest rollouts failed. Later scores do not count: a rollout that can
        never be scored has many of them."""
        self._scores: dict[int, asyncio.Future[list[TrainingSample]]] = {}
        self._keeps_groups = keeps_groups
        self._taken: dict[int, list[TrainingSample]] = {}
        """Group id -> samples of groups that steps have taken, without groups with large tensors."""
        self._rewards: OrderedDict[int, dict[tuple[str, int], float]] = OrderedDict()
        """Group id -> rewards of (task id, number of the answer), for groups that wait for replaced rollouts."""
        self._slots = asyncio.Semaphore(config.rewards_at_once)
        self._changed = asyncio.Event()
        rollouts.on_change(self._on_rollouts)

    def close(self) -> None:
        """Stop waiting for every score. If the recipe is still scoring in a thread, that thread runs on. Idempotent."""
        for scoring in self._scores.values():
            scoring.cancel()

    def describe(self) -> str:
        """Return a text with numbers of groups (needed by a step, scored, being scored), and the counts of rollouts."""
        num_scored = sum(scoring.done() for scoring in self._scores.values())
        said = (
            f"{self._config.groups_per_step} groups; scored: {num_scored}, "
            f"being scored: {len(self._scores) - num_scored}; {self._rollouts.describe()}"
        )
        return "; ".join(filter(None, (said, self._describe_tasks())))

    async def next_batch(
        self, producer: asyncio.Task[None]
    ) -> dict[int, list[TrainingSample]] | None:
        """Return the samples of the groups of one step by group id, or None if too few tasks are left for a step.

        If the recipe returns no samples for a group, the group is declined, and the step waits for a different group.
        `batch_deadline_s` limits the wait for enough complete groups, and separately the scoring of each group.

        Args:
            producer: asyncio task that submits the recipe's tasks, and ends after the last task.

        Raises:
            PeerTimeout: there were not enough groups, or a group was not scored, within `batch_deadline_s`.
            RolloutError: too many rollouts failed in a row (see `MIN_ALIKE`), the reward failed for a larger share of
                rollouts than `max_failed_rewards`, or the journal of rollouts cannot be written.
            TrainerError: the ranks could not fetch the tensors of the groups. The rollout controller keeps the groups.
            WindlassError: the recipe raised an exception in `tasks`, or while it scored a group.
        """
        num_groups, left_s = self._config.groups_per_step, self._config.batch_deadline_s
        loop = asyncio.get_running_loop()
        producer.add_done_callback(self._note_change)
        try:
            while True:
                self._changed.clear()
                self._look()
                scored = self._scored()
                if len(scored) >= num_groups:
                    found = {group_id: self._scores[group_id] for group_id in scored[:num_groups]}
                    if not await self._have_tensors(found):
                        continue
                    return self._take(found)
                self._check_failures()
                is_short = len(self._scores) < num_groups
                if producer.done():
                    producer.result()
                    if self._rollouts.num_open_groups() < num_groups:
                        return None
                began_s = loop.time()
                try:
                    async with asyncio.timeout(max(left_s, 0.0) if is_short else None):
                        await self._changed.wait()
                except TimeoutError:
                    raise PeerTimeout(
                        f"rollout.batch_deadline_s: no batch within {self._config.batch_deadline_s:g} s; "
                        f"a batch needs {self.describe()}"
                    ) from None
                left_s -= loop.time() - began_s if is_short else 0.0
        finally:
            producer.remove_done_callback(self._note_change)

    def _take(self, group_ids: Collection[int]) -> dict[int, list[TrainingSample]]:
        """Take scored groups from the rollout controller, and return their samples by group id."""
        self._rollouts.take(group_ids, keep=self._keeps_groups)
        batch = {group_id: self._scores.pop(group_id).result() for group_id in group_ids}
        if self._keeps_groups:
            self._taken.update({g: found for g, found in batch.items() if not _are_large(found)})
        return batch

    def forget_taken(self, group_ids: Iterable[int]) -> None:
        """Forget the samples of taken groups, because a checkpoint contains the steps that have taken them."""
        for group_id in group_ids:
            self._taken.pop(group_id, None)

    def return_groups(self) -> tuple[GroupHandle, ...]:
        """Return the groups that were trained after the newest checkpoint. The next steps train on them in the same order.

        Each group keeps its samples, except a group with large tensors. The job does not keep such tensors, so the
        answers of this group are generated and scored again.

        Returns:
            New handles of the groups, see `RolloutController.return_groups`.

        Raises:
            RolloutError: the journal of rollouts cannot be written.
        """
        handles = self._rollouts.return_groups()
        for handle in handles:
            if (samples := self._taken.get(handle.group_id)) is not None:
                known = self._scores[handle.group_id] = asyncio.get_running_loop().create_future()
                known.set_result(samples)
        self._taken.clear()
        self._changed.set()
        return handles

    async def _have_tensors(
        self, found: Mapping[int, asyncio.Future[list[TrainingSample]]]
    ) -> bool:
        """Let the ranks fetch the large tensors of scored groups. Return whether the step can take these groups now.

        A step has not taken the groups yet, so an answer whose tensor is lost can still be replaced. If the worker that
        held the tensor has ended, the rollout controller replaces the answer. For all other lost tensors, this method
        replaces the answers.

        Raises:
            TrainerError: see `TrainController.take_tensors`; or a tensor that the recipe made is lost.
        """
        if self._take_tensors is None:
            return True
        lost = await self._take_tensors([scores.result() for scores in found.values()])
        # Groups may have become too old or lost a rollout while the ranks fetched the tensors.
        self._look()
        present = [group_id for group_id in found if self._scores.get(group_id) is found[group_id]]
        if not lost:
            return len(present) == len(found)
        num_replaced = 0
        for group_id in present:
            reasons = {
                rollout.task_id: LOST
                for rollout in self._rollouts.peek(group_id).rollouts
                if any(held.key in lost for held in held_of(rollout.tensors))
            }
            num_replaced += len(reasons)
            if reasons:
                _log.warning(
                    "group %d: the job generates %s again, because %s",
                    *(group_id, counted(len(reasons), "answer"), LOST),
                )
                self._replace(group_id, reasons)
        if len(present) == len(found) and not num_replaced:
            raise TrainerError(
                f"tensors: {counted(len(lost), 'tensor')} that the recipe made did not reach the ranks"
            )
        return False

    def _note_change(self, _: object = None) -> None:
        """Wake `next_batch`, because a score or the submission of tasks has ended."""
        self._changed.set()

    def _on_rollouts(self) -> None:
        """Score new complete groups, and wake `next_batch`. The rollout controller calls this after a change."""
        self._look()
        self._changed.set()

    def _look(self) -> None:
        """Start to score groups that have become complete. Stop the scoring of groups that are no longer ready."""
        ready = self._rollouts.ready_ids()
        for group_id in [known for known in self._scores if known not in ready]:
            self._scores.pop(group_id).cancel()
        for group_id in ready:
            if group_id not in self._scores:
                group = self._rollouts.peek(group_id)
                scoring = asyncio.create_task(self._score(group), name=f"score-{group_id}")
                scoring.add_done_callback(self._note_change)
                self._scores[group_id] = scoring

    def _scored(self) -> list[int]:
        """Return the ids of the scored groups that have samples, in the order in which their rollouts became complete.

        Decline groups without samples. Raise the error of a group that could not be scored.
        """
        found = []
        for group_id in self._rollouts.ready_ids():
            scoring = self._scores[group_id]
            if not scoring.done():
                continue
            if scoring.result():
                found.append(group_id)
                continue
            del self._scores[group_id]
            (group,) = self._rollouts.take([group_id])
            self._rollouts.decline(group)
            self._declined(group_id)
        return found

    def _check_failures(self) -> None:
        """Raise `RolloutError` if too many rollouts failed in a row, or too many rewards failed; see `next_batch`."""
        num_alike = self._rollouts.failed_alike
        if num_alike >= max(MIN_ALIKE, 2 * self._config.groups_per_step):
            raise RolloutError(
                f"{num_alike} rollouts in a row failed without a retry, with no accepted rollout in between; "
                f"{self._rollouts.describe()}"
            )
        if self._scorer is None or self._num_scores < self._window:
            return
        num_failed, num_first = sum(self._first_failed), len(self._first_failed)
        most = self._config.max_failed_rewards
        if num_failed > most * num_first:
            raise RolloutError(
                f"rewards: {self._scorer.name} failed for {num_failed} of the last {num_first} rollouts "
                f"({num_failed / num_first:.0%}), more than rollout.max_failed_rewards = {most:g} allows; newest failure: "
                f"{self._scorer.counts.newest_failure}"
            )

    async def _score(self, group: RolloutGroup) -> list[TrainingSample]:
        """Return the samples of a group; an empty list if the recipe refuses the group, or if rollouts are replaced.

        Raises:
            PeerTimeout: the recipe did not score the group within `batch_deadline_s`.
            WindlassError: the recipe raised an exception.
        """
        deadline_s = self._config.batch_deadline_s
        async with self._slots:
            usable = await self._usable(group)
            rewarded = None if usable is None else await self._rewarded(usable)
            if rewarded is None:
                return []
            try:
                async with asyncio.timeout(deadline_s):
                    what = f"samples or rewards of group {group.group_id}"
                    return await in_thread(what, partial(score, self._recipe, rewarded))
            except TimeoutError as error:
                raise PeerTimeout(
                    f"recipe: group {group.group_id} was not scored within {deadline_s:g} s"
                ) from error

    async def _usable(self, group: RolloutGroup) -> RolloutGroup | None:
        """Return the group if the recipe's `accepts_group` and `accepts` accept it and all its rollouts; else None.

        If `accepts_group` refuses the group, `_scored` declines the group later. If `accepts` refuses rollouts, replace
        them; the group is scored again when it is complete.
        """
        if not has_filters(self._recipe):
            return group
        what = f"accepts_group or accepts of group {group.group_id}"
        refused = await in_thread(what, partial(refused_by, self._recipe, group))
        if refused is None:
            return None
        if refused:
            self._replace(group.group_id, dict.fromkeys(refused, "not accepted by the recipe"))
            return None
        return group

    def _replace(self, group_id: int, reasons: Mapping[str, str]) -> None:
        """Forget the score of a group, and generate other answers in place of some of its rollouts.

        Args:
            group_id: group that is being scored.
            reasons: rollout id -> why its answer is replaced.
        """
        # Remove the scoring task: its result will be an empty list, and `_scored` would then decline the group.
        self._scores.pop(group_id, None)
        # The group may have become too old a moment ago, and `_look` has not run since then.
        if group_id in self._rollouts.ready_ids():
            self._rollouts.replace(reasons)

    async def _rewarded(self, group: RolloutGroup) -> RolloutGroup | None:
        """Return the group with the rewards of the scorer; None if rollouts could not be scored and are replaced."""
        if self._scorer is None:
            return group
        # Count failures only when a group is scored for the first time. Later scores belong to answers that replace
        # answers without a reward.
        is_first = group.group_id not in self._rewards
        known = self._rewards.pop(group.group_id, {})
        unscored = [each for each in group.rollouts if _answer(each) not in known]
        failed: dict[str, str] = {}
        for rollout, reward in zip(unscored, await self._scorer.score(unscored), strict=True):
            self._num_scores += 1
            if is_first:
                self._first_failed.append(isinstance(reward, RewardError))
            if isinstance(reward, RewardError):
                failed[rollout.task_id] = str(reward)
            else:
                known[_answer(rollout)] = reward
        if failed:
            self._rewards[group.group_id] = known
            if len(self._rewards) > MAX_REPLACED:
                self._rewards.popitem(last=False)
            self._replace(group.group_id, failed)
            return None
        rollouts = tuple(
            msgspec.structs.replace(each, reward=known[_answer(each)]) for each in group.rollouts
        )
        return msgspec.structs.replace(group, rollouts=rollouts)


def _are_large(samples: Sequence[TrainingSample]) -> bool:
    """Return whether a tensor of the samples is held by another process, or is too large for messages."""
    tensors = [tensor for sample in samples for tensor in sample.tensors.values()]
    return any(each.held is not None or is_large(each, INLINE_NBYTES) for each in tensors)


def _answer(rollout: Rollout) -> tuple[str, int]:
    """Return the identity of an answer: a replaced answer has the same task id and another number of attempts."""
    return rollout.task_id, rollout.attempts
