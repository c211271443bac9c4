"""Routes on which a controller shows its state: `/`, `/v1/overview`, `/v1/events` and `/metrics`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, final

import msgspec
from aiohttp import web

from windlass.control.coordinator import Coordinator
from windlass.control.report import Measure, RoundOutcome, UpdateReport
from windlass.control.round_state import Phase
from windlass.control.routes import status_of
from windlass.net.server import ControlServer
from windlass.observability.history import FleetEvents, History, Point
from windlass.observability.metrics import CONTENT_TYPE, ControllerMetrics
from windlass.observability.page import POLICY, read_page
from windlass.observability.spans import find_tracer, record_round
from windlass.rollout.batches import BatchQueue
from windlass.rollout.controller import RolloutController
from windlass.rollout.handles import RolloutStats
from windlass.rollout.messages import TrainingSample

HEARTBEAT_S = 15.0
SEND_DEADLINE_S = 10.0
LAST_ROUNDS = 20
BINDING = "binding "
LOOK_AFTER_S = 0.2
"""Seconds between the first change of the fleet and the comparison of the engines' states. Further changes within this
time need no further comparison."""
FRAME_PERIOD_S = 0.25
"""Minimum number of seconds between two events of a stream."""
MAX_FRAME_SHARE = 0.05
"""Largest share of the event loop's time that is used to encode events."""
MAX_STREAMS = 64
"""Largest number of event streams that a controller serves at a time."""


