"""Hosts and connections in memory, for a `SimulatedLoop`, with faults that a test requests by
name.

Connections carry bytes in order, after a delay drawn from the seed. They can be cut. Hosts can be
killed, stalled, and parted from each other: as with TCP, data that is sent during the partition
arrives after it. Once a connection is upgraded to a WebSocket, every write is one message.
Messages can be lost, doubled, delayed behind later ones, or made undecodable.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, final

import aiohttp

from windlass.errors import ConfigError

if TYPE_CHECKING:
    from simulated_loop import SimulatedLoop

__all__ = ["MessageFault", "Meter", "SimulatedHost", "SimulatedNetwork", "SimulatedServer"]

_HOST: ContextVar[str] = ContextVar("simulated_host", default="")
UNDECODABLE = 0xC1
"""The only byte that begins no msgpack value."""
BINARY_FRAME = 0x82
"""First byte of a WebSocket frame that is one whole binary message."""
KEPT_FRAMES = 30
"""Number of newest frames that each direction of a connection keeps for replays."""


class MessageFault(StrEnum):
    """Fault of one message.

    LOSE: it never arrives, and the connection stays. CUT: it does not arrive, and both ends are
    reset. DOUBLE: it arrives twice. DELAY: it arrives up to a second late, behind later ones.
    CORRUPT: its first byte cannot be decoded. REPLAY: an earlier message of the connection arrives
    again after it.
    """

    LOSE = "lose"
    CUT = "cut"
    DOUBLE = "double"
    DELAY = "delay"
    CORRUPT = "corrupt"
    REPLAY = "replay"


@dataclass
class Meter:
    """Cost of each host to the process that all hosts share.

    Attributes:
        cpu_s: host -> CPU seconds of this thread, measured only inside `running`.
        messages, nbytes: host -> messages and bytes that it has sent.
    """

    cpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    messages: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    _owner: str = ""
    _since_s: float = field(default_factory=time.thread_time)

    def switch(self, host: str) -> str:
        """Count further CPU time for `host`; return the host that it was counted for until now."""
        now_s = time.thread_time()
        self.cpu_s[self._owner] += now_s - self._since_s
        before, self._owner, self._since_s = self._owner, host, now_s
        return before

    def sent(self, host: str, nbytes: int) -> None:
        """Count a message that `host` has sent."""
        self.messages[host] += 1
        self.nbytes[host] += nbytes

    def take(self, host: str) -> tuple[float, int, int]:
        """Return CPU seconds, messages and bytes of `host`, and reset the counts of all hosts."""
        self.switch(self.switch(""))
        found = self.cpu_s[host], self.messages[host], self.nbytes[host]
        self.cpu_s.clear()
        self.messages.clear()
        self.nbytes.clear()
        return found

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count every callback of the loop for its host inside the block."""
        handle: Any = asyncio.Handle
        run = handle._run

        def metered(called: Any) -> None:
            before = self.switch(called._context.get(_HOST, ""))
            try:
                run(called)
            finally:
                self.switch(before)

        handle._run = metered
        try:
            yield
        finally:
            handle._run = run


@final
class SimulatedHost:
    """One process: its tasks, its speed, whether it is alive. Made by `SimulatedNetwork.host`.

    Attributes:
        job_range_s: bounds of the random duration of a job of an executor.
        no_descriptors: new connections fail with EMFILE.
    """

    def __init__(self, network: SimulatedNetwork, name: str) -> None:
        self._network = network
        self.name = name
        self.alive = True
        self.stalled = False
        self.no_descriptors = False
        self.job_range_s = (0.0005, 0.02)
        self.transports: dict[_Transport, None] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._deferred: list[Callable[[], None]] = []

    def job_s(self) -> float:
        """Return the seconds that the next job takes."""
        return self._network.random.uniform(*self.job_range_s)

    def when_awake(self, call: Callable[[], None]) -> None:
        """Call it now, or after the stall, or never if the host is dead."""
        if self.stalled:
            self._deferred.append(call)
        elif self.alive:
            call()

    def spawn(self, work: Any, name: str = "") -> asyncio.Task[Any]:
        """Run a coroutine as part of this host; its connections belong to this host."""
        with self._network.acting_as(self):
            return asyncio.get_running_loop().create_task(work, name=f"{self.name} {name}")

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Record a task that code of this host has made; called by the loop."""
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def kill(self) -> None:
        """Kill the host as SIGKILL does: it sends nothing more, peers see resets, its tasks end."""
        self.alive = self.stalled = False
        self._deferred.clear()
        self._network.silence(self)
        for transport in list(self.transports):
            transport.reset()
        for task in list(self._tasks):
            task.cancel()

    async def ended(self) -> None:
        """Wait until the tasks of a killed host have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self) -> None:
        """Stall the host as SIGSTOP does: it runs and receives nothing; connections stay open."""
        self.stalled = self.alive

    def wake(self) -> None:
        """Wake the host as SIGCONT does."""
        self.stalled = False
        deferred, self._deferred = self._deferred, []
        for call in deferred:
            call()
        self._network.flush()


