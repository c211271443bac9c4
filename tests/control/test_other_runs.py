"""Leftovers of an earlier run change nothing in this run, with real processes and real memory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from kept_port import free_port
from weight_fleet import TOKEN, Fleet
from weight_rank import PER_RUN

import windlass
from windlass.config import ControlConfig, PhaseDeadlines
from windlass.control.coordinator import Coordinator

CONFIG = ControlConfig(heartbeat_s=5.0, deadlines=PhaseDeadlines(connect_s=20, fleet_s=30))
WAIT_S = 60.0


def controller_at(port: int, journal: Path | None) -> windlass.Controller:
    return windlass.Controller(token=TOKEN, port=port, config=CONFIG, journal_path=journal)


async def until(coordinator: Coordinator, holds: Callable[[], bool]) -> None:
    reached = asyncio.Event()

    def look() -> None:
        if holds():
            reached.set()

    coordinator.subscribe(look)
    look()
    async with asyncio.timeout(WAIT_S):
        await reached.wait()


def versions(coordinator: Coordinator) -> dict[str, int]:
    return {engine.name: engine.version for engine in coordinator.routable()}


@pytest.mark.parametrize("has_journals", [True, False])
@pytest.mark.parametrize("last", [5, 2])
async def test_an_engine_of_an_earlier_run_catches_up_and_decides_nothing(
    last: int, has_journals: bool, tmp_path: Path
) -> None:
    """The engine's version is higher than this run's, or has the same number and other weights."""
    port = free_port()
    with ExitStack() as stack:
        first = Fleet(f"http://127.0.0.1:{port}", 2, can_send=True)
        stack.callback(first.close)
        async with controller_at(port, tmp_path / "first" if has_journals else None):
            first.add_engine("x")
            first.add_trainers()
            await first.ready()
            for version in range(last + 1):
                assert (await first.publish(version)).outcome == "published"
            stopped = first.engines["x"][0].process.pid
            assert stopped is not None
            os.kill(stopped, signal.SIGSTOP)
            for trainer in first.trainers:
                trainer.close()
            first.trainers = []
        async with controller_at(port, tmp_path / "second" if has_journals else None) as controller:
            coordinator = controller.coordinator
            second = Fleet(controller.url, 2, can_send=True, run=1)
            stack.callback(second.close)
            for name in ("a", "b"):
                second.add_engine(name)
            second.add_trainers()
            await second.ready()
            for version in range(3):
                assert (await second.publish(version))[:2] == ("published", [])
            os.kill(stopped, signal.SIGCONT)
            await until(coordinator, lambda: versions(coordinator).keys() >= {"x"})
            assert versions(coordinator) == {"a": 2, "b": 2, "x": 2}
            for fleet, name in ((second, "a"), (second, "b"), (first, "x")):
                assert await fleet.held(name) == [(2, str(2 + PER_RUN), False)], name
            assert (await second.publish(3))[:2] == ("published", [])
            assert await first.held("x") == [(3, str(3 + PER_RUN), False)]


async def test_ranks_of_two_starts_of_a_job_cannot_publish_together() -> None:
    """Rank 0 was killed while rank 1 waits in `publish`. Both are started again."""
    with ExitStack() as stack:
        async with controller_at(0, None) as controller:
            first = Fleet(controller.url, 2, job="first start")
            stack.callback(first.close)
            first.add_engine("a")
            first.add_trainers()
            await first.ready()
            for version in range(3):
                assert (await first.publish(version)).outcome == "published"
            first.trainers.pop(0).close()
            first.trainers[0].tell(3)
            second = Fleet(controller.url, 2, job="second start", run=1)
            stack.callback(second.close)
            second.add_trainers()
            assert await second.trainers[0].read() == "ready"
            second.trainers[0].tell(3)
            outcome, (reason,), _ = await first.trainers[0].read()
            assert outcome == "ProtocolError"
            assert "job 'first start' was replaced by job 'second start'" in reason
            assert await first.held("a") == [(2, "2", False)]
            assert await second.trainers[1].read() == "ready"
            assert (await second.trainers[1].ask(3))[0] == "published"
            assert (await second.trainers[0].read())[0] == "published"
            assert await first.held("a") == [(3, str(3 + PER_RUN), False)]
