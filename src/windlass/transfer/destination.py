"""The memory of one engine rank that an update fills: allocates it, verifies the bytes, and makes them live.

An update fills the live parameters, or a shadow copy with the same layout. The payload of an op with strides at the
destination may be received in staging memory, as contiguous bytes. `Destination.apply` copies all bytes from
shadow copy and staging memory to the live parameters. All backends use this module, for host memory and for GPU memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import numpy as np

from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import OWN_WORK_S, Buffer, LinkDigests, MemoryOps
from windlass.memory.packing import ALIGNMENT, PreparedCopies, StridedCopy
from windlass.memory.place import memory_at
from windlass.memory.ranges import joined_ranges
from windlass.planning.plan import TransferPlan
from windlass.planning.program import BoundOp, DigestKind, LinkProgram, bind_links
from windlass.transfer.arena import Arena, aligned_offsets
from windlass.transfer.bind import check_part
from windlass.transfer.bindings import DestinationBinding
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.peers import PeerEndpoint


@final
class ShadowCopy:
    """Copy of a rank's parameters that no engine reads. This object owns the memory.

    Args:
        memory: memory of the live parameters.
        manifest: manifest of the rank.
        live: addresses of the live parameters, in manifest order; they never move.
        allocate: function that allocates the copy; None for `memory.allocate`.

    Attributes:
        buffer: the whole allocation. Its contents are undefined at first.
        addresses: address of each parameter's copy, in manifest order.

    Raises:
        TransferFailed, TransportUnavailable, OSError: there is too little memory.
    """

    def __init__(
        self,
        memory: MemoryOps,
        manifest: ShardManifest,
        live: Sequence[int],
        allocate: Callable[[int], Buffer] | None = None,
    ) -> None:
        offsets, total = aligned_offsets(p.nbytes for p in manifest.parameters)
        self._memory, self._manifest, self._live = memory, manifest, tuple(live)
        self.buffer: Buffer = (allocate or memory.allocate)(max(total, ALIGNMENT))
        self._flip: PreparedCopies | None = None
        self.addresses = tuple(self.buffer.address + offset for offset in offsets)

    def copy_over(self) -> None:
        """Copy all elements, but not padding, to the live parameters, and wait until they are copied. Idempotent.

        Raises:
            TransferFailed: the GPU reports an error, or has too little memory for the tables of the copies.
            TransferOutcomeUnknown: GPU kernels did not end within `OWN_WORK_S`.
        """
        if self._flip is None:
            self._flip = self._memory.prepare(list(self._copies()))
        self._flip.run()
        self._memory.finish(OWN_WORK_S)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self._flip is not None:
            self._flip.close()
            self._flip = None
        self.buffer.close()

    def _copies(self) -> Iterable[StridedCopy]:
        """Yield one copy per shard, from the shadow copy to the live parameter."""
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
    """Memory of one engine rank, and the links of the plan that fill it. Not thread-safe.

    Args:
        manifest: manifest of the rank.
        live: addresses of the live parameters, in manifest order; they never move.
        memory: memory of the live parameters; None to find it from the addresses.
        transport: registers the memory that this object allocates, so that peers can write to it. The caller closes it.
            None if no peer writes.

    Attributes:
        programs: source -> link, from the last `bind`.
        addresses: addresses that the update fills, one per parameter: of the live parameter or of its shadow copy.
        staging_address: address of the staging memory; 0 if no op uses it.
        digests: digests of the links over the filled memory; None before `bind`.
        late_nbytes: number of bytes that the last `verify` had to hash.
    """

    def __init__(
        self,
        manifest: ShardManifest,
        live: Sequence[int],
        memory: MemoryOps | None = None,
        transport: OneSidedTransport | None = None,
    ) -> None:
        self.manifest = manifest
        self.programs: dict[str, LinkProgram] = {}
        self.addresses = self._live = tuple(live)
        self.staging_address = 0
        self.digests: LinkDigests | None = None
        self.late_nbytes = 0
        self._memory, self._transport = memory, transport
        self._shadow: ShadowCopy | None = None
        self._staging: Buffer | None = None
        self._flip: PreparedCopies | None = None

    @property
    def memory(self) -> MemoryOps:
        """Operations on the memory of the live parameters.

        Raises:
            PlanError: the parameters are on several GPUs, or partly on a GPU and partly in host memory.
            TransportUnavailable: the kernels cannot be compiled for the GPU.
            TransferFailed: the GPU reports an error.
        """
        if self._memory is None:
            self._memory = memory_at(self._live, self.manifest.worker)
        return self._memory

    @property
    def digest_kind(self) -> DigestKind:
        return self.memory.digest_kind

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """Registered regions of the shadow copy and of the staging memory."""
        shadow = None if self._shadow is None else self._shadow.buffer
        return tuple(b.region for b in (shadow, self._staging) if isinstance(b, Arena))

    def bind(self, plan: TransferPlan, *, shadow: bool, staged: bool) -> None:
        """Replace all links by the links of a plan part (`TransferPlan.parts`).

        Allocate the shadow copy and the staging memory that the links need. If an earlier call has allocated enough, use
        this memory again. Prepare the digests for `verify` and the copies for `apply`. Wait for running kernels first, at
        most `OWN_WORK_S`. After an error other than PlanError, call `bind` again before `verify` or `apply`.

        Args:
            plan: the plan part.
            shadow: whether sources fill the shadow copy. The live parameters then change only in `apply`.
            staged: whether elements that are not contiguous in the destination arrive in staging memory first; False if
                the transport writes them in place.

        Raises:
            PlanError: the plan is for another layout; see also `memory`.
            TransportUnavailable: see `memory` and `ShadowCopy`.
            TransferFailed, OSError: there is too little memory, or the GPU reports an error.
            RegionError: memory cannot be registered.
            TransferOutcomeUnknown: earlier kernels may still run.
        """
        index = check_part(
            self.manifest, plan.destinations, plan.destination_digests, "destinations"
        )
        # Kernels may still read memory that is freed below, so wait for them.
        self.memory.finish(OWN_WORK_S)
        self._unbind()
        programs = {p.peer: p for p in bind_links(plan, sending=False)}
        if shadow and self._shadow is None:
            self._shadow = ShadowCopy(self.memory, self.manifest, self._live, self._allocate)
        self.addresses = self._shadow.addresses if shadow and self._shadow else self._live
        self.staging_address = self._stage(plan.staging_nbytes[index] if staged else 0)
        self.digests = self.memory.received_digests(
            programs, np.array(self.addresses, np.uint64), self.staging_address
        )
        self.programs = programs
        try:
            self._flip = self.memory.prepare(list(self._not_live()))
        except BaseException:
            # `verify` must fail, because `apply` would copy nothing.
            self._unbind()
            raise

    def unaddressed_binding(self, endpoint: PeerEndpoint) -> DestinationBinding:
        """Return a binding without addresses, for backends without one-sided writes."""
        worker = self.manifest.worker
        return DestinationBinding(worker, endpoint, (), (), digest_kind=self.digest_kind)

    def prepare_fill(self, ops: Iterable[tuple[BoundOp, int]]) -> PreparedCopies:
        """Prepare copies, with casts, that fill this rank's memory from buffers of this process.

        Backends without one-sided writes receive source parameters into such buffers.

        Args:
            ops: each op, and the address at which the op's source parameter begins in a buffer.
        """
        return self.memory.prepare(
            [
                StridedCopy.of_op(
                    op,
                    source + op.src_offset,
                    self.addresses[op.dst_parameter] + op.dst_offset,
                )
                for op, source in ops
            ],
            beside_transfers=True,
        )

    def verify(
        self, expected: Mapping[str, str], hashed: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Compare the digests of the filled memory with `expected`.

        Args:
            expected: source -> digest.
            hashed: source -> digest that this rank computed during the writes. If a digest differs from the expected
                digest, this method hashes the memory again.

        Returns:
            Sorted names of the sources whose bytes have a wrong digest on this rank, and of sources without a link to
            this rank.

        Raises:
            TransferFailed: the GPU reports an error.
            TransferOutcomeUnknown: GPU kernels did not end within `OWN_WORK_S`.
        """
        found = dict(hashed or {})
        late = [s for s in expected if s in self.programs and found.get(s) != expected[s]]
        self.late_nbytes = sum(self.programs[source].nbytes for source in late)
        if self.digests is not None:
            found |= self.digests.take(late, OWN_WORK_S)
        return tuple(sorted(s for s, digest in expected.items() if found.get(s) != digest))

    def apply(self) -> None:
        """Copy the bytes in shadow copy and staging memory to the live parameters, and wait for these copies. Idempotent.

        Raises:
            TransferFailed: the GPU reports an error.
            TransferOutcomeUnknown: GPU kernels did not end within `OWN_WORK_S`.
        """
        if self._flip is not None:
            self._flip.run()
            self.memory.finish(OWN_WORK_S)

    def close(self) -> None:
        """Free the shadow copy and the staging memory. No peer may write after this call. Idempotent.

        If late kernels may still use some of this memory, it stays allocated.
        """
        self._unbind()
        if self._shadow is not None:
            self._shadow.close()
            self._shadow = None
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self.addresses = self._live

    def _allocate(self, nbytes: int) -> Buffer:
        if self._transport is None:
            return self.memory.allocate(nbytes)
        return Arena(self._transport, nbytes, self.memory)

    def _stage(self, nbytes: int) -> int:
        """Allocate at least `nbytes` of staging memory, and return its address; 0 if `nbytes` is 0.

        Staging memory of an earlier call is used again if it is large enough. Otherwise it is freed.
        """
        if not nbytes:
            return 0
        if self._staging is not None and self._staging.nbytes < nbytes:
            self._staging.close()
            self._staging = None
        if self._staging is None:
            self._staging = self._allocate(nbytes)
        return self._staging.address

    def _unbind(self) -> None:
        """Drop all links, and free the digests and copies that `bind` prepared. Their kernels must have ended.

        The shadow copy and the staging memory stay allocated.
        """
        if self.digests is not None:
            self.digests.close()
            self.digests = None
        if self._flip is not None:
            self._flip.close()
            self._flip = None
        self.programs, self.staging_address = {}, 0

    def _not_live(self) -> Iterator[StridedCopy]:
        """Yield the copies of `apply`, from shadow copy and staging memory to the live parameters.

        Padding is not copied, because the shadow copy has no defined bytes for it.
        """
        is_live = self.addresses is self._live
        rows: list[tuple[int, int, int]] = []
        for program in self.programs.values():
            for op in program.ops:
                if op.lands and self.staging_address:
                    address = self.staging_address + op.staging_offset
                    yield self._copy(op, address, op.packed_strides)
                elif is_live or op.is_direct:
                    continue
                elif op.dst_strides == op.packed_strides:
                    rows.append((op.dst_parameter, op.dst_offset, op.dst_offset + op.nbytes))
                else:
                    address = self.addresses[op.dst_parameter] + op.dst_offset
                    yield self._copy(op, address, op.dst_strides)
            if not is_live:
                runs = program.direct
                columns = (runs.dst_parameter, runs.dst_offset, runs.dst_offset + runs.nbytes)
                rows.extend(zip(*(column.tolist() for column in columns), strict=True))
        for parameter, start, stop in joined_ranges(rows):
            source, target = self.addresses[parameter], self._live[parameter]
            yield StridedCopy.of_bytes(source + start, target + start, stop - start)

    def _copy(self, op: BoundOp, address: int, strides: tuple[int, ...]) -> StridedCopy:
        delivered = replace(op, src_strides=strides, src_dtype=op.dst_dtype)
        live = self._live[op.dst_parameter] + op.dst_offset
        return StridedCopy.of_op(delivered, address, live)
