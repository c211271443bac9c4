"""From which checkpoint tensors an engine computes what is no copy of any.

Loads that differ in some tensors only are compared. Names that differ in their numbers alone (the
same tensor of every layer) are changed together, and the groups that matter are found by halving;
then every tensor of the engine tells which of the numbers it depends on, one binary digit of them
per two loads, all layers at once. A last load changes everything else: nothing computed may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from windlass.engines.capture.codes import Codes, Load
from windlass.engines.capture.memory import refuse
from windlass.layout.naming.patterns import NUMBER, patterns_of

_SEED = 2


@final
@dataclass(frozen=True, slots=True)
class Search:
    """A search for the sources of what is computed.

    Takes about 2 log2 of the number of kinds of names per kind that matters, and 2 log2 of the
    number of layers (or layers times experts), in loads.

    Attributes:
        prints: fingerprints of the computed tensors, now.
        base: the same after a load of `codes.random(0)`.
    """

    codes: Codes
    load: Load
    prints: Callable[[], Mapping[str, int]]
    base: Mapping[str, int]

    def sources(self) -> frozenset[str]:
        """Return the checkpoint tensors that change one of the computed tensors.

        Raises:
            UnsupportedLayout: tensors whose sources cannot be told; names them.
        """
        every = frozenset(spec.name for spec in self.codes.specs)
        deaf = sorted(self.base.keys() - self._changed(every))
        refuse(deaf, "tensors that the engine computes, and not from the checkpoint alone")
        patterns = patterns_of(spec.name for spec in self.codes.specs)
        kinds = [tuple(names) for names in patterns.values()]
        members = frozenset().union(*self._mattering(kinds, known=True))
        found = self._numbered(members)
        if not self._changed(every - found):
            return found
        if members == found or self._changed(every - members):
            why = (
                "tensors that the engine computes from checkpoint tensors that cannot be told apart"
            )
            refuse(self.base, why)
        return members

    def _changed(self, names: frozenset[str]) -> frozenset[str]:
        """Return the computed tensors that differ once these checkpoint tensors do."""
        if not names:
            return frozenset()
        self.load(self.codes.mixed(names, _SEED))
        now = self.prints()
        return frozenset(name for name, value in self.base.items() if now.get(name) != value)

    def _mattering(
        self, groups: Sequence[tuple[str, ...]], *, known: bool
    ) -> Iterator[tuple[str, ...]]:
        """Groups that change something; `known`: one of them does."""
        if not known and not self._changed(frozenset().union(*groups)):
            return
        if len(groups) == 1:
            yield groups[0]
            return
        half = len(groups) // 2
        first = list(self._mattering(groups[:half], known=False))
        yield from first
        yield from self._mattering(groups[half:], known=not first)

    def _numbered(self, members: frozenset[str]) -> frozenset[str]:
        """Return those whose numbers a computed tensor may depend on, by every digit of them."""
        keys = sorted({_numbers(name) for name in members})
        index = {key: at for at, key in enumerate(keys)}
        possible = [set(range(len(keys))) for _ in self.base]
        for digit in range((len(keys) - 1).bit_length()):
            with_digit = {at for at in range(len(keys)) if at >> digit & 1}
            ones = frozenset(name for name in members if index[_numbers(name)] in with_digit)
            by_ones, by_zeros = self._changed(ones), self._changed(members - ones)
            for tensor, numbers in zip(self.base, possible, strict=True):
                if tensor not in by_ones:
                    numbers.difference_update(with_digit)
                if tensor not in by_zeros:
                    numbers.intersection_update(with_digit)
        mattering = set[int]().union(*possible)
        return frozenset(name for name in members if index[_numbers(name)] in mattering)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in NUMBER.findall(name))
