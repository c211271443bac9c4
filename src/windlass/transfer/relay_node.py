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
from collections.abc import Sequence
from typing import assert_never, final

import numpy as np

from windlass.errors import PlanError
from windlass.net.clock import Deadline
from windlass.planning.relay import RelayGroup, children_of, depths_of
from windlass.transfer.bind import check_binding
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.payload import payload_of
from windlass.transfer.receiver import Receiver
from windlass.transfer.relay_receiver import (
    Arrived,
    Ended,
    Interrupted,
    RelayReceiver,
    StripeEnded,
)
from windlass.transfer.relay_round import BoundGroup, RelayResult, RelayRound
from windlass.transfer.relay_wire import Place, RelayAddress

__all__ = ["RelayNode"]

_log = logging.getLogger(__name__)

PATIENCE_SPREAD = 0.25
"""Of the time for a relay: between the ends of the patience of the first and the last in a stripe."""


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
        self._running: Place | None = None

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
        for child in {name for stripe in children for name in stripe}:
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
        bound, listener = self._bound, self._listener
        if bound is None or listener is None:
            raise PlanError("relay: no group is bound; connect first")
        deadline = Deadline.after(deadline_s, "relay")
        events = listener.begin(place)
        self._running = place
        round_ = RelayRound(self._receiver, bound, place, deadline)
        try:
            round_.open_children()
            while round_.waits:
                try:
                    event = events.get(timeout=max(round_.patience_s, 0.001))
                except queue.Empty:
                    round_.lose_patience(listener.joined(place))
                    continue
                match event:
                    case Arrived():
                        round_.on_chunk(event.upstream, event.landed)
                    case StripeEnded():
                        round_.on_stripe_end(event.upstream, event.stripe)
                    case Ended():
                        round_.on_end(
                            event.upstream, unknown=event.unknown, wordless=event.wordless
                        )
                    case Interrupted():
                        break
                    case _:
                        assert_never(event)
        # The boundary of a round: what is known of writes from here and to here must be told.
        except Exception:  # noqa: BLE001
            _log.exception("%s: the relay stops here", self._receiver.manifest.worker)
        finally:
            self._running = None
            round_.finish(listener.end(place))
        return round_.result()

    def refuse(self, place: Place, upstream: str) -> None:
        """`upstream` will not come any more in the round at `place`, or must not."""
        if self._listener is not None:
            self._listener.refuse(place, upstream)

    def interrupt(self, place: Place | None = None) -> None:
        """End a running `run`, or the one of `place` as soon as it begins."""
        place = self._running if place is None else place
        if self._listener is not None and place is not None:
            self._listener.interrupt(place)

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
