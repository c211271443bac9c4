"""Collective broadcast: every trainer rank is the root of one group with the engines that it sends to.

Nothing is gathered: a rank broadcasts the bytes it owns, each of them once. Both halves hold two
buffers, so that packing, the broadcast and loading overlap. An engine that belongs to several
groups goes through them in the order of the sources' names, which is the same everywhere: no ring
of waiting can form. A group that has failed is aborted, which releases the other members; the
controller forms it anew from whoever is left.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

from windlass.config import UpdateMode, XcclBackend
from windlass.errors import PlanError, ProtocolError, TransferError, TransferFailed
from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import PreparedCopies, StridedCopy
from windlass.net.clock import Deadline
from windlass.planning.plan import TransferPlan
from windlass.transfer.base import ParameterMemory, SendResult, failed_links
from windlass.transfer.bind import check_destinations
from windlass.transfer.bindings import (
    BucketPart,
    DestinationBinding,
    GroupOffer,
)
from windlass.transfer.buckets import cut_buckets, loads_of, signature_of_offer
from windlass.transfer.collective_group import Rendezvous, TorchBroadcastGroup, join_group
from windlass.transfer.destination import Destination
from windlass.transfer.source import SourceMemory, refuse_transforms
from windlass.transports.base import PeerEndpoint

__all__ = ["CollectiveReceiver", "CollectiveSender"]

STORE_DEADLINE_S = 60.0


@final
class CollectiveSender:
    """`SenderBackend` and `GroupMember` of `xccl`.

    Args:
        config: buckets and fabric.
        manifest, parameters: see `SourceMemory`.
        host: own address, that engines can reach.
    """

    def __init__(
        self,
        config: XcclBackend,
        manifest: ShardManifest,
        parameters: Callable[[], Sequence[ParameterMemory]],
        host: str,
    ) -> None:
        self._config, self._host = config, host
        self._source = SourceMemory(manifest, parameters)
        self._rendezvous: Rendezvous | None = None
        self._offer: GroupOffer | None = None
        self._plan_tables = ""
        self._buckets: tuple[tuple[BucketPart, ...], ...] = ()
        self._group: TorchBroadcastGroup | None = None
        self._packs: tuple[PreparedCopies, ...] = ()
        self._pack_s = 0.0

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """See `SenderBackend.connect`. None for a rank that sends nothing."""
        self.close()
        self._source.bind(plan, bindings)
        programs = self._source.programs
        if not programs:
            return None
        worker = self._source.manifest.worker
        parts, sizes = cut_buckets(
            self._source.manifest, programs.values(), self._config.bucket_nbytes
        )
        self._rendezvous = Rendezvous(self._host, STORE_DEADLINE_S)
        self._plan_tables = _plan_tables(plan)
        self._offer = GroupOffer(
            name=f"{worker}#{os.urandom(4).hex()}",
            members=(worker, *programs),
            host=self._host,
            port=self._rendezvous.port,
            parts=parts,
            bucket_nbytes=sizes,
        )
        self._buckets = tuple(
            tuple(part for part in parts if part.bucket == bucket) for bucket in range(len(sizes))
        )
        return self._offer

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:
        """See `GroupMember.join`: the one group that was offered."""
        if self._offer is None or tuple(offers) != (self._offer,):
            raise ProtocolError(f"{self._source.manifest.worker}: asked to join a foreign group")
        self._group = join_group(
            self._offer,
            self._source.manifest.worker,
            fabric=self._config.fabric,
            num_buffers=self._config.num_buffers,
            signature=signature_of_offer(
                self._offer, self._source.manifest.digest(), self._plan_tables
            ),
            host=self._host,
            deadline=Deadline.after(deadline_s, "join"),
            hosted=self._rendezvous,
            gpu=self._source.memory.gpu,
        )

    def prepare(self, version: int) -> None:  # noqa: ARG002
        """Hash every link, and cut what packs the buckets, unless nothing has moved since."""
        began = time.perf_counter()
        if self._source.locate():
            self._forget_packs()
        if self._group is not None and not self._packs:
            self._packs = self._prepare_packs(self._group)
        self._source.hash_links()
        self._pack_s = time.perf_counter() - began

    def write(
        self,
        version: int,  # noqa: ARG002
        destinations: Sequence[str],
        deadline_s: float,
    ) -> SendResult:
        """See `SenderBackend.write`. All links succeed or fail together."""
        check_destinations(self._source.programs, destinations)
        deadline = Deadline.after(deadline_s, "broadcast")
        pack_s, self._pack_s = self._pack_s, 0.0
        began = time.perf_counter()
        try:
            group = _whole(self._group, self._offer, destinations)
            packed_s = self._broadcast(group, deadline)
        except TransferError as error:
            reason = f"{type(error).__name__}: {error}"
            links = failed_links(destinations, reason)
            return SendResult(links, pack_s, time.perf_counter() - began)
        wire_s = time.perf_counter() - began - packed_s
        return SendResult(self._source.delivered(destinations), pack_s + packed_s, wire_s)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if self._group is not None:
            self._group.abort()
        self._forget_packs()
        self._source.close()
        self._group = self._rendezvous = self._offer = None

    def _broadcast(self, group: TorchBroadcastGroup, deadline: Deadline) -> float:
        """All buckets; while one is on the wire the next is packed. Returns seconds of packing."""
        packed_s = 0.0
        for bucket, parts in enumerate(self._buckets):
            slot = bucket % group.num_buffers
            group.finish(slot, deadline.remaining_s)
            began = time.perf_counter()
            self._packs[bucket].run()
            packed_s += time.perf_counter() - began
            deadline.check_before_more()
            group.start(
                slot, parts[-1].offset + parts[-1].stop - parts[-1].start, deadline.remaining_s
            )
        for slot in range(group.num_buffers):
            group.finish(slot, deadline.remaining_s)
        group.drain(deadline.remaining_s)
        return packed_s

    def _prepare_packs(self, group: TorchBroadcastGroup) -> tuple[PreparedCopies, ...]:
        """From the parameters into the group's buffers, bucket by bucket."""
        return tuple(
            self._source.memory.prepare(
                [
                    StridedCopy.of_bytes(
                        int(self._source.addresses[part.parameter]) + part.start,
                        group.buffer(bucket % group.num_buffers) + part.offset,
                        part.stop - part.start,
                    )
                    for part in parts
                ],
                beside_transfers=True,
            )
            for bucket, parts in enumerate(self._buckets)
        )

    def _forget_packs(self) -> None:
        for pack in self._packs:
            pack.close()
        self._packs = ()


