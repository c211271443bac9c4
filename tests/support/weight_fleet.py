"""Trainer and engine ranks as processes that a test can query: see `weight_rank`."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, NamedTuple

import weight_rank

import windlass
from windlass.config import ControlConfig

TOKEN = "secret of the test"
PROCESSES: ForkServerContext | SpawnContext = multiprocessing.get_context("forkserver")

ANSWER_S = 150.0
"""Deadline of a rank's answer. On a busy machine, a rank needs a minute to start."""


class Rank:
    """A process that answers each message with a message."""

    def __init__(self, target: Callable[..., None], settings: Any) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=target, args=(theirs, settings))
        self.process.start()
        theirs.close()

    def tell(self, message: object) -> None:
        self._pipe.send(message)

    async def read(self) -> Any:
        assert await asyncio.to_thread(self._pipe.poll, ANSWER_S), f"no answer within {ANSWER_S} s"
        return self._pipe.recv()

    async def ask(self, message: object) -> Any:
        self.tell(message)
        return await self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.join(30)
        self.process.close()
        self._pipe.close()


class Published(NamedTuple):
    """Result of a version for the trainers. `left_out` contains engines, or the reason of a failure."""

    outcome: str
    left_out: list[str]
    nbytes: int


class Fleet:
    """Trainer ranks, and engines that join one by one.

    Args:
        devices: device of trainers and engines, by the name of their group; host memory by default.
        common: passed to every rank's `RankSettings`.
    """

    def __init__(
        self,
        url: str,
        num_trainers: int,
        devices: Mapping[str, str] | None = None,
        **common: Any,
    ) -> None:
        self.url, self._num_trainers, self._common = url, num_trainers, common
        self._devices = devices or {}
        self.trainers: list[Rank] = []
        self.engines: dict[str, list[Rank]] = {}

    def _settings(self, index: int, parts: int, **more: Any) -> Any:
        device = self._devices.get(more.get("group", "trainer"), "cpu")
        return weight_rank.RankSettings(
            url=self.url,
            token=TOKEN,
            index=index,
            parts=parts,
            device=device,
            **self._common,
            **more,
        )

    def add_engine(self, name: str, num_ranks: int = 1, fault: str = "") -> None:
        self.engines[name] = [
            Rank(
                weight_rank.run_engine,
                self._settings(i, num_ranks, group=name, fault="" if i else fault),
            )
            for i in range(num_ranks)
        ]

    def add_trainers(self, arena_nbytes: int = 0, fault: str = "") -> None:
        parts = self._num_trainers
        self.trainers = [
            Rank(
                weight_rank.run_trainer,
                self._settings(i, parts, arena_nbytes=arena_nbytes, fault="" if i else fault),
            )
            for i in range(parts)
        ]

    def _ranks(self) -> list[Rank]:
        return [*self.trainers, *(rank for ranks in self.engines.values() for rank in ranks)]

    async def ready(self) -> None:
        for rank in self._ranks():
            assert await rank.read() == "ready"

    async def publish(self, version: int) -> Published:
        """Return the answer of all trainer ranks, and the bytes that they wrote together."""
        answers = await asyncio.gather(*(t.ask(version) for t in self.trainers))
        assert all(answer[:2] == answers[0][:2] for answer in answers)
        return Published(answers[0][0], answers[0][1], sum(answer[2] for answer in answers))

    async def held(self, name: str) -> list[Any]:
        """Return (served version, version of all bytes in memory, mixed weights) per rank."""
        return [(await rank.ask(True))[:3] for rank in self.engines[name]]

    async def relayed(self) -> int:
        """Return the bytes that engines have written to each other."""
        ranks = [rank for ranks in self.engines.values() for rank in ranks]
        return sum([(await rank.ask(True))[3] for rank in ranks])

    def close(self) -> None:
        for rank in self._ranks():
            rank.close()


@asynccontextmanager
async def running_fleet(
    config: ControlConfig, num_trainers: int, **common: Any
) -> AsyncIterator[Fleet]:
    """Run a controller and its fleet; `common` is passed to every rank's `RankSettings`."""
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        fleet = Fleet(controller.url, num_trainers, **common)
        try:
            yield fleet
        finally:
            fleet.close()
