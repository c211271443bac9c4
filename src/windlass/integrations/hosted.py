"""Controller in a thread of the trainer's rank 0, and messages through which all trainer ranks connect to it.

The user starts no controller process and handles no secret: trainer ranks get the controller's address and a token
through the store of `torch.distributed`, and engines get an address and a token through their framework.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

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
"""Numbers of calls of `TrainerRanks.of_process`. All ranks make these calls in the same order, so the numbers agree."""


class HostAddress(msgspec.Struct, frozen=True):
    """Address to which ranks of one role connect.

    Attributes:
        url: URL of the controller.
        token: token that permits this role only.
    """

    url: str
    token: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def _no_setup(_: Controller) -> None:
    """Do nothing: the default `setup` of `HostedController`."""


TELLS_S = 10.0
"""Seconds that other trainer ranks wait longer than rank 0, so that they receive the reason if rank 0 times out."""


@final
class HostedController:
    """A `Controller` whose loop runs in a thread of this process until `close`.

    Args:
        towards: URLs of the servers that will connect. The controller binds this host's address on the route to the
            first URL that is not a loopback address.
        config: settings of updates; the defaults if omitted.
        setup: function that is called in the controller's event loop as soon as the controller runs.

    Attributes:
        controller: the controller; only coroutines in its event loop may use it, see `call`.

    Raises:
        ConfigError: a URL is not valid, or WINDLASS_HOST is not an address of this host.
        PeerUnreachable: this host has no route to the server.
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
        """Run the controller in this thread until `close`. Complete `started` when it runs or could not be started."""

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
        """Return the controller's address, and a token that permits only this role."""
        return HostAddress(self.controller.url, role_token(self._secret, role))

    def wait_for_fleet(
        self, engines: Sequence[str], deadline_s: float, *, num_trainers: int = 0
    ) -> None:
        """Wait until these engines and `num_trainers` trainer ranks are in the fleet.

        Raises:
            EngineRefused: an engine cannot be updated; the message has the reason.
            PeerTimeout: members are missing after `deadline_s`; the message names them.
        """
        there = self.controller.wait_for_fleet(
            num_trainers=num_trainers, engines=tuple(engines), deadline_s=deadline_s
        )
        self.call(there).result(deadline_s + MARGIN_S)

    def missing(self, engines: Sequence[str]) -> list[str]:
        """Return the names of engines that are missing from the fleet. `engines` has the expected names."""

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
        """Schedule `work` in the controller's event loop, and return a future of the result. Thread-safe."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the controller, and close every connection to it. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(CLOSE_S)


class _Told(msgspec.Struct, frozen=True):
    """Message of one trainer rank to other ranks.

    Attributes:
        text: content of the message.
        reason: error of a rank that failed and has no content to send; otherwise empty.
    """

    text: str = ""
    reason: str = ""


@final
@dataclass(frozen=True, slots=True)
class TrainerRanks:
    """Messages between the ranks of this trainer through a store. By default, the trainer has one rank.

    Attributes:
        rank: index of this rank.
        world_size: number of ranks.
        store: store that all ranks share; None if the trainer has one rank.
        name: prefix of the messages in the store, the same on all ranks.
    """

    rank: int = 0
    world_size: int = 1
    store: Store | None = None
    name: str = ""

    @classmethod
    def of_process(cls) -> Self:
        """Return the `TrainerRanks` of this process, with the store of `torch.distributed` if that is initialised.

        Every rank must call this the same number of times, because the objects that the ranks get from their n-th calls
        exchange messages with each other. Ranks do not wait for each other in this call.
        """
        import torch.distributed as dist

        name = f"windlass/ranks/{next(_NUMBERS)}"
        if not (dist.is_available() and dist.is_initialized()):
            return cls(name=name)
        from torch.distributed.distributed_c10d import _get_default_store

        return cls(dist.get_rank(), dist.get_world_size(), _get_default_store(), name)

    def tell(self, what: str, text: str = "", *, reason: str = "") -> None:
        """Store a message that other ranks read with `hear`, now or later. Call this once for each `what`.

        Do nothing if the trainer has one rank. Not collective.

        Args:
            what: name of the message.
            text: content of the message.
            reason: why this rank failed; empty if it did not fail. In other ranks, `hear` raises an error with this reason.

        Raises:
            PeerUnreachable: the store cannot be reached.
        """
        if self.store is None or self.world_size == 1:
            return
        try:
            self.store.set(f"{self.name}/{what}", msgspec.json.encode(_Told(text, reason)).decode())
        except RuntimeError as error:
            raise PeerUnreachable(
                f"{what}: the store of torch.distributed cannot be reached: {error}"
            ) from error

    def hear(self, what: str, deadline_s: float) -> str:
        """Wait until another rank has sent the message `what`, and return its text. Not collective.

        Raises:
            PeerUnreachable: the other rank failed (the error has the reason), the store cannot be reached, or the trainer
                has one rank.
            PeerTimeout: the message did not come within `deadline_s`.
        """
        if self.store is None or self.world_size == 1:
            raise PeerUnreachable(f"{what}: no other trainer rank can send this message")
        key = f"{self.name}/{what}"
        try:
            self.store.wait([key], timedelta(seconds=deadline_s))
            told = msgspec.json.decode(self.store.get(key), type=_Told)
        except RuntimeError as error:
            if "timeout" in str(error).lower():
                raise PeerTimeout(
                    f"{what}: no message from another trainer rank within {deadline_s} s"
                ) from error
            raise PeerUnreachable(
                f"{what}: the store of torch.distributed cannot be reached: {error}"
            ) from error
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
        """Start a controller on rank 0, connect every rank to it, and then let servers join. Collective.

        Args:
            what: name of this call; the same on all ranks, and a new name for every call.
            host: function that starts the controller and returns the address for trainer ranks. Rank 0 calls it.
            connect: function that every rank calls with this address.
            join: function that lets servers join. Rank 0 calls it after all ranks have connected.
            deadline_s: seconds that a rank waits for each message of another rank.

        Raises:
            WindlassError: `host`, `connect` or `join` raised it on this rank.
            PeerUnreachable: another rank has failed; the message has the reason.
            PeerTimeout: another rank has sent no message within `deadline_s`.
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
                # Rank 0 waits for servers until its deadline, and only then sends the names of the missing servers. So
                # wait `TELLS_S` longer than rank 0.
                self.hear(joined, deadline_s + TELLS_S)
        except Exception as error:
            reason = f"rank {self.rank} of the trainer: {type(error).__name__}: {error}"
            for waited in (connected[self.rank],) if self.rank else (address, joined):
                try:
                    # Other ranks wait for this message. Send it with the reason, so that they fail at once.
                    self.tell(waited, reason=reason)
                except PeerUnreachable as unheard:
                    _log.warning("%s", unheard)
            raise
