"""Peers whose connections stay open and who read nothing, as stopped processes do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import pytest
from aiohttp import web

from windlass.config import ControlConfig
from windlass.control import conversation
from windlass.control.access import Access, role_token
from windlass.control.client import AgentChannel
from windlass.control.coordinator import Coordinator
from windlass.control.fleet import Agent, Identity
from windlass.control.messages import (
    Apply,
    Command,
    Envelope,
    Failure,
    FailureKind,
    Refused,
    Result,
    Welcome,
    decode_agent_frame,
    encode,
)
from windlass.control.server import ControlServer
from windlass.control.session import AgentSession
from windlass.control.sockets import close_socket
from windlass.errors import PeerUnreachable, TrainerError
from windlass.testing.fake_agents import engine_manifest, fake_hello
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

TOKEN = "a-token"
LARGE = "x" * (16 << 20)
DEADLINE_S = 20.0


@asynccontextmanager
async def deaf_agent(
    handler: Callable[[web.WebSocketResponse], Awaitable[None]],
) -> AsyncIterator[None]:
    """`handler` of one connection runs to its end; the other side never reads."""
    handled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=0.2)
        await socket.prepare(request)
        try:
            await handler(socket)
        except BaseException as error:
            handled.set_exception(error)
            raise
        handled.set_result(None)
        return socket

    app = web.Application()
    app.add_routes([web.get("/", serve)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as http:
        connection = await http.ws_connect(f"http://127.0.0.1:{port}/")
        stop_reading(connection)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await handled
            yield
        finally:
            connection._response.close()
            await runner.cleanup()


def stop_reading(connection: aiohttp.ClientWebSocketResponse) -> None:
    """What the other side sends stays in the buffers between the two."""
    below = connection._response.connection
    assert below is not None
    assert isinstance(below.transport, asyncio.Transport)
    below.transport.pause_reading()


def agent_named(worker: str) -> Agent:
    manifest = engine_manifest(worker, 1)
    return Agent(fake_hello(manifest, group=worker.partition("/")[0]), manifest)


async def test_an_agent_that_reads_nothing_is_unreachable_by_the_deadline_of_a_frame() -> None:
    async def converse(socket: web.WebSocketResponse) -> None:
        session = AgentSession(socket, agent_named("engine-a/0"), send_deadline_s=0.3)
        with pytest.raises(PeerUnreachable, match=r"engine-a/0: .*does not read: waited 0\.3 s"):
            await session.send(Refused(LARGE))
        with pytest.raises(PeerUnreachable):  # and it is known from now on
            await session.send(Refused(LARGE))
        await session.close()

    async with deaf_agent(converse):
        pass


@pytest.mark.parametrize("deaf", [True, False])
async def test_an_engine_that_is_cut_off_because_it_does_not_read_may_still_be_writing(
    deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = partial(AgentSession, send_deadline_s=0.3)
    monkeypatch.setattr("windlass.control.coordinator.AgentSession", impatient)
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    coordinator = Coordinator(ControlConfig())
    coordinator.mount(server)
    await server.start()
    ended: list[Identity] = []
    monkeypatch.setattr(coordinator._catch_ups, "lost", ended.append)
    hello = fake_hello(engine_manifest("engine-a/0", 1), group="engine-a")
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.ENGINE)}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        connection = await http.ws_connect(f"{server.url}/v1/agents")
        try:
            await connection.send_bytes(encode(hello))
            await connection.receive_bytes()  # Welcome
            session = coordinator._sessions["engine-a/0"]
            if deaf:
                stop_reading(connection)
                with pytest.raises(PeerUnreachable, match="does not read"):
                    await session.send(Refused(LARGE))
            else:
                await connection.close()
            await coordinator._changes.until(
                lambda: not coordinator._sessions, DEADLINE_S, lambda: "not lost"
            )
            assert ended == ([] if deaf else [session.agent.identity])
        finally:
            connection._response.close()
            await coordinator.close()
            await server.close()


async def test_closing_a_connection_that_nobody_reads_ends_by_its_deadline() -> None:
    async def converse(socket: web.WebSocketResponse) -> None:
        sending = asyncio.create_task(socket.send_bytes(LARGE.encode()))
        await asyncio.sleep(0)  # it has begun, and waits for room
        await close_socket(socket, deadline_s=0.3)
        with pytest.raises((ConnectionError, RuntimeError)):
            await sending

    async with deaf_agent(converse):
        pass


async def test_an_agent_leaves_a_controller_that_reads_nothing_and_connects_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation, "SEND_DEADLINE_S", 0.3)
    third = asyncio.Event()
    num_connections = 0

    class Wordy:
        def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
            return Failure(FailureKind.FAILED, LARGE)

    async def serve(request: web.Request) -> web.WebSocketResponse:
        nonlocal num_connections
        num_connections += 1
        socket = web.WebSocketResponse(max_msg_size=2 * len(LARGE))
        await socket.prepare(request)
        decode_agent_frame(await socket.receive_bytes())  # Hello
        await socket.send_bytes(encode(Welcome(1)))
        if num_connections == 1:
            await socket.send_bytes(encode(Envelope(1, 1, 1, Apply(1))))
            decode_agent_frame(await socket.receive_bytes())
            await socket.close()
        elif num_connections == 2:
            assert isinstance(request.transport, asyncio.Transport)
            request.transport.pause_reading()  # what the agent answered is sent again
            await third.wait()
        else:
            third.set()
            await socket.receive()
        return socket

    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    server.add_routes([web.get("/v1/agents", serve)])
    await server.start()
    hello = fake_hello(engine_manifest("engine-a/0", 1), group="engine-a")
    channel = AgentChannel(server.url, TOKEN, lambda: hello, Wordy())
    try:
        await asyncio.to_thread(channel.connect, DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            await third.wait()
    finally:
        await asyncio.to_thread(channel.close)
        await server.close()


async def test_a_trainer_rank_that_does_not_take_a_command_is_named_by_its_deadline() -> None:
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    trainers = TrainController(IdleScheduler(), command=("true",), world_size=1, token=TOKEN)
    trainers.mount(server)
    await server.start()
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.TRAINER)}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        starting = asyncio.create_task(trainers.start(server.url, deadline_s=DEADLINE_S))
        socket = await http.ws_connect(f"{server.url}/v1/train_workers")
        try:
            await socket.send_bytes(encode_frame(Joined(TRAIN_PROTOCOL_VERSION, 0, 1, "first")))
            setup = decode_call(await socket.receive_bytes())
            await socket.send_bytes(encode_frame(CallReply(setup.request_id, Done())))
            await starting
            stop_reading(socket)
            with pytest.raises(TrainerError, match=r"no answer from trainer-0 within 0\.5 s"):
                async with asyncio.timeout(DEADLINE_S):
                    await trainers.save(LARGE, deadline_s=0.5)
            await trainers.close(grace_s=0.1)
        finally:
            socket._response.close()
            await server.close()
