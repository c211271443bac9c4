"""Reduce a failing schedule to a small failing schedule (delta debugging, Zeller 1999)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from chaos_schedule import Event, Schedule


def minimise(
    schedule: Schedule, fails: Callable[[Schedule], bool], *, max_runs: int = 120
) -> Schedule:
    """Return the schedule with fewer events and a shorter duration, as small as it still fails.

    Args:
        schedule: a schedule that fails.
        fails: runs a schedule and returns whether it fails.
        max_runs: highest number of calls of `fails`.
    """
    runs = 0

    def still(events: Sequence[Event], duration_s: float) -> bool:
        nonlocal runs
        runs += 1
        return runs <= max_runs and fails(_with(schedule, events, duration_s))

    events = list(schedule.events)
    duration_s = schedule.duration_s
    size = max(1, len(events) // 2)
    while events and size:
        start, shrunk = 0, False
        while start < len(events):
            fewer = events[:start] + events[start + size :]
            if still(fewer, duration_s):
                events, shrunk = fewer, True
            else:
                start += size
        if not shrunk:
            size //= 2
    for index, event in enumerate(events):
        if event.count > 1:
            once = [*events[:index], msgspec.structs.replace(event, count=1), *events[index + 1 :]]
            if still(once, duration_s):
                events = once
    last_s = max((event.at_s for event in events), default=0.0)
    for shorter_s in (last_s + 0.5, last_s + 2.0):
        if shorter_s < duration_s and still(events, shorter_s):
            duration_s = shorter_s
            break
    return _with(schedule, events, duration_s)


def _with(schedule: Schedule, events: Sequence[Event], duration_s: float) -> Schedule:
    return msgspec.structs.replace(schedule, events=tuple(events), duration_s=duration_s)
