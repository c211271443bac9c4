"""Trajectories: the engine calls of one conversation as one sequence of tokens, without tokenising text again.

A call continues an earlier trajectory if its prompt begins with all tokens of the trajectory (prompt and output) and with all
its images: equal tokens can stand for other images. Tokens
between both calls (an answer of a tool, tokens of a chat template) become output tokens that are not trained. Any other
call begins a branch, which is a new trajectory; its `prompt_ids` contain the tokens shared with an earlier trajectory. So
each generated token is an output token of exactly one trajectory, and no token is trained twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from windlass.rollout.messages import Turn, TurnIncrement

MAX_COMPARED = 16
"""If a turn does not continue the previous turn, `increments` compares it with this many of the newest turns."""
INSERTED_VERSION, INSERTED_LOGPROB = -1, 0.0
"""Version and log-probability of an output token that the model did not generate."""


class Trajectory(msgspec.Struct, frozen=True):
    """Tokens of consecutive engine calls: `prompt_ids`, then `output_ids`.

    Attributes:
        prompt_ids: prompt of the first call.
        output_ids: all tokens after `prompt_ids`.
        logprobs, versions, loss_mask: one entry per output token. `loss_mask` is True for a generated token. An inserted
            token has False, version -1 and log-probability 0.0.
        finish_reason: the engine's reason for the end of the last call.
        parent: index of the trajectory that shares the most tokens with the beginning of `prompt_ids`; -1 if no
            earlier trajectory shares any.
        num_shared: number of these shared tokens. 0 if the first images differ, because equal tokens stand for other images.
        images: keys of the sets of images in all tokens, in order; see `Turn`.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    finish_reason: str
    parent: int = -1
    num_shared: int = 0
    images: tuple[str, ...] = ()


def merge_turns(turns: Iterable[Turn]) -> tuple[Trajectory, ...]:
    """Merge the engine calls of one attempt into trajectories, in the order of their first calls.

    If a call could continue several trajectories, it continues the longest of them. A call without generated tokens
    is ignored.

    Args:
        turns: engine calls, in the order in which they ended.
    """
    growing: list[_Growing] = []
    for turn in turns:
        if not turn.output.output_ids:
            continue
        prompt = turn.prompt_ids
        continued = [
            each
            for each in growing
            if turn.images[: len(each.images)] == each.images
            and _begins_with(prompt, each.complete)
        ]
        if continued:
            max(continued, key=lambda each: len(each.complete)).add(turn)
            continue
        shared = [
            0 if _differ(turn.images, each.images) else _num_shared(prompt, each.complete)
            for each in growing
        ]
        most = max(shared, default=0)
        growing.append(_Growing(turn, shared.index(most) if most else -1, most))
    return tuple(each.trajectory() for each in growing)


def increments(turns: Sequence[Turn]) -> tuple[TurnIncrement, ...]:
    """Return the turns without the tokens that they share with earlier turns. `whole_turns` is the inverse."""
    found: list[TurnIncrement] = []
    complete: list[tuple[int, ...]] = []
    for turn in turns:
        earlier, num_shared = -1, 0
        if complete and complete[-1] and _begins_with(turn.prompt_ids, complete[-1]):
            earlier, num_shared = len(complete) - 1, len(complete[-1])
        else:
            for index in range(max(0, len(complete) - MAX_COMPARED), len(complete)):
                if (shared := _num_shared(turn.prompt_ids, complete[index])) > num_shared:
                    earlier, num_shared = index, shared
        added = turn.prompt_ids[num_shared:]
        complete.append(turn.prompt_ids + turn.output.output_ids)
        found.append(
            TurnIncrement(
                *(added, turn.output, turn.finish_reason, turn.text, earlier, num_shared),
                images=turn.images,
            )
        )
    return tuple(found)


def whole_turns(found: Iterable[TurnIncrement]) -> tuple[Turn, ...]:
    """Return the turns of an outcome with their whole prompts; the inverse of `increments`."""
    turns: list[Turn] = []
    for each in found:
        prompt_ids = each.prompt_ids
        if each.num_shared:
            before = turns[each.earlier]
            whole = before.prompt_ids + before.output.output_ids
            prompt_ids = whole[: each.num_shared] + prompt_ids
        turns.append(Turn(prompt_ids, each.output, each.finish_reason, each.text, each.images))
    return tuple(turns)


class _Growing:
    """Trajectory to which calls are added."""

    def __init__(self, first: Turn, parent: int, num_shared: int) -> None:
        self.complete = self._prompt_ids = first.prompt_ids
        self._parent, self._num_shared = parent, num_shared
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._mask: list[bool] = []
        self.images: tuple[str, ...] = ()
        self.add(first)

    def add(self, turn: Turn) -> None:
        """Append the new tokens of a turn's prompt and its generated tokens. Store the turn's finish reason."""
        num_inserted = len(turn.prompt_ids) - len(self.complete)
        output = turn.output
        self._logprobs += [INSERTED_LOGPROB] * num_inserted + [*output.logprobs]
        self._versions += [INSERTED_VERSION] * num_inserted + [*output.versions]
        self._mask += [False] * num_inserted + [True] * len(output.output_ids)
        self.complete = turn.prompt_ids + output.output_ids
        self._finish_reason, self.images = turn.finish_reason, turn.images

    def trajectory(self) -> Trajectory:
        """Return the trajectory of all calls until now."""
        return Trajectory(
            prompt_ids=self._prompt_ids,
            output_ids=self.complete[len(self._prompt_ids) :],
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            loss_mask=tuple(self._mask),
            finish_reason=self._finish_reason,
            parent=self._parent,
            num_shared=self._num_shared,
            images=self.images,
        )


def _begins_with(tokens: tuple[int, ...], first: tuple[int, ...]) -> bool:
    """Return whether `tokens` begins with all of `first`, which must not be empty."""
    # Compare the last token first: it usually differs, and a slice would copy all tokens.
    length = len(first)
    return len(tokens) >= length and tokens[length - 1] == first[-1] and tokens[:length] == first


def _differ(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether two lists of images differ at a place that both have."""
    return any(a != b for a, b in zip(one, other, strict=False))


def _num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the longest common prefix.

    Compare slices in a bisection, which is faster in Python than a loop over the tokens.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
