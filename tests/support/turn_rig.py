"""A trainer that takes turns with a live server, for the tests of both engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from plain_vllm import PlainServer
from servers import HTTP_S, TOKEN, Sample, Server, build

import windlass
from windlass import UpdateReport
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines
from windlass.errors import PeerUnreachable
from windlass.trainers.client import TrainerClient

KIND, DEADLINE_S, NUM_TOKENS = "dense", 120.0, 8
PROMPT = [(i * i * 7 + i * 3) % 240 + 5 for i in range(64)]
"""Prompt of two blocks of vLLM's prefix cache."""


def control_config(**config: Any) -> ControlConfig:
    """Return settings of a controller whose rounds may end running requests."""
    deadlines = PhaseDeadlines(pause_s=60)
    return ControlConfig(pause_mode=PauseMode.ABORT, deadlines=deadlines, **config)


@dataclass
class Rig:
    """A live server, a controller, and a trainer in this process."""

    server: Server
    controller: windlass.Controller
    trainer: TrainerClient
    model: Any
    folder: Path
    version: int = -1

    async def post(self, path: str, body: object = None) -> None:
        await asyncio.to_thread(self.server.http.post, path, body or {}, HTTP_S)

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
        def publish() -> UpdateReport:
            return self.trainer.publish(self.version, deadline_s=DEADLINE_S).result()

        assert (await asyncio.to_thread(publish)).left_out == {}

    async def publish_again(self) -> None:
        """Publish the present weights under a new number."""
        self.version += 1
        self.model.save_pretrained(self.folder / str(self.version))
        await self.publish()

    async def check(self, answer: Sample | None = None) -> None:
        """Require every tensor of the newest version, and that version on every token of an answer."""
        answer = answer or await self.ask()
        assert answer.versions == [self.version] * NUM_TOKENS
        live = await asyncio.to_thread(self.server.digests)
        checkpoint = self.folder / str(self.version)
        assert live == await asyncio.to_thread(self.server.digests_of_fresh_load, checkpoint)
        assert (await self.ask()).tokens == answer.tokens

    async def must_refuse(self, reason: str) -> None:
        """Wait until the server refuses its health check with the reason, and require the same for a new request."""
        await until_refused(self.server, reason)
        asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        with pytest.raises(PeerUnreachable, match=f": 503 .*{reason}"):
            await self.post("/generate", asked)

    async def must_wait(self, task: asyncio.Task[Sample], seconds: float = 3.0) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), seconds)


async def until_refused(server: Server | PlainServer, reason: str) -> None:
    """Wait until the server refuses its health check with the reason.

    A rank gets the news of a failed round, or of a controller that has ended, later than the test.
    """
    said = ""
    async with asyncio.timeout(HTTP_S):
        while reason not in said:
            try:
                await asyncio.to_thread(server.http.get, "/health", HTTP_S)
            except PeerUnreachable as error:
                said = str(error)


RigT = TypeVar("RigT", bound=Rig)


@asynccontextmanager
async def serving_first_version(
    kind: type[RigT],
    server: Server,
    controller: windlass.Controller,
    folder: Path,
    *,
    transport: str = "pull",
) -> AsyncIterator[RigT]:
    """Connect a trainer to the server's fleet, and let the server serve version 0."""
    model, connect = build(KIND, 2), windlass.connect_trainer
    trainer = await asyncio.to_thread(
        connect, model, controller=controller.url, token=TOKEN, transport=transport
    )
    with trainer:
        turns = kind(server, controller, trainer, model, folder)
        turns.step()
        await turns.publish()
        await turns.check()
        yield turns
