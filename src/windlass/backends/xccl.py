"""Backend `xccl`: every trainer rank broadcasts to the engine ranks that need its bytes.

Each trainer rank is the root (rank 0, the sender) of one group with these engine ranks. No rank gathers the model: a
rank broadcasts each byte of its own shard once. Both halves use several buffers (`XcclBackend.num_buffers`), so that
packing, broadcasting and loading overlap. An engine in several groups enters them in the order of the source names. All
engines use this order, so that groups cannot deadlock. If a broadcast fails, each member aborts the group, so that no
member waits until its deadline; the controller then binds the remaining ranks again, which forms new groups.

A bucket is the content of one broadcast: raw parameter bytes. Each receiver copies its boxes out of
the bucket with the ops of its plan part. Bytes that no engine needs are not sent.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import msgspec
import xxhash

from windlass.backends.collective_group import Rendezvous, TorchBroadcastGroup, join_group
from windlass.config import BackendEntry, UpdateMode, XcclBackend
from windlass.control.backend import OwnPathBackend
from windlass.control.binding import Binding
from windlass.control.delivery import Delivery, Order
from windlass.control.group_messages import JoinGroups, Receive
from windlass.control.links import LinkLedger
from windlass.control.messages import Command, Result, Write
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.errors import (
    PlanError,
    ProtocolError,
    TransferError,
    TransferFailed,
    UnsupportedLayout,
)
from windlass.layout.manifest import ShardManifest
from windlass.memory.packing import PreparedCopies, StridedCopy, aligned
from windlass.memory.ranges import joined_ranges
from windlass.net.clock import Deadline
from windlass.net.messages import RoundId
from windlass.planning.plan import TransferPlan
from windlass.planning.program import BoundOp, LinkProgram
from windlass.transfer.base import (
    ParameterMemory,
    RankReceiver,
    RankSender,
    ReceiverBackend,
    SenderBackend,
    failed_links,
)
from windlass.transfer.bind import check_destinations
from windlass.transfer.bindings import (
    BucketPart,
    DestinationBinding,
    GroupOffer,
    Written,
)
from windlass.transfer.destination import Destination
from windlass.transfer.source import SourceMemory, refuse_transforms
from windlass.transports.peers import PeerEndpoint

STORE_DEADLINE_S = 60.0
"""Timeout in seconds of the store that a source hosts."""


@final
class Xccl(OwnPathBackend):
    """Collectives: sender and receivers take part in each write, so a rank that fails breaks the group."""

    def __init__(self, options: XcclBackend) -> None:
        self._options = options

    def sender(self, sender: RankSender, host: str) -> SenderBackend:
        """Return the trainer half: it broadcasts to all engine ranks that need its bytes."""
        return CollectiveSender(self._options, sender.manifest, sender.parameters, host)

    def receiver(self, receiver: RankReceiver, host: str) -> ReceiverBackend:
        """Return the engine half: it receives the broadcasts of all trainer ranks whose bytes it needs."""
        return CollectiveReceiver(self._options, receiver.manifest, receiver.live_addresses, host)

    def parts(self, plan: TransferPlan, *, sending: bool) -> dict[str, TransferPlan]:
        """Return each rank's part of the plan. Every part contains the names of all tensors of the plan.

        The members of a group compare these names before the first broadcast.
        """
        return plan.parts(sending=sending, all_names=True)

    def delivery(self, binding: Binding) -> Delivery:  # noqa: ARG002
        """Return a delivery that commands engine ranks to receive while it commands trainer ranks to write."""
        return GroupDelivery()

    def is_spent(self, report: UpdateReport) -> bool:
        """Return whether all ranks must bind again.

        Return True if the round failed or left out an engine, because the round's broadcast groups may then be broken.
        """
        return report.outcome is not RoundOutcome.PUBLISHED or bool(report.left_out)


@final
class GroupDelivery(Delivery):
    """Delivery by collectives: each source sends to all its engine ranks at once, and these receive at the same time."""

    def write(
        self,
        missing: Mapping[str, tuple[str, ...]],
        *,
        ledger: LinkLedger,
        active: Collection[str],
        version: int,
        deadline_s: float,
    ) -> list[Order]:
        """Return one `Receive` for each destination, followed by one `Write` for each source.

        A source broadcasts to all its active destinations, including destinations that already have the bytes. The
        round does not wait for the answers of the destinations, because VERIFY checks the bytes. For arguments see
        `Delivery.write`.
        """
        links = ledger.among(missing, active)
        groups: dict[str, dict[str, tuple[str, ...]]] = {}
        for source, destinations in links.items():
            for worker in destinations:
                groups.setdefault(worker, {})[source] = destinations
        return [
            *(
                Order(worker, Receive(version, own, deadline_s), expects_reply=False)
                for worker, own in groups.items()
            ),
            *(
                Order(source, Write(version, to, deadline_s), destinations=to)
                for source, to in links.items()
            ),
        ]


# --- halves ---------------------------------------------------------------------------------


@final
class CollectiveSender:
    """Trainer half: root of one group. `host`: this rank's address that engines can reach."""

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
        """Bind a plan part, and return the offer of a broadcast group for its links; see `SenderBackend.connect`.

        Return None if this rank sends nothing.
        """
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

    def carry_out(self, command: Command, round_id: RoundId) -> Result | None:  # noqa: ARG002
        """Carry out `JoinGroups`: join the group that this rank offered. See `join`.

        Raises:
            ProtocolError: the command is not `JoinGroups`.
        """
        if not isinstance(command, JoinGroups):
            raise ProtocolError(f"a group's source cannot carry out {type(command).__name__}")
        self.join(command.offers, command.deadline_s)
        return None

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:
        """Join the group that `connect` offered. Collective: all members of the group join at the same time.

        Raises:
            ProtocolError: `offers` does not contain exactly this group.
            ConfigError, PlanError, PeerTimeout, TransferFailed: see `join_group`.
        """
        if self._offer is None or tuple(offers) != (self._offer,):
            raise ProtocolError(
                f"{self._source.manifest.worker}: join: `offers` must contain only the group that this rank offered"
            )
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
        """Compute the digest of every link.

        If this rank has joined a group, first prepare the copies into the group's buckets. Reuse the copies that were
        prepared earlier if no parameter has moved.
        """
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
    ) -> Written:
        """Broadcast the buckets; see `SenderBackend.write`. All links succeed or fail together.

        Raises:
            RoundAborted: this rank has no link to one of the destinations.
        """
        check_destinations(self._source.programs, destinations)
        deadline = Deadline.after(deadline_s, "broadcast")
        pack_s, self._pack_s = self._pack_s, 0.0
        began = time.perf_counter()
        try:
            group = _whole(self._group, self._offer, destinations)
            packed_s = self._broadcast(group, deadline)
        except TransferError as error:
            if self._group is not None:
                # The receivers still wait for the other buckets, and must not take those of a later write for them.
                self._group.abort()
            reason = f"{type(error).__name__}: {error}"
            links = failed_links(destinations, reason)
            return Written(links, pack_s, time.perf_counter() - began)
        wire_s = time.perf_counter() - began - packed_s
        return Written(self._source.delivered(destinations), pack_s + packed_s, wire_s)

    def close(self) -> None:
        """Leave the group, and close the source and the copies that were prepared for writes. Idempotent."""
        if self._group is not None:
            self._group.abort()
        self._forget_packs()
        self._source.close()
        self._group = self._rendezvous = self._offer = None

    def _broadcast(self, group: TorchBroadcastGroup, deadline: Deadline) -> float:
        """Pack and broadcast all buckets; return the seconds that packing took.

        With several buffers, a bucket is packed while the buckets before it are being sent.
        """
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
        """Return the prepared copies from the parameters into the group's buffers, one object per bucket."""
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
        """Close and drop the prepared copy operations that fill the buckets. The buckets stay allocated."""
        for pack in self._packs:
            pack.close()
        self._packs = ()


