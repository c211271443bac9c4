"""Transport that uses NIXL over UCX. UCX chooses cross memory attach, TCP, RDMA verbs, or CUDA IPC between GPUs.

This module adds what NIXL lacks. NIXL's transfers have no deadline, and its calls are not
thread-safe. Releasing the handle of a running transfer does not stop its bytes, so a transfer that
exceeds its deadline is kept with its descriptors until it ends. If the target unregisters memory,
UCX keeps the pages registered, and a peer that has the key can still write. So memory that a peer
may still write must stay allocated.

Over TCP, bytes of an ended process may still arrive, so `fence` closes all TCP connections of UCX:
UCX writes over a connection in both directions, whichever side opened it. If the wire may be TCP, a
writer first sends a small probe write. If the probe fails, the writer connects again.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import mmap
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import msgspec
import numpy as np

from windlass.config import take_names
from windlass.errors import (
    DECODE_ERRORS,
    PeerUnreachable,
    RegionError,
    TransferFailed,
    TransportUnavailable,
)
from windlass.memory.cuda.driver import Device
from windlass.memory.ranges import Pieces
from windlass.net.addresses import join_host_port
from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.liveness import INCARNATION_NBYTES, LivenessListener, PeerLiveness
from windlass.transports.network import (
    FIRST_PAUSE_S,
    GRACE_S,
    MAX_PAUSE_S,
    Limits,
    NativeCall,
    NetworkConfig,
    NetworkPeer,
    NetworkTransport,
    Outcome,
    check_lockable,
)
from windlass.transports.nixl.native import (
    TCP_MARK,
    NativeAgent,
    NixlWire,
    TcpFence,
    WireLog,
    may_use_tcp,
    may_use_verbs,
    memory_kind,
    native_errors,
    new_write,
    start_agent,
)
from windlass.transports.peers import PeerEndpoint, RemoteRegion
from windlass.transports.traits import CEILING_BYTES_PER_S, TransportTraits, WireReport

LIMITS = Limits(num_pieces=8192, nbytes=128 << 20, piece_nbytes=128 << 20)
"""Limits of one transfer."""
OWN_PINNED_NBYTES = 128 << 20
"""Bytes allowed for memory that UCX pins for itself over verbs; 66 MB per agent were measured."""
CONNECTIONS = 3
"""Number of connections to a peer that one write tries before the peer counts as unreachable."""
_MAX_KEY_CHARS = 1 << 20
"""Maximum length of a region's key."""
_WORD_NBYTES = np.array([8], np.uint64)
STRANDED: list[object] = []
"""Agents that were closed before their transfers had ended. Freeing such an agent would free memory that a late
transfer may use."""


class NixlConfig(NetworkConfig, frozen=True, tag="nixl"):
    """Configuration of NIXL with its UCX backend.

    Attributes:
        wire: required wire. A write is refused if UCX chooses another wire.

    `device` contains UCX's names (`mlx5_0:1`, `eth0`). If `max_registration_nbytes` is 0, each region is one
    registration.
    """

    remedy: ClassVar[str] = "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"

    wire: NixlWire = NixlWire.AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        take_names(self, {"wire": NixlWire})

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:
        """Start the transport; see `TransportConfig.create`."""
        return NixlTransport(self.placed(towards=towards, gpu=gpu))


class NixlKey(msgspec.Struct, frozen=True, array_like=True):
    """NIXL's metadata for one region, and the address for a peer's probe writes.

    Attributes:
        metadata: NIXL's metadata of the region.
        scratch: address at which peers may write probes.
        step_nbytes: size of each registration of the region (the last may be smaller); 0 if the region is
            one registration.
        gpu: ordinal of the region's GPU; -1 for host memory.
    """

    metadata: bytes
    scratch: int
    step_nbytes: int = 0
    gpu: int = -1


def encode_keys(keys: Sequence[NixlKey]) -> str:
    """Encode keys as text for `RemoteRegion.key`."""
    return base64.b64encode(msgspec.msgpack.encode(keys)).decode()


