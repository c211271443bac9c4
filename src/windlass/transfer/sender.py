"""Stages 5 and 7, the trainer's half: pack what must be packed, write every link, hash what was sent.

In come a plan part and the destinations' bindings (once), `prepare` and `write` (per version);
`WriteBatch`es go to the transport, and a `LinkOutcome` with the link's digest to the coordinator. Links to
peers whose memory a GPU maps are stored by its kernels (`transfer/stored_links.py`).

Two ways through the arena, chosen by its capacity alone. When everything that needs packing fits,
`prepare` packs and hashes before the pause and `write` only writes. Otherwise `prepare` hashes what is
to be sent, and the arena is a ring of two halves: one is packed while the other is on the wire. Bytes
that go as they lie (DIRECT) never pass through it; with a replica (`transfer/replica.py`) they are
copied in `prepare` as well.

Every digest is of the parameters as they were in `prepare`, and stays: what is read differently later,
in the first write or in one that repeats it, does not verify and is never published.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import final

import numpy as np

from windlass.config import ReplicaPlace
from windlass.errors import (
    ConfigError,
    PlanError,
    ProtocolError,
    TransferOutcomeUnknown,
    WindlassError,
)
from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import ALIGNMENT, Buffer
from windlass.net.clock import Deadline
from windlass.net.messages import RoundId
from windlass.planning.plan import TransferPlan
from windlass.planning.program import LinkProgram, bind_links
from windlass.planning.relay import RelayGroup
from windlass.transfer.arena import memory_of
from windlass.transfer.base import (
    LINKS_AT_ONCE,
    ParameterMemory,
    failed_link,
    failed_links,
    is_unknown,
    joined_results,
    status_of,
    submit,
)
from windlass.transfer.bind import (
    bind_peers,
    check_binding,
    check_destinations,
    check_digest_kind,
    check_part,
)
from windlass.transfer.bindings import (
    Carried,
    DestinationBinding,
    GroupOffer,
    LinkOutcome,
    LinkStatus,
    RelayAddress,
    Written,
)
from windlass.transfer.packer import PackedLink, Packer, Peer, packed_capacity
from windlass.transfer.registration import RegisteredMemory
from windlass.transfer.relay import GroupWrite
from windlass.transfer.replica import CopyTimes, Replica, replica_memory
from windlass.transfer.source import LocatedParameters, addresses_of
from windlass.transfer.stored_links import StoredLinks
from windlass.transports.base import MemoryRegion, OneSidedTransport, WriteBatch

_log = logging.getLogger(__name__)


@final
class Sender:
    """One trainer rank. Methods may be called from any thread; they run one at a time.

    Memory: the parameters must not change between `prepare` and the end of the round, unless there
    is a replica: with it they are read in `prepare` only, and everything is sent from the copy.

    Args:
        transport: writes, or maps memory for kernels that store. Stays open; the caller closes it.
        manifest: of this rank.
        parameters: where the parameters lie now, in manifest order; asked at every `prepare` and
            at no other time, because a trainer that is bound in mid-step may have gathered them.
        arena_nbytes: capacity for packed bytes; 0 for as much as one update needs.
        registered: regions that the owner has registered already; what lies in them is not again.
        replica: copy what is sent as it lies, so that parameters may change and move after `prepare`;
            see `connect_trainer`.

    Attributes:
        transport, manifest: as given.
        parameters: where they lie now, in manifest order.
        replica: what is sent instead of the parameters, if anything is.

    Raises:
        ConfigError: `arena_nbytes` is neither 0 nor at least 128, or there can be no such replica.
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
    ) -> None:
        if arena_nbytes != 0 and arena_nbytes < 2 * ALIGNMENT:
            raise ConfigError(
                f"arena_nbytes: must be 0 or at least {2 * ALIGNMENT}, got {arena_nbytes}"
            )
        self.transport, self.manifest = transport, manifest
        self.parameters = LocatedParameters(manifest, parameters)
        self._pool = ThreadPoolExecutor(LINKS_AT_ONCE, "windlass-writer")
        memory = replica_memory(replica, transport, self._pool)
        own = memory_of(transport)
        self._registered = RegisteredMemory(manifest.worker, transport, own, registered)
        self._packer = Packer(transport, own, arena_nbytes)
        self.replica = None if memory is None else Replica(manifest, memory)
        self._lock = threading.Lock()
        mapper, self._writes = transport.mapper, not transport.traits.strided_stores
        self._stores = None if mapper is None else StoredLinks(mapper, manifest.worker)
        self._stored_by = frozenset(
            offer.transport for offer in transport.offers() if offer.traits.strided_stores
        )
        self._programs: dict[str, LinkProgram] = {}
        self._peers: dict[str, Peer] = {}
        self._read_in_place: tuple[int, ...] = ()
        self._first_link = 0
        self._ready: dict[str, PackedLink] = {}
        self._digests: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        self._sent: set[str] = set()
        self._relays: dict[str, GroupWrite] = {}
        self._pack_s = self._register_s = 0.0

    @property
    def arena_nbytes(self) -> int:
        """Bytes of arena allocated now."""
        return self._packer.nbytes

    @property
    def copy_times(self) -> CopyTimes:
        """Of the replica's last copy."""
        return CopyTimes() if self.replica is None else self.replica.times

    def begin_version(
        self,
        on_taken: Callable[[], None] | None = None,
        *,
        version: int | None = None,
        stream: int | None = None,
    ) -> None:
        """Before `version` is announced; see `Replica.begin`. Without a replica nothing."""
        if self.replica is not None:
            with self._lock:
                self.replica.begin(on_taken, version, stream)

    def end_version(self) -> None:
        """Nobody waits for the version any more; see `Replica.end`. Waits for a copy under way."""
        if self.replica is not None:
            with self._lock:
                self.replica.end()
                # The weights may have changed while the last of them was copied and packed.
                self._forget()

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """Bind a plan part (`TransferPlan.for_source`); allocates and registers the arena.

        Returns:
            None: nobody joins a group.

        Raises:
            PlanError: the plan was made for another layout, a destination has no binding, or a
                replica is asked for and the arena is too small for what is packed.
            BindingsRefused: what some destinations offer cannot be written, or is hashed otherwise.
            RegionError: memory cannot be registered.
        """
        with self._lock:
            if self._stores is not None:
                self._stores.end(tuple(self._programs))
            self._unbind()
            self._bind(plan, bindings, ())
        return None

    def change_links(
        self,
        plan: TransferPlan | None,
        bindings: Sequence[DestinationBinding],
        gone: Collection[str],
    ) -> None:
        """Bind links to some destinations anew, and keep all others with what is prepared for them.

        Args:
            plan: part of this rank of a plan for the new destinations; None where there are none.
            bindings: of the new destinations.
            gone: destinations whose links end, those that are bound anew among them.

        Raises:
            ProtocolError: relays are bound, which form groups of all their members.
            BindingsRefused: as `connect`; nothing has changed.
            PlanError, RegionError: as `connect`, which must follow then.
        """
        with self._lock:
            if self._relays:
                raise ProtocolError("change_links: relays are bound; connect anew")
            self._bind(plan, bindings, gone)

    def _bind(
        self,
        plan: TransferPlan | None,
        bindings: Sequence[DestinationBinding],
        gone: Collection[str],
    ) -> None:
        added: dict[str, LinkProgram] = {}
        if plan is not None:
            self._first_link = check_part(
                self.manifest, plan.sources, plan.source_digests, "sources"
            )
            added = {program.peer: program for program in bind_links(plan, sending=True)}
        known = bind_peers(added.values(), bindings, self._check_binding)
        near = {name for name, binding in known.items() if self._is_stored(binding)}
        before, ended = self._programs, {*gone, *added}
        kept = {name: program for name, program in before.items() if name not in ended}
        # One that is bound anew has its old place, so that the places of others in the arena stay.
        programs = {name: before[name] for name in before if name in kept or name in added} | added
        if self._stores is not None:
            self._stores.end(ended)
        self._settle_doubt()
        self._unbind()
        self._peers = {name: peer for name, peer in self._peers.items() if name in kept}
        self._peers |= {n: Peer.bound_to(known[n]) for n in added if n not in near}
        written = tuple(p for name, p in programs.items() if name in self._peers)
        if self._stores is not None:
            self._stores.bind([added[name] for name in added if name in near], known)
        if self._writes:
            self._packer.fit(written, kept=kept.keys())
        self._read_in_place = tuple(
            {i for p in written for i in np.unique(p.direct.src_parameter).tolist()}
        )
        if self.replica is not None:
            if not self._packer.holds(written):
                raise PlanError(
                    "arena_nbytes: with a replica it must be 0 or at least "
                    f"{packed_capacity(written)}, got {self._packer.nbytes}"
                )
            stored = {
                op.src_parameter
                for name, p in programs.items()
                if name not in self._peers
                for op in p.ops
            }
            self.replica.fit((*self._read_in_place, *sorted(stored)))
        self._programs = programs

    def connect_relay(
        self,
        groups: Sequence[RelayGroup],
        bindings: Sequence[DestinationBinding],
        addresses: Sequence[RelayAddress],
    ) -> None:
        """After `connect`: links to all members of groups whose first member it was given.

        Raises:
            ProtocolError: kernels of this rank store.
            PlanError: a member has no binding, or a root no address.
            RegionError: a write would leave the published regions.
        """
        if self._stores is not None:
            raise ProtocolError("kernels that store into peers cannot write to a relay")
        with self._lock:
            known = {binding.worker: binding for binding in bindings}
            roots = {address.worker: address for address in addresses}
            for group in groups:
                program = self._programs.get(group.members[0])
                if program is None:
                    continue  # this rank holds nothing that the group wants
                relayed = GroupWrite(group, program, known, roots)
                for name, copy in relayed.copies().items():
                    self._peers[name] = Peer.bound_to(known[name])
                    self._programs[name] = copy
                self._relays |= dict.fromkeys(group.members, relayed)

    def prepare(self, version: int | None = None) -> None:
        """Hash every link, and pack them where the arena holds all at once; nothing is sent.

        Args:
            version: that it is for; None for the one that was begun last.

        Raises:
            PlanError: parameters have another number or other sizes than when described.
            RegionError: changed parameter memory cannot be registered, or there is still no memory
                for an arena in place of one that was parted with.
            RoundAborted: with a replica: that of this version is gone or was never begun, and the
                weights may be others.
        """
        with self._lock:
            if self._stores is not None:
                self._stores.gpu.refuse_late()
            replica = self.replica
            if replica is not None and replica.is_taken(version):
                return
            began = time.perf_counter()
            self._settle_doubt()
            self._forget()
            located = self.parameters()
            if self._stores is not None:
                self._stores.prepare(located, replica)
            registered_s = self._pack_or_hash(located) if self._writes else 0.0
            self._pack_s = time.perf_counter() - began - registered_s
            self._register_s += registered_s  # until a write tells of it
            if replica is not None:
                replica.taken(version)

    def _pack_or_hash(self, located: Sequence[ParameterMemory]) -> float:
        """Seconds that it took to register what is read in place."""
        programs = tuple(
            p
            for p in self._programs.values()
            if p.peer in self._peers and self._planned_for(p.peer) == p.peer
        )
        if self._packer.arena is None and not self._packer.holds(programs):
            self._packer.fit(programs)  # it was parted with, and there was no room for another
        sources, registered_s = addresses_of(located), 0.0
        if self.replica is None:
            registered_s = self._registered.cover(located[i] for i in self._read_in_place)
        else:
            sources = self.replica.take(sources)
        self._packer.sources = sources
        if self._packer.holds(programs):
            self._pack_all(programs)
        else:
            self._digests |= self._packer.hash_links(programs, self._pool)
        return registered_s

    def write(
        self,
        version: int,
        destinations: Sequence[str],
        deadline_s: float,
    ) -> Written:
        """Write the links to `destinations`. Idempotent.

        What is written for a second time is packed again first, unless from a replica: the weights must
        still have the digests of `prepare`, and the arena may have lost bits.

        Each rank begins with another destination, so that ranks which send to the same engines
        do not all begin with the same one. A link that could not begin before the deadline is
        FAILED, not UNKNOWN: nothing of it was sent.

        Raises:
            RoundAborted: a destination that this rank does not send to.
            TransferFailed: a GPU reports an error; nothing more can be done with it.
            TransferOutcomeUnknown: it does, and what was queued before may still go on.
        """
        with self._lock:
            check_destinations(self._programs, destinations)
            deadline = Deadline.after(deadline_s, "write")
            stores, far = self._stores, [name for name in destinations if name in self._peers]
            if stores is None or len(far) == len(destinations):
                return self._write(far, deadline)
            near = [name for name in destinations if name not in self._peers]
            if not far:
                return self._store(stores, version, near, deadline)
            return joined_results(
                destinations,
                submit(self._pool, self._write, far, deadline),
                lambda: self._store(stores, version, near, deadline),
            )

    def relay_write(
        self, round_id: RoundId, destinations: Sequence[str], deadline_s: float
    ) -> Written:
        """As `write`, but groups that are bound for it are relayed: only their roots are written.

        The outcome of a member that this rank does not write is that of the digest: OK once it
        is known. Whether its bytes arrived, it says itself.

        Raises:
            RoundAborted: a destination that this rank does not send to.
            TransferOutcomeUnknown: bytes may still land, and the outcomes cannot be told one by one.
        """
        with self._lock:
            check_destinations(self._programs, destinations)
            deadline = Deadline.after(deadline_s, "write")
            began, arena = time.perf_counter(), self._packer.arena
            digests = {n: self._relays[n].digest for n in destinations if n in self._relays}
            self._sent.update(digests)
            roots = {
                name: submit(self._pool, self._write_root, name, round_id, deadline)
                for name, relayed in self._relays.items()
                if name in relayed.roots
            }
            try:
                sent = self._write([n for n in destinations if n not in digests], deadline)
            except Exception as error:
                met = [job.exception() for job in roots.values()]
                if any(found is not None and is_unknown(found) for found in met):
                    raise TransferOutcomeUnknown(f"{error!r}; and of roots: {met}") from error
                raise
            finally:
                wait(roots.values())
            outcomes = {link.destination: link for link in sent.links}
            for name, digest in digests.items():
                outcomes[name] = self._relayed_outcome(name, roots.get(name), digest, arena)
            wire_s = max(time.perf_counter() - began, sent.wire_s)
            links = tuple(outcomes[n] for n in destinations)
            return Written(links, sent.pack_s, wire_s, sent.register_s)

    def close(self) -> None:
        """Unregister and free, once a running `write` is over. Idempotent.

        Arenas with writes of unknown outcome stay mapped.
        """
        with self._lock:
            self._pool.shutdown(wait=True)
            if self._stores is not None:
                self._stores.close()
            self._settle_doubt(renew=False)
            if self.replica is not None:
                self.replica.close()
            self._unbind()
            self._packer.close()
            self._registered.cover(())

    def _is_stored(self, binding: DestinationBinding) -> bool:
        return not self._writes or binding.endpoint.transport in self._stored_by

    def _check_binding(self, program: LinkProgram, binding: DestinationBinding) -> None:
        is_stored = self._is_stored(binding)
        if not is_stored:
            check_digest_kind(self._packer.memory.digest_kind, binding)
        check_binding(program, binding, staged=not is_stored)

    # --- links that kernels store ------------------------------------------------------------

    def _store(
        self, stores: StoredLinks, version: int, destinations: Sequence[str], deadline: Deadline
    ) -> Written:
        check_destinations(stores, destinations)
        if self.replica is not None and not self.replica.holds(version):
            reason = "replica: this version is not copied, and the weights may have changed"
            return Written(failed_links(destinations, reason), 0.0, 0.0)
        settled = self.replica is not None
        order = self._in_turn(destinations)
        links, wire_s = stores.write(version, order, deadline, settled=settled)
        return Written(tuple(links[name] for name in destinations), 0.0, wire_s)

    def _in_turn(self, destinations: Sequence[str]) -> tuple[str, ...]:
        """Each rank begins with another one."""
        shift = self._first_link % max(len(destinations), 1)
        return (*destinations[shift:], *destinations[:shift])

    # --- links and relays --------------------------------------------------------------------

    def _write(self, destinations: Sequence[str], deadline: Deadline) -> Written:
        order = self._in_turn(destinations)
        pack_s, self._pack_s = self._pack_s, 0.0
        register_s, self._register_s = self._register_s, 0.0
        lost = self._pack_again(name for name in order if name in self._sent)
        self._sent.update(order)
        ready = {
            name: self._relays[name].packed_link(self._peers[name].binding)
            if name in self._relays
            else self._ready.get(name)
            for name in order
            if name not in lost
        }
        packed = {name: link for name, link in ready.items() if link is not None}
        outcomes, wire_s = self._write_ready(packed, deadline)
        outcomes |= lost
        for name in order:
            if name not in outcomes and self.replica is not None:
                reason = (
                    "replica: nothing is packed for this link, and the weights may have changed"
                )
                outcomes[name] = failed_link(name, reason)
            elif name not in outcomes:
                outcomes[name], link_wire_s, link_pack_s = self._stream(name, deadline)
                wire_s += link_wire_s
                pack_s += link_pack_s
        links = tuple(outcomes[name] for name in destinations)
        return Written(links, pack_s, wire_s, register_s)

    def _planned_for(self, name: str) -> str:
        """The link of the plan that delivers what `name` gets: all members get what the first does."""
        return self._relays[name].leader if name in self._relays else name

    def _unbind(self) -> None:
        for relayed in self._relays.values():
            relayed.close()
        self._programs, self._relays = {}, {}
        self._forget()

    def _forget(self) -> None:
        """Nothing is prepared."""
        self._digests, self._sent = {}, set()
        self._forget_packed()

    def _forget_packed(self) -> None:
        self._ready, self._offsets = {}, {}
        for relayed in self._relays.values():
            relayed.forget()

    def _pack_all(self, programs: Sequence[LinkProgram]) -> None:
        offset = 0
        for program in programs:
            self._offsets[program.peer] = offset
            self._digests[program.peer], offset = self._pack(program, offset)

    def _pack(self, program: LinkProgram, offset: int) -> tuple[str, int]:
        """Pack and hash a link at `offset`; its digest, and where the next one may begin."""
        peer = program.peer
        pack, digest, after = self._packer.pack(program, offset)
        if peer in self._relays:
            packed = {part.op: part.address for turn in pack.turns for part in turn}
            self._relays[peer].keep(self._packer.memory, self._packer.sources, packed, digest)
        else:
            self._ready[peer] = self._packer.link_to(self._peers[peer], program, pack, digest)
        return digest, after

    def _pack_again(self, names: Iterable[str]) -> dict[str, LinkOutcome]:
        """Before links are written again; outcomes of those whose parameters are others than before."""
        lost: dict[str, LinkOutcome] = {}
        if self.replica is not None:
            return lost
        found: dict[str, str] = {}
        for name in names:
            planned = self._planned_for(name)
            if planned in self._offsets and planned not in found:
                found[planned], _ = self._pack(self._programs[planned], self._offsets[planned])
            if planned in found and found[planned] != self._digests[planned]:
                reason = "the weights have changed since this version was prepared"
                lost[name] = failed_link(name, reason)
        return lost

    def _write_root(self, root: str, round_id: RoundId, deadline: Deadline) -> Carried:
        """In a thread of the pool."""
        worker, binding = self.manifest.worker, self._peers[root].binding
        return self._relays[root].write_root(self.transport, worker, binding, round_id, deadline)

    def _relayed_outcome(
        self, name: str, written: Future[Carried] | None, digest: str, arena: Buffer | None
    ) -> LinkOutcome:
        if written is not None and (error := written.exception()) is not None:
            return self._failed(name, error, arena)
        if not digest:
            return failed_link(name, "arena_nbytes: too small to hold a relayed link")
        sent = Carried(0, 0.0) if written is None else written.result()
        return LinkOutcome(name, LinkStatus.OK, sent.nbytes, digest, wire_s=sent.wire_s)

    # --- whole-shard arena -------------------------------------------------------------------

    def _write_ready(
        self, ready: Mapping[str, PackedLink], deadline: Deadline
    ) -> tuple[dict[str, LinkOutcome], float]:
        """Write packed links side by side; outcomes, and seconds from first to last."""
        began, arena = time.perf_counter(), self._packer.arena
        writes = {
            name: submit(self._pool, self._write_batches, link.batches, deadline)
            for name, link in ready.items()
        }
        wait(writes.values())
        wire_s = time.perf_counter() - began
        outcomes = {
            name: self._succeeded(name, ready[name].digest, written.result())
            if (error := written.exception()) is None
            else self._failed(name, error, arena)
            for name, written in writes.items()
        }
        return outcomes, wire_s

    # --- ring --------------------------------------------------------------------------------

    def _stream(self, name: str, deadline: Deadline) -> tuple[LinkOutcome, float, float]:
        """Pack one half of the arena while the other half is on the wire."""
        digest = self._digests.get(self._planned_for(name))
        if digest is None:
            reason = "not prepared: nothing says what the weights of this version are"
            return failed_link(name, reason), 0.0, 0.0
        ring = self._packer.ring(self._programs[name], self._peers[name])
        in_flight: Future[float] | None = None
        began, waited, wire_s = time.perf_counter(), 0.0, 0.0
        try:
            for batch in itertools.chain(ring, (None,)):
                if in_flight is not None:
                    paused = time.perf_counter()
                    wire_s += in_flight.result()
                    waited += time.perf_counter() - paused
                if batch is not None:
                    in_flight = submit(self._pool, self._write_batches, (batch,), deadline)
            outcome = self._succeeded(name, digest, wire_s)
        # The boundary of a link: whatever it meets, the outcomes of the other links must be told.
        except Exception as error:  # noqa: BLE001
            outcome = self._stopped(name, error, in_flight)
        finally:
            if in_flight is not None:
                wait((in_flight,))
        return outcome, wire_s, time.perf_counter() - began - waited

    def _stopped(self, name: str, error: Exception, in_flight: Future[float] | None) -> LinkOutcome:
        """Of a link whose packing or writing raised `error`: what is on the wire has the last word."""
        written = None if in_flight is None else in_flight.exception()
        if written is None and not isinstance(error, WindlassError):
            _log.error("packing for %s failed", name, exc_info=error)
            return failed_link(name, f"{type(error).__name__}: {error}")
        return self._failed(name, error if written is None else written, self._packer.arena)

    # --- both --------------------------------------------------------------------------------

    def _write_batches(self, batches: Sequence[WriteBatch], deadline: Deadline) -> float:
        """In a thread of the pool; returns seconds."""
        began = time.perf_counter()
        for batch in batches:
            deadline.check_before_more()
            self.transport.write(batch, deadline_s=max(deadline.remaining_s, 0.001))
        return time.perf_counter() - began

    def _succeeded(self, name: str, digest: str, wire_s: float) -> LinkOutcome:
        nbytes = self._programs[name].nbytes
        return LinkOutcome(name, LinkStatus.OK, nbytes, digest, wire_s=wire_s)

    def _failed(self, name: str, error: BaseException, arena: Buffer | None) -> LinkOutcome:
        status, reason = status_of(error), f"{type(error).__name__}: {error}"
        if not isinstance(error, WindlassError):
            _log.error("writing to %s failed", name, exc_info=error)
        if status is LinkStatus.UNKNOWN:
            self._abandon(arena)
        return failed_link(name, reason, status)

    def _settle_doubt(self, *, renew: bool = True) -> None:
        """With a replica: part with memory that a write of unknown outcome may still read."""
        if self.replica is not None and self.replica.in_doubt:
            try:
                self.replica.settle(renew=renew)
            finally:  # no memory for another replica: the arena is in doubt all the same
                self._packer.abandon(renew=renew)

    def _abandon(self, arena: Buffer | None) -> None:
        if self.replica is not None:
            # It may be read again in this round, since nothing writes to it before the next.
            self.replica.doubt()
            return
        if arena is not None and arena is self._packer.arena:
            self._forget_packed()
            try:
                self._packer.abandon()
            except (WindlassError, OSError, MemoryError):  # the outcome counts: links find no arena
                _log.exception("%s: no memory for another arena", self.manifest.worker)
