"""The engine's side of one-sided writes: offers addresses to peers, and verifies the bytes.

`Receiver.connect` takes a plan part and returns the addresses that peers write to (`DestinationBinding`). For each
version, `Receiver.verify` takes the digests from the senders and returns the sources with wrong bytes. Normally
the receiver does nothing while bytes arrive. If GPU kernels of a source store the bytes, the source reports each part
that is complete, and the receiver hashes it while later parts arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol, final

from windlass.config import UpdateMode
from windlass.errors import PlanError
from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import OWN_WORK_S
from windlass.planning.plan import TransferPlan
from windlass.transfer.arena import memory_of
from windlass.transfer.bind import check_part
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.destination import Destination
from windlass.transfer.shared_bytes import refuse_shared_bytes
from windlass.transfer.write_progress import ProgressDigests
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.peers import PeerEndpoint, RemoteRegion


class RemoteMemory(Protocol):
    """Live parameters in another process. The receiver verifies copies of them in its own process.

    Attributes:
        endpoint: endpoint of the other process.
        regions: published regions that contain the live parameters.
        addresses: addresses of the live parameters, in manifest order.
    """

    @property
    def endpoint(self) -> PeerEndpoint: ...
    @property
    def regions(self) -> tuple[RemoteRegion, ...]: ...
    @property
    def addresses(self) -> tuple[int, ...]: ...

    def fetch(self) -> None:
        """Read all live parameters from the other process into the copies in this process. Wait until the copies are complete.

        Raises:
            TransferError: the copies are incomplete.
        """
        ...


@final
class Receiver:
    """`ReceiverBackend` of `p2p`: an engine rank that peers write to. Thread-safe.

    In mode `in_place`, peers write to the live parameters; in mode `staged`, to a shadow copy with the same layout. Ops
    with strides at the destination are written to staging memory, unless peers can store strided elements.

    Args:
        transport: transport that has registered the live parameters. The caller closes it.
        manifest: manifest of the rank.
        addresses: addresses of the live parameters, in manifest order; they never move.
        regions: registered regions that contain every live parameter.
        remote: live parameters in another process; `addresses` are then their copies. None if they are in this process.

    Attributes:
        live_addresses: the argument `addresses`.
        late_nbytes: number of bytes that the last `verify` had to hash. All other bytes were hashed during the writes.
        progress: digests of parts that senders have reported as complete; None if nothing is hashed before `verify`.

    Raises:
        PlanError: the number of addresses differs from the manifest.
        ManifestError: two parameters share bytes for different elements, see `refuse_shared_bytes`.
    """

    def __init__(
        self,
        transport: OneSidedTransport,
        manifest: ShardManifest,
        addresses: Sequence[int],
        regions: Sequence[MemoryRegion],
        remote: RemoteMemory | None = None,
    ) -> None:
        if len(addresses) != len(manifest.parameters):
            raise PlanError(
                f"{manifest.worker}: addresses must have one entry for each of the "
                f"{len(manifest.parameters)} parameters of the manifest, got {len(addresses)}"
            )
        refuse_shared_bytes(manifest, addresses)
        self.transport, self.manifest, self.remote = transport, manifest, remote
        self.live_addresses, self.regions = tuple(addresses), tuple(regions)
        self.late_nbytes = 0
        self._lock = threading.Lock()
        self._bound: Destination | None = None
        self.progress: ProgressDigests | None = None

    @property
    def destination(self) -> Destination:
        """Memory that peers write to. `connect` allocates it.

        Raises:
            TransportUnavailable: the kernels cannot be compiled for the GPU.
        """
        if self._bound is None:
            memory = memory_of(self.transport)
            self._bound = Destination(self.manifest, self.live_addresses, memory, self.transport)
        return self._bound

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Replace all earlier links by the links of a plan part (`TransferPlan.parts`). Return the addresses that peers write to.

        In mode `staged`, this allocates the shadow copy. If a transport of this rank reports written parts, this also
        starts a thread that hashes parts while peers write; `close` ends the thread.

        Raises:
            PlanError, RegionError, TransferFailed, TransferOutcomeUnknown, TransportUnavailable, OSError: see
                `Destination.bind`.
            PlanError: the live parameters are in another process, and the plan needs more memory in that process.
        """
        with self._lock:
            if self.remote is not None:
                return self._connect_remote(self.remote, plan, mode)
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

    def _connect_remote(
        self, remote: RemoteMemory, plan: TransferPlan, mode: UpdateMode
    ) -> DestinationBinding:
        """Bind a plan part for live parameters in another process; return the addresses in that process.

        Raises:
            PlanError: the plan part needs a shadow copy or staging memory in the other process.
            PlanError, TransferFailed, TransferOutcomeUnknown: see `Destination.bind`.
        """
        worker, found = self.manifest.worker, self.destination
        if mode is not UpdateMode.IN_PLACE:
            raise PlanError(
                f"{worker}: mode must be in_place for an engine without Windlass, which has no memory for a second "
                f"copy of its weights, got {mode}"
            )
        index = check_part(
            self.manifest, plan.destinations, plan.destination_digests, "destinations"
        )
        if nbytes := plan.staging_nbytes[index]:
            raise PlanError(
                f"{worker}: {nbytes} bytes would be packed into staging memory, which an engine without Windlass does "
                "not have: give the trainers the engine's tensor-parallel size, or shard them over dim 0 only"
            )
        found.bind(plan, shadow=False, staged=False)
        return DestinationBinding(
            worker=worker,
            endpoint=remote.endpoint,
            regions=remote.regions,
            parameter_addresses=remote.addresses,
            digest_kind=found.digest_kind,
        )

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Compare the digests of the received bytes with `expected` (source -> digest).

        If a link was hashed while it was written, hash it again only if this digest was not the expected one.

        Returns:
            Sorted names of the sources whose bytes have a wrong digest on this rank, and of sources without a link to
            this rank.

        Raises:
            TransferError: live parameters in another process could not be read.
            TransferFailed, TransferOutcomeUnknown: see `Destination.verify`.
        """
        with self._lock:
            if self.remote is not None:
                self.remote.fetch()
            hashed: dict[str, str] = {}
            if self.progress is not None:
                hashed = self.progress.take(version, expected, OWN_WORK_S)
            wrong = self.destination.verify(expected, hashed)
            self.late_nbytes = self.destination.late_nbytes
            return wrong

    def apply(self) -> None:
        """Copy the received bytes to the live parameters, unless they are there already.

        Call this while the engine is paused.

        Raises:
            TransferFailed, TransferOutcomeUnknown: see `Destination.apply`.
        """
        with self._lock:
            self.destination.apply()

    def close(self) -> None:
        """Free everything that `connect` has allocated. No peer may write after this call. Idempotent.

        If late kernels may still use some of this memory, it stays allocated until the process ends. The caller may call
        `connect` again.
        """
        with self._lock:
            if self.progress is not None:
                self.progress.close()
                self.progress = None
            if self._bound is not None:
                self._bound.close()

    def _hash_as_written(self) -> ProgressDigests | None:
        """Return the object that hashes parts of links during the writes. The first call creates it.

        Return None if no transport of this rank reports written parts.
        """
        mapper = self.transport.mapper
        notifies = any(offer.traits.notifies for offer in self.transport.offers())
        if mapper is not None and notifies and self.progress is None:
            self.progress = ProgressDigests(mapper.gpu)
        return self.progress
