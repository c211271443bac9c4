"""The arena that a packer fills: at most one, replaced when it is too small or may still be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, final

__all__ = ["ArenaSlot", "PackArena", "keep_mapped"]


class PackArena(Protocol):
    """Registered memory that is packed into."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Unregister and free. Idempotent."""
        ...


_ABANDONED: list[PackArena] = []
"""Arenas that a write of unknown outcome may still read: mapped until the process ends."""

ArenaT = TypeVar("ArenaT", bound=PackArena)


def keep_mapped(arena: PackArena) -> None:
    """A write of unknown outcome may still read it: it stays mapped until the process ends."""
    _ABANDONED.append(arena)


@final
class ArenaSlot(Generic[ArenaT]):
    """An arena or none. Not thread-safe.

    Args:
        make: allocates and registers one of so many bytes.
        limit_nbytes: the most that it may have; 0 for as much as one update needs.

    Attributes:
        arena: what is packed into; None where nothing is.
    """

    def __init__(self, make: Callable[[int], ArenaT], limit_nbytes: int) -> None:
        self._make = make
        self.limit_nbytes = limit_nbytes
        self.arena: ArenaT | None = None

    @property
    def address(self) -> int:
        """Of its first byte; 0 where there is none."""
        return self.arena.address if self.arena is not None else 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return self.arena.nbytes if self.arena is not None else 0

    def capacity_for(self, needed_nbytes: int) -> int:
        """Of an arena for an update that packs so many bytes."""
        return min(needed_nbytes, self.limit_nbytes) if self.limit_nbytes else needed_nbytes

    def fit(self, capacity: int) -> None:
        """Have at least `capacity` bytes; nothing where that is 0.

        Raises:
            RegionError: memory cannot be registered.
        """
        if self.arena is not None and (self.arena.nbytes < capacity or not capacity):
            self.arena.close()
            self.arena = None
        if self.arena is None and capacity:
            self.arena = self._make(capacity)

    def abandon(self, *, renew: bool) -> None:
        """See `Packer.abandon`."""
        if self.arena is not None:
            nbytes = self.arena.nbytes
            keep_mapped(self.arena)
            self.arena = None
            if renew:
                self.arena = self._make(nbytes)

    def close(self) -> None:
        """Free the arena. Idempotent."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
