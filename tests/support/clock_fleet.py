"""Controller, trainers and an engine as processes with a clock that the test sets: `FAKETIME_*`.

`clock_fleet.py CLOCK WHICH`: for every offset on stdin, write the offset to the file CLOCK,
publish a version, and print one line: the days of controller and engine, the outcome, and the
engine's version. WHICH process has the clock: `all`, the `controller` or the `engine`. The caller
starts this process with the clock, unless WHICH is `engine`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import weight_fleet
from machine_faults import DAY_S, clock_environment

from windlass.config import ControlConfig


def set_clock(clock: Path, offset: str) -> None:
    clock.write_text(offset)


async def main(clock: Path, whose: str) -> None:
    if whose == "controller":
        del os.environ["LD_PRELOAD"]
    if whose == "engine":
        # A spawned process gets the environment of that moment.
        weight_fleet.PROCESSES = multiprocessing.get_context("spawn")
    config = ControlConfig(heartbeat_s=2.0)
    async with weight_fleet.running_fleet(config, 2) as fleet:
        fleet.add_trainers()
        if whose == "engine":
            os.environ.update(clock_environment(clock))
        fleet.add_engine("a")
        await fleet.ready()
        for version, offset in enumerate(sys.stdin):
            set_clock(clock, offset)
            ended = await fleet.publish(version)
            line = {
                "controller": time.time() // DAY_S,
                "engine": await fleet.engines["a"][0].ask("clock") // DAY_S,
                "outcome": ended.outcome,
                "held": await fleet.held("a"),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
