"""The agent's end of the control channel as coroutines of one event loop.

One WebSocket to the controller, opened again whenever it is lost. Commands are handed one after
another to a `CommandHandler` in an executor; replies are stored, so that a repeated command gets
the same answer without being carried out again. `AgentChannel` runs this in a thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

import aiohttp
import msgspec

from windlass.errors import (
    AuthenticationError,
    PeerUnreachable,
    ProtocolError,
    StaleMessage,
    TransferOutcomeUnknown,
    WindlassError,
)
from windlass.layout.manifest import Role
from windlass.net.logs import log_fields
from windlass.net.sockets import PartJoiner, send_frame
from windlass.transfer.outcomes import is_unknown
from windlass.transports.processes import host_identity
from windlass.updates.messages import (
    Announce,
    Command,
    ControllerFrame,
    Done,
    Envelope,
    Failure,
    FailureKind,
    Hello,
    Probe,
    Refused,
    Relay,
    RelayWrite,
    Reply,
    Result,
    RoundOutcome,
    UpdateReport,
    Welcome,
    Withdraw,
    Write,
    decode_controller_frame,
    encode,
)

__all__ = ["AgentConversation", "Announcement", "CommandHandler"]

_log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
HEARTBEAT_S = 20.0
MAX_MESSAGE_NBYTES = 256 << 20
WELCOME_SEQ = 0
"""Of a reply that answers the welcome; commands count from 1."""


class CommandHandler(Protocol):
    """What an agent does with commands. Called from one thread, in order; may block."""

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        """Carry out a command.

        Raises:
            WindlassError: becomes a `Failure` whose kind follows from the type.
        """
        ...


class _ReplyStore:
    """Replies of the newest rounds, and the rule that older ones are stale."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = (0, 0)
        self._received = self._void = (0, 0)
        self._replies: dict[tuple[int, int, int], Reply] = {}

    @property
    def newest(self) -> tuple[int, int]:
        """(epoch, round) of the newest command."""
        return self._newest

    def lookup(self, envelope: Envelope) -> Reply | None:
        """The stored reply, a refusal for a round that has passed, or None for a new command."""
        place = (envelope.epoch, envelope.round)
        key = (*place, envelope.seq)
        if key in self._replies:
            return self._replies[key]
        if place < self._newest or place <= self._void:
            message = f"epoch {place[0]} round {place[1]} has passed; the newest is {self._newest}"
            return Reply(*key, Failure(FailureKind.STALE, message))
        if place > self._newest:
            with self._lock:
                self._replies = {k: v for k, v in self._replies.items() if k[:2] == self._newest}
            self._newest = place
        return None

    def received(self, envelope: Envelope) -> None:
        """A command has come; it may have to wait for others."""
        self._received = max(self._received, (envelope.epoch, envelope.round))

    def void(self) -> None:
        """The connection is lost: what came over it and has not begun is not carried out.

        The controller has left this agent out of that round; the next command is of a later one.
        """
        self._void = self._received

    def store(self, reply: Reply) -> None:
        """Remember a reply."""
        with self._lock:
            self._replies[reply.epoch, reply.round, reply.seq] = reply

    def replies(self) -> list[Reply]:
        """Every reply that is remembered, oldest first."""
        with self._lock:
            return list(self._replies.values())


@dataclass(frozen=True, slots=True)
class Announcement:
    """What this rank stands still for, and who waits for the end of it."""

    frame: Announce
    report: concurrent.futures.Future[UpdateReport]


