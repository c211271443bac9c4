"""An engine rank that takes part in a relay: verify each chunk that lands, pass it on, say so.

A chunk counts once its bytes in this rank's memory have the digest that the trainer computed; only then
is it written to the next engines, by one-sided writes from where it lies. Everything that is written here in
a round is written by those who were let in by the inlet, and the round's answer is given only when each of
them has ended: so the answer settles whether bytes may still land.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never, final

import numpy as np

from windlass.errors import PlanError, TransferError, TransferOutcomeUnknown
from windlass.execution.bind import check_binding
from windlass.execution.bindings import DestinationBinding
from windlass.execution.payload import Payload, UInt64Array, payload_of
from windlass.execution.receiver import Receiver
from windlass.execution.relay_inlet import (
    Arrived,
    Ended,
    Interrupted,
    LaneEnded,
    RelayInlet,
)
from windlass.execution.relay_outlet import WRITES_AT_ONCE, Outlet
from windlass.execution.relay_wire import ChunkLanded, LaneEnd, RelayAddress
from windlass.memory.digest import new_digest
from windlass.memory.packing import bytes_at
from windlass.planning.relay import RelayGroup, children_of, depths_of
from windlass.telemetry.clock import Deadline
from windlass.transports.base import OneSidedTransport, WriteBatch

__all__ = ["RelayNode", "RelayResult", "write_chunk"]

PATIENCE_SPREAD = 0.25
"""Of the time for a relay: between the ends of the patience of the first and the last in a lane."""

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RelayResult:
    """How the relay went at one rank.

    Attributes:
        missing: sources whose link is not complete here.
        unknown_from: upstreams whose bytes may still land here.
        unknown_to: engines in which bytes of this rank may still land.
        unreached: engines that did not let this rank in; nothing was written to them.
        nbytes: passed on. wire_s: from the first chunk here to the last one passed on.
    """

    missing: tuple[str, ...]
    unknown_from: tuple[str, ...]
    unknown_to: tuple[str, ...]
    unreached: tuple[str, ...]
    nbytes: int
    wire_s: float


def write_chunk(
    transport: OneSidedTransport,
    binding: DestinationBinding,
    payload: Payload,
    chunk: int,
    local: UInt64Array,
    remote: UInt64Array,
    deadline: Deadline,
) -> None:
    """Write one chunk; returns once it is visible to the peer.

    Raises:
        TransferError: see `OneSidedTransport.write`.
    """
    deadline.check_before_more()
    pieces = payload.pieces_of(chunk)
    transport.write(
        WriteBatch(
            endpoint=binding.endpoint,
            local_addresses=local[pieces],
            remote_addresses=remote[pieces],
            nbytes=payload.nbytes[pieces].astype(np.uint64),
            regions=binding.regions,
        ),
        deadline_s=max(deadline.remaining_s, 0.001),
    )


@dataclass(slots=True)
class _Child:
    """One engine that is passed on to, in one round. `jobs` are in the order of their beginning."""

    binding: DestinationBinding
    address: RelayAddress
    remote: Mapping[str, UInt64Array]
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(WRITES_AT_ONCE, "windlass-relay-out")
    )
    outlet: Outlet | None = None
    given_up: bool = False
    unknown: bool = False
    unreached: bool = False
    jobs: list[Future[int]] = field(default_factory=list)

    def submit(self, job: Callable[[], int]) -> None:
        """Have a thread carry it out; it begins after all earlier ones have begun."""
        self.jobs.append(self.pool.submit(job))

    def submit_last(self, job: Callable[[], int]) -> None:
        """As `submit`, once all earlier ones have ended."""
        earlier = tuple(self.jobs)

        def after() -> int:
            wait(earlier)  # they have threads of their own: they began before this one
            return job()

        self.submit(after)


@dataclass(frozen=True, slots=True)
class _Bound:
    """What this rank does in every round of a binding.

    Attributes:
        upstream: per lane the member that writes it; empty for the lanes that trainers write.
        children: per lane whom it is passed on to.
        patience: per lane how much of the time for the relay to wait: those in front give up first,
            so that who merely waits for a rank that stands still is not taken for one.
    """

    payloads: Mapping[str, Payload]
    local: Mapping[str, UInt64Array]
    upstream: tuple[str, ...]
    children: tuple[tuple[str, ...], ...]
    patience: tuple[float, ...]
    bindings: Mapping[str, DestinationBinding]
    addresses: Mapping[str, RelayAddress]

    def remote(self, child: str) -> dict[str, UInt64Array]:
        binding = self.bindings[child]
        targets = np.array(binding.parameter_addresses, np.uint64)
        return {
            source: payload.at_destination(targets, binding.landing_address)
            for source, payload in self.payloads.items()
        }


@final
class RelayNode:
    """One engine rank. `run` is called by the agent's command thread, the rest by any.

    Args:
        receiver: whose memory is written, verified and read; its transport writes.
        host: own address, that upstreams can reach.
    """

    def __init__(self, receiver: Receiver, host: str) -> None:
        self._receiver, self._host = receiver, host
        self._lock = threading.Lock()
        self._inlet: RelayInlet | None = None
        self._bound: _Bound | None = None
        self._running: Place | None = None

    def open(self) -> RelayAddress:
        """Listen, once; the same address every time."""
        with self._lock:
            if self._inlet is None:
                self._inlet = RelayInlet(self._receiver.manifest.worker, self._host)
            return self._inlet.address

    def connect(
        self,
        group: RelayGroup,
        bindings: Sequence[DestinationBinding],
        addresses: Sequence[RelayAddress],
    ) -> None:
        """Bind a group; the receiver is connected already, with the same plan for every member.

        Raises:
            PlanError: a child has no binding or no address, or this rank is not in the group.
            RegionError: a write would leave the published regions.
        """
        worker = self._receiver.manifest.worker
        if worker not in group.members:
            raise PlanError(f"relay: {worker} is not one of the group's members")
        programs = self._receiver.programs
        children = children_of(group, worker)
        bound = {binding.worker: binding for binding in bindings}
        known = {address.worker: address for address in addresses}
        for child in {name for lane in children for name in lane}:
            if child not in bound or child not in known:
                raise PlanError(f"relay: {child} has no binding or no address")
            for program in programs.values():
                check_binding(program, bound[child])
        payloads = {
            source: payload_of(program, group.chunk_nbytes) for source, program in programs.items()
        }
        targets = np.array(self._receiver.target_addresses, np.uint64)
        landing = self._receiver.landing_address
        index = group.members.index(worker)
        self._bound = _Bound(
            payloads=payloads,
            local={s: p.at_destination(targets, landing) for s, p in payloads.items()},
            upstream=tuple("" if p[index] < 0 else group.members[p[index]] for p in group.lanes),
            children=children,
            patience=tuple(
                1 - PATIENCE_SPREAD * (1 - depths[index] / max(depths))
                for depths in depths_of(group)
            ),
            bindings=bound,
            addresses=known,
        )

    def run(self, place: Place, deadline_s: float) -> RelayResult:
        """Take part in a round until every link is complete here or cannot become so.

        Raises:
            PlanError: no group is bound.
        """
        bound, inlet = self._bound, self._inlet
        if bound is None or inlet is None:
            raise PlanError("relay: no group is bound; connect first")
        deadline = Deadline.after(deadline_s, "relay")
        events = inlet.begin(place)
        self._running = place
        round_ = _Round(self._receiver, bound, place, deadline)
        try:
            round_.open_children()
            while round_.waits:
                try:
                    event = events.get(timeout=max(round_.patience_s, 0.001))
                except queue.Empty:
                    round_.lose_patience(inlet.joined(place))
                    continue
                match event:
                    case Arrived():
                        round_.on_chunk(event.upstream, event.landed)
                    case LaneEnded():
                        round_.on_lane_end(event.upstream, event.lane)
                    case Ended():
                        round_.on_end(event.upstream, unknown=event.unknown)
                    case Interrupted():
                        break
                    case _:
                        assert_never(event)
        finally:
            self._running = None
            round_.finish(inlet.end(place))
        return round_.result()

    def refuse(self, place: Place, upstream: str) -> None:
        """`upstream` will not come any more in the round at `place`, or must not."""
        if self._inlet is not None:
            self._inlet.refuse(place, upstream)

    def interrupt(self, place: Place | None = None) -> None:
        """End a running `run`, or the one of `place` as soon as it begins."""
        place = self._running if place is None else place
        if self._inlet is not None and place is not None:
            self._inlet.interrupt(place)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        with self._lock:
            if self._inlet is not None:
                self._inlet.close()
                self._inlet = None


@final
class _Round:
    """What is still to come, and what was passed on."""

    def __init__(self, receiver: Receiver, bound: _Bound, place: Place, deadline: Deadline) -> None:
        self._worker = receiver.manifest.worker
        self._transport = receiver.transport
        self._bound, self._place, self._deadline = bound, place, deadline
        num_lanes = len(bound.upstream)
        self._left: dict[str, set[tuple[str, int]]] = {}
        for source, payload in bound.payloads.items():
            for chunk in range(payload.num_chunks):
                writer = bound.upstream[chunk % num_lanes] or source
                self._left.setdefault(writer, set()).add((source, chunk))
        self._lanes_of: dict[str, set[int]] = {}
        for writer, keys in self._left.items():
            self._lanes_of[writer] = {chunk % num_lanes for _, chunk in keys}
        self._deadlines = {
            writer: Deadline.after(
                deadline.seconds * max(bound.patience[lane] for lane in lanes), "relay"
            )
            for writer, lanes in self._lanes_of.items()
        }
        self._missing: set[str] = set()
        self._unknown: set[str] = set()
        self._first_s = self._last_s = 0.0
        self._nbytes = 0
        names = dict.fromkeys(name for lane in bound.children for name in lane)
        self._children = {
            name: _Child(bound.bindings[name], bound.addresses[name], bound.remote(name))
            for name in names
        }

    @property
    def waits(self) -> bool:
        """Whether chunks can still come."""
        return bool(self._left)

    def open_children(self) -> None:
        """Connect to them, each in its own thread."""
        for child in self._children.values():
            child.submit(partial(self._open, child))

    def on_chunk(self, upstream: str, landed: ChunkLanded) -> None:
        """Verify a chunk and have it passed on."""
        key = landed.source, landed.chunk
        left = self._left.get(upstream)
        if left is None or key not in left:
            return
        self._first_s = self._first_s or time.perf_counter()
        left.discard(key)
        if not left:
            del self._left[upstream]
        payload = self._bound.payloads[landed.source]
        local = self._bound.local[landed.source]
        digest, pieces = new_digest(), payload.pieces_of(landed.chunk)
        for address, nbytes in zip(
            local[pieces].tolist(), payload.nbytes[pieces].tolist(), strict=True
        ):
            digest.update(bytes_at(address, nbytes))
        self._last_s = time.perf_counter()
        if digest.hexdigest() != landed.digest:
            self._missing.add(landed.source)
            return
        lane = landed.chunk % len(self._bound.upstream)
        for name in self._bound.children[lane]:
            child = self._children[name]
            child.submit(partial(self._pass_on, child, landed))

    @property
    def patience_s(self) -> float:
        """How long to wait for the next event."""
        return min(self._deadlines[writer].remaining_s for writer in self._left)

    def lose_patience(self, joined: Collection[str]) -> None:
        """Wait no longer for those whose time is up; who was let in may be writing still."""
        for writer in [w for w in self._left if not self._deadlines[w].remaining_s]:
            self.on_end(writer, unknown=writer in joined)

    def on_lane_end(self, upstream: str, lane: int) -> None:
        """An upstream brings nothing more of one lane; nor will this rank."""
        num_lanes = len(self._bound.upstream)
        left = self._left.get(upstream, set())
        gone = {key for key in left if key[1] % num_lanes == lane}
        if not gone:
            return
        self._missing |= {source for source, _ in gone}
        left -= gone
        if not left:
            del self._left[upstream]
        for name in self._bound.children[lane]:
            child = self._children[name]
            child.submit_last(partial(self._end_lane, child, lane))

    def on_end(self, upstream: str, *, unknown: bool) -> None:
        """An upstream writes nothing more."""
        for lane in self._lanes_of.get(upstream, ()):
            self.on_lane_end(upstream, lane)
        if unknown:
            self._unknown.add(upstream)

    def finish(self, joined: Collection[str]) -> None:
        """Tell the children that nothing more comes, once everything is written."""
        # Who was let in and has not ended by now may be writing still.
        self._unknown |= set(self._left) & set(joined)
        self._missing |= {source for left in self._left.values() for source, _ in left}
        for child in self._children.values():
            child.submit_last(partial(self._close, child))
        for child in self._children.values():
            child.pool.shutdown(wait=True)
        for child in self._children.values():
            self._nbytes += sum(job.result() for job in child.jobs)

    def result(self) -> RelayResult:
        """After `finish`."""
        children = self._children.items()
        return RelayResult(
            missing=tuple(sorted(self._missing)),
            unknown_from=tuple(sorted(self._unknown)),
            unknown_to=tuple(name for name, child in children if child.unknown),
            unreached=tuple(name for name, child in children if child.unreached),
            nbytes=self._nbytes,
            wire_s=max(self._last_s - self._first_s, 0.0),
        )

    # --- in the threads of a child -----------------------------------------------------------------

    def _open(self, child: _Child) -> int:
        try:
            child.outlet = Outlet(child.address, self._worker, self._place, self._deadline)
        except TransferError:
            child.given_up = child.unreached = True
        return 0

    def _pass_on(self, child: _Child, landed: ChunkLanded) -> int:
        child.jobs[0].result()
        if child.given_up or child.outlet is None:
            return 0
        payload = self._bound.payloads[landed.source]
        try:
            write_chunk(
                self._transport,
                child.binding,
                payload,
                landed.chunk,
                self._bound.local[landed.source],
                child.remote[landed.source],
                self._deadline,
            )
            child.outlet.send(landed)
        except TransferOutcomeUnknown:
            child.given_up = child.unknown = True
        except TransferError:
            child.given_up = True  # it finds the link incomplete when the connection ends
        self._last_s = time.perf_counter()
        return payload.chunk_nbytes(landed.chunk)

    def _end_lane(self, child: _Child, lane: int) -> int:
        if child.given_up or child.outlet is None:
            return 0
        try:
            child.outlet.send(LaneEnd(lane))
        except TransferError:
            child.given_up = True  # the end of the connection says more
        return 0

    def _close(self, child: _Child) -> int:
        if child.outlet is not None:
            child.outlet.end(unknown=child.unknown)
        return 0
