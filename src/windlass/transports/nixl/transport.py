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

from windlass.errors import PeerUnreachable, RegionError, TransferFailed, TransportUnavailable
from windlass.memory.cuda.driver import Device
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
from windlass.transports.network import NetworkTransport, check_lockable
from windlass.transports.nixl.config import NixlConfig, NixlWire
from windlass.transports.nixl.native import (
    TCP_MARK,
    TcpFence,
    may_use_tcp,
    may_use_verbs,
    memory_kind,
    native_errors,
    start_agent,
)
from windlass.transports.nixl.peer import NixlAgent, NixlKey, NixlPeer, encode_keys, forget_ended

MAX_CALL_NBYTES = 128 << 20
"""Per native call: between calls a passed deadline is a clean failure, inside one it is unknown."""
MAX_PIECES = 8192
OWN_PINNED_NBYTES = 128 << 20
"""Room for what UCX pins for itself over verbs: 66 MB per agent were seen."""
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
            native, self._log, self._detail = start_agent(config, self._name)
        self._page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._scratch = int(self._page.ctypes.data)
        word = self._scratch + mmap.PAGESIZE // 2
        self._agent = NixlAgent(native, native_errors(), config.gpu, config.wire, word)
        self._liveness = LivenessListener(config.host, self._name, "nixl")
        address = join_host_port(config.host, self._liveness.port)
        endpoint = PeerEndpoint("nixl", address, self._name)
        super().__init__(endpoint, config.max_registration_nbytes, self._agent.lock)
        self._native: dict[int, object] = {}
        self._peers: dict[PeerEndpoint, NixlPeer] = {}
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
        """Return what is reached between hosts, where UCX has no shorter way."""
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

    def _register(self, address: int, nbytes: int) -> str:
        native = self._register_native(address, nbytes, self._config.gpu)
        try:
            key = self._key_of(native, nbytes)
        except self._agent.errors as error:
            raise RegionError(f"register: {address:#x} has no metadata: {error}") from error
        self._native[address] = native
        return key

    def _register_all(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """See `RegionTransport`; one list of descriptors. What is refused together is tried one by one."""
        if len(spans) < 2:
            return super()._register_all(spans)
        agent, gpu = self._agent.native, self._config.gpu
        kind, parts = memory_kind(gpu), [self._parts(*span, gpu) for span in spans]
        self._check_lockable(sum(nbytes for _, nbytes in spans), spans[0][0])
        try:
            together = agent.register_memory([p for own in parts for p in own], kind, ["UCX"])
        except self._agent.errors:
            return super()._register_all(spans)
        try:  # each has a handle of its own, since each is unregistered by itself
            natives = [agent.get_reg_descs(own, kind) for own in parts]
            keys = [self._key_of(one, n) for one, (_, n) in zip(natives, spans, strict=True)]
        except self._agent.errors as error:
            agent.deregister_memory(together)
            raise RegionError(f"register: {spans[0][0]:#x} has no metadata: {error}") from error
        self._native.update((span[0], one) for span, one in zip(spans, natives, strict=True))
        return keys

    def _unregister(self, region: MemoryRegion) -> Callable[[], None]:
        """Return what takes it back, once no write uses the memory."""
        return partial(self._deregister, self._native.pop(region.address))

    def _deregister(self, native: object) -> None:
        try:
            self._agent.native.deregister_memory(native)
        except self._agent.errors as error:
            raise TransferFailed(f"nixl: memory stays registered: {error}") from error

    def _is_touched(self, region: MemoryRegion) -> bool:
        return any(peer.touches(region) for peer in self._peers.values())

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        """See `RegionTransport._write`.

        Raises:
            TransportUnavailable: UCX picked another wire than the one asked for; nothing was sent.
        """
        peer = self._peer(batch.endpoint, deadline)
        peer.wait_for_late(deadline)
        if peer.keys and may_use_tcp(self._agent.wire):
            # Regions are loaded through the connection: NIXL never recovers where that fails.
            peer.reach(deadline)
        with self._agent.held(deadline):
            peer.refuse_open(deadline)
            peer.load(batch.regions)
            steps = [max(key.step_nbytes for key in peer.keys[r.key]) for r in batch.regions]
        if peer.keys and not peer.confirmed:
            peer.reach(deadline)
            self._log.check(self._config.wire)
            peer.confirmed = True
        for pieces in self._calls(batch, steps, MAX_PIECES, MAX_CALL_NBYTES, MAX_CALL_NBYTES):
            peer.write(pieces, deadline)

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`; over other wires than TCP a process takes its writes along."""
        if may_use_tcp(self._config.wire):
            self._fence.cut(Deadline.after(deadline_s, "nixl fence"))

    def close(self) -> None:
        """See `OneSidedTransport.close`; an agent with an open write is kept until the process ends."""
        with self._lock, self._current():
            if self._agent.closed:
                return
            self._agent.closed = True
            self._table.clear()
            self._deferred.close(self._is_touched)
            peers, self._peers = list(self._peers.values()), {}
            if any(peer.is_open() or peer.is_in_use for peer in peers):
                _STRANDED.append((self._agent.native, peers, self._page))
            else:
                for native in (*self._native.values(), self._scratch_native):
                    self._agent.native.deregister_memory(native)
                del self._agent.native  # ends UCX's progress thread
                self._fence.close()
            self._native.clear()
        for peer in peers:
            peer.liveness.close()
        self._liveness.close()

    def _current(self) -> contextlib.AbstractContextManager[None]:
        """Return the GPU's context within: this may be the thread of a trainer, which has one of its own."""
        return contextlib.nullcontext() if self._gpu is None else self._gpu.current()

    def _register_native(self, address: int, nbytes: int, gpu: int) -> object:
        self._check_lockable(nbytes, address)
        try:
            parts = self._parts(address, nbytes, gpu)
            return self._agent.native.register_memory(parts, memory_kind(gpu), ["UCX"])
        except self._agent.errors as error:
            raise RegionError(
                f"register: [{address:#x}, {address + nbytes:#x}) is refused ({error}; UCX: "
                f"{self._log.complaints() or 'no word'}); over verbs see ulimit -l"
            ) from error

    def _parts(self, address: int, nbytes: int, gpu: int) -> list[tuple[int, int, int, str]]:
        """Return descriptors of the steps in which a region is registered."""
        edges = [*self._starts(address, nbytes), address + nbytes]
        return [(one, other - one, max(gpu, 0), "") for one, other in pairwise(edges)]

    def _check_lockable(self, nbytes: int, address: int) -> None:
        if self._gpu is None and may_use_verbs(self._config.wire):
            check_lockable(nbytes + OWN_PINNED_NBYTES, f"register: {address:#x}")

    def _key_of(self, native: object, nbytes: int) -> str:
        """Return a key that is complete by itself, so regions may be passed on one by one, in any order."""
        step = self._step_nbytes if 0 < self._step_nbytes < nbytes else 0
        keys = [
            NixlKey(
                self._agent.native.get_partial_agent_metadata(one, True, ["UCX"]),
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
                forget_ended(self._peers)
                found = self._peers.setdefault(endpoint, NixlPeer(self._agent, endpoint, liveness))
            if found.liveness is not liveness:
                liveness.close()
        if found.liveness.has_ended():
            self._agent.refuse_closed(deadline)
            raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
        return found
