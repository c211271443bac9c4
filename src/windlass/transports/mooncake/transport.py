"""Transport that uses Mooncake's TransferEngine: RDMA if there is a NIC, otherwise TCP.

Over TCP a write needs no code of the caller at the target, but the target's process must be running.
This module adds what the engine lacks: it checks that sources are registered (over TCP the engine
reads any address), limits calls to 1024 pieces and 256 MB, detects a process that restarted on the
same port, and keeps deadlines.

Native calls have no deadline (they return an error after 30 to 62 s, or never), so a thread for each
peer makes them. Every failure has code -1, and bytes may arrive after the failure. A failed write is
known to have ended in one case only: the wire is TCP with one connection per peer, and the call returned
long before the engine's timeouts. With one connection, the engine sends to a peer in first-in first-out
order, and the peer acknowledges each operation before the next is sent. So if a read that was queued after
the failed write succeeds, no byte of the write arrives later. After a timeout, such a read proves nothing:
the engine has dropped a connection that may still contain bytes of the write, and the read uses a new one.
"""

from __future__ import annotations

import mmap
import os
import queue
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import ClassVar, final

import numpy as np

from windlass.config import take_names
from windlass.errors import (
    ConfigError,
    PeerUnreachable,
    RegionError,
    TransferFailed,
    TransportUnavailable,
)
from windlass.layout.columns import UInt8Array, UInt64Array
from windlass.memory.ranges import Pieces
from windlass.net.addresses import join_host_port, split_host_port
from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, OneSidedTransport, WriteBatch
from windlass.transports.inbound import end_connections
from windlass.transports.liveness import INCARNATION_NBYTES, LivenessListener, PeerLiveness
from windlass.transports.mooncake.native import (
    MAX_PIECES,
    MooncakeProtocol,
    Started,
    start_engine,
)
from windlass.transports.network import (
    Limits,
    NativeCall,
    NetworkConfig,
    NetworkPeer,
    NetworkTransport,
    Outcome,
)
from windlass.transports.peers import PeerEndpoint, RemoteRegion
from windlass.transports.regions import check_batch
from windlass.transports.traits import CEILING_BYTES_PER_S, TransportTraits, WireReport
from windlass.wording import install_command

TOKEN_NBYTES = 16
"""Size of the random token in a peer's memory by which a writer recognises the peer's process."""
KEPT_PAGES = 64
"""Number of unused token pages (`_Engine.acquire_page`) of an engine above which the oldest page is used again."""
PROMPT_S = 2.0
"""Seconds. During a call that takes less time, no timeout of the engine can have passed: all timeouts are >= 5 s."""
JOIN_S = 1.0
"""Maximum seconds that `MooncakePeer.close` waits for the peer's thread."""
IDLE_S = 10.0
"""Seconds without a call after which a peer's thread ends."""
READS = 4
"""Maximum number of reads of a token before a peer counts as unreachable."""
MAX_CALL_NBYTES = 256 << 20
"""Maximum number of bytes of a native call."""
REQUEST_NBYTES = 1 << 20
"""Largest size of a piece if there are several NICs: the engine sends each piece through a NIC that it chooses at
random, so only small pieces use all NICs."""
_OVERLAP = -7
"""Mooncake's error code for a range that overlaps a registered one."""
_OTHER_PROCESS = 1
"""Result of `MooncakePeer._read_token` if another process has the peer's address."""
_MAX_KEY_CHARS = 20
_PAGE = 4096
"""Smallest registration step that a peer's key may contain. Smaller steps could make this process cut pieces into
single bytes."""
_NO_PIECES = np.empty(0, np.uint64)
_INCARNATION = re.compile(r"([0-9a-f]{32})@([0-9a-f]{1,16}):(?:(\S+):)?([0-9]{1,5})")
"""Incarnation of a peer: a random token, the address at which the token can be read, and the port of the liveness
listener. If another process listens for the peer (`window.py`), it also has the host of that process, and the peer's
memory does not contain the token."""


class MooncakeConfig(NetworkConfig, frozen=True, tag="mooncake"):
    """Configuration of Mooncake's TransferEngine.

    Attributes:
        protocol: required wire. The transport does not start if Mooncake uses another wire.

    If `max_registration_nbytes` is 0, the limit is the smallest of the NICs' limits and MC_MAX_MR_SIZE.
    """

    remedy: ClassVar[str] = f"{install_command('mooncake')}, and the package libibverbs1"

    protocol: MooncakeProtocol = MooncakeProtocol.AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        take_names(self, {"protocol": MooncakeProtocol})

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:
        """Start the transport; see `TransportConfig.create`."""
        return MooncakeTransport(self.placed(towards=towards, gpu=gpu))


