"""Networks may drop silent connections: the kernel keeps them in use, and questions are repeated."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

from windlass.net.access import authorization
from windlass.net.blocking_http import BlockingHttp
from windlass.net.server import ControlServer
from windlass.net.sockets import open_http, raise_file_limit
from windlass.rollout import BatchClient, BatchQueue, TrainingSample, batches

TOKEN = "a-token"
SAMPLE = TrainingSample(
    prompt_ids=(1,),
    output_ids=(2,),
    logprobs=(-1.0,),
    versions=(0,),
    reward=1.0,
    group_id=0,
    engine="a",
)


def is_kept_alive(connection: socket.socket) -> bool:
    """Return whether the kernel probes the other end after less than a minute of silence."""
    idle_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) and idle_s < 60


def has_keepalive_timer(local: int, remote: int) -> bool:
    """Return whether the kernel's table of sockets shows a keepalive timer for the socket with these ports."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [tuple(int(end.partition(":")[2], 16) for end in row[1:3]) for row in rows]
    (timer,) = (row[5] for row, found in zip(rows, ports, strict=True) if found == (local, remote))
    return timer.startswith("02:")


async def test_both_ends_of_every_connection_are_kept_alive() -> None:
    served: list[bool] = []
    clients: list[bool] = []

    async def look(request: web.Request) -> web.Response:
        assert request.transport is not None
        served.append(is_kept_alive(request.transport.get_extra_info("socket")))
        # The kernel must acknowledge the request first: the client's timer is of a repetition until then.
        await asyncio.sleep(0.3)
        peer, own = (request.transport.get_extra_info(name) for name in ("peername", "sockname"))
        # Another connection may have the client's port too, so look for the pair of ports.
        clients.append(has_keepalive_timer(peer[1], own[1]))
        return web.Response()

    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    server.add_routes([web.get("/v1/status", look)])
    await server.start()
    try:
        async with (
            open_http(TOKEN, to_controller=True) as http,
            http.get(f"{server.url}/v1/status") as response,
        ):
            assert response.status == 200
        with BlockingHttp(server.url, authorization(TOKEN), to_controller=True) as client:
            reply = await asyncio.to_thread(client.ask, "GET", "/v1/status", deadline_s=10.0)
        assert (reply.status, reply.body) == (200, b"")
    finally:
        await server.close()
    assert served == clients == [True, True]


def test_a_file_limit_that_cannot_be_raised_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def refuse(_kind: int, _limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(resource, "setrlimit", refuse)
            assert raise_file_limit() == 200
        raised = raise_file_limit()
        assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_sockets_of_sessions_are_kept_alive() -> None:
    async with open_http(TOKEN, to_controller=True) as http, AsyncExitStack() as stack:
        app = web.Application()
        app.router.add_get("/", _answer)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (address, port), *_ = runner.addresses
        response = await stack.enter_async_context(http.get(f"http://{address}:{port}/"))
        assert response.connection is not None
        transport = response.connection.transport
        assert transport is not None
        assert is_kept_alive(transport.get_extra_info("socket"))


async def _answer(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"x" * (1 << 20))


async def test_a_batch_request_is_repeated_over_a_network_that_drops_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "ASK_EVERY_S", 0.5)
    monkeypatch.setattr(batches, "ANSWER_MARGIN_S", 0.2)
    queue, asked = BatchQueue(), asyncio.Event()
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    server.add_routes([web.get("/v1/batches", queue.serve)])
    await server.start()
    host, port = server.url.removeprefix("http://").split(":")
    num_connections = 0

    async def forget(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass the question on. The first connection never returns an answer."""
        nonlocal num_connections
        num_connections += 1
        is_forgotten = num_connections == 1
        there, to_server = await asyncio.open_connection(host, int(port))

        async def back() -> None:
            while data := await there.read(1 << 16):
                if not is_forgotten:
                    writer.write(data)

        answers = asyncio.create_task(back())
        while data := await reader.read(1 << 16):
            to_server.write(data)
            asked.set()
        answers.cancel()
        to_server.close()
        writer.close()

    proxy = await asyncio.start_server(forget, "127.0.0.1", 0)
    name, proxy_port = proxy.sockets[0].getsockname()
    try:
        with BatchClient(f"http://{name}:{proxy_port}", TOKEN) as client:
            waiting = asyncio.create_task(
                asyncio.to_thread(client.next_batch, 0, 0, 1, deadline_s=20.0)
            )
            await asked.wait()
            await queue.put(0, [[SAMPLE]])
            async with asyncio.timeout(10):
                batch = await waiting
        assert batch.samples == (SAMPLE,)
        assert num_connections == 2
    finally:
        proxy.close()
        await server.close()
