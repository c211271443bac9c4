"""A trainer rank with an ended session or an interrupted caller does not harm other ranks."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest
from fake_fleet import FakeFleet
from small_pair import small_manifest

import windlass
from windlass.control.client import TrainerChannel
from windlass.errors import ConfigError, ProtocolError
from windlass.layout.manifest import Role
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transports.registry import create_transport, parse_transport

TOKEN = "t" * 32


def connected(
    url: str, made_whole: list[str], *, job: str = "", world_size: int = 1
) -> tuple[TrainerClient, np.ndarray]:
    trained = np.zeros(24, np.uint8)
    transport = create_transport(parse_transport("cma"), towards=url)
    address = int(trained.ctypes.data)
    region = transport.register(address, trained.nbytes)
    memory = (ParameterMemory(address, trained.nbytes),)
    weights = TrainerWeights(
        manifest=small_manifest("trainer/0", Role.TRAINER),
        parameters=lambda: memory,
        make_whole=lambda: made_whole.append("whole"),
    )
    client = TrainerClient(
        weights,
        transport=transport,
        controller=url,
        token=TOKEN,
        job=job,
        world_size=world_size,
        registered=[region],
    )
    return client, trained


async def test_a_dismissed_rank_joins_a_collective_step_before_it_raises() -> None:
    """The connected ranks wait in the same collective, and nothing else would end that wait."""
    made_whole: list[str] = []
    async with windlass.Controller(token=TOKEN) as controller:

        def connect(job: str, world_size: int) -> TrainerClient:
            return connected(controller.url, made_whole, job=job, world_size=world_size)[0]

        client = await asyncio.to_thread(connect, "earlier", 2)
        with client, await asyncio.to_thread(connect, "later", 1):
            # The controller dismisses the rank of the earlier job, which lacks a rank.
            with pytest.raises(ProtocolError, match="replaced by job 'later'"):
                await asyncio.to_thread(client.publish, 0)
            with pytest.raises(ProtocolError, match="replaced by job 'later'"):
                await asyncio.to_thread(client.prepare_publish, 1)
            with pytest.raises(ProtocolError, match="replaced by job 'later'"):
                await asyncio.to_thread(lambda: client.publish(2, wait=False).result(deadline_s=10))
            assert made_whole == ["whole"] * 3


async def test_an_invalid_version_does_not_cancel_the_announcement_in_progress() -> None:
    async with windlass.Controller(token=TOKEN) as controller:
        client, _memory = await asyncio.to_thread(connected, controller.url, [])
        with client:
            await asyncio.to_thread(client.prepare_publish, 0)
            with pytest.raises(ConfigError, match="prepare_publish: version must be"):
                await asyncio.to_thread(client.prepare_publish, -1)
            with pytest.raises(
                ConfigError, match="the previous update must end before version 1 begins"
            ):
                await asyncio.to_thread(client.publish, 1, deadline_s=5.0)


async def test_an_interrupted_caller_withdraws_its_announcement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the announcement could start a round while the weights change."""
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        channel = rig.channels["trainer/0"]
        assert isinstance(channel, TrainerChannel)
        waiting = rig.coordinator.requests

        def interrupt(_report: Future[object], _deadline_s: float | None = None) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as interrupted:
            interrupted.setattr(Future, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                channel.announce(0, 30.0)
        assert channel.announced is None
        async with asyncio.timeout(10):
            while waiting.num_waiting:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
