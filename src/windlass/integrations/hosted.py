"""A controller in a thread of the trainer's rank 0, and what its ranks tell each other of it.

So a user of a framework starts no process and handles no secret: the address and a token of its role reach
every trainer rank through the store of `torch.distributed`, and every engine through a call of its framework's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, final

import msgspec

from windlass.config import ControlConfig
from windlass.controller import Controller
from windlass.errors import EngineRefused, PeerTimeout, PeerUnreachable
from windlass.net.access import Access, role_token
from windlass.net.addresses import check_url, is_loopback, own_address

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["HostAddress", "HostedController", "TrainerRanks"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
CLOSE_S = 30.0
MARGIN_S = 30.0
"""Seconds that a caller waits for the controller's thread beyond the deadline of the call."""
_NUMBERS = itertools.count()
"""Numbers of collective objects. All ranks create them in the same order, so the numbers agree."""


class HostAddress(msgspec.Struct, frozen=True):
    """Address to which ranks of one role connect. `token` permits that role alone."""

    url: str
    token: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def _no_setup(_: Controller) -> None:
    """Do nothing: the setup of a controller that needs none."""


TELLS_S = 10.0
"""Seconds that trainer ranks wait beyond the deadline of rank 0, so that they hear its reason."""


@final
class HostedController:
    """A `Controller` whose loop runs in a thread of this process until `close`.

    Args:
        towards: URLs of the servers that connect, in addition to trainer ranks. They decide which address is bound.
        config: settings of updates; the defaults if omitted.
        setup: called with the controller in its loop, before the server accepts connections.

    Attributes:
        controller: to be used from its loop only, see `call`.

    Raises:
        ConfigError, PeerUnreachable: no address of this host leads to one of them.
    """

    def __init__(
        self,
        towards: Sequence[str],
        config: ControlConfig | None = None,
        setup: Callable[[Controller], None] = _no_setup,
    ) -> None:
        self._secret = secrets.token_urlsafe(32)
        away = [url for url in towards if not is_loopback(check_url(url, "towards").hostname or "")]
        host = own_address([*away, *towards][0])
        self.controller = Controller(token=self._secret, host=host, config=config)
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(setup, started), name="windlass-controller", daemon=True
        )
        self._thread.start()
        started.result()

    def _run(self, setup: Callable[[Controller], None], started: Future[None]) -> None:
        async def serve() -> None:
            try:
                async with self.controller as controller:
                    setup(controller)
                    started.set_result(None)
                    await self._ended.wait()
            except BaseException as error:
                if started.done():
                    raise
                started.set_exception(error)

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(serve())

    def address(self, role: Access) -> HostAddress:
        """Where ranks of a role connect."""
        return HostAddress(self.controller.url, role_token(self._secret, role))

    def wait_for_fleet(
        self, engines: Sequence[str], deadline_s: float, *, num_trainers: int = 0
    ) -> None:
        """Return once these engines, and as many trainer jobs, are in the fleet.

        Raises:
            EngineRefused: one cannot be updated; quotes its reason.
            PeerTimeout: names who is missing after `deadline_s`.
        """
        there = self.controller.wait_for_fleet(
            num_trainers=num_trainers, engines=tuple(engines), deadline_s=deadline_s
        )
        self.call(there).result(deadline_s + MARGIN_S)

    def missing(self, engines: Sequence[str]) -> list[str]:
        """Which of these engines are not in the fleet now."""

        async def find() -> list[str]:
            found = []
            for name in engines:
                try:
                    await self.controller.wait_for_fleet(
                        engines=(name,), num_trainers=0, deadline_s=0
                    )
                except (EngineRefused, PeerTimeout):
                    found.append(name)
            return found

        return self.call(find()).result(MARGIN_S)

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have its loop do `work`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End it, and every connection to it. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(CLOSE_S)


class _Told(msgspec.Struct, frozen=True):
    """`reason` is why there is nothing to tell."""

    text: str = ""
    reason: str = ""


@final
class TrainerRanks:
    """The ranks of this trainer, which tell each other things through `torch.distributed`'s store.

    Made by every rank, in one order; without `torch.distributed` there is one rank. Not collective.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = 0, 1
        self._store: Store | None = None
        self._name = f"windlass/ranks/{next(_NUMBERS)}"
        if dist.is_available() and dist.is_initialized():
            from torch.distributed.distributed_c10d import _get_default_store

            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._store = _get_default_store()

    def tell(self, what: str, text: str = "", *, reason: str = "") -> None:
        """Tell every rank that asks or will ask: once for each `what`.

        Raises:
            PeerUnreachable: the store is gone.
        """
        if self._store is None or self.world_size == 1:
            return
        try:
            self._store.set(
                f"{self._name}/{what}", msgspec.json.encode(_Told(text, reason)).decode()
            )
        except RuntimeError as error:
            raise PeerUnreachable(f"{what}: the store of torch.distributed: {error}") from error

    def hear(self, what: str, deadline_s: float) -> str:
        """Wait for what another rank tells.

        Raises:
            PeerUnreachable: it told a reason, which this quotes; or the store is gone.
            PeerTimeout: it told nothing within `deadline_s`.
        """
        if self._store is None:
            raise PeerUnreachable(f"{what}: this trainer has one rank")
        key = f"{self._name}/{what}"
        try:
            self._store.wait([key], timedelta(seconds=deadline_s))
            told = msgspec.json.decode(self._store.get(key), type=_Told)
        except RuntimeError as error:
            if "timeout" in str(error).lower():
                raise PeerTimeout(
                    f"{what}: another rank of the trainer told nothing in {deadline_s} s"
                ) from error
            raise PeerUnreachable(f"{what}: the store of torch.distributed: {error}") from error
        if told.reason:
            raise PeerUnreachable(told.reason)
        return told.text

    def meet(
        self,
        what: str,
        host: Callable[[], HostAddress],
        connect: Callable[[HostAddress], None],
        join: Callable[[], None],
        deadline_s: float,
    ) -> None:
        """Have rank 0 host a controller, every rank connect to it, and then servers join it. Collective.

        Args:
            what: the same on every rank, and another one for every call.
            host: called on rank 0: returns where trainer ranks connect.
            connect: called on every rank with that.
            join: called on rank 0, once all ranks have connected.
            deadline_s: for each wait for another rank.

        Raises:
            WindlassError: whatever was raised here.
            PeerUnreachable: another rank has failed; quotes its reason. PeerTimeout: see `hear`.
        """
        address, joined = f"{what}/address", f"{what}/joined"
        connected = [f"{what}/connected/{rank}" for rank in range(self.world_size)]
        try:
            if self.rank == 0:
                own = host()
                self.tell(address, msgspec.json.encode(own).decode())
                connect(own)
                for other in connected[1:]:
                    self.hear(other, deadline_s)
                join()
                self.tell(joined)
            else:
                connect(msgspec.json.decode(self.hear(address, deadline_s), type=HostAddress))
                self.tell(connected[self.rank])
                # Rank 0 waits for servers until its own deadline, and tells why none came.
                self.hear(joined, deadline_s + TELLS_S)
        except Exception as error:
            reason = f"rank {self.rank} of the trainer: {type(error).__name__}: {error}"
            for waited in (connected[self.rank],) if self.rank else (address, joined):
                try:
                    # Report the failure, so that ranks that wait for this one end at once.
                    self.tell(waited, reason=reason)
                except PeerUnreachable as unheard:
                    _log.warning("%s", unheard)
            raise
