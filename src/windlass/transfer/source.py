"""Parameters of a trainer rank as a source of updates: their addresses and the digests of their links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np

from windlass.errors import PlanError
from windlass.layout.columns import UInt64Array
from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import OWN_WORK_S, LinkDigests, MemoryOps
from windlass.memory.place import memory_at
from windlass.planning.plan import TransferPlan
from windlass.planning.program import LinkProgram, bind_links
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bind import bind_peers, check_digest_kind, check_part
from windlass.transfer.bindings import DestinationBinding, LinkOutcome, LinkStatus


def check_described(manifest: ShardManifest, memories: Sequence[ParameterMemory]) -> None:
    """Raise `PlanError` if the number or the sizes of the parameters differ from the manifest."""
    specs = manifest.parameters
    if len(memories) != len(specs):
        raise PlanError(
            f"{manifest.worker}: must have the {len(specs)} parameters of its manifest, got {len(memories)}"
        )
    for spec, memory in zip(specs, memories, strict=True):
        if memory.nbytes != spec.nbytes:
            raise PlanError(
                f"{manifest.worker}: parameter {spec.name!r} must have {spec.nbytes} bytes as in its "
                f"manifest, got {memory.nbytes}"
            )


@final
class LocatedParameters:
    """Function that returns the current memory of a rank's parameters, and checks it against the manifest.

    Locating thousands of tensors takes tens of milliseconds. Inside a `with` block of `once`, several calls locate the
    tensors only once. Not thread-safe.

    Args:
        manifest: manifest of the rank.
        locate: function that returns the memory of each parameter, in manifest order.
    """

    def __init__(
        self, manifest: ShardManifest, locate: Callable[[], Sequence[ParameterMemory]]
    ) -> None:
        self._manifest, self._locate = manifest, locate
        self._keeps = False
        self._kept: tuple[ParameterMemory, ...] | None = None

    def __call__(self) -> tuple[ParameterMemory, ...]:
        """Return the memory of each parameter, in manifest order. Outside `once`, every call locates them again.

        Raises:
            PlanError: the number or the sizes of the parameters differ from the manifest.
        """
        if self._kept is not None:
            return self._kept
        found = tuple(self._locate())
        check_described(self._manifest, found)
        if self._keeps:
            self._kept = found
        return found

    @contextmanager
    def once(self) -> Iterator[None]:
        """Locate the parameters only once inside this block. The parameters must not move before the block ends."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._kept = False, None


def addresses_of(located: Sequence[ParameterMemory]) -> UInt64Array:
    """Return the address of each parameter as an array, (num_parameters,)."""
    return np.array([memory.address for memory in located], np.uint64)


def refuse_transforms(worker: str, plan: TransferPlan) -> None:
    """Raise `PlanError` if the plan quantises. Only the sender of one-sided writes can quantise."""
    if plan.quantizes:
        raise PlanError(
            f"connect: {worker}: the plan quantises, and this backend sends parameters unchanged: "
            "quantised engines need one-sided writes"
        )


@final
class SourceMemory:
    """Parameters of one sending rank, in host memory or on a GPU, and its links. For backends without packing.

    Args:
        manifest: manifest of the rank.
        parameters: function that returns the current memory of the parameters, in manifest order. Each `locate` calls
            it.

    Attributes:
        programs: destination -> link, from the last `bind`.
        addresses: (num_parameters,) addresses from the last `locate`.
    """

    def __init__(
        self, manifest: ShardManifest, parameters: Callable[[], Sequence[ParameterMemory]]
    ) -> None:
        self.manifest = manifest
        self.programs: dict[str, LinkProgram] = {}
        self.addresses: UInt64Array = np.zeros(0, np.uint64)
        self._parameters = LocatedParameters(manifest, parameters)
        self._memory: MemoryOps | None = None
        self._digests: LinkDigests | None = None
        self._found: dict[str, str] = {}

    def bind(self, plan: TransferPlan, bindings: Sequence[DestinationBinding]) -> None:
        """Drop all earlier links and their digests, locate the parameters, and bind a plan part (`TransferPlan.parts`).

        Raises:
            PlanError: the plan was made for another layout or quantises, or a destination has no binding; see also
                `locate`.
            BindingsRefused: this rank's parameters are on a GPU and a destination's are in host memory, or vice versa.
            TransferFailed, TransportUnavailable: see `memory_at`.
        """
        self.close()
        check_part(self.manifest, plan.sources, plan.source_digests, "sources")
        refuse_transforms(self.manifest.worker, plan)
        programs = {program.peer: program for program in bind_links(plan, sending=True)}
        self.locate()
        kind = self.memory.digest_kind
        bind_peers(programs.values(), bindings, lambda _, binding: check_digest_kind(kind, binding))
        self.programs = programs

    @property
    def memory(self) -> MemoryOps:
        """Operations on the memory of the parameters.

        Raises:
            PlanError: `locate` was not called before.
        """
        if self._memory is None:
            raise PlanError(
                f"{self.manifest.worker}: parameters have not been located; connect first"
            )
        return self._memory

    def locate(self) -> bool:
        """Locate the parameters again, and store their addresses. If a parameter has moved, free the prepared digests.

        Returns:
            Whether a parameter has moved since the last call; True at the first call.

        Raises:
            PlanError: the number or the sizes of the parameters differ from the manifest.
            PlanError: the parameters are on several GPUs, or some are on a GPU and others in host memory.
            PlanError: while links are bound, the parameters have moved to another GPU, or between GPU and host memory.
            TransferFailed, TransportUnavailable: see `memory_at`.
        """
        now = self._parameters()
        addresses = addresses_of(now)
        if self._memory is not None and np.array_equal(addresses, self.addresses):
            return False
        memory = memory_at((m.address for m in now if m.nbytes), self.manifest.worker)
        if self._memory is not None and memory.ordinal != self._memory.ordinal and self.programs:
            raise PlanError(
                f"{self.manifest.worker}: weights must stay on GPU {self._memory.ordinal}, where they were "
                f"when this rank connected, got GPU {memory.ordinal} (-1 is host memory)"
            )
        self._drop_digests()
        self._memory, self.addresses = memory, addresses
        return True

    def hash_links(self) -> None:
        """Compute and store the digest of every link from the current parameters. Call `locate` first.

        Raises:
            TransferFailed: a cast overflows, or other work on the GPU did not end within `OWN_WORK_S`.
            TransferOutcomeUnknown: kernels of this method did not end within `OWN_WORK_S`.
        """
        self.memory.settle(OWN_WORK_S)
        if self._digests is None:
            self._digests = self.memory.sent_digests(self.programs, self.addresses)
        self._found = self._digests.take(self.programs, OWN_WORK_S)

    def delivered(self, destinations: Sequence[str]) -> tuple[LinkOutcome, ...]:
        """Return the outcomes of links that were written completely: status OK, and the digests from `hash_links`."""
        return tuple(
            LinkOutcome(name, LinkStatus.OK, self.programs[name].nbytes, self._found[name])
            for name in destinations
        )

    def close(self) -> None:
        """Free the digests, and drop all links. Idempotent."""
        self._drop_digests()
        self.programs, self._found = {}, {}

    def _drop_digests(self) -> None:
        if self._digests is not None:
            self._digests.close()
            self._digests = None