class _Socket:
    """Socket that tells aiohttp's site its name."""

    def __init__(self, port: int) -> None:
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self._port)


class _ConnectedSocket:
    """Socket of a connection, with the few methods that callers use."""

    # With this family, aiohttp sets no options of TCP.
    family = socket.AF_UNIX

    def __init__(self, reset: Callable[[], None]) -> None:
        self._reset = reset

    def setsockopt(self, *_: object) -> None:
        """Set nothing."""

    def fileno(self) -> int:
        """Return -1: hosts count connections by themselves."""
        return -1

    def shutdown(self, _how: int) -> None:
        """Cut the connection."""
        self._reset()


@final
class SimulatedServer:
    """Server that `SimulatedLoop.create_server` returns."""

    def __init__(
        self,
        network: SimulatedNetwork,
        host: SimulatedHost,
        factory: Callable[[], asyncio.BaseProtocol],
        port: int,
        real: Any,
    ) -> None:
        self._network, self.host, self.factory, self.port = network, host, factory, port
        self._real = real
        self.sockets = (_Socket(port),)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._network.unlisten(self)
        if self._real is not None:
            self._real.close()

    async def wait_closed(self) -> None:
        """Return at once: the code that serves connections closes them."""


@final
class _Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: SimulatedNetwork, host: SimulatedHost) -> None:
        super().__init__()
        self._network, self.host = network, host
        self.peer: _Transport = self
        self.upgraded = False
        self._protocol: asyncio.BaseProtocol = asyncio.Protocol()
        self._closing = self._lost = self._reading_paused = False
        self._under_way: deque[bytes | BaseException | None] = deque()
        self._in_flight: deque[bytes | BaseException | None] = deque()
        self._last_arrival_s = 0.0
        self._socket = _ConnectedSocket(self.reset)
        self.sent: deque[bytes] = deque(maxlen=0 if network.meter is not None else KEPT_FRAMES)
        host.transports[self] = None

    # --- methods for protocols -----------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return self._socket
        return ("127.0.0.1", 0) if name in {"peername", "sockname"} else default

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not self._reading_paused

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self.flush()

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        # Nothing is buffered.
        del high, low

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not data:
            return
        if bytes(data[:12]) == b"HTTP/1.1 101":
            self.upgraded = self.peer.upgraded = True
        self._network.transmit(self, bytes(data))

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._network.schedule(self, None)
            self._network.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self.reset()

    # --- methods for the network -----------------------------------------------------------------

    def reset(self) -> None:
        """Close this end at once; the other end gets a reset when the network delivers it."""
        if not self._closing:
            self._closing = True
            error = ConnectionResetError(errno.ECONNRESET, "simulated reset")
            self._network.schedule(self, error, even_if_dead=True)
            self._network.loop.call_soon(self._lose, error)

    def depart(self, item: bytes | BaseException | None) -> None:
        """Put an item on the wire behind all others; `arrive_next` delivers it."""
        self._under_way.append(item)

    def arrive_next(self) -> None:
        """Deliver the oldest item on the wire, because timers of one moment are called in any order."""
        self.arrive(self._under_way.popleft())

    def arrive(self, item: bytes | BaseException | None) -> None:
        """Deliver an item to this end."""
        self._in_flight.append(item)
        self.flush()

    def flush(self) -> None:
        """Pass arrived items to the protocol, as far as this end can receive now."""
        while self._in_flight and not self._reading_paused and self._network.reaches(self):
            item = self._in_flight.popleft()
            if self._lost or not self.host.alive:
                continue
            with self._network.acting_as(self.host):
                self._take(item)

    def _take(self, item: bytes | BaseException | None) -> None:
        if isinstance(item, bytes):
            if isinstance(self._protocol, asyncio.Protocol) and not self._closing:
                self._protocol.data_received(item)
            return
        self._closing = True
        if item is None and isinstance(self._protocol, asyncio.Protocol):
            self._protocol.eof_received()
        # asyncio's transports do the same: code that waits for earlier data runs first.
        self._network.loop.call_soon(self._lose, item)

    def arrival_s(self, delay_s: float, now_s: float, *, overtaken: bool) -> float:
        """Return the arrival time of an item that is sent now: never before earlier items."""
        arrival = max(now_s + delay_s, self._last_arrival_s)
        if not overtaken:
            self._last_arrival_s = arrival
        return arrival

    def _lose(self, error: BaseException | None) -> None:
        if self._lost:
            return
        self._lost = True
        self.host.transports.pop(self, None)
        with self._network.acting_as(self.host):
            self._protocol.connection_lost(error if isinstance(error, Exception) else None)


