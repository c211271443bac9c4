"""Prompts and rewards of the example job. The reward is the share of token 7 in an answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from windlass.jobs import Recipe, Task
from windlass.rollout import RolloutGroup


class CountSevens(Recipe):
    """Recipe with an endless sequence of prompts of three tokens."""

    def tasks(self) -> Iterator[Task]:
        for number in itertools.count():
            yield Task(prompt_ids=(1, 2, number % 60))

    def rewards(self, group: RolloutGroup) -> Sequence[float]:
        return [r.output_ids.count(7) / len(r.output_ids) for r in group.rollouts]
