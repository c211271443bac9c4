"""One way to call a peer: `Session` at the end that calls, `Callee` at the end that is called.

A peer opens a WebSocket (`rpc_client.Client`) and opens it again whenever it is lost: it needs no port
of its own, and a process that dies is a closed connection, seen at once and not by polling. Its
first frame says who it is; the server answers with a welcome of its own protocol, or with
`Refused`. From then on the server sends `Envelope`s, the peer answers each of them with one `Reply`, and
either may send what else their protocol has.

The id of a call is (epoch, round, seq), which only grows. A peer carries out a call once, however
often it is sent: it stores its replies, sends them again over its next connection, and drops them when a
call of a later round shows that they have been received.
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
    """Calls one peer, and matches replies to whoever waits for them.

    Args:
        peer: its name, for errors.
        socket: of its connection; None before the first.
        keeps_calls: calls outlive a connection, and are sent again over the next one (`attach`).
            Otherwise they fail with it.
        send_deadline_s: for the peer to take a frame, or a part of a large one; the connection of
            one that does not is cut.

    Attributes:
        was_cut: the connection was cut because the peer did not read; its process may live.
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

    async def send(self, frame: msgspec.Struct, *, within_s: float | None = None) -> None:
        """Send a frame, all of it within `within_s` if that is given.

        Raises:
            PeerUnreachable: the connection is closed, or the peer does not read from it.
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
        self.was_cut = True

    async def call(
        self, call_id: CallId, command: CommandT, *, within_s: float | None = None
    ) -> asyncio.Future[ResultT]:
        """Send a command, within `within_s` if that is given.

        Returns:
            Resolves with the result; fails with PeerUnreachable if the connection is lost, unless
            calls are kept.

        Raises:
            PeerUnreachable: as `send`, unless calls are kept.
        """
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = command, future
        try:
            await self.send(Envelope(*call_id, command), within_s=within_s)
        except PeerUnreachable as error:
            if not self._keeps_calls:
                # The connection may have been lost while the frame was sent: `fail_calls` took the call then.
                self._calls.pop(call_id, None)
                raise
            _log.info("call waits for the next connection: %s", error)
        return future

    async def attach(self, socket: web.WebSocketResponse) -> None:
        """Go on over another connection of the same process: what is not answered is sent again.

        Raises:
            PeerUnreachable: as `send`.
        """
        if self._socket is socket:
            return
        self._socket, self.was_cut = socket, False
        for call_id, (command, _) in list(self._calls.items()):
            await self.send(Envelope(*call_id, command))

    def detach(self, socket: web.WebSocketResponse, reason: str) -> None:
        """This connection is gone, and with it every call that is not kept."""
        if self._socket is socket and not self._keeps_calls:
            self.fail_calls(reason)

    def forget(self, call_id: CallId) -> None:
        """Drop a call: nobody waits for its answer."""
        self._calls.pop(call_id, None)

    def on_reply(self, call_id: CallId, result: ResultT) -> None:
        """Resolve whoever waits; an answer that nobody waits for is dropped."""
        _, future = self._calls.pop(call_id, (None, None))
        if future is not None and not future.done():
            future.set_result(result)

    def fail_calls(self, reason: str) -> None:
        """The peer is gone: nobody will answer."""
        for _, future in self._calls.values():
            if not future.done():
                future.set_exception(PeerUnreachable(f"{self.peer}: {reason}"))
                future.exception()  # seen; whoever still waits gets it all the same
        self._calls.clear()

    async def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            await close_socket(self._socket)


class Callee(ABC, Generic[CommandT, ResultT]):
    """Answers calls: each is carried out once, and its answer is kept until it has arrived.

    Subclasses say what their protocol's commands are.
    """

    def __init__(self) -> None:
        self._store = ReplyStore[ResultT]()
        self._executing = threading.Lock()

    @abstractmethod
    def execute(self, call: Envelope[CommandT]) -> ResultT:
        """Carry out a call, in the executor. Whatever it raises becomes the result `failed`."""

    @abstractmethod
    def failed(self, error: Exception, command: CommandT | None) -> ResultT:
        """Return the result of a command that raised, that came too late (`StaleMessage`), or that could not be read.

        The command is None if it could not be read.
        """

    def carry_out(
        self, call: Envelope[CommandT] | UnreadCall, error: Exception | None = None
    ) -> Reply[ResultT]:
        """Return the answer to a call, which is carried out unless it was, or is too late. Blocks.

        A call that could not be read, because of `error`, is answered with its failure.
        """
        command = call.command if isinstance(call, Envelope) else None
        with self._executing:
            try:
                stored = self._store.lookup(call.call_id)
            except StaleMessage as stale:
                return Reply(*call.call_id, self.failed(stale, command))
            if stored is not None:
                return stored
            try:
                if isinstance(call, Envelope):
                    result = self.execute(call)
                else:
                    result = self.failed(error or ProtocolError("it cannot be read"), None)
            # The boundary of the peer: whatever goes wrong must reach the server as a failure, or
            # it would wait for its deadline.
            except Exception as raised:  # noqa: BLE001
                result = self.failed(raised, command)
            reply = Reply(*call.call_id, result)
            self._store.store(reply)
            return reply
