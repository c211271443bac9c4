"""List of the engines that may receive rollouts, and the choice of an engine for each attempt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import StrEnum
from typing import Protocol

from windlass.control.changes import Changes
from windlass.control.fleet import EngineInfo
from windlass.rollout.messages import EngineTarget

REMEMBERED_PREFIXES = 1 << 17
"""Number of newest prefixes for which engines are remembered."""
BLOCK_TOKENS, MAX_BLOCKS = 256, 8
"""Tokens of one block, and number of blocks of a prompt that the choice of an engine considers."""
MAX_ENGINES_OF_PREFIX = 8
"""Largest number of engines that are remembered for one prefix."""


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


class Routing(StrEnum):
    """Rule by which the controller chooses the engine of an attempt.

    PREFIX: the engine that has cached most of the prompt's beginning, unless it is much busier than the least loaded one.
    LEAST_LOADED: the engine with the fewest running attempts.
    ROUND_ROBIN: one engine after another, whatever they have cached and whatever they run.
    """

    PREFIX = "prefix"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


def prefixes_of(prompt_ids: Sequence[int]) -> list[int]:
    """Return the hashes of the first block of a prompt, of its first two blocks, and so on, up to `MAX_BLOCKS` blocks.

    A block has `BLOCK_TOKENS` tokens, and the last block of a prompt may have fewer. Equal beginnings have equal
    hashes.
    """
    if len(prompt_ids) < BLOCK_TOKENS:
        # A fast path for the most frequent case. This hash need not equal a hash of a longer prompt, because each hash of a
        # longer prompt covers at least one block.
        return [hash(prompt_ids)]
    hashes: list[int] = []
    newest = 0
    for first in range(0, min(len(prompt_ids), MAX_BLOCKS * BLOCK_TOKENS), BLOCK_TOKENS):
        newest = hash((newest, prompt_ids[first : first + BLOCK_TOKENS]))
        hashes.append(newest)
    return hashes


class EngineChoice:
    """Choice of the engine of each attempt, see `Routing`.

    Args:
        slack: largest difference between the numbers of attempts on the engine with the cached prefix and on the least
            loaded engine. If the difference is larger, the least loaded engine is chosen.
        routing: rule of the choice.
    """

    def __init__(self, slack: int, routing: Routing = Routing.PREFIX) -> None:
        self._slack, self._routing = slack, routing
        self._num_choices = 0
        self._seen: OrderedDict[Hashable, tuple[str, ...]] = OrderedDict()
        """Hash of a prefix -> engines that have cached the prefix, newest first."""

    def choose(
        self,
        engines: Sequence[EngineTarget],
        load_of: Callable[[str], int],
        prefixes: Sequence[Hashable],
        avoid: str,
    ) -> EngineTarget:
        """Return the engine for an attempt.

        Args:
            engines: candidates; not empty.
            load_of: function that returns the number of attempts on an engine.
            prefixes: hashes of the prompt's beginnings, shortest first, see `prefixes_of`.
            avoid: name of an engine that just failed; chosen only if it is the only candidate.
        """
        allowed = [engine for engine in engines if engine.name != avoid] or engines
        if self._routing is Routing.ROUND_ROBIN:
            self._num_choices += 1
            return allowed[self._num_choices % len(allowed)]
        loads = [load_of(engine.name) for engine in allowed]
        least = min(loads)
        best = allowed[loads.index(least)]
        if self._routing is Routing.LEAST_LOADED:
            return best
        limit, seen = least + self._slack, self._seen
        for prefix in reversed(prefixes):
            names = seen.get(prefix)
            if names is None:
                continue
            if best.name in names:
                break
            near = [
                engine
                for engine, load in zip(allowed, loads, strict=True)
                if load <= limit and engine.name in names
            ]
            if near:
                best = near[0]
                break
        self._remember(prefixes, best.name)
        return best

    def forget(self) -> None:
        """Forget all prefixes, because engines have discarded their caches."""
        self._seen.clear()

    def _remember(self, prefixes: Sequence[Hashable], name: str) -> None:
        """Record that an engine will cache a prompt with these beginnings."""
        seen = self._seen
        for prefix in prefixes:
            known = seen.get(prefix)
            if known is None:
                seen[prefix] = (name,)
            elif name not in known:
                seen[prefix] = (name, *known)[:MAX_ENGINES_OF_PREFIX]
                seen.move_to_end(prefix)
        while len(seen) > REMEMBERED_PREFIXES:
            seen.popitem(last=False)
