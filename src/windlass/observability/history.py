"""History of a controller's run: counts over time, and events of its engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from typing import final

from windlass.control.engine_state import EngineState, EngineStatus

GONE = "its connections are gone"
MAX_POINTS = 240
MAX_EVENTS = 200
MAX_STRETCHES = 600


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Counts at one time. All are totals since the start, except `version`, `outstanding` and `stalest`.

    Attributes:
        at_s: seconds since the start.
        completed, too_old, stopped_early, dropped, rejected, wasted_tokens: as in `RolloutStats`.
        samples: samples given to trainers.
        tokens: trained tokens of these samples.
        staleness: sum of the ages of these samples, in versions.
        version: published version.
        outstanding: number of outstanding rollouts, see `RolloutStats`.
        stalest: largest age of a sample since the previous point, in versions.
    """

    at_s: float = 0.0
    completed: int = 0
    too_old: int = 0
    stopped_early: int = 0
    dropped: int = 0
    rejected: int = 0
    wasted_tokens: int = 0
    samples: int = 0
    tokens: int = 0
    staleness: int = 0
    version: int = -1
    outstanding: int = 0
    stalest: int = 0


@final
class History:
    """History of a whole run in at most `max_points` points. If there are more, pairs of neighbouring points are merged.

    Args:
        interval_s: seconds between two points at first; the interval doubles when points are merged.
        max_points: must be even, or a merge would lose the newest point.
    """

    def __init__(self, *, interval_s: float = 1.0, max_points: int = MAX_POINTS) -> None:
        self.interval_s = interval_s
        self._max_points = max_points
        self._points = [Point()]

    def is_due(self, at_s: float) -> bool:
        """Return whether the interval since the newest point has passed."""
        return at_s - self._points[-1].at_s >= self.interval_s

    def add(self, point: Point) -> None:
        """Add a point with the current counts.

        If the last two stored points are less than `interval_s` apart, merge `point` into the last stored point. Otherwise
        append `point`. If more than `max_points` points are then stored, double `interval_s`, and merge all points
        but the first in pairs.
        """
        points = self._points
        if len(points) > 1 and points[-1].at_s - points[-2].at_s < self.interval_s:
            points[-1] = _merged(points[-1], point)
            return
        points.append(point)
        if len(points) > self._max_points:
            first, *rest = points
            self._points = [first, *map(_merged, rest[::2], rest[1::2])]
            self.interval_s *= 2

    def columns(self) -> dict[str, list[float]]:
        """Return all points, oldest first, as one list per attribute of `Point`."""
        names = [field.name for field in fields(Point)]
        rows = zip(*map(astuple, self._points), strict=True)
        return {name: list(row) for name, row in zip(names, rows, strict=True)}


def _merged(earlier: Point, later: Point) -> Point:
    return replace(later, stalest=max(earlier.stalest, later.stalest))


@final
@dataclass(frozen=True, slots=True)
class FleetEvent:
    """An event of an engine or of an update.

    Attributes:
        at_s: seconds since the start.
        who: name of the engine; empty for an update.
        what: description in one line.
        is_bad: whether an operator should look at the event.
    """

    at_s: float
    who: str
    what: str
    is_bad: bool


@final
@dataclass(frozen=True, slots=True)
class Stretch:
    """Period in which an engine's status, version and reason stay the same. Pauses for an update do not end it.

    Attributes:
        at_s: seconds from the start of the run to the beginning of the stretch.
        who: name of the engine.
        version: version that the engine served; -1 if the engine served no version of this run.
        status: status of the engine.
        why: reason why the engine was left out or disconnected; otherwise empty.
    """

    at_s: float
    who: str
    version: int
    status: EngineStatus
    why: str


@final
class FleetEvents:
    """Newest events and stretches, derived from successive states of the engines.

    Attributes:
        newest: at most `MAX_EVENTS` events.
        stretches: at most `MAX_STRETCHES` stretches of all engines together, oldest first.
    """

    def __init__(self) -> None:
        self.newest: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)
        self.stretches: deque[Stretch] = deque(maxlen=MAX_STRETCHES)
        self._current: dict[str, Stretch] = {}
        self._behind: set[str] = set()

    def add(self, at_s: float, who: str, what: str, *, is_bad: bool) -> None:
        """Record an event that `compare` cannot find in the engines' states."""
        self.newest.append(FleetEvent(at_s, who, what, is_bad))

    def compare(self, at_s: float, states: Iterable[EngineState]) -> None:
        """Compare the engines' states with the states of the previous call, and record the differences.

        Events are recorded for engines that connected, disconnected, were left out, or caught up. A new `Stretch`
        begins if status, version or reason of an engine changed, but not if an engine pauses for an update.
        """
        here = {state.name: state for state in states}
        for name in sorted(self._current.keys() - here.keys()):
            self._behind.discard(name)
            self.add(at_s, name, GONE, is_bad=True)
            last = self._current.pop(name)
            self.stretches.append(replace(last, at_s=at_s, status=EngineStatus.GONE, why=GONE))
        for name, state in here.items():
            before = self._current.get(name)
            if before is None:
                said = f", with version {state.version}" if state.version >= 0 else ""
                self.add(at_s, name, f"connected{said}", is_bad=False)
            elif state.routable and name in self._behind:
                self._behind.discard(name)
                self.add(at_s, name, f"caught up with version {state.version}", is_bad=False)
            if state.reason and (before is None or state.reason != before.why):
                self._behind.add(name)
                self.add(at_s, name, state.reason, is_bad=True)
            now = Stretch(at_s, name, state.version, state.status, state.reason)
            if before is not None:
                is_pause = (
                    state.status is EngineStatus.WAITING and before.status is EngineStatus.SERVING
                )
                if is_pause and before.version == now.version:
                    # The engine is paused for an update: its stretch continues.
                    continue
            if before is None or replace(before, at_s=at_s) != now:
                self._current[name] = now
                self.stretches.append(now)
