"""What a train controller says to its ranks and to its scheduler; the ranks are plain sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from idle_scheduler import IdleScheduler

from windlass.errors import ConfigError, ProtocolError
from windlass.jobs.train_controller import TrainController
from windlass.jobs.train_worker import CONTROLLER_FRAMES, Done, Joined, _Worker
from windlass.net.access import Access, role_token
from windlass.net.messages import PROTOCOL_VERSION, Envelope, Reply, encode
from windlass.net.server import ControlServer

TOKEN = "a-token"


@asynccontextmanager
async def mounted(scheduler: IdleScheduler) -> AsyncIterator[tuple[TrainController, str]]:
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    trainers = TrainController(scheduler, command=("true",), world_size=1, token=TOKEN)
    trainers.mount(server)
    await server.start()
    try:
        yield trainers, server.url
    finally:
        await server.close()


async def answer_everything(url: str, name: str = "trainer") -> None:
    """A rank that does what it is told."""
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.TRAINER)}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.ws_connect(f"{url}/v1/train_workers/{name}") as socket,
    ):
        await socket.send_bytes(encode(Joined(PROTOCOL_VERSION, 0, 1, "first")))
        async for message in socket:
            call = CONTROLLER_FRAMES.decode(message.data)
            if isinstance(call, Envelope):
                await socket.send_bytes(encode(Reply(call.epoch, call.round, call.seq, Done())))


async def test_actor_and_critic_share_a_server_and_a_name_is_taken_once() -> None:
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    command = ("true",)
    both = [
        TrainController(IdleScheduler(), command=command, world_size=1, token=TOKEN, name=name)
        for name in ("actor", "critic-1.5")
    ]
    for each in both:
        each.mount(server)
    with pytest.raises(ConfigError, match=r"mounted once, again: GET /v1/train_workers/.*critic"):
        both[1].mount(server)
    with pytest.raises(ConfigError, match=r"name must be of .*, got 'a/b'"):
        TrainController(IdleScheduler(), command=command, world_size=1, token=TOKEN, name="a/b")
    await server.start()
    ranks = [
        asyncio.create_task(answer_everything(server.url, name)) for name in ("actor", "critic-1.5")
    ]
    try:
        # Either waits for its own rank, and gives up the other's.
        await asyncio.gather(*(each.start(server.url, deadline_s=20) for each in both))
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await answer_everything(server.url, "critic-1x5")
        headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.ENGINE)}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            answer = await session.get(f"{server.url}/v1/train_workers/actor")
            assert answer.status == 403
        await asyncio.gather(*(each.close(grace_s=1) for each in both))
    finally:
        for rank in ranks:
            rank.cancel()
        await asyncio.gather(*ranks, return_exceptions=True)
        await server.close()


async def test_ranks_that_stopped_have_the_time_to_end_that_close_was_given() -> None:
    scheduler = IdleScheduler()
    async with mounted(scheduler) as (trainers, url):
        rank = asyncio.create_task(answer_everything(url))
        await trainers.start(url, deadline_s=20)
        await trainers.close(grace_s=7.0)
        assert scheduler.graces == [7.0]
        await rank


@pytest.mark.timeout(60)
async def test_a_rank_that_does_not_belong_here_is_told_and_does_not_come_again() -> None:
    async with mounted(IdleScheduler()) as (_, url):
        worker = _Worker(msgspec.UNSET, url, "trainer", TOKEN, 1, 2)  # type: ignore[arg-type]  # no call comes
        with pytest.raises(ProtocolError, match=r"refused this agent: .*rank must be in \[0, 1\)"):
            await asyncio.to_thread(worker.work)
