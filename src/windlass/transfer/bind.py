"""What a rank that sends is bound to, and whether that is what this rank was promised."""

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


def check_part(
    manifest: ShardManifest, workers: Sequence[str], digests: Sequence[str], argument: str
) -> int:
    """The index of a rank among the plan's `workers`.

    Raises:
        PlanError: it is not one of them, or the plan was made for another layout of it.
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
    """Refuse destinations that this rank does not send to.

    Raises:
        RoundAborted: there is one.
    """
    unknown = [name for name in destinations if name not in known]
    if unknown:
        raise RoundAborted(f"write: this rank sends nothing to {', '.join(unknown)}")


def bind_peers(
    programs: Iterable[LinkProgram],
    bindings: Iterable[DestinationBinding],
    check: Callable[[LinkProgram, DestinationBinding], None],
) -> dict[str, DestinationBinding]:
    """The binding of every link's destination, each of which has passed `check`.

    Raises:
        PlanError: a destination has no binding.
        BindingsRefused: some did not pass.
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
    """Check every address that the link will write, before anything is paused.

    `staged`: SCATTER ops go to staging memory, which kernels that store strided do not need.

    Raises:
        PlanError: a parameter or staging memory that the destination did not offer.
        RegionError: bytes outside the regions that the destination published.
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
    """Refuse a destination whose digests cannot equal this rank's.

    Raises:
        PlanError: its weights are in another kind of memory.
    """
    if binding.digest_kind is not kind:
        raise PlanError(
            f"connect: {binding.worker}: weights must be on GPUs at both ends or in host memory at "
            f"both: this rank hashes by {kind}, that one by {binding.digest_kind}"
        )


@dataclass(frozen=True, slots=True)
class NewLinks:
    """Links that a rank is bound to anew, by destination. `stored`: those whose bytes its kernels store."""

    programs: Mapping[str, LinkProgram]
    bindings: Mapping[str, DestinationBinding]
    stored: tuple[LinkProgram, ...]


@dataclass(frozen=True, slots=True)
class SentLinks:
    """The links of a rank that sends: bytes are written to some peers, kernels store into all others.

    Attributes:
        digest_kind: of what is written.
        stored_by: transports whose links kernels store; None for all.
        programs: by destination, in the order of their places in the arena.
        peers: that bytes are written to.
        read_in_place: parameters that are written from where they lie.
    """

    digest_kind: DigestKind
    stored_by: Collection[str] | None = ()
    programs: Mapping[str, LinkProgram] = field(default_factory=dict)
    peers: Mapping[str, Peer] = field(default_factory=dict)
    read_in_place: tuple[int, ...] = ()

    @property
    def written(self) -> tuple[LinkProgram, ...]:
        """Links whose bytes are written."""
        return tuple(p for name, p in self.programs.items() if name in self.peers)

    @property
    def stored(self) -> tuple[LinkProgram, ...]:
        """Links whose bytes kernels store."""
        return tuple(p for name, p in self.programs.items() if name not in self.peers)

    def none(self) -> SentLinks:
        """No links, and the peers that there were, for those that are kept."""
        return replace(self, programs={})

    def with_copies(
        self, copies: Mapping[str, LinkProgram], bindings: Mapping[str, DestinationBinding]
    ) -> SentLinks:
        """These links, and written ones to members of relay groups."""
        peers = {name: Peer.bound_to(bindings[name]) for name in copies}
        return replace(self, programs={**self.programs, **copies}, peers={**self.peers, **peers})

    def changed(
        self,
        manifest: ShardManifest,
        plan: TransferPlan | None,
        bindings: Sequence[DestinationBinding],
        gone: Collection[str],
    ) -> tuple[SentLinks, NewLinks]:
        """What there is once some links are bound anew and others end; see `Sender.change_links`.

        Raises:
            PlanError: the plan was made for another layout, or a destination has no binding.
            BindingsRefused: what some destinations offer cannot be written, or is hashed otherwise.
        """
        added = dict[str, LinkProgram]()
        if plan is not None:
            check_part(manifest, plan.sources, plan.source_digests, "sources")
            added = {program.peer: program for program in bind_links(plan, sending=True)}
        known = bind_peers(added.values(), bindings, self._check)
        kept = {n: p for n, p in self.programs.items() if n not in gone and n not in added}
        # One that is bound anew has its old place, so that the places of others in the arena stay.
        programs = {n: p for n, p in self.programs.items() if n in kept or n in added} | added
        near = {name for name, binding in known.items() if self._is_stored(binding)}
        peers = {name: peer for name, peer in self.peers.items() if name in kept}
        peers |= {n: Peer.bound_to(known[n]) for n in added if n not in near}
        stored = tuple(added[name] for name in added if name in near)
        links = replace(self, programs=programs, peers=peers)
        read = {i for p in links.written for i in np.unique(p.direct.src_parameter).tolist()}
        return replace(links, read_in_place=tuple(read)), NewLinks(added, known, stored)

    def _is_stored(self, binding: DestinationBinding) -> bool:
        return self.stored_by is None or binding.endpoint.transport in self.stored_by

    def _check(self, program: LinkProgram, binding: DestinationBinding) -> None:
        is_stored = self._is_stored(binding)
        if not is_stored:
            check_digest_kind(self.digest_kind, binding)
        check_binding(program, binding, staged=not is_stored)
