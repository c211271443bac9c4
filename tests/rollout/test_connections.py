"""The connection on which tasks and completions travel: real sockets, cut and refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from windlass.errors import ProtocolError
from windlass.rollout.connection import Connection, ConnectionRoutes
from windlass.rollout.deadlines import Deadlines
from windlass.rollout.messages import (
    CompletionAck,
    CompletionBatch,
    OutcomeStatus,
    Partial,
    RolloutOutcome,
    encode,
)

DEADLINE_S = 20.0


def batch(seq: int, num_tokens: int = 3) -> CompletionBatch:
    tokens = tuple(range(seq * num_tokens, (seq + 1) * num_tokens))
    outcome = RolloutOutcome(
        task_id=f"t-{seq}",
        attempt=1,
        seq=seq,
        status=OutcomeStatus.ACCEPTED,
        result=Partial(tokens, tuple(-t / 8 for t in tokens), (0,) * num_tokens),
        engine="a",
        worker="w",
        finished_at=0.0,
    )
    return CompletionBatch("w", "i", (outcome,))


@dataclass
class Server:
    """Answers batches, and counts over what they came."""

    taken: list[CompletionBatch] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    upgrades: bool = True
    refuse: bool = False
    transports: list[asyncio.BaseTransport] = field(default_factory=list)
    url: str = ""

    def handle(self, body: CompletionBatch) -> CompletionAck:
        if self.refuse:
            raise web.HTTPServiceUnavailable(text="not now")
        self.taken.append(body)
        return CompletionAck(tuple(outcome.seq for outcome in body.outcomes))

    async def start(self, stack: AsyncExitStack) -> None:
        routes = ConnectionRoutes("/v1/completions", CompletionBatch, self.handle)

        @web.middleware
        async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.seen.append(request.method)
            assert request.transport is not None
            self.transports.append(request.transport)
            if request.method == "GET" and not self.upgrades:
                raise web.HTTPMethodNotAllowed("GET", ["POST"])
            return await handler(request)

        app = web.Application(middlewares=[watch])
        app.add_routes(routes.routes())
        app.on_shutdown.append(routes.close)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=DEADLINE_S)
        await self.runner.setup()
        stack.push_async_callback(self.runner.cleanup)
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1/completions"


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Server, Connection[CompletionAck]]]:
    async with AsyncExitStack() as stack:
        server = Server()
        await server.start(stack)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        connection = Connection(session, server.url, CompletionAck)
        stack.push_async_callback(connection.close)
        yield server, connection


async def test_all_calls_share_one_connection(
    pair: tuple[Server, Connection[CompletionAck]],
) -> None:
    server, connection = pair
    for seq in range(1, 51):
        assert (await connection.call(batch(seq), deadline_s=DEADLINE_S)).seqs == (seq,)
    assert server.taken == [batch(seq) for seq in range(1, 51)]
    assert server.seen == ["GET"]


async def test_a_batch_of_many_megabytes_passes(
    pair: tuple[Server, Connection[CompletionAck]],
) -> None:
    server, connection = pair
    large = batch(1, num_tokens=1 << 19)
    assert (await connection.call(large, deadline_s=DEADLINE_S)).seqs == (1,)
    assert server.taken == [large]


async def test_where_upgrades_are_refused_the_same_calls_are_posts(
    pair: tuple[Server, Connection[CompletionAck]],
) -> None:
    server, connection = pair
    server.upgrades = False
    for seq in range(1, 4):
        assert (await connection.call(batch(seq), deadline_s=DEADLINE_S)).seqs == (seq,)
    assert server.seen == ["GET", "POST", "POST", "POST"], "it does not ask again at once"
    assert server.taken == [batch(1), batch(2), batch(3)]


async def test_a_cut_connection_is_an_error_and_the_next_call_opens_another(
    pair: tuple[Server, Connection[CompletionAck]],
) -> None:
    server, connection = pair
    await connection.call(batch(1), deadline_s=DEADLINE_S)
    server.transports[0].close()
    with pytest.raises((aiohttp.ClientError, OSError)):
        await connection.call(batch(2), deadline_s=DEADLINE_S)
    assert (await connection.call(batch(2), deadline_s=DEADLINE_S)).seqs == (2,)
    assert server.seen == ["GET", "GET"]


async def test_an_answer_that_comes_after_the_deadline_is_never_taken_for_the_next_one() -> None:
    """The peer answers its first question only when the second connection is there."""
    second = asyncio.Event()
    connections = 0

    async def answer(request: web.Request) -> web.WebSocketResponse:
        nonlocal connections
        connections += 1
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if connections == 2:
            second.set()
        asked = CompletionAck((connections,))
        async for _ in socket:
            await second.wait()
            if not socket.closed:
                await socket.send_bytes(encode(asked))
        return socket

    app = web.Application()
    app.add_routes([web.get("/", answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            connection = Connection(
                session, f"http://127.0.0.1:{runner.addresses[0][1]}/", CompletionAck
            )
            with pytest.raises(TimeoutError):
                await connection.call(batch(1), deadline_s=0.2)
            assert (await connection.call(batch(2), deadline_s=DEADLINE_S)).seqs == (2,)
            await connection.close()
    finally:
        await runner.cleanup()


async def test_a_refusal_and_nonsense_are_errors_with_their_reason(
    pair: tuple[Server, Connection[CompletionAck]],
) -> None:
    server, connection = pair
    server.refuse = True
    with pytest.raises(aiohttp.ClientConnectionError, match="not now"):
        await connection.call(batch(1), deadline_s=DEADLINE_S)
    server.refuse = False
    with pytest.raises(aiohttp.ClientConnectionError, match="CompletionBatch of"):
        await connection.call(CompletionAck((1,)), deadline_s=DEADLINE_S)
    async with aiohttp.ClientSession() as session:
        wrong = Connection(session, server.url, CompletionBatch)
        with pytest.raises(ProtocolError):
            await wrong.call(batch(1), deadline_s=DEADLINE_S)
        await wrong.close()
    assert (await connection.call(batch(2), deadline_s=DEADLINE_S)).seqs == (2,)


async def test_a_server_that_closes_does_not_wait_for_open_connections(
    pair: tuple[Server, Connection[CompletionAck]],
) -> None:
    server, connection = pair
    await connection.call(batch(1), deadline_s=DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S / 2):
        await server.runner.cleanup()
    with pytest.raises((aiohttp.ClientError, OSError)):
        await connection.call(batch(2), deadline_s=DEADLINE_S)


async def test_deadlines_pass_in_order_and_cancelled_ones_do_not() -> None:
    passed: list[int] = []
    last = asyncio.Event()

    def note(item: int) -> None:
        passed.append(item)
        if item == 99:
            last.set()

    deadlines = Deadlines(0.05, note)
    tickets = [deadlines.start(item) for item in range(100)]
    for ticket in tickets[:99:2]:
        ticket.cancel()
        ticket.cancel()
    assert not passed
    async with asyncio.timeout(DEADLINE_S):
        await last.wait()
    assert passed == [item for item in range(100) if item % 2]
    assert asyncio.get_running_loop().time() >= tickets[99].ends
    last.clear()
    deadlines.start(99)
    async with asyncio.timeout(DEADLINE_S):
        await last.wait()
