"""The engine's half on GPUs of one host: it publishes addresses, and hashes what landed there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import numpy as np

from windlass.config import UpdateMode
from windlass.errors import PlanError, ProtocolError
from windlass.execution.bind import LinkProgram, bind_links, check_part
from windlass.execution.bindings import DestinationBinding, GroupOffer
from windlass.execution.blocks import block_tables
from windlass.execution.device_links import (
    DIGEST_NBYTES,
    DeviceLink,
    UInt64Array,
    load_link,
    read_digest,
    unload_links,
)
from windlass.execution.landed_digests import LandedDigests
from windlass.execution.landings import LandingListener
from windlass.layout.manifest import ShardManifest
from windlass.planning.plan import CopyMode, TransferPlan
from windlass.transports.base import MemoryRegion
from windlass.transports.cuda.ipc import CudaIpcTransport
from windlass.transports.cuda.kernels import PieceTable

__all__ = ["DeviceReceiver"]

ALIGNMENT = 256
OWN_WORK_S = 60.0
"""For work on this GPU's own memory, which takes milliseconds."""


@final
class DeviceReceiver:
    """One engine rank whose parameters are on a GPU.

    `in_place` stores land in the live parameters, `staged` ones in a shadow of the same layout
    that `apply` copies over on the device.

    Args:
        transport: the live parameters are registered with it; the caller closes it.
        manifest: of this rank.
        parameter_addresses: of the live parameters, in manifest order; they never move.
        regions: registered regions that contain every live parameter.

    Attributes:
        late_nbytes: what the last `verify` still had to hash; the rest was hashed as it landed.
    """

    def __init__(
        self,
        transport: CudaIpcTransport,
        manifest: ShardManifest,
        parameter_addresses: Sequence[int],
        regions: Sequence[MemoryRegion],
    ) -> None:
        self._transport = transport
        self._manifest = manifest
        self._addresses = tuple(parameter_addresses)
        self._regions = tuple(regions)
        self._links: dict[str, DeviceLink] = {}
        self._flips: list[PieceTable] = []
        self._shadow: MemoryRegion | None = None
        self._landed = LandedDigests(transport)
        self._listener = LandingListener(self._landed.add)
        self.late_nbytes = 0

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Bind a plan part; allocates the shadow that `staged` needs, once.

        Raises:
            PlanError: the plan was made for another layout, or asks for the engine's own loader.
        """
        self._drop_tables()
        check_part(self._manifest, plan.destinations, plan.destination_digests, "destinations")
        if (plan.ops.mode == CopyMode.LOADER).any():
            raise PlanError(f"{self._manifest.worker}: this receiver has no loader for loader ops")
        live = np.array(self._addresses, np.uint64)
        staged = mode is UpdateMode.STAGED
        targets = self._shadow_addresses() if staged else live
        nowhere = np.zeros(0, np.uint64)
        for program in bind_links(plan, sending=False):
            self._links[program.peer] = load_link(self._transport, program, nowhere, targets)
            if staged:
                self._flips += self._flip_tables(program, targets, live)
        self._landed.load(self._links)
        shadow = (self._shadow.remote,) if staged and self._shadow is not None else ()
        return DestinationBinding(
            worker=self._manifest.worker,
            endpoint=self._transport.endpoint(),
            regions=(*(region.remote for region in self._regions), *shadow),
            parameter_addresses=tuple(targets.tolist()),
            listener=self._listener.address,
        )

    def _shadow_addresses(self) -> UInt64Array:
        offsets, total = [], 0
        for parameter in self._manifest.parameters:
            offsets.append(total)
            total += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
        if self._shadow is None:
            address = self._transport.device.allocate(max(total, ALIGNMENT))
            self._shadow = self._transport.register(address, max(total, ALIGNMENT))
        return np.array(offsets, np.uint64) + np.uint64(self._shadow.address)

    def _flip_tables(
        self, program: LinkProgram, shadow: UInt64Array, live: UInt64Array
    ) -> Iterator[PieceTable]:
        nowhere = np.zeros(0, np.uint64)
        landed = block_tables(program, nowhere, shadow)
        for kind, pieces in block_tables(program, nowhere, live).items():
            pieces["src"], pieces["src_pitch"] = landed[kind]["dst"], pieces["dst_pitch"]
            itemsize = kind.dst_dtype.itemsize
            yield PieceTable(self._transport.device, pieces, f"put_{itemsize}", itemsize)

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:  # noqa: ARG002
        """No groups here."""
        raise ProtocolError("p2p: one-sided writes have no groups to join")

    def receive(self, groups: Mapping[str, Sequence[str]], deadline_s: float) -> None:  # noqa: ARG002
        """Nothing to receive: peers write."""
        raise ProtocolError("p2p: one-sided writes have no receiving half")

    def nbytes_from(self, sources: Mapping[str, str]) -> int:
        """Bytes that these sources write in one update."""
        return sum(self._links[s].program.nbytes for s in sources if s in self._links)

    def apply(self) -> None:
        """Copy the shadow over, if there is one. Idempotent. The engine must be at rest."""
        for table in self._flips:
            self._transport.kernels.put(table, self._transport.stream)
        self._transport.wait(self._transport.stream.record(), OWN_WORK_S)

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Sources whose bytes do not have the expected digest, or that send nothing here.

        Links that were hashed as they landed are only compared; one that differs is hashed again.
        """
        self._listener.drain()
        digests = self._landed.take(version, expected, OWN_WORK_S)
        late = {
            source: self._links[source]
            for source, digest in expected.items()
            if source in self._links and digests.get(source) != digest
        }
        digests |= self._hash(late)
        self.late_nbytes = sum(link.program.nbytes for link in late.values())
        return tuple(sorted(s for s, digest in expected.items() if digests.get(s) != digest))

    def _hash(self, links: Mapping[str, DeviceLink]) -> dict[str, str]:
        transport, stream = self._transport, self._transport.stream
        for link in links.values():
            transport.device.clear(link.digest, DIGEST_NBYTES, stream)
            for table in link.tables:
                transport.kernels.hash(table, stream, link.digest)
        if links:
            transport.wait(stream.record(), OWN_WORK_S)
        return {source: read_digest(transport, link.digest) for source, link in links.items()}

    def close(self) -> None:
        """Free tables and shadow. No peer may write after this. Idempotent."""
        self._listener.close()
        self._drop_tables()
        if self._shadow is not None:
            self._transport.unregister(self._shadow)
            self._transport.device.free(self._shadow.address)
            self._shadow = None

    def _drop_tables(self) -> None:
        self._landed.load({})
        unload_links(self._transport, self._links)
        for table in self._flips:
            table.close()
        self._links, self._flips = {}, []
