"""A plan on GPUs of one host: kernels store every op straight into its place, hashing as they go.

No arena, no landing region, no copy at either end: the trainer reads its parameters where they
lie, casts in registers, and stores through NVLink into the engine's live parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never, final

import numpy as np
import numpy.typing as npt

from windlass.config import UpdateMode
from windlass.errors import (
    PeerUnreachable,
    PlanError,
    ProtocolError,
    RegionError,
    RoundAborted,
    TransferOutcomeUnknown,
)
from windlass.execution.base import ParameterMemory, SendResult
from windlass.execution.bind import LinkProgram, bind_links, check_binding, check_part
from windlass.execution.bindings import (
    DestinationBinding,
    GroupOffer,
    LinkOutcome,
    LinkStatus,
)
from windlass.execution.blocks import PieceKind, block_tables
from windlass.layout.manifest import ShardManifest
from windlass.planning.plan import CopyMode, TransferPlan, Transform
from windlass.transports.base import MemoryRegion
from windlass.transports.cuda.ipc import CudaIpcTransport
from windlass.transports.cuda.kernels import PieceTable, put_kernel
from windlass.transports.cuda.sources import SourceMemory
from windlass.transports.processes import check_alive

__all__ = ["DeviceReceiver", "DeviceSender"]

DIGEST_NBYTES = 16
ALIGNMENT = 256
FLIP_S = 60.0
"""For work on this GPU's own memory, which takes milliseconds."""
UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Link:
    """A link on the device. `digest`: address of its two words."""

    program: LinkProgram
    tables: tuple[PieceTable, ...]
    digest: int


def _load_link(
    transport: CudaIpcTransport, program: LinkProgram, sources: UInt64Array, targets: UInt64Array
) -> _Link:
    tables = []
    for kind, pieces in block_tables(program, sources, targets).items():
        tables.append(
            PieceTable(transport.device, pieces, _kernel_of(kind), kind.dst_dtype.itemsize)
        )
    return _Link(program, tuple(tables), transport.device.allocate(DIGEST_NBYTES))


def _kernel_of(kind: PieceKind) -> str:
    match kind.transform:
        case Transform.NONE:
            return put_kernel(kind.src_dtype, kind.dst_dtype, kind.dst_dtype.itemsize)
        case Transform.FP8_BLOCK_VALUES:
            return f"fp8_values_{kind.src_dtype}"
        case Transform.FP8_BLOCK_SCALES:
            return f"fp8_scales_{kind.src_dtype}"
        case _:
            assert_never(kind.transform)


def _unload(transport: CudaIpcTransport, links: Mapping[str, _Link]) -> None:
    for link in links.values():
        for table in link.tables:
            table.close()
        transport.device.free(link.digest)


def _read_digest(transport: CudaIpcTransport, link: _Link) -> str:
    a, b = np.frombuffer(transport.device.download(link.digest, DIGEST_NBYTES), "<u8").tolist()
    return f"{a:016x}{b:016x}"