@final
class _Engine:
    """A native engine with its state.

    Attributes:
        started: the running engine.
        contacted: address -> the last peer that the engine contacted there.
        pages: unused pages from `acquire_page`, the oldest first.
    """

    def __init__(self, started: Started) -> None:
        self.started = started
        self.contacted: dict[str, PeerEndpoint] = {}
        self.pages: deque[UInt8Array] = deque()

    def acquire_page(self) -> UInt8Array:
        """Return a registered page. The caller reads the token of one peer into the page.

        A closed peer gives its page back, but bytes of a failed read may still arrive in this page. So reuse the oldest
        page only when more than `KEPT_PAGES` pages are unused.

        Raises:
            PeerUnreachable: no memory can be registered.
        """
        if len(self.pages) > KEPT_PAGES:
            return self.pages.popleft()
        page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        code = self.started.engine.register_memory(int(page.ctypes.data), page.nbytes)
        if code != 0:
            raise PeerUnreachable(f"mooncake: no memory can be registered (code {code})")
        return page

    def pin(self, steps: Sequence[tuple[int, int]]) -> int:
        """Register ranges (start, stop), all or none. Return 0, or the engine's error code.

        One call for all ranges is faster, because over RDMA the engine uses several threads in one call.
        """
        starts, sizes = [start for start, _ in steps], [stop - start for start, stop in steps]
        code = self.started.engine.batch_register_memory(starts, sizes)
        # If ranges overlap, the engine registers none of them. After any other error, unregister the ranges that it has
        # registered.
        if code not in (0, _OVERLAP):
            self.unpin(starts)
        return code

    def unpin(self, starts: list[int]) -> None:
        """Unregister the ranges that begin at `starts`."""
        for start in starts:
            self.started.engine.unregister_memory(start)


@final
class _Call(NativeCall):
    """Native call that the peer's thread runs, after the calls that were queued before.

    Args:
        run: function that makes the call and returns its code.
        local: addresses of the local memory that the call uses.
        nbytes: sizes of this memory.
    """

    def __init__(self, run: Callable[[], int], local: UInt64Array, nbytes: UInt64Array) -> None:
        super().__init__(local, nbytes)
        self.run = run
        self.wake = os.eventfd(0)
        self.begun = self.cancelled = False
        self.code: int | None = None
        self.seconds = 0.0

    def look(self) -> Outcome:
        """Return the state of the call: PENDING while it runs, then DONE or FAILED."""
        if self.code is None:
            return Outcome.PENDING
        return Outcome.DONE if self.code == 0 else Outcome.FAILED

    def cancel(self) -> bool:
        """Cancel the call unless the thread has begun it; return whether it is cancelled."""
        self.cancelled = not self.begun
        return self.cancelled

    def come_back(self, code: int) -> None:
        """Record the return code, and wake the waiting thread."""
        self.code, self.error = code, f"code {code}"
        if self.wake >= 0:
            os.eventfd_write(self.wake, 1)

    def stop_waiting(self) -> None:
        """Close the event descriptor: the end of the call wakes no thread from now on."""
        wake, self.wake = self.wake, -1
        os.close(wake)


