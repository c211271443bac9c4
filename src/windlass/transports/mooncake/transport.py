"""Mooncake's TransferEngine: RDMA where there is a NIC, TCP where there is none.

Over TCP it is one-sided for this side only: the target's process must be running. What the
engine does not do is done here: sources are checked (TCP reads any), calls are kept to 1024 pieces
and a few hundred megabytes, a process restarted on the same port is noticed, and deadlines hold.
"""

from __future__ import annotations

import mmap
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np

from windlass.errors import PeerUnreachable, RegionError, TransferFailed, TransportUnavailable
from windlass.layout.columns import UInt8Array
from windlass.net.addresses import join_host_port
from windlass.net.clock import Deadline
from windlass.transports.base import (
    CEILING_BYTES_PER_S,
    MemoryRegion,
    PeerEndpoint,
    TransportTraits,
    WireReport,
    WriteBatch,
)
from windlass.transports.inbound import end_connections
from windlass.transports.liveness import LivenessListener
from windlass.transports.mooncake.config import MooncakeConfig
from windlass.transports.mooncake.native import MAX_PIECES, Started, start_engine
from windlass.transports.mooncake.peer import (
    TOKEN_NBYTES,
    MooncakePeer,
    format_incarnation,
    liveness_name,
)
from windlass.transports.network import NetworkTransport

Page = UInt8Array
FORGET_S = 600.0
"""Peers that were not written for longer are forgotten when another one comes."""
KEPT_PAGES = 64
"""That were given back are used again in turn once there are more."""

MAX_CALL_NBYTES = 256 << 20
"""Per native call: between calls a passed deadline is a clean failure, inside one it is unknown."""
REQUEST_NBYTES = 1 << 20
"""Of one piece where there are several NICs: the engine sends each through one, picked at random."""
_OVERLAP = -7
_MAX_KEY_CHARS = 20
_PAGE = 4096
"""The least step: a peer's key must not make us cut a piece into bytes."""


@final
class _Engine:
    """A native engine, and which peer it has talked to at each address."""

    def __init__(self, started: Started) -> None:
        self.started = started
        self.contacted: dict[str, PeerEndpoint] = {}
        self._pages: deque[Page] = deque()

    def acquire_page(self) -> Page:
        """Registered memory for a peer's token.

        Raises:
            PeerUnreachable: no memory can be registered.
        """
        if len(self._pages) > KEPT_PAGES:
            return self._pages.popleft()
        page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        code = self.started.engine.register_memory(int(page.ctypes.data), page.nbytes)
        if code != 0:
            raise PeerUnreachable(f"mooncake: no page for a peer can be registered (code {code})")
        return page

    def give_back(self, page: Page) -> None:
        """For another peer, much later: bytes of a read that has failed may still come."""
        self._pages.append(page)

    def pin(self, starts: list[int], end: int) -> int:
        """Register [starts[0], end) in steps; the first code that is not 0."""
        for done, (start, stop) in enumerate(zip(starts, (*starts[1:], end), strict=True)):
            code = self.started.engine.register_memory(start, stop - start)
            if code != 0:
                self.unpin(starts[:done])
                return code
        return 0

    def pin_all(self, starts: list[int], sizes: list[int]) -> bool:
        """Register many steps in one call, which over verbs it does by several threads; all or none."""
        code = self.started.engine.batch_register_memory(starts, sizes)
        if code not in (0, _OVERLAP):  # it stops half way; overlaps are looked for before it begins
            self.unpin(starts)
        return code == 0

    def unpin(self, starts: list[int]) -> None:
        """Take registrations back."""
        for start in starts:
            self.started.engine.unregister_memory(start)


@dataclass(slots=True)
class _Known:
    """A peer, how many calls use it now, and when the last one ended; monotonic seconds."""

    peer: MooncakePeer
    engine: _Engine
    num_users: int = 0
    used_s: float = 0.0


