"""State of the links of a round: which are written, verified, or being written. No I/O.

A link is the pair of a source and a destination to which the source writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import final

Link = tuple[str, str]
"""(source worker, destination worker): one rank sends bytes to another rank."""


@final
class LinkLedger:
    """State of every link in one round. A link is written or unwritten; a destination is verified or unverified.

    Args:
        links: links of the plan.
        destinations: ranks that must verify although the plan has no link to them.

    Attributes:
        in_flight: source that has not answered its write command -> destinations in the command.
    """

    def __init__(self, links: Iterable[Link], destinations: Iterable[str]) -> None:
        self._links = tuple(sorted(links))
        self._links_to: dict[str, list[Link]] = {name: [] for name in destinations}
        for link in self._links:
            self._links_to.setdefault(link[1], []).append(link)
        self._written: dict[Link, str] = {}
        self._verified: set[str] = set()
        self.in_flight: dict[str, tuple[str, ...]] = {}
        self._errors: dict[Link, str] = {}

    def unwritten(self, destinations: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return the links to `destinations` that are not written, as source -> its destinations."""
        destinations = frozenset(destinations)
        return _by_source(
            link for link in self._links if link[1] in destinations and link not in self._written
        )

    def among(
        self, sources: Collection[str], destinations: Collection[str]
    ) -> dict[str, tuple[str, ...]]:
        """Return all links from `sources` to `destinations`, written or not, as source -> its destinations."""
        destinations = frozenset(destinations)
        return _by_source(
            link for link in self._links if link[0] in sources and link[1] in destinations
        )

    def ask(self, source: str, destinations: tuple[str, ...]) -> None:
        """Record that `source` gets a command to write to `destinations`.

        The links count as unwritten and the destinations as unverified from now on.
        """
        self.in_flight[source] = destinations
        for destination in destinations:
            self._written.pop((source, destination), None)
            self._verified.discard(destination)

    def answered(self, source: str) -> tuple[str, ...]:
        """Record that `source` has answered its write command, and return the command's destinations.

        Return an empty tuple if `source` has no write command that waits for an answer.
        """
        return self.in_flight.pop(source, ())

    def written(self, link: Link, digest: str) -> None:
        """Mark a link as written, with the digest that the source has reported."""
        self._written[link] = digest
        self._errors.pop(link, None)

    def failed(self, link: Link, error: str) -> None:
        """Record why a source failed to write a link, in one line. `written` removes the record."""
        self._errors[link] = error

    def why(self, links: Iterable[Link]) -> str:
        """Return the recorded error of the first link in `links` that has one; empty if none has an error."""
        return next((self._errors[link] for link in links if self._errors.get(link)), "")

    def forget(self, links: Iterable[Link]) -> None:
        """Mark these links as unwritten."""
        for link in links:
            self._written.pop(link, None)

    def unverified(self, destinations: Iterable[str]) -> list[str]:
        """Return, in order, the `destinations` that must verify and have not verified since the last write to them."""
        return [d for d in destinations if d in self._links_to and d not in self._verified]

    def expected(self, destination: str) -> dict[str, str]:
        """Return the digests of the written links to `destination`: source -> digest."""
        links = self._links_to.get(destination, ())
        return {link[0]: self._written[link] for link in links if link in self._written}

    def digests_to(self, destinations: Iterable[str]) -> dict[Link, str]:
        """Return the digests of the written links to all these destinations: link -> digest."""
        return {(s, to): digest for to in destinations for s, digest in self.expected(to).items()}

    def verify(self, destination: str, mismatched: Collection[str]) -> bool:
        """Record the answer of a destination to `Verify`.

        Args:
            destination: the rank that answered.
            mismatched: sources of the links with a wrong digest. These links count as unwritten again. If `mismatched`
                is empty, the destination counts as verified.

        Returns:
            False if a source in `mismatched` has no link to the destination. Nothing is recorded then.
        """
        links = {(source, destination) for source in mismatched}
        if not links <= set(self._links_to.get(destination, ())):
            return False
        for link in links:
            self._written.pop(link, None)
        if not links:
            self._verified.add(destination)
        return True


def _by_source(links: Iterable[Link]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for source, destination in links:
        found.setdefault(source, []).append(destination)
    return {source: tuple(names) for source, names in found.items()}
