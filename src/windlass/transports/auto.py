"""Several transports of one process behind one interface.

A rank offers one endpoint per transport that starts on its host and can register its memory. The controller chooses for
each link (a rank that writes, and a rank that gets the bytes) the fastest transport that both ranks offer (`choice.py`).
A write uses the transport of the endpoint in its `WriteBatch`.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import ClassVar, final

from windlass.errors import RegionError, TransportUnavailable
from windlass.net.addresses import is_loopback, own_address
from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, OneSidedTransport, TransportOffer, WriteBatch
from windlass.transports.peers import PeerEndpoint, PeerMapper
from windlass.transports.registry import (
    TransportConfig,
    config_type,
    parse_transport,
    transport_names,
)
from windlass.transports.traits import MemoryAllocator, MemoryType, TransportTraits, WireReport

_log = logging.getLogger(__name__)


class AutoConfig(TransportConfig, frozen=True, tag="auto"):
    """Configuration of a set of transports.

    By default, the set has every transport that starts in this process for this kind of memory and has `is_automatic`
    set, with two exceptions:

    - Transports between hosts are not started if this process reaches the controller over loopback, because all
      peers are then on this host. If no other transport starts, they are started nevertheless.
    - A transport that can only expose memory from its own allocator is closed again if another transport within
      one host has started.

    Attributes:
        offers: names or JSON configurations of transports, all of which must start. Empty for the
            default.
    """

    memory: ClassVar[frozenset[MemoryType]] = frozenset(MemoryType)
    between_hosts: ClassVar[bool] = True
    is_automatic: ClassVar[bool] = False

    offers: tuple[str, ...] = ()

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:
        """Start the transports in `offers`, or the default ones. Return a single transport, or a `TransportSet` of several.

        The arguments are those of `TransportConfig.create`. After an error, no transport stays open.

        Raises:
            ConfigError: `offers` contains an unknown transport.
            ConfigError, PeerUnreachable: no address of this host can be used; see `own_address`.
            TransportUnavailable: a transport in `offers` does not start, or no transport starts.
        """
        with ExitStack() as undo:
            started: list[OneSidedTransport] = []
            if self.offers:
                for name in self.offers:
                    started.append(parse_transport(name).create(towards=towards, gpu=gpu))
                    undo.callback(started[-1].close)
            else:
                started = _start_all(towards, gpu, undo)
            undo.pop_all()
        return started[0] if len(started) == 1 else TransportSet(started)


def _start_all(towards: str, gpu: int, undo: ExitStack) -> list[OneSidedTransport]:
    """Start the transports that `AutoConfig` uses by default. Add the `close` of each started transport to `undo`.

    Raises:
        ConfigError, PeerUnreachable: see `own_address`.
        TransportUnavailable: no transport starts.
    """
    reasons: dict[str, str] = {}
    configs = _configs_for(MemoryType.HOST if gpu < 0 else MemoryType.CUDA, reasons)

    def start(wanted: Iterable[TransportConfig]) -> list[OneSidedTransport]:
        found = []
        for config in wanted:
            try:
                found.append(config.create(towards=towards, gpu=gpu))
            except TransportUnavailable as error:
                reasons[config.name] = str(error)
                _log.debug("auto: %s is not offered: %s", config.name, error)
            else:
                undo.callback(found[-1].close)
        return found

    local = start(config for config in configs if not config.between_hosts)
    started = [transport for transport in local if not transport.traits.allocates]
    for transport in local if started else ():
        if transport.traits.allocates:
            transport.close()
    started = started or local
    if not started or not is_loopback(own_address(towards)):
        started += start(config for config in configs if config.between_hosts)
    if not started:
        raise TransportUnavailable(
            f"auto: no transport for {'host' if gpu < 0 else 'GPU'} memory could be started: "
            f"{'; '.join(reasons.values()) or 'none is installed'}"
        )
    return started


def _configs_for(kind: MemoryType, reasons: dict[str, str]) -> list[TransportConfig]:
    """Return the default configurations of all transports that `auto` may start for a kind of memory.

    If the package of a transport cannot be imported, add transport name -> reason to `reasons`.
    """
    configs = []
    for name in transport_names():
        try:
            found = config_type(name)
        except TransportUnavailable as error:
            reasons[name] = str(error)
            continue
        if found.is_automatic and kind in found.memory:
            configs.append(found())
    return configs


@final
class TransportSet(OneSidedTransport):
    """`OneSidedTransport` that combines several transports (members), all for the same kind of memory.

    If a member refuses to register memory, peers can write this memory only through the other members. If several
    members have an allocator, `allocator` is the allocator of the fastest of these members.

    Args:
        members: transports with different names, at least one. They are closed together with the set.
    """

    def __init__(self, members: Sequence[OneSidedTransport]) -> None:
        ordered = sorted(members, key=lambda member: -member.traits.ceiling_bytes_per_s)
        self._members = {member.endpoint().transport: member for member in ordered}
        self._lock = threading.Lock()
        self._regions: dict[MemoryRegion, dict[str, MemoryRegion]] = {}

    @property
    def traits(self) -> TransportTraits:
        """Traits of the set: a capability is True if every member has it. The ceiling is the fastest member's."""
        known = [member.traits for member in self._members.values()]
        return TransportTraits(
            same_host=all(traits.same_host for traits in known),
            one_sided=all(traits.one_sided for traits in known),
            ceiling_bytes_per_s=max(traits.ceiling_bytes_per_s for traits in known),
            gpu=known[0].gpu,
            strided_stores=all(traits.strided_stores for traits in known),
            notifies=all(traits.notifies for traits in known),
            allocates=all(traits.allocates for traits in known),
            unpinned=all(traits.unpinned for traits in known),
        )

    @property
    def allocator(self) -> MemoryAllocator | None:
        """Allocator of the first member that has one; None if none has."""
        found = (member.allocator for member in self._members.values())
        return next((allocator for allocator in found if allocator is not None), None)

    @property
    def mapper(self) -> PeerMapper | None:
        """Mapper of the first member that has one; None if none has."""
        found = (member.mapper for member in self._members.values())
        return next((mapper for mapper in found if mapper is not None), None)

    def report(self) -> WireReport:
        """Return the report of the fastest member; `offers` has the reports of all members."""
        return next(iter(self._members.values())).report()

    def endpoint(self) -> PeerEndpoint:
        """Return the endpoint of the fastest member."""
        return next(iter(self._members.values())).endpoint()

    def offers(self) -> tuple[TransportOffer, ...]:
        """Return the offers of all members."""
        return tuple(offer for member in self._members.values() for offer in member.offers())

    def register_all(self, spans: Sequence[tuple[int, int]]) -> tuple[MemoryRegion, ...]:
        """See `OneSidedTransport.register_all`. A range is refused only if all members refuse it."""
        parts: list[dict[str, MemoryRegion]] = [{} for _ in spans]
        refused: list[RegionError | None] = [None for _ in spans]
        with ExitStack() as undo:
            for name, member in self._members.items():
                for index, found in enumerate(_registered_with(name, member, spans)):
                    if isinstance(found, RegionError):
                        refused[index] = found
                    else:
                        parts[index][name] = found
                        undo.callback(member.unregister, found)
            columns = zip(spans, parts, refused, strict=True)
            regions = tuple(itertools.starmap(self._joined, columns))
            undo.pop_all()
        with self._lock:
            self._regions.update(zip(regions, parts, strict=True))
        return regions

    def _joined(
        self, span: tuple[int, int], parts: dict[str, MemoryRegion], refused: RegionError | None
    ) -> MemoryRegion:
        """Join the regions of several transports into one region.

        Args:
            span: the range (address, nbytes).
            parts: transport name -> its region, for each transport that has registered the range.
            refused: error of a transport that refused the range, if any.

        Raises:
            RegionError: no member can make the range writable by peers.
        """
        # With the trait `allocates`, peers can write only memory that the transport has allocated. All other regions have
        # an empty key, and are only sources of writes.
        remotes = [
            region.remote
            for name, region in parts.items()
            if region.remote.key or not self._members[name].traits.allocates
        ]
        if not remotes:
            address, nbytes = span
            raise refused or RegionError(
                f"register: [{address:#x}, {address + nbytes:#x}) must be memory from the transport's `allocator`"
            )
        return MemoryRegion(*span, remotes[0], tuple(remotes[1:]))

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        """Unregister a region at all members. Call `released` after the last member has released the region.

        Raises:
            RegionError: the region is not registered; `released` is not called.
        """
        with self._lock:
            done = self._regions.pop(region, None)
        if done is None:
            raise RegionError(
                f"unregister: region at {region.address:#x} with {region.nbytes} bytes is not "
                "registered"
            )
        left = itertools.count(len(done) - 1, -1)

        def release() -> None:
            # Only the last member that releases the memory calls `released`.
            if next(left) == 0 and released is not None:
                released()

        for name, part in done.items():
            self._members[name].unregister(part, release)

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """See `OneSidedTransport.write`. The batch's endpoint selects the transport; raise RegionError if there is none."""
        self._member(batch.endpoint).write(batch, deadline_s=deadline_s)

    def max_pieces(self, endpoint: PeerEndpoint) -> int:
        """See `OneSidedTransport.max_pieces`. Raise RegionError if no member has the endpoint's transport."""
        return self._member(endpoint).max_pieces(endpoint)

    def _member(self, endpoint: PeerEndpoint) -> OneSidedTransport:
        member = self._members.get(endpoint.transport)
        if member is None:
            raise RegionError(
                f"write: the endpoint's transport must be one of {list(self._members)}, got {endpoint.transport!r}"
            )
        return member

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`. Fence the members one after another, within one deadline."""
        deadline = Deadline.after(deadline_s, "fence")
        for member in self._members.values():
            member.fence(deadline_s=deadline.remaining_s)

    def close(self) -> None:
        """Close all members."""
        with ExitStack() as closing:
            for member in self._members.values():
                closing.callback(member.close)


def _registered_with(
    name: str, member: OneSidedTransport, spans: Sequence[tuple[int, int]]
) -> list[MemoryRegion | RegionError]:
    """Register ranges with one transport. For each range, return the region, or the error if the range is refused.

    If the transport refuses the ranges in one call, register each range in a separate call.
    """
    try:
        return list(member.register_all(spans))
    except RegionError as error:
        if len(spans) > 1:
            return [found for span in spans for found in _registered_with(name, member, [span])]
        for _, nbytes in spans:
            _log.warning("auto: %s does not register %d bytes: %s", name, nbytes, error)
        return [error for _ in spans]
