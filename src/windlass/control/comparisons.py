"""Decides which updates compare replicated boxes between trainer ranks.

Several trainer ranks may hold the same box. A comparison detects that their bytes differ. It costs time, so the
comparisons together may use only a fixed share of the update time (`ControlConfig.compare_share`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import final

from windlass.control.binding import Binding
from windlass.planning.replicated import Replicated


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison in one update.

    Attributes:
        turn: number of earlier comparisons in published updates; it selects the pieces to compare, see `due_pieces`.
        is_first: whether it is the first comparison of these trainer processes. The first comparison covers all boxes.
    """

    turn: int
    is_first: bool


@final
class Comparisons:
    """Time budget for comparisons, in seconds.

    A published update adds `share` times its duration to the balance. A comparison subtracts its own duration. An
    update compares if one of these conditions is true:

    - It is the first update of these trainer processes. The first update does not change the balance.
    - The balance is at least the duration of the shortest comparison of these processes.
    - The previous update compared and was not published. Its ranks may have had different bytes.
    - `share` is 1.

    A repeated attempt to publish the same version compares if the first attempt compared.

    Args:
        share: share of the time of published updates that comparisons may take, in [0, 1].
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._sources: Hashable = None
        self._has_compared = False
        self._turn = 0
        self._balance_s, self._cheapest_s = 0.0, inf
        self._must_repeat = False
        self._version = -1
        self._decided: Comparison | None = None

    def begin(self, version: int, sources: Hashable) -> Comparison | None:
        """Decide whether the next round compares replicated boxes. Return the comparison; None to compare nothing.

        Args:
            version: version that the round publishes.
            sources: processes of the trainer ranks. A change of `sources` resets the time budget of the comparisons.
        """
        if sources != self._sources:
            self._sources, self._has_compared, self._must_repeat = sources, False, False
            self._balance_s, self._cheapest_s = 0.0, inf
        elif version == self._version:
            return self._decided
        self._version = version
        is_first = not self._has_compared
        needed_s = 0.0 if self._cheapest_s == inf else self._cheapest_s
        is_due = is_first or self._must_repeat or self._balance_s >= needed_s
        if is_due or self._share == 1:
            self._decided = Comparison(self._turn, is_first)
        else:
            self._decided = None
        return self._decided

    def of_round(self, version: int, binding: Binding) -> tuple[Replicated | None, int, int]:
        """Return the replicated boxes to compare, and two numbers that select pieces of the boxes.

        The numbers are the arguments `turn` and `period` of `due_pieces`.

        The boxes are None if the round compares nothing: the ranks hold no replicated box, or the time budget allows no
        comparison.
        """
        replicated = binding.replicated
        if replicated is None:
            return None, 0, 1
        comparison = self.begin(version, binding.identities_of(binding.trainers))
        if comparison is None:
            return None, 0, 1
        period = 1 if comparison.is_first else replicated.period(binding.sent_nbytes)
        return replicated, comparison.turn, period

    def conclude(self, *, compare_s: float, update_s: float, is_published: bool) -> None:
        """Update the time budget of the comparisons after a round. Call `begin` before the round.

        Args:
            compare_s: seconds that the slowest rank needed for the comparison; 0 without a comparison.
            update_s: seconds of the whole round.
            is_published: whether the round published its version. If not, the round adds nothing to the budget.
        """
        compared = self._decided
        if compared is not None and not compared.is_first:
            self._balance_s -= compare_s
            self._cheapest_s = min(self._cheapest_s, compare_s)
        if compared is not None:
            self._must_repeat = not is_published
        if not is_published:
            return
        if compared is None or not compared.is_first:
            # The first update also connects the ranks, so its duration is not typical.
            self._balance_s += self._share * update_s
        self._version = -1
        if compared is not None:
            self._has_compared = True
            self._turn += 1
