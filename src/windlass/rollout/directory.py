"""Which engines may be given work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from windlass.updates.fleet import EngineInfo

__all__ = ["EngineDirectory", "StaticEngines"]


class EngineDirectory(Protocol):
    """Who is routable now, and a call when that changes.

    The rollout controller reads and never locks: whoever implements this must answer
    from memory, at once, in the controller's event loop.
    """

    def routable(self) -> Sequence[tuple[str, str, int]]:
        """(name, url, version) of every engine that may be given work; version -1 for unknown."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> object:
        """Call `callback` in the event loop after every change of `routable()`."""
        ...


class StaticEngines:
    """A directory that its owner edits: fixed fleets, tests, benchmarks."""

    def __init__(self, engines: Iterable[tuple[str, str, int]] = ()) -> None:
        self._engines = tuple(EngineInfo(*engine) for engine in engines)
        self._callbacks: list[Callable[[], None]] = []

    def routable(self) -> Sequence[tuple[str, str, int]]:
        """As set."""
        return self._engines

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every `set`."""
        self._callbacks.append(callback)

    def set(self, engines: Iterable[tuple[str, str, int]]) -> None:
        """Replace the fleet; call in the event loop."""
        self._engines = tuple(EngineInfo(*engine) for engine in engines)
        for callback in self._callbacks:
            callback()