@final
class MooncakeTransport(NetworkTransport):
    """`OneSidedTransport` over `mooncake.engine.TransferEngine`.

    An endpoint's address is the engine's `host:port`; its incarnation is a random token, the
    address at which peers read it back before they write and, over RDMA, the port of a liveness
    listener.

    Raises:
        TransportUnavailable: not installed, too old, or the wire is not the one asked for.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        self._config = config
        started = start_engine(config)
        self._engines = [_Engine(started)]
        self._peers: dict[PeerEndpoint, _Known] = {}
        self._closed = False
        token = secrets.token_bytes(TOKEN_NBYTES)
        self._token_page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._token_page[:TOKEN_NBYTES] = np.frombuffer(token, np.uint8)
        address = int(self._token_page.ctypes.data)
        code = started.engine.register_memory(address, self._token_page.nbytes)
        if code != 0:
            raise TransportUnavailable(f"mooncake: no memory can be registered (code {code})")
        # Over TCP the engine's own connections end with the peer; over verbs nothing does.
        self._liveness = (
            LivenessListener(config.host, liveness_name(token), "mooncake")
            if self._is_rdma()
            else None
        )
        endpoint = PeerEndpoint(
            "mooncake",
            join_host_port(config.host, started.engine.get_rpc_port()),
            format_incarnation(
                token, address, 0 if self._liveness is None else self._liveness.port
            ),
        )
        step_nbytes = config.max_registration_nbytes or started.max_registration_nbytes
        super().__init__(endpoint, step_nbytes, threading.Lock())

    def _is_rdma(self) -> bool:
        return self._engines[0].started.wire == "rdma"

    @property
    def traits(self) -> TransportTraits:
        return TransportTraits(
            same_host=False,
            one_sided=self._is_rdma(),
            ceiling_bytes_per_s=CEILING_BYTES_PER_S[self._engines[0].started.wire],
            gpu=self._config.gpu,
        )

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`; the wire was looked up, not assumed."""
        started = self._engines[0].started
        return WireReport("mooncake", started.wire, started.detail)

    def _register(self, address: int, nbytes: int) -> str:
        done: list[_Engine] = []
        starts = self._starts(address, nbytes)
        for engine in self._engines:
            code = engine.pin(starts, address + nbytes)
            if code != 0:
                for other in done:
                    other.unpin(starts)
                what = "overlaps a registered region" if code == _OVERLAP else "is refused"
                hint = "; over verbs see ulimit -l" if self._is_rdma() else ""
                raise RegionError(
                    f"register: [{address:#x}, {address + nbytes:#x}) {what} (code {code}){hint}"
                )
            done.append(engine)
        return self._key_of(nbytes)

    def _register_all(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """See `RegionTransport`; what is refused together is tried one by one, which names it."""
        if len(spans) < 2:
            return super()._register_all(spans)
        edges = [(*self._starts(address, nbytes), address + nbytes) for address, nbytes in spans]
        steps = [step for one in edges for step in pairwise(one)]
        starts, sizes = [start for start, _ in steps], [stop - start for start, stop in steps]
        with ExitStack() as undo:
            for engine in self._engines:
                if not engine.pin_all(starts, sizes):
                    undo.close()
                    return super()._register_all(spans)
                undo.callback(engine.unpin, starts)
            undo.pop_all()
        return [self._key_of(nbytes) for _, nbytes in spans]

    def _key_of(self, nbytes: int) -> str:
        return str(self._step_nbytes) if 0 < self._step_nbytes < nbytes else ""

    def _unregister(self, region: MemoryRegion) -> None:
        """Take it back at once: later writes of peers are refused over TCP."""
        for engine in self._engines:
            engine.unpin(self._starts(region.address, region.nbytes))

    def _is_touched(self, region: MemoryRegion) -> bool:
        return any(known.peer.touches(region) for known in self._peers.values())

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        several = self._engines[0].started.num_nics > 1
        largest = REQUEST_NBYTES if several else MAX_CALL_NBYTES
        with self._peer(batch.endpoint) as peer:
            peer.confirm(deadline)
            steps = [_step_of(region.key) for region in batch.regions]
            for pieces in self._calls(batch, steps, MAX_PIECES, MAX_CALL_NBYTES, largest):
                peer.write(pieces, deadline)

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`: over TCP connections are cut, over RDMA there is nothing."""
        if not self._is_rdma():
            ports = frozenset[int]().union(*(engine.started.ports for engine in self._engines))
            deadline = Deadline.after(deadline_s, "mooncake fence")
            end_connections(lambda own: own.getsockname()[1] in ports, deadline)

    def close(self) -> None:
        """See `OneSidedTransport.close`; a native call that is stuck is left to end by itself."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = [known.peer for known in self._peers.values()]
            spans = self._table.spans()
            self._table.clear()
        for peer in peers:
            peer.close()
        if self._liveness is not None:
            self._liveness.close()
        for engine in self._engines:
            for address, nbytes in spans:
                engine.unpin(self._starts(address, nbytes))
        with self._lock:
            self._deferred.close(self._is_touched)
            self._peers = {}

    @contextmanager
    def _peer(self, endpoint: PeerEndpoint) -> Iterator[MooncakePeer]:
        """Use the peer, which is kept for as long as it is used, and then until it is gone."""
        known = self._use(endpoint)
        unreachable = False
        try:
            yield known.peer
        except PeerUnreachable:
            unreachable = True
            raise
        finally:
            with self._lock:
                known.num_users -= 1
                known.used_s = time.monotonic()
                if unreachable:
                    self._forget(endpoint)

    def _use(self, endpoint: PeerEndpoint) -> _Known:
        with self._lock:
            if self._closed:
                raise TransferFailed(f"mooncake: {endpoint.address}: the transport is closed")
            known = self._peers.get(endpoint)
            if known is None:
                self._forget_unused()
                engine = self._engine_for(endpoint)
                page = engine.acquire_page()
                try:
                    peer = MooncakePeer(engine.started, endpoint, page)
                except PeerUnreachable:
                    engine.give_back(page)
                    raise
                known = self._peers[endpoint] = _Known(peer, engine)
                engine.contacted[endpoint.address] = endpoint
            known.num_users += 1
            return known

    def _forget_unused(self) -> None:
        """Forget peers that were not written for long: nobody says which have ended. One that has not is made anew."""
        before_s = time.monotonic() - FORGET_S
        for endpoint in [e for e, known in self._peers.items() if known.used_s < before_s]:
            self._forget(endpoint)

    def _forget(self, endpoint: PeerEndpoint) -> None:
        known = self._peers.get(endpoint)
        if known is not None and not known.num_users and known.peer.may_be_forgotten:
            del self._peers[endpoint]
            known.peer.close()
            known.engine.give_back(known.peer.page)

    def _engine_for(self, endpoint: PeerEndpoint) -> _Engine:
        """Return an engine that has not talked to another process at this address.

        An engine remembers the data port of each address for good, so a process that was
        restarted on the same port can be reached only through another engine.
        """
        for engine in self._engines:
            if engine.contacted.get(endpoint.address, endpoint) == endpoint:
                return engine
        engine = _Engine(start_engine(self._config))
        for start, nbytes in self._table.spans():
            code = engine.pin(self._starts(start, nbytes), start + nbytes)
            if code != 0:
                raise RegionError(f"mooncake: {start:#x} cannot be registered again (code {code})")
        self._engines.append(engine)
        return engine


def _step_of(key: str) -> int:
    """Return the step in which a peer registered a region; 0 for at once."""
    if not key:
        return 0
    if len(key) > _MAX_KEY_CHARS or not (key.isascii() and key.isdigit()) or int(key) < _PAGE:
        raise RegionError(f"mooncake: key must be empty or a step >= {_PAGE}, got {key[:40]!r}")
    return int(key)
