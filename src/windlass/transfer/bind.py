"""Whether a plan part and a destination's binding are those that this rank was promised."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np

from windlass.errors import PlanError, RegionError, RoundAborted
from windlass.layout.manifest import ShardManifest
from windlass.planning.program import DigestKind, LinkProgram
from windlass.transfer.bindings import BindingsRefused, DestinationBinding
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

    Args:
        program: of the link.
        binding: what the destination offers.
        staged: whether SCATTER ops go to staging memory; kernels that store
            strided need none.

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
