"""The agent's end of the control channel, for processes whose main thread is busy.

A daemon thread runs an asyncio loop with an `AgentConversation`; commands are carried out one
after another on a second thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import final

import aiohttp

from windlass.envs import check_token
from windlass.errors import PeerTimeout, PeerUnreachable
from windlass.net.addresses import check_url
from windlass.net.sockets import send_frame
from windlass.updates.conversation import AgentConversation, CommandHandler
from windlass.updates.messages import (
    PROTOCOL_VERSION,
    CannotJoin,
    Command,
    Hello,
    UpdateReport,
    encode,
)

__all__ = ["AgentChannel", "CommandHandler", "tell_cannot_join"]

WITHDRAW_S = 1.0
TELL_S = 10.0


def tell_cannot_join(url: str, token: str, engine: str, reason: str) -> None:
    """Have whoever waits for an engine hear why it does not come. Blocks.

    Raises:
        PeerUnreachable: the controller was not reached within 10 s.
    """

    async def tell() -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            asyncio.timeout(TELL_S),
            aiohttp.ClientSession(headers=headers) as http,
            http.ws_connect(f"{url.rstrip('/')}/v1/agents") as socket,
        ):
            await send_frame(socket, encode(CannotJoin(PROTOCOL_VERSION, engine, reason)))
            await socket.receive()  # the end of the connection: it has been read

    try:
        asyncio.run(tell())
    except (OSError, aiohttp.ClientError) as error:  # a TimeoutError is an OSError
        raise PeerUnreachable(f"controller {url}: {type(error).__name__}: {error}") from error


@final
class AgentChannel:
    """See the module.

    Args:
        url: the controller's address. token: its secret.
        hello: builds the first frame of every connection; called in the channel's thread.
        handler: carries out commands.
        on_disconnect: called in the channel's thread when a connection that was welcomed is lost,
            before the first attempt to connect again; again at the next welcome if it raised. What
            came of that is told to the controller (`Done.at_rest`).
        on_command: called in the channel's thread with a command, its epoch and its round, as it
            comes in and before it waits for its turn; must not block.
        reconnect: whether to connect again after a loss.

    Raises:
        ConfigError: `url` is no URL, or no header can carry `token`.
    """

    def __init__(
        self,
        url: str,
        token: str,
        hello: Callable[[], Hello],
        handler: CommandHandler,
        *,
        on_disconnect: Callable[[], None] | None = None,
        on_command: Callable[[Command, int, int], None] | None = None,
        reconnect: bool = True,
    ) -> None:
        check_url(url, "controller")
        check_token(token, "token")
        self._url = url.rstrip("/")
        self._worker = ThreadPoolExecutor(1, "windlass-commands")
        self._loop = asyncio.new_event_loop()
        self._conversation = AgentConversation(
            self._loop,
            self._worker,
            url,
            token,
            hello,
            handler,
            on_disconnect=on_disconnect,
            on_command=on_command,
            reconnect=reconnect,
        )
        self._thread = threading.Thread(target=self._run_loop, name="windlass-agent", daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def connect(self, deadline_s: float) -> None:
        """Start, and return once the controller has said welcome.

        Raises:
            AuthenticationError: the token is wrong.
            ProtocolError: the controller refused this agent; says why.
            PeerTimeout: no welcome within `deadline_s`; the channel is closed.
        """
        self._thread.start()
        try:
            self._conversation.welcomed.result(deadline_s)
        except concurrent.futures.TimeoutError:
            self.close()
            raise PeerTimeout(
                f"connect: no welcome from {self._url} within {deadline_s} s: "
                f"{self._conversation.last_error}"
            ) from None
        except BaseException:
            self.close()
            raise

    def announce(self, version: int, deadline_s: float) -> UpdateReport:
        """Say that this trainer rank stands still with `version`; wait for the round's end.

        Raises:
            PeerTimeout: no report within `deadline_s`. An announcement that still waited for other
                ranks is withdrawn; if a round had begun it goes on, and the weights must not change
                before the next report.
            ProtocolError: the controller refused this agent.
            PeerUnreachable: the channel was closed.
        """
        announced = self._conversation.announce(version)
        try:
            return announced.report.result(deadline_s)
        except concurrent.futures.TimeoutError:
            sent = self._conversation.withdraw(announced)
            if sent is not None:
                concurrent.futures.wait([sent], WITHDRAW_S)
            away = self._conversation.disconnected.is_set()
            why = f": the controller is away: {self._conversation.last_error}" if away else ""
            raise PeerTimeout(
                f"publish: no report of version {version} within {deadline_s} s{why}"
            ) from None
        finally:
            self._conversation.forget(announced)

    def run_later(self, work: Callable[[], None]) -> None:
        """Do `work` in the thread that carries out commands, after those that are there already.

        Once the channel is closed nothing is done. `work` must not raise.
        """
        with contextlib.suppress(RuntimeError):
            self._worker.submit(work)

    def wait_disconnected(self, deadline_s: float) -> bool:
        """Whether no controller is connected by then; `on_disconnect` has returned if so."""
        return self._conversation.disconnected.wait(deadline_s)

    def close(self) -> None:
        """Close the connection and end both threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just closed its loop by itself
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(10.0)
        elif self._task is None:  # `connect` was never called
            self._loop.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> AgentChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the loop's thread ------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._conversation.run())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._conversation.end()
            left = asyncio.all_tasks(self._loop)  # answers to commands that are still carried out
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
