"""A closed controller leaves no connection open, even if many peers reconnect while it closes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import pytest

import windlass
from windlass.net import rpc, rpc_server, server
from windlass.net.sockets import close_socket, open_http

TOKEN = "secret of the test"
CALLERS, ROUNDS, KEPT = 3, 2, 60
WITHIN_S = 30.0


def asking_for(path: str) -> bytes:
    """Return the first request of an agent or a page."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: controller\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()


@pytest.mark.parametrize("path", ["/v1/agents", "/v1/events", "/v1/overview"])
async def test_a_client_that_leaves_before_it_is_served_is_no_error(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """When many agents reconnect at once, some give up before the server accepts them."""
    async with windlass.Controller(token=TOKEN) as controller:
        port = urlsplit(controller.url).port
        assert port is not None

        def come_and_go() -> None:
            for _ in range(10):
                with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as connection:
                    connection.sendall(asking_for(path))

        await asyncio.to_thread(come_and_go)
        # The server handles this request after all of them.
        async with asyncio.timeout(WITHIN_S), open_http(TOKEN, to_controller=True) as http:
            await (await http.get(f"{controller.url}/v1/overview")).read()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def call_again_and_again(port: int, over: threading.Event) -> None:
    """Connect and ask for the channel again and again, as agents that were sent away do."""
    asked = asking_for("/v1/agents")
    kept: list[socket.socket] = []
    while not over.is_set():
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=1.0)
            kept.append(connection)
            connection.sendall(asked)
        except OSError:
            # The interpreter also runs the controller.
            over.wait(0.01)
        while len(kept) > KEPT:
            kept.pop(0).close()
    for connection in kept:
        connection.close()


@contextmanager
def callers(port: int) -> Iterator[None]:
    over = threading.Event()
    threads = [
        threading.Thread(target=call_again_and_again, args=(port, over)) for _ in range(CALLERS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def num_open(port: int) -> int:
    """Return the number of sockets of this process with the local port `port`."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
            stream = end.family == socket.AF_INET and end.type == socket.SOCK_STREAM
            found += stream and end.getsockname()[1] == port
    return found


async def test_a_closed_controller_holds_no_connection_of_returning_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # These callers do not answer a close frame.
    impatient = partial(close_socket, deadline_s=0.3)
    for module in (rpc, rpc_server, server):
        monkeypatch.setattr(module, "close_socket", impatient)
    for _ in range(ROUNDS):
        controller = windlass.Controller(token=TOKEN)
        await controller.__aenter__()
        port = urlsplit(controller.url).port or 0
        with callers(port):
            await asyncio.sleep(0.1)
            await controller.__aexit__()
            assert num_open(port) == 0
