"""The trainer's half on GPUs of one host: kernels store every op straight into its place.

No arena, no staging memory, no copy at either end: the kernels read the parameters where they lie,
cast or quantise in registers, hash what they store, and store it through NVLink into the engine.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import final

import numpy as np

from windlass.errors import (
    PeerUnreachable,
    RegionError,
    TransferFailed,
    TransferOutcomeUnknown,
)
from windlass.layout.manifest import ShardManifest
from windlass.memory.cuda.driver import Event
from windlass.memory.cuda.gpu import end_queued
from windlass.memory.cuda.links import WORDS_NBYTES, DeviceLink, load_link, read_sent, unload_links
from windlass.memory.cuda.pieces import block_tables
from windlass.memory.cuda.sources import SourceMemory
from windlass.memory.ops import UInt64Array
from windlass.planning.plan import TransferPlan
from windlass.planning.program import LinkProgram, bind_links
from windlass.transfer.base import ParameterMemory, SendResult
from windlass.transfer.bind import bind_peers, check_binding, check_destinations, check_part
from windlass.transfer.bindings import (
    DestinationBinding,
    GroupOffer,
    LinkOutcome,
    LinkStatus,
)
from windlass.transfer.parameters import check_described
from windlass.transfer.replica import Replica
from windlass.transfer.write_progress import PartWritten, ProgressNotifier
from windlass.transports.base import PeerMapper
from windlass.transports.processes import check_alive

__all__ = ["DeviceSender"]


@final
class DeviceSender:
    """One trainer rank whose parameters are on a GPU, or in host memory beside one.

    Methods may be called from any thread; they run one at a time.

    Memory: the parameters must not change between `prepare` and the end of the round, unless there
    is a replica: with it they are read in `prepare` only, and everything is sent from the copy.
    Allocates piece tables only; pins parameters that are in pageable host memory until they move.

    Args:
        mapper: of the GPU that holds the parameters or reads them; its transport is closed by the caller.
        manifest: of this rank.
        parameters: where they lie now, in manifest order; asked at every `prepare` and at no
            other time. Tables are built again when one has moved.
        replica: sent instead of the parameters; the caller closes it, after this.
    """

    def __init__(
        self,
        mapper: PeerMapper,
        manifest: ShardManifest,
        parameters: Callable[[], Sequence[ParameterMemory]],
        replica: Replica | None = None,
    ) -> None:
        self._mapper, self._gpu = mapper, mapper.gpu
        self._manifest = manifest
        self._parameters = parameters
        self._sources = SourceMemory(mapper.gpu.device)
        self._located: tuple[ParameterMemory, ...] = ()
        self._programs: dict[str, tuple[LinkProgram, UInt64Array]] = {}
        self._links: dict[str, DeviceLink] = {}
        self._bindings: dict[str, DestinationBinding] = {}
        self._shift = 0
        self._replica = replica
        self._reached = np.zeros(0, np.uint64)
        self._lock = threading.Lock() if replica is None else replica.lock
        self._notifier = ProgressNotifier()

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """Bind a plan part: check every address and map the peers' memory.

        Raises:
            PlanError: the plan was made for another layout, or a destination has no binding.
            RegionError: a store would leave the published regions.
            TransferOutcomeUnknown: kernels of an earlier write may still go on.
        """
        with self._lock:
            self._gpu.refuse_late()
            self._drop()
            self._mapper.keep_mapped(r for binding in bindings for r in binding.regions)
            self._shift = check_part(self._manifest, plan.sources, plan.source_digests, "sources")
            links = bind_links(plan, sending=True)
            bound = bind_peers(links, bindings, partial(check_binding, staged=False))
            programs = {
                program.peer: (program, self._reach(program, bound[program.peer]))
                for program in links
            }
            if self._replica is not None:
                ops = [op for program, _ in programs.values() for op in program.ops]
                self._replica.fit(sorted({op.src_parameter for op in ops}))
            self._bindings, self._programs = bound, programs
            return None

    def prepare(self, version: int) -> None:
        """Look where the parameters lie; cut the ops and upload the tables if that is news.

        With a replica they are copied as well, once what was queued before is over.

        Raises:
            PlanError: parameters have another number or other sizes than when described.
            RegionError: memory of another GPU.
            TransferFailed: host memory that cannot be pinned.
            TransferOutcomeUnknown: kernels of an earlier write, or the copy, may still go on.
            RoundAborted: with a replica: see `Replica.is_taken`.
        """
        with self._lock:
            self._gpu.refuse_late()
            replica = self._replica
            if replica is not None and replica.is_taken(version):
                return
            located = tuple(self._parameters())
            check_described(self._manifest, located)
            moved = located != self._located
            if moved:
                self._located = ()
                if replica is None:
                    self._unload()
                self._reached = self._reach_parameters(located)
            if replica is not None:
                read = replica.take(self._reached)
                if self._sources.has_pinned:  # what its owner may free now must not stay locked
                    self._sources.close()
                    located = ()
            else:
                read = self._reached
            if not self._links:
                self._load(read)
            self._located = located
            if replica is not None:
                replica.taken(version)

    def _reach_parameters(self, located: Sequence[ParameterMemory]) -> UInt64Array:
        reached = self._sources.reach([(memory.address, memory.nbytes) for memory in located])
        return np.array(reached, np.uint64)

    def _load(self, sources: UInt64Array) -> None:
        """A replica does not move, so its tables are cut once."""
        links: dict[str, DeviceLink] = {}
        with ExitStack() as undo:
            undo.callback(lambda: unload_links(self._gpu, links))
            for peer, (program, targets) in self._programs.items():
                tables = block_tables(program, sources, targets)
                links[peer] = load_link(self._gpu, program, tables)
            undo.pop_all()
        self._links = links

    def _unload(self) -> None:
        unload_links(self._gpu, self._links)
        self._links = {}

    def _reach(self, program: LinkProgram, binding: DestinationBinding) -> UInt64Array:
        """The peer's parameter addresses as this process reaches them.

        Every op must stay in the region that its parameter begins in: another region of the peer
        is mapped elsewhere here.
        """
        mapped = [self._mapper.map_region(region) for region in binding.regions]
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

    def write(self, version: int, destinations: Sequence[str], deadline_s: float) -> SendResult:
        """Store the links to `destinations`, the first one another in every rank. Idempotent.

        Work that this process has queued on the GPU before, such as an optimiser step, is waited
        for first; where that takes all of `deadline_s`, links are FAILED, as nothing of them was sent.
        With a replica it is not: that work is the next step's, and changes nothing that is read.

        Raises:
            RoundAborted: a destination that this rank does not send to.
            TransferFailed: the GPU reports an error; nothing more can be done with it.
            TransferOutcomeUnknown: it does, and what was queued before may still go on.
        """
        with self._lock:
            return self._write(version, destinations, deadline_s)

    def _write(self, version: int, destinations: Sequence[str], deadline_s: float) -> SendResult:
        check_destinations(self._links, destinations)
        asked = time.perf_counter()
        if self._replica is not None and not self._replica.holds(version):
            reason = "replica: this version is not copied, and the weights may have changed"
            return _nothing_sent(destinations, LinkStatus.FAILED, reason)
        try:
            if self._replica is None:
                self._gpu.settle(deadline_s)
            else:
                self._gpu.refuse_late()
        except TransferOutcomeUnknown as error:
            return _nothing_sent(destinations, LinkStatus.UNKNOWN, str(error))
        except TransferFailed as error:
            return _nothing_sent(destinations, LinkStatus.FAILED, str(error))
        began = time.perf_counter()
        shift = self._shift % max(len(destinations), 1)
        gone = {name: why for name in destinations if (why := self._is_gone(name))}
        write = secrets.token_hex(8)
        try:
            queued = [
                (self._bindings[name].listener, part, event)
                for name in (*destinations[shift:], *destinations[:shift])
                if name not in gone
                for part, event in self._queue(name, version, write)
            ]
        # Whatever stops it half way: what was queued before must be over, or it is not known.
        except Exception as error:
            end_queued(self._gpu, error, max(asked + deadline_s - time.perf_counter(), 0.0))
            raise
        late = self._follow(queued, asked + deadline_s)
        wire_s = time.perf_counter() - began
        outcomes = tuple(self._outcome(name, gone.get(name, ""), late) for name in destinations)
        return SendResult(outcomes, 0.0, wire_s)

    def _queue(self, name: str, version: int, write: str) -> list[tuple[PartWritten, Event]]:
        """Queue the stores of a link; what is written when each event is reached."""
        gpu, stream, link = self._gpu, self._gpu.stream, self._links[name]
        listens, source = bool(self._bindings[name].listener), self._manifest.worker
        gpu.device.clear(link.digest, WORDS_NBYTES, stream)
        queued = []
        for number, table in enumerate(link.tables):
            for part in table.parts if listens else (range(table.num_pieces),):
                gpu.kernels.put(table, stream, link.digest, part)
                written = PartWritten(source, version, write, number, part.start, part.stop)
                queued.append((written, stream.record()))
        return queued

    def _follow(self, queued: Sequence[tuple[str, PartWritten, Event]], deadline: float) -> str:
        """Notify the peers as parts are written; empty, or why it is not known whether all have."""
        try:
            for listener, part, event in queued:
                self._gpu.wait(event, max(deadline - time.perf_counter(), 0.0))
                if listener:
                    self._notifier.notify(listener, part)
        except TransferOutcomeUnknown as error:
            return str(error)
        return ""

    def _is_gone(self, name: str) -> str:
        try:
            check_alive(self._bindings[name].endpoint)
        except PeerUnreachable as error:
            return str(error)
        except OSError:  # such as too many open files: nobody knows that it is gone
            return ""
        return ""

    def _outcome(self, name: str, gone: str, late: str) -> LinkOutcome:
        link = self._links[name]
        if gone or (gone := self._is_gone(name)):
            return LinkOutcome(name, LinkStatus.UNREACHABLE, 0, "", gone)
        if late:
            return LinkOutcome(name, LinkStatus.UNKNOWN, 0, "", late)
        digest, overflow = read_sent(self._gpu, link.digest, link.program)
        if overflow:
            return LinkOutcome(name, LinkStatus.FAILED, 0, "", overflow)
        return LinkOutcome(name, LinkStatus.OK, link.program.nbytes, digest)

    def close(self) -> None:
        """Free the tables, unmap the peers, let go of pinned memory. Idempotent.

        Waits for a running `write`. What late kernels may still read stays until the process ends.
        """
        with self._lock:
            self._notifier.close()
            if not self._gpu.is_late:
                self._drop()
                self._mapper.keep_mapped(())

    def _drop(self) -> None:
        self._unload()
        self._sources.close()
        self._bindings, self._programs, self._located = {}, {}, ()


def _nothing_sent(names: Sequence[str], status: LinkStatus, reason: str) -> SendResult:
    return SendResult(tuple(LinkOutcome(n, status, 0, "", reason) for n in names), 0.0, 0.0)