def decode_keys(region: RemoteRegion) -> list[NixlKey]:
    """Return the keys of a region. The list is never empty.

    Raises:
        RegionError: the text of the keys is malformed.
    """
    if len(region.key) > _MAX_KEY_CHARS:
        raise RegionError(f"nixl: key must be <= {_MAX_KEY_CHARS} chars, got {len(region.key)}")
    try:
        raw = base64.b64decode(region.key, validate=True)
        keys = msgspec.msgpack.decode(raw, type=list[NixlKey])
    except (binascii.Error, *DECODE_ERRORS, ValueError) as error:
        raise RegionError(f"nixl: key of {region.address:#x} cannot be read: {error}") from error
    steps = [key.step_nbytes for key in keys]
    if not steps or any(0 < step < mmap.PAGESIZE or step < 0 for step in steps):
        raise RegionError(
            f"nixl: key of {region.address:#x} must have steps of 0 or >= {mmap.PAGESIZE} bytes, got {steps}"
        )
    return keys


@dataclass
class NixlAgent:
    """Native agent of a transport. A caller of its methods holds the transport's lock.

    Attributes:
        native: NIXL's agent. `NixlTransport.close` deletes this attribute, so that no other object can
            keep the agent alive.
        log: reader of UCX's log.
        errors: types of exceptions that NIXL raises.
        gpu: ordinal of the GPU whose memory the agent registers; -1 for host memory.
        wire: configured wire.
        scratch: address of a registered word in this process, the source of probe writes.
    """

    native: NativeAgent
    log: WireLog
    errors: tuple[type[Exception], ...]
    gpu: int
    wire: NixlWire
    scratch: int


@final
class _Transfer(NativeCall):
    """Native transfer, begun by the constructor. If NIXL cannot prepare the transfer, it never begins."""

    def __init__(self, agent: NixlAgent, peer: str, pieces: Pieces, gpus: tuple[int, int]) -> None:
        local, _, nbytes = pieces
        super().__init__(local, nbytes)
        self._agent = agent
        self._handle: object | None = None
        self._is_posted = False
        try:
            self._handle = new_write(agent.native, peer, pieces, gpus)
            agent.native.transfer(self._handle)
            self._is_posted = True
        except agent.errors as error:
            self.error = str(error)

    def look(self) -> Outcome:
        """Ask NIXL for the state of the transfer, and return it. If NIXL raises an error, store its text in `error`."""
        if self._handle is None or not self._is_posted:
            return Outcome.FAILED
        try:
            state = self._agent.native.check_xfer_state(self._handle)
        except self._agent.errors as error:
            self.error = str(error)
            return Outcome.FAILED
        return {"DONE": Outcome.DONE, "ERR": Outcome.FAILED}.get(state, Outcome.PENDING)

    def cancel(self) -> bool:
        """Return whether the transfer does not exist: NIXL cannot cancel a transfer."""
        return self._handle is None


