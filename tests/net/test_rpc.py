"""The session layer: calls, lost connections that return, and forbidden requests of peers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, Never, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web

from windlass.errors import PeerUnreachable, ProtocolError
from windlass.net import rpc_client, rpc_server
from windlass.net.clock import Backoff
from windlass.net.messages import Codec, Envelope, Garbled, Refused, Reply, check_name, encode
from windlass.net.rpc import Session
from windlass.net.rpc_client import Client
from windlass.net.rpc_server import serve
from windlass.net.server import ControlServer
from windlass.net.sockets import PART_NBYTES, open_http

TOKEN = "a-token"
WITHIN_S = 20.0


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    name: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    pass


PEER_FRAMES: Codec[Greeting | Reply[str]] = Codec(Greeting | Reply[str], "peer frame")
SERVER_FRAMES: Codec[Welcome | Refused | Envelope[str]] = Codec(
    Welcome | Refused | Envelope[str], "server frame"
)


class Peer(Client[str, str, Welcome]):
    """Peer that answers its commands when the test lets it."""

    def __init__(self, url: str, *, keeps_calls: bool, executor: Executor | None = None) -> None:
        super().__init__(
            url, "/v1/agents", TOKEN, SERVER_FRAMES, keeps_calls=keeps_calls, executor=executor
        )
        self.began, self.may_end = threading.Semaphore(0), threading.Event()
        self.commands: list[str] = []

    def hello(self) -> Greeting:
        return Greeting("peer")

    def on_frame(self, frame: Welcome) -> None:
        return

    def execute(self, call: Envelope[str]) -> str:
        self.commands.append(call.command)
        self.began.release()
        assert self.may_end.wait(WITHIN_S)
        return call.command.upper()

    def failed(self, error: Exception, command: str | None) -> str:
        return f"{type(error).__name__}: {error}"


class Server:
    """Server that owns the session of one peer."""

    def __init__(self, *, keeps_calls: bool) -> None:
        self.keeps_calls = keeps_calls
        self.session: Session[str, str] = Session("peer", keeps_calls=keeps_calls)
        self.connected = asyncio.Condition()
        self.num_connected = 0
        self.ended = asyncio.Event()
        self.sockets: list[web.WebSocketResponse] = []
        self.server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        self.server.add_routes([web.get("/v1/agents", self._serve)])

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        try:
            return await serve(request, self, PEER_FRAMES, heartbeat_s=5.0, max_nbytes=1 << 22)
        finally:
            self.ended.set()

    async def admit(
        self, first: Greeting | Reply[str], socket: web.WebSocketResponse
    ) -> tuple[Session[str, str], Welcome]:
        if not isinstance(first, Greeting):
            raise ProtocolError("not a greeting")
        self.sockets.append(socket)
        if not self.keeps_calls:
            self.session = Session("peer", socket)
        return self.session, Welcome()

    async def admitted(self, session: Session[str, str]) -> None:
        async with self.connected:
            self.num_connected += 1
            self.connected.notify_all()

    async def received(self, session: Session[str, str], frame: Greeting | Reply[str]) -> None:
        if isinstance(frame, Greeting):
            raise Garbled("again")
        session.on_reply((frame.epoch, frame.round, frame.seq), frame.result)

    async def lost(self, session: Session[str, str], reason: str, *, ended: bool) -> None:
        return

    async def wait_connected(self, num: int) -> None:
        async with asyncio.timeout(WITHIN_S), self.connected:
            await self.connected.wait_for(lambda: self.num_connected >= num)


@asynccontextmanager
async def served(*, keeps_calls: bool) -> AsyncIterator[Server]:
    server = Server(keeps_calls=keeps_calls)
    await server.server.start()
    try:
        yield server
    finally:
        await server.server.close()


@asynccontextmanager
async def connected(server: Server, peer: Peer) -> AsyncIterator[Peer]:
    await asyncio.to_thread(peer.connect, WITHIN_S)
    try:
        yield peer
    finally:
        peer.may_end.set()
        await asyncio.to_thread(peer.close)


async def test_a_kept_call_runs_once_and_is_answered_over_the_next_connection() -> None:
    async with served(keeps_calls=True) as server:
        peer = Peer(server.server.url, keeps_calls=True)
        async with connected(server, peer):
            answer = await server.session.call((1, 1, 1), "step")
            assert await asyncio.to_thread(peer.began.acquire, timeout=WITHIN_S)
            await server.sockets[0].close()
            await server.wait_connected(2)
            peer.may_end.set()
            async with asyncio.timeout(WITHIN_S):
                assert await answer == "STEP"
                await server.sockets[1].close()
                assert await (await server.session.call((1, 2, 1), "next")) == "NEXT"
            assert peer.commands == ["step", "next"]


async def test_a_call_that_is_not_kept_fails_when_its_connection_is_lost() -> None:
    async with served(keeps_calls=False) as server:
        peer = Peer(server.server.url, keeps_calls=False)
        async with connected(server, peer):
            await server.wait_connected(1)
            first = await server.session.call((1, 1, 1), "a")
            second = await server.session.call((1, 1, 2), "b")
            assert await asyncio.to_thread(peer.began.acquire, timeout=WITHIN_S)
            await server.sockets[0].close()
            for lost in (first, second):
                with pytest.raises(PeerUnreachable, match="peer: connection closed"):
                    async with asyncio.timeout(WITHIN_S):
                        await lost
            await server.wait_connected(2)
            peer.may_end.set()
            async with asyncio.timeout(WITHIN_S):
                stale = await (await server.session.call((1, 1, 3), "c"))
                assert stale.startswith("StaleMessage: epoch 1 round 1 has passed")
                assert await (await server.session.call((1, 2, 1), "d")) == "D"
            # The lost connection cancels commands that had not started.
            assert peer.commands == ["a", "d"]


async def test_a_call_without_a_free_thread_is_answered_at_once() -> None:
    class Exhausted(Executor):
        def submit(self, *_args: Any, **_kwargs: Any) -> Never:
            raise RuntimeError("can't start new thread")

    async with (
        served(keeps_calls=False) as server,
        connected(server, Peer(server.server.url, keeps_calls=False, executor=Exhausted())),
    ):
        await server.wait_connected(1)
        async with asyncio.timeout(WITHIN_S):
            answer = await (await server.session.call((1, 1, 1), "a"))
        assert answer == "RuntimeError: can't start new thread"


def test_a_client_that_cannot_start_threads_fails_when_it_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhausted(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    peer = Peer("http://127.0.0.1:1", keeps_calls=False)
    monkeypatch.setattr(threading.Thread, "start", exhausted)
    with pytest.raises(PeerUnreachable, match="can't start new thread"):
        peer.connect(WITHIN_S)


class Failing(Peer):
    """Peer whose own code raises, before or after the welcome."""

    def __init__(self, url: str, *, welcomed: bool) -> None:
        super().__init__(url, keeps_calls=False)
        self._raises_late = welcomed

    def hello(self) -> Greeting:
        if not self._raises_late:
            raise RuntimeError("reason of the peer's own code")
        return super().hello()

    def on_frame(self, frame: Welcome) -> None:
        raise RuntimeError("reason of the peer's own code")


@pytest.mark.parametrize("welcomed", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_client_whose_own_code_raises_ends_with_its_reason(*, welcomed: bool) -> None:
    async with served(keeps_calls=False) as server:
        peer = Failing(server.server.url, welcomed=welcomed)
        with pytest.raises(RuntimeError, match="reason of the peer's own code"):
            await asyncio.to_thread(peer.connect, WITHIN_S)
        with pytest.raises(RuntimeError, match="reason of the peer's own code"):
            peer.ended.result(WITHIN_S)


@pytest.mark.parametrize("is_deflated", [True, False])
async def test_a_server_refuses_compression_and_large_messages(is_deflated: bool) -> None:
    async with served(keeps_calls=False) as server, open_http(TOKEN, to_controller=True) as http:
        socket = await http.ws_connect(
            server.server.url + "/v1/agents", compress=15 if is_deflated else 0
        )
        assert not socket.compress
        await socket.send_bytes(bytes(PART_NBYTES + 3))
        async with asyncio.timeout(WITHIN_S):
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        assert socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
        await socket.close()


async def test_a_peer_that_closes_before_its_first_frame_is_not_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, rpc_server.__name__)
    async with served(keeps_calls=False) as server, open_http(TOKEN, to_controller=True) as http:
        socket = await http.ws_connect(server.server.url + "/v1/agents")
        await socket.close()
        async with asyncio.timeout(WITHIN_S):
            await server.ended.wait()
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [("INFO", "connection broke: closed before the first frame")]


async def test_a_token_follows_no_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/v1/status"})

    async def status(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    monkeypatch.setattr(rpc_client, "BACKOFF", Backoff(5.0, 5.0))
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    server.add_routes([web.get("/v1/agents", elsewhere), web.get("/v1/status", status)])
    await server.start()
    try:
        peer = Peer(server.url, keeps_calls=False)
        with pytest.raises(TimeoutError, match=r"redirects to '/v1/status', which is not followed"):
            await asyncio.to_thread(peer.connect, 2.0)
        assert asked == ["/v1/agents"]
    finally:
        await server.close()


def test_a_message_is_refused_by_its_size_before_it_is_decoded() -> None:
    codec: Codec[list[int]] = Codec(list[int], "numbers", max_nbytes=4)
    assert codec.decode(encode([1, 2])) == [1, 2]
    with pytest.raises(ProtocolError, match="numbers must have at most 4 bytes, got 7"):
        codec.decode(encode([1, 2, 3, 4, 5, 6]))
    with pytest.raises(ProtocolError, match="numbers of 1 bytes"):
        codec.decode(b"\xc1")


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "x" * 256, "\u202e", "\ud800"])
def test_names_are_short_and_can_be_printed(name: str) -> None:
    check_name("engine-\u00e4 1", "worker")
    with pytest.raises(ProtocolError, match="worker must be 1 to 255 bytes of printable"):
        check_name(name, "worker")


async def test_a_command_that_a_peer_cannot_read_is_answered_over_the_same_connection() -> None:
    async with served(keeps_calls=True) as server:
        peer = Peer(server.server.url, keeps_calls=True)
        async with connected(server, peer):
            peer.may_end.set()
            unreadable = await server.session.call((1, 1, 1), cast("str", {"reward": True}))
            answer = await server.session.call((1, 2, 1), "step")
            async with asyncio.timeout(WITHIN_S):
                said = await unreadable
                assert said.startswith("ProtocolError: server frame of "), said
                assert "Expected `str`, got `object`" in said
                assert await answer == "STEP"
            assert server.num_connected == 1


async def test_a_damaged_frame_is_requested_again_over_another_connection() -> None:
    async with served(keeps_calls=True) as server:
        peer = Peer(server.server.url, keeps_calls=True)
        async with connected(server, peer):
            peer.may_end.set()
            await server.sockets[0].send_bytes(encode(Envelope(1, 1, 1, "step"))[:-2])
            await server.wait_connected(2)
            answer = await server.session.call((1, 2, 1), "step")
            async with asyncio.timeout(WITHIN_S):
                assert await answer == "STEP"
