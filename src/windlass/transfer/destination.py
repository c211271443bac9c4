"""An engine rank's parameters, for backends that bring the bytes themselves.

Live memory, or a shadow of the same layout that nobody else writes: it is not registered.
Ops go straight to where they belong; nothing is staged. In host memory and on a GPU alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import numpy as np

from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import (
    ALIGNMENT,
    OWN_WORK_S,
    Buffer,
    DigestKind,
    LinkDigests,
    MemoryOps,
    PreparedCopies,
    StridedCopy,
    aligned_offsets,
    memory_at,
)
from windlass.planning.plan import TransferPlan
from windlass.planning.program import BoundOp, LinkProgram, bind_links
from windlass.transfer.bind import check_part
from windlass.transfer.source import refuse_transforms

__all__ = ["Destination", "ShadowCopy"]


@final
class ShadowCopy:
    """A copy of all parameters, that becomes live as a whole. Owned by this object.

    Args:
        memory: that the parameters are in.
        manifest: of the rank.
        live: addresses of the live parameters, in manifest order.

    Attributes:
        addresses: of the copies, in manifest order; they hold nothing yet.

    Raises:
        TransferFailed: there is no memory for it.
    """

    def __init__(self, memory: MemoryOps, manifest: ShardManifest, live: Sequence[int]) -> None:
        offsets, total = aligned_offsets(p.nbytes for p in manifest.parameters)
        self._memory, self._manifest, self._live = memory, manifest, tuple(live)
        self._buffer: Buffer = memory.allocate(max(total, ALIGNMENT))
        self._flip: PreparedCopies | None = None
        self.addresses = tuple(self._buffer.address + offset for offset in offsets)

    def copy_over(self) -> None:
        """Make every element of every shard live, and wait for it; padding stays as it is. Idempotent.

        Raises:
            TransferOutcomeUnknown: kernels do not end.
        """
        if self._flip is None:
            self._flip = self._memory.prepare(list(self._copies()))
        self._flip.run()
        self._memory.finish(OWN_WORK_S)

    def close(self) -> None:
        """Free it. Idempotent."""
        if self._flip is not None:
            self._flip.close()
            self._flip = None
        self._buffer.close()

    def _copies(self) -> Iterable[StridedCopy]:
        positions = {p.name: i for i, p in enumerate(self._manifest.parameters)}
        for shard in self._manifest.shards():
            position = positions[shard.parameter]
            dtype = self._manifest.parameters[position].dtype
            yield StridedCopy(
                sizes=shard.box.sizes or (1,),
                src_address=self.addresses[position] + shard.offset_bytes,
                src_strides=shard.strides_bytes or (dtype.itemsize,),
                src_dtype=dtype,
                dst_address=self._live[position] + shard.offset_bytes,
                dst_strides=shard.strides_bytes or (dtype.itemsize,),
                dst_dtype=dtype,
                tensor=shard.tensor,
            )


@final
class Destination:
    """One engine rank, and the links of the plan that fill it. Used by one thread.

    Args:
        manifest: of this rank.
        addresses: of the live parameters, in manifest order; they never move.

    Attributes:
        programs: by source, as bound by the last `bind`.
        addresses: where parameters are to be written: live, or in the shadow.
    """

    def __init__(self, manifest: ShardManifest, addresses: Sequence[int]) -> None:
        self.manifest = manifest
        self.programs: dict[str, LinkProgram] = {}
        self._live = tuple(addresses)
        self.addresses = self._live
        self._memory: MemoryOps | None = None
        self._shadow: ShadowCopy | None = None
        self._digests: LinkDigests | None = None

    @property
    def memory(self) -> MemoryOps:
        """Which the live parameters are in.

        Raises:
            PlanError: several. TransportUnavailable: a GPU whose kernels cannot be compiled.
        """
        if self._memory is None:
            self._memory = memory_at(self._live, self.manifest.worker)
        return self._memory

    @property
    def digest_kind(self) -> DigestKind:
        """Of the digests that `verify` compares."""
        return self.memory.digest_kind

    def bind(self, plan: TransferPlan, *, shadow: bool) -> None:
        """Take a plan part (`TransferPlan.for_destination`); allocates the shadow once.

        Raises:
            PlanError: the plan is for another layout, or it quantises.
            TransferFailed: there is no memory for the shadow.
        """
        check_part(self.manifest, plan.destinations, plan.destination_digests, "destinations")
        refuse_transforms(self.manifest.worker, plan)
        self._drop_digests()
        self.programs = {p.peer: p for p in bind_links(plan, sending=False)}
        if shadow and self._shadow is None:
            self._shadow = ShadowCopy(self.memory, self.manifest, self._live)
        self.addresses = self._shadow.addresses if shadow and self._shadow else self._live

    def fill(self, ops: Iterable[tuple[BoundOp, int]]) -> PreparedCopies:
        """Copies and casts of ops whose source parameter's byte 0 lies at the address beside each."""
        return self.memory.prepare(
            [
                StridedCopy(
                    sizes=op.sizes,
                    src_address=source + op.src_offset,
                    src_strides=op.src_strides,
                    src_dtype=op.src_dtype,
                    dst_address=self.addresses[op.dst_parameter] + op.dst_offset,
                    dst_strides=op.dst_strides,
                    dst_dtype=op.dst_dtype,
                    tensor=op.tensor,
                )
                for op, source in ops
            ]
        )

    def verify(self, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Sources whose bytes do not have the expected digest, or that send nothing here.

        Raises:
            TransferOutcomeUnknown: kernels do not end.
        """
        if self._digests is None:
            addresses = np.array(self.addresses, np.uint64)
            self._digests = self.memory.digests(self.programs, addresses, at_source=False)
        known = [source for source in expected if source in self.programs]
        found = self._digests.take(known, OWN_WORK_S)
        return tuple(sorted(s for s, digest in expected.items() if found.get(s) != digest))

    def apply(self) -> None:
        """Copy the shadow over. Idempotent; nothing to do where bytes went to live memory.

        Raises:
            TransferOutcomeUnknown: kernels do not end.
        """
        if self._shadow is not None and self.addresses is self._shadow.addresses:
            self._shadow.copy_over()

    def close(self) -> None:
        """Free the shadow. Idempotent."""
        self._drop_digests()
        if self._shadow is not None:
            self._shadow.close()
            self._shadow = None
        self.addresses, self.programs = self._live, {}

    def _drop_digests(self) -> None:
        if self._digests is not None:
            self._digests.close()
            self._digests = None