@final
class MooncakePeer(NetworkPeer):
    """See `NetworkPeer`. One thread makes the calls in order. The thread ends after `IDLE_S` without a call.

    Args:
        engine: engine that has not contacted an earlier process at this address, because an engine
            never forgets the data port of that process.
        endpoint, liveness: see `NetworkPeer`.
    """

    outlives_process = False

    def __init__(self, engine: _Engine, endpoint: PeerEndpoint, liveness: PeerLiveness) -> None:
        super().__init__(endpoint, liveness, threading.RLock())
        token, address, _, self._holds_token = _parse(endpoint)
        self._token, self._token_address = bytes.fromhex(token), address
        self._engine = engine
        self._page = engine.acquire_page()
        self._answered = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._open: set[_Call] = set()
        """Calls that have not returned."""
        self._thread: threading.Thread | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether a call to this peer has not ended."""
        with self.lock:
            return super().is_in_use or any(not call.cancelled for call in self._open)

    def step_nbytes(self, region: RemoteRegion) -> int:
        """See `NetworkPeer.step_nbytes`. The region's key contains the size. An empty key means 0."""
        key = region.key
        if not key:
            return 0
        if len(key) > _MAX_KEY_CHARS or not (key.isascii() and key.isdigit()) or int(key) < _PAGE:
            raise RegionError(
                f"mooncake: key of a region must be empty or a step >= {_PAGE}, got {key[:40]!r}"
            )
        return int(key)

    def confirm(self, regions: Sequence[RemoteRegion], deadline: Deadline) -> None:  # noqa: ARG002
        """See `NetworkPeer.confirm`. Read the token from the peer's memory, and compare it with the peer's published token.

        Read up to `READS` times, because two reads fail before Mooncake replaces a connection that the peer has closed.
        Raise PeerUnreachable if the peer's memory contains another token.
        """
        code: int | None = None
        for _ in range(READS):
            with self.held(deadline):
                self.refuse_open(deadline)
                call = self._queue(self._read_token, _NO_PIECES, _NO_PIECES)
            outcome = self._wait(call, deadline)
            if outcome is Outcome.DONE:
                return
            with self.lock:
                # It does not matter whether the call had begun, because it only reads a token.
                call.cancel()
                self.refuse_open(deadline)
            code = call.code
            if outcome is Outcome.PENDING:
                raise PeerUnreachable(
                    f"{deadline.purpose}: {self.endpoint.address} did not answer within "
                    f"{deadline.seconds} s; nothing was sent"
                )
            if code == _OTHER_PROCESS:
                raise PeerUnreachable(
                    f"{deadline.purpose}: the process at {self.endpoint.address} must have the incarnation "
                    f"{self.endpoint.incarnation!r}, got another one; nothing was sent"
                )
            if not self._answered:
                break
        raise PeerUnreachable(
            f"{deadline.purpose}: {self.endpoint.address} has ended or was restarted (code {code}); "
            "nothing was sent"
        )

    def close(self) -> None:
        """See `NetworkPeer.close`. If a native call hangs, do not wait for its thread."""
        super().close()
        with self.lock:
            thread, stuck = self._thread, bool(self._given_up)
        if thread is not None:
            self._calls.put(None)
            if not stuck:
                thread.join(JOIN_S)
        self._engine.pages.append(self._page)

    def read(self, pieces: Pieces, deadline: Deadline) -> None:
        """Read pieces of the peer's memory into local memory, and return when they are complete. Raise like `perform`."""
        self.perform(partial(self._begin, pieces, reads=True), deadline)

    def _begin(self, pieces: Pieces, *, reads: bool = False) -> NativeCall:
        """See `NetworkPeer._begin`. If `reads`, begin a read of the peer's memory instead of a write."""
        engine, address = self._engine.started.engine, self.endpoint.address
        native = engine.batch_transfer_sync_read if reads else engine.batch_transfer_sync_write
        columns = [column.tolist() for column in pieces]
        local, _, nbytes = pieces
        return self._queue(lambda: native(address, *columns), local, nbytes)

    def _has_refused(self, call: NativeCall, deadline: Deadline) -> bool:
        """Return whether a failed call has certainly ended, so that none of its bytes arrive later.

        Over TCP with one connection, queue a read of the token. If this read succeeds, the failed call has ended; the
        module docstring gives the reason.
        """
        if not isinstance(call, _Call) or call.seconds >= PROMPT_S:
            return False
        with self.lock:
            if self.is_closed or not self._engine.started.ordered:
                return False
            try:
                read = self._queue(self._read_token, _NO_PIECES, _NO_PIECES)
            except TransferFailed:
                return False
        return self._wait(read, deadline) is Outcome.DONE and read.seconds < PROMPT_S

    def _wait(self, call: _Call, deadline: Deadline) -> Outcome:
        """Wait until a call has ended, and return its outcome. See `_follow`."""
        try:
            return self._follow(call, deadline)
        finally:
            self._end(call)

    def _read_token(self) -> int:
        """Read the peer's token. Return the engine's error code if the read fails.

        Return `_OTHER_PROCESS` if the peer's memory should contain its token (`_holds_token`) but contains another token.
        Otherwise return 0. Before the first read, check with a probe that the peer answers.
        """
        engine = self._engine.started.engine
        if not self._answered:
            # If a peer never answers, the first read from it keeps a lock of the engine for a minute.
            # First reads from other peers would have to wait for this lock. A probe takes no lock.
            code = engine.send_probe(self.endpoint.address)
            if code != 0:
                return code
            self._answered = True
        self._page[:TOKEN_NBYTES] = 0
        code = engine.transfer_sync_read(
            self.endpoint.address, int(self._page.ctypes.data), self._token_address, TOKEN_NBYTES
        )
        is_other = self._holds_token and self._page[:TOKEN_NBYTES].tobytes() != self._token
        if code == 0 and is_other:
            return _OTHER_PROCESS
        return code

    def _queue(self, run: Callable[[], int], local: UInt64Array, nbytes: UInt64Array) -> _Call:
        """Queue a call for the peer's thread, and return it. The caller holds the lock, and must pass the call to `_end`.

        Args:
            run: function that makes the native call and returns its code.
            local: addresses of the local memory that the call uses.
            nbytes: sizes of this memory.

        Raises:
            TransferFailed: no thread or no file descriptor is available; the call did not begin.
        """
        try:
            if self._thread is None:
                # Daemon thread: a native call that hangs must not block the exit of the
                # interpreter.
                name = f"mooncake-{self.endpoint.address}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()
                self._thread = thread
            # Create the call last, because it opens a file descriptor.
            call = _Call(run, local, nbytes)
        except (OSError, RuntimeError) as error:
            raise TransferFailed(
                f"mooncake: {self.endpoint.address}: the write did not begin: {error}"
            ) from error
        self._open.add(call)
        self._calls.put(call)
        return call

    def _serve(self) -> None:
        """Make queued calls. End the thread after `IDLE_S` without a call, because the peer may have ended."""
        while True:
            try:
                call = self._calls.get(timeout=IDLE_S)
            except queue.Empty:
                call = None
            if call is None:
                with self.lock:
                    if self._calls.empty():
                        self._thread = None
                        return
                continue
            with self.lock:
                call.begun = not call.cancelled
            code, start = -1, time.monotonic()
            try:
                if call.begun:
                    code = call.run()
            # If `run` raises, report code -1, so that the waiting thread does not wait until its deadline.
            finally:
                with self.lock:
                    call.seconds = time.monotonic() - start
                    self._open.discard(call)
                    call.come_back(code)


