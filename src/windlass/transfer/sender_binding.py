"""Binds a sending rank: its links, and the memory that they are sent from.

A link is the part of a plan from this rank to one destination. It is sent from the arena (memory for packed bytes), from
the replica (a copy of the weights), and from registered parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from typing import final

from windlass.config import ReplicaPlace
from windlass.errors import ConfigError, PlanError, ProtocolError, WindlassError
from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import Buffer
from windlass.memory.packing import ALIGNMENT
from windlass.planning.plan import TransferPlan
from windlass.planning.program import LinkProgram
from windlass.transfer.arena import memory_of
from windlass.transfer.bind import SentLinks
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.packer import Packer, packed_capacity
from windlass.transfer.registration import RegisteredMemory
from windlass.transfer.replica import replica_of
from windlass.transfer.stored_links import StoredLinks
from windlass.transports.base import MemoryRegion, OneSidedTransport

_log = logging.getLogger(__name__)


@final
class SenderBinding:
    """Links of one `Sender`, and the memory that they are sent from. Not thread-safe.

    Args:
        transport: see `Sender`.
        manifest: manifest of the rank.
        arena_nbytes: see `Sender`.
        registered: see `Sender`.
        replica: see `Sender`.
        threads: threads that copy in host memory.

    Attributes:
        links: links of the last `connect` or `change_links`.
        packer: packs links into the arena.
        replica: copy of the parameters that are sent unpacked; None without a replica.
        stores: links that GPU kernels store; None if the transport cannot map memory of peers.
        writes: whether the transport writes links; False if GPU kernels store all links.
        registered: registrations of the parameters that are sent in place.

    Raises:
        ConfigError: `arena_nbytes` is neither 0 nor at least 128, or the transport cannot send from the requested
            replica.
    """

    def __init__(
        self,
        transport: OneSidedTransport,
        manifest: ShardManifest,
        *,
        arena_nbytes: int,
        registered: Sequence[MemoryRegion],
        replica: ReplicaPlace,
        threads: Executor,
    ) -> None:
        if arena_nbytes != 0 and arena_nbytes < 2 * ALIGNMENT:
            raise ConfigError(
                f"arena_nbytes: must be 0 or at least {2 * ALIGNMENT}, got {arena_nbytes}"
            )
        self._manifest = manifest
        self.replica = replica_of(manifest, replica, transport, threads)
        own = memory_of(transport)
        self.registered = RegisteredMemory(manifest.worker, transport, own, registered)
        self.packer = Packer(transport, own, arena_nbytes)
        mapper, self.writes = transport.mapper, not transport.traits.strided_stores
        self.stores = None if mapper is None else StoredLinks(mapper, manifest.worker)
        stored_by = {o.transport for o in transport.offers() if o.traits.strided_stores}
        self.links = SentLinks(own.digest_kind, stored_by if self.writes else None)

    def connect(self, plan: TransferPlan, bindings: Sequence[DestinationBinding]) -> None:
        """Replace all links with the links of a plan part (`TransferPlan.parts`). Allocate and register the arena.

        Raises:
            PlanError: the plan was made for another layout, a destination has no binding, or the arena is too small. With
                a replica, the arena must hold all packed payloads at once.
            BindingsRefused: some destinations offer memory that cannot be written, or use another digest algorithm.
            RegionError, TransferFailed: memory cannot be registered or allocated.
            PeerUnreachable: see `PeerMapper.map_region`.
            TransferOutcomeUnknown: kernels of an earlier write may still run.
        """
        if self.stores is not None:
            self.stores.end(tuple(self.links.programs))
        self.links = self.links.without_links()
        self.change_links(plan, bindings, ())

    def change_links(
        self,
        plan: TransferPlan | None,
        bindings: Sequence[DestinationBinding],
        gone: Collection[str],
    ) -> None:
        """End some links, bind new links, and keep all others.

        Args:
            plan: this rank's part of a plan for the new destinations; None without new destinations.
            bindings: bindings of the new destinations.
            gone: destinations whose links end, including destinations that are bound again.

        Raises:
            BindingsRefused: see `connect`. All links are unchanged.
            PlanError, RegionError, TransferFailed, PeerUnreachable, TransferOutcomeUnknown: see `connect`. After such an
                error, the caller must call `connect`.
        """
        links, new = self.links.changed(self._manifest, plan, bindings, gone)
        if self.stores is not None:
            self.stores.end({*gone, *new.programs})
        self.settle_doubt()
        self.links = self.links.without_links()
        if self.stores is not None:
            self.stores.bind(new.stored, new.bindings)
        if self.writes:
            self.packer.fit(links.written, kept=links.programs.keys() - new.programs.keys())
        if self.replica is not None:
            if not self.packer.holds(links.written):
                raise PlanError(
                    "arena_nbytes: with a replica it must be 0 or at least "
                    f"{packed_capacity(links.written)}, got {self.packer.slot.nbytes}"
                )
            stored = {op.src_parameter for program in links.stored for op in program.ops}
            self.replica.fit((*links.read_in_place, *sorted(stored)))
        self.links = links

    def bind_copies(
        self, copies: Mapping[str, str], bindings: Mapping[str, DestinationBinding]
    ) -> tuple[LinkProgram, ...]:
        """Bind links to all members of relay groups except the first of each. They exist until the next `connect`.

        Each of these links has the same bytes as the planned link to the first member of the group.

        Args:
            copies: member -> first member of its group. Members are ignored if this rank has no planned link to the
                first member.
            bindings: bindings of all these members.

        Returns:
            The planned links to the first members.

        Raises:
            ProtocolError: GPU kernels write this rank's links, but only a transport can write links to a relay group.
            PlanError: a member has no binding.
            RegionError: bytes would be written outside the regions of a member.
        """
        if self.stores is not None:
            raise ProtocolError(
                "bind_copies: GPU kernels write the links of this rank, but a relay needs writes by a transport"
            )
        self.links, planned = self.links.with_copies(copies, bindings)
        return planned

    def settle_doubt(self, *, renew: bool = True) -> None:
        """With a replica, abandon the replica and the arena if a write of unknown outcome may still read them.

        With `renew`, allocate both again.

        Raises:
            RegionError, TransferFailed: new memory cannot be allocated or registered.
        """
        if self.replica is not None and self.replica.in_doubt:
            try:
                self.replica.settle(renew=renew)
            finally:
                # Abandon the arena even if the allocation of a new replica fails.
                self.packer.abandon(renew=renew)

    def abandon(self, arena: Buffer | None) -> bool:
        """Abandon the memory that a write of unknown outcome may still read. Return whether the arena was abandoned.

        With a replica, only mark the replica as in doubt; `settle_doubt` abandons replica and arena later. Without a
        replica, abandon `arena`. Do nothing if it is already abandoned.
        """
        if self.replica is not None:
            # Later writes of this round still read the copy. `settle_doubt` abandons it before the next round.
            self.replica.in_doubt = True
            return False
        if arena is None or arena is not self.packer.slot.arena:
            return False
        try:
            self.packer.abandon()
        except (WindlassError, OSError, MemoryError):
            # Without an arena, later links fail with a reason. The outcome of this link must still be reported.
            _log.exception("%s: no memory for another arena", self._manifest.worker)
        return True

    def close(self) -> None:
        """Unregister and free the memory. Memory from which late writes or kernels may still read stays allocated. Idempotent."""
        if self.stores is not None:
            self.stores.close()
        self.settle_doubt(renew=False)
        if self.replica is not None:
            self.replica.close()
        self.links = self.links.without_links()
        self.packer.close()
        self.registered.cover(())
