"""The order of each source's writes to its destinations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping


def staggered(links: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """Return the destinations of each source in an order that spreads the load.

    A source writes to its destinations one after the other. If all sources began with the same destination, they would
    share the bandwidth of this destination while the other destinations received nothing. Therefore this function goes
    through the sources in the order of their names. A source begins with the destination with which the fewest previous
    sources begin, and then follows the circular order of its destinations' names. If n sources have the same n
    destinations and write at the same speed, each destination receives from one source at a time.

    Args:
        links: source -> its destinations.

    Returns:
        Source -> its destinations in the order of the writes.
    """
    begun: Counter[str] = Counter()
    found = {}
    for source in sorted(links):
        circle = sorted(links[source])
        if circle:
            first = circle.index(min(circle, key=begun.__getitem__))
            begun[circle[first]] += 1
            circle = circle[first:] + circle[:first]
        found[source] = tuple(circle)
    return found
