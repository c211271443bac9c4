"""Stages 8 and 9, the engine's half of one-sided writes: the addresses that peers write, and what came there.

In come a plan part (once) and the digests that the senders took (per version); out go a
`DestinationBinding`, with the addresses that peers write, and the names of sources whose bytes differ.
While bytes arrive this code does nothing, except where the source's kernels tell of what they have written:
then it is hashed while later parts are under way.
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
from windlass.transfer.write_progress import ProgressDigests
from windlass.transports.base import MemoryRegion, OneSidedTransport


@final
class Receiver:
    """`ReceiverBackend` of `p2p`: one engine rank that peers write. Thread-safe.

    `in_place` writes go to the live parameters, `staged` ones to a shadow copy of the same layout. Ops
    whose elements are strided at the destination go to staging memory, unless peers store strided.

    Args:
        transport: the live parameters are registered with it. Stays open; the caller closes it.
        addresses: of the live parameters, in manifest order; they never move.
        regions: registered regions that contain every live parameter.

    Attributes:
        late_nbytes: what the last `verify` still had to hash; the rest was hashed as it was written.
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
        self.transport, self.manifest = transport, manifest
        self.live_addresses, self.regions = tuple(addresses), tuple(regions)
        self.late_nbytes = 0
        self._lock = threading.Lock()
        self._bound: Destination | None = None
        self._progress: ProgressDigests | None = None

    @property
    def destination(self) -> Destination:
        """What peers write; allocates nothing before `connect`.

        Raises:
            TransportUnavailable: a GPU whose kernels cannot be compiled.
        """
        if self._bound is None:
            memory = memory_of(self.transport)
            self._bound = Destination(self.manifest, self.live_addresses, memory, self.transport)
        return self._bound

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Bind a plan part (`TransferPlan.parts`).

        Allocates the shadow copy and the staging memory that the plan and the mode need, once.

        Raises:
            PlanError: the plan is for another layout, or asks for the engine's own loader.
            RegionError: memory cannot be registered.
            TransferFailed: there is no memory.
            TransferOutcomeUnknown: earlier kernels may still go on.
        """
        with self._lock:
            found = self.destination
            shadow, staged = mode is UpdateMode.STAGED, not self.transport.traits.strided_stores
            found.memory.finish(OWN_WORK_S)  # before what late kernels read is freed
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
        """Sources whose bytes do not have the expected digest, or that send nothing here.

        Links that were hashed as they were written are only compared; one that differs is hashed again.

        Raises:
            TransferOutcomeUnknown: kernels do not end.
        """
        with self._lock:
            hashed: dict[str, str] = {}
            if self._progress is not None:
                hashed = self._progress.take(version, expected, OWN_WORK_S)
            wrong = self.destination.verify(expected, hashed)
            self.late_nbytes = self.destination.late_nbytes
            return wrong

    def apply(self) -> None:
        """See `Destination.apply`. The engine must be quiesced."""
        with self._lock:
            self.destination.apply()

    def close(self) -> None:
        """Free what `connect` has allocated. No peer may write after this. Idempotent.

        Where kernels may still go on, what they may use stays until the process ends. `connect` may
        follow.
        """
        with self._lock:
            if self._progress is not None:
                self._progress.close()
                self._progress = None
            if self._bound is not None:
                self._bound.close()

    def _hash_as_written(self) -> ProgressDigests | None:
        """Where peers may tell of what they have written."""
        mapper = self.transport.mapper
        notifies = any(offer.traits.notifies for offer in self.transport.offers())
        if mapper is not None and notifies and self._progress is None:
            self._progress = ProgressDigests(mapper.gpu)
        return self._progress
