"""A whole control plane in one process: a controller on a real socket, fake agents on real channels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

from fake_agents import (
    FakeEngineRank,
    FakeFabric,
    FakeTrainerRank,
    engine_manifest,
    fake_hello,
    trainer_manifest,
)

from windlass.config import ControlConfig
from windlass.control.client import AgentChannel, CommandHandler, TrainerChannel
from windlass.control.connect_messages import Hello
from windlass.control.coordinator import Coordinator
from windlass.control.engine_channel import EngineChannel
from windlass.control.messages import Command
from windlass.control.report import UpdateReport
from windlass.control.routes import mount_updates
from windlass.layout.manifest import Role, ShardManifest
from windlass.net.server import ControlServer
from windlass.planning.planner import Planner, plan_transfer

__all__ = ["TOKEN", "FakeFleet", "until"]

TOKEN = "a shared secret"
CONNECT_S = 20.0
WITHIN_S = 20.0


def _nothing(_command: Command) -> None:
    return


async def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds` returns True, for at most `WITHIN_S`."""
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 - a fake has no event
            await asyncio.sleep(0.01)


@final
class FakeFleet:
    """Control plane as an async context manager; at first, only the controller runs.

    Args:
        config: configuration of the coordinator.
        journal_path: file of the journal; None keeps rounds in memory.
        num_trainers: ranks of the trainer job.
        planner: function that compiles plans.
        port: port to listen on; 0 lets the system choose.
    """

    def __init__(
        self,
        config: ControlConfig | None = None,
        *,
        journal_path: Path | None = None,
        num_trainers: int = 2,
        planner: Planner = plan_transfer,
        port: int = 0,
    ) -> None:
        self.config = config or ControlConfig()
        self.num_trainers = num_trainers
        self.fabric = FakeFabric()
        self.token = TOKEN
        self.server = ControlServer(host="127.0.0.1", port=port, token=TOKEN)
        self.coordinator = Coordinator(self.config, journal_path=journal_path, planner=planner)
        mount_updates(self.coordinator, self.server)
        self.channels: dict[str, AgentChannel] = {}
        self.trainers: dict[str, FakeTrainerRank] = {}
        self.engines: dict[str, FakeEngineRank] = {}

    @property
    def port(self) -> int:
        """Port of the controller."""
        return int(self.server.url.rpartition(":")[2])

    @property
    def routable(self) -> dict[str, int]:
        """Routable engines and the versions that they serve."""
        return {engine.name: engine.version for engine in self.coordinator.routable()}

    async def __aenter__(self) -> FakeFleet:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_agents()
        await self.close_controller()

    async def close_agents(self) -> None:
        """Close every channel. Idempotent."""
        await asyncio.gather(*(asyncio.to_thread(c.close) for c in self.channels.values()))

    async def close_controller(self) -> None:
        """Stop the controller; agents continue to reconnect. Idempotent."""
        await self.coordinator.close()
        await self.server.close()

    async def connect(
        self,
        hello: Hello,
        handler: CommandHandler,
        *,
        token: str | None = None,
        on_disconnect: Callable[[], None] | None = None,
    ) -> AgentChannel:
        """Connect one agent; the default token is `self.token`."""
        shown = self.token if token is None else token
        common = (self.server.url, shown, lambda: hello, handler)
        channel: AgentChannel
        if on_disconnect is not None:
            channel = EngineChannel(*common, on_disconnect=on_disconnect)
        elif hello.role is Role.ENGINE:
            channel = AgentChannel(*common)
        else:
            channel = TrainerChannel(*common)
        await asyncio.to_thread(channel.connect, CONNECT_S)
        self.channels[hello.worker] = channel
        return channel

    async def add_trainer(
        self,
        index: int,
        *,
        on_command: Callable[[Command], None] = _nothing,
        incarnation: str = "first",
        job: str = "",
    ) -> FakeTrainerRank:
        """Connect trainer rank `index`."""
        worker = f"trainer/{index}"
        rank = FakeTrainerRank(worker, self.fabric, mode=self.config.mode, on_command=on_command)
        hello = fake_hello(
            trainer_manifest(worker, index, self.num_trainers),
            group="trainer",
            rank=index,
            world_size=self.num_trainers,
            incarnation=incarnation,
            job=job,
        )
        self.trainers[worker] = rank
        await self.connect(hello, rank)
        return rank

    async def add_engine(
        self,
        group: str,
        *,
        ranks: int = 1,
        on_command: Callable[[Command], None] = _nothing,
        incarnation: str = "first",
        served_version: int = -1,
        lineage: str = "",
        manifest: ShardManifest | None = None,
        address: str = "",
    ) -> list[FakeEngineRank]:
        """Connect every rank of an engine."""
        made = []
        for index in range(ranks):
            worker = f"{group}/{index}"
            rank = FakeEngineRank(
                worker, self.num_trainers, mode=self.config.mode, on_command=on_command
            )
            self.fabric.ranks[worker] = self.engines[worker] = rank
            hello = fake_hello(
                manifest or engine_manifest(worker, self.num_trainers),
                group=group,
                rank=index,
                world_size=ranks,
                incarnation=incarnation,
                served_version=served_version,
                lineage=lineage or self.coordinator.run.lineage,
                address=address,
            )
            await self.connect(hello, rank)
            made.append(rank)
        return made

    async def start(self, engines: Mapping[str, int]) -> None:
        """Connect all trainers and these engines (name -> ranks), and wait until the controller knows them."""
        for index in range(self.num_trainers):
            await self.add_trainer(index)
        for name, ranks in engines.items():
            await self.add_engine(name, ranks=ranks)
        await self.coordinator.members.wait_for_fleet(
            num_trainers=self.num_trainers, engines=tuple(engines), deadline_s=CONNECT_S
        )

    async def announce(self, worker: str, version: int, deadline_s: float = 30.0) -> UpdateReport:
        """Announce a version as one trainer rank; see `TrainerChannel.announce`."""
        channel = self.channels[worker]
        assert isinstance(channel, TrainerChannel)
        return await asyncio.to_thread(channel.announce, version, deadline_s)

    async def publish(self, version: int) -> UpdateReport:
        """Announce a version as every trainer rank.

        Raises:
            AssertionError: the ranks got different reports.
        """
        reports = await asyncio.gather(*(self.announce(w, version) for w in self.trainers))
        if len({(r.outcome, r.reason, r.engines) for r in reports}) != 1:
            raise AssertionError(f"publish: ranks were told different things: {reports}")
        return reports[0]
