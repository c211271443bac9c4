"""Rank side of the session with the controller: passes commands to the rank's agent and announces versions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

import msgspec

from windlass.control.connect_messages import Hello, Welcome
from windlass.control.group_messages import JoinGroups
from windlass.control.messages import (
    CONTROLLER_FRAMES,
    WRITING,
    Announce,
    Command,
    Done,
    Failure,
    FailureKind,
    Probe,
    Result,
    Withdraw,
)
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.errors import (
    PeerTimeout,
    PeerUnreachable,
    StaleMessage,
    TransferOutcomeUnknown,
    WindlassError,
)
from windlass.net.logs import log_fields
from windlass.net.messages import Envelope
from windlass.net.rpc_client import Client
from windlass.transfer.base import is_unknown
from windlass.transports.processes import host_identity

_log = logging.getLogger(__name__)

AGENTS_PATH = "/v1/agents"
WITHDRAW_S = 1.0
"""Seconds that `announce` waits, after its deadline, for the controller's answer to the withdrawal."""


class CommandHandler(Protocol):
    """Handler of the controller's commands in one rank. The channel calls it from one thread, one command at a time."""

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        """Carry out a command of this epoch and round, and return the answer. May block.

        Raises:
            WindlassError: the command failed. The channel answers with a `Failure`, whose kind depends on the error.
        """
        ...


