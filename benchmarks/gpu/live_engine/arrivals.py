"""Arrival times of tokens at the clients of an engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

Arrivals = list[list[list[float]]]
"""Times of tokens, by stream, request and token."""


def gaps_of(requests: list[list[float]]) -> Iterator[tuple[float, float]]:
    """Return pairs of consecutive arrivals in the same request."""
    return itertools.chain.from_iterable(itertools.pairwise(times) for times in requests)


def turns_of(requests: list[list[float]]) -> Iterator[tuple[float, float]]:
    """Return pairs of the last arrival of a request and the first of the next one in its stream."""
    begun = [times for times in requests if times]
    return ((a[-1], b[0]) for a, b in itertools.pairwise(begun))


def silences(arrivals: Arrivals, windows: list[tuple[float, float]]) -> list[list[float]]:
    """Return, per window and stream, the longest overlapping time between two tokens of a request."""
    found = []
    for begin, end in windows:
        longest = []
        for requests in arrivals:
            gaps = [b - a for a, b in gaps_of(requests) if b > begin and a < end]
            if gaps:
                longest.append(max(gaps))
        found.append(longest)
    return found


def count_between(arrivals: Arrivals, spans: list[tuple[float, float]]) -> int:
    """Return the number of tokens that arrived within any of `spans`."""
    times = [t for requests in arrivals for one in requests for t in one]
    return sum(1 for t in times for a, b in spans if a <= t < b)
