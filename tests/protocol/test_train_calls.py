"""What a train controller says to its ranks and to its scheduler; the ranks are plain sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest

from windlass.control.access import Access, role_token
from windlass.control.server import ControlServer
from windlass.errors import ProtocolError
from windlass.testing.idle_scheduler import IdleScheduler
from windlass.training.controller import TrainController
from windlass.training.messages import (
    TRAIN_PROTOCOL_VERSION,
    CallReply,
    Done,
    Joined,
    decode_call,
    encode_frame,
)
from windlass.training.worker import _Worker

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


async def answer_everything(url: str) -> None:
    """A rank that does what it is told."""
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.TRAINER)}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.ws_connect(f"{url}/v1/train_workers") as socket,
    ):
        await socket.send_bytes(encode_frame(Joined(TRAIN_PROTOCOL_VERSION, 0, 1, "first")))
        async for message in socket:
            call = decode_call(message.data)
            await socket.send_bytes(encode_frame(CallReply(call.request_id, Done())))


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
        worker = _Worker(msgspec.UNSET, url, TOKEN, 1, 2)  # type: ignore[arg-type]  # no call comes
        with pytest.raises(ProtocolError, match="refuses this rank"):
            await asyncio.to_thread(worker.run)
        worker._thread.join()
        worker._loop.close()
