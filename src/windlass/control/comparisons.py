"""Which updates compare what trainer ranks hold in common, so that it costs a bounded share of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import final

from windlass.control.binding import Binding
from windlass.planning.replicated import Replicated


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one update compares.

    Attributes:
        turn: counts comparisons, see `due_pieces`.
        is_first: everything is compared, and nobody is charged for it.
    """

    turn: int
    is_first: bool


@final
class Comparisons:
    """Keeps account: seconds used for comparing against a share of the seconds that updates take.

    The first comparison of a group of trainers takes place in any case, and is not charged. After it an
    update compares if the account holds what the cheapest comparison cost so far. So while updates are
    published, what was used exceeds the share by no more than one comparison cost more than that.

    An attempt to publish a version again does what the attempt before did; a comparison in an update that
    was not published (ranks may have disagreed) is followed by another one, whatever the account holds.

    Args:
        share: of the time of published updates, in [0, 1]; 1: all updates compare.
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
        """Decide whether the next round compares; None: it does not.

        Args:
            version: that it publishes.
            sources: identifies the processes that hold the weights.
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
        """What a round compares (None: nothing), in which turn, and in how many turns everything once."""
        replicated = binding.replicated
        if replicated is None:
            return None, 0, 1
        comparison = self.begin(version, binding.identities_of(binding.trainers))
        if comparison is None:
            return None, 0, 1
        period = 1 if comparison.is_first else replicated.period(binding.sent_nbytes)
        return replicated, comparison.turn, period

    def conclude(self, *, compare_s: float, update_s: float, is_published: bool) -> None:
        """Charge the round that `begin` was last called for.

        Args:
            compare_s: that the slowest rank compared for; 0 if nothing was compared.
            update_s: that the whole round took.
            is_published: whether it published its version; else nothing is credited.
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
            # The first one connects as well, and takes longer than any other.
            self._balance_s += self._share * update_s
        self._version = -1
        if compared is not None:
            self._has_compared = True
            self._turn += 1