@final
class CollectiveReceiver:
    """Engine half: member of the groups of its sources. `host`: this rank's address that members can reach."""

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
        """Leave the groups of an earlier plan, and bind the plan. If the mode is STAGED, bind it to a shadow copy.

        Return a binding without memory addresses, because the bytes arrive by broadcasts.

        Raises:
            PlanError: the plan quantises tensors, or is for another layout.
            TransferError, TransportUnavailable, OSError: see `Destination.bind`.
        """
        self._leave()
        refuse_transforms(self._destination.manifest.worker, plan)
        self._destination.bind(plan, shadow=mode is UpdateMode.STAGED, staged=False)
        self._source_digests = dict(zip(plan.sources, plan.source_digests, strict=True))
        self._plan_tables = _plan_tables(plan)
        return self._destination.unaddressed_binding(PeerEndpoint("xccl", self._host, ""))

    def carry_out(self, command: Command, round_id: RoundId) -> Result | None:  # noqa: ARG002
        """Carry out `JoinGroups` or `Receive`. See `join` and `receive`.

        Raises:
            ProtocolError: the command is neither `JoinGroups` nor `Receive`.
        """
        match command:
            case JoinGroups():
                self.join(command.offers, command.deadline_s)
            case Receive():
                self.receive(command.groups, command.deadline_s)
            case _:
                raise ProtocolError(f"a group's member cannot carry out {type(command).__name__}")
        return None

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:
        """Join the group that each source offers, in order of the source names. Collective.

        Also prepare the copies from the groups' buffers into the parameters or the shadow copy.

        Raises:
            PlanError: a source offered no group, or a group has nothing for this rank; see also `join_group` and
                `loads_of`.
            ConfigError, PeerTimeout, TransferFailed: see `join_group`.
        """
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
                self._destination.prepare_fill(
                    (load.op, group.buffer(bucket % group.num_buffers) + load.base)
                    for load in of_bucket
                )
                for bucket, of_bucket in enumerate(loads)
            )

    def receive(self, groups: Mapping[str, Sequence[str]], deadline_s: float) -> None:
        """Receive the broadcasts of all sources, and copy this rank's boxes out of them.

        If the broadcasts of one source fail, still receive the broadcasts of the other sources.

        Args:
            groups: source -> destinations that take part in the source's broadcasts.
            deadline_s: seconds for all broadcasts together.

        Raises:
            TransferFailed: the broadcasts of at least one source failed.
        """
        deadline = Deadline.after(deadline_s, "receive")
        failed = []
        for source in sorted(groups):
            offer, group = self._groups.get(source, (None, None))
            try:
                self._receive(_whole(group, offer, groups[source]), source, deadline)
            except TransferError as error:
                if group is not None:
                    # Broadcasts that have begun may still fill the buffers, so no later write may use them.
                    group.abort()
                failed.append(f"{source}: {error}")
        if failed:
            raise TransferFailed("; ".join(failed))

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:  # noqa: ARG002
        """Compare the received bytes with the expected digests; return the names of sources that differ."""
        return self._destination.verify(expected)

    def apply(self) -> None:
        """Copy the shadow copy into the live weights, if there is one."""
        self._destination.apply()

    def close(self) -> None:
        """Leave all groups and free the shadow copy. Idempotent."""
        self._leave()
        self._destination.close()

    def _receive(self, group: TorchBroadcastGroup, source: str, deadline: Deadline) -> None:
        """Receive all buckets of one source's group, and unpack each bucket while the next buckets arrive.

        Raises:
            TransferFailed: a broadcast failed or did not end by the deadline, or a cast overflowed.
            TransferOutcomeUnknown: see `TorchBroadcastGroup.drain`.
        """
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
        """Abort all groups, and free the prepared copies that read the groups' buckets."""
        for _, group in self._groups.values():
            group.abort()
        for fill in itertools.chain.from_iterable(self._fills.values()):
            fill.close()
        self._groups, self._fills = {}, {}