@final
class Operations:
    """HTTP routes of a `Controller` that show the state of its coordinator, rollouts and batches."""

    def __init__(
        self, coordinator: Coordinator, rollouts: RolloutController, batches: BatchQueue
    ) -> None:
        self._coordinator, self._rollouts = coordinator, rollouts
        self.metrics = ControllerMetrics()
        """Metrics of this controller."""
        self._tracer = find_tracer()
        self._page = read_page().encode()
        self._open_pages: set[asyncio.Event] = set()
        self._frame = b""
        self._frame_timer: asyncio.TimerHandle | None = None
        self._next_frame_at = 0.0
        self._closed = False
        self._staleness: Counter[int] = Counter()
        self._history, self._events = History(), FleetEvents()
        self._look_timer: asyncio.TimerHandle | None = None
        self._totals = Point()
        self._phase, self._phase_began_s = "", 0.0
        self._started_at = 0.0
        coordinator.on_update(self._on_update)
        coordinator.rounds.on_phase(self._on_phase)
        coordinator.subscribe(self._on_fleet)
        rollouts.on_change(self._on_rollouts)
        batches.on_put(self.observe_samples)

    @property
    def phase(self) -> str:
        """Description of the running phase of an update, or of the running binding; empty if neither runs."""
        return self._phase

    def mount(self, server: ControlServer) -> None:
        """Add the routes to a server that has not started. Call this in the event loop."""
        self._started_at = asyncio.get_running_loop().time()
        server.add_public_route("/", self._serve_page)
        server.add_routes(
            [
                web.get("/metrics", self._serve_metrics),
                web.get("/v1/overview", self._serve_overview),
                web.get("/v1/events", self._serve_events),
            ]
        )

    def close(self) -> None:
        """Send the last overview to all open pages, and end their event streams. Idempotent."""
        for timer in (self._look_timer, self._frame_timer):
            if timer is not None:
                timer.cancel()
        if self._open_pages and not self._closed:
            self._make_frame()
        self._closed = True

    def _notify(self) -> None:
        """Schedule one event for all open pages, unless an event is scheduled already."""
        if self._open_pages and self._frame_timer is None and not self._closed:
            self._frame_timer = asyncio.get_running_loop().call_at(
                self._next_frame_at, self._make_frame
            )

    def _make_frame(self) -> None:
        """Encode the overview as one event for all open pages, and compute the earliest time of the next event.

        Updates run in the same event loop, so they wait during the encoding. Therefore encoding takes at most the
        fraction `MAX_FRAME_SHARE` of the time.
        """
        time = asyncio.get_running_loop().time
        began_at, self._frame_timer = time(), None
        self._frame = b"data: " + msgspec.json.encode(self.overview()) + b"\n\n"
        took_s = time() - began_at
        self._next_frame_at = began_at + max(FRAME_PERIOD_S, took_s / MAX_FRAME_SHARE)
        for event in self._open_pages:
            event.set()

    def _now_s(self) -> float:
        """Return the seconds since the routes were mounted."""
        return asyncio.get_running_loop().time() - self._started_at

    def overview(self) -> dict[str, Any]:
        """Return the answer of `/v1/overview`. The events of `/v1/events` have the same fields."""
        stats, now_s = self._rollouts.stats(), self._now_s()
        self._add_point(now_s, stats)
        return {
            **status_of(self._coordinator),
            "phase": self._phase,
            "phase_for_s": now_s - self._phase_began_s if self._phase else 0.0,
            "measures": {
                m.value: {"label": m.label, "unit": m.unit, "help": m.help} for m in Measure
            },
            "rounds": [
                msgspec.to_builtins(report)
                for report in tuple(self._coordinator.reports)[-LAST_ROUNDS:]
            ],
            "rollouts": msgspec.to_builtins(stats),
            "completed_per_s": stats.completed / max(now_s, 1e-9),
            "staleness": {str(age): self._staleness[age] for age in sorted(self._staleness)},
            "now_s": now_s,
            "history": self._history.columns(),
            "events": [asdict(event) for event in self._events.newest],
            "stretches": [asdict(stretch) for stretch in self._events.stretches],
        }

    def _add_point(self, at_s: float, stats: RolloutStats) -> None:
        self._history.add(
            replace(
                self._totals,
                at_s=at_s,
                completed=stats.completed,
                too_old=stats.too_old,
                stopped_early=stats.stopped_early,
                dropped=stats.dropped,
                rejected=stats.rejected,
                wasted_tokens=stats.wasted_tokens,
                version=self._coordinator.fleet.published,
                outstanding=stats.outstanding,
            )
        )
        self._totals = replace(self._totals, stalest=0)

    def _on_rollouts(self) -> None:
        if self._history.is_due(now_s := self._now_s()):
            self._add_point(now_s, self._rollouts.stats())
            self._notify()

    def _on_fleet(self) -> None:
        binds = self._coordinator.connector.binds
        if bool(binds) != self._phase.startswith(BINDING) and not self._coordinator.in_round:
            self._enter(f"{BINDING}{', '.join(binds)}" if binds else "")
        self._notify()
        if self._look_timer is None and not self._closed:
            self._look_timer = asyncio.get_running_loop().call_later(LOOK_AFTER_S, self._look)

    def _look(self) -> None:
        """Record changes of engines since the last comparison, and schedule an event for open pages."""
        self._look_timer = None
        self._events.compare(self._now_s(), self._coordinator.fleet.states())
        self._notify()

    def _on_update(self, report: UpdateReport) -> None:
        self.metrics.observe_round(report)
        if self._tracer is not None:
            record_round(self._tracer, report)
        if report.outcome is not RoundOutcome.PUBLISHED:
            said = f"version {report.version} {report.outcome}: {report.reason}"
            self._events.add(self._now_s(), "", said, is_bad=True)
        self._notify()

    def _on_phase(self, version: int, phase: Phase) -> None:
        # In a push, the trainer sends the version last.
        what = f"version {version}" if version >= 0 else "a push"
        self._enter("" if phase is Phase.DONE else f"{phase.value} of {what}")
        self._notify()

    def _enter(self, phase: str) -> None:
        self._phase, self._phase_began_s = phase, self._now_s()

    def observe_samples(self, samples: Sequence[TrainingSample]) -> None:
        """Count samples, their trained tokens and their staleness. Call this when the samples are given to trainers.

        The staleness of a sample is the published version minus the sample's oldest version. Samples without trained tokens
        have no staleness.
        """
        version = self._coordinator.fleet.published
        ages = [version - s.oldest_version for s in samples if s.num_trained]
        self._staleness.update(ages)
        self.metrics.observe_staleness(ages)
        totals = self._totals
        self._totals = replace(
            totals,
            samples=totals.samples + len(samples),
            tokens=totals.tokens + sum(sample.num_trained for sample in samples),
            staleness=totals.staleness + sum(ages),
            stalest=max(totals.stalest, *ages, 0),
        )
        self._notify()

    async def _serve_metrics(self, _request: web.Request) -> web.Response:
        coordinator = self._coordinator
        body = self.metrics.render(
            version=coordinator.fleet.published,
            engines=coordinator.fleet.states(),
            rollouts=msgspec.to_builtins(self._rollouts.stats()),
        )
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _serve_page(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self._page,
            content_type="text/html",
            charset="utf-8",
            headers={
                "Content-Security-Policy": f"{POLICY}; connect-src 'self'; frame-ancestors 'none'; "
                "base-uri 'none'"
            },
        )

    async def _serve_overview(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=msgspec.json.encode(self.overview()), content_type="application/json"
        )

    async def _serve_events(self, request: web.Request) -> web.StreamResponse:
        if len(self._open_pages) >= MAX_STREAMS:
            raise web.HTTPServiceUnavailable(
                text=f"events: the controller serves at most {MAX_STREAMS} streams at a time; close one, or "
                "request /v1/overview"
            )
        changed = asyncio.Event()
        self._open_pages.add(changed)
        try:
            return await self._stream_events(request, changed)
        finally:
            self._open_pages.discard(changed)

    async def _stream_events(
        self, request: web.Request, changed: asyncio.Event
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        self._notify()
        try:
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await changed.wait()
                except TimeoutError:
                    frame = b": still here\n\n"
                else:
                    changed.clear()
                    frame = self._frame
                is_last = self._closed
                async with asyncio.timeout(SEND_DEADLINE_S):
                    await response.write(frame)
                if is_last:
                    break
        except (ConnectionError, TimeoutError):
            # The browser closed the page, or does not read the stream.
            pass
        return response
