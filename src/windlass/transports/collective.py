"""Collective groups: all members enter together, and one member's bytes reach all others.

The other kind of transport beside `OneSidedTransport`. Implementations own their buffers, so
that what is outside needs to know only host addresses.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["BroadcastGroup"]


class BroadcastGroup(Protocol):
    """One member of a group whose rank 0 is the root. Used by one thread."""

    @property
    def broken(self) -> bool:
        """Whether the group has failed: it never works again, another one must be formed."""
        ...

    def buffer(self, slot: int) -> int:
        """Host address of a buffer, owned by the group. Not to be touched between the two calls."""
        ...

    def start(self, slot: int, nbytes: int, deadline_s: float) -> None:
        """Begin to broadcast the first `nbytes` of a buffer, from the root into all others.

        Raises:
            TransferFailed: the group is broken.
        """
        ...

    def finish(self, slot: int, deadline_s: float) -> None:
        """Return once the buffer's bytes are there (or, at the root, may be overwritten).

        Raises:
            TransferFailed: a member is gone or late; the group is broken.
        """
        ...

    def abort(self) -> None:
        """Close every connection, so that the other members notice. Idempotent."""
        ...