def _whole(
    group: TorchBroadcastGroup | None, offer: GroupOffer | None, destinations: Sequence[str]
) -> TorchBroadcastGroup:
    """Return the group if it can broadcast.

    Raises:
        TransferFailed: no group was formed, or the group is broken.
        TransferFailed: `destinations` lacks a receiver of the group. The group is then aborted, because a broadcast
            without this receiver would never end.
    """
    if group is None or offer is None:
        raise TransferFailed("no group was formed")
    absent = sorted(set(offer.members[1:]) - set(destinations))
    if absent:
        group.abort()
        raise TransferFailed(
            f"group {offer.name}: all members must take part, got a broadcast without {', '.join(absent)}"
        )
    if group.broken:
        raise TransferFailed(f"group {offer.name} is broken after an earlier failure")
    return group


def _plan_tables(plan: TransferPlan) -> str:
    """Return a text with the rank names and manifest digests of a plan part. All parts of a plan give the same text."""
    tables = (plan.sources, plan.destinations, plan.source_digests, plan.destination_digests)
    return repr(tables)


# --- buckets --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """An op, or a part of an op, whose source bytes are all in one bucket.

    `base` is the place of the source parameter's byte 0, as an offset in the bucket. It may be negative,
    because the bucket may contain only later bytes of the parameter.
    """

    op: BoundOp
    base: int


def cut_buckets(
    manifest: ShardManifest, programs: Iterable[LinkProgram], capacity_nbytes: int
) -> tuple[tuple[BucketPart, ...], tuple[int, ...]]:
    """Assign the parameter bytes of a trainer rank to buckets.

    Args:
        manifest: layout of the rank's parameters.
        programs: links of the rank. A byte is sent only if a link reads it, and only once even if several links read it.
        capacity_nbytes: maximum size of a bucket, a multiple of `ALIGNMENT`.

    Returns:
        Parts of all buckets in order, and the size of each bucket in bytes. A part is a range of one parameter's bytes.
    """
    parts: list[BucketPart] = []
    sizes: list[int] = []
    used = capacity_nbytes
    needed = joined_ranges(
        (op.src_parameter, op.src_offset, op.src_offset + op.src_extent_nbytes)
        for program in programs
        for op in program.ops
    )
    for parameter, start, stop in needed:
        spec = manifest.parameters[parameter]
        at = start
        while at < stop:
            if used >= capacity_nbytes:
                sizes.append(0)
                used = 0
            end = min(stop, at + capacity_nbytes - used)
            parts.append(
                BucketPart(
                    spec.name,
                    spec.dtype.value,
                    spec.nbytes,
                    parameter,
                    at,
                    end,
                    len(sizes) - 1,
                    used,
                )
            )
            sizes[-1] = used + end - at
            used += aligned(end - at)
            at = end
    return tuple(parts), tuple(sizes)


def loads_of(program: LinkProgram, offer: GroupOffer) -> tuple[tuple[Load, ...], ...]:
    """Return, for each bucket of a source, the copies that a receiver makes out of the bucket.

    Args:
        program: link from the source to the receiver.
        offer: group of the source, with the content of its buckets.

    Raises:
        PlanError: the buckets lack a byte that the link's ops read, or a part's dtype differs from the op's.
        UnsupportedLayout: a bucket ends inside an element that the link needs.
    """
    by_parameter: dict[int, list[BucketPart]] = {}
    for part in offer.parts:
        by_parameter.setdefault(part.parameter, []).append(part)
    loads: list[list[Load]] = [[] for _ in offer.bucket_nbytes]
    for op in program.ops:
        numel = 0
        for part in by_parameter.get(op.src_parameter, ()):
            if part.dtype != op.src_dtype.value:
                raise PlanError(
                    f"group {offer.name}: dtype of {part.name!r} must be {op.src_dtype}, got {part.dtype}"
                )
            for piece in clip(op, part.start, part.stop):
                loads[part.bucket].append(Load(piece, part.offset - part.start))
                numel += math.prod(piece.sizes)
        if numel != math.prod(op.sizes):
            raise PlanError(
                f"group {offer.name}: the buckets must contain {math.prod(op.sizes)} elements of parameter {op.src_parameter} "
                f"from byte {op.src_offset}, got {numel}"
            )
    return tuple(tuple(of_bucket) for of_bucket in loads)


def clip(op: BoundOp, start: int, stop: int) -> Iterator[BoundOp]:
    """Yield the parts of an op whose source elements are inside bytes [start, stop) of the source parameter.

    Raises:
        UnsupportedLayout: `start` or `stop` is inside an element that the op reads.
    """
    reach = op.src_extent_nbytes
    first, last = op.src_offset, op.src_offset + reach
    if last <= start or first >= stop:
        return
    if start <= first and last <= stop:
        yield op
        return
    dim = max(range(len(op.sizes)), key=lambda d: op.src_strides[d] if op.sizes[d] > 1 else -1)
    size, stride = op.sizes[dim], op.src_strides[dim]
    if size == 1 or stride <= 0:
        raise UnsupportedLayout(
            f"xccl: a bucket must contain whole elements, got bytes [{start}, {stop}), which cut the element at byte {first}"
        )
    inner = reach - (size - 1) * stride
    whole_from = max(-(-(start - first) // stride), 0)
    whole_to = min((stop - inner - first) // stride, size - 1)
    touched_from = max((start - inner - first) // stride + 1, 0)
    touched_to = min(-(-(stop - first) // stride) - 1, size - 1)
    if whole_from <= whole_to:
        yield _narrow(op, dim, whole_from, whole_to - whole_from + 1)
    for index in range(touched_from, touched_to + 1):
        if not whole_from <= index <= whole_to:
            yield from clip(_narrow(op, dim, index, 1), start, stop)


def signature_of_offer(offer: GroupOffer, source_digest: str, plan: str) -> str:
    """Return a digest that all members of a group compare before the first broadcast. It must be equal at all members.

    The digest covers `offer` (members, names, dtypes, sizes, order and buckets), `source_digest` (digest of the source's
    manifest) and `plan` (tables of rank names and manifest digests, equal in all parts of one plan).
    """
    digest = xxhash.xxh3_128(msgspec.msgpack.encode(offer))
    digest.update(f"{source_digest} {plan}".encode())
    return digest.hexdigest()


def _narrow(op: BoundOp, dim: int, index: int, count: int) -> BoundOp:
    """Return the part of an op with the indices [index, index + count) of one dim."""
    sizes = (*op.sizes[:dim], count, *op.sizes[dim + 1 :])
    return replace(
        op,
        sizes=sizes,
        src_sizes=sizes,
        src_offset=op.src_offset + index * op.src_strides[dim],
        dst_offset=op.dst_offset + index * op.dst_strides[dim],
        nbytes=math.prod(sizes) * op.dst_dtype.itemsize,
    )


BACKEND = BackendEntry(Xccl)
