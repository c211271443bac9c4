"""OpenTelemetry spans of weight updates: one per round and one per phase of the round.

Spans are recorded if the extra `otel` is installed and the application (or `opentelemetry-instrument`) sets a tracer
provider.
"""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING

from windlass.control.report import UpdateReport

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

NS = 1_000_000_000


def find_tracer() -> Tracer | None:
    """Return Windlass's tracer; None if OpenTelemetry is not installed."""
    if importlib.util.find_spec("opentelemetry") is None:
        return None
    from opentelemetry.trace import get_tracer

    return get_tracer("windlass")


def record_round(tracer: Tracer, report: UpdateReport) -> None:
    """Record a span for a round that has just ended, and a child span for each of its phases.

    The report has only the phases' durations, so each child span starts where the previous one ends.
    """
    from opentelemetry.trace import set_span_in_context

    end_ns = time.time_ns()
    start_ns = end_ns - int(report.update_s * NS)
    attributes: dict[str, str | int | float] = {
        "windlass.version": report.version,
        "windlass.outcome": report.outcome.value,
        **{f"windlass.{name}": value for name, value in report.measures.items()},
    }
    whole = tracer.start_span("weight update", start_time=start_ns, attributes=attributes)
    context = set_span_in_context(whole)
    at_ns = start_ns
    for phase, seconds in report.phase_s.items():
        part = tracer.start_span(phase, context=context, start_time=at_ns)
        at_ns = min(at_ns + int(seconds * NS), end_ns)
        part.end(end_time=at_ns)
    whole.end(end_time=end_ns)
