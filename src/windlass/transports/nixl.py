"""NIXL over UCX: cross memory attach, TCP, verbs, or CUDA IPC between GPUs, as UCX finds them.

What NIXL lacks is done here. Its transfers have no deadline and its calls are not thread-safe. A
handle released in flight does not stop the bytes, so a transfer that ran out of time is kept, with
its descriptors, until it ends; the peer is closed to other writes until then, and local memory
under it stays registered. Withdrawing memory at the target does not stop a peer that knows it: UCX
keeps the pages registered, so a region that a peer may still write must stay mapped.
"""

from __future__ import annotations

import base64
import binascii
import mmap
import secrets
import threading
from typing import TYPE_CHECKING, final

import msgspec
import numpy as np

from windlass.errors import (
    DECODE_ERRORS,
    PeerUnreachable,
    RegionError,
    TransferFailed,
    TransferOutcomeUnknown,
    TransportUnavailable,
)
from windlass.telemetry.clock import Deadline
from windlass.transports.addresses import join_host_port
from windlass.transports.base import (
    MemoryRegion,
    PeerEndpoint,
    RemoteRegion,
    WireReport,
    WriteBatch,
)
from windlass.transports.configs import NixlConfig
from windlass.transports.door import INCARNATION_NBYTES, Door, Doorway
from windlass.transports.lockable import check_lockable
from windlass.transports.nixl_native import (
    NativeHandle,
    UInt64Array,
    allowed_wires,
    may_use_verbs,
    native_errors,
    start_agent,
)
from windlass.transports.regions import RegionTable, check_batch
from windlass.transports.splitting import cut_at_edges, edges_of, merge_adjacent, split_pieces

if TYPE_CHECKING:
    from windlass.transports.cuda.driver import Device

__all__ = ["NixlTransport"]

MAX_CALL_NBYTES = 128 << 20
"""Per native call: between calls a passed deadline is a clean failure, inside one it is unknown."""
MAX_PIECES = 8192
OWN_PINNED_NBYTES = 128 << 20
"""Room for what UCX pins for itself over verbs: 66 MB per agent were seen."""
_MAX_KEY_CHARS = 1 << 20
_GRACE_S = 0.25
"""How long after an error the kernel may take to tell that the peer's process has ended."""
_SCRATCH_NBYTES = 8
_STRANDED: list[object] = []
"""Agents with transfers that never ended: freeing one would free memory under a late write."""


class _Key(msgspec.Struct, frozen=True, array_like=True):
    """`RemoteRegion.key`: NIXL's metadata for one region, and a word that peers may write first.

    `step_nbytes`: the region is registered in steps of it; 0 for at once. `gpu`: -1 for host memory.
    """

    metadata: bytes
    scratch: int
    step_nbytes: int = 0
    gpu: int = -1


@final
class _Peer:
    """One incarnation of one peer. Guarded by the transport's lock, but for `doorway`."""

    def __init__(self, doorway: Doorway) -> None:
        self.doorway = doorway
        self.keys: dict[str, int] = {}
        """Regions that are known, and the steps in which they are registered."""
        self.gpu = -1
        self.confirmed = False
        self.open: NativeHandle | None = None
        self.poison = ""
        self.late = False


