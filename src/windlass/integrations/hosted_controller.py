"""A controller inside a process that has other work: a user starts none, and handles no secret."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar, final

from windlass.config import ControlConfig
from windlass.controller import Controller
from windlass.errors import PeerTimeout

__all__ = ["HostedController"]

START_S = 30.0
"""Deadline of the thread's start and of its end."""
MARGIN_S = 5.0
"""By which an answer of the loop may come after its deadline."""

T = TypeVar("T")


@final
class HostedController:
    """A `Controller` in a thread of its own, from construction to `close`.

    Args:
        host: address to bind, that every member of the fleet reaches.
        config: see `Controller`.

    Attributes:
        url, token: for the members; the token is random and of this controller alone.

    Raises:
        ConfigError: `host` is not of this host.
        PeerTimeout: it does not serve after `START_S`.
    """

    def __init__(self, *, host: str, config: ControlConfig) -> None:
        self.token = secrets.token_urlsafe(32)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="windlass-controller", daemon=True
        )
        self._thread.start()
        self._closed = False
        try:
            self._controller = self._run(self._enter(host, config), START_S)
        except BaseException:
            self._end_loop()
            raise
        self.url = self._controller.url

    def wait_for_fleet(
        self, *, num_trainers: int, engines: Sequence[str], deadline_s: float
    ) -> None:
        """See `Controller.wait_for_fleet`."""
        waiting = self._controller.wait_for_fleet(
            num_trainers=num_trainers, engines=engines, deadline_s=deadline_s
        )
        self._run(waiting, deadline_s + MARGIN_S)

    def close(self) -> None:
        """End every session and the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._run(self._controller.__aexit__(), START_S)
        finally:
            self._end_loop()

    async def _enter(self, host: str, config: ControlConfig) -> Controller:
        return await Controller(token=self.token, host=host, config=config).__aenter__()

    def _run(self, work: Coroutine[object, object, T], deadline_s: float) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline_s)
        except FutureTimeout as error:
            if isinstance(error, PeerTimeout):  # of the call itself, and says more
                raise
            future.cancel()
            raise PeerTimeout(
                f"controller: no answer of its thread within {deadline_s} s"
            ) from None

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        if not self._thread.is_alive():
            self._loop.close()
