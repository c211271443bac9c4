"""Turns of trainers and engines on the same memory: engines sleep while the trainers step."""

from __future__ import annotations

import asyncio

from windlass.config import PauseMode
from windlass.control.members import Members
from windlass.control.messages import Done, Sleep
from windlass.control.run import Run
from windlass.control.session import RankCaller, describe, failures_of
from windlass.errors import ConfigError, RoundAborted

ANSWER_S = 2.0
"""Seconds that the controller waits for an answer beyond the deadline of the command."""


async def sleep_engines(
    run: Run, members: Members, lock: asyncio.Lock, mode: PauseMode, deadline_s: float
) -> None:
    """Make every connected engine free its weights and caches until the next round.

    Wait for the end of a running round first.

    Args:
        run: run of the controller; it has the fleet, and makes the round ids.
        members: connections of the agents.
        lock: lock that a round holds while it runs.
        mode: treatment of running requests; they lose their KV cache.
        deadline_s: seconds within which the engines must sleep.

    Raises:
        ConfigError: `mode` keeps the KV cache.
        RoundAborted: an engine did not sleep. The other engines may be asleep; the next round wakes them.
    """
    if mode is PauseMode.IN_PLACE:
        raise ConfigError(
            "sleep_engines: mode must be abort or retract, because the KV cache is freed"
        )
    async with lock:
        commands = {
            worker: Sleep(mode, deadline_s)
            for engine in run.fleet.engines()
            for worker in engine.workers
        }
        caller = RankCaller(members.sessions, run.new_round())
        failed = failures_of(await caller.call(commands, deadline_s + ANSWER_S), Done)
    if failed:
        reasons = (f"{worker} did not sleep: {describe(why)}" for worker, why in failed.items())
        raise RoundAborted("; ".join(reasons))
