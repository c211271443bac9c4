"""The history that a controller keeps of its run, in bounded memory."""

from __future__ import annotations

import msgspec

from windlass.control.engine_state import EngineState, EngineStatus
from windlass.observability.history import MAX_EVENTS, FleetEvents, History, Point


def test_a_history_covers_a_run_of_any_length_with_few_points() -> None:
    history = History(interval_s=1.0, max_points=8)
    peaks = []
    for second in range(1, 1001):
        stalest = 9 if second == 400 else second % 3
        peaks.append(stalest)
        history.add(Point(at_s=float(second), completed=7 * second, stalest=stalest))
    columns = history.columns()
    assert 4 <= len(columns["at_s"]) <= 8
    assert (columns["at_s"][0], columns["at_s"][-1]) == (0.0, 1000.0)
    assert columns["completed"] == [7 * at_s for at_s in columns["at_s"]]
    gaps = [b - a for a, b in zip(columns["at_s"], columns["at_s"][1:], strict=False)]
    assert max(gaps) <= 2 * history.interval_s
    # Dropping points loses no maximum.
    for before, at_s, most in zip(
        columns["at_s"], columns["at_s"][1:], columns["stalest"][1:], strict=False
    ):
        assert most == max(peaks[int(before) : int(at_s)])


def test_an_early_point_replaces_the_newest_point() -> None:
    history = History(interval_s=1.0)
    for at, completed, stalest in ((0.2, 1, 5), (0.6, 2, 0), (1.0, 3, 1), (1.1, 4, 0)):
        history.add(Point(at_s=at, completed=completed, stalest=stalest))
    columns = history.columns()
    assert columns["at_s"] == [0.0, 1.0, 1.1]
    assert columns["completed"] == [0, 3, 4]
    assert columns["stalest"] == [0, 5, 0]
    assert not history.is_due(2.0)
    assert history.is_due(2.1)


def test_each_change_of_an_engine_is_one_event() -> None:
    events = FleetEvents()
    a = EngineState("a", "http://a", 3, EngineStatus.SERVING, reason="")
    b = EngineState("b", "http://b", -1, EngineStatus.WAITING, reason="")
    left_out = replace_state(b, status=EngineStatus.LEFT_OUT, reason="its digest differs")
    for at_s, states in enumerate(
        [
            (a, b),
            (a, left_out),
            (a, left_out),
            # Engine b has no weights yet.
            (a, replace_state(b, reason="")),
            (a, replace_state(b, version=4, status=EngineStatus.SERVING)),
            (a,),
        ]
    ):
        events.compare(float(at_s), states)
    assert [(e.at_s, e.who, e.what, e.is_bad) for e in events.newest] == [
        (0.0, "a", "connected, with version 3", False),
        (0.0, "b", "connected", False),
        (1.0, "b", "its digest differs", True),
        (4.0, "b", "caught up with version 4", False),
        (5.0, "b", "its connections are gone", True),
    ]
    for number in range(MAX_EVENTS + 5):
        events.add(6.0, "", f"version {number} aborted", is_bad=True)
    assert len(events.newest) == MAX_EVENTS


def replace_state(state: EngineState, **changes: object) -> EngineState:
    return msgspec.structs.replace(state, **changes)
