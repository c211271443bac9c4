"""The trainer's side of one-sided writes: packs and hashes links, and writes them to engines.

`Sender.connect` takes a plan part and the addresses of the destinations. For each version, the agent calls `prepare`
and then `write`. `write` gives `WriteBatch`es to the transport and returns a `LinkOutcome` per link, with the digest
that the engine must find. For engines on GPUs of the same host, GPU kernels may store the bytes instead of the
transport (`transfer/stored_links.py`).

The size of the arena decides when ops are packed. If the payloads of all packed ops fit, `prepare` packs and hashes
them before the engines pause, and `write` only writes. Otherwise `prepare` only hashes, and `write` packs one half of
the arena while it writes the other half. DIRECT ops need no packing and are written from the parameter itself. With a
replica (`transfer/replica.py`), `prepare` copies the parameters of DIRECT ops too.

Every digest describes the parameters at the time of `prepare`. If a parameter changes before it is written, the engine
finds another digest, and the update is not published.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import final

from windlass.config import ReplicaPlace
from windlass.errors import WindlassError
from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import Buffer
from windlass.net.clock import Deadline
from windlass.planning.plan import TransferPlan
from windlass.planning.program import LinkProgram
from windlass.transfer.base import (
    LINKS_AT_ONCE,
    ParameterMemory,
    failed_link,
    joined_results,
    status_of,
    submit,
)
from windlass.transfer.bind import SentLinks, check_destinations
from windlass.transfer.bindings import (
    DestinationBinding,
    GroupOffer,
    LinkOutcome,
    LinkStatus,
    Written,
)
from windlass.transfer.packer import PackedBytes
from windlass.transfer.ring import write_ring
from windlass.transfer.sender_binding import SenderBinding
from windlass.transfer.source import LocatedParameters, addresses_of
from windlass.transports.base import MemoryRegion, OneSidedTransport, WriteBatch

_log = logging.getLogger(__name__)


@final
class Sender:
    """Sender of one trainer rank, or of an engine rank that sends its weights to another engine (a catch-up).

    Thread-safe: its methods run one at a time.

    Without a replica, the parameters must not change from `prepare` to the end of the round. With a replica,
    `prepare` copies the parameters, and the sender sends the copy. So the parameters may change after `prepare`.

    Args:
        transport: writes the bytes, or maps memory of peers for GPU kernels that store. The caller closes it.
        manifest: manifest of the rank.
        parameters: function that returns the current memory of the parameters, in manifest order. `prepare` calls it.
            `connect` does not, because a trainer may have gathered its parameters for a step at that time.
        arena_nbytes: size of the arena for packed payloads; 0 for as much as one update needs.
        registered: regions that the caller has registered. Parameters inside them are not registered again.
        replica: place of the replica; see `connect_trainer`.
        threads: threads that write links at the same time; `close` shuts them down. None for new threads.

    Attributes:
        replica: copy of the parameters that are sent unpacked; None without a replica.
        packer: packs links into the arena.

    Raises:
        ConfigError: `arena_nbytes` is neither 0 nor at least 128, or the transport cannot send from the requested
            replica.
    """

    def __init__(
        self,
        transport: OneSidedTransport,
        manifest: ShardManifest,
        parameters: Callable[[], Sequence[ParameterMemory]],
        *,
        arena_nbytes: int = 0,
        registered: Sequence[MemoryRegion] = (),
        replica: ReplicaPlace = ReplicaPlace.OFF,
        threads: Executor | None = None,
    ) -> None:
        self.transport, self.manifest = transport, manifest
        self.parameters = LocatedParameters(manifest, parameters)
        self._pool = threads or ThreadPoolExecutor(LINKS_AT_ONCE, "windlass-writer")
        self._binding = binding = SenderBinding(
            transport,
            manifest,
            arena_nbytes=arena_nbytes,
            registered=registered,
            replica=replica,
            threads=self._pool,
        )
        self.packer, self.replica, self._stores = binding.packer, binding.replica, binding.stores
        self._lock = threading.RLock()
        self._ready: dict[str, tuple[WriteBatch, ...]] = {}
        self._digests: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        self._sent: set[str] = set()
        self._packed: dict[str, PackedBytes] = {}
        self._pack_s = self._register_s = 0.0

    @property
    def links(self) -> SentLinks:
        """Links of the last `connect` or `change_links`."""
        return self._binding.links

    def begin_version(
        self,
        on_taken: Callable[[], None] | None = None,
        *,
        version: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Call `Replica.begin`. Do nothing without a replica."""
        if self.replica is not None:
            with self._lock:
                self.replica.begin(on_taken, version, stream)

    def reading(self) -> AbstractContextManager[object]:
        """Return a context manager for a block that reads the weights.

        `end_version` waits until the block has ended, because the trainer may free its weights after `end_version`.
        """
        return self._lock

    def end_version(self) -> None:
        """End the version that `begin_version` began. Later calls no longer read its weights; see `Replica.end`.

        First wait until a running copy has ended. Do nothing without a replica.
        """
        if self.replica is not None:
            with self._lock:
                self.replica.end()
                # Drop the packed payloads, because the weights may have changed during the packing.
                self._forget()

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """Replace all links with the links of a plan part; see `SenderBinding.connect`.

        Return None, because one-sided writes need no broadcast group.
        """
        with self._lock:
            self._forget()
            self._binding.connect(plan, bindings)
        return None

    def change_links(
        self,
        plan: TransferPlan | None,
        bindings: Sequence[DestinationBinding],
        gone: Collection[str],
    ) -> None:
        """End some links, bind new links, and keep all others; see `SenderBinding.change_links`."""
        with self._lock:
            before = self.links
            try:
                self._binding.change_links(plan, bindings, gone)
            finally:
                if self.links is not before:
                    self._forget()

    def bind_copies(
        self, copies: Mapping[str, str], bindings: Mapping[str, DestinationBinding]
    ) -> tuple[LinkProgram, ...]:
        """Bind links to all members of relay groups except the first of each; see `SenderBinding.bind_copies`."""
        with self._lock:
            return self._binding.bind_copies(copies, bindings)

    def prepare(self, version: int | None = None) -> None:
        """Hash every link, and pack all links if the arena can hold them at once. With a replica, copy the parameters.

        Nothing is sent. If the replica has the version already, do nothing.

        Args:
            version: version to prepare; None for the version of the last `begin_version`.

        Raises:
            PlanError: the number or the sizes of the parameters differ from the manifest.
            RegionError, TransferFailed: parameters have moved and their new memory cannot be registered, or the arena was
                abandoned and no new arena can be allocated.
            TransferFailed: see `Packer.hash_links` and `Replica.take`.
            RoundAborted: the replica has no copy of this version, and the weights may have changed.
            TransferOutcomeUnknown: kernels of this or of an earlier version may still run.
        """
        with self._lock:
            if self._stores is not None:
                self._stores.gpu.refuse_late()
            replica = self.replica
            if replica is not None and replica.is_taken(version):
                return
            began = time.perf_counter()
            self._binding.settle_doubt()
            self._forget()
            located = self.parameters()
            if self._stores is not None:
                self._stores.prepare(located, replica)
            registered_s = self._pack_or_hash(located) if self._binding.writes else 0.0
            self._pack_s = time.perf_counter() - began - registered_s
            # The next `write` reports the sum since the previous `write`.
            self._register_s += registered_s
            if replica is not None:
                replica.taken(version)

    def _pack_or_hash(self, located: Sequence[ParameterMemory]) -> float:
        """Pack and hash all planned links that the transport writes, or only hash them if the arena is too small.

        With a replica, first copy the parameters into it. Without a replica, first register parameters that have moved.

        Returns:
            Seconds that the registration of moved parameters took.
        """
        links = self.links
        programs = links.planned
        if self.packer.slot.arena is None and not self.packer.holds(programs):
            # The arena was abandoned, and the allocation of a new arena failed. Try again.
            self.packer.fit(programs)
        sources, registered_s = addresses_of(located), 0.0
        if self.replica is None:
            registered_s = self._binding.registered.cover(located[i] for i in links.read_in_place)
        else:
            sources = self.replica.take(sources)
        self.packer.sources = sources
        if self.packer.holds(programs):
            offset = 0
            for program in programs:
                self._offsets[program.peer] = offset
                self._digests[program.peer], offset = self._pack(program, offset)
        else:
            self._digests |= self.packer.hash_links(programs, self._pool)
        return registered_s

    def write(self, version: int, destinations: Sequence[str], deadline_s: float) -> Written:
        """Write the links to `destinations`, and return their outcomes and times. Idempotent.

        The writes begin in the order of `destinations`. Trainer ranks with the same destinations should use different
        orders; see `windlass.planning.order`. If the deadline passes before the write of a link begins, the link is
        FAILED and not UNKNOWN, because none of its bytes was sent.

        Before a link is written again, it is packed again, because the arena may have been overwritten or damaged. The
        digest must be the same as in `prepare`. With a replica, no link is packed again, because the weights may have
        changed.

        Args:
            version: number of the version that `prepare` has prepared.
            destinations: destinations of the links.
            deadline_s: seconds until all writes must have ended.

        Raises:
            RoundAborted: this rank has no link to one of the destinations.
            TransferFailed: the GPU reports an error and cannot be used any more.
            TransferOutcomeUnknown: the GPU reports an error, and stores that were queued earlier may still run.
        """
        with self._lock:
            check_destinations(self.links.programs, destinations)
            deadline = Deadline.after(deadline_s, "write")
            stores, far = self._stores, [name for name in destinations if name in self.links.peers]
            if stores is None or len(far) == len(destinations):
                return self._write(far, deadline)
            near = [name for name in destinations if name not in self.links.peers]
            store = partial(stores.write, version, near, deadline, self.replica)
            if not far:
                return store()
            return joined_results(
                destinations, submit(self._pool, self._write, far, deadline), store
            )

    # --- links of relay groups, which `RelaySource` writes --------------------------------------

    def packed(self, destination: str) -> PackedBytes | None:
        """Return the packed bytes of a planned link; None if it is not packed as a whole.

        Call this inside a block of `reading`. The result is valid only inside this block.
        """
        return self._packed.get(destination)

    def note_sent(self, destinations: Iterable[str]) -> None:
        """Record that the caller writes the links to these destinations. A later `write` packs these links again."""
        self._sent.update(destinations)

    def failed(self, name: str, error: BaseException, arena: Buffer | None) -> LinkOutcome:
        """Return the outcome of the link to `name` after its write raised `error`.

        If the outcome is UNKNOWN, the write may still read its source memory, so abandon this memory. It is the replica
        if there is one, and otherwise `arena`.
        """
        status, reason = status_of(error), f"{type(error).__name__}: {error}"
        if not isinstance(error, WindlassError):
            _log.error("writing to %s failed", name, exc_info=error)
        if status is LinkStatus.UNKNOWN and self._binding.abandon(arena):
            self._forget_packed()
        return failed_link(name, reason, status)

    def close(self) -> None:
        """Wait for a running `write`, then unregister and free the memory. Idempotent.

        If late writes or kernels may still read some memory, abandon this memory instead: it stays allocated.
        """
        with self._lock:
            self._pool.shutdown(wait=True)
            self._binding.close()
            self._forget()

    # --- links -------------------------------------------------------------------------------

    def _write(self, destinations: Sequence[str], deadline: Deadline) -> Written:
        """Write the links to `destinations` over the transport; see `write`."""
        pack_s, self._pack_s = self._pack_s, 0.0
        register_s, self._register_s = self._register_s, 0.0
        outcomes = self._pack_again(name for name in destinations if name in self._sent)
        self._sent.update(destinations)
        ready = {name: self._ready_batches(name) for name in destinations if name not in outcomes}
        began, arena = time.perf_counter(), self.packer.slot.arena
        writes = {
            name: submit(self._pool, self._write_batches, batches, deadline)
            for name, batches in ready.items()
            if batches is not None
        }
        wait(writes.values())
        wire_s = time.perf_counter() - began
        for name, written in writes.items():
            if (error := written.exception()) is None:
                outcomes[name] = self._succeeded(name, written.result())
            else:
                outcomes[name] = self.failed(name, error, arena)
        for name in destinations:
            if name not in outcomes:
                outcomes[name], link_wire_s, link_pack_s = self._stream(name, deadline)
                wire_s += link_wire_s
                pack_s += link_pack_s
        links = tuple(outcomes[name] for name in destinations)
        return Written(links, pack_s, wire_s, register_s)

    def _forget(self) -> None:
        """Drop the digests and the packed links of the last `prepare`."""
        self._digests, self._sent = {}, set()
        self._forget_packed()

    def _forget_packed(self) -> None:
        self._ready, self._packed, self._offsets = {}, {}, {}

    def _pack(self, program: LinkProgram, offset: int) -> tuple[str, int]:
        """Pack and hash a link at byte `offset` of the arena; return its digest and the offset of the next link."""
        peer = program.peer
        packed, after = self.packer.pack(program, offset)
        self._packed[peer] = packed
        self._ready[peer] = self.packer.batches_of(self.links.peers[peer], program, packed.pack)
        return packed.digest, after

    def _ready_batches(self, name: str) -> tuple[WriteBatch, ...] | None:
        """Return the writes of a link that is packed as a whole; None if it is not.

        In a relay group, only the link to the first member is packed. A link to another member (`links.copy_of`) sends
        the same packed bytes to other addresses.
        """
        if name not in self.links.copy_of:
            return self._ready.get(name)
        if (packed := self._packed.get(self.links.copy_of[name])) is None:
            return None
        program, peer = self.links.programs[name], self.links.peers[name]
        return self.packer.batches_of(peer, program, packed.pack)

    def _pack_again(self, names: Iterable[str]) -> dict[str, LinkOutcome]:
        """Pack links again before they are written again. With a replica, do nothing: the weights may have changed.

        Returns:
            Destination -> FAILED outcome, for each link whose digest now differs from its digest in `prepare`.
        """
        lost: dict[str, LinkOutcome] = {}
        if self.replica is not None:
            return lost
        found: dict[str, str] = {}
        for name in names:
            planned = self.links.copy_of.get(name, name)
            if planned in self._offsets and planned not in found:
                found[planned], _ = self._pack(self.links.programs[planned], self._offsets[planned])
            if planned in found and found[planned] != self._digests[planned]:
                reason = "the weights have changed since this version was prepared"
                lost[name] = failed_link(name, reason)
        return lost

    def _stream(self, name: str, deadline: Deadline) -> tuple[LinkOutcome, float, float]:
        """Write a link through the two halves of the arena: pack one half while the other half is written.

        Returns:
            The outcome, the seconds of writing, and the seconds of packing.
        """
        reason = ""
        if self.replica is not None:
            reason = "replica: nothing is packed for this link, and the weights may have changed"
        elif self.links.copy_of.get(name, name) not in self._digests:
            reason = "write: this version is not prepared; call `prepare` first"
        if reason:
            return failed_link(name, reason), 0.0, 0.0
        ring = self.packer.ring(self.links.programs[name], self.links.peers[name])
        sent = write_ring(
            ring, lambda batch: submit(self._pool, self._write_batches, (batch,), deadline)
        )
        if sent.error is None:
            outcome = self._succeeded(name, sent.wire_s)
        elif sent.write_error is None and not isinstance(sent.error, WindlassError):
            _log.error("packing for %s failed", name, exc_info=sent.error)
            outcome = failed_link(name, f"{type(sent.error).__name__}: {sent.error}")
        else:
            # If the last write failed too, its error determines the outcome.
            outcome = self.failed(name, sent.write_error or sent.error, self.packer.slot.arena)
        return outcome, sent.wire_s, sent.pack_s

    def _write_batches(self, batches: Sequence[WriteBatch], deadline: Deadline) -> float:
        """Write batches one after another; return the seconds of writing."""
        began = time.perf_counter()
        for batch in batches:
            deadline.check_before_more()
            self.transport.write(batch, deadline_s=max(deadline.remaining_s, 0.001))
        return time.perf_counter() - began

    def _succeeded(self, name: str, wire_s: float) -> LinkOutcome:
        nbytes = self.links.programs[name].nbytes
        digest = self._digests[self.links.copy_of.get(name, name)]
        return LinkOutcome(name, LinkStatus.OK, nbytes, digest, wire_s=wire_s)
