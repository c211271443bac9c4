"""The engine's side of one-sided writes: publish the addresses that peers write, and verify the bytes.

`Receiver.connect` takes a plan part and returns the addresses that peers write
(`DestinationBinding`). For each version, `Receiver.verify` takes the digests that the senders
computed and returns the sources whose bytes differ. While bytes arrive, the receiver does nothing,
unless the source reports the parts that its kernels have written: the receiver then hashes each
part while later parts arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import final

from windlass.config import UpdateMode
from windlass.errors import PlanError
from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import OWN_WORK_S
from windlass.planning.plan import TransferPlan
from windlass.transfer.arena import memory_of
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.destination import Destination
from windlass.transfer.shared_bytes import refuse_shared_bytes
from windlass.transfer.write_progress import ProgressDigests
from windlass.transports.base import MemoryRegion, OneSidedTransport


@final
class Receiver:
    """`ReceiverBackend` of `p2p`: one engine rank that peers write. Thread-safe.

    Mode `in_place` writes to the live parameters, `staged` to a shadow copy with the same layout.
    Ops that are strided at the destination go to staging memory, unless peers can store strided
    elements.

    Args:
        transport: the live parameters are registered with it. The caller closes it.
        addresses: addresses of the live parameters, in manifest order; they never move.
        regions: registered regions that contain every live parameter.

    Attributes:
        late_nbytes: bytes that the last `verify` had to hash; all other bytes were hashed while
            later bytes were written.
        progress: digests of bytes that senders have announced as written; None if nothing is hashed before `verify`.
    """

    def __init__(
        self,
        transport: OneSidedTransport,
        manifest: ShardManifest,
        addresses: Sequence[int],
        regions: Sequence[MemoryRegion],
    ) -> None:
        if len(addresses) != len(manifest.parameters):
            raise PlanError(
                f"{manifest.worker}: {len(addresses)} addresses for "
                f"{len(manifest.parameters)} parameters"
            )
        refuse_shared_bytes(manifest, addresses)
        self.transport, self.manifest = transport, manifest
        self.live_addresses, self.regions = tuple(addresses), tuple(regions)
        self.late_nbytes = 0
        self._lock = threading.Lock()
        self._bound: Destination | None = None
        self.progress: ProgressDigests | None = None

    @property
    def destination(self) -> Destination:
        """Memory that peers write. Nothing is allocated before `connect`.

        Raises:
            TransportUnavailable: the kernels cannot be compiled for the GPU.
        """
        if self._bound is None:
            memory = memory_of(self.transport)
            self._bound = Destination(self.manifest, self.live_addresses, memory, self.transport)
        return self._bound

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Bind a plan part (`TransferPlan.parts`).

        The first call that needs the shadow copy or staging memory allocates it.

        Raises:
            PlanError: the plan is for another layout, or requires the engine's own loader.
            RegionError: memory cannot be registered.
            TransferFailed: there is not enough memory.
            TransferOutcomeUnknown: earlier kernels may still run.
        """
        with self._lock:
            found = self.destination
            shadow, staged = mode is UpdateMode.STAGED, not self.transport.traits.strided_stores
            # Kernels may still read memory that is freed below, so wait for them.
            found.memory.finish(OWN_WORK_S)
            progress = self._hash_as_written()
            if progress is not None:
                progress.load({})
            found.bind(plan, shadow=shadow, staged=staged)
            if progress is not None and found.digests is not None:
                progress.load(found.digests.links)
            regions = (*self.regions, *found.regions)
            return DestinationBinding(
                worker=self.manifest.worker,
                endpoint=self.transport.endpoint(),
                regions=tuple(exported for region in regions for exported in region.remotes),
                parameter_addresses=found.addresses,
                staging_address=found.staging_address,
                listener="" if progress is None else progress.address,
                digest_kind=found.digest_kind,
            )

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Return the sources in `expected` (source -> digest) with another digest here, or without a link to this rank.

        If a link was hashed while it was written, this digest is compared first, and the link is
        hashed again only if the digest differs.

        Raises:
            TransferOutcomeUnknown: kernels do not end.
        """
        with self._lock:
            hashed: dict[str, str] = {}
            if self.progress is not None:
                hashed = self.progress.take(version, expected, OWN_WORK_S)
            wrong = self.destination.verify(expected, hashed)
            self.late_nbytes = self.destination.late_nbytes
            return wrong

    def apply(self) -> None:
        """Make the written bytes live, while the engine is paused; see `Destination.apply`."""
        with self._lock:
            self.destination.apply()

    def close(self) -> None:
        """Free everything that `connect` has allocated. No peer may write after this. Idempotent.

        Memory that late kernels may still use stays until the process ends. `connect` may be called
        again.
        """
        with self._lock:
            if self.progress is not None:
                self.progress.close()
                self.progress = None
            if self._bound is not None:
                self._bound.close()

    def _hash_as_written(self) -> ProgressDigests | None:
        """Return the object that hashes while peers write; None if no peer reports written parts."""
        mapper = self.transport.mapper
        notifies = any(offer.traits.notifies for offer in self.transport.offers())
        if mapper is not None and notifies and self.progress is None:
            self.progress = ProgressDigests(mapper.gpu)
        return self.progress