@final
class AgentConversation:
    """See the module. `run` in `loop`; `announce` and `withdraw` from any thread.

    Args:
        loop: runs everything but commands.
        executor: carries commands out, one at a time; None for the loop's own.
        url, token, hello, handler, on_disconnect, on_command, reconnect: see `AgentChannel`.

    Attributes:
        welcomed: done when the controller has said welcome, or refused for good.
        disconnected: set while no controller is connected, once `on_disconnect` has returned; no
            command is carried out then.
        last_error: why the last connection ended, for a person.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: concurrent.futures.Executor | None,
        url: str,
        token: str,
        hello: Callable[[], Hello],
        handler: CommandHandler,
        *,
        on_disconnect: Callable[[], None] | None = None,
        on_command: Callable[[Command, int, int], None] | None = None,
        reconnect: bool = True,
    ) -> None:
        self._loop, self._executor = loop, executor
        self._url, self._token = url.rstrip("/"), token
        self._hello = hello
        self._handler = handler
        self._on_disconnect = on_disconnect
        self._on_command = on_command
        self._reconnect = reconnect
        self._store = _ReplyStore()
        self._lock = threading.Lock()
        self._carrying_out = threading.Lock()
        self._announced: Announcement | None = None
        self._attempts = 0
        self._ended: Exception | None = None
        self._not_resumed = ""
        self._published, self._lineage, self._welcomed_by = -1, "", ""
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self.welcomed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.disconnected = threading.Event()
        self.disconnected.set()
        self.last_error = "no connection was tried"

    async def run(self) -> None:
        """Converse until cancelled or refused; whoever waits is told."""
        try:
            await self._stay_connected()
        finally:
            self.end()

    def end(self) -> None:
        """No connection will be tried any more: whoever waits is told. Idempotent."""
        self._end(PeerUnreachable("the control channel is closed"))

    def announce(self, version: int) -> Announcement:
        """Stand still with `version`; `Announcement.report` is done at the round's end.

        Raises:
            ProtocolError, PeerUnreachable: there is no conversation any more.
        """
        report: concurrent.futures.Future[UpdateReport] = concurrent.futures.Future()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._attempts += 1
            announced = Announcement(Announce(version, self._attempts), report)
            self._announced = announced
            self._loop.call_soon_threadsafe(self._announce_soon)
        return announced

    def withdraw(self, announced: Announcement) -> concurrent.futures.Future[None] | None:
        """Take an announcement back, so that it begins no round that nobody waits for.

        Returns:
            Done when that was sent; None when there is no conversation any more.
        """
        with self._lock:
            if self._ended is not None:
                return None
            sent = self._send_withdraw(announced.frame.attempt)
            return asyncio.run_coroutine_threadsafe(sent, self._loop)

    def forget(self, announced: Announcement) -> None:
        """Nobody waits for this announcement any more."""
        with self._lock:
            if self._announced is announced:
                self._announced = None

    # --- in the loop ---------------------------------------------------------------------------

    def _announce_soon(self) -> None:
        if self._socket is not None:
            self._loop.create_task(self._send_announce(self._socket))

    async def _send_announce(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        announced = self._announced
        if announced is None or announced.report.done():
            return
        try:
            await send_frame(socket, encode(announced.frame))
        except (ConnectionError, aiohttp.ClientError):
            _log.info("announce will be repeated after reconnecting")

    async def _send_withdraw(self, attempt: int) -> None:
        if self._socket is None:
            return  # a lost connection withdraws by itself
        try:
            await send_frame(self._socket, encode(Withdraw(attempt)))
        except (ConnectionError, aiohttp.ClientError):
            _log.info("announcement withdrawn by the loss of the connection")

    async def _stay_connected(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        headers = {"Authorization": f"Bearer {self._token}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            while True:
                try:
                    await self._converse(http)
                except (AuthenticationError, ProtocolError) as error:
                    if self.welcomed.done():  # nobody may be waiting who would be told
                        _log.error("%s: left the fleet for good: %s", self._url, error)
                    self._end(error)
                    return
                except (aiohttp.ClientError, OSError, PeerUnreachable) as error:
                    self.last_error = f"{type(error).__name__}: {error}"
                    _log.info("controller %s: %s", self._url, error)
                finally:
                    was_connected, self._socket = self._socket is not None, None
                    self._store.void()
                    if was_connected:
                        self._disconnected_from_controller()
                    self.disconnected.set()
                if was_connected:
                    backoff_s = FIRST_BACKOFF_S
                if not self._reconnect:
                    return
                # Waiting for a controller that is away: nothing can signal its return.
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    def _disconnected_from_controller(self) -> None:
        if self._on_disconnect is None:
            return
        with self._carrying_out:  # whatever begins after this is refused
            try:
                self._on_disconnect()
                self._not_resumed = ""
            # The boundary of the engine: one that cannot be resumed now must come back all the same.
            except Exception as error:  # noqa: BLE001
                self._not_resumed = f"{type(error).__name__}: {error}"
                _log.exception("on_disconnect")

    async def _converse(self, http: aiohttp.ClientSession) -> None:
        try:
            socket = await http.ws_connect(
                f"{self._url}/v1/agents", heartbeat=HEARTBEAT_S, max_msg_size=MAX_MESSAGE_NBYTES
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in {401, 403}:
                raise AuthenticationError(f"{self._url} refused the token") from error
            raise
        async with socket:
            await send_frame(socket, encode(self._greeting()))
            parts = PartJoiner(MAX_MESSAGE_NBYTES)
            async for message in socket:
                if message.type is aiohttp.WSMsgType.ERROR:
                    raise PeerUnreachable(f"connection broke: {message.data}")
                if message.type is not aiohttp.WSMsgType.BINARY:
                    raise ProtocolError(f"{self._url}: sent a frame that is not binary")
                await self._on_frame(socket, parts, message.data)
        raise PeerUnreachable(f"connection closed with code {socket.close_code}")

    def _greeting(self) -> Hello:
        """A Hello with what this conversation knows and its owner does not."""
        epoch, round_number = self._store.newest
        hello = msgspec.structs.replace(
            self._hello(),
            epoch=epoch,
            round=round_number,
            not_resumed=self._not_resumed,
            host=host_identity(),
        )
        if hello.role is not Role.TRAINER:
            return hello
        # A controller that is started anew without a journal has nobody else whom it may believe.
        return msgspec.structs.replace(
            hello, served_version=self._published, lineage=self._lineage or self._welcomed_by
        )

    async def _on_frame(
        self, socket: aiohttp.ClientWebSocketResponse, parts: PartJoiner, data: bytes
    ) -> None:
        frame = self._decode(parts, data)
        match frame:
            case None:
                return
            case Welcome():
                if self._not_resumed:
                    # No command of this connection has been taken: no round is open here yet.
                    await self._loop.run_in_executor(
                        self._executor, self._disconnected_from_controller
                    )
                self.disconnected.clear()
                self._socket, self._welcomed_by = socket, frame.lineage
                if not self.welcomed.done():
                    self.welcomed.set_result(None)
                # What was sent last over the lost connection may not have arrived: how a write
                # ended must not be lost, and a reply that comes twice does no harm.
                for reply in self._store.replies():
                    await self._deliver(reply)
                if self._on_disconnect is not None:  # how the engine is now, whatever those say
                    place = self._store.newest
                    await self._deliver(
                        Reply(*place, WELCOME_SEQ, Done(not_resumed=self._not_resumed))
                    )
                await self._send_announce(socket)
            case Refused(final=True):
                raise ProtocolError(f"the controller refused this agent: {frame.message}")
            case Refused():
                raise PeerUnreachable(f"the controller refused this connection: {frame.message}")
            case UpdateReport():
                self._on_report(frame)
            case Envelope():
                self._store.received(frame)
                if self._on_command is not None and not isinstance(frame.command, Probe):
                    self._on_command(frame.command, frame.epoch, frame.round)
                # Handed to the command thread at once, so that pings are answered meanwhile.
                self._loop.create_task(self._answer(frame))

    def _decode(self, parts: PartJoiner, data: bytes) -> ControllerFrame | None:
        """After a welcome, what cannot be decoded was garbled: another connection may be better."""
        try:
            whole = parts.take(data)
            return None if whole is None else decode_controller_frame(whole)
        except ProtocolError as error:
            if self.welcomed.done():
                raise PeerUnreachable(str(error)) from error
            raise

    def _on_report(self, report: UpdateReport) -> None:
        if report.outcome is RoundOutcome.PUBLISHED:
            self._published, self._lineage = report.version, self._welcomed_by
        with self._lock:
            announced = self._announced
            if announced is None or announced.report.done():
                return
            if report.attempt == announced.frame.attempt:
                announced.report.set_result(report)

    async def _answer(self, envelope: Envelope) -> None:
        reply = await self._loop.run_in_executor(self._executor, self._execute, envelope)
        await self._deliver(reply)

    async def _deliver(self, reply: Reply) -> None:
        """Send a reply, if there is a connection; the next one begins with all that are stored."""
        if self._socket is None:
            return
        try:
            await send_frame(self._socket, encode(reply))
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as error:
            _log.info("reply not delivered, it is sent again over the next connection: %s", error)

    def _end(self, error: Exception) -> None:
        """No connection will be tried any more: whoever waits is told."""
        with self._lock:
            if self._ended is None:
                self._ended = error
            if not self.welcomed.done():
                self.welcomed.set_exception(error)
            if self._announced is not None and not self._announced.report.done():
                self._announced.report.set_exception(error)

    # --- in the executor ----------------------------------------------------------------------

    def _execute(self, envelope: Envelope) -> Reply:
        with self._carrying_out:
            reply = self._store.lookup(envelope)
            if reply is None:
                with log_fields(round_number=envelope.round):
                    result = self._carry_out(envelope)
                reply = Reply(envelope.epoch, envelope.round, envelope.seq, result)
                self._store.store(reply)
            return reply

    def _carry_out(self, envelope: Envelope) -> Result:
        command = envelope.command
        if isinstance(command, Probe):
            return Done()
        _log.debug("%s", type(command).__name__)
        try:
            return self._handler.handle(command, epoch=envelope.epoch, round_number=envelope.round)
        # The boundary of the agent: whatever goes wrong must reach the controller as a failure,
        # or the round would wait for its deadline.
        except Exception as error:  # noqa: BLE001
            name = type(command).__name__
            trace = not isinstance(error, WindlassError)  # those are foreseen, and say what to do
            _log.error("%s failed: %s: %s", name, type(error).__name__, error, exc_info=trace)
            return Failure(_kind_of(error, command), f"{name}: {type(error).__name__}: {error}")


def _kind_of(error: Exception, command: Command) -> FailureKind:
    """Of a command that writes, what nobody foresaw is UNKNOWN, as it is of one of its links."""
    match error:
        case TransferOutcomeUnknown():
            return FailureKind.UNKNOWN
        case StaleMessage():
            return FailureKind.STALE
        case _ if isinstance(command, Write | RelayWrite | Relay) and is_unknown(error):
            return FailureKind.UNKNOWN
        case _:
            return FailureKind.FAILED
