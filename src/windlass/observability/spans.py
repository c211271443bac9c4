"""OpenTelemetry spans of weight updates, one per round and one per stage of it.

Needs the extra `otel`, and a tracer provider that the application has set (or
`opentelemetry-instrument`); without either nothing happens.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from windlass.updates.report import Measure

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

NS = 1_000_000_000


def find_tracer() -> Tracer | None:
    """The tracer of this library; None when OpenTelemetry is not installed."""
    if importlib.util.find_spec("opentelemetry") is None:
        return None
    from opentelemetry.trace import get_tracer

    return get_tracer("windlass")


def record_round(
    tracer: Tracer,
    *,
    version: int,
    outcome: str,
    measures: Mapping[str, float],
    phase_s: Mapping[str, float],
) -> None:
    """Record a round that has just ended.

    Args:
        tracer: of `find_tracer`.
        version: announced.
        outcome: how the round ended.
        measures: its figures, by the name of a `Measure`: attributes of the span.
        phase_s: its stages, in their order, one after another.
    """
    from opentelemetry.trace import set_span_in_context

    end_ns = time.time_ns()
    start_ns = end_ns - int(measures.get(Measure.UPDATE_S, 0.0) * NS)
    attributes: dict[str, str | int | float] = {
        "windlass.version": version,
        "windlass.outcome": outcome,
        **{f"windlass.{name}": value for name, value in measures.items()},
    }
    whole = tracer.start_span("weight update", start_time=start_ns, attributes=attributes)
    context = set_span_in_context(whole)
    at_ns = start_ns
    for phase, seconds in phase_s.items():
        stage = tracer.start_span(phase, context=context, start_time=at_ns)
        at_ns = min(at_ns + int(seconds * NS), end_ns)
        stage.end(end_time=at_ns)
    whole.end(end_time=end_ns)
