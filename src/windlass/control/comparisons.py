"""Decide which updates compare replicated boxes between trainer ranks, so that comparing takes a fixed share of the time."""

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
        turn: running number of the comparison, see `due_pieces`.
        is_first: whether it is the first of these trainers: it compares all boxes, and its time is not charged.
    """

    turn: int
    is_first: bool


@final
class Comparisons:
    """Account of seconds for comparisons: a published update adds a share of its seconds, a comparison subtracts its own.

    The first update of a group of trainers always compares, without a charge. Each later update compares if the
    balance covers the cheapest comparison of these trainers. So, while updates are published, the account is overdrawn
    by at most the difference between one comparison and the cheapest one.

    A repeated attempt to publish a version compares if the first attempt did. If an update compared and was not
    published, the next update compares at any balance, because the ranks may have had different bytes.

    Args:
        share: share of the time of published updates, in [0, 1]; with 1 all updates compare.
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
        """Decide whether the next round compares; return None if it does not.

        Args:
            version: version that the round publishes.
            sources: identity of the processes that hold the weights.
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
        """Return the boxes to compare in a round (None: no comparison), the turn, and the number of turns for all boxes."""
        replicated = binding.replicated
        if replicated is None:
            return None, 0, 1
        comparison = self.begin(version, binding.identities_of(binding.trainers))
        if comparison is None:
            return None, 0, 1
        period = 1 if comparison.is_first else replicated.period(binding.sent_nbytes)
        return replicated, comparison.turn, period

    def conclude(self, *, compare_s: float, update_s: float, is_published: bool) -> None:
        """Update the balance after the round for which `begin` was called last.

        Args:
            compare_s: seconds of comparison on the slowest rank; 0 without a comparison.
            update_s: seconds of the whole round.
            is_published: whether the round published its version; only then are its seconds credited.
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
            # The first update also connects the ranks, so its seconds would credit too much.
            self._balance_s += self._share * update_s
        self._version = -1
        if compared is not None:
            self._has_compared = True
            self._turn += 1
