"""Calls from a server (the controller) to a peer: `Session` is the calling side, `Callee` the called side.

The peer opens a WebSocket (`rpc_client.Client`), and opens another one when the connection is lost. So the peer needs
no port, and when its process dies, the connection closes at once. The first frame identifies the peer. The server
answers with a welcome of its protocol, or with `Refused`. Then the server sends `Envelope`s, and the peer answers each
with one `Reply`. Both may send further frames of their protocol.

The identity of a call is (epoch, round, seq), which only grows. A peer executes each call once, even
if the call arrives several times. It stores its replies and sends them again over its next
connection. It drops them when a call of a later round shows that the server has received them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import msgspec
from aiohttp import web

from windlass.errors import PeerUnreachable, ProtocolError, StaleMessage
from windlass.net.messages import CallId, Envelope, Reply, UnreadCall, encode
from windlass.net.reply_store import ReplyStore
from windlass.net.sockets import SEND_DEADLINE_S, close_socket, send_frame

_log = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
ResultT = TypeVar("ResultT")


class Session(Generic[CommandT, ResultT]):
    """Calling side: sends calls to one peer, and gives each reply to the future that waits for it.

    Args:
        peer: name of the peer, for errors.
        socket: WebSocket to the peer; None before the first connection.
        keeps_calls: whether calls survive the loss of a connection and are sent again over the next
            one (`attach`). Otherwise they fail.
        send_deadline_s: seconds for the peer to take a frame, or a part of a large frame. If the peer
            takes longer, this process cuts the connection.

    Attributes:
        was_cut: whether the connection was cut because the peer did not read. The peer's process may be alive.
    """

    def __init__(
        self,
        peer: str,
        socket: web.WebSocketResponse | None = None,
        *,
        keeps_calls: bool = False,
        send_deadline_s: float = SEND_DEADLINE_S,
    ) -> None:
        self.peer = peer
        self.was_cut = False
        self._socket, self._send_deadline_s = socket, send_deadline_s
        self._keeps_calls = keeps_calls
        self._calls: dict[CallId, tuple[CommandT, asyncio.Future[ResultT]]] = {}

    @property
    def unanswered(self) -> list[CommandT]:
        """Commands of the calls that have no reply yet."""
        return [command for command, _ in self._calls.values()]

    async def send(self, frame: msgspec.Struct, *, within_s: float | None = None) -> None:
        """Send a frame over the current connection.

        Args:
            frame: the frame.
            within_s: seconds to send the whole frame. After this time, this process closes the connection. None for no
                limit.

        Raises:
            PeerUnreachable: the session has no open connection, or the peer does not read from the connection.
        """
        if self._socket is None:
            raise PeerUnreachable(f"{self.peer}: is not connected")
        try:
            await send_frame(
                self._socket,
                encode(frame),
                self._send_deadline_s,
                within_s=within_s,
                on_cut=self._note_cut,
            )
        except (ConnectionError, RuntimeError) as error:
            raise PeerUnreachable(f"{self.peer}: connection is closed: {error}") from error

    def _note_cut(self) -> None:
        """Record that this process cut the connection because the peer did not read."""
        self.was_cut = True

    async def call(
        self, call_id: CallId, command: CommandT, *, within_s: float | None = None
    ) -> asyncio.Future[ResultT]:
        """Send a command, and return a future for its result. A caller that stops waiting must call `forget`.

        Args:
            call_id: identity of the call, greater than the identities of all earlier calls.
            command: the command.
            within_s: see `send`.

        Returns:
            Future of the result. If the connection is lost before the reply, the future raises `PeerUnreachable`. With
            `keeps_calls`, the command is instead sent again over the next connection.

        Raises:
            PeerUnreachable: the command could not be sent (see `send`); never with `keeps_calls`.
        """
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = command, future
        try:
            await self.send(Envelope(*call_id, command), within_s=within_s)
        except PeerUnreachable as error:
            if not self._keeps_calls:
                # If the connection was lost during the send, `fail_calls` has already removed the call.
                self._calls.pop(call_id, None)
                raise
            _log.info("call waits for the next connection: %s", error)
        return future

    async def attach(self, socket: web.WebSocketResponse) -> None:
        """Use `socket` from now on, and send the unanswered calls again.

        `socket` is a new connection of the same peer process. Do nothing if the session already uses this connection.

        Raises:
            PeerUnreachable: the new connection is closed, or the peer does not read from it.
        """
        if self._socket is socket:
            return
        self._socket, self.was_cut = socket, False
        for call_id, (command, _) in list(self._calls.items()):
            await self.send(Envelope(*call_id, command))

    def detach(self, socket: web.WebSocketResponse, reason: str) -> None:
        """Fail all unanswered calls with `reason` after the connection `socket` has ended.

        Do nothing with `keeps_calls`, or if the session already uses a newer connection.
        """
        if self._socket is socket and not self._keeps_calls:
            self.fail_calls(reason)

    def forget(self, call_id: CallId) -> None:
        """Drop a call whose caller no longer waits: a later reply is ignored, and the command is not sent again."""
        self._calls.pop(call_id, None)

    def on_reply(self, call_id: CallId, result: ResultT) -> None:
        """Set the result of a call in the call's future. Ignore a reply to a call that was forgotten or has a result."""
        _, future = self._calls.pop(call_id, (None, None))
        if future is not None and not future.done():
            future.set_result(result)

    def fail_calls(self, reason: str) -> None:
        """Set `PeerUnreachable` with `reason` in the future of every unanswered call, and drop these calls."""
        for _, future in self._calls.values():
            if not future.done():
                future.set_exception(PeerUnreachable(f"{self.peer}: {reason}"))
                # Mark the exception as retrieved, so that asyncio does not log it. Waiting callers still get it.
                future.exception()
        self._calls.clear()

    async def close(self) -> None:
        """Close the present connection, if any. Unanswered calls fail only when `detach` is called."""
        if self._socket is not None:
            await close_socket(self._socket)


