"""NIXL over UCX: cross memory attach, TCP, verbs, or CUDA IPC between GPUs, as UCX finds them.

What NIXL lacks is done here. Its transfers have no deadline and its calls are not thread-safe. A
handle released in flight does not stop the bytes, so a transfer that ran out of time is kept, with
its descriptors, until it ends; the peer is closed to other writes until then, and the local memory
under it, but no other, stays registered. Withdrawing memory at the target does not stop a peer that
knows it: UCX keeps the pages registered, so a region that a peer may still write must stay mapped.

Over TCP bytes of a process that has ended may still arrive, so `fence` ends every TCP connection
of UCX, in either direction, since UCX writes over one in both. Whoever writes next over a wire
that may be TCP finds that out by a word which it writes first, and connects anew.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import final

import numpy as np

from windlass.errors import (
    PeerUnreachable,
    RegionError,
    TransferFailed,
    TransportUnavailable,
)
from windlass.memory.cuda.driver import Device
from windlass.memory.ranges import calls, split_pieces
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
from windlass.transports.liveness import INCARNATION_NBYTES, LivenessListener, PeerLiveness
from windlass.transports.lockable import check_lockable
from windlass.transports.network import NetworkTransport
from windlass.transports.nixl.calls import GRACE_S, NixlCalls
from windlass.transports.nixl.config import NixlConfig, NixlWire
from windlass.transports.nixl.fence import TcpFence
from windlass.transports.nixl.native import (
    TCP_MARK,
    NativeHandle,
    may_use_tcp,
    may_use_verbs,
    memory_kind,
    native_errors,
    new_write,
    start_agent,
)
from windlass.transports.nixl.peer import NixlKey, NixlPeer, decode_keys, encode_keys, forget_ended
from windlass.transports.regions import check_batch

MAX_CALL_NBYTES = 128 << 20
"""Per native call: between calls a passed deadline is a clean failure, inside one it is unknown."""
MAX_PIECES = 8192
CONNECTIONS = 3
"""To one peer, in one write, before it counts as unreachable."""
OWN_PINNED_NBYTES = 128 << 20
"""Room for what UCX pins for itself over verbs: 66 MB per agent were seen."""
_WORD_NBYTES = np.array([8], np.uint64)
_STRANDED: list[object] = []
"""Agents with transfers that never ended: freeing one would free memory under a late write."""


@final
class NixlTransport(NetworkTransport):
    """`OneSidedTransport` over a NIXL agent with a UCX backend.

    An endpoint's address is `host:port` of its liveness listener, its incarnation the agent's
    random name. A region's key carries NIXL's metadata.

    Raises:
        TransportUnavailable: not installed, or UCX does not start with the wire asked for. Raised
            by `write` too, before the first byte, when UCX picks another wire for a peer.
    """

    def __init__(self, config: NixlConfig) -> None:
        self._config = config
        self._gpu = None if config.gpu < 0 else Device(config.gpu)
        self._name = secrets.token_hex(INCARNATION_NBYTES // 2)
        self._fence = TcpFence(TCP_MARK)
        with self._current():  # UCX looks for GPUs in the thread that starts it
            agent, self._log, self._detail = start_agent(config, self._name)
        self._calls = NixlCalls(agent, native_errors(), config.gpu)
        self._liveness = LivenessListener(config.host, self._name, "nixl")
        address = join_host_port(config.host, self._liveness.port)
        endpoint = PeerEndpoint("nixl", address, self._name)
        super().__init__(endpoint, config.max_registration_nbytes, self._calls.lock)
        self._native: dict[int, object] = {}
        self._peers: dict[PeerEndpoint, NixlPeer] = {}
        self._page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._scratch = int(self._page.ctypes.data)
        try:
            with self._current():
                self._scratch_native = self._register_native(self._scratch, self._page.nbytes, -1)
        except RegionError as error:
            self._liveness.close()
            raise TransportUnavailable(f"nixl: no memory can be registered: {error}") from error
        self._fence.spare_own_connections()

    @property
    def traits(self) -> TransportTraits:
        """Of the wires that UCX has chosen so far; before the first write, of the one it is limited to."""
        wires = self._log.put_wires()
        return TransportTraits(
            same_host=False,
            one_sided=bool(wires) and all(wire.one_sided for wire in wires),
            ceiling_bytes_per_s=self._ceiling(),
            gpu=self._config.gpu,
        )

    def _ceiling(self) -> float:
        """Between hosts, where UCX has no shorter way."""
        if self._config.wire is NixlWire.CMA:
            return CEILING_BYTES_PER_S["process_vm_writev-ucx"]
        return CEILING_BYTES_PER_S["rdma" if may_use_verbs(self._config.wire) else "tcp"]

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`; read from UCX's log, `ucx` until a peer was written."""
        wires = sorted(self._log.put_wires())
        protocol = "+".join(sorted({wire.name for wire in wires})) or "ucx"
        devices = ", ".join(sorted({wire.device for wire in wires})) or "not known before a write"
        return WireReport(
            "nixl",
            protocol,
            f"{self._detail}, wire {self._config.wire.value} asked for, devices: {devices}",
        )

    def _pin(self, address: int, nbytes: int) -> str:
        native = self._register_native(address, nbytes, self._config.gpu)
        try:
            key = self._key_of(native, nbytes)
        except self._calls.errors as error:
            raise RegionError(f"register: {address:#x} has no metadata: {error}") from error
        self._native[address] = native
        return key

    def _unpin(self, region: MemoryRegion) -> Callable[[], None]:
        """Under a write it takes effect when that ends."""
        return partial(self._deregister, self._native.pop(region.address))

    def _deregister(self, native: object) -> None:
        try:
            self._calls.agent.deregister_memory(native)
        except self._calls.errors as error:
            raise TransferFailed(f"nixl: memory stays registered: {error}") from error

    def _is_touched(self, region: MemoryRegion) -> bool:
        return any(self._calls.touches(peer, region) for peer in self._peers.values())

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """See `OneSidedTransport.write`.

        Raises:
            TransportUnavailable: UCX picked another wire than the one asked for; nothing was sent.
        """
        check_batch(self._table, batch, "nixl")
        deadline = Deadline.after(deadline_s, f"nixl write to {batch.endpoint.address}")
        with self._current():
            try:
                self._write(batch, deadline)
            finally:
                if self._deferred:
                    with self._lock:
                        self._deferred.release(self._is_touched)

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        peer = self._peer(batch.endpoint, deadline)
        self._calls.wait_for_late(peer, deadline)
        if peer.keys and may_use_tcp(self._config.wire):
            # Regions are loaded through the connection: NIXL never recovers where that fails.
            self._reach(peer, batch.endpoint, deadline)
        with self._calls.held(deadline):
            self._calls.refuse_open(peer, deadline)
            self._load(peer, batch)
            steps = [
                (r.address, r.nbytes, max(key.step_nbytes for key in peer.keys[r.key]))
                for r in batch.regions
            ]
        if not peer.confirmed:
            self._reach(peer, batch.endpoint, deadline)
            self._log.check(self._config.wire)
            peer.confirmed = True
        pieces = self._cut(batch, steps)
        local, remote, nbytes = split_pieces(*pieces, MAX_CALL_NBYTES)
        for part in calls(nbytes, max_pieces=MAX_PIECES, max_nbytes=MAX_CALL_NBYTES):
            self._calls.write(
                peer, batch.endpoint, (local[part], remote[part], nbytes[part]), deadline
            )

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`; over other wires than TCP a process takes its writes along."""
        if may_use_tcp(self._config.wire):
            self._fence.cut(Deadline.after(deadline_s, "nixl fence"))

    def close(self) -> None:
        """See `OneSidedTransport.close`; an agent with an open write is kept until the process ends."""
        with self._lock, self._current():
            if self._calls.closed:
                return
            self._calls.closed = True
            self._table.clear()
            self._deferred.close(self._is_touched)
            peers, self._peers = list(self._peers.values()), {}
            if any(self._calls.is_open(p) or p.calls or p.words for p in peers):
                _STRANDED.append((self._calls.agent, peers, self._page))
            else:
                for native in (*self._native.values(), self._scratch_native):
                    self._calls.agent.deregister_memory(native)
                del self._calls.agent  # ends UCX's progress thread
                self._fence.close()
            self._native.clear()
        for peer in peers:
            peer.liveness.close()
        self._liveness.close()

    def _current(self) -> contextlib.AbstractContextManager[None]:
        """The GPU's context within: this may be the thread of a trainer, which has one of its own."""
        return contextlib.nullcontext() if self._gpu is None else self._gpu.current()

    def _register_native(self, address: int, nbytes: int, gpu: int) -> object:
        if self._gpu is None and may_use_verbs(self._config.wire):
            check_lockable(nbytes + OWN_PINNED_NBYTES, f"register: {address:#x}")
        try:
            edges = [*self._starts(address, nbytes), address + nbytes]
            parts = [(one, other - one, max(gpu, 0), "") for one, other in pairwise(edges)]
            return self._calls.agent.register_memory(parts, memory_kind(gpu), ["UCX"])
        except self._calls.errors as error:
            raise RegionError(
                f"register: [{address:#x}, {address + nbytes:#x}) is refused ({error}; UCX: "
                f"{self._log.complaints() or 'no word'}); over verbs see ulimit -l"
            ) from error

    def _key_of(self, native: object, nbytes: int) -> str:
        """Each key is complete by itself, so regions may be passed on one by one, in any order."""
        step = self._step_nbytes if 0 < self._step_nbytes < nbytes else 0
        keys = [
            NixlKey(
                self._calls.agent.get_partial_agent_metadata(one, True, ["UCX"]),
                self._scratch,
                step,
                gpu,
            )
            for one, gpu in ((native, self._config.gpu), (self._scratch_native, -1))
        ]
        return encode_keys(keys)

    def _peer(self, endpoint: PeerEndpoint, deadline: Deadline) -> NixlPeer:
        with self._lock:
            found = self._peers.get(endpoint)
        if found is None:
            liveness = PeerLiveness(endpoint, deadline)
            with self._lock:
                forget_ended(self._peers, self._calls.is_open)
                found = self._peers.setdefault(endpoint, NixlPeer(liveness, self._lock))
            if found.liveness is not liveness:
                liveness.close()
        if found.liveness.has_ended():
            self._calls.refuse_closed(deadline)
            raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
        return found

    def _load(self, peer: NixlPeer, batch: WriteBatch) -> None:
        """Learn the regions. Holds the lock."""
        for region in batch.regions:
            if region.key in peer.keys:
                continue
            keys = decode_keys(region)
            self._add(keys, batch.endpoint)
            peer.scratch = keys[-1].scratch
            peer.keys[region.key] = tuple(keys)
            peer.gpu = max(key.gpu for key in keys)  # one agent registers one kind of memory

    def _add(self, keys: Sequence[NixlKey], endpoint: PeerEndpoint) -> None:
        for key in keys:
            try:
                name = self._calls.agent.add_remote_agent(key.metadata)
            except self._calls.errors as error:
                raise RegionError(f"nixl: key of {endpoint.address}: {error}") from error
            if (name.decode() if isinstance(name, bytes) else name) != endpoint.incarnation:
                raise RegionError(f"nixl: key of {endpoint.address} is of another process")

    def _reach(self, peer: NixlPeer, endpoint: PeerEndpoint, deadline: Deadline) -> None:
        """See that the connection is whole, or make another: the peer may have cut it.

        Raises:
            PeerUnreachable: neither; nothing of the batch was sent.
        """
        for _ in range(CONNECTIONS):
            connection = peer.connection
            if self._word_arrives(peer, endpoint, deadline):
                return
            if not may_use_tcp(self._config.wire):
                break
            self._reconnect(peer, endpoint, connection, deadline)
        raise PeerUnreachable(
            f"{deadline.purpose}: no connection holds; nothing of the batch was sent"
        )

    def _word_arrives(self, peer: NixlPeer, endpoint: PeerEndpoint, deadline: Deadline) -> bool:
        """Whether a word that nobody reads gets there; a late one does no harm.

        Raises:
            PeerUnreachable: the process is gone, or it was not there by the deadline.
        """
        here = np.array([self._scratch + mmap.PAGESIZE // 2], np.uint64)
        word = (here, np.array([peer.scratch], np.uint64), _WORD_NBYTES)
        handle: NativeHandle | None = None
        pause_s, state = 20e-6, ""
        with contextlib.ExitStack() as call:
            while state != "DONE":
                with self._calls.held(deadline):
                    if handle is None:
                        # Under an open write no new connection is made.
                        self._calls.refuse_open(peer, deadline)
                        call.enter_context(peer.call(word))
                    try:
                        if handle is None:
                            handle = new_write(
                                self._calls.agent, endpoint.incarnation, word, (-1, -1)
                            )
                            self._calls.agent.transfer(handle)
                        state = self._calls.agent.check_xfer_state(handle)
                    except self._calls.errors:
                        state = "ERR"
                if peer.liveness.wait_ended(GRACE_S if state == "ERR" else pause_s):
                    self._calls.refuse_closed(deadline)
                    raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
                if state == "ERR":
                    return False
                if handle is not None and state != "DONE" and deadline.remaining_s == 0:
                    peer.words.append(handle)
                    raise PeerUnreachable(
                        f"{deadline.purpose}: no answer within {deadline.seconds} s; nothing of the "
                        "batch was sent"
                    )
                pause_s = min(pause_s * 2, 1e-3)
        return True

    def _reconnect(
        self, peer: NixlPeer, endpoint: PeerEndpoint, connection: int, deadline: Deadline
    ) -> None:
        refused: tuple[type[Exception], ...] = (*self._calls.errors, RegionError)
        with self._calls.held(deadline):
            if not peer.wait_for_calls(connection, deadline.remaining_s) or self._calls.closed:
                raise PeerUnreachable(f"{deadline.purpose}: other writes go on; nothing was sent")
            if peer.connection != connection:
                return  # another thread has
            self._calls.refuse_open(peer, deadline)
            try:
                peer.connection += 1
                self._calls.agent.remove_remote_agent(endpoint.incarnation)
                for keys in peer.keys.values():
                    self._add(keys, endpoint)
            except refused as error:
                raise PeerUnreachable(f"{deadline.purpose}: {error}; nothing was sent") from error
