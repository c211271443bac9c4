"""Binds the links of a sending rank to the addresses of its destinations, after checks of plan and addresses.

A link is the part of a plan from one source to one destination.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from windlass.errors import PlanError, RegionError, RoundAborted
from windlass.layout.manifest import ShardManifest
from windlass.planning.plan import TransferPlan
from windlass.planning.program import DigestKind, LinkProgram, bind_links
from windlass.transfer.bindings import BindingsRefused, DestinationBinding
from windlass.transfer.packer import Peer
from windlass.transports.regions import check_inside

_PLACES = {DigestKind.XXH3: "host memory", DigestKind.POSITION: "a GPU"}
"""Digest kind -> place of the weights, for errors."""


def check_part(
    manifest: ShardManifest, workers: Sequence[str], digests: Sequence[str], argument: str
) -> int:
    """Check that a plan was made for this rank's manifest, and return the rank's index in `workers`.

    Args:
        manifest: manifest of this rank.
        workers: sources or destinations of the plan.
        digests: digest of each worker's manifest when the plan was made.
        argument: "sources" or "destinations", for the error.

    Raises:
        PlanError: the rank is not in the plan, or the plan was made for another layout of the rank.
    """
    if manifest.worker not in workers:
        raise PlanError(f"connect: {manifest.worker} is not one of the plan's {argument}")
    index = workers.index(manifest.worker)
    if digests[index] != manifest.digest():
        raise PlanError(
            f"connect: {manifest.worker}: the plan was made for another layout: manifest digest "
            f"must be {digests[index]}, got {manifest.digest()}"
        )
    return index


def check_destinations(known: Container[str], destinations: Sequence[str]) -> None:
    """Raise `RoundAborted` unless this rank has a link to each of `destinations`."""
    unknown = [name for name in destinations if name not in known]
    if unknown:
        raise RoundAborted(f"write: this rank sends nothing to {', '.join(unknown)}")


def bind_peers(
    programs: Iterable[LinkProgram],
    bindings: Iterable[DestinationBinding],
    check: Callable[[LinkProgram, DestinationBinding], None],
) -> dict[str, DestinationBinding]:
    """Return destination -> binding for these links, after `check(program, binding)` has accepted each binding.

    Args:
        programs: the links.
        bindings: bindings of the destinations of all these links, and possibly of other destinations.
        check: function that refuses a binding by raising PlanError or RegionError.

    Raises:
        PlanError: a destination has no binding. Later links were not checked.
        BindingsRefused: `check` refused some bindings. All bindings were checked, and the error has each reason.
    """
    known = {binding.worker: binding for binding in bindings}
    found: dict[str, DestinationBinding] = {}
    refused: dict[str, str] = {}
    for program in programs:
        if program.peer not in known:
            raise PlanError(f"connect: destination {program.peer} of the plan has no binding")
        found[program.peer] = known[program.peer]
        try:
            check(program, known[program.peer])
        except (PlanError, RegionError) as error:
            refused[program.peer] = f"{type(error).__name__}: {error}"
    if refused:
        raise BindingsRefused(refused)
    return found


def check_binding(
    program: LinkProgram, binding: DestinationBinding, *, staged: bool = True
) -> None:
    """Check that every write of a link is inside the regions of the destination.

    Args:
        program: the link.
        binding: addresses of the destination.
        staged: whether ops with a place in staging memory are written there. If False, GPU kernels store each element
            at its final address.

    Raises:
        PlanError: the binding has no address for a parameter, or no staging memory.
        RegionError: bytes would be written outside the destination's regions.
    """
    starts, extents = [], []
    for op in program.ops:
        lands = op.lands and staged
        if lands and not binding.staging_address:
            raise PlanError(f"connect: {binding.worker} offers no staging memory")
        if op.dst_parameter >= len(binding.parameter_addresses):
            raise PlanError(
                f"connect: {binding.worker}: dst_parameter must be < "
                f"{len(binding.parameter_addresses)}, got {op.dst_parameter}"
            )
        if lands:
            starts.append(binding.staging_address + op.staging_offset)
            extents.append(op.nbytes)
        else:
            starts.append(binding.parameter_addresses[op.dst_parameter] + op.dst_offset)
            extents.append(op.dst_extent_nbytes)
    check_inside(
        np.array(starts, np.uint64),
        np.array(extents, np.uint64),
        sorted((region.address, region.nbytes) for region in binding.regions),
        f"the regions published by {binding.worker}",
    )


def check_digest_kind(kind: DigestKind, binding: DestinationBinding) -> None:
    """Raise `PlanError` if this rank and the destination use different digest algorithms.

    They do if one of them has its weights on a GPU, and the other has its weights in host memory.
    """
    if binding.digest_kind is not kind:
        raise PlanError(
            f"connect: {binding.worker}: weights must be on GPUs at both ends or in host memory at both, "
            f"got {_PLACES[kind]} at this rank and {_PLACES[binding.digest_kind]} at the destination"
        )


@dataclass(frozen=True, slots=True)
class NewLinks:
    """New links from one call of `SentLinks.changed`.

    Attributes:
        programs: destination -> link.
        bindings: destination -> its addresses.
        stored: the stored links among them, see `SentLinks`.
    """

    programs: Mapping[str, LinkProgram]
    bindings: Mapping[str, DestinationBinding]
    stored: tuple[LinkProgram, ...]


@dataclass(frozen=True, slots=True)
class SentLinks:
    """Links of a sending rank.

    A link is written or stored. The transport writes the bytes of a written link. GPU kernels store the bytes of a
    stored link directly into the destination's memory.

    Attributes:
        digest_kind: digest algorithm of the written links.
        stored_by: names of the transports over which links are stored; None if all links are stored.
        programs: destination -> link, in the order of the links' places in the arena.
        peers: destination -> its addresses, for written links.
        read_in_place: indices of the parameters that written links send from the parameter's own memory.
        copy_of: destination of a link of `with_copies` -> destination of the planned link with the same bytes.
    """

    digest_kind: DigestKind
    stored_by: Collection[str] | None = ()
    programs: Mapping[str, LinkProgram] = field(default_factory=dict)
    peers: Mapping[str, Peer] = field(default_factory=dict)
    read_in_place: tuple[int, ...] = ()
    copy_of: Mapping[str, str] = field(default_factory=dict)

    @property
    def planned(self) -> tuple[LinkProgram, ...]:
        """Links of the plan that the transport writes. The links that `with_copies` added are not included."""
        return tuple(program for program in self.written if program.peer not in self.copy_of)

    @property
    def written(self) -> tuple[LinkProgram, ...]:
        """Links that the transport writes."""
        return tuple(p for name, p in self.programs.items() if name in self.peers)

    @property
    def stored(self) -> tuple[LinkProgram, ...]:
        """Links that GPU kernels store."""
        return tuple(p for name, p in self.programs.items() if name not in self.peers)

    def without_links(self) -> SentLinks:
        """Return a copy without links."""
        return replace(self, programs={}, peers={}, read_in_place=(), copy_of={})

    def with_copies(
        self, copies: Mapping[str, str], bindings: Mapping[str, DestinationBinding]
    ) -> tuple[SentLinks, tuple[LinkProgram, ...]]:
        """Return these links plus one link to each member of a relay group (engine ranks with equal links) after the first.

        The transport itself writes to these members. A link to such a member has the same bytes as the planned link to the
        first member of its group.

        Args:
            copies: member -> first member of its group. A member is ignored if this rank has no planned link to the first
                member.
            bindings: bindings of all these members.

        Returns:
            All links, and the planned links that have copies.

        Raises:
            PlanError: a destination has no binding.
            RegionError: bytes would be written outside the regions of a destination.
        """
        programs = self.programs
        found = {n: replace(programs[of], peer=n) for n, of in copies.items() if of in programs}
        planned = {copies[name]: programs[copies[name]] for name in found}
        for name, program in {**planned, **found}.items():
            if name not in bindings:
                raise PlanError(f"bind_copies: {name} has no binding")
            check_binding(program, bindings[name])
        links = replace(
            self,
            programs={**programs, **found},
            peers={**self.peers, **{name: Peer.bound_to(bindings[name]) for name in found}},
            copy_of={name: copies[name] for name in found},
        )
        return links, tuple(planned.values())

    def changed(
        self,
        manifest: ShardManifest,
        plan: TransferPlan | None,
        bindings: Sequence[DestinationBinding],
        gone: Collection[str],
    ) -> tuple[SentLinks, NewLinks]:
        """Return a copy of these links that leaves out the links to `gone` and adds the links of `plan`.

        Args:
            manifest: manifest of this rank.
            plan: this rank's part of a plan for new destinations; None without new destinations.
            bindings: bindings of the new destinations.
            gone: destinations of the links to remove.

        Returns:
            All links after the change, and the new links alone.

        Raises:
            PlanError: the plan was made for another layout, or a destination has no binding.
            BindingsRefused: some destinations offer memory that cannot be written, or use another digest algorithm.
        """
        added = dict[str, LinkProgram]()
        if plan is not None:
            check_part(manifest, plan.sources, plan.source_digests, "sources")
            added = {program.peer: program for program in bind_links(plan, sending=True)}
        known = bind_peers(added.values(), bindings, self._check)
        kept = {n: p for n, p in self.programs.items() if n not in gone and n not in added}
        # If a link is bound again, it keeps its position, so that the other links keep their places in the arena.
        programs = {n: p for n, p in self.programs.items() if n in kept or n in added} | added
        near = {name for name, binding in known.items() if self._is_stored(binding)}
        peers = {name: peer for name, peer in self.peers.items() if name in kept}
        peers |= {n: Peer.bound_to(known[n]) for n in added if n not in near}
        stored = tuple(added[name] for name in added if name in near)
        links = replace(self, programs=programs, peers=peers, copy_of={})
        read = {i for p in links.written for i in np.unique(p.direct.src_parameter).tolist()}
        return replace(links, read_in_place=tuple(read)), NewLinks(added, known, stored)

    def _is_stored(self, binding: DestinationBinding) -> bool:
        return self.stored_by is None or binding.endpoint.transport in self.stored_by

    def _check(self, program: LinkProgram, binding: DestinationBinding) -> None:
        """Raise PlanError or RegionError if this rank cannot write a link to the destination; see `check_binding`."""
        is_stored = self._is_stored(binding)
        if not is_stored:
            check_digest_kind(self.digest_kind, binding)
        check_binding(program, binding, staged=not is_stored)
