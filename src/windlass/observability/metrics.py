"""Prometheus metrics of one controller, in a separate registry."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from windlass.control.engine_state import EngineState, EngineStatus
from windlass.control.report import Measure, RoundOutcome, UpdateReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
AGES = (0, 1, 2, 3, 4, 6, 8, 12, 16)


@final
class ControllerMetrics:
    """Metrics of one controller. Not thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._rounds = Counter(
            "windlass_rounds", "Weight-update rounds by outcome", ["outcome"], registry=registry
        )
        # Create each counter at 0. Prometheus would not see an increase if a counter first appeared with 1.
        for outcome in RoundOutcome:
            self._rounds.labels(outcome.value)
        self._figures = {measure: _figure(measure, registry) for measure in Measure}
        self._unchanged = Counter(
            "windlass_unchanged_versions", "Versions that changed no byte", registry=registry
        )
        self._non_finite = Counter(
            "windlass_non_finite_tensors",
            "Sum over all versions of the number of parameters with NaN or infinity",
            registry=registry,
        )
        self._link_nbytes, self._link_s = (
            Counter(f"windlass_link_{unit}", text, ["transport"], registry=registry)
            for unit, text in (
                ("bytes", "Bytes that links carried"),
                ("wire_seconds", "Sum of the transfer times of all links"),
            )
        )
        self._staleness = Histogram(
            "windlass_sample_staleness_versions",
            "Published version minus the version of the oldest token, when a trainer gets the sample",
            buckets=AGES,
            registry=registry,
        )
        self._version = Gauge(
            "windlass_published_version", "Published version, or -1", registry=registry
        )
        self._engine_version = Gauge(
            "windlass_engine_version",
            "Version that an engine serves",
            ["engine"],
            registry=registry,
        )
        self._routable = Gauge(
            "windlass_engines_routable", "Engines that get traffic", registry=registry
        )
        self._connected = Gauge(
            "windlass_engines_connected", "Engines with a connected rank", registry=registry
        )
        self._states = Gauge("windlass_engines", "Engines by state", ["state"], registry=registry)
        self._rollouts = Gauge(
            "windlass_rollouts",
            "Rollouts by state: totals since the start for submitted and ended rollouts, else the current number",
            ["state"],
            registry=registry,
        )

    def observe_round(self, report: UpdateReport) -> None:
        """Add the outcome, the measures and the links' bytes of a round that has ended."""
        self._rounds.labels(report.outcome.value).inc()
        for measure, figure in self._figures.items():
            if measure not in report.measures:
                continue
            if isinstance(figure, Counter):
                figure.inc(report.measures[measure])
            else:
                figure.observe(report.measures[measure])
        self._unchanged.inc(report.unchanged > 0)
        self._non_finite.inc(sum(report.non_finite.values()))
        for transport, wire in report.wire.items():
            self._link_nbytes.labels(transport).inc(wire.nbytes)
            self._link_s.labels(transport).inc(wire.wire_s)

    def observe_staleness(self, ages: Iterable[int]) -> None:
        """Record the ages, in versions, of samples that were given to trainers."""
        for age in ages:
            self._staleness.observe(age)

    def render(
        self,
        *,
        version: int,
        engines: Sequence[EngineState],
        rollouts: Mapping[str, int],
    ) -> bytes:
        """Set the gauges to these values, and return the text of `/metrics`."""
        self._version.set(version)
        routable = [engine for engine in engines if engine.routable]
        self._routable.set(len(routable))
        self._connected.set(len(engines))
        self._engine_version.clear()
        for engine in routable:
            self._engine_version.labels(engine.name).set(engine.version)
        num_in = Counts(engine.status for engine in engines)
        for status in EngineStatus:
            self._states.labels(status).set(num_in[status])
        for state, count in rollouts.items():
            self._rollouts.labels(state).set(count)
        return generate_latest(self._registry)


def _figure(measure: Measure, registry: CollectorRegistry) -> Counter | Histogram:
    """Return a histogram if the measure is in seconds (`windlass_round_wire_seconds`), else a counter."""
    name = f"windlass_round_{measure.label}_seconds"
    if measure.unit == "seconds":
        return Histogram(name, measure.help, buckets=SECONDS, registry=registry)
    return Counter(f"windlass_round_{measure.unit}", measure.help, registry=registry)
