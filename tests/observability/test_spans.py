"""Spans of a round, read from the real SDK."""

from __future__ import annotations

import pytest

from windlass.control.report import RoundOutcome, UpdateReport
from windlass.observability.spans import find_tracer, record_round

trace = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


def test_a_round_is_one_span_with_a_child_per_stage() -> None:
    exporter = memory.InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    report = UpdateReport(
        version=3,
        outcome=RoundOutcome.PUBLISHED,
        measures={"nbytes": 64, "update_s": 0.5},
        phase_s={"prepare": 0.1, "write": 0.25, "publish": 0.15},
    )
    record_round(provider.get_tracer("test"), report)
    *stages, whole = exporter.get_finished_spans()
    assert [stage.name for stage in stages] == ["prepare", "write", "publish"]
    assert whole.name == "weight update"
    assert dict(whole.attributes) == {
        "windlass.version": 3,
        "windlass.outcome": "published",
        "windlass.nbytes": 64,
        "windlass.update_s": 0.5,
    }
    assert {stage.parent.span_id for stage in stages} == {whole.context.span_id}
    assert [stage.end_time - stage.start_time for stage in stages] == [
        100_000_000,
        250_000_000,
        150_000_000,
    ]
    assert stages[0].start_time == whole.start_time
    assert stages[-1].end_time == whole.end_time
    assert whole.end_time - whole.start_time == 500_000_000
    provider.shutdown()


def test_a_round_without_a_span_provider_records_no_span() -> None:
    tracer = find_tracer()
    assert tracer is not None
    aborted = UpdateReport(version=0, outcome=RoundOutcome.ABORTED, measures={"update_s": 0.1})
    record_round(tracer, aborted)
