"""Trainer and live vLLM server take turns: vLLM's sleep mode frees the memory, and the engine reads its weights when it wakes.

vLLM has no sleep mode on CPUs, so `vllm_cpu_sleep` gives its worker memory that sleeps. Everything else is vLLM's and
Windlass's own: the routes, the scheduler, the executor, and the wrapped worker.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_servers import SUPPORT
from rows import Record, of_setting
from servers import (
    HTTP_S,
    TOKEN,
    Layout,
    Sample,
    Server,
    build,
    engine_version,
    family,
    save,
    serving,
)

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, Reaction
from windlass.errors import RoundAborted, WindlassError
from windlass.trainers.client import TrainerClient

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

KIND, DEADLINE_S, NUM_TOKENS = "dense", 120.0, 8
PROMPT = [(i * i * 7 + i * 3) % 240 + 5 for i in range(64)]
"""Prompt of two blocks of the prefix cache."""
SLEEPS = str(SUPPORT / "cpu_sleep")
"""Folder of the plugin that gives vLLM's worker for CPUs a sleep mode."""
FLAGS = ("--enable-sleep-mode", "--block-size", "32")


@dataclass
class Turns:
    """A live server, a controller, and a trainer in this process."""

    server: Server
    controller: windlass.Controller
    trainer: TrainerClient
    model: Any
    folder: Path
    version: int = -1

    async def post(self, path: str) -> None:
        await asyncio.to_thread(self.server.http.post, path, {}, HTTP_S)

    def ask(self) -> asyncio.Task[Sample]:
        """Send a request, and return the task that waits for its answer."""
        return asyncio.create_task(asyncio.to_thread(self.server.sample, PROMPT, NUM_TOKENS))

    def step(self) -> None:
        """Change every weight, and save the next version."""
        self.version += 1
        with torch.no_grad():
            for index, parameter in enumerate(self.model.parameters()):
                noise = torch.Generator().manual_seed(1000 * self.version + index)
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.1 + 0.01)
        self.model.save_pretrained(self.folder / str(self.version))

    async def publish(self) -> None:
        update = self.trainer.publish(self.version, deadline_s=DEADLINE_S)
        assert (await asyncio.to_thread(update.result)).left_out == {}

    async def check(self, answer: Sample | None = None) -> None:
        """Require every tensor of the newest version, and that version on every token of an answer."""
        answer = answer or await self.ask()
        assert answer.versions == [self.version] * NUM_TOKENS
        live = await asyncio.to_thread(self.server.digests)
        checkpoint = self.folder / str(self.version)
        assert live == await asyncio.to_thread(self.server.digests_of_fresh_load, checkpoint)
        assert (await self.ask()).tokens == answer.tokens

    async def must_wait(self, task: asyncio.Task[Sample], seconds: float = 3.0) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), seconds)


@contextmanager
def sleeping_server(folder: Path, tp: int) -> Iterator[Server]:
    """Run a server that may sleep and has joined no fleet."""
    first = save(KIND, 1, folder / "first")
    layout, log = Layout(tp=tp), folder / "server.log"
    with serving(
        "vllm", first, log, layout=layout, transport="pull", flags=FLAGS, path=SLEEPS
    ) as server:
        yield server


@asynccontextmanager
async def taking_turns(server: Server, folder: Path, **config: Any) -> AsyncIterator[Turns]:
    """Let the server join a new fleet and serve version 0."""
    folder.mkdir()
    told = ControlConfig(pause_mode=PauseMode.ABORT, deadlines=PhaseDeadlines(pause_s=60), **config)
    async with windlass.Controller(token=TOKEN, config=told) as controller:
        await asyncio.to_thread(server.join, controller.url, "pull")
        model = build(KIND, 2)
        connect = windlass.connect_trainer
        trainer = await asyncio.to_thread(
            connect, model, controller=controller.url, token=TOKEN, transport="pull"
        )
        with trainer:
            turns = Turns(server, controller, trainer, model, folder)
            turns.step()
            await turns.publish()
            await turns.check()
            yield turns


@pytest.mark.parametrize("tp", [1, 2])
async def test_vllm_takes_turns_with_its_trainer(tp: int, tmp_path: Path, shown: Record) -> None:
    with sleeping_server(tmp_path, tp) as server:
        await take_all_turns(server, tmp_path / "fleet")


async def take_all_turns(server: Server, folder: Path) -> None:
    async with taking_turns(server, folder) as turns:
        for level in (1, 2):
            await turns.post(f"/sleep?level={level}")
            turns.step()
            await turns.publish()
            await turns.check()
        await turns.controller.sleep_engines(mode=PauseMode.ABORT)
        turns.step()
        await turns.publish()
        await turns.check()
        # The framework wakes the weights before the update and the KV cache after it.
        await turns.post("/sleep?level=2")
        turns.step()
        await turns.post("/wake_up?tags=weights")
        waiting = turns.ask()
        await turns.publish()
        await turns.must_wait(waiting)
        await turns.post("/wake_up?tags=kv_cache")
        await turns.check(await waiting)
        # The framework wakes everything before the update.
        await turns.post("/sleep?level=2")
        turns.step()
        await turns.post("/wake_up")
        waiting = turns.ask()
        await turns.must_wait(waiting)
        await turns.publish()
        await turns.check(await waiting)
