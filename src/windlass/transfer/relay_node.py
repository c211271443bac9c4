"""An engine rank that takes part in a relay: verify each chunk that lands, pass it on, say so.

A chunk counts once its bytes in this rank's memory have the digest that the trainer computed; only
then is it written to the next engines, by one-sided writes from where it lies. Only writers that the
listener has let in write here, and the round's answer is given when each of them has ended: so it settles
whether bytes may still land.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never, final

import numpy as np

from windlass.errors import PlanError
from windlass.memory.ops import OWN_WORK_S, ChunkDigests, UInt64Array
from windlass.net.clock import Deadline
from windlass.net.messages import RoundId
from windlass.planning.relay import RelayGroup, children_of, depths_of
from windlass.transfer.bind import check_binding
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.payload import Payload, payload_of
from windlass.transfer.receiver import Receiver
from windlass.transfer.relay_connection import (
    Disconnected,
    Interrupted,
    RelayReceiver,
)
from windlass.transfer.relay_wire import (
    ChunkLanded,
    End,
    RelayAddress,
    StripeEnd,
)
from windlass.transfer.relay_write import ChunkWriter

_log = logging.getLogger(__name__)

TIMEOUT_SPREAD = 0.25
"""Of the time for a relay: between the timeouts of the first and the last rank of a stripe."""


@dataclass(frozen=True, slots=True)
class RelayResult:
    """How the relay went at one rank.

    Attributes:
        missing: sources whose link is not complete here.
        unknown_from: upstreams whose bytes may still land here.
        unknown_to: engines in which bytes of this rank may still land.
        unreached: engines that did not let this rank in; nothing was written to them.
        disconnected: upstreams that ended without saying so: over TCP their kernels may still hold bytes,
            so a fence is due before what lies here is trusted.
        nbytes: passed on. wire_s: from the first chunk here to the last one passed on.
    """

    missing: tuple[str, ...]
    unknown_from: tuple[str, ...]
    unknown_to: tuple[str, ...]
    unreached: tuple[str, ...]
    disconnected: tuple[str, ...]
    nbytes: int
    wire_s: float


@dataclass(frozen=True, slots=True)
class BoundGroup:
    """What this rank does in every round of a binding.

    Attributes:
        payloads: source -> what its link delivers.
        local: source -> where the pieces lie here. digests: source -> of the chunks there.
        upstream: per stripe the member that writes it; empty for the stripes that trainers write.
        children: per stripe whom it is passed on to.
        timeout_shares: per stripe how much of the time for the relay to wait: those in front give up first,
            so that who merely waits for a rank that stands still is not taken for one.
        bindings, addresses: of the children.
        remote: child -> source -> where the pieces lie there.
    """

    payloads: Mapping[str, Payload]
    local: Mapping[str, UInt64Array]
    digests: Mapping[str, ChunkDigests]
    upstream: tuple[str, ...]
    children: tuple[tuple[str, ...], ...]
    timeout_shares: tuple[float, ...]
    bindings: Mapping[str, DestinationBinding]
    addresses: Mapping[str, RelayAddress]
    remote: Mapping[str, Mapping[str, UInt64Array]]

    def close(self) -> None:
        """Free what was prepared. Idempotent."""
        for digests in self.digests.values():
            digests.close()


@final
class RelayRound:
    """What is still to come, and what was passed on."""

    def __init__(
        self, receiver: Receiver, bound: BoundGroup, round_id: RoundId, deadline: Deadline
    ) -> None:
        self._bound = bound
        num_stripes = len(bound.upstream)
        self._left: dict[str, set[tuple[str, int]]] = {}
        for source, payload in bound.payloads.items():
            for chunk in range(payload.num_chunks):
                writer = bound.upstream[chunk % num_stripes] or source
                self._left.setdefault(writer, set()).add((source, chunk))
        self._stripes_of: dict[str, set[int]] = {}
        for writer, keys in self._left.items():
            self._stripes_of[writer] = {chunk % num_stripes for _, chunk in keys}
        self._deadlines = {
            writer: Deadline.after(
                deadline.seconds * max(bound.timeout_shares[i] for i in stripes), "relay"
            )
            for writer, stripes in self._stripes_of.items()
        }
        self._missing: set[str] = set()
        self._unknown: set[str] = set()
        self._disconnected: set[str] = set()
        self._first_s = self._last_s = 0.0
        self._nbytes = 0
        self._children = {
            name: ChunkWriter(
                receiver.transport,
                receiver.manifest.worker,
                bound.bindings[name],
                bound.addresses[name],
                round_id,
                deadline,
            )
            for name in bound.remote
        }

    @property
    def waits(self) -> bool:
        """Whether chunks can still come."""
        return bool(self._left)

    def on_chunk(self, upstream: str, landed: ChunkLanded) -> None:
        """Verify a chunk and have it passed on."""
        key = landed.source, landed.chunk
        left = self._left.get(upstream)
        if left is None or key not in left:
            return
        self._first_s = self._first_s or time.perf_counter()
        (digest,) = self._bound.digests[landed.source].take([landed.chunk], OWN_WORK_S)
        self._last_s = time.perf_counter()
        left.discard(key)  # until here it counts as missing, whatever stops this
        if not left:
            del self._left[upstream]
        if digest != landed.digest:
            self._missing.add(landed.source)
            return
        stripe = landed.chunk % len(self._bound.upstream)
        payload, local = self._bound.payloads[landed.source], self._bound.local[landed.source]
        for name in self._bound.children[stripe]:
            remote = self._bound.remote[name][landed.source]
            self._children[name].write(payload, local, remote, landed)

    @property
    def timeout_s(self) -> float:
        """How long to wait for the next event."""
        return min(self._deadlines[writer].remaining_s for writer in self._left)

    def expire(self, joined: Collection[str]) -> None:
        """Wait no longer for those whose time is up; who was let in may be writing still."""
        for writer in [w for w in self._left if not self._deadlines[w].remaining_s]:
            self.on_end(writer, unknown=writer in joined)

    def on_stripe_end(self, upstream: str, stripe: int) -> None:
        """An upstream brings nothing more of one stripe; nor will this rank."""
        num_stripes = len(self._bound.upstream)
        left = self._left.get(upstream, set())
        gone = {key for key in left if key[1] % num_stripes == stripe}
        if not gone:
            return
        self._missing |= {source for source, _ in gone}
        left -= gone
        if not left:
            del self._left[upstream]
        for name in self._bound.children[stripe]:
            self._children[name].end_stripe(stripe)

    def on_disconnect(self, upstream: str) -> None:
        """An upstream writes nothing more, and has not said so."""
        if upstream in self._left:
            self._disconnected.add(upstream)
        self.on_end(upstream, unknown=False)

    def on_end(self, upstream: str, *, unknown: bool) -> None:
        """An upstream writes nothing more."""
        for stripe in self._stripes_of.get(upstream, ()):
            self.on_stripe_end(upstream, stripe)
        if unknown:
            self._unknown.add(upstream)

    def finish(self, joined: Collection[str]) -> None:
        """Tell the children that nothing more comes, once everything is written."""
        # Who was let in and has not ended by now may be writing still.
        self._unknown |= set(self._left) & set(joined)
        self._missing |= {source for left in self._left.values() for source, _ in left}
        for child in self._children.values():
            child.end()
        self._nbytes = sum(child.close() for child in self._children.values())

    def result(self) -> RelayResult:
        """After `finish`."""
        children = self._children.items()
        last_s = max((self._last_s, *(child.last_s for child in self._children.values())))
        return RelayResult(
            missing=tuple(sorted(self._missing)),
            unknown_from=tuple(sorted(self._unknown)),
            unknown_to=tuple(name for name, child in children if child.is_unknown),
            unreached=tuple(name for name, child in children if child.unreached),
            disconnected=tuple(sorted(self._disconnected)),
            nbytes=self._nbytes,
            wire_s=last_s - self._first_s,
        )


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
        self._listener: RelayReceiver | None = None
        self._bound: BoundGroup | None = None
        self._running: RoundId | None = None

    def open(self) -> RelayAddress:
        """Listen, once; the same address every time."""
        with self._lock:
            if self._listener is None:
                self._listener = RelayReceiver(self._receiver.manifest.worker, self._host)
            return self._listener.address

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
        destination = self._receiver.destination
        programs = destination.programs
        children = children_of(group, worker)
        bound = {binding.worker: binding for binding in bindings}
        known = {address.worker: address for address in addresses}
        names = dict.fromkeys(name for stripe in children for name in stripe)
        for child in names:
            if child not in bound or child not in known:
                raise PlanError(f"relay: {child} has no binding or no address")
            for program in programs.values():
                check_binding(program, bound[child])
        payloads = {
            source: payload_of(program, group.chunk_nbytes) for source, program in programs.items()
        }
        targets = np.array(destination.addresses, np.uint64)
        staging = destination.staging_address
        local = {s: p.at_destination(targets, staging) for s, p in payloads.items()}
        index = group.members.index(worker)
        self._unbind()
        self._bound = BoundGroup(
            payloads=payloads,
            local=local,
            digests={s: p.digests(destination.memory, local[s]) for s, p in payloads.items()},
            upstream=tuple("" if p[index] < 0 else group.members[p[index]] for p in group.stripes),
            children=children,
            timeout_shares=tuple(
                1 - TIMEOUT_SPREAD * (1 - depths[index] / max(depths))
                for depths in depths_of(group)
            ),
            bindings=bound,
            addresses=known,
            remote={n: {s: p.at(bound[n]) for s, p in payloads.items()} for n in names},
        )

    def run(self, round_id: RoundId, deadline_s: float) -> RelayResult:
        """Take part in a round until every link is complete here or cannot become so.

        Raises:
            PlanError: no group is bound.
        """
        bound, listener = self._bound, self._listener
        if bound is None or listener is None:
            raise PlanError("relay: no group is bound; connect first")
        deadline = Deadline.after(deadline_s, "relay")
        events = listener.begin(round_id)
        self._running = round_id
        round_ = RelayRound(self._receiver, bound, round_id, deadline)
        try:
            while round_.waits:
                try:
                    upstream, event = events.get(timeout=max(round_.timeout_s, 0.001))
                except queue.Empty:
                    round_.expire(listener.joined(round_id))
                    continue
                match event:
                    case ChunkLanded():
                        round_.on_chunk(upstream, event)
                    case StripeEnd():
                        round_.on_stripe_end(upstream, event.stripe)
                    case End():
                        round_.on_end(upstream, unknown=event.unknown)
                    case Disconnected():
                        round_.on_disconnect(upstream)
                    case Interrupted():
                        break
                    case _:
                        assert_never(event)
        # The boundary of a round: what is known of writes from here and to here must be told.
        except Exception:  # noqa: BLE001
            _log.exception("%s: the relay stops here", self._receiver.manifest.worker)
        finally:
            self._running = None
            round_.finish(listener.end(round_id))
        return round_.result()

    def refuse(self, round_id: RoundId, upstream: str) -> None:
        """`upstream` will not come any more in the round at `round_id`, or must not."""
        if self._listener is not None:
            self._listener.refuse(round_id, upstream)

    def interrupt(self, round_id: RoundId | None = None) -> None:
        """End a running `run`, or the one of `round_id` as soon as it begins."""
        round_id = self._running if round_id is None else round_id
        if self._listener is not None and round_id is not None:
            self._listener.interrupt(round_id)

    def close(self) -> None:
        """Stop listening, and free what was prepared; `run` is over. Idempotent."""
        with self._lock:
            self._unbind()
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def _unbind(self) -> None:
        bound, self._bound = self._bound, None
        if bound is not None:
            bound.close()
