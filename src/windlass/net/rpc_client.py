"""The end of a session that is called: it connects, connects again, and answers.

`Client` runs in a thread of its own (`connect`), for processes whose main thread is busy, or as a
coroutine of any loop (`run`). Calls are carried out one after another, outside of the loop, so that
pings are answered meanwhile. See `rpc` for the protocol.
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

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
HEARTBEAT_S = 20.0
JOIN_S = 10.0
CLOSING_S = 0.01

CommandT = TypeVar("CommandT")
ResultT = TypeVar("ResultT")
FrameT = TypeVar("FrameT")


class Client(Callee[CommandT, ResultT], Closing, Generic[CommandT, ResultT, FrameT]):
    """See the module. Subclasses say what their protocol's hello and other frames are.

    Args:
        url: the server's address. path: of its route. token: of this process's role.
        codec: of what the server sends.
        executor: carries out calls, one at a time; None for a thread of this client's own.
        loop: runs everything else; None for a new one.
        give_up_s: without a connection until this client ends.
        keeps_calls: a call that had not begun when its connection was lost is carried out all the same.

    Attributes:
        welcomed: done when the server has said welcome, or refused for good.
        ended: has its exception when no connection will be tried any more.
        disconnected: set while no server is connected, once `on_lost` has returned; nothing is carried
            out then.
        last_error: why the last connection ended, for a person.

    Raises:
        ConfigError: `url` is no URL, or no header can carry `token`.
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

    # --- of a protocol, in the loop ------------------------------------------------------------

    @abstractmethod
    def hello(self) -> msgspec.Struct:
        """Make the first frame of a connection; called in the loop."""

    @abstractmethod
    def on_frame(self, frame: FrameT) -> None:
        """Take what is neither a call nor a refusal, the welcome included; called in the loop."""

    def on_call(self, call: Envelope[CommandT]) -> None:
        """See a call as it comes in, before it waits for its turn; must not block."""

    async def on_welcome(self) -> None:
        """The server has said welcome, and nothing has been sent over this connection yet."""

    async def on_connected(self) -> None:
        """The stored replies have been sent again."""

    def on_lost(self) -> None:
        """A connection that was welcomed is lost; called in the loop. A call may be being carried out."""

    # --- from any thread -----------------------------------------------------------------------

    def start(self) -> None:
        """Run in a thread of its own.

        Raises:
            PeerUnreachable: this process can start no thread.
        """
        try:
            if self._owns_executor:
                self._executor.submit(int).result()  # its thread starts now, and not with a call
            self._thread.start()
        except RuntimeError as error:
            self.close()
            raise PeerUnreachable(f"connect to {self._url}: {error}") from error

    def connect(self, deadline_s: float) -> None:
        """Start, and return once the server has said welcome.

        Raises:
            AuthenticationError: the token is wrong.
            ProtocolError: the server refused this peer; says why.
            PeerUnreachable: this process can start no thread.
            PeerTimeout: no welcome within `deadline_s`; the client is closed.
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
        """Whether no server is connected by then; `on_lost` has returned if so."""
        return self.disconnected.wait(deadline_s)

    def run_later(self, work: Callable[[], None]) -> None:
        """Do `work` where calls are carried out, after those that are there already.

        Once the client is closed nothing is done. `work` must not raise.
        """
        with contextlib.suppress(RuntimeError):
            self._executor.submit(work)

    def flush(self, deadline_s: float) -> None:
        """Return once the results of all calls that were carried out have been sent, or the deadline has passed."""

        async def sent() -> None:
            await asyncio.gather(*self._answers, return_exceptions=True)

        with contextlib.suppress(RuntimeError, concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(sent(), self._loop).result(deadline_s)

    def close(self) -> None:
        """Close the connection and end both threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just closed its loop by itself
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(JOIN_S)
        elif self._task is None:  # it was never started
            self._loop.close()
        if self._owns_executor:
            self._executor.shutdown(wait=False, cancel_futures=True)

    # --- in the loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Stay connected until cancelled or refused; whoever waits is told."""
        try:
            await self._stay_connected()
        finally:
            self._end(PeerUnreachable("the control channel is closed"))

    async def send(self, frame: msgspec.Struct) -> bool:
        """Send a frame; false if there is no connection any more."""
        if self._socket is None:
            return False
        try:
            await send_frame(self._socket, encode(frame))
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as error:
            _log.info("%s not delivered: %s", type(frame).__name__, error)
            return False
        return True

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self.run())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            left = asyncio.all_tasks(self._loop)  # answers to calls that are still carried out
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            # What was cut in the middle of a TLS handshake is closed in a later turn.
            self._loop.run_until_complete(asyncio.sleep(CLOSING_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, error: Exception) -> None:
        """No connection will be tried any more: whoever waits is told. Idempotent."""
        for future in (self.welcomed, self.ended):
            if not future.done():
                future.set_exception(error)

    async def _stay_connected(self) -> None:
        backoff_s, give_up_at = FIRST_BACKOFF_S, self._loop.time() + self._give_up_s
        async with open_http(self._token, to_controller=True) as http:
            while True:
                was_connected = False
                try:
                    await self._converse(http)
                except (AuthenticationError, ProtocolError) as error:
                    if self.welcomed.done():  # nobody may be waiting who would be told
                        _log.error("%s: left for good: %s", self._url, error)
                    self._end(error)
                    return
                except (aiohttp.ClientError, OSError, PeerUnreachable) as error:
                    self.last_error = connection_error(error)
                    _log.info("controller %s: %s", self._url, self.last_error)
                finally:
                    was_connected, self._socket = self._socket is not None, None
                    if not self._keeps_calls:
                        self._store.void()
                    if was_connected:
                        self.on_lost()
                    self.disconnected.set()
                if was_connected:
                    backoff_s, give_up_at = FIRST_BACKOFF_S, self._loop.time() + self._give_up_s
                if self._loop.time() > give_up_at:
                    self._end(
                        PeerUnreachable(
                            f"{self._url} was not reachable for {self._give_up_s:g} s: {self.last_error}"
                        )
                    )
                if self.ended.done():
                    return
                # Waiting for a server that is away: nothing can signal its return.
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _converse(self, http: aiohttp.ClientSession) -> None:
        try:
            socket = await http.ws_connect(
                self._url + self._path, heartbeat=HEARTBEAT_S, max_msg_size=MAX_PART_NBYTES
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in {401, 403}:
                raise AuthenticationError(f"{self._url} refused the token") from error
            if error.status == 503:
                raise PeerUnreachable("it has no room for another connection (503)") from error
            raise
        async with socket:
            await send_frame(socket, encode(self.hello()))
            parts = PartJoiner(self._codec.max_nbytes)
            async for message in socket:
                if message.type is aiohttp.WSMsgType.ERROR:
                    raise PeerUnreachable(f"connection broke: {message.data}")
                if message.type is not aiohttp.WSMsgType.BINARY:
                    raise ProtocolError(f"{self._url}: sent a frame that is not binary")
                await self._on_frame(socket, parts, message.data)
        raise PeerUnreachable(f"connection closed with code {socket.close_code}")

    async def _on_frame(
        self, socket: aiohttp.ClientWebSocketResponse, parts: PartJoiner, data: bytes
    ) -> None:
        whole = None
        try:
            whole = parts.add(data)
            if whole is None:
                return
            frame = self._codec.decode(whole)
        except ProtocolError as error:
            if not self.welcomed.done():
                raise
            # Sent again, a command that this process cannot read would be no better.
            if whole is not None and (unread := unread_call(whole)) is not None:
                self._answer_later(unread, error)
                return
            # The bytes were garbled: another connection may be better.
            raise PeerUnreachable(str(error)) from error
        if isinstance(frame, Refused):
            if frame.final:
                raise ProtocolError(f"the controller refused this agent: {frame.message}")
            raise PeerUnreachable(f"the controller refused this connection: {frame.message}")
        if isinstance(frame, Envelope):
            self.on_call(frame)
            self._answer_later(frame)
            return
        self.on_frame(frame)
        if self._socket is None:
            await self._on_welcome(socket)

    async def _on_welcome(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        await self.on_welcome()
        self.disconnected.clear()
        self._socket = socket
        if not self.welcomed.done():
            self.welcomed.set_result(None)
        # What was sent last over the lost connection may not have arrived: how a write
        # ended must not be lost, and a reply that comes twice does no harm.
        for reply in self._store.replies():
            await self.send(reply)
        await self.on_connected()

    def _answer_later(
        self, call: Envelope[CommandT] | UnreadCall, error: Exception | None = None
    ) -> None:
        """Hand a call on at once, so that pings are answered while it is carried out."""
        self._store.received(call.round_id)
        task = self._loop.create_task(self._answer(call, error))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, call: Envelope[CommandT] | UnreadCall, error: Exception | None) -> None:
        try:
            reply = await self._loop.run_in_executor(self._executor, self.carry_out, call, error)
        # Of the executor itself: without an answer the server would wait for its deadline.
        except Exception as raised:  # noqa: BLE001
            command = call.command if isinstance(call, Envelope) else None
            reply = Reply(*call.call_id, self.failed(raised, command))
        await self.send(reply)  # the next connection begins with all that are stored
