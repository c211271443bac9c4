"""An event loop without a clock, without sockets and without threads.

Time stands still while there is something to do and jumps to the next timer when there is
nothing. Connections are made by a `SimulatedNetwork`; jobs for executors run in the loop itself,
after a time that the network's host decides. Two runs of one program are the same run.

The idea is that of FoundationDB's simulator: the code under test is the code that is shipped, and
everything that it cannot control comes from one seed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, final

from simulated_network import SimulatedNetwork, SimulatedServer

from windlass.control.client import AgentChannel
from windlass.errors import ConfigError

__all__ = ["OneThread", "SimulatedLoop", "run_in_loop"]

ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")


@final
class OneThread(concurrent.futures.Executor):
    """Stands for an executor with one thread: its jobs run one after another."""

    def __init__(self) -> None:
        self.busy_until_s = 0.0


def run_in_loop(channel: AgentChannel, loop: asyncio.AbstractEventLoop) -> None:
    """Have a channel that has not started run in `loop`, its commands in a thread of the simulation."""
    channel._loop.close()
    channel._loop, channel._executor, channel._owns_executor = loop, OneThread(), False


class _Jump:
    """What the base class takes for a selector: instead of waiting, it moves the clock."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[object]:
        if timeout_s is None:
            raise ConfigError("SimulatedLoop: everybody waits and no timer is set: a deadlock")
        self._loop.advance(timeout_s)
        return []

    def close(self) -> None:
        return


@final
class SimulatedLoop(asyncio.BaseEventLoop):
    """See the module.

    Args:
        network: makes connections; its hosts say how long jobs take.

    Attributes:
        after_step: called after every turn of the loop, for invariants.
    """

    def __init__(self, network: SimulatedNetwork) -> None:
        super().__init__()
        self._now_s = 0.0
        self._clock_resolution = 1e-6
        self._selector = _Jump(self)
        self.network = network
        self.after_step: Callable[[], None] | None = None
        network.attach(self)

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Called by the base class when there is nothing to do for `seconds`."""
        self._now_s += max(seconds, 0.0)

    def run_in_executor(
        self,
        executor: concurrent.futures.Executor | None,
        func: Callable[[*ArgTs], ResultT],
        *args: *ArgTs,
    ) -> asyncio.Future[ResultT]:
        """Run `func` in the loop when the current host has had the time for it."""
        future: asyncio.Future[ResultT] = self.create_future()
        host = self.network.current_host()
        starts_s = self._now_s
        if isinstance(executor, OneThread):
            starts_s = max(starts_s, executor.busy_until_s)
        ends_s = starts_s + host.job_s()
        if isinstance(executor, OneThread):
            executor.busy_until_s = ends_s

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001  (an executor passes on whatever it is)
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_at(ends_s, lambda: host.when_awake(run))
        return future

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect to a server of the simulated network; ports alone name servers.

        Raises:
            OSError: nobody listens, or this host has no descriptor left.
        """
        del host
        return await self.network.connect(protocol_factory, port)

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        sock: Any = None,
        ssl: Any = None,
        backlog: int = 100,
        reuse_address: bool | None = None,
        reuse_port: bool | None = None,
    ) -> SimulatedServer:
        """Listen on the port of `sock`, which is only asked for its number, or on `port`."""
        del host, ssl, backlog, reuse_address, reuse_port
        wanted = sock.getsockname()[1] if sock is not None else (port or 0)
        return self.network.listen(protocol_factory, wanted, sock)

    def create_task(
        self,
        coro: Generator[Any, None, ResultT] | Coroutine[Any, Any, ResultT],
        *,
        name: object = None,
        context: Context | None = None,
        eager_start: bool | None = None,
    ) -> asyncio.Task[ResultT]:
        """A task of the current host: it ends with it. It begins in its turn, though Python 3.14 may ask for more."""
        del eager_start
        task: asyncio.Task[ResultT] = super().create_task(coro, name=name, context=context)
        self.network.current_host().adopt(task)
        return task

    def _process_events(self, event_list: list[object]) -> None:
        del event_list  # there are none

    def _write_to_self(self) -> None:
        return

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        if self.after_step is not None:
            self.after_step()