@final
class NixlPeer(NetworkPeer):
    """See `NetworkPeer`."""

    outlives_process = True

    def __init__(
        self,
        agent: NixlAgent,
        endpoint: PeerEndpoint,
        liveness: PeerLiveness,
        lock: threading.RLock,
    ) -> None:
        super().__init__(endpoint, liveness, lock)
        self._agent = agent
        self._keys: dict[str, tuple[NixlKey, ...]] = {}
        """`RemoteRegion.key` -> decoded keys, for all regions whose keys NIXL has loaded."""
        self._confirmed = False
        """Whether a probe write has arrived over the configured wire."""
        self._connection = 1
        self._words: list[_Transfer] = []
        """Probe writes that did not end by their deadline."""

    @property
    def is_in_use(self) -> bool:
        """True if a thread waits for the end of a call to this peer, or a probe write did not end by its deadline."""
        return super().is_in_use or bool(self._words)

    def step_nbytes(self, region: RemoteRegion) -> int:
        """Return the largest step in which the peer registered a region."""
        return max(key.step_nbytes for key in self._keys[region.key])

    def confirm(self, regions: Sequence[RemoteRegion], deadline: Deadline) -> None:
        """See `NetworkPeer.confirm`. Load the keys of new regions, and check the connection with a probe write.

        The first probe also shows which wire UCX chose.

        Raises:
            TransportUnavailable: UCX chose another wire than the configured one; nothing was sent.
            RegionError: NIXL refuses a key, or a key belongs to another process.
            PeerUnreachable, TransferFailed, TransferOutcomeUnknown: see `refuse_open` and `reach`.
        """
        self._wait_for_late(deadline)
        if self._keys and may_use_tcp(self._agent.wire):
            # NIXL loads keys through the connection, and does not recover if the connection is closed. So check
            # the connection first.
            self.reach(deadline)
        with self.held(deadline):
            self.refuse_open(deadline)
            self._load(regions)
        if self._keys and not self._confirmed:
            self.reach(deadline)
            self._agent.log.check(self._agent.wire)
            self._confirmed = True

    def _wait_for_late(self, deadline: Deadline) -> None:
        """Wait until transfers that are late (past their own deadlines) have ended, but not longer than `deadline`."""
        pause_s = FIRST_PAUSE_S
        while deadline.remaining_s > 0:
            with self.held(deadline):
                # A failed transfer may never end, so do not wait for it.
                if not self.is_open() or not all(
                    call.is_late and call.look() is Outcome.PENDING for call in self._given_up
                ):
                    return
            if self.liveness.wait_ended(pause_s):
                return
            pause_s = min(pause_s * 2, 10 * MAX_PAUSE_S)

    def _load(self, regions: Iterable[RemoteRegion]) -> None:
        """Load the keys of regions into NIXL, unless they are loaded already.

        Raises:
            RegionError: a key is malformed, NIXL refuses it, or it belongs to another process.
        """
        for region in regions:
            if region.key not in self._keys:
                keys = decode_keys(region)
                self._add(keys)
                self._keys[region.key] = tuple(keys)

    def _add(self, keys: Sequence[NixlKey]) -> None:
        """Load keys into NIXL; raise RegionError if NIXL refuses a key, or a key belongs to another process."""
        address = self.endpoint.address
        for key in keys:
            try:
                name = self._agent.native.add_remote_agent(key.metadata)
            except self._agent.errors as error:
                raise RegionError(f"nixl: NIXL refuses a key of {address}: {error}") from error
            if (name.decode() if isinstance(name, bytes) else name) != self.endpoint.incarnation:
                raise RegionError(f"nixl: key of {address} belongs to another process")

    def _begin(self, pieces: Pieces) -> _Transfer:
        """See `NetworkPeer._begin`."""
        # All regions of the peer are on one GPU, or all are in host memory (gpu -1). The keys of each region include the
        # key of the peer's page for probe writes, which is in host memory. So the largest `gpu` is that of the regions.
        gpu = max(key.gpu for keys in self._keys.values() for key in keys)
        return self._post(pieces, (self._agent.gpu, gpu))

    def _post(self, pieces: Pieces, gpus: tuple[int, int]) -> _Transfer:
        """Begin a write to this peer and return it. `gpus`: see `new_write`."""
        return _Transfer(self._agent, self.endpoint.incarnation, pieces, gpus)

    def reach(self, deadline: Deadline) -> None:
        """Check the connection with a probe write. This method takes the lock.

        If the probe fails and UCX may use TCP, reconnect and send another probe; reconnect at most `CONNECTIONS` times.

        Raises:
            PeerUnreachable: every probe write failed, the peer's process has ended, a probe write did not end by the
                deadline, other writes to the peer still run, or NIXL refuses to reconnect. Only probes were sent.
            TransferFailed, TransferOutcomeUnknown: see `held` and `refuse_open`.
        """
        for _ in range(CONNECTIONS):
            connection = self._connection
            if self._word_arrives(deadline):
                return
            if not may_use_tcp(self._agent.wire):
                break
            self._reconnect(connection, deadline)
        raise PeerUnreachable(
            f"{deadline.purpose}: no probe write arrived; nothing of the batch was sent"
        )

    def _word_arrives(self, deadline: Deadline) -> bool:
        """Write one word to the peer's page for probe writes. Return whether the word has arrived.

        The peer never reads the word, so a late arrival is harmless.

        Raises:
            PeerUnreachable: the peer's process has ended, or the write did not end by the deadline.
            TransferFailed, TransferOutcomeUnknown: see `refuse_open`.
        """
        (*_, last), *_ = self._keys.values()
        here, there = (np.array([a], np.uint64) for a in (self._agent.scratch, last.scratch))
        with self.held(deadline):
            # Raise if an earlier write may still run, because the connection must not be replaced during a write.
            self.refuse_open(deadline)
            word = self._post((here, there, _WORD_NBYTES), (-1, -1))
            self._under_way.add(word)
        try:
            outcome = self._follow(word, deadline)
            if self.liveness.wait_ended(GRACE_S if outcome is Outcome.FAILED else 0.0):
                self.refuse_closed(deadline)
                raise PeerUnreachable(f"{deadline.purpose}: the peer's process has ended")
            if outcome is Outcome.PENDING:
                with self.lock:
                    self._words.append(word)
                raise PeerUnreachable(
                    f"{deadline.purpose}: the peer did not answer within {deadline.seconds} s; nothing of the "
                    "batch was sent"
                )
        finally:
            self._end(word)
        return outcome is Outcome.DONE

    def _reconnect(self, connection: int, deadline: Deadline) -> None:
        """Close a connection and open a new one. Do nothing if another thread has done so.

        Args:
            connection: number of the connection to close.
            deadline: deadline of the wait for other writes to this peer.

        Raises:
            PeerUnreachable: other writes to this peer still run, or NIXL refuses to connect; nothing was sent.
            TransferFailed, TransferOutcomeUnknown: see `refuse_open`.
        """
        refused: tuple[type[Exception], ...] = (*self._agent.errors, RegionError)
        with self.held(deadline):
            # Wait until no transfer runs, because NIXL cannot safely remove a peer during a transfer. The
            # wait releases the lock.
            self._ended.wait_for(
                lambda: not self._under_way or self._connection != connection, deadline.remaining_s
            )
            self.refuse_closed(deadline)
            if self._connection != connection:
                # Another thread has reconnected.
                return
            if self._under_way:
                raise PeerUnreachable(
                    f"{deadline.purpose}: other writes to this peer still run; nothing was sent"
                )
            self.refuse_open(deadline)
            try:
                self._connection += 1
                self._agent.native.remove_remote_agent(self.endpoint.incarnation)
                for keys in self._keys.values():
                    self._add(keys)
            except refused as error:
                raise PeerUnreachable(f"{deadline.purpose}: {error}; nothing was sent") from error


