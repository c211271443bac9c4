"""A trainer rank's parameters, for backends that read them as they lie: located and hashed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from windlass.errors import PlanError
from windlass.layout.manifest import ShardManifest
from windlass.memory.cuda.driver import gpu_of
from windlass.planning.plan import TransferPlan
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bind import LinkProgram, bind_links, check_destinations, check_part
from windlass.transfer.bindings import DestinationBinding, LinkOutcome, LinkStatus
from windlass.transfer.parameters import check_described
from windlass.transfer.pieces import hash_link

__all__ = ["SourceMemory", "failed_links", "refuse_gpu_memory", "refuse_transforms"]


def refuse_transforms(worker: str, plan: TransferPlan) -> None:
    """Refuse a plan that quantises: only the one-sided sender packs such ops.

    Raises:
        PlanError: it does.
    """
    if plan.quantizes:
        raise PlanError(
            f"connect: {worker}: the plan quantises, and this backend sends parameters as they lie: "
            "quantised engines need one-sided writes"
        )


def refuse_gpu_memory(worker: str, addresses: Sequence[int]) -> None:
    """Refuse memory that only kernels can read: reading it here would end the process.

    Args:
        worker: whose.
        addresses: of its parameters, which are all in one kind of memory.

    Raises:
        PlanError: one of them is on a GPU.
    """
    ordinal = max(map(gpu_of, addresses), default=-1)
    if ordinal >= 0:
        raise PlanError(
            f"{worker}: its weights are on GPU {ordinal}: the backends xccl and disk, and updates by "
            "hand, read and write host memory; use the backend p2p"
        )


def failed_links(destinations: Sequence[str], reason: str) -> tuple[LinkOutcome, ...]:
    """What is said of links that fail together."""
    return tuple(LinkOutcome(name, LinkStatus.FAILED, 0, "", reason) for name in destinations)


@final
class SourceMemory:
    """Parameters of one rank, and the links of the plan that they feed.

    Args:
        manifest: of this rank.
        parameters: where the parameters lie now, in manifest order; asked at every `locate`.
    """

    def __init__(
        self, manifest: ShardManifest, parameters: Callable[[], Sequence[ParameterMemory]]
    ) -> None:
        self.manifest = manifest
        self.programs: dict[str, LinkProgram] = {}
        self._parameters = parameters
        self._addresses: tuple[int, ...] = ()
        self._digests: dict[str, str] = {}

    def bind(self, plan: TransferPlan, bindings: Sequence[DestinationBinding]) -> None:
        """Take a plan part (`TransferPlan.for_source`).

        Raises:
            PlanError: it was made for another layout, it quantises, or a destination has no binding.
        """
        self.programs, self._digests = {}, {}
        check_part(self.manifest, plan.sources, plan.source_digests, "sources")
        refuse_transforms(self.manifest.worker, plan)
        programs = {program.peer: program for program in bind_links(plan, sending=True)}
        missing = sorted(set(programs) - {binding.worker for binding in bindings})
        if missing:
            raise PlanError(f"connect: destination {missing[0]} of the plan has no binding")
        self.programs = programs

    def locate(self) -> None:
        """Ask where parameters lie.

        Raises:
            PlanError: another number of them, or other sizes, than described, or they are on a GPU.
        """
        now = tuple(self._parameters())
        check_described(self.manifest, now)
        refuse_gpu_memory(self.manifest.worker, [memory.address for memory in now])
        self._addresses = tuple(memory.address for memory in now)

    def address_of(self, parameter: int) -> int:
        """Where a parameter begins, as of the last `locate`."""
        return self._addresses[parameter]

    def hash_links(self) -> None:
        """Digest what every link delivers, from the parameters as they are."""
        sources = np.array(self._addresses, np.uint64)
        for peer, program in self.programs.items():
            self._digests[peer] = hash_link(program, sources)

    def delivered(self, destinations: Sequence[str]) -> tuple[LinkOutcome, ...]:
        """What is said of links that delivered what `hash_links` saw."""
        return tuple(
            LinkOutcome(name, LinkStatus.OK, self.programs[name].nbytes, self._digests[name])
            for name in destinations
        )

    def check_destinations(self, destinations: Sequence[str]) -> None:
        """See `bind.check_destinations`."""
        check_destinations(self.programs, destinations)
