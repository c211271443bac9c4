"""Which engines may be given work, and which of them an attempt goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

from windlass.rollout.messages import EngineTarget
from windlass.updates.changes import Changes
from windlass.updates.fleet import EngineInfo

REMEMBERED_PREFIXES = 1 << 16


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
        self._changes = Changes()

    def routable(self) -> Sequence[tuple[str, str, int]]:
        """As set."""
        return self._engines

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every `set`."""
        self._changes.subscribe(callback)

    def set(self, engines: Iterable[tuple[str, str, int]]) -> None:
        """Replace the fleet; call in the event loop."""
        self._engines = tuple(EngineInfo(*engine) for engine in engines)
        self._changes.notify()


class EngineChoice:
    """The least loaded engine, with affinity to the one that saw a prefix last: it has it cached.

    Args:
        slack: the engine of a prefix is preferred while it holds at most so many attempts more
            than the least loaded one; 0 turns affinity off, except between equals.
    """

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._seen: OrderedDict[Hashable, str] = OrderedDict()

    def choose(
        self,
        engines: Sequence[EngineTarget],
        load_of: Callable[[str], int],
        prefix: Hashable,
        avoid: str,
    ) -> EngineTarget:
        """The engine for an attempt.

        Args:
            engines: to choose from; not empty.
            load_of: attempts that an engine holds.
            prefix: equal for attempts whose prompts begin alike.
            avoid: an engine that just failed; used only when there is no other.
        """
        allowed = [engine for engine in engines if engine.name != avoid] or engines
        loads = [load_of(engine.name) for engine in allowed]
        least, known = min(loads), self._seen.get(prefix)
        best = allowed[loads.index(least)]
        if known != best.name:
            for engine, load in zip(allowed, loads, strict=True):
                if engine.name == known and load <= least + self._slack:
                    best = engine
        self._seen[prefix] = best.name
        self._seen.move_to_end(prefix)
        if len(self._seen) > REMEMBERED_PREFIXES:
            self._seen.popitem(last=False)
        return best
