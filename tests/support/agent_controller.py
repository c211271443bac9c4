"""A controller with a journal in its own process, which wants rollouts of external agents and stores each result once.

python agent_controller.py PORT JOURNAL STORE ENGINE_URL NUM_ROLLOUTS
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
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    mount_rollout_routes,
)

TOKEN = "a-token"


def stored(store: Path) -> list[dict[str, Any]]:
    lines = store.read_text().splitlines() if store.exists() else []
    return [json.loads(line) for line in lines]


def add(store: Path, line: dict[str, Any]) -> None:
    with store.open("a") as file:
        file.write(json.dumps(line) + "\n")


async def main() -> None:
    port, journal, store = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    engine, num_rollouts = sys.argv[4], int(sys.argv[5])
    config = RolloutConfig(retry_backoff_s=0.01, journal=journal, acknowledge=True)
    engines = StaticEngines([("engine", engine, 0)])
    policy = StalenessPolicy.unbounded(100)
    controller = RolloutController(engines, policy, token=TOKEN, config=config)
    server = ControlServer(host="127.0.0.1", port=port, token=TOKEN)
    mount_rollout_routes(server, controller, BatchQueue())
    async with controller:
        have = stored(store)
        controller.acknowledge(line["task"] for line in have)
        wanted = set(range(num_rollouts)) - {line["number"] for line in have}
        wanted -= {int(str(handle.metadata)) for handle in controller.recovered.groups.values()}
        await server.start()
        print(server.url, flush=True)
        for number in sorted(wanted):
            sampling = SamplingParams(max_new_tokens=32)
            controller.submit_workflow_group("agent", number, 1, sampling, metadata=number)
        for _ in range(num_rollouts - len(have)):
            (group,) = await controller.next_batch(1, deadline_s=120)
            (rollout,) = group.rollouts
            line = {
                "number": group.metadata,
                "task": rollout.task_id,
                "value": rollout.value,
                "outputs": [turn.output.output_ids for turn in rollout.turns],
                "prompts": [turn.prompt_ids for turn in rollout.turns],
                "versions": rollout.versions,
            }
            add(store, line)
            controller.acknowledge([rollout.task_id])
        stats = controller.stats()
        print("done", stats.lost, stats.outstanding, stats.failed, flush=True)
    await server.close()


if __name__ == "__main__":
    asyncio.run(main())
