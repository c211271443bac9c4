"""What a controller remembers of its run: counts over time, and what happened to its engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from typing import final

from windlass.updates.fleet import EngineState, EngineStatus

GONE = "its connections are gone"
MAX_POINTS = 240
MAX_EVENTS = 200
MAX_STRETCHES = 600


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was counted up to a moment; totals since the start but for the last three.

    Attributes:
        at_s: seconds since the start.
        completed, too_old, stopped_early, dropped, rejected, wasted_tokens: as in `RolloutStats`.
        samples: handed to trainers. tokens: generated ones of these. staleness: versions, of all of these
            together.
        version: published. outstanding: rollouts, as in `RolloutStats`.
        stalest: versions; the most of a sample since the point before.
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
    """A whole run in at most `max_points` points: where there are more, each second one goes.

    Args:
        interval_s: between two points at first; it doubles whenever points go.
        max_points: even, so that the newest point stays.
    """

    def __init__(self, *, interval_s: float = 1.0, max_points: int = MAX_POINTS) -> None:
        self.interval_s = interval_s
        self._max_points = max_points
        self._points = [Point()]

    def is_due(self, at_s: float) -> bool:
        """Whether so much time has passed that a point would stay."""
        return at_s - self._points[-1].at_s >= self.interval_s

    def add(self, point: Point) -> None:
        """Add what is known now; it takes the place of the newest point if that came too soon."""
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
        """All points, oldest first; a list for each attribute of `Point`."""
        names = [field.name for field in fields(Point)]
        rows = zip(*map(astuple, self._points), strict=True)
        return {name: list(row) for name, row in zip(names, rows, strict=True)}


def _merged(earlier: Point, later: Point) -> Point:
    return replace(later, stalest=max(earlier.stalest, later.stalest))


@final
@dataclass(frozen=True, slots=True)
class FleetEvent:
    """Something that happened to an engine, or to an update.

    Attributes:
        at_s: seconds since the start. who: name of the engine; empty for an update.
        what: one line for a person. is_bad: whether somebody should look.
    """

    at_s: float
    who: str
    what: str
    is_bad: bool


@final
@dataclass(frozen=True, slots=True)
class Stretch:
    """What an engine was from a moment on, until its next stretch.

    Attributes:
        at_s: seconds since the start. who: name of the engine.
        version: that it held; -1 for none of this run.
        why: it was left out, or has gone; empty for the others.
    """

    at_s: float
    who: str
    version: int
    status: EngineStatus
    why: str


@final
class FleetEvents:
    """The newest events and stretches, from what engines were and what they are.

    Attributes:
        newest: at most `MAX_EVENTS`. stretches: at most `MAX_STRETCHES` of the whole fleet, oldest first.
    """

    def __init__(self) -> None:
        self.newest: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)
        self.stretches: deque[Stretch] = deque(maxlen=MAX_STRETCHES)
        self._current: dict[str, Stretch] = {}
        self._behind: set[str] = set()

    def add(self, at_s: float, who: str, what: str, *, is_bad: bool) -> None:
        """Remember something that the states of engines do not say."""
        self.newest.append(FleetEvent(at_s, who, what, is_bad))

    def compare(self, at_s: float, states: Iterable[EngineState]) -> None:
        """Remember how engines differ from the last call: who came, went, fell behind, caught up."""
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
                    continue  # a pause in an update ends no stretch
            if before is None or replace(before, at_s=at_s) != now:
                self._current[name] = now
                self.stretches.append(now)
