"""What the example job asks, and how it scores answers: how often token 7 appears."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from windlass.jobs import Recipe, Task
from windlass.rollout import RolloutGroup


class CountSevens(Recipe):
    """Prompts of three tokens, for ever."""

    def tasks(self) -> Iterator[Task]:
        for number in itertools.count():
            yield Task(prompt_ids=(1, 2, number % 60))

    def rewards(self, group: RolloutGroup) -> Sequence[float]:
        return [r.output_ids.count(7) / len(r.output_ids) for r in group.rollouts]
