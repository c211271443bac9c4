"""Which engine an attempt goes to: least loaded, with affinity to a cached prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from windlass.rollout.messages import EngineTarget

__all__ = ["PREFIX_TOKENS", "EngineChoice"]

PREFIX_TOKENS = 256
REMEMBERED_PREFIXES = 1 << 16


class EngineChoice:
    """Remembers which engine saw which prefix last.

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
        best = min(allowed, key=lambda engine: load_of(engine.name))
        known = self._seen.get(prefix)
        limit = load_of(best.name) + self._slack
        for engine in allowed:
            if engine.name == known and load_of(engine.name) <= limit:
                best = engine
        self._seen[prefix] = best.name
        self._seen.move_to_end(prefix)
        if len(self._seen) > REMEMBERED_PREFIXES:
            self._seen.popitem(last=False)
        return best