@final
class NixlTransport:
    """`OneSidedTransport` over a NIXL agent with a UCX backend.

    An endpoint's address is `host:port` of its door (see `door`), its incarnation the agent's
    random name. A region's key carries NIXL's metadata.

    Raises:
        TransportUnavailable: not installed, or UCX does not start with the wire asked for. Raised
            by `write` too, before the first byte, when UCX picks another wire for a peer.
    """

    def __init__(self, config: NixlConfig) -> None:
        self._config = config
        self._step_nbytes = config.max_registration_nbytes
        self._gpu = None if config.gpu < 0 else _gpu(config.gpu)
        if self._gpu is not None:
            self._gpu.use()  # UCX looks for GPUs in the thread that starts it
        self._name = secrets.token_hex(INCARNATION_NBYTES // 2)
        self._agent, self._log, self._detail = start_agent(config, self._name)
        self._errors = native_errors()
        self._door = Door(config.host, self._name, "nixl")
        address = join_host_port(config.host, self._door.port)
        self._endpoint = PeerEndpoint("nixl", address, self._name)
        self._table = RegionTable()
        self._native: dict[int, object] = {}
        self._lock = threading.Lock()
        self._peers: dict[PeerEndpoint, _Peer] = {}
        self._withdrawn: list[object] = []
        self._closed = False
        self._page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._scratch = int(self._page.ctypes.data)
        try:
            self._scratch_native = self._register_native(self._scratch, self._page.nbytes, -1)
        except RegionError as error:
            self._door.close()
            raise TransportUnavailable(f"nixl: no memory can be registered: {error}") from error

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`; read from UCX's log, `ucx` until a peer was written."""
        wires = sorted(self._log.put_wires())
        protocol = "+".join(sorted({wire.name for wire in wires})) or "ucx"
        devices = ", ".join(sorted({wire.device for wire in wires})) or "not known before a write"
        return WireReport(
            "nixl",
            protocol,
            f"{self._detail}, wire {self._config.wire.value} asked for, devices: {devices}",
            bool(wires) and all(wire.one_sided for wire in wires),
        )

    def endpoint(self) -> PeerEndpoint:
        """See `OneSidedTransport.endpoint`."""
        return self._endpoint

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """See `OneSidedTransport.register`; over verbs this pins the memory."""
        with self._lock:
            probe = MemoryRegion(address, nbytes, RemoteRegion(self._endpoint, address, nbytes))
            self._table.add(probe)  # refuses what overlaps before anything is pinned
            self._table.remove(probe)
            native = self._register_native(address, nbytes, self._config.gpu)
            try:
                key = self._key_of(native, nbytes)
            except self._errors as error:
                raise RegionError(f"register: {address:#x} has no metadata: {error}") from error
            region = MemoryRegion(
                address, nbytes, RemoteRegion(self._endpoint, address, nbytes, key)
            )
            self._table.add(region)
            self._native[address] = native
        return region

    def unregister(self, region: MemoryRegion) -> None:
        """See `OneSidedTransport.unregister`; under an open write it takes effect when that ends."""
        with self._lock:
            self._table.remove(region)
            self._withdrawn.append(self._native.pop(region.address))
            self._drop_withdrawn()

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """See `OneSidedTransport.write`.

        Raises:
            TransportUnavailable: UCX picked another wire than the one asked for; nothing was sent.
        """
        check_batch(self._table, batch, "nixl")
        deadline = Deadline.after(deadline_s, f"nixl write to {batch.endpoint.address}")
        peer = self._peer(batch.endpoint, deadline)
        self._wait_for_late(peer, deadline)
        self._acquire(deadline)
        try:
            if self._closed:
                raise TransferFailed(f"{deadline.purpose}: the transport is closed")
            self._refuse_open(peer, deadline)
            self._load(peer, batch, deadline)
            steps = [(r.address, r.nbytes, peer.keys[r.key]) for r in batch.regions]
        finally:
            self._lock.release()
        pieces = cut_at_edges(
            merge_adjacent(batch.local_addresses, batch.remote_addresses, batch.nbytes),
            local=[e for s, n in self._table.spans() for e in edges_of(s, n, self._step_nbytes)],
            remote=[edge for place in steps for edge in edges_of(*place)],
        )
        local, remote, nbytes = split_pieces(*pieces, MAX_CALL_NBYTES)
        cumulative = np.cumsum(nbytes)
        start, written = 0, 0
        while start < len(nbytes):
            fits = int(np.searchsorted(cumulative, written + MAX_CALL_NBYTES, "right"))
            stop = min(start + MAX_PIECES, max(start + 1, fits))
            part = slice(start, stop)
            self._call(peer, batch.endpoint, (local[part], remote[part], nbytes[part]), deadline)
            start, written = stop, int(cumulative[stop - 1])

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`: over UCX's TCP there is no way to, see docs/hosts.md."""

    def close(self) -> None:
        """See `OneSidedTransport.close`; an agent with an open write is kept until the process ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers, self._peers = list(self._peers.values()), {}
            self._table.clear()
            if any(self._is_open(peer) for peer in peers):
                _STRANDED.append((self._agent, peers, self._page))
            else:
                for native in (*self._native.values(), *self._withdrawn, self._scratch_native):
                    self._agent.deregister_memory(native)
                del self._agent  # ends UCX's progress thread
            self._native.clear()
            self._withdrawn.clear()
        for peer in peers:
            peer.doorway.close()
        self._door.close()

    def _register_native(self, address: int, nbytes: int, gpu: int) -> object:
        if self._gpu is not None:
            self._gpu.use()
        elif may_use_verbs(self._config.wire):
            check_lockable(nbytes + OWN_PINNED_NBYTES, f"register: {address:#x}")
        try:
            starts = [address, *edges_of(address, nbytes, self._step_nbytes)]
            stops = (*starts[1:], address + nbytes)
            parts = [
                (start, stop - start, max(gpu, 0), "")
                for start, stop in zip(starts, stops, strict=True)
            ]
            return self._agent.register_memory(parts, _kind(gpu), ["UCX"])
        except self._errors as error:
            raise RegionError(
                f"register: [{address:#x}, {address + nbytes:#x}) is refused ({error}); over verbs "
                "see ulimit -l"
            ) from error

    def _key_of(self, native: object, nbytes: int) -> str:
        """Each key is complete by itself, so regions may be passed on one by one, in any order."""
        step = self._step_nbytes if 0 < self._step_nbytes < nbytes else 0
        keys = [
            _Key(
                self._agent.get_partial_agent_metadata(one, True, ["UCX"]), self._scratch, step, gpu
            )
            for one, gpu in ((native, self._config.gpu), (self._scratch_native, -1))
        ]
        return base64.b64encode(msgspec.msgpack.encode(keys)).decode()

    def _peer(self, endpoint: PeerEndpoint, deadline: Deadline) -> _Peer:
        with self._lock:
            found = self._peers.get(endpoint)
        if found is None:
            doorway = Doorway(endpoint, deadline)
            with self._lock:
                found = self._peers.setdefault(endpoint, _Peer(doorway))
            if found.doorway is not doorway:
                doorway.close()
        if found.doorway.has_ended():
            raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
        return found

    def _load(self, peer: _Peer, batch: WriteBatch, deadline: Deadline) -> None:
        """Learn the regions, and see once that the wire is the right one. Holds the lock."""
        scratch = 0
        for region in batch.regions:
            if region.key in peer.keys:
                continue
            keys = _decode_key(region)
            for key in keys:
                try:
                    name = self._agent.add_remote_agent(key.metadata)
                except self._errors as error:
                    raise RegionError(f"nixl: key of {region.address:#x}: {error}") from error
                if (name.decode() if isinstance(name, bytes) else name) != (
                    batch.endpoint.incarnation
                ):
                    raise RegionError(f"nixl: key of {region.address:#x} is of another process")
                scratch = key.scratch
            peer.keys[region.key] = max(key.step_nbytes for key in keys)
            peer.gpu = max(key.gpu for key in keys)  # one agent registers one kind of memory
        if peer.confirmed or not scratch:
            return
        try:
            self._confirm(peer, batch.endpoint, scratch, deadline)
        except TransferOutcomeUnknown as error:  # a late write goes to the word kept for that
            raise PeerUnreachable(f"{error}; nothing of the batch was sent") from error
        allowed = allowed_wires(self._config.wire)
        wires = self._log.put_wires()
        strange = sorted({wire.name for wire in wires} - allowed)
        if (allowed and strange) or not wires:
            raise TransportUnavailable(
                f"nixl: wire must be {self._config.wire.value}, UCX chose "
                f"{', '.join(strange) or 'one that it does not name'}; nothing was sent"
            )
        peer.confirmed = True

    def _confirm(
        self, peer: _Peer, endpoint: PeerEndpoint, scratch: int, deadline: Deadline
    ) -> None:
        one = np.array([_SCRATCH_NBYTES], np.uint64)
        here = np.array([self._scratch + mmap.PAGESIZE // 2], np.uint64)
        there = np.array([scratch], np.uint64)
        handle = self._post(peer, endpoint, (here, there, one), deadline, (-1, -1))
        while not self._look(peer, handle, deadline):
            if deadline.remaining_s == 0:
                self._give_up(peer, handle, deadline)

    def _call(
        self,
        peer: _Peer,
        endpoint: PeerEndpoint,
        pieces: tuple[UInt64Array, UInt64Array, UInt64Array],
        deadline: Deadline,
    ) -> None:
        """One native transfer, from its start to its end."""
        self._acquire(deadline)
        try:
            self._refuse_open(peer, deadline)
            deadline.check_before_more()
            handle = self._post(peer, endpoint, pieces, deadline, (self._config.gpu, peer.gpu))
            done = self._look(peer, handle, deadline)
        finally:
            self._lock.release()
        pause_s = 20e-6
        while not done:
            # NIXL has no event for the end of a transfer: looking is the only way. The doorway is
            # an event, and the wait is on that.
            ended = peer.doorway.wait_ended(pause_s)
            with self._lock:
                if ended and not self._look(peer, handle, deadline):
                    peer.open = handle
                    peer.poison = f"{deadline.purpose}: the process is gone"
                    raise PeerUnreachable(peer.poison)
                done = ended or self._look(peer, handle, deadline)
                if not done and deadline.remaining_s == 0:
                    self._give_up(peer, handle, deadline)
            pause_s = min(pause_s * 2, 1e-3)

    def _post(
        self,
        peer: _Peer,
        endpoint: PeerEndpoint,
        pieces: tuple[UInt64Array, UInt64Array, UInt64Array],
        deadline: Deadline,
        gpus: tuple[int, int],
    ) -> NativeHandle:
        """Begin a transfer. `gpus`: here and there, -1 for host memory."""
        local, remote, nbytes = pieces
        if self._gpu is not None:
            self._gpu.use()
        try:
            here, there = (
                self._agent.get_xfer_descs(
                    np.stack([addresses, nbytes, np.full_like(nbytes, max(gpu, 0))], axis=1),
                    _kind(gpu),
                )
                for addresses, gpu in zip((local, remote), gpus, strict=True)
            )
            handle = self._agent.initialize_xfer("WRITE", here, there, endpoint.incarnation)
        except self._errors as error:
            if peer.doorway.wait_ended(_GRACE_S):
                raise PeerUnreachable(f"{deadline.purpose}: the process is gone") from error
            raise TransferFailed(f"{deadline.purpose}: not begun: {error}") from error
        try:
            self._agent.transfer(handle)
        except self._errors as error:
            self._explain(peer, handle, deadline, error)
        return handle

    def _look(self, peer: _Peer, handle: NativeHandle, deadline: Deadline) -> bool:
        """Whether the transfer is done. Holds the lock."""
        try:
            state = self._agent.check_xfer_state(handle)
        except self._errors as error:
            self._explain(peer, handle, deadline, error)
            return False
        if state == "ERR":
            self._explain(peer, handle, deadline, None)
        return state == "DONE"

    def _explain(
        self, peer: _Peer, handle: NativeHandle, deadline: Deadline, error: Exception | None
    ) -> None:
        """The one place where a native error in mid-transfer becomes one of ours."""
        peer.open = handle
        if peer.doorway.wait_ended(_GRACE_S):
            peer.poison = f"{deadline.purpose}: the process is gone"
            raise PeerUnreachable(peer.poison) from error
        peer.poison = f"{deadline.purpose}: {error or 'error'}; bytes may still land"
        raise TransferOutcomeUnknown(peer.poison) from error

    def _give_up(self, peer: _Peer, handle: NativeHandle, deadline: Deadline) -> None:
        """The deadline has passed in mid-transfer. Holds the lock."""
        peer.open, peer.late = handle, True
        peer.poison = (
            f"{deadline.purpose}: not over within {deadline.seconds} s; bytes may still land"
        )
        raise TransferOutcomeUnknown(peer.poison)

    def _is_open(self, peer: _Peer) -> bool:
        """Whether a transfer that was given up may still be going on; closes it when it is done."""
        if peer.open is None:
            return False
        try:
            done = self._agent.check_xfer_state(peer.open) == "DONE"
        except self._errors:
            done = peer.late = False  # no error of NIXL is a fence
        if done:
            peer.open, peer.poison, peer.late = None, "", False
        return not done

    def _wait_for_late(self, peer: _Peer, deadline: Deadline) -> None:
        """Give an earlier transfer that is only late the time of this one to end."""
        pause_s = 20e-6
        while deadline.remaining_s > 0:
            self._acquire(deadline)
            try:
                if not (self._is_open(peer) and peer.late):
                    return
            finally:
                self._lock.release()
            if peer.doorway.wait_ended(pause_s):
                return
            pause_s = min(pause_s * 2, 1e-2)

    def _refuse_open(self, peer: _Peer, deadline: Deadline) -> None:
        if not self._is_open(peer):
            self._drop_withdrawn()
            return
        if peer.doorway.has_ended():
            raise PeerUnreachable(f"{deadline.purpose}: the process is gone")
        raise TransferOutcomeUnknown(f"an earlier write is open: {peer.poison}")

    def _drop_withdrawn(self) -> None:
        num_open = sum(self._is_open(peer) for peer in self._peers.values())
        if num_open:
            return
        for native in self._withdrawn:
            self._agent.deregister_memory(native)
        self._withdrawn.clear()

    def _acquire(self, deadline: Deadline) -> None:
        if not self._lock.acquire(timeout=deadline.remaining_s):
            raise TransferFailed(
                f"{deadline.purpose}: other writes took the deadline of {deadline.seconds} s; "
                "nothing more was sent"
            )


def _gpu(ordinal: int) -> Device:
    from windlass.transports.cuda.driver import Device

    return Device(ordinal)


def _kind(gpu: int) -> str:
    return "DRAM" if gpu < 0 else "VRAM"


def _decode_key(region: RemoteRegion) -> list[_Key]:
    if len(region.key) > _MAX_KEY_CHARS:
        raise RegionError(f"nixl: key must be <= {_MAX_KEY_CHARS} chars, got {len(region.key)}")
    try:
        raw = base64.b64decode(region.key, validate=True)
        keys = msgspec.msgpack.decode(raw, type=list[_Key])
    except (binascii.Error, *DECODE_ERRORS, ValueError) as error:
        raise RegionError(f"nixl: key of {region.address:#x} cannot be read: {error}") from error
    if not keys or any(0 < k.step_nbytes < mmap.PAGESIZE or k.step_nbytes < 0 for k in keys):
        raise RegionError(f"nixl: key of {region.address:#x} must name steps >= {mmap.PAGESIZE}")
    return keys