class MooncakeTransport(NetworkTransport[MooncakePeer]):
    """`OneSidedTransport` over `mooncake.engine.TransferEngine`.

    An endpoint's address is the engine's `host:port`. Its incarnation consists of a random token,
    the address at which peers read the token before they write, and the port of the liveness
    listener.

    Attributes:
        engines: running engines. If a new process has the address of an ended process, only a new engine can reach it.

    Raises:
        TransportUnavailable: Mooncake is not installed or too old, or it uses another wire than the
            configured one.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        self._config = config
        self._started = started = start_engine(config.host, config.device, config.protocol)
        self.engines = [_Engine(started)]
        token = secrets.token_bytes(TOKEN_NBYTES)
        try:
            self._token_page = self.engines[0].acquire_page()
        except PeerUnreachable as error:
            raise TransportUnavailable(str(error)) from error
        self._token_page[:TOKEN_NBYTES] = np.frombuffer(token, np.uint8)
        liveness = LivenessListener(config.host, token.hex()[:INCARNATION_NBYTES], "mooncake")
        endpoint = PeerEndpoint(
            "mooncake",
            join_host_port(config.host, started.engine.get_rpc_port()),
            f"{token.hex()}@{int(self._token_page.ctypes.data):x}:{liveness.port}",
        )
        step_nbytes = config.max_registration_nbytes or started.max_registration_nbytes
        largest = REQUEST_NBYTES if started.num_nics > 1 else MAX_CALL_NBYTES
        limits = Limits(MAX_PIECES, MAX_CALL_NBYTES, largest)
        super().__init__(endpoint, liveness, step_nbytes, limits)

    def _is_rdma(self) -> bool:
        """Return whether the engine uses RDMA."""
        return self._started.wire == "rdma"

    @property
    def traits(self) -> TransportTraits:
        """See `OneSidedTransport.traits`."""
        return TransportTraits(
            same_host=False,
            one_sided=self._is_rdma(),
            ceiling_bytes_per_s=CEILING_BYTES_PER_S[self._started.wire],
            gpu=self._config.gpu,
        )

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`. The report contains the wire that was detected."""
        return WireReport("mooncake", self._started.wire, self._started.detail)

    def _register_together(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Pin all spans with all engines, or no span with any engine. Return the spans' keys, which contain the step size.

        Raises:
            RegionError: the library refuses a span.
        """
        steps = self._steps(spans)
        with ExitStack() as undo:
            for engine in self.engines:
                code = engine.pin(steps)
                if code != 0:
                    (address, nbytes), what = spans[0], "is refused by Mooncake"
                    if code == _OVERLAP:
                        what = "overlaps a registered region"
                    hint = (
                        "; `ulimit -l` limits the memory that RDMA can use"
                        if self._is_rdma()
                        else ""
                    )
                    raise RegionError(
                        f"register: [{address:#x}, {address + nbytes:#x}) {what} (code {code}){hint}"
                    )
                undo.callback(engine.unpin, [start for start, _ in steps])
            undo.pop_all()
        return [self._key_of(nbytes) for _, nbytes in spans]

    def _key_of(self, nbytes: int) -> str:
        """Return the key of a region: the size of its registrations; empty if the region is one registration."""
        return str(self._step_nbytes) if 0 < self._step_nbytes < nbytes else ""

    def _unregister(self, region: MemoryRegion) -> None:
        """Unregister at once. Over TCP, the engine then refuses writes of peers to this memory."""
        self._unpin(region.address, region.nbytes)

    def _unpin(self, address: int, nbytes: int) -> None:
        """Unregister a region with every engine."""
        for engine in self.engines:
            engine.unpin(self._starts(address, nbytes))

    def read(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """Read the pieces of a batch from the peer's memory into local registered memory: the reverse of `write`.

        Raises:
            RegionError: a piece is outside local registered memory or outside `batch.regions`.
            PeerUnreachable, TransferFailed, TransferOutcomeUnknown: the local memory is incomplete; see `write`.
        """
        check_batch(self.table, batch, "mooncake")
        deadline = Deadline.after(deadline_s, f"mooncake read from {batch.endpoint.address}")
        peer = self._peer(batch.endpoint, deadline)
        peer.confirm(batch.regions, deadline)
        for pieces in self._calls(batch, [peer.step_nbytes(region) for region in batch.regions]):
            peer.read(pieces, deadline)

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`. Over TCP, close all connections of peers; over RDMA, do nothing."""
        if not self._is_rdma():
            ports = frozenset[int]().union(*(engine.started.ports for engine in self.engines))
            deadline = Deadline.after(deadline_s, "mooncake fence")
            end_connections(lambda own: own.getsockname()[1] in ports, deadline)

    def _close_library(self, spans: Sequence[tuple[int, int]]) -> None:
        """Unpin the spans that are still registered."""
        for span in spans:
            self._unpin(*span)

    def _listener_of(self, endpoint: PeerEndpoint) -> PeerEndpoint:
        """Return the endpoint that tells whether the peer's process lives."""
        token, _, address, _ = _parse(endpoint)
        return PeerEndpoint("mooncake", address, token[:INCARNATION_NBYTES])

    def _new_peer(self, endpoint: PeerEndpoint, liveness: PeerLiveness) -> MooncakePeer:
        """Return a new peer for an endpoint, and record the endpoint at the engine that will write to it."""
        engine = self._engine_for(endpoint)
        peer = MooncakePeer(engine, endpoint, liveness)
        engine.contacted[endpoint.address] = endpoint
        return peer

    def _engine_for(self, endpoint: PeerEndpoint) -> _Engine:
        """Return an engine that can reach the process of `endpoint`; start a new engine if none can.

        An engine keeps the data port of the first process that it contacted at an address. Only another engine can
        reach a process that was restarted at this address.

        Raises:
            RegionError: the registered memory cannot be registered with a new engine.
            ConfigError, TransportUnavailable: see `start_engine`.
        """
        for engine in self.engines:
            if engine.contacted.get(endpoint.address, endpoint) == endpoint:
                return engine
        config = self._config
        engine = _Engine(start_engine(config.host, config.device, config.protocol))
        steps = self._steps(self.table.spans())
        if steps and (code := engine.pin(steps)) != 0:
            raise RegionError(
                f"mooncake: memory cannot be registered with another engine (code {code})"
            )
        self.engines.append(engine)
        return engine


def _parse(endpoint: PeerEndpoint) -> tuple[str, int, str, bool]:
    """Parse the incarnation of a peer.

    Returns:
        (token in hex, readable address in the peer's memory, address of the liveness listener, whether the memory at the
        readable address contains the token).

    Raises:
        PeerUnreachable: the incarnation or `endpoint.address` is malformed.
    """
    match = _INCARNATION.fullmatch(endpoint.incarnation)
    if match is None:
        raise PeerUnreachable(
            f"mooncake: incarnation must be token@address:[host:]port, got {endpoint.incarnation!r}"
        )
    try:
        host, _ = split_host_port(endpoint.address)
    except ConfigError as error:
        raise PeerUnreachable(f"mooncake: {error}") from error
    listener = f"{match[3]}:{match[4]}" if match[3] else join_host_port(host, int(match[4]))
    return match[1], int(match[2], 16), listener, not match[3]
