"""A controller, trainers and an engine as processes whose clock of the day a test sets: `FAKETIME_*`.

`clock_fleet.py CLOCK`: every offset on stdin is written to the file CLOCK, then a version is published; one
line says the day of this process, how that ended, and what the engine holds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from weight_fleet import running_fleet

from windlass.config import ControlConfig


def set_clock(clock: Path, offset: str) -> None:
    clock.write_text(offset)


async def main(clock: Path) -> None:
    async with running_fleet(ControlConfig(heartbeat_s=2.0), 2) as fleet:
        fleet.add_engine("a")
        fleet.add_trainers()
        await fleet.ready()
        for version, offset in enumerate(sys.stdin):
            set_clock(clock, offset)
            ended = await fleet.publish(version)
            held = await fleet.held("a")
            line = {"day": time.time() // 86400, "outcome": ended.outcome, "held": held}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
