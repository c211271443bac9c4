"""One round of a relay at one engine rank: what is still to come, and what is passed on to whom.

`RelayNode` turns connections into calls of `RelayRound`; each child has threads of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import final

import numpy as np

from windlass.errors import TransferError
from windlass.memory.ops import OWN_WORK_S, ChunkDigests, UInt64Array
from windlass.net.clock import Deadline
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.outcomes import is_unknown, submit
from windlass.transfer.payload import Payload
from windlass.transfer.receiver import Receiver
from windlass.transfer.relay_sender import WRITES_AT_ONCE, RelaySender, write_chunk
from windlass.transfer.relay_wire import ChunkLanded, Place, RelayAddress, StripeEnd

__all__ = ["BoundGroup", "RelayResult", "RelayRound"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RelayResult:
    """How the relay went at one rank.

    Attributes:
        missing: sources whose link is not complete here.
        unknown_from: upstreams whose bytes may still land here.
        unknown_to: engines in which bytes of this rank may still land.
        unreached: engines that did not let this rank in; nothing was written to them.
        wordless: upstreams that ended without a word: over TCP their kernels may still hold bytes,
            so a fence is due before what lies here is trusted.
        nbytes: passed on. wire_s: from the first chunk here to the last one passed on.
    """

    missing: tuple[str, ...]
    unknown_from: tuple[str, ...]
    unknown_to: tuple[str, ...]
    unreached: tuple[str, ...]
    wordless: tuple[str, ...]
    nbytes: int
    wire_s: float


@dataclass(slots=True)
class _Child:
    """One engine that is passed on to, in one round. `jobs` are in the order of their beginning."""

    binding: DestinationBinding
    address: RelayAddress
    remote: Mapping[str, UInt64Array]
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(WRITES_AT_ONCE, "windlass-relay-out")
    )
    sender: RelaySender | None = None
    given_up: bool = False
    unknown: bool = False
    unreached: bool = False
    jobs: list[Future[int]] = field(default_factory=list)

    def submit(self, job: Callable[[], int]) -> None:
        """Have a thread carry it out; it begins after all earlier ones have begun."""
        self.jobs.append(submit(self.pool, job))

    def submit_last(self, job: Callable[[], int]) -> None:
        """As `submit`, once all earlier ones have ended."""
        earlier = tuple(self.jobs)

        def after() -> int:
            wait(earlier)  # they have threads of their own: they began before this one
            return job()

        self.submit(after)


@dataclass(frozen=True, slots=True)
class BoundGroup:
    """What this rank does in every round of a binding.

    Attributes:
        payloads: source -> what its link delivers.
        local: source -> where the pieces lie here. digests: source -> of the chunks there.
        upstream: per stripe the member that writes it; empty for the stripes that trainers write.
        children: per stripe whom it is passed on to.
        patience: per stripe how much of the time for the relay to wait: those in front give up first,
            so that who merely waits for a rank that stands still is not taken for one.
        bindings, addresses: of the children.
    """

    payloads: Mapping[str, Payload]
    local: Mapping[str, UInt64Array]
    digests: Mapping[str, ChunkDigests]
    upstream: tuple[str, ...]
    children: tuple[tuple[str, ...], ...]
    patience: tuple[float, ...]
    bindings: Mapping[str, DestinationBinding]
    addresses: Mapping[str, RelayAddress]

    def close(self) -> None:
        """Free what was prepared. Idempotent."""
        for digests in self.digests.values():
            digests.close()

    def remote(self, child: str) -> dict[str, UInt64Array]:
        """Source -> where the pieces of its link lie at a child."""
        binding = self.bindings[child]
        targets = np.array(binding.parameter_addresses, np.uint64)
        return {
            source: payload.at_destination(targets, binding.landing_address)
            for source, payload in self.payloads.items()
        }


@final
class RelayRound:
    """What is still to come, and what was passed on."""

    def __init__(
        self, receiver: Receiver, bound: BoundGroup, place: Place, deadline: Deadline
    ) -> None:
        self._worker = receiver.manifest.worker
        self._transport = receiver.transport
        self._bound, self._place, self._deadline = bound, place, deadline
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
                deadline.seconds * max(bound.patience[stripe] for stripe in stripes), "relay"
            )
            for writer, stripes in self._stripes_of.items()
        }
        self._missing: set[str] = set()
        self._unknown: set[str] = set()
        self._wordless: set[str] = set()
        self._first_s = self._last_s = 0.0
        self._nbytes = 0
        names = dict.fromkeys(name for stripe in bound.children for name in stripe)
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
        (digest,) = self._bound.digests[landed.source].take([landed.chunk], OWN_WORK_S)
        self._last_s = time.perf_counter()
        left.discard(key)  # until here it counts as missing, whatever stops this
        if not left:
            del self._left[upstream]
        if digest != landed.digest:
            self._missing.add(landed.source)
            return
        stripe = landed.chunk % len(self._bound.upstream)
        for name in self._bound.children[stripe]:
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
            child = self._children[name]
            child.submit_last(partial(self._end_stripe, child, stripe))

    def on_end(self, upstream: str, *, unknown: bool, wordless: bool = False) -> None:
        """An upstream writes nothing more."""
        if wordless and upstream in self._left:
            self._wordless.add(upstream)
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
            child.submit_last(partial(self._close, child))
        for child in self._children.values():
            child.pool.shutdown(wait=True)
        for name, child in self._children.items():
            self._nbytes += self._settle(name, child)

    def _settle(self, name: str, child: _Child) -> int:
        """Bytes that its jobs have passed on; what any of them raised is said of the child."""
        nbytes = 0
        for job in child.jobs:
            error = job.exception()
            if error is None:
                nbytes += job.result()
                continue
            _log.error("%s: relaying to %s failed", self._worker, name, exc_info=error)
            if is_unknown(error):
                child.unknown = True
        if child.sender is not None:
            child.sender.close()
        return nbytes

    def result(self) -> RelayResult:
        """After `finish`."""
        children = self._children.items()
        return RelayResult(
            missing=tuple(sorted(self._missing)),
            unknown_from=tuple(sorted(self._unknown)),
            unknown_to=tuple(name for name, child in children if child.unknown),
            unreached=tuple(name for name, child in children if child.unreached),
            wordless=tuple(sorted(self._wordless)),
            nbytes=self._nbytes,
            wire_s=max(self._last_s - self._first_s, 0.0),
        )

    # --- in the threads of a child -----------------------------------------------------------------

    def _open(self, child: _Child) -> int:
        try:
            child.sender = RelaySender(child.address, self._worker, self._place, self._deadline)
        except TransferError:
            child.given_up = child.unreached = True
        return 0

    def _pass_on(self, child: _Child, landed: ChunkLanded) -> int:
        if child.jobs[0].exception() is not None or child.given_up or child.sender is None:
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
            child.sender.send(landed)
        except TransferError as error:
            if is_unknown(error):
                child.unknown = True
            child.given_up = True  # it finds the link incomplete when the connection ends
        except BaseException:  # whatever it is, bytes may still land there
            child.given_up = child.unknown = True
            raise
        self._last_s = time.perf_counter()
        return payload.chunk_nbytes(landed.chunk)

    def _end_stripe(self, child: _Child, stripe: int) -> int:
        if child.given_up or child.sender is None:
            return 0
        try:
            child.sender.send(StripeEnd(stripe))
        except TransferError:
            child.given_up = True  # the end of the connection says more
        return 0

    def _close(self, child: _Child) -> int:
        if child.sender is not None:
            child.sender.end(unknown=child.unknown)
        return 0