@final
class CollectiveReceiver:
    """`ReceiverBackend` and `GroupReceiver` of `xccl`.

    Args:
        config: as the sender's.
        manifest, addresses: see `Destination`.
        host: own address, that the other members can reach.
    """

    def __init__(
        self, config: XcclBackend, manifest: ShardManifest, addresses: Sequence[int], host: str
    ) -> None:
        self._config, self._host = config, host
        self._destination = Destination(manifest, addresses)
        self._source_digests: dict[str, str] = {}
        self._plan_tables = ""
        self._groups: dict[str, tuple[GroupOffer, TorchBroadcastGroup]] = {}
        self._fills: dict[str, tuple[PreparedCopies, ...]] = {}

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """See `ReceiverBackend.connect`."""
        self._leave()
        refuse_transforms(self._destination.manifest.worker, plan)
        self._destination.bind(plan, shadow=mode is UpdateMode.STAGED, staged=False)
        self._source_digests = dict(zip(plan.sources, plan.source_digests, strict=True))
        self._plan_tables = _plan_tables(plan)
        worker = self._destination.manifest.worker
        return DestinationBinding(
            worker,
            PeerEndpoint("xccl", self._host, ""),
            (),
            (),
            digest_kind=self._destination.digest_kind,
        )

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:
        """See `GroupMember.join`."""
        deadline = Deadline.after(deadline_s, "join")
        worker = self._destination.manifest.worker
        missing = sorted(set(self._destination.programs) - {offer.source for offer in offers})
        if missing:
            raise PlanError(f"{worker}: no group was offered by {', '.join(missing)}")
        for offer in sorted(offers, key=lambda offer: offer.source):
            if offer.source not in self._destination.programs or worker not in offer.members:
                raise PlanError(f"{worker}: group {offer.name} carries nothing for this rank")
            group = join_group(
                offer,
                worker,
                fabric=self._config.fabric,
                num_buffers=self._config.num_buffers,
                signature=signature_of_offer(
                    offer, self._source_digests[offer.source], self._plan_tables
                ),
                host=self._host,
                deadline=deadline,
                gpu=self._destination.memory.gpu,
            )
            self._groups[offer.source] = (offer, group)
            loads = loads_of(self._destination.programs[offer.source], offer)
            self._fills[offer.source] = tuple(
                self._destination.fill(
                    (load.op, group.buffer(bucket % group.num_buffers) + load.base)
                    for load in of_bucket
                )
                for bucket, of_bucket in enumerate(loads)
            )

    def receive(self, groups: Mapping[str, Sequence[str]], deadline_s: float) -> None:
        """See `GroupReceiver.receive`. What one group fails to bring does not keep back the rest."""
        deadline = Deadline.after(deadline_s, "receive")
        failed = []
        for source in sorted(groups):
            offer, group = self._groups.get(source, (None, None))
            try:
                self._receive(_whole(group, offer, groups[source]), source, deadline)
            except TransferError as error:
                failed.append(f"{source}: {error}")
        if failed:
            raise TransferFailed("; ".join(failed))

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:  # noqa: ARG002
        """See `ReceiverBackend.verify`."""
        return self._destination.verify(expected)

    def apply(self) -> None:
        """See `ReceiverBackend.apply`."""
        self._destination.apply()

    def close(self) -> None:
        """Leave all groups and free the shadow. Idempotent."""
        self._leave()
        self._destination.close()

    def _receive(self, group: TorchBroadcastGroup, source: str, deadline: Deadline) -> None:
        """All buckets of one group; while one is unpacked the next is on the wire."""
        sizes, slots = self._groups[source][0].bucket_nbytes, group.num_buffers
        fills = self._fills[source]
        for bucket in range(min(slots, len(sizes))):
            group.start(bucket, sizes[bucket], deadline.remaining_s)
        for bucket, fill in enumerate(fills):
            slot = bucket % slots
            group.finish(slot, deadline.remaining_s)
            fill.run()
            if bucket + slots < len(sizes):
                group.start(slot, sizes[bucket + slots], deadline.remaining_s)
        group.drain(deadline.remaining_s)
        for fill in fills:
            fill.check()

    def _leave(self) -> None:
        for _, group in self._groups.values():
            group.abort()
        for fill in itertools.chain.from_iterable(self._fills.values()):
            fill.close()
        self._groups, self._fills = {}, {}


def _whole(
    group: TorchBroadcastGroup | None, offer: GroupOffer | None, destinations: Sequence[str]
) -> TorchBroadcastGroup:
    """The group, if all of its members are told to enter.

    Raises:
        TransferFailed: it is broken, or somebody stays out: those who enter would wait in vain.
    """
    if group is None or offer is None:
        raise TransferFailed("no group was formed")
    absent = sorted(set(offer.members[1:]) - set(destinations))
    if absent:
        group.abort()
        raise TransferFailed(f"group {offer.name}: {', '.join(absent)} does not enter")
    if group.broken:
        raise TransferFailed(f"group {offer.name}: is broken")
    return group


def _plan_tables(plan: TransferPlan) -> str:
    """What every part of one plan has in common."""
    tables = (plan.sources, plan.destinations, plan.source_digests, plan.destination_digests)
    return repr(tables)
