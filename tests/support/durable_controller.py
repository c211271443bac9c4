"""A rollout controller in its own process, with an owner that stores its groups.

    python durable_controller.py PORT JOURNAL STORE ENGINE_URL NUM_GROUPS NUM_WORKERS

The owner wants `NUM_GROUPS` groups of four. It writes each group into its store, one line per
group, before it acknowledges the group. After a kill in between, the next process acknowledges
stored groups.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    RolloutConfig,
    RolloutController,
    RolloutGroup,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    mount_rollout_routes,
)

TOKEN = "a-token"
SAMPLING = SamplingParams(max_new_tokens=6)
GROUP_SIZE = 4


def stored(store: Path) -> list[dict[str, Any]]:
    """Return the groups in the store; each line was written in one call."""
    if not store.exists():
        return []
    return [json.loads(line) for line in store.read_bytes().splitlines()]


def line_of(group: RolloutGroup) -> bytes:
    line = {
        "prompt": group.metadata,
        "tasks": [rollout.task_id for rollout in group.rollouts],
        "answers": [rollout.output_ids for rollout in group.rollouts],
    }
    return json.dumps(line).encode() + b"\n"


def add(store: Path, line: bytes) -> None:
    with store.open("ab") as file:
        file.write(line)


async def main() -> None:
    port, journal, store = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    engine, num_groups, num_workers = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
    config = RolloutConfig(retry_backoff_s=0.01, journal=journal, acknowledge=True)
    engines = StaticEngines([("engine", engine, 0)])
    controller = RolloutController(
        engines, StalenessPolicy.unbounded(10_000), token=TOKEN, config=config
    )
    server = ControlServer(host="127.0.0.1", port=port, token=TOKEN)
    mount_rollout_routes(server, controller, BatchQueue())
    async with controller:
        have = stored(store)
        controller.acknowledge(line["tasks"][0] for line in have)
        wanted = set(range(num_groups)) - {int(str(line["prompt"])) for line in have}
        wanted -= {int(str(handle.metadata)) for handle in controller.recovered.groups.values()}
        # Rollouts of absent workers do not count as lost before the workers reconnect.
        before = controller.stats()
        assert (before.lost, before.outstanding > 0) == (0, bool(controller.recovered.groups))
        await server.start()
        print(server.url, len(have), len(controller.recovered.groups), flush=True)
        await controller.wait_for_workers(num_workers, deadline_s=60)
        for prompt in sorted(wanted):
            controller.submit_group((prompt + 1, 5), GROUP_SIZE, SAMPLING, metadata=prompt)
        for _ in range(num_groups - len(have)):
            (group,) = await controller.next_batch(1, deadline_s=60)
            add(store, line_of(group))
            controller.acknowledge([group.rollouts[0].task_id])
        stats = controller.stats()
        print("done", stats.lost, stats.outstanding, stats.failed, flush=True)
    await server.close()


if __name__ == "__main__":
    asyncio.run(main())
