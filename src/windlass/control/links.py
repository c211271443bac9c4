"""The links of a round: which of them are written, verified, relayed, or still being written. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import final

Link = tuple[str, str]
"""(source, destination)."""


@final
class LinkLedger:
    """One round's links.

    Args:
        links: of the plan.
        destinations: that verify although no link of a plan leads to them.

    Attributes:
        in_flight: sources that were asked to write and did not answer -> destinations.
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
        """Links to `destinations` that are to be written: source -> destinations."""
        destinations = frozenset(destinations)
        return _by_source(
            link for link in self._links if link[1] in destinations and link not in self._written
        )

    def among(
        self, sources: Collection[str], destinations: Collection[str]
    ) -> dict[str, tuple[str, ...]]:
        """All links from `sources` to `destinations`, written or not."""
        destinations = frozenset(destinations)
        return _by_source(
            link for link in self._links if link[0] in sources and link[1] in destinations
        )

    def ask(self, source: str, destinations: tuple[str, ...]) -> None:
        """`source` is told to write these links: what was known about them no longer holds."""
        self.in_flight[source] = destinations
        for destination in destinations:
            self._written.pop((source, destination), None)
            self._verified.discard(destination)

    def answered(self, source: str) -> tuple[str, ...]:
        """`source` has answered its last request; returns what it was asked for."""
        return self.in_flight.pop(source, ())

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
        """Destinations that have something to verify and have not done so, in the given order."""
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


def _by_source(links: Iterable[Link]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for source, destination in links:
        found.setdefault(source, []).append(destination)
    return {source: tuple(names) for source, names in found.items()}


@final
class RelayPass:
    """The relayed pass of a round: who still takes part, and which links it left incomplete.

    A round writes by relay once, if every member of every group is still there; whatever that
    leaves incomplete is written by the trainers, as in a round without a relay.

    Args:
        children: every member -> those that it passes on to; empty without relay groups.
    """

    def __init__(self, children: Mapping[str, tuple[str, ...]]) -> None:
        self.children = children
        self._was_tried = not children
        self._running: set[str] = set()
        self._missed: set[Link] = set()
        self._is_unseen = False

    def begin(self, active: Collection[str]) -> bool:
        """Whether what is written now is relayed; at most once."""
        if self._was_tried:
            return False
        self._was_tried = True
        if not set(self.children) <= set(active):
            return False
        self._running, self._is_unseen = set(self.children), True
        return True

    def is_running(self, worker: str) -> bool:
        """Whether it takes part and has not answered."""
        return worker in self._running

    def answered(self, worker: str, missing: Collection[str]) -> None:
        """A member has ended; the links from `missing` sources are not complete."""
        self._running.discard(worker)
        self._missed |= {(source, worker) for source in missing}

    def leave(self, worker: str, *, lost: bool) -> tuple[str, ...]:
        """A member is no part of the round any more; returns who must not wait for it.

        Unless its process is lost it may still be writing.
        """
        if worker not in self._running:
            return ()
        if lost:
            self._running.discard(worker)
        return self.children[worker]

    def pop_missed(self) -> tuple[bool, frozenset[Link]]:
        """Whether the pass has just ended, and the links that it did not complete."""
        is_unseen, missed = self._is_unseen, frozenset(self._missed)
        self._is_unseen, self._missed = False, set()
        return is_unseen, missed

    def unsettled(self) -> dict[str, tuple[str, ...]]:
        """Members that may still be writing -> to whom."""
        return {worker: self.children[worker] for worker in sorted(self._running)}
