"""An event loop without a clock, without sockets and without threads.

Time stands still while any callback is ready; then it jumps to the next timer. A
`SimulatedNetwork` makes connections. Jobs for executors run in the loop itself, after a time that
the network's host decides. Two runs of one program are identical.

The idea comes from FoundationDB's simulator: the code under test is the shipped code, and one seed
determines everything that this code cannot control.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, final

from simulated_network import SimulatedNetwork, SimulatedServer

from windlass.errors import ConfigError

__all__ = ["OneThread", "SimulatedLoop"]

ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")


@final
class OneThread(concurrent.futures.Executor):
    """Executor with one simulated thread: its jobs run one after another."""

    def __init__(self) -> None:
        self.busy_until_s = 0.0


class _Jump:
    """Selector for the base class; it moves the clock instead of waiting."""

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
    """Event loop with simulated time; see the module.

    Args:
        network: makes connections; its hosts decide how long jobs take.

    Attributes:
        after_step: called after every turn of the loop, to check invariants.
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
        """Return the simulated seconds since the loop was made."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock; the base class calls it when nothing is ready for `seconds`."""
        self._now_s += max(seconds, 0.0)

    def run_in_executor(
        self,
        executor: concurrent.futures.Executor | None,
        func: Callable[[*ArgTs], ResultT],
        *args: *ArgTs,
    ) -> asyncio.Future[ResultT]:
        """Run `func` in the loop after the time that the current host needs for it."""
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
        """Connect to a server of the simulated network; only the port selects the server.

        Raises:
            OSError: no server listens, or this host has no descriptor left.
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
        """Listen on the port number of `sock`, or on `port`."""
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
        """Create a task of the current host, which ends with the host. Eager starts of Python 3.14
        are ignored."""
        del eager_start
        task: asyncio.Task[ResultT] = super().create_task(coro, name=name, context=context)
        self.network.current_host().adopt(task)
        return task

    def _process_events(self, event_list: list[object]) -> None:
        del event_list

    def _write_to_self(self) -> None:
        return

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        if self.after_step is not None:
            self.after_step()
