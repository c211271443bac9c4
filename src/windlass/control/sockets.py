"""Frames over a WebSocket whose other end may have stopped reading.

aiohttp waits for room in a connection's buffer without a deadline, while it closes too, and a
heartbeat that fails does not wake who waits there: a process that is stopped, or hangs, would hold
its peer for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Self, final

import aiohttp
from aiohttp import WSCloseCode, web

__all__ = ["CLOSE_DEADLINE_S", "SEND_DEADLINE_S", "close_socket", "send_frame"]

SEND_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 12.0
"""More than aiohttp gives the other end to answer a close, which is 10 s."""

WebSocket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def send_frame(
    websocket: WebSocket,
    data: bytes,
    deadline_s: float,
    *,
    on_cut: Callable[[], None] | None = None,
) -> None:
    """Send a binary frame; the connection is cut if that takes longer than `deadline_s`.

    `on_cut` is called just before, so that whoever sees the connection end knows who ended it.

    Raises:
        ConnectionError: the connection is closed, or was cut.
        aiohttp.ClientError, RuntimeError: as aiohttp says that it is closed.
    """
    with _Cutter(websocket, deadline_s, on_cut) as cutter:
        try:
            await websocket.send_bytes(data)
        except (ConnectionError, aiohttp.ClientError):
            if not cutter.has_cut:
                raise
    if cutter.has_cut:
        raise ConnectionError(f"the peer does not read: waited {deadline_s} s")


async def close_socket(
    websocket: WebSocket,
    *,
    code: int = WSCloseCode.OK,
    message: bytes = b"",
    deadline_s: float = CLOSE_DEADLINE_S,
) -> None:
    """Close; the connection is cut if that takes longer than `deadline_s`. Idempotent."""
    with _Cutter(websocket, deadline_s):
        await websocket.close(code=code, message=message)


@final
class _Cutter:
    """Cuts a connection unless the block has ended by the deadline.

    Whoever waits for room in the buffer gets a `ConnectionError`. To cancel it instead would cancel
    all who wait there, because aiohttp has them share one future; and `Transport.close` would wait
    for room, too.
    """

    __slots__ = ("_deadline_s", "_on_cut", "_timer", "_websocket", "has_cut")

    def __init__(
        self, websocket: WebSocket, deadline_s: float, on_cut: Callable[[], None] | None = None
    ) -> None:
        self._websocket, self._deadline_s, self._on_cut = websocket, deadline_s, on_cut
        self._timer: asyncio.TimerHandle | None = None
        self.has_cut = False

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self._deadline_s, self._cut)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _cut(self) -> None:
        self.has_cut = True
        if self._on_cut is not None:
            self._on_cut()
        connection = self._websocket.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)
