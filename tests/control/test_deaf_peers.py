"""Peers that keep their connections open and read nothing, as a stopped process does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import aiohttp
import pytest
from aiohttp import web
from fake_agents import engine_manifest, fake_hello
from idle_scheduler import IdleScheduler

from windlass.config import ControlConfig
from windlass.control import messages
from windlass.control.client import AgentChannel
from windlass.control.connect_messages import Identity, Welcome
from windlass.control.coordinator import Coordinator
from windlass.control.fleet import Agent
from windlass.control.messages import (
    AGENT_FRAMES,
    Abort,
    Apply,
    Command,
    Failure,
    FailureKind,
    Result,
)
from windlass.control.routes import mount_updates
from windlass.control.session import AgentSession
from windlass.errors import PeerUnreachable, ProtocolError, TrainerError
from windlass.jobs.train_controller import TrainController
from windlass.jobs.train_worker import CONTROLLER_FRAMES, Joined
from windlass.jobs.train_worker import Done as TrainDone
from windlass.net import rpc_client, rpc_server
from windlass.net.access import Access, role_token
from windlass.net.clock import Backoff
from windlass.net.messages import PROTOCOL_VERSION, Envelope, Refused, Reply, encode
from windlass.net.server import ControlServer
from windlass.net.sockets import PART_NBYTES, PartJoiner, close_socket, send_frame

TOKEN = "a-token"
LARGE = "x" * (16 << 20)
DEADLINE_S = 20.0

WebSocket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


@asynccontextmanager
async def deaf_agent(
    handler: Callable[[web.WebSocketResponse], Awaitable[None]],
) -> AsyncIterator[None]:
    """Run `handler` for one connection to its end. The other side never reads."""
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
    """Pause reading, so that data from the other side stays in the socket buffers."""
    below = connection._response.connection
    assert below is not None
    assert isinstance(below.transport, asyncio.Transport)
    below.transport.pause_reading()


async def frame_of(socket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse) -> bytes:
    parts, frame = PartJoiner(2 * len(LARGE)), None
    while frame is None:
        frame = parts.add(await socket.receive_bytes())
    return frame


def agent_named(worker: str) -> Agent:
    manifest = engine_manifest(worker, 1)
    return Agent(fake_hello(manifest, group=worker.partition("/")[0]), manifest)


async def test_a_deaf_agent_is_unreachable_by_the_deadline_of_a_frame() -> None:
    async def converse(socket: web.WebSocketResponse) -> None:
        session = AgentSession(socket, agent_named("engine-a/0"), send_deadline_s=0.3)
        with pytest.raises(PeerUnreachable, match=r"engine-a/0: .*did not read within 0\.3 s"):
            await session.send(Refused(LARGE))
        # The session stays unreachable.
        with pytest.raises(PeerUnreachable):
            await session.send(Refused(LARGE))
        await session.close()

    async with deaf_agent(converse):
        pass


@pytest.mark.parametrize("deaf", [True, False])
async def test_a_deaf_engine_that_is_cut_off_may_still_be_writing(
    deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = partial(AgentSession, send_deadline_s=0.3)
    monkeypatch.setattr("windlass.control.members.AgentSession", impatient)
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    coordinator = Coordinator(ControlConfig())
    mount_updates(coordinator, server)
    await server.start()
    ended: list[Identity] = []

    async def presumed(identity: Identity) -> None:
        ended.append(identity)

    monkeypatch.setattr(coordinator.catch_ups, "presume_ended", presumed)
    hello = fake_hello(engine_manifest("engine-a/0", 1), group="engine-a")
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.ENGINE)}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        connection = await http.ws_connect(f"{server.url}/v1/agents")
        try:
            await connection.send_bytes(encode(hello))
            # This frame is the `Welcome`.
            await connection.receive_bytes()
            session = coordinator.members.sessions["engine-a/0"]
            if deaf:
                stop_reading(connection)
                with pytest.raises(PeerUnreachable, match="did not read"):
                    await session.send(Refused(LARGE))
            else:
                await connection.close()
            await coordinator.changes.until(
                lambda: not coordinator.members.sessions, DEADLINE_S, lambda: "not lost"
            )
            assert ended == ([] if deaf else [session.agent.identity])
        finally:
            connection._response.close()
            await coordinator.close()
            await server.close()


async def test_closing_a_connection_to_a_deaf_peer_ends_by_its_deadline() -> None:
    async def converse(socket: web.WebSocketResponse) -> None:
        sending = asyncio.create_task(socket.send_bytes(LARGE.encode()))
        # Let the send start and wait for room in the buffer.
        await asyncio.sleep(0)
        await close_socket(socket, deadline_s=0.3)
        with pytest.raises((ConnectionError, RuntimeError)):
            await sending

    async with deaf_agent(converse):
        pass


async def test_an_agent_reconnects_when_its_controller_is_deaf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc_client, "send_frame", partial(send_frame, deadline_s=0.3))
    monkeypatch.setattr(rpc_client, "BACKOFF", Backoff(0.01, 5.0))
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
        # This frame is the `Hello`.
        AGENT_FRAMES.decode(await socket.receive_bytes())
        await socket.send_bytes(encode(Welcome(1, "run")))
        if num_connections == 1:
            await socket.send_bytes(encode(Envelope(1, 1, 1, Apply(1))))
            await frame_of(socket)
            await socket.close()
        elif num_connections == 2:
            assert isinstance(request.transport, asyncio.Transport)
            # The agent sends its answer again over the next connection.
            request.transport.pause_reading()
            await third.wait()
        else:
            third.set()
            async for _ in socket:
                # Read to the end, so that nothing of the agent is under way when it leaves.
                pass
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


async def test_incomplete_first_frames_take_limited_memory_and_block_no_other_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five connections that sent a part every 20 s used to make the server keep 200 MiB each."""
    monkeypatch.setattr(rpc_server, "MAX_WAITING_NBYTES", 4 * PART_NBYTES)
    coordinator, server = (
        Coordinator(ControlConfig()),
        ControlServer(host="127.0.0.1", port=0, token=TOKEN),
    )
    mount_updates(coordinator, server)
    await server.start()
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.ENGINE)}"}
    part = b"\xc1\x00" + bytes(PART_NBYTES), b"\xc1\x01" + bytes(PART_NBYTES)
    try:
        async with aiohttp.ClientSession(headers=headers) as http, asyncio.timeout(DEADLINE_S):
            greedy = [await http.ws_connect(f"{server.url}/v1/agents") for _ in range(2)]
            for which in (0, 1, 1, 1):
                for socket in greedy:
                    with suppress(ConnectionError):
                        await socket.send_bytes(part[which])
            refused = messages.CONTROLLER_FRAMES.decode(await greedy[0].receive_bytes())
            assert isinstance(refused, Refused)
            assert not refused.final
            assert "bytes in total; try again" in refused.message
            hello = fake_hello(engine_manifest("engine-a/0", 1), group="engine-a")
            async with http.ws_connect(f"{server.url}/v1/agents") as socket:
                await send_frame(socket, encode(hello))
                assert isinstance(
                    messages.CONTROLLER_FRAMES.decode(await frame_of(socket)), Welcome
                )
            for socket in greedy:
                await socket.close()
    finally:
        await server.close()


