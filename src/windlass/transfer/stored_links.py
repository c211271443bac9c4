"""Stored links: GPU kernels of a trainer rank store the bytes directly into engines on GPUs of the same host.

There is no arena, no staging memory and no copy at either end. The kernels read the parameters in place, cast or
quantise in registers, hash the resulting bytes, and store them over NVLink in the engine's memory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import final

import numpy as np

from windlass.errors import PeerUnreachable, RegionError, TransferFailed, TransferOutcomeUnknown
from windlass.layout.columns import UInt64Array
from windlass.memory.copy_sources import SourceMemory
from windlass.memory.cuda.driver import Event
from windlass.memory.cuda.gpu import end_queued
from windlass.memory.cuda.links import WORDS_NBYTES, DeviceLink, read_sent
from windlass.memory.cuda.pieces import block_tables
from windlass.net.clock import Deadline
from windlass.planning.program import LinkProgram
from windlass.transfer.base import ParameterMemory, failed_link, failed_links
from windlass.transfer.bind import check_destinations
from windlass.transfer.bindings import DestinationBinding, LinkOutcome, LinkStatus, Written
from windlass.transfer.replica import Replica
from windlass.transfer.write_progress import PartWritten, notify
from windlass.transports.peers import PeerMapper
from windlass.transports.processes import check_alive


@final
class StoredLinks:
    """Stored links of one rank; see the module. Not thread-safe. `name in links` tests for a prepared link.

    The kernels read parameters in the memory of the GPU or in host memory. This object pins parameters in pageable
    host memory until they move or are freed. It allocates no GPU memory except tables.

    Args:
        mapper: maps the memory of peers for the GPU. The caller closes its transport.
        worker: name of this rank.

    Attributes:
        gpu: GPU that runs the kernels.
    """

    def __init__(self, mapper: PeerMapper, worker: str) -> None:
        self._mapper, self._worker = mapper, worker
        self.gpu = mapper.gpu
        self._sources = SourceMemory(mapper.gpu.device)
        self._located: tuple[ParameterMemory, ...] = ()
        self._reached: UInt64Array = np.zeros(0, np.uint64)
        self._read: UInt64Array = np.zeros(0, np.uint64)
        self._programs: dict[str, tuple[LinkProgram, UInt64Array]] = {}
        self._links: dict[str, DeviceLink] = {}
        self._bindings: dict[str, DestinationBinding] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._links

    def end(self, names: Collection[str]) -> None:
        """End the links to these destinations, and keep all others.

        Raises:
            TransferOutcomeUnknown: kernels of an earlier write may still run.
        """
        self.gpu.refuse_late()
        self._unload(names)
        for name in names:
            self._programs.pop(name, None)
            self._bindings.pop(name, None)

    def bind(
        self, programs: Sequence[LinkProgram], bindings: Mapping[str, DestinationBinding]
    ) -> None:
        """Add links, and map the memory of their peers. Unmap the memory of peers without a link.

        Args:
            programs: the new links.
            bindings: bindings of their destinations.

        Raises:
            RegionError: a parameter of a peer is not inside one of the peer's regions.
            PeerUnreachable, TransferFailed: see `PeerMapper.map_region`.
        """
        used = {program.peer: bindings[program.peer] for program in programs}
        mapped = (*self._bindings.values(), *used.values())
        self._mapper.keep_mapped(r for binding in mapped for r in binding.regions)
        self._programs |= {p.peer: (p, self._reach(p, used[p.peer])) for p in programs}
        self._bindings |= used

    def prepare(self, located: tuple[ParameterMemory, ...], replica: Replica | None) -> None:
        """Build and upload the tables of new links. If a source address of the kernels has changed, rebuild all tables.

        With a replica, first copy the parameters into the replica; the kernels then read the copies.

        Args:
            located: memory of each parameter, in manifest order.
            replica: the replica; None if this rank has no replica.

        Raises:
            RegionError: a parameter is in the memory of another GPU.
            TransferFailed: host memory cannot be pinned, or the GPU has too little memory for tables; see also
                `Replica.take`.
            TransferOutcomeUnknown: the copy into the replica may still run.
        """
        if located != self._located:
            self._located = ()
            if replica is None:
                self._unload(self._links)
            reached = self._sources.reach(
                [(m.address, m.nbytes if m.address else 0) for m in located]
            )
            self._reached = np.array(reached, np.uint64)
        read = self._reached
        if replica is not None:
            read = replica.take(self._reached)
            if self._sources.has_pinned:
                # The trainer may free its parameters now, so they must not stay pinned.
                self._sources.close()
                located = ()
        if not np.array_equal(read, self._read):
            self._unload(self._links)
        self._read = read
        self._load(read)
        self._located = located

    def write(
        self,
        version: int,
        destinations: Sequence[str],
        deadline: Deadline,
        replica: Replica | None,
    ) -> Written:
        """Store the links to `destinations` one after another, and return their outcomes and times.

        Without a replica, first wait for work that this process has queued on the GPU, such as an optimizer step. If
        that work does not end by the deadline, the links are FAILED, because none of their bytes was sent.

        Args:
            version: number of the version. The replica must contain it, and notifications name it.
            destinations: destinations of the links.
            deadline: deadline of all stores.
            replica: the replica that `prepare` got; None if this rank has no replica.

        Raises:
            RoundAborted: the link to a destination is not prepared.
            TransferFailed: the GPU reports an error and cannot be used any more.
            TransferOutcomeUnknown: the GPU reports an error, and stores that were queued earlier may still run.
        """
        check_destinations(self, destinations)
        if replica is not None and not replica.holds(version):
            reason = "replica: has no copy of this version, and the weights may have changed"
            return Written(failed_links(destinations, reason), 0.0, 0.0)
        try:
            if replica is not None:
                self.gpu.refuse_late()
            else:
                self.gpu.settle(deadline.seconds)
        except (TransferFailed, TransferOutcomeUnknown) as error:
            is_late = isinstance(error, TransferOutcomeUnknown)
            status = LinkStatus.UNKNOWN if is_late else LinkStatus.FAILED
            links = tuple(failed_link(name, str(error), status) for name in destinations)
            return Written(links, 0.0, 0.0)
        began = time.perf_counter()
        gone = {name: why for name in destinations if (why := self._is_gone(name))}
        write = secrets.token_hex(8)
        try:
            queued = [
                (name, part, event)
                for name in destinations
                if name not in gone
                for part, event in self._queue(name, version, write)
            ]
        # After an error, wait for the stores that are queued already.
        except Exception as error:
            end_queued(self.gpu, error, deadline.remaining_s)
            raise
        took = dict.fromkeys(destinations, 0.0)
        late = self._follow(queued, took, deadline)
        wire_s = time.perf_counter() - began
        outcomes = {
            name: self._outcome(name, gone.get(name, ""), late, took[name]) for name in destinations
        }
        return Written(tuple(outcomes[name] for name in destinations), 0.0, wire_s)

    def close(self) -> None:
        """Free the tables, unmap the peers, and unpin host memory. Idempotent. Do nothing if late kernels may still run."""
        if not self.gpu.is_late:
            self._unload(self._links)
            self._sources.close()
            self._bindings, self._programs, self._located = {}, {}, ()
            self._mapper.keep_mapped(())

    def _load(self, sources: UInt64Array) -> None:
        """Build and upload the tables of links that have none. `sources`: (num_parameters,) addresses to read."""
        links: dict[str, DeviceLink] = {}
        with ExitStack() as undo:
            for peer, (program, targets) in self._programs.items():
                if peer not in self._links:
                    tables = block_tables(program, sources, targets)
                    links[peer] = DeviceLink(self.gpu, program, tables)
                    undo.callback(links[peer].close)
            undo.pop_all()
        self._links |= links

    def _unload(self, names: Collection[str]) -> None:
        """Free the tables of the links to these destinations. The links stay bound, and `_load` builds new tables."""
        for name in [name for name in self._links if name in names]:
            self._links.pop(name).close()

    def _reach(self, program: LinkProgram, binding: DestinationBinding) -> UInt64Array:
        """Map the peer's regions; return the (num_parameters,) addresses of the peer's parameters in this process.

        Raises:
            RegionError: no region contains the start of a parameter, or an op extends past the end of that region. An op
                must be inside one region, because regions that are adjacent in the peer's process may be mapped to
                separate addresses here.
        """
        mapped = [self._mapper.map_region(region) for region in binding.regions]
        around = []
        for address in binding.parameter_addresses:
            inside = [m for m in mapped if m.start <= address < m.stop]
            if not inside:
                raise RegionError(
                    f"connect: {binding.worker} published no region around its parameter at {address:#x}"
                )
            around.append(inside[0])
        for op in program.ops:
            start = binding.parameter_addresses[op.dst_parameter] + op.dst_offset
            if start + op.dst_extent_nbytes > around[op.dst_parameter].stop:
                raise RegionError(
                    f"connect: {binding.worker}: parameter {op.dst_parameter} must be inside one region"
                )
        addresses = [
            address + region.shift
            for address, region in zip(binding.parameter_addresses, around, strict=True)
        ]
        return np.array(addresses, np.uint64)

    def _queue(self, name: str, version: int, write: str) -> list[tuple[PartWritten, Event]]:
        """Queue the stores of a link. Return each part with the GPU event that follows its store.

        Args:
            name: destination of the link.
            version: number of the version, for the notifications.
            write: id of this call of `StoredLinks.write`, for the notifications.
        """
        gpu, stream, link = self.gpu, self.gpu.stream, self._links[name]
        listens = bool(self._bindings[name].listener)
        gpu.device.clear(link.digest, WORDS_NBYTES, stream)
        queued = []
        for number, table in enumerate(link.tables):
            for part in table.parts if listens else (range(table.num_pieces),):
                gpu.kernels.put(table, stream, link.digest, part)
                written = PartWritten(self._worker, version, write, number, part.start, part.stop)
                queued.append((written, stream.record()))
        return queued

    def _follow(
        self,
        queued: Sequence[tuple[str, PartWritten, Event]],
        took: dict[str, float],
        deadline: Deadline,
    ) -> str:
        """Wait for the queued parts, and notify the peer of each part when it is stored.

        Add the seconds of each link to `took` (destination -> seconds). Links are stored one after another, so the time
        of a link begins when the previous link ends.

        Returns:
            Reason why the outcome of the stores is unknown; empty if all parts are stored.
        """
        began = time.perf_counter()
        try:
            for name, part, event in queued:
                self.gpu.wait(event, deadline.remaining_s)
                ended = time.perf_counter()
                took[name] += ended - began
                began = ended
                if listener := self._bindings[name].listener:
                    notify(listener, part)
        except TransferOutcomeUnknown as error:
            return str(error)
        return ""

    def _is_gone(self, name: str) -> str:
        """Return a text that says that a destination's process has ended, or that another process has its pid.

        Return an empty text if the process runs, or if its state cannot be determined.
        """
        with suppress(OSError):
            # An OSError, such as too many open files, does not prove that the peer has ended.
            try:
                check_alive(self._bindings[name].endpoint)
            except PeerUnreachable as error:
                return str(error)
        return ""

    def _outcome(self, name: str, gone: str, late: str, wire_s: float) -> LinkOutcome:
        """Return the outcome of the link to the destination `name`.

        Args:
            name: the destination.
            gone: result of `_is_gone` before the stores.
            late: reason why it is unknown whether the stores have ended; empty if the stores have ended.
            wire_s: seconds of the stores.
        """
        link = self._links[name]
        if gone or (gone := self._is_gone(name)):
            return failed_link(name, gone, LinkStatus.UNREACHABLE)
        if late:
            return failed_link(name, late, LinkStatus.UNKNOWN)
        digest, overflow = read_sent(self.gpu, link.digest, link.program)
        if overflow:
            return failed_link(name, overflow)
        return LinkOutcome(name, LinkStatus.OK, link.program.nbytes, digest, wire_s=wire_s)
