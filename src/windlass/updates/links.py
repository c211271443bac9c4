"""What is known about every link of a round: asked, written, verified. Pure bookkeeping.

A link is one (source worker, destination worker) pair. It counts as delivered only when its
source reported it written and its destination found the same digest, both after the last
time that it was asked for; whatever nobody mentions is not delivered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import final

__all__ = ["Link", "LinkLedger"]

Link = tuple[str, str]
"""(source, destination)."""


@final
class LinkLedger:
    """One round's links."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._links = tuple(sorted(links))
        self._links_to: dict[str, list[Link]] = {}
        for link in self._links:
            self._links_to.setdefault(link[1], []).append(link)
        self._written: dict[Link, str] = {}
        self._verified: set[str] = set()
        self._in_flight: dict[str, tuple[str, ...]] = {}
        self._errors: dict[Link, str] = {}

    @property
    def in_flight(self) -> dict[str, tuple[str, ...]]:
        """Sources that were asked to write and did not answer: source -> destinations."""
        return dict(self._in_flight)

    def unwritten(self, destinations: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Links to `destinations` that are to be written: source -> destinations."""
        found: dict[str, list[str]] = {}
        for source, destination in self._links:
            if destination in destinations and (source, destination) not in self._written:
                found.setdefault(source, []).append(destination)
        return {source: tuple(names) for source, names in found.items()}

    def among(
        self, sources: Collection[str], destinations: Collection[str]
    ) -> dict[str, tuple[str, ...]]:
        """All links from `sources` to `destinations`, written or not."""
        found: dict[str, list[str]] = {}
        for source, destination in self._links:
            if source in sources and destination in destinations:
                found.setdefault(source, []).append(destination)
        return {source: tuple(names) for source, names in found.items()}

    def ask(self, source: str, destinations: tuple[str, ...]) -> None:
        """`source` is told to write these links: what was known about them no longer holds."""
        self._in_flight[source] = destinations
        for destination in destinations:
            self._written.pop((source, destination), None)
            self._verified.discard(destination)

    def answered(self, source: str) -> tuple[str, ...]:
        """`source` has answered its last request; returns what it was asked for."""
        return self._in_flight.pop(source, ())

    def written(self, link: Link, digest: str) -> None:
        """The source says that the link is complete."""
        self._written[link] = digest
        self._errors.pop(link, None)

    def failed(self, link: Link, error: str) -> None:
        """The source says why the link is not complete; one line, for a person."""
        self._errors[link] = error

    def why(self, links: Iterable[Link]) -> str:
        """The first reason that is known of these links; empty for none."""
        return next((self._errors[link] for link in links if self._errors.get(link)), "")

    def forget(self, links: Iterable[Link]) -> None:
        """These links are not complete, whatever their sources said."""
        for link in links:
            self._written.pop(link, None)

    def unverified(self, destinations: Iterable[str]) -> list[str]:
        """Destinations that have links and have not confirmed their digests, in the given order."""
        return [d for d in destinations if d in self._links_to and d not in self._verified]

    def expected(self, destination: str) -> dict[str, str]:
        """Source -> digest of everything that was written to `destination`."""
        links = self._links_to.get(destination, ())
        return {link[0]: self._written[link] for link in links if link in self._written}

    def verify(self, destination: str, mismatched: Collection[str]) -> bool:
        """Note the destination's answer; false when it names a source that has no such link."""
        links = {(source, destination) for source in mismatched}
        if not links <= set(self._links_to.get(destination, ())):
            return False
        for link in links:
            self._written.pop(link, None)
        if not links:
            self._verified.add(destination)
        return True