async def test_a_call_whose_connection_is_lost_during_sending_fails_as_unreachable() -> None:
    """The call used to raise KeyError, which ended the task that brings engines up."""

    async def converse(socket: web.WebSocketResponse) -> None:
        session = AgentSession(socket, agent_named("engine-a/0"), send_deadline_s=0.3)
        calling = asyncio.create_task(
            session.call((2, 1, 1), Abort(LARGE, mixed_weights=False, deadline_s=1.0))
        )
        await asyncio.sleep(0.1)
        session.detach(socket, "connection broke")
        with pytest.raises(PeerUnreachable, match="engine-a/0"):
            await calling
        await session.close()

    async with deaf_agent(converse):
        pass


async def test_a_deaf_trainer_rank_is_named_by_the_deadline_of_a_command() -> None:
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    scheduler = IdleScheduler()
    trainers = TrainController(scheduler, command=("true",), world_size=1, token=TOKEN)
    trainers.mount(server)
    await server.start()
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.TRAINER)}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        starting = asyncio.create_task(trainers.start(server.url, deadline_s=DEADLINE_S))
        socket = await http.ws_connect(f"{server.url}/v1/train_workers/trainer")
        try:
            job = await scheduler.job()
            await socket.send_bytes(encode(Joined(PROTOCOL_VERSION, 0, 1, job, "first")))
            # This frame is the `Welcome`.
            await socket.receive_bytes()
            setup = CONTROLLER_FRAMES.decode(await socket.receive_bytes())
            assert isinstance(setup, Envelope)
            reply = Reply(setup.epoch, setup.round, setup.seq, TrainDone())
            await socket.send_bytes(encode(reply))
            await starting
            stop_reading(socket)
            with pytest.raises(TrainerError, match=r"no answer from trainer-0 within 0\.5 s"):
                async with asyncio.timeout(DEADLINE_S):
                    await trainers.save(LARGE, deadline_s=0.5)
            await trainers.close(grace_s=0.1)
        finally:
            socket._response.close()
            await server.close()


