"""An update of a live server beside a running request, and counters of vLLM, for tests of single settings."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servers import HTTP_S, TOKEN, Sample, Server

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode


def metric(server: Server, name: str) -> float:
    """Return the sum of the values of one of vLLM's metrics."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=HTTP_S) as response:
        text = response.read().decode()
    values = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)
    assert values, name
    return sum(map(float, values))


@dataclass
class Counter:
    """Growth of one of vLLM's counters since the last call of `since`, or since the server started."""

    server: Server
    name: str
    before: float = 0.0

    def since(self) -> float:
        now = metric(self.server, self.name)
        grown, self.before = now - self.before, now
        return grown


async def update_beside(
    server: Server,
    model: Any,
    version: int,
    mode: UpdateMode,
    *,
    prompt: Sequence[int],
    num_tokens: int,
    head_start_s: float = 0.0,
) -> Sample:
    """Publish a model into a server in a new fleet while one request runs; return the answer to the request.

    The update begins `head_start_s` after the request, and keeps running requests.
    """
    config = ControlConfig(
        mode=mode, pause_mode=PauseMode.IN_PLACE, deadlines=PhaseDeadlines(pause_s=120)
    )
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(server.join, controller.url, "cma")
        running = asyncio.create_task(asyncio.to_thread(server.sample, list(prompt), num_tokens))
        await asyncio.sleep(head_start_s)

        def update() -> None:
            with windlass.connect_trainer(model, controller=controller.url, token=TOKEN) as client:
                assert client.publish(version).result().digest_ok

        await asyncio.to_thread(update)
        return await running
