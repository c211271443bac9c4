"""Called side of a session: connects to the server, reconnects, and answers the server's calls.

`Client` runs in its own thread (`connect`), for processes with a busy main thread, or as a
coroutine in an event loop of the caller (`run`). It executes calls one after another, outside the
event loop, so that it answers pings during a call. See `rpc` for the protocol.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import random
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import aiohttp
import msgspec

from windlass.closing import Closing
from windlass.envs import check_token
from windlass.errors import (
    AuthenticationError,
    PeerTimeout,
    PeerUnreachable,
    ProtocolError,
)
from windlass.net.addresses import check_url
from windlass.net.clock import Backoff
from windlass.net.messages import (
    Codec,
    Envelope,
    Refused,
    Reply,
    UnreadCall,
    encode,
    unread_call,
)
from windlass.net.rpc import Callee
from windlass.net.sockets import (
    MAX_PART_NBYTES,
    PartJoiner,
    connection_error,
    open_http,
    send_frame,
)

_log = logging.getLogger(__name__)

BACKOFF = Backoff(0.1, 5.0)
"""Pauses between attempts to connect."""
HEARTBEAT_S = 20.0
"""Seconds between pings to the server."""
JOIN_S = 10.0
"""Maximum seconds that `close` waits for the client's thread."""
CLOSING_S = 0.01
"""Seconds that the event loop continues to run before it is closed."""

CommandT = TypeVar("CommandT")
ResultT = TypeVar("ResultT")
FrameT = TypeVar("FrameT")


