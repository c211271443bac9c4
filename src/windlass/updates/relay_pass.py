"""The part of a round in which engines pass on to others what they have received; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import final


@final
class RelayPass:
    """The relayed pass of a round: who still takes part, and which links it left incomplete.

    A round writes by relay once, if every member of every group is still there; whatever that
    leaves incomplete is written by the trainers, as in a round without a relay.

    Args:
        children: every member -> those that it passes on to; empty without relay groups.
    """

    def __init__(self, children: Mapping[str, tuple[str, ...]]) -> None:
        self._children = children
        self._was_tried = not children
        self._running: set[str] = set()
        self._missed: set[tuple[str, str]] = set()
        self._is_unseen = False

    def begin(self, active: Collection[str]) -> bool:
        """Whether what is written now is relayed; at most once."""
        if self._was_tried:
            return False
        self._was_tried = True
        if not set(self._children) <= set(active):
            return False
        self._running, self._is_unseen = set(self._children), True
        return True

    @property
    def members(self) -> tuple[str, ...]:
        """Everybody who passes on or receives."""
        return tuple(self._children)

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
        return self._children[worker]

    def pop_missed(self) -> tuple[bool, frozenset[tuple[str, str]]]:
        """Whether the pass has just ended, and the links that it did not complete."""
        is_unseen, missed = self._is_unseen, frozenset(self._missed)
        self._is_unseen, self._missed = False, set()
        return is_unseen, missed

    def unsettled(self) -> dict[str, tuple[str, ...]]:
        """Members that may still be writing -> to whom."""
        return {worker: self._children[worker] for worker in sorted(self._running)}