async def test_a_large_frame_may_take_longer_than_the_deadline_of_a_part_both_ways() -> None:
    """The receiver takes parts slowly. The deadline applies to each part, not to the frame."""
    num_parts, pause_s, deadline_s = 40, 0.07, 1.5
    frames = [bytes([side]) + bytes(num_parts * PART_NBYTES - 2) + b"." for side in (1, 2)]
    loop = asyncio.get_running_loop()

    async def send(socket: WebSocket, frame: bytes) -> float:
        began = loop.time()
        await send_frame(socket, frame, deadline_s)
        return loop.time() - began

    async def take(socket: WebSocket) -> bytes:
        parts, frame = PartJoiner(num_parts * PART_NBYTES), None
        while frame is None:
            frame = parts.add(await socket.receive_bytes())
            await asyncio.sleep(pause_s)
        return frame

    async def converse(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        taken, took_s = await asyncio.gather(take(socket), send(socket, frames[0]))
        assert taken == frames[1]
        assert took_s > deadline_s
        await socket.close()
        return socket

    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    server.add_routes([web.get("/v1/agents", converse)])
    await server.start()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        async with aiohttp.ClientSession(headers=headers) as http:
            socket = await http.ws_connect(f"{server.url}/v1/agents")
            async with asyncio.timeout(2 * DEADLINE_S):
                taken, took_s = await asyncio.gather(take(socket), send(socket, frames[1]))
                assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
            assert taken == frames[0]
            assert took_s > deadline_s
            await socket.close()
    finally:
        await server.close()


STOPPED = """
import asyncio, os, signal, sys
import aiohttp

async def main():
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer " + sys.argv[2]}) as http:
        socket = await http.ws_connect(sys.argv[1])
        await socket.receive_bytes()
        os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(main())
"""


async def test_a_process_stopped_within_a_large_frame_is_cut_off() -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def converse(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        try:
            await send_frame(socket, bytes(64 * PART_NBYTES), 1.0)
        except ConnectionError as error:
            ended.set_result(str(error))
        else:
            ended.set_result("sent")
        return socket

    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    server.add_routes([web.get("/v1/agents", converse)])
    await server.start()
    arguments = ("-c", STOPPED, f"{server.url}/v1/agents", TOKEN)
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    try:
        async with asyncio.timeout(2 * DEADLINE_S):
            assert await ended == "the peer did not read within 1 s"
    finally:
        process.kill()
        await process.wait()
        await server.close()


async def test_frames_of_any_size_arrive_in_the_order_of_sending() -> None:
    frames = [bytes([n]) * (3 * PART_NBYTES if n % 2 else 10) for n in range(6)]
    taken: list[bytes] = []

    async def converse(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        taken.extend([await frame_of(socket) for _ in frames])
        return socket

    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    server.add_routes([web.get("/v1/agents", converse)])
    await server.start()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        async with aiohttp.ClientSession(headers=headers) as http, asyncio.timeout(DEADLINE_S):
            socket = await http.ws_connect(f"{server.url}/v1/agents")
            await asyncio.gather(*(send_frame(socket, frame) for frame in frames))
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        assert taken == frames
    finally:
        await server.close()


FIRST, MIDDLE, LAST = (bytes([0xC1, mark]) for mark in range(3))
PART = bytes(range(256)) * (PART_NBYTES // 256)


def test_the_joiner_drops_an_unfinished_frame() -> None:
    parts = PartJoiner(4 * PART_NBYTES)
    assert parts.add(FIRST + PART) is None
    assert parts.add(b"small") == b"small"
    assert parts.add(FIRST + PART) is None
    assert parts.add(FIRST + PART) is None
    assert parts.add(MIDDLE + PART) is None
    assert parts.add(LAST + b"end") == PART + PART + b"end"
    assert parts.add(b"") == b""


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ([LAST + b"end"], "mark c102 after 0 parts"),
        ([MIDDLE + PART], "mark c101 after 0 parts"),
        ([FIRST + PART, b"\xc1\x07" + PART], "mark c107 after 1 parts"),
        ([b"\xc1"], "mark c1 after 0 parts"),
        ([FIRST + b"short"], f"a part must have {PART_NBYTES} bytes, got 5"),
        ([FIRST + PART, MIDDLE + PART, LAST + b"x"], f"at most {2 * PART_NBYTES} bytes, got more"),
    ],
)
def test_parts_that_do_not_form_a_frame_are_refused(sent: list[bytes], reason: str) -> None:
    parts = PartJoiner(2 * PART_NBYTES)
    for part in sent[:-1]:
        assert parts.add(part) is None
    with pytest.raises(ProtocolError, match=reason):
        parts.add(sent[-1])
