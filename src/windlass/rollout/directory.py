"""List of the engines that may receive rollouts, and the choice of an engine for each attempt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

from windlass.control.changes import Changes
from windlass.control.fleet import EngineInfo
from windlass.rollout.messages import EngineTarget

REMEMBERED_PREFIXES = 1 << 16


class EngineDirectory(Protocol):
    """Interface of a list of routable engines that notifies subscribers of changes.

    The rollout controller calls `routable` in its event loop for every dispatch, so an implementation must
    not block.
    """

    def routable(self) -> Sequence[tuple[str, str, int]]:
        """Return (name, url, version) of every engine that may receive work; version -1 if unknown."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> object:
        """Call `callback` in the event loop after every change of `routable()`."""
        ...


class StaticEngines:
    """Engine directory with a list that the caller sets, for fixed fleets, tests and benchmarks."""

    def __init__(self, engines: Iterable[tuple[str, str, int]] = ()) -> None:
        self._engines = tuple(EngineInfo(*engine) for engine in engines)
        self._changes = Changes()

    def routable(self) -> Sequence[tuple[str, str, int]]:
        """Return the engines of the last `set`."""
        return self._engines

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every `set`."""
        self._changes.subscribe(callback)

    def set(self, engines: Iterable[tuple[str, str, int]]) -> None:
        """Replace all engines; call this in the event loop."""
        self._engines = tuple(EngineInfo(*engine) for engine in engines)
        self._changes.notify()


class EngineChoice:
    """Chooses the engine that has cached a prompt's prefix, unless the least loaded engine is much less busy.

    Args:
        slack: largest difference between the numbers of attempts on the engine with the cached prefix and on the least
            loaded engine. If the difference is larger, the least loaded engine is chosen.
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
        """Return the engine for an attempt.

        Args:
            engines: candidates; not empty.
            load_of: returns the number of attempts on an engine.
            prefix: hashable key, equal for prompts that begin with the same tokens.
            avoid: name of an engine that just failed; chosen only if it is the only candidate.
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