@final
class DeviceSender:
    """One trainer rank whose parameters are on a GPU, or in host memory beside one. Not thread-safe.

    Memory: the parameters must not change between `prepare` and the end of the round. Allocates
    piece tables only; pins parameters that are in pageable host memory until they move.

    Args:
        transport: of the GPU that holds the parameters or reads them; the caller closes it.
        manifest: of this rank.
        parameters: where they lie now, in manifest order; asked at every `prepare` and at no
            other time. Tables are built again when one has moved.
    """

    def __init__(
        self,
        transport: CudaIpcTransport,
        manifest: ShardManifest,
        parameters: Callable[[], Sequence[ParameterMemory]],
    ) -> None:
        self._transport = transport
        self._manifest = manifest
        self._parameters = parameters
        self._sources = SourceMemory(transport.device)
        self._located: tuple[ParameterMemory, ...] = ()
        self._programs: dict[str, tuple[LinkProgram, UInt64Array]] = {}
        self._links: dict[str, _Link] = {}
        self._bindings: dict[str, DestinationBinding] = {}
        self._shift = 0

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """Bind a plan part: check every address and map the peers' memory.

        Raises:
            PlanError: the plan was made for another layout, or a destination has no binding.
            RegionError: a store would leave the published regions.
        """
        self._drop()
        self._transport.keep_mapped(r for binding in bindings for r in binding.regions)
        self._shift = check_part(self._manifest, plan.sources, plan.source_digests, "sources")
        known = {binding.worker: binding for binding in bindings}
        for program in bind_links(plan, sending=True):
            binding = known.get(program.peer)
            if binding is None:
                raise PlanError(f"connect: destination {program.peer} of the plan has no binding")
            check_binding(program, binding, landing=False)
            self._bindings[program.peer] = binding
            self._programs[program.peer] = (program, self._reach(program, binding))
        return None

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:  # noqa: ARG002
        """No groups here."""
        raise ProtocolError("p2p: one-sided writes have no groups to join")

    def prepare(self, version: int) -> None:  # noqa: ARG002
        """Look where the parameters lie; cut the ops and upload the tables if that is news.

        Raises:
            PlanError: parameters have another number or other sizes than when described.
            RegionError: memory of another GPU.
            TransferFailed: host memory that cannot be pinned.
        """
        located, specs = tuple(self._parameters()), self._manifest.parameters
        if [memory.nbytes for memory in located] != [spec.nbytes for spec in specs]:
            raise PlanError(
                f"{self._manifest.worker}: parameters are not those that were described"
            )
        if located == self._located and self._links:
            return
        _unload(self._transport, self._links)
        self._links, self._located = {}, ()
        reached = self._sources.reach([(memory.address, memory.nbytes) for memory in located])
        sources = np.array(reached, np.uint64)
        self._links = {
            peer: _load_link(self._transport, program, sources, targets)
            for peer, (program, targets) in self._programs.items()
        }
        self._located = located

    def _reach(self, program: LinkProgram, binding: DestinationBinding) -> UInt64Array:
        """The peer's parameter addresses as this process reaches them.

        Every op must stay in the region that its parameter begins in: another region of the peer
        is mapped elsewhere here.
        """
        mapped = [self._transport.map_region(region) for region in binding.regions]
        around = []
        for address in binding.parameter_addresses:
            inside = [m for m in mapped if m.start <= address < m.stop]
            if not inside:
                raise RegionError(
                    f"connect: {binding.worker} published no region around parameter at {address:#x}"
                )
            around.append(inside[0])
        for op in program.ops:
            start = binding.parameter_addresses[op.dst_parameter] + op.dst_offset
            reach = sum((n - 1) * s for n, s in zip(op.sizes, op.dst_strides, strict=True))
            if start + reach + op.dst_dtype.itemsize > around[op.dst_parameter].stop:
                raise RegionError(
                    f"connect: {binding.worker}: parameter {op.dst_parameter} must lie in one region"
                )
        addresses = [
            address + region.shift
            for address, region in zip(binding.parameter_addresses, around, strict=True)
        ]
        return np.array(addresses, np.uint64)

    def write(
        self,
        version: int,  # noqa: ARG002
        destinations: Sequence[str],
        deadline_s: float,
    ) -> SendResult:
        """Store the links to `destinations`, the first one another in every rank. Idempotent.

        Work that this process has queued on the GPU before, such as an optimiser step, is waited
        for first.

        Raises:
            RoundAborted: a destination that this rank does not send to.
            TransferFailed: the GPU reports an error; nothing more can be done with it.
        """
        unknown = [name for name in destinations if name not in self._links]
        if unknown:
            raise RoundAborted(f"write: this rank sends nothing to {', '.join(unknown)}")
        transport, stream = self._transport, self._transport.stream
        transport.device.synchronize()
        began = time.perf_counter()
        shift = self._shift % max(len(destinations), 1)
        gone = {name: why for name in destinations if (why := self._is_gone(name))}
        for name in (*destinations[shift:], *destinations[:shift]):
            if name in gone:
                continue
            link = self._links[name]
            transport.device.clear(link.digest, DIGEST_NBYTES, stream)
            for table in link.tables:
                transport.kernels.put(table, stream, link.digest)
        late = ""
        try:
            transport.wait(stream.record(), deadline_s)
        except TransferOutcomeUnknown as error:
            late = str(error)
        wire_s = time.perf_counter() - began
        outcomes = tuple(self._outcome(name, gone.get(name, ""), late) for name in destinations)
        return SendResult(outcomes, 0.0, wire_s)

    def _is_gone(self, name: str) -> str:
        try:
            check_alive(self._bindings[name].endpoint)
        except PeerUnreachable as error:
            return str(error)
        return ""

    def _outcome(self, name: str, gone: str, late: str) -> LinkOutcome:
        link = self._links[name]
        if gone or (gone := self._is_gone(name)):
            return LinkOutcome(name, LinkStatus.UNREACHABLE, 0, "", gone)
        if late:
            return LinkOutcome(name, LinkStatus.UNKNOWN, 0, "", late)
        digest = _read_digest(self._transport, link)
        return LinkOutcome(name, LinkStatus.OK, link.program.nbytes, digest)

    def close(self) -> None:
        """Free the tables, unmap the peers, let go of pinned memory. Idempotent."""
        self._drop()
        self._transport.keep_mapped(())

    def _drop(self) -> None:
        _unload(self._transport, self._links)
        self._sources.close()
        self._links, self._bindings, self._programs, self._located = {}, {}, {}, ()


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
        self._links: dict[str, _Link] = {}
        self._flips: list[PieceTable] = []
        self._shadow: MemoryRegion | None = None

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
            self._links[program.peer] = _load_link(self._transport, program, nowhere, targets)
            if staged:
                self._flips += self._flip_tables(program, targets, live)
        shadow = (self._shadow.remote,) if staged and self._shadow is not None else ()
        return DestinationBinding(
            worker=self._manifest.worker,
            endpoint=self._transport.endpoint(),
            regions=(*(region.remote for region in self._regions), *shadow),
            parameter_addresses=tuple(targets.tolist()),
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
        self._transport.wait(self._transport.stream.record(), FLIP_S)

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:  # noqa: ARG002
        """Sources whose bytes do not have the expected digest, or that send nothing here."""
        transport, stream = self._transport, self._transport.stream
        known = {source: self._links[source] for source in expected if source in self._links}
        for link in known.values():
            transport.device.clear(link.digest, DIGEST_NBYTES, stream)
            for table in link.tables:
                transport.kernels.hash(table, stream, link.digest)
        transport.wait(stream.record(), FLIP_S)
        return tuple(
            source
            for source, digest in sorted(expected.items())
            if source not in known or _read_digest(transport, known[source]) != digest
        )

    def close(self) -> None:
        """Free tables and shadow. No peer may write after this. Idempotent."""
        self._drop_tables()
        if self._shadow is not None:
            self._transport.unregister(self._shadow)
            self._transport.device.free(self._shadow.address)
            self._shadow = None

    def _drop_tables(self) -> None:
        _unload(self._transport, self._links)
        for table in self._flips:
            table.close()
        self._links, self._flips = {}, []