class Client(Callee[CommandT, ResultT], Closing, Generic[CommandT, ResultT, FrameT]):
    """Called side of a session; see the module docstring. Subclasses define the frames of their protocol.

    Args:
        url: URL of the server.
        path: path of the server's route.
        token: token of this process's role.
        codec: decoder of the server's frames.
        executor: executor that runs calls, one at a time; None for a thread of this client.
        loop: event loop for everything but calls; None for a new event loop.
        give_up_s: seconds without a connection after which this client ends.
        keeps_calls: whether to execute a call although its connection was lost before the call began.

    Attributes:
        welcomed: future that is done once the server has sent its welcome or a final refusal.
        ended: future that gets an exception once the client stops connecting.
        disconnected: set while there is no connection and `on_lost` has returned.
        last_error: text that says why the last connection ended.

    Raises:
        ConfigError: `url` is not a URL, or a header cannot carry `token`.
    """

    def __init__(
        self,
        url: str,
        path: str,
        token: str,
        codec: Codec[Envelope[CommandT] | Refused | FrameT],
        *,
        executor: concurrent.futures.Executor | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        give_up_s: float = math.inf,
        keeps_calls: bool = False,
    ) -> None:
        super().__init__()
        check_url(url, "controller")
        check_token(token, "token")
        self._url, self._path, self._token = url.rstrip("/"), path, token
        self._codec = codec
        self._give_up_s, self._keeps_calls = give_up_s, keeps_calls
        self._owns_executor = executor is None
        self._executor = executor or concurrent.futures.ThreadPoolExecutor(1, "windlass-calls")
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="windlass-agent", daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._closed = False
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self.welcomed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.disconnected = threading.Event()
        self.disconnected.set()
        self.last_error = "no connection was tried"

    # --- hooks of a protocol, called in the event loop -------------------------------------------

    @abstractmethod
    def hello(self) -> msgspec.Struct:
        """Return the first frame of a connection."""

    @abstractmethod
    def on_frame(self, frame: FrameT) -> None:
        """Handle a frame that is neither a call nor a refusal, such as the welcome."""

    def on_call(self, call: Envelope[CommandT]) -> None:
        """React to the arrival of a call, which is executed later if earlier calls still run. Must not block."""

    async def on_welcome(self) -> None:
        """React to the server's welcome. Called before this client sends replies or other frames over the connection."""

    async def on_connected(self) -> None:
        """React to a new connection. Called after `on_welcome`, and after the stored replies were sent again."""

    def on_lost(self) -> None:
        """React to the loss of a connection over which the welcome had arrived. A call may still be running."""

    # --- from any thread -----------------------------------------------------------------------

    def start(self) -> None:
        """Run the client in its own thread.

        Raises:
            PeerUnreachable: this process cannot start a thread.
        """
        try:
            if self._owns_executor:
                # Start the executor's thread now, so that a failure is raised here and not at the
                # first call.
                self._executor.submit(int).result()
            self._thread.start()
        except RuntimeError as error:
            self.close()
            raise PeerUnreachable(f"connect to {self._url}: {error}") from error

    def connect(self, deadline_s: float) -> None:
        """Run the client in its own thread, and wait for the server's welcome. After an error, the client is closed.

        Raises:
            AuthenticationError: the token is wrong.
            ConfigError: see `client_context`.
            ProtocolError: the server refused this peer, or its first frame cannot be decoded; the message contains the
                reason.
            PeerUnreachable: this process cannot start a thread, or no connection was possible for `give_up_s`.
            PeerTimeout: the server sent no welcome within `deadline_s`.
        """
        self.start()
        try:
            self.welcomed.result(deadline_s)
        except concurrent.futures.TimeoutError:
            self.close()
            raise PeerTimeout(
                f"connect: no welcome from {self._url} within {deadline_s} s: {self.last_error}"
            ) from None
        except BaseException:
            self.close()
            raise

    def wait_disconnected(self, deadline_s: float) -> bool:
        """Wait until there is no connection and `on_lost` has returned; return False at the deadline."""
        return self.disconnected.wait(deadline_s)

    def run_later(self, work: Callable[[], None]) -> None:
        """Run `work` in the executor that executes the calls, after all queued calls.

        `work` must not raise. After `close`, `work` is not run.
        """
        with contextlib.suppress(RuntimeError):
            self._executor.submit(work)

    def flush(self, deadline_s: float) -> None:
        """Wait until the results of all calls that have arrived are sent, or until the deadline.

        Without a connection, do not wait for one: the results are sent over the next connection.
        """

        async def sent() -> None:
            await asyncio.gather(*self._answers, return_exceptions=True)

        with contextlib.suppress(RuntimeError, concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(sent(), self._loop).result(deadline_s)

    def close(self) -> None:
        """Close the connection and end the client's thread. Drop calls that have not begun. Idempotent.

        A running call continues in its thread.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            # The client's thread may have closed the event loop just now.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(JOIN_S)
        # Without a task, the client was never started.
        elif self._task is None:
            self._loop.close()
        if self._owns_executor:
            self._executor.shutdown(wait=False, cancel_futures=True)

    # --- in the loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost.

        This ends when the task is cancelled, the server refuses this peer or its token, or no connection was possible for
        `give_up_s`. At the end, the futures `welcomed` and `ended` get an exception unless they are done.

        Raises:
            ConfigError: see `client_context`.
            Exception: any exception of a hook, such as `hello`.
        """
        try:
            await self._stay_connected()
        # For example, `hello` or `on_frame` raised. A caller that waits for the session needs this reason.
        except Exception as error:
            self._end(error)
            raise
        finally:
            self._end(PeerUnreachable("the control channel is closed"))

    async def send(self, frame: msgspec.Struct) -> bool:
        """Send a frame. Return False if there is no connection, or if the connection is lost during the send."""
        if self._socket is None:
            return False
        try:
            await send_frame(self._socket, encode(frame))
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as error:
            _log.info("%s not delivered: %s", type(frame).__name__, error)
            return False
        return True

    def _run_loop(self) -> None:
        """Run the client until it ends, then cancel all other tasks and close the loop. Runs in the client's thread."""
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self.run())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            # Each remaining task answers a call.
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            # asyncio closes an interrupted TLS handshake only in a later iteration of the event loop, so
            # run the loop for some more iterations.
            self._loop.run_until_complete(asyncio.sleep(CLOSING_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _cancel(self) -> None:
        """Cancel the task of `run`, in the event loop."""
        if self._task is not None:
            self._task.cancel()

    def _end(self, error: Exception) -> None:
        """Set `error` in `welcomed` and `ended` unless they are done. The client will not connect again. Idempotent."""
        for future in (self.welcomed, self.ended):
            if not future.done():
                future.set_exception(error)

    async def _stay_connected(self) -> None:
        """Connect, and connect again whenever the connection is lost. Return when `ended` is done.

        After each loss and each failed attempt, make `stored` refuse calls that have not begun (unless `keeps_calls`), and
        set `disconnected`. After a loss, also call `on_lost`.
        """
        pauses, give_up_at = BACKOFF.pauses(), self._loop.time() + self._give_up_s
        async with open_http(self._token, to_controller=True) as http:
            while True:
                was_connected = False
                try:
                    await self._converse(http)
                except (AuthenticationError, ProtocolError) as error:
                    # Before the welcome, `connect` raises the error. After the welcome, only a log line
                    # can report the error.
                    if self.welcomed.done():
                        _log.error("%s: not connecting again: %s", self._url, error)
                    self._end(error)
                    return
                except (aiohttp.ClientError, OSError, PeerUnreachable) as error:
                    self.last_error = connection_error(error)
                    _log.info("controller %s: %s", self._url, self.last_error)
                finally:
                    was_connected, self._socket = self._socket is not None, None
                    if not self._keeps_calls:
                        self.stored.void()
                    if was_connected:
                        self.on_lost()
                    self.disconnected.set()
                if was_connected:
                    pauses, give_up_at = BACKOFF.pauses(), self._loop.time() + self._give_up_s
                if self._loop.time() > give_up_at:
                    self._end(
                        PeerUnreachable(
                            f"{self._url} could not be reached for {self._give_up_s:g} s: {self.last_error}"
                        )
                    )
                if self.ended.done():
                    return
                # No event reports that the server is back, so wait and try again.
                await asyncio.sleep(next(pauses) * random.uniform(0.5, 1.0))  # noqa: S311

    async def _converse(self, http: aiohttp.ClientSession) -> None:
        """Open one connection, send the first frame, and handle the server's frames until the connection ends.

        Raises:
            AuthenticationError: the server refused the token.
            ProtocolError: the server refused this peer, or broke the protocol.
            PeerUnreachable, aiohttp.ClientError, OSError: the connection could not be opened, or has ended.
        """
        try:
            socket = await http.ws_connect(
                self._url + self._path, heartbeat=HEARTBEAT_S, max_msg_size=MAX_PART_NBYTES
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in {401, 403}:
                raise AuthenticationError(f"{self._url} refused the token") from error
            if error.status == 503:
                raise PeerUnreachable("the server accepts no further connection (503)") from error
            raise
        async with socket:
            await send_frame(socket, encode(self.hello()))
            parts = PartJoiner(self._codec.max_nbytes)
            async for message in socket:
                if message.type is aiohttp.WSMsgType.ERROR:
                    raise PeerUnreachable(f"connection broke: {message.data}")
                if message.type is not aiohttp.WSMsgType.BINARY:
                    raise ProtocolError(f"{self._url} sent a frame that is not binary")
                await self._on_frame(socket, parts, message.data)
        raise PeerUnreachable(f"connection closed with code {socket.close_code}")

    async def _on_frame(
        self, socket: aiohttp.ClientWebSocketResponse, parts: PartJoiner, data: bytes
    ) -> None:
        """Handle a part of a frame. If the part completes a call, answer the call in a new task.

        A refusal raises an error. Pass all other complete frames to `on_frame`; the first of them is the welcome.

        Raises:
            ProtocolError: the server refused this peer for good, or the first frame cannot be decoded.
            PeerUnreachable: the server refused this connection, or the frame was damaged.
        """
        whole = None
        try:
            whole = parts.add(data)
            if whole is None:
                return
            frame = self._codec.decode(whole)
        except ProtocolError as error:
            if not self.welcomed.done():
                raise
            # The command cannot be decoded, and would fail in the same way if it were sent again, so
            # answer with the error.
            if whole is not None and (unread := unread_call(whole)) is not None:
                self._answer_later(unread, error)
                return
            # The frame was damaged on the way, so try another connection.
            raise PeerUnreachable(str(error)) from error
        if isinstance(frame, Refused):
            if frame.final:
                raise ProtocolError(f"the controller refused this peer: {frame.message}")
            raise PeerUnreachable(f"the controller refused this connection: {frame.message}")
        if isinstance(frame, Envelope):
            self.on_call(frame)
            self._answer_later(frame)
            return
        self.on_frame(frame)
        if self._socket is None:
            await self._on_welcome(socket)

    async def _on_welcome(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Call `on_welcome`, use `socket` from now on, set `welcomed`, send stored replies again, call `on_connected`."""
        await self.on_welcome()
        self.disconnected.clear()
        self._socket = socket
        if not self.welcomed.done():
            self.welcomed.set_result(None)
        # Replies that were sent just before the last connection was lost may not have arrived. The
        # server ignores a reply that it already has.
        for reply in self.stored.replies():
            await self.send(reply)
        await self.on_connected()

    def _answer_later(
        self, call: Envelope[CommandT] | UnreadCall, error: Exception | None = None
    ) -> None:
        """Answer a call in a new task, so that this client answers pings during the call."""
        self.stored.received(call.round_id)
        task = self._loop.create_task(self._answer(call, error))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, call: Envelope[CommandT] | UnreadCall, error: Exception | None) -> None:
        """Execute a call in the executor, and send its reply; see `carry_out`."""
        try:
            reply = await self._loop.run_in_executor(self._executor, self.carry_out, call, error)
        # The executor failed. Without a reply, the server would wait until its deadline.
        except Exception as raised:  # noqa: BLE001
            command = call.command if isinstance(call, Envelope) else None
            reply = Reply(*call.call_id, self.failed(raised, command))
        # If the send fails, the next connection sends the reply again, because `carry_out` has stored it. A reply from the
        # `except` branch is not stored, and is lost then.
        await self.send(reply)
