"""The engine's half on GPUs: it publishes addresses, and hashes what landed there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import numpy as np

from windlass.config import UpdateMode
from windlass.errors import ProtocolError
from windlass.layout.manifest import ShardManifest
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.kernels import PieceTable
from windlass.memory.cuda.links import (
    WORDS_NBYTES,
    DeviceLink,
    load_link,
    read_digest,
    unload_links,
)
from windlass.memory.cuda.pieces import (
    OpPieces,
    PieceArray,
    cut_ops,
    join_tables,
    kind_of,
    store_packed,
)
from windlass.memory.ops import ALIGNMENT, OWN_WORK_S, DigestKind, UInt64Array, aligned_offsets
from windlass.planning.plan import TransferPlan
from windlass.planning.program import bind_links
from windlass.transfer.bind import check_part
from windlass.transfer.bindings import DestinationBinding, GroupOffer
from windlass.transfer.device_arena import DeviceArena
from windlass.transfer.progress_digests import LandedDigests
from windlass.transfer.write_progress import listen_if_possible
from windlass.transports.base import MemoryRegion, OneSidedTransport

__all__ = ["DeviceReceiver"]


@final
class DeviceReceiver:
    """One engine rank whose parameters are on a GPU. Thread-safe.

    `in_place` writes land in the live parameters, `staged` ones in a shadow of the same layout
    that `apply` copies over on the device. Peers whose kernels store into this memory store strided;
    what a NIC writes is in runs, so it lands packed where the plan says so, and `apply` unpacks it.

    Args:
        gpu: that the parameters are on; it hashes, copies and unpacks.
        transport: the live parameters are registered with it; the caller closes it.
        manifest: of this rank.
        parameter_addresses: of the live parameters, in manifest order; they never move.
        regions: registered regions that contain every live parameter.
        lands: whether there is a landing region; False where peers store by kernels, which also
            tell what has landed (`landings.py`).

    Attributes:
        late_nbytes: what the last `verify` still had to hash; the rest was hashed as it landed.
    """

    def __init__(
        self,
        gpu: Gpu,
        transport: OneSidedTransport,
        manifest: ShardManifest,
        parameter_addresses: Sequence[int],
        regions: Sequence[MemoryRegion],
        *,
        lands: bool,
    ) -> None:
        self._gpu = gpu
        self._transport = transport
        self._manifest = manifest
        self._live = np.array(parameter_addresses, np.uint64)
        self._targets = self._live
        self._regions = tuple(regions)
        self._lands = lands
        self._links: dict[str, DeviceLink] = {}
        self._flips: list[PieceTable] = []
        self._shadow: DeviceArena | None = None
        self._landing: DeviceArena | None = None
        self._lock = threading.Lock()
        self._landed = LandedDigests(gpu)
        self._listener = None if lands else listen_if_possible(self._landed.add)
        self.late_nbytes = 0

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Bind a plan part; allocates the shadow that `staged` needs and the landing region, once.

        Raises:
            PlanError: the plan was made for another layout, or asks for the engine's own loader.
            TransferFailed: the GPU has no room for them.
            TransferOutcomeUnknown: earlier kernels on it may still go on.
        """
        with self._lock:
            self._gpu.refuse_late()
            self._drop_tables()
            index = check_part(
                self._manifest, plan.destinations, plan.destination_digests, "destinations"
            )
            self._targets = self._shadow_addresses() if mode is UpdateMode.STAGED else self._live
            if self._lands:
                self._make_landing(plan.landing_nbytes[index])
            for program in bind_links(plan, sending=False):
                found = list(cut_ops(program, at_source=False))
                tables = join_tables((kind_of(one.op), self._written(one)) for one in found)
                self._links[program.peer] = load_link(self._gpu, program, tables)
                self._flips += self._flip_tables(found)
            self._landed.load(self._links if self._listener is not None else {})
            arenas = [arena for arena in (self._shadow, self._landing) if arena is not None]
            return DestinationBinding(
                worker=self._manifest.worker,
                endpoint=self._transport.endpoint(),
                regions=tuple(r.remote for r in (*self._regions, *(a.region for a in arenas))),
                parameter_addresses=tuple(self._targets.tolist()),
                landing_address=0 if self._landing is None else self._landing.address,
                listener="" if self._listener is None else self._listener.address,
                digest_kind=DigestKind.POSITION,
            )

    def _shadow_addresses(self) -> UInt64Array:
        offsets, total = aligned_offsets(p.nbytes for p in self._manifest.parameters)
        if self._shadow is None:
            self._shadow = DeviceArena(self._gpu.device, self._transport, max(total, ALIGNMENT))
        return np.array(offsets, np.uint64) + np.uint64(self._shadow.address)

    def _make_landing(self, nbytes: int) -> None:
        if self._landing is not None and self._landing.nbytes < nbytes:
            self._landing.close()
            self._landing = None
        if self._landing is None and nbytes:
            self._landing = DeviceArena(self._gpu.device, self._transport, nbytes)

    def _written(self, found: OpPieces) -> PieceArray:
        """Where peers write an op: in the landing region, the shadow or the live parameter."""
        pieces = found.pieces.copy()
        if self._landing is not None and found.op.lands:
            address = self._landing.address + found.op.landing_offset
            store_packed(pieces, found.position, address)
        else:
            pieces["dst"] += self._targets[found.op.dst_parameter]
        return pieces

    def _flip_tables(self, found: Sequence[OpPieces]) -> Iterator[PieceTable]:
        """From where peers write to the live parameters, for what is not written there."""
        moved = []
        for one in found:
            written, live = self._written(one), one.pieces.copy()
            live["dst"] += self._live[one.op.dst_parameter]
            if (written["dst"] != live["dst"]).any():
                live["src"], live["src_pitch"] = written["dst"], written["dst_pitch"]
                moved.append((kind_of(one.op), live))
        for kind, pieces in join_tables(moved).items():
            itemsize = kind.dst_dtype.itemsize
            yield PieceTable(self._gpu.device, pieces, f"put_{itemsize}", itemsize)

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:  # noqa: ARG002
        """No groups here."""
        raise ProtocolError("p2p: one-sided writes have no groups to join")

    def receive(self, groups: Mapping[str, Sequence[str]], deadline_s: float) -> None:  # noqa: ARG002
        """Nothing to receive: peers write."""
        raise ProtocolError("p2p: one-sided writes have no receiving half")

    def apply(self) -> None:
        """Copy the shadow over and unpack what landed. Idempotent. The engine must be at rest."""
        with self._lock:
            for table in self._flips:
                self._gpu.kernels.put(table, self._gpu.stream)
            self._gpu.finish(OWN_WORK_S)

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Sources whose bytes do not have the expected digest, or that send nothing here.

        Links that were hashed as they landed are only compared; one that differs is hashed again.
        """
        with self._lock:
            if self._listener is not None:
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
        gpu = self._gpu
        for link in links.values():
            gpu.device.clear(link.digest, WORDS_NBYTES, gpu.stream)
            for table in link.tables:
                gpu.kernels.hash(table, gpu.stream, link.digest)
        if links:
            gpu.finish(OWN_WORK_S)
        return {source: read_digest(gpu, link.digest) for source, link in links.items()}

    def close(self) -> None:
        """Free tables, shadow and landing region. No peer may write after this. Idempotent.

        Where kernels may still go on, all of it stays until the process ends.
        """
        with self._lock:
            if self._listener is not None:
                self._listener.close()
            if self._gpu.is_late:
                return
            self._drop_tables()
            for arena in (self._shadow, self._landing):
                if arena is not None:
                    arena.close()
            self._shadow = self._landing = None

    def _drop_tables(self) -> None:
        self._landed.load({})
        unload_links(self._gpu, self._links)
        for table in self._flips:
            table.close()
        self._links, self._flips = {}, []