class AgentChannel(Client[Command | Probe, Result, Welcome | UpdateReport]):
    """Session of a rank with the controller. `Client.connect` starts a thread for the session.

    Args:
        url: the controller's address.
        token: token for the agent's role.
        hello: function that returns the `Hello` of a new connection; called in the channel's thread.
        handler: carries out commands.
        executor, loop: see `Client`.

    Raises:
        ConfigError: `url` is no URL, or `token` contains characters that an HTTP header cannot have.
    """

    def __init__(
        self,
        url: str,
        token: str,
        hello: Callable[[], Hello],
        handler: CommandHandler,
        *,
        executor: concurrent.futures.Executor | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(url, AGENTS_PATH, token, CONTROLLER_FRAMES, executor=executor, loop=loop)
        self._hello, self._handler = hello, handler

    def hello(self) -> Hello:
        """Return the `Hello` for a new connection, with this host and with the ids of the newest commands."""
        epoch, round_number = self.stored.newest
        return msgspec.structs.replace(
            self._hello(),
            epoch=epoch,
            round=round_number,
            received_epoch=self.stored.newest_received[0],
            host=host_identity(),
        )

    def on_frame(self, frame: Welcome | UpdateReport) -> None:
        """Ignore the frame: an engine rank needs neither `Welcome` nor `UpdateReport`."""

    def execute(self, call: Envelope[Command | Probe]) -> Result:
        if isinstance(call.command, Probe):
            return Done()
        name = type(call.command).__name__
        with log_fields(round_number=call.round):
            _log.debug("%s", name)
            try:
                return self._handler.handle(call.command, epoch=call.epoch, round_number=call.round)
            except Exception as error:
                # A WindlassError has a message for the user, so its traceback is not logged.
                trace = not isinstance(error, WindlassError)
                _log.error("%s failed: %s: %s", name, type(error).__name__, error, exc_info=trace)
                raise

    def failed(self, error: Exception, command: Command | Probe | None) -> Failure:
        name = "unreadable command" if command is None else type(command).__name__
        message = f"{name}: {type(error).__name__}: {error}"
        return Failure(_kind_of(error, command), message)


def _kind_of(error: Exception, command: Command | Probe | None) -> FailureKind:
    """Return the kind of the failure that the controller gets for `error`.

    `command` is the command that raised; None if it could not be decoded. If the command writes, and its bytes may still
    arrive at the destinations despite `error` (`is_unknown`), the kind is UNKNOWN.
    """
    match error:
        case TransferOutcomeUnknown():
            return FailureKind.UNKNOWN
        case StaleMessage():
            return FailureKind.STALE
        case PeerTimeout() if isinstance(command, JoinGroups):
            return FailureKind.TIMED_OUT
        case _ if isinstance(command, WRITING) and is_unknown(error):
            return FailureKind.UNKNOWN
        case _:
            return FailureKind.FAILED


@dataclass(frozen=True, slots=True)
class Announcement:
    """Announcement of a version, and the future of its report.

    For a round that the controller begins without an announcement (`sends=False`), `frame.attempt` is 0.
    """

    frame: Announce
    report: concurrent.futures.Future[UpdateReport]


@final
class TrainerChannel(AgentChannel):
    """Session of a trainer rank, which also announces versions, one at a time. See `AgentChannel`."""

    def __init__(
        self,
        url: str,
        token: str,
        hello: Callable[[], Hello],
        handler: CommandHandler,
        *,
        executor: concurrent.futures.Executor | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(url, token, hello, handler, executor=executor, loop=loop)
        self._lock = threading.Lock()
        self.announced: Announcement | None = None
        """The newest announcement; None before the first, and after a withdrawal."""
        # The newest withdrawn announcement. It is not sent again, but its report may still arrive.
        self._withdrawn: Announcement | None = None
        self._attempts = 0
        self._published, self._lineage, self.welcomed_by = -1, "", ""
        self.ended.add_done_callback(lambda ended: self._fail(ended.exception()))

    def announce(self, version: int, deadline_s: float) -> UpdateReport:
        """Announce `version`, and return the report of its round.

        The trainer must keep its weights unchanged until this method returns. After any exception, this method withdraws
        the announcement, so that the controller begins no round for it.

        Raises:
            PeerTimeout: no report arrived within `deadline_s`. If the round has begun already, it continues. The
                weights must then stay unchanged until the trainer gets the report of a later round.
            AuthenticationError: the controller refused the token.
            ProtocolError: the controller refused this agent.
            PeerUnreachable: the channel was closed.
        """
        announced = self.begin_announcement(version)
        try:
            return announced.report.result(deadline_s)
        # Withdraw after every exception, such as KeyboardInterrupt, because the caller no longer waits.
        except BaseException as error:
            is_sent = self.withdraw(announced)
            if not isinstance(error, concurrent.futures.TimeoutError):
                raise
            reason = ""
            if is_sent:
                # If no round has begun, the controller answers at once with a report that names the missing ranks.
                concurrent.futures.wait([announced.report], WITHDRAW_S)
                if announced.report.done():
                    report = announced.report.result()
                    if report.outcome is not RoundOutcome.FAILED:
                        return report
                    reason = report.reason
            if self.disconnected.is_set():
                reason = f"the controller is not connected: {self.last_error}"
            raise PeerTimeout(
                f"publish: no report of version {version} arrived within {deadline_s} s"
                + (f": {reason}" if reason else "")
            ) from None

    def begin_announcement(self, version: int, *, sends: bool = True) -> Announcement:
        """Announce a version without waiting. Return the announcement, with a future that gets the report of its round.

        If `sends` is False, send nothing: the controller begins the round itself. The future still gets the report.

        Raises:
            AuthenticationError: the controller refused the token.
            ProtocolError: the controller refused this agent.
            PeerUnreachable: the channel was closed.
        """
        with self._lock:
            if self.ended.done():
                self.ended.result()
            self._attempts += sends
            frame = Announce(version, self._attempts if sends else 0)
            self.announced = announced = Announcement(frame, concurrent.futures.Future())
            if sends:
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self.on_connected()))
        return announced

    def give_up_expected(self) -> None:
        """Let the last announcement with `sends=False` fail with PeerUnreachable, unless its report has arrived.

        Idempotent. Call this when the next version begins. From then on, the report of the previous version can no
        longer arrive.
        """
        expected = self.announced
        if expected is not None and not expected.frame.attempt:
            what = f"version {expected.frame.version}: the controller did not report how its round ended"
            self._fail(PeerUnreachable(what))

    def _fail(self, error: BaseException | None) -> None:
        """Let the newest announcement fail with `error`, unless its report has arrived."""
        with self._lock:
            if self.announced is not None and not self.announced.report.done():
                self.announced.report.set_exception(error)

    def withdraw(self, announced: Announcement) -> bool:
        """Withdraw an announcement, so that the controller begins no round for it. Return False if the session has ended.

        Without a connection, send nothing: the controller dropped the announcement when the connection ended.
        """
        with self._lock:
            if self.announced is announced:
                self.announced, self._withdrawn = None, announced
            if self.ended.done():
                return False
            sending = self.send(Withdraw(announced.frame.attempt))
            asyncio.run_coroutine_threadsafe(sending, self._loop)
            return True

    # --- in the loop ---------------------------------------------------------------------------

    def hello(self) -> Hello:
        # A controller that restarts without a journal gets the published version only from this frame.
        return msgspec.structs.replace(
            super().hello(),
            served_version=self._published,
            lineage=self._lineage or self.welcomed_by,
        )

    def on_frame(self, frame: Welcome | UpdateReport) -> None:
        if isinstance(frame, Welcome):
            self.welcomed_by = frame.lineage
            return
        if frame.outcome is RoundOutcome.PUBLISHED:
            self._published, self._lineage = frame.version, self.welcomed_by
        with self._lock:
            for announced in (self.announced, self._withdrawn):
                if (
                    announced is not None
                    and not announced.report.done()
                    and frame.attempt == announced.frame.attempt
                    and (frame.attempt or frame.version == announced.frame.version)
                ):
                    announced.report.set_result(frame)

    async def on_connected(self) -> None:
        """Send the announcement if it has no report yet.

        The controller drops the announcement when the connection ends, so each new connection sends it again.
        """
        announced = self.announced
        if announced is not None and announced.frame.attempt and not announced.report.done():
            await self.send(announced.frame)
