"""Trainer and live SGLang server take turns: its memory saver frees the memory, and the engine reads its weights when it wakes.

torch_memory_saver needs CUDA, so `sglang_cpu_sleep` replaces SGLang's adapter of it. Everything else is SGLang's and
Windlass's own: the routes, the scheduler and its handlers, and the hooks in the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_servers import filled_gaps
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
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines
from windlass.errors import PeerUnreachable
from windlass.trainers.client import TrainerClient

KIND, DEADLINE_S, NUM_TOKENS = "dense", 120.0, 8
PROMPT = [(i * i * 7 + i * 3) % 240 + 5 for i in range(64)]
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@dataclass
class Turns:
    """A live server, a controller, and a trainer in this process."""

    server: Server
    controller: windlass.Controller
    trainer: TrainerClient
    model: Any
    folder: Path
    version: int = -1

    async def post(self, path: str, body: object) -> None:
        await asyncio.to_thread(self.server.http.post, path, body, HTTP_S)

    async def refused(self, path: str, body: object, reason: str) -> None:
        with pytest.raises(PeerUnreachable, match=reason):
            await self.post(path, body)

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
        publish = self.trainer.publish
        update = await asyncio.to_thread(publish, self.version, deadline_s=DEADLINE_S)
        assert update.result().left_out == {}

    async def check(self, answer: Sample | None = None) -> None:
        """Require every tensor of the newest version, and that version on every token of an answer."""
        answer = answer or await self.ask()
        assert answer.versions == [self.version] * NUM_TOKENS
        live = await asyncio.to_thread(self.server.digests)
        checkpoint = self.folder / str(self.version)
        assert live == await asyncio.to_thread(self.server.digests_of_fresh_load, checkpoint)
        assert (await self.ask()).tokens == answer.tokens

    async def must_wait(self, task: asyncio.Task[Sample], seconds: float = 2.0) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), seconds)

    def nbytes(self) -> int:
        """Return the memory of the server's processes that is in use."""
        pages = (
            Path(f"/proc/{pid}/statm").read_text().split()[1]
            for pid in family(self.server.process.pid)
        )
        return 4096 * sum(map(int, pages))


@asynccontextmanager
async def taking_turns(folder: Path, tp: int, *flags: str, **config: Any) -> AsyncIterator[Turns]:
    """Run a server that serves version 0."""
    first, log = save(KIND, 1, folder / "first"), folder / "server.log"
    told = ControlConfig(pause_mode=PauseMode.ABORT, deadlines=PhaseDeadlines(pause_s=60), **config)
    async with windlass.Controller(token=TOKEN, config=told) as controller:
        running = serving(
            *("sglang", first, log),
            layout=Layout(tp=tp),
            controller=controller.url,
            transport="pull",
            flags=("--enable-memory-saver", *flags),
            path=filled_gaps(log),
        )
        with ExitStack() as stack:
            # The server joins while the controller's loop runs.
            server = await asyncio.to_thread(stack.enter_context, running)
            model = build(KIND, 2)
            trainer = await asyncio.to_thread(
                windlass.connect_trainer,
                model,
                controller=controller.url,
                token=TOKEN,
                transport="pull",
            )
            stack.enter_context(trainer)
            turns = Turns(server, controller, trainer, model, folder)
            turns.step()
            await turns.publish()
            await turns.check()
            yield turns


@pytest.mark.engines
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tp", [1, 2])
async def test_sglang_takes_turns_with_its_trainer(tp: int, tmp_path: Path, shown: Record) -> None:
    async with taking_turns(tmp_path, tp) as turns:
        # The controller calls, and the round wakes everything.
        awake = turns.nbytes()
        await turns.controller.sleep_engines(mode=PauseMode.ABORT)
        assert not turns.controller.coordinator.routable()
        assert awake - turns.nbytes() > (2 << 20), "the memory is freed"
        turns.step()
        await turns.publish()
        await turns.check()
        # A request that runs is computed again with the next version.
        running = asyncio.create_task(asyncio.to_thread(turns.server.sample, PROMPT, 150))
        await asyncio.sleep(0.5)
        await turns.post(RELEASE, {})
        turns.step()
        await turns.must_wait(running)
        await turns.publish()
        long = await running
        assert len(long.tokens) == 150
        assert {*long.versions} <= {turns.version - 1, turns.version}
        assert long.versions[-1] == turns.version
        await turns.check()
        # slime and verl call without a pause before, and wake the weights before the update and the caches after it.
        for tags in ({}, {"tags": ["kv_cache", "weights"]}):
            await turns.post(RELEASE, tags)
            await turns.post(RELEASE, tags)
            waiting = turns.ask()
            await turns.must_wait(waiting)
            turns.step()
            await turns.post(RESUME, {"tags": ["weights"]})
            await turns.must_wait(waiting)
            await turns.publish()
            await turns.must_wait(waiting)
            await turns.post(RESUME, {"tags": ["kv_cache", "cuda_graph"]})
            await turns.check(await waiting)
            await turns.post(RESUME, {"tags": ["kv_cache"]})
        # The framework wakes everything before the update.
        await turns.post(RELEASE, {})
        turns.step()
        await turns.post(RESUME, {})
        waiting = turns.ask()
        await turns.must_wait(waiting)
        await turns.post("/continue_generation", {})
        await turns.must_wait(waiting)
        await turns.publish()
        await turns.check(await waiting)
        # Only the caches sleep: the weights stay, and the engine serves again without a round.
        await turns.post(RELEASE, {"tags": ["kv_cache"]})
        waiting = turns.ask()
        await turns.must_wait(waiting)
        await turns.post(RESUME, {"tags": ["kv_cache"]})
        await turns.check(await waiting)
    shown(
        of_setting(
            "sglang",
            engine_version("sglang"),
            "--enable-memory-saver",
            detail="transport pull; trainer and engine take turns on the same memory",
        )
    )