@final
class SimulatedNetwork:
    """Hosts and the connections between them.

    Args:
        seed: seed of all random draws.
        delay_range_s: bounds of the random travel time of a message.
        meter: measures the hosts; the network then keeps no frames for replays.
    """

    def __init__(
        self,
        seed: int,
        delay_range_s: tuple[float, float] = (0.0002, 0.005),
        *,
        meter: Meter | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.meter = meter
        self._delay_range_s = delay_range_s
        self._hosts: dict[str, SimulatedHost] = {}
        self._servers: dict[int, SimulatedServer] = {}
        # Above all ports of `free_port`, so that no simulated server takes the port of a bound socket.
        self._next_port = 50_000
        self._parted: dict[frozenset[str], int] = {}
        self._faults: dict[tuple[str, str], deque[MessageFault]] = {}
        self._loop: SimulatedLoop | None = None
        self.num_messages = 0
        self.injected = Counter[MessageFault]()

    @property
    def loop(self) -> SimulatedLoop:
        """Return the loop that was made with this network."""
        if self._loop is None:
            raise ConfigError("SimulatedNetwork: make a SimulatedLoop with it first")
        return self._loop

    def attach(self, loop: SimulatedLoop) -> None:
        """Store the loop; called by the loop."""
        self._loop = loop

    def host(self, name: str) -> SimulatedHost:
        """Return the live host of that name; a new process replaces a dead one."""
        found = self._hosts.get(name)
        if found is None or not found.alive:
            found = self._hosts[name] = SimulatedHost(self, name)
        return found

    def current_host(self) -> SimulatedHost:
        """Return the host of the running code."""
        name = _HOST.get()
        return self._hosts[name] if name in self._hosts else self.host(name)

    @contextmanager
    def acting_as(self, host: SimulatedHost) -> Iterator[None]:
        """Run calls and tasks of the block as parts of `host`."""
        token = _HOST.set(host.name)
        before = "" if self.meter is None else self.meter.switch(host.name)
        try:
            yield
        finally:
            _HOST.reset(token)
            if self.meter is not None:
                self.meter.switch(before)

    # --- connections -----------------------------------------------------------------------------

    def listen(
        self, factory: Callable[[], asyncio.BaseProtocol], port: int, real: Any
    ) -> SimulatedServer:
        """See `SimulatedLoop.create_server`.

        Raises:
            OSError: a server listens on the port.
        """
        if not port:
            port, self._next_port = self._next_port, self._next_port + 1
        if port in self._servers:
            raise OSError(errno.EADDRINUSE, f"{os.strerror(errno.EADDRINUSE)}: {port}")
        server = SimulatedServer(self, self.current_host(), factory, port, real)
        self._servers[port] = server
        return server

    def unlisten(self, server: SimulatedServer) -> None:
        """Refuse further connections to the server."""
        if self._servers.get(server.port) is server:
            del self._servers[server.port]

    def silence(self, host: SimulatedHost) -> None:
        """Close the servers of a dead host."""
        for server in [s for s in self._servers.values() if s.host is host]:
            server.close()

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """See `SimulatedLoop.create_connection`."""
        host = self.current_host()
        await asyncio.sleep(self.random.uniform(*self._delay_range_s))
        if host.no_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        server = self._servers.get(port)
        while server is not None and not self.together(host.name, server.host.name):
            # SYNs are lost; the caller's own timeout ends the loop.
            await asyncio.sleep(0.05)
            server = self._servers.get(port)
        if server is None or not server.host.alive or server.host.no_descriptors:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {port}")
        near, far = _Transport(self, host), _Transport(self, server.host)
        near.peer, far.peer = far, near
        with self.acting_as(server.host):
            accepting = server.factory()
            far.set_protocol(accepting)
            accepting.connection_made(far)
        protocol = factory()
        near.set_protocol(protocol)
        protocol.connection_made(near)
        return near, protocol

    def transmit(self, sender: _Transport, data: bytes) -> None:
        """Send bytes to the other end, or apply the next requested fault to them."""
        if not sender.host.alive:
            return
        self.num_messages += 1
        if self.meter is not None:
            self.meter.sent(sender.host.name, len(data))
        faults = self._faults.get((sender.host.name, sender.peer.host.name))
        if sender.upgraded and data[0] == BINARY_FRAME:
            sender.sent.append(data)
        if not faults or not sender.upgraded:
            self.schedule(sender, data)
            return
        fault = faults.popleft()
        self.injected[fault] += 1
        match fault:
            case MessageFault.LOSE:
                return
            case MessageFault.CUT:
                sender.reset()
            case MessageFault.DOUBLE:
                self.schedule(sender, data)
                self.schedule(sender, data)
            case MessageFault.DELAY:
                self.schedule(sender, data, late_s=self.random.uniform(0.0, 1.0))
            case MessageFault.CORRUPT:
                self.schedule(sender, _undecodable(data))
            case MessageFault.REPLAY:
                self.schedule(sender, data)
                if sender.sent:
                    late_s = self.random.uniform(0.0, 0.05)
                    self.schedule(sender, self.random.choice(sender.sent), late_s=late_s)

    def schedule(
        self,
        sender: _Transport,
        item: bytes | BaseException | None,
        *,
        late_s: float = 0.0,
        even_if_dead: bool = False,
    ) -> None:
        """Let an item arrive at the other end after a delay."""
        if not (sender.host.alive or even_if_dead):
            return
        delay_s = self.random.uniform(*self._delay_range_s) + late_s
        peer = sender.peer
        at_s = peer.arrival_s(delay_s, self.loop.time(), overtaken=late_s > 0)
        if late_s > 0:
            self.loop.call_at(at_s, peer.arrive, item)
        else:
            peer.depart(item)
            self.loop.call_at(at_s, peer.arrive_next)

    def reaches(self, end: _Transport) -> bool:
        """Return whether the host of `end` can receive now."""
        return not end.host.stalled and self.together(end.host.name, end.peer.host.name)

    def flush(self) -> None:
        """Deliver everything that can be delivered now."""
        for host in list(self._hosts.values()):
            for transport in list(host.transports):
                transport.flush()

    # --- faults ----------------------------------------------------------------------------------

    def together(self, first: str, second: str) -> bool:
        """Return whether two hosts reach each other."""
        return not self._parted.get(frozenset((first, second)))

    def part(self, first: str, second: str) -> None:
        """Part two hosts. Partitions are counted, so that they may overlap."""
        key = frozenset((first, second))
        self._parted[key] = self._parted.get(key, 0) + 1

    def rejoin(self, first: str, second: str) -> None:
        """Undo one `part`; data that was held back arrives now."""
        key = frozenset((first, second))
        self._parted[key] = max(0, self._parted.get(key, 0) - 1)
        self.flush()

    def cut(self, first: str, second: str) -> None:
        """Reset every connection between two hosts."""
        for transport in list(self._hosts[first].transports) if first in self._hosts else ():
            if transport.peer.host.name == second:
                transport.reset()

    def disturb(self, sender: str, receiver: str, fault: MessageFault, count: int = 1) -> None:
        """Apply a fault to the next messages from one host to another."""
        self._faults.setdefault((sender, receiver), deque()).extend([fault] * count)

    def calm(self) -> None:
        """End all faults: partitions heal, hosts wake up, and no requested fault remains."""
        self._faults.clear()
        self._parted.clear()
        for host in list(self._hosts.values()):
            host.no_descriptors = False
            host.job_range_s = (0.0005, 0.02)
            if host.stalled:
                host.wake()
        self.flush()

    @property
    def num_connections(self) -> int:
        """Number of open connection ends of live hosts."""
        return sum(len(host.transports) for host in self._hosts.values() if host.alive)

    @contextmanager
    def http(self) -> Iterator[None]:
        """Let connectors of aiohttp make simulated connections inside the block."""
        original = aiohttp.TCPConnector._wrap_create_connection

        async def _connect(
            _connector: aiohttp.TCPConnector,
            *args: Any,
            addr_infos: Any,
            req: Any,
            timeout: aiohttp.ClientTimeout,
            client_error: type[Exception] = aiohttp.ClientConnectorError,
            **_options: Any,
        ) -> Any:
            try:
                async with asyncio.timeout(timeout.sock_connect or timeout.total):
                    return await self.connect(args[0], addr_infos[0][4][1])
            except TimeoutError:
                raise
            except OSError as error:
                raise client_error(req.connection_key, error) from error

        aiohttp.TCPConnector._wrap_create_connection = _connect  # type: ignore[assignment]
        try:
            yield
        finally:
            aiohttp.TCPConnector._wrap_create_connection = original  # type: ignore[method-assign]


def _undecodable(frame: bytes) -> bytes:
    """Return a WebSocket frame with a payload whose first byte begins no msgpack value."""
    length = frame[1] & 0x7F
    start = 2 + {126: 2, 127: 8}.get(length, 0)
    masked = bool(frame[1] & 0x80)
    mask = frame[start] if masked else 0
    start += 4 if masked else 0
    if len(frame) <= start:
        return frame
    return frame[:start] + bytes([UNDECODABLE ^ mask]) + frame[start + 1 :]