class Callee(ABC, Generic[CommandT, ResultT]):
    """Called side: executes each call once, and keeps the reply until it has arrived.

    Subclasses define the commands of their protocol.

    Attributes:
        stored: replies that the server may still need.
    """

    def __init__(self) -> None:
        self.stored = ReplyStore[ResultT]()
        self._executing = threading.Lock()

    @abstractmethod
    def execute(self, call: Envelope[CommandT]) -> ResultT:
        """Execute a call and return its result. Runs in the executor's thread and may block.

        An exception is converted to a result by `failed`.
        """

    @abstractmethod
    def failed(self, error: Exception, command: CommandT | None) -> ResultT:
        """Convert an error to a result, which the server gets as the reply. `command` is None if it cannot be decoded.

        The error is the exception that `execute` raised, StaleMessage for a call that arrived too late, the reason why
        the command could not be decoded, or an error of the executor.
        """

    def carry_out(
        self, call: Envelope[CommandT] | UnreadCall, error: Exception | None = None
    ) -> Reply[ResultT]:
        """Execute a call, store its reply, and return the reply. Blocks until all earlier calls have ended.

        Execute only new calls. A call that was executed before gets the stored reply. A call that arrives too late gets
        a failure. An `UnreadCall` gets a failure with the reason `error`, because its command could not be decoded.
        """
        command = call.command if isinstance(call, Envelope) else None
        with self._executing:
            try:
                stored = self.stored.lookup(call.call_id)
            except StaleMessage as stale:
                return Reply(*call.call_id, self.failed(stale, command))
            if stored is not None:
                return stored
            try:
                if isinstance(call, Envelope):
                    result = self.execute(call)
                else:
                    result = self.failed(error or ProtocolError("it cannot be read"), None)
            # Every exception must become a reply. Without a reply, the server would wait until its deadline.
            except Exception as raised:  # noqa: BLE001
                result = self.failed(raised, command)
            reply = Reply(*call.call_id, result)
            self.stored.store(reply)
            return reply
