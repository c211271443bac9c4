"""A trainer rank's parameters, for backends that read them as they lie: located and hashed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

import xxhash

from windlass.errors import PlanError, RoundAborted
from windlass.execution.base import ParameterMemory
from windlass.execution.bind import BoundOp, LinkProgram, bind_links, check_part
from windlass.execution.bindings import DestinationBinding
from windlass.execution.pieces import split_op
from windlass.layout.manifest import ShardManifest
from windlass.memory.digest import hash_strided, new_digest
from windlass.memory.packing import copy_strided
from windlass.planning.plan import TransferPlan, Transform

__all__ = ["SourceMemory", "refuse_transforms"]

SCRATCH_NBYTES = 1 << 20
"""For casting before hashing."""


def refuse_transforms(worker: str, programs: Iterable[LinkProgram]) -> None:
    """Refuse ops that compute (block scales): only the one-sided sender packs them.

    Raises:
        PlanError: there is one.
    """
    if any(op.transform is not Transform.NONE for program in programs for op in program.ops):
        raise PlanError(f"{worker}: this backend copies and casts only: quantised engines need p2p")


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

    def bind(self, plan: TransferPlan, bindings: Sequence[DestinationBinding]) -> None:
        """Take a plan part (`TransferPlan.for_source`).

        Raises:
            PlanError: it was made for another layout, it quantises, or a destination has no binding.
        """
        self.programs = {}
        check_part(self.manifest, plan.sources, plan.source_digests, "sources")
        if plan.quantizes:
            raise PlanError(
                f"connect: {self.manifest.worker}: the plan quantises, and this backend sends "
                "parameters as they lie: quantised engines need one-sided writes"
            )
        programs = {program.peer: program for program in bind_links(plan, sending=True)}
        refuse_transforms(self.manifest.worker, programs.values())
        missing = sorted(set(programs) - {binding.worker for binding in bindings})
        if missing:
            raise PlanError(f"connect: destination {missing[0]} of the plan has no binding")
        self.programs = programs

    def locate(self) -> None:
        """Ask where parameters lie.

        Raises:
            PlanError: another number of them, or other sizes, than described.
        """
        now, specs = tuple(self._parameters()), self.manifest.parameters
        if [memory.nbytes for memory in now] != [spec.nbytes for spec in specs]:
            raise PlanError(
                f"{self.manifest.worker}: parameters have other sizes than those described"
            )
        self._addresses = tuple(memory.address for memory in now)

    def address_of(self, parameter: int) -> int:
        """Where a parameter begins, as of the last `locate`."""
        return self._addresses[parameter]

    def digests(self) -> dict[str, str]:
        """Destination -> digest of what its link delivers, read from the parameters as they are."""
        found = {}
        scratch = bytearray(SCRATCH_NBYTES)
        for peer, program in self.programs.items():
            digest = new_digest()
            for op in program.ops:
                self._hash(digest, op, scratch)
            found[peer] = digest.hexdigest()
        return found

    def check_destinations(self, destinations: Sequence[str]) -> None:
        """Refuse destinations that this rank does not send to.

        Raises:
            RoundAborted: there is one.
        """
        unknown = [name for name in destinations if name not in self.programs]
        if unknown:
            raise RoundAborted(f"write: this rank sends nothing to {', '.join(unknown)}")

    def _hash(self, digest: xxhash.xxh3_128, op: BoundOp, scratch: bytearray) -> None:
        if op.src_dtype is op.dst_dtype:
            hash_strided(
                digest,
                address=self._addresses[op.src_parameter] + op.src_offset,
                sizes=op.sizes,
                strides_bytes=op.src_strides,
                dtype=op.src_dtype,
            )
            return
        import numpy as np

        address = int(np.frombuffer(scratch, np.uint8).ctypes.data)
        for part in split_op(op, SCRATCH_NBYTES):
            copy_strided(
                sizes=part.sizes,
                src_address=self._addresses[part.src_parameter] + part.src_offset,
                src_strides=part.src_strides,
                src_dtype=part.src_dtype,
                dst_address=address,
                dst_strides=part.packed_strides,
                dst_dtype=part.dst_dtype,
            )
            digest.update(memoryview(scratch)[: part.nbytes])
