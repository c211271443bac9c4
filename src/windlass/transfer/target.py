"""An engine rank's parameters, for backends that bring the bytes themselves.

Live memory, or a shadow of the same layout that nobody else writes: it is not registered.
Ops go straight to where they belong; there is no landing region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from windlass.layout.manifest import ShardManifest
from windlass.memory.digest import hash_strided, new_digest
from windlass.memory.packing import copy_strided
from windlass.planning.plan import TransferPlan
from windlass.transfer.arena import ALIGNMENT, aligned_offsets
from windlass.transfer.bind import BoundOp, LinkProgram, bind_links, check_part
from windlass.transfer.source import refuse_transforms

__all__ = ["ShadowMemory", "TargetMemory"]


@final
class ShadowMemory:
    """A copy of all parameters, that becomes live as a whole. Owned by this object.

    Args:
        manifest: of the rank.
        addresses: of the live parameters, in manifest order.
    """

    def __init__(self, manifest: ShardManifest, addresses: Sequence[int]) -> None:
        self._manifest, self._live = manifest, tuple(addresses)
        self._shadow: npt.NDArray[np.uint8] | None = None

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of the copies; allocated when first asked for."""
        offsets, total = aligned_offsets(p.nbytes for p in self._manifest.parameters)
        if self._shadow is None:
            self._shadow = np.zeros(total + ALIGNMENT, np.uint8)
        start = int(self._shadow.ctypes.data)
        start += -start % ALIGNMENT
        return tuple(start + offset for offset in offsets)

    def copy_over(self) -> None:
        """Make every element of every shard live; padding stays as it is. Idempotent."""
        positions = {p.name: i for i, p in enumerate(self._manifest.parameters)}
        addresses = self.addresses
        for shard in self._manifest.shards():
            position = positions[shard.parameter]
            dtype = self._manifest.parameters[position].dtype
            copy_strided(
                sizes=shard.box.sizes,
                src_address=addresses[position] + shard.offset_bytes,
                src_strides=shard.strides_bytes,
                src_dtype=dtype,
                dst_address=self._live[position] + shard.offset_bytes,
                dst_strides=shard.strides_bytes,
                dst_dtype=dtype,
            )

    def close(self) -> None:
        """Free the copies. Idempotent."""
        self._shadow = None


@final
class TargetMemory:
    """One rank.

    Args:
        manifest: of this rank.
        addresses: of the live parameters, in manifest order; they never move.
    """

    def __init__(self, manifest: ShardManifest, addresses: Sequence[int]) -> None:
        self.manifest = manifest
        self.programs: dict[str, LinkProgram] = {}
        self._live = tuple(addresses)
        self._targets = self._live
        self._shadow = ShadowMemory(manifest, addresses)

    def bind(self, plan: TransferPlan, *, shadow: bool) -> None:
        """Take a plan part (`TransferPlan.for_destination`); allocates the shadow once.

        Raises:
            PlanError: the plan is for another layout, or asks for the engine's own loader.
        """
        worker = self.manifest.worker
        check_part(self.manifest, plan.destinations, plan.destination_digests, "destinations")
        refuse_transforms(worker, plan)
        self.programs = {p.peer: p for p in bind_links(plan, sending=False)}
        self._targets = self._shadow.addresses if shadow else self._live

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where parameters are to be written."""
        return self._targets

    def verify(self, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Sources whose bytes do not have the expected digest, or that send nothing here."""
        return tuple(
            source
            for source, digest in sorted(expected.items())
            if source not in self.programs or self._digest(self.programs[source]) != digest
        )

    def apply(self) -> None:
        """Copy the shadow over. Idempotent; nothing to do where bytes went to live memory."""
        if self._targets is self._live:
            return
        for program in self.programs.values():
            for op in program.ops:
                copy_strided(
                    sizes=op.sizes,
                    src_address=self._targets[op.dst_parameter] + op.dst_offset,
                    src_strides=op.dst_strides,
                    src_dtype=op.dst_dtype,
                    dst_address=self._live[op.dst_parameter] + op.dst_offset,
                    dst_strides=op.dst_strides,
                    dst_dtype=op.dst_dtype,
                )

    def load(self, op: BoundOp, source_address: int) -> None:
        """Copy and cast an op whose source parameter's byte 0 would lie at `source_address`."""
        copy_strided(
            sizes=op.sizes,
            src_address=source_address + op.src_offset,
            src_strides=op.src_strides,
            src_dtype=op.src_dtype,
            dst_address=self._targets[op.dst_parameter] + op.dst_offset,
            dst_strides=op.dst_strides,
            dst_dtype=op.dst_dtype,
            tensor=op.tensor,
        )

    def close(self) -> None:
        """Free the shadow. Idempotent."""
        self._shadow.close()
        self._targets = self._live

    def _digest(self, program: LinkProgram) -> str:
        digest = new_digest()
        for op in program.ops:
            hash_strided(
                digest,
                address=self._targets[op.dst_parameter] + op.dst_offset,
                sizes=op.sizes,
                strides_bytes=op.dst_strides,
                dtype=op.dst_dtype,
            )
        return digest.hexdigest()