@final
class NixlTransport(NetworkTransport[NixlPeer]):
    """`OneSidedTransport` over a NIXL agent with a UCX backend.

    The address of an endpoint is the `host:port` of its liveness listener; its incarnation is the
    agent's random name. The key of a region contains NIXL's metadata.

    Attributes:
        tcp_fence: closes the TCP connections of UCX in this process.

    Raises:
        TransportUnavailable: NIXL is not installed, or UCX does not start with the configured wire.
            `write` raises the same error, before the first byte, if UCX chooses another wire for a peer.
    """

    def __init__(self, config: NixlConfig) -> None:
        self._config = config
        self._gpu = None if config.gpu < 0 else Device(config.gpu)
        name = secrets.token_hex(INCARNATION_NBYTES // 2)
        self.tcp_fence = TcpFence(TCP_MARK)
        # UCX detects GPUs in the CUDA context of the thread that starts it.
        with self._current():
            native, log, self._detail = start_agent(name, config.wire, config.device, config.gpu)
        self._page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._scratch = int(self._page.ctypes.data)
        self._agent = NixlAgent(
            native=native,
            log=log,
            errors=native_errors(),
            gpu=config.gpu,
            wire=config.wire,
            scratch=self._scratch + mmap.PAGESIZE // 2,
        )
        liveness = LivenessListener(config.host, name, "nixl")
        endpoint = PeerEndpoint("nixl", join_host_port(config.host, liveness.port), name)
        super().__init__(endpoint, liveness, config.max_registration_nbytes, LIMITS)
        self._native: dict[int, object] = {}
        try:
            with self._current():
                own = [(self._scratch, self._page.nbytes)]
                self._scratch_native = self._register_native(own, -1)
        except RegionError as error:
            liveness.close()
            raise TransportUnavailable(f"nixl: no memory can be registered: {error}") from error
        self.tcp_fence.spare_own_connections()

    @property
    def traits(self) -> TransportTraits:
        """Traits of this transport. `one_sided` is False until UCX chooses a wire at the first write."""
        wires = self._agent.log.put_wires()
        return TransportTraits(
            same_host=False,
            one_sided=bool(wires) and all(wire.one_sided for wire in wires),
            ceiling_bytes_per_s=self._ceiling(),
            gpu=self._config.gpu,
        )

    def _ceiling(self) -> float:
        """Return the highest throughput of the configured wire. For AUTO, return the throughput between hosts."""
        if self._config.wire is NixlWire.CMA:
            return CEILING_BYTES_PER_S["process_vm_writev-ucx"]
        return CEILING_BYTES_PER_S["rdma" if may_use_verbs(self._config.wire) else "tcp"]

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`.

        The protocol is read from UCX's log. Before the first write, the protocol is `ucx`.
        """
        wires = sorted(self._agent.log.put_wires())
        protocol = "+".join(sorted({wire.name for wire in wires})) or "ucx"
        devices = ", ".join(sorted({wire.device for wire in wires})) or "not known before a write"
        return WireReport(
            "nixl",
            protocol,
            f"{self._detail}, configured wire: {self._config.wire.value}, devices: {devices}",
        )

    def _register_together(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Register all spans in one call of the library. Return one key per span, with the metadata of the span.

        Raises:
            RegionError: the library refuses a span.
        """
        agent, gpu = self._agent.native, self._config.gpu
        together = self._register_native(spans, gpu)
        # Each region needs a separate handle, because regions are unregistered separately.
        try:
            natives = [
                agent.get_reg_descs(self._parts([span], gpu), memory_kind(gpu)) for span in spans
            ]
            keys = [self._key_of(one, n) for one, (_, n) in zip(natives, spans, strict=True)]
        except self._agent.errors as error:
            agent.deregister_memory(together)
            raise RegionError(
                f"register: NIXL returned no metadata of {spans[0][0]:#x}: {error}"
            ) from error
        self._native.update((span[0], one) for span, one in zip(spans, natives, strict=True))
        return keys

    def _unregister(self, region: MemoryRegion) -> Callable[[], None]:
        """Return a function that unregisters the region."""
        return partial(self._deregister, self._native.pop(region.address))

    def _deregister(self, native: object) -> None:
        """End a registration; raise TransferFailed if NIXL refuses."""
        try:
            self._agent.native.deregister_memory(native)
        except self._agent.errors as error:
            raise TransferFailed(f"nixl: memory stays registered: {error}") from error

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`.

        If the wire cannot be TCP, do nothing, because writes over other wires end when the writing process ends.
        """
        if may_use_tcp(self._config.wire):
            self.tcp_fence.cut(Deadline.after(deadline_s, "nixl fence"))

    def _close_library(self, spans: Sequence[tuple[int, int]]) -> None:  # noqa: ARG002
        """See `NetworkTransport`. An agent with an unfinished write is kept until this process ends."""
        peers = list(self.peers.values())
        if any(peer.is_open() or peer.is_in_use for peer in peers):
            STRANDED.append((self._agent.native, peers, self._page))
        else:
            for native in (*self._native.values(), self._scratch_native):
                self._agent.native.deregister_memory(native)
            # Ends UCX's progress thread.
            del self._agent.native
            self.tcp_fence.close()
        self._native.clear()

    def _new_peer(self, endpoint: PeerEndpoint, liveness: PeerLiveness) -> NixlPeer:
        """Return a new peer for an endpoint."""
        return NixlPeer(self._agent, endpoint, liveness, self._lock)

    def _current(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that makes the GPU's CUDA context current in the calling thread."""
        return contextlib.nullcontext() if self._gpu is None else self._gpu.current()

    def _register_native(self, spans: Sequence[tuple[int, int]], gpu: int) -> object:
        """Register ranges in one call, and return NIXL's handle. `gpu` is the GPU of the memory; -1 for host memory.

        Raises:
            RegionError: the limit of locked memory is too small, or NIXL refuses the ranges.
        """
        (address, first), total = spans[0], sum(nbytes for _, nbytes in spans)
        if self._gpu is None and may_use_verbs(self._config.wire):
            check_lockable(total + OWN_PINNED_NBYTES, f"register: {address:#x}")
        try:
            parts = self._parts(spans, gpu)
            return self._agent.native.register_memory(parts, memory_kind(gpu), ["UCX"])
        except self._agent.errors as error:
            raise RegionError(
                f"register: [{address:#x}, {address + first:#x}) is refused by NIXL ({error}; UCX: "
                f"{self._agent.log.complaints() or 'no message'}); `ulimit -l` limits the memory that RDMA can use"
            ) from error

    def _parts(self, spans: Sequence[tuple[int, int]], gpu: int) -> list[tuple[int, int, int, str]]:
        """Return NIXL's descriptors (address, size, GPU, "") of the registrations of local regions."""
        return [(start, stop - start, max(gpu, 0), "") for start, stop in self._steps(spans)]

    def _key_of(self, native: object, nbytes: int) -> str:
        """Return the key of one region.

        Peers send probe writes to one page of this process (`_scratch`). The key of every region also contains this page's
        metadata, so a peer can send a probe after it has loaded any one region.
        """
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
