"""The trainer's half: pack what must be packed, write every link, hash what was sent.

Two ways through the arena, chosen by its capacity alone. When everything that needs packing
fits, `prepare` packs and hashes before the pause and `write` only writes (the arena is then
the engine-shaped replica of this rank's part). Otherwise the arena is a ring of two halves:
one is packed while the other is on the wire. Bytes that go as they lie (DIRECT) never
pass through it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
import xxhash

from windlass.errors import (
    PeerUnreachable,
    PlanError,
    RoundAborted,
    TransferError,
    TransferOutcomeUnknown,
)
from windlass.execution.bind import BoundOp, LinkProgram, bind_links
from windlass.execution.bindings import DestinationBinding, LinkOutcome, LinkStatus
from windlass.memory.arena import Arena
from windlass.memory.packing import copy_strided, hash_strided, new_digest
from windlass.planning.plan import TransferPlan
from windlass.transports.base import MemoryRegion, OneSidedTransport, WriteBatch

__all__ = ["ParameterMemory", "SendResult", "Sender"]

ALIGNMENT = 64
WRITE_PIECES = 4096
"""Pieces per transport call: bounds a batch, not its bytes."""


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """Where a parameter lies now."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SendResult:
    """Outcome per link, and seconds spent packing and hashing, and inside transport writes."""

    links: tuple[LinkOutcome, ...]
    pack_s: float
    wire_s: float


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pieces of one link that can be written together."""

    local: npt.NDArray[np.uint64]
    remote: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A link that is packed and hashed."""

    batches: tuple[_Batch, ...]
    digest: str


@final
class Sender:
    """One trainer rank. Not thread-safe: one round at a time.

    Memory: the parameters must not change between `prepare` and the end of the round.

    Args:
        transport: writes. Stays open; the caller closes it.
        parameters: where the parameters lie now, in manifest order; asked at every `prepare`.
        arena_nbytes: capacity for packed bytes; 0 for as much as one update needs.
    """

    def __init__(
        self,
        transport: OneSidedTransport,
        parameters: Callable[[], Sequence[ParameterMemory]],
        *,
        arena_nbytes: int = 0,
    ) -> None:
        self._transport = transport
        self._parameters = parameters
        self._arena_limit = arena_nbytes
        self._arena: Arena | None = None
        self._abandoned: list[Arena] = []
        self._programs: tuple[LinkProgram, ...] = ()
        self._bindings: dict[str, DestinationBinding] = {}
        self._registered: dict[int, MemoryRegion] = {}
        self._now: Sequence[ParameterMemory] = ()
        self._ready: dict[str, _Ready] = {}
        self._pack_s = 0.0
        self._writer = ThreadPoolExecutor(1, "windlass-writer")

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends in one update."""
        return sum(program.nbytes for program in self._programs)

    def connect(self, plan: TransferPlan, bindings: Sequence[DestinationBinding]) -> None:
        """Bind a plan part (`TransferPlan.for_source`); allocates and registers the arena.

        Raises:
            PlanError: a destination of the plan has no binding.
            RegionError: memory cannot be registered.
        """
        programs = bind_links(plan, sending=True)
        known = {binding.worker: binding for binding in bindings}
        for program in programs:
            if program.peer not in known:
                raise PlanError(f"connect: destination {program.peer} of the plan has no binding")
        self._programs, self._bindings = programs, known
        self._ready = {}
        needed = _packed_capacity(programs)
        capacity = min(needed, self._arena_limit) if self._arena_limit else needed
        if self._arena is not None and (self._arena.nbytes < capacity or not capacity):
            self._arena.close()
            self._arena = None
        if self._arena is None and capacity:
            self._arena = Arena(self._transport, capacity)
        self._locate()

    def prepare(self) -> None:
        """Pack and hash every link that the arena holds at once; nothing is sent.

        Raises:
            RegionError: changed parameter memory cannot be registered.
        """
        began = time.perf_counter()
        self._locate()
        self._ready = {}
        if self._fits():
            offset = 0
            for program in self._programs:
                self._ready[program.peer], offset = self._pack_link(program, offset)
        self._pack_s = time.perf_counter() - began

    def write(self, destinations: Sequence[str], deadline_s: float) -> SendResult:
        """Write the links to `destinations`. Idempotent.

        Links to different destinations start at a rank-dependent place, so that ranks which send
        to the same engines do not all begin with the same one.

        Raises:
            RoundAborted: a destination that this rank does not send to.
        """
        programs = {program.peer: program for program in self._programs}
        unknown = [name for name in destinations if name not in programs]
        if unknown:
            raise RoundAborted(f"write: this rank sends nothing to {', '.join(unknown)}")
        deadline = time.monotonic() + deadline_s
        pack_s, self._pack_s = self._pack_s, 0.0
        outcomes, wire_s = [], 0.0
        for name in destinations:
            if name in self._ready:
                outcome, link_wire_s = self._write_ready(programs[name], deadline)
                link_pack_s = 0.0
            else:
                outcome, link_wire_s, link_pack_s = self._stream(programs[name], deadline)
            outcomes.append(outcome)
            wire_s += link_wire_s
            pack_s += link_pack_s
        return SendResult(tuple(outcomes), pack_s, wire_s)

    def close(self) -> None:
        """Unregister and free. Arenas with writes of unknown outcome are kept mapped."""
        self._writer.shutdown(wait=True)
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        for region in self._registered.values():
            self._transport.unregister(region)
        self._registered = {}

    # --- memory ------------------------------------------------------------------------------

    def _locate(self) -> None:
        """Ask where parameters lie, and register those that are read in place and have moved."""
        self._now = tuple(self._parameters())
        direct = {op.src_parameter for p in self._programs for op in p.ops if op.is_direct}
        wanted = {self._now[i].address: self._now[i].nbytes for i in sorted(direct)}
        for address, region in list(self._registered.items()):
            if wanted.get(address) != region.nbytes:
                self._transport.unregister(region)
                del self._registered[address]
        for address, nbytes in wanted.items():
            if address not in self._registered and nbytes:
                self._registered[address] = self._transport.register(address, nbytes)

    def _fits(self) -> bool:
        capacity = self._arena.nbytes if self._arena is not None else 0
        return _packed_capacity(self._programs) <= capacity

    # --- whole-shard arena -------------------------------------------------------------------

    def _pack_link(self, program: LinkProgram, offset: int) -> tuple[_Ready, int]:
        digest = new_digest()
        pieces: list[npt.NDArray[np.uint64]] = []
        for op in program.ops:
            if op.is_direct:
                pieces.append(self._direct_pieces(program.peer, op))
                self._hash_source(digest, op)
            else:
                pieces.append(self._pack(program.peer, op, offset, digest))
                offset += _aligned(op.nbytes)
        return _Ready(tuple(_batches(pieces)), digest.hexdigest()), offset

    def _write_ready(self, program: LinkProgram, deadline: float) -> tuple[LinkOutcome, float]:
        ready = self._ready[program.peer]
        began = time.perf_counter()
        try:
            for batch in ready.batches:
                self._write_batch(program.peer, batch, deadline)
        except TransferError as error:
            return self._failed(program, error), time.perf_counter() - began
        wire_s = time.perf_counter() - began
        outcome = LinkOutcome(program.peer, LinkStatus.OK, program.nbytes, ready.digest)
        return outcome, wire_s

    # --- ring --------------------------------------------------------------------------------

    def _stream(self, program: LinkProgram, deadline: float) -> tuple[LinkOutcome, float, float]:
        """Pack one half of the arena while the other half is on the wire."""
        digest = new_digest()
        in_flight: Future[float] | None = None
        wire_s = pack_s = 0.0
        try:
            for batch, seconds in self._ring_batches(program, digest):
                pack_s += seconds
                if in_flight is not None:
                    wire_s += in_flight.result()
                in_flight = self._writer.submit(self._timed_write, program.peer, batch, deadline)
            if in_flight is not None:
                wire_s += in_flight.result()
        except TransferError as error:
            return self._failed(program, error), wire_s, pack_s
        outcome = LinkOutcome(program.peer, LinkStatus.OK, program.nbytes, digest.hexdigest())
        return outcome, wire_s, pack_s

    def _ring_batches(
        self, program: LinkProgram, digest: xxhash.xxh3_128
    ) -> Iterator[tuple[_Batch, float]]:
        """Batches that use the two halves in turn; at most one may be in flight between two."""
        half_nbytes = (self._arena.nbytes // 2 if self._arena is not None else 0) & -ALIGNMENT
        half, used = 0, 0
        pieces: list[npt.NDArray[np.uint64]] = []
        began = time.perf_counter()
        for op in program.ops:
            if op.is_direct:
                pieces.append(self._direct_pieces(program.peer, op))
                self._hash_source(digest, op)
                continue
            for part in _split(op, half_nbytes):
                if used + _aligned(part.nbytes) > half_nbytes:
                    for batch in _batches(pieces):
                        yield batch, time.perf_counter() - began
                        began = time.perf_counter()
                    pieces, half, used = [], 1 - half, 0
                pieces.append(self._pack(program.peer, part, half * half_nbytes + used, digest))
                used += _aligned(part.nbytes)
        for batch in _batches(pieces):
            yield batch, time.perf_counter() - began
            began = time.perf_counter()

    def _timed_write(self, peer: str, batch: _Batch, deadline: float) -> float:
        began = time.perf_counter()
        self._write_batch(peer, batch, deadline)
        return time.perf_counter() - began

    # --- both --------------------------------------------------------------------------------

    def _direct_pieces(self, peer: str, op: BoundOp) -> npt.NDArray[np.uint64]:
        """(n, 3) local address, remote address, nbytes."""
        remote = self._bindings[peer].parameter_addresses[op.dst_parameter]
        pieces = np.empty((len(op.run_offsets), 3), np.uint64)
        pieces[:, 0] = op.run_offsets[:, 0] + self._now[op.src_parameter].address
        pieces[:, 1] = op.run_offsets[:, 1] + remote
        pieces[:, 2] = op.run_nbytes
        return pieces

    def _hash_source(self, digest: xxhash.xxh3_128, op: BoundOp) -> None:
        hash_strided(
            digest,
            address=self._now[op.src_parameter].address + op.src_offset,
            sizes=op.sizes,
            strides_bytes=op.src_strides,
            dtype=op.src_dtype,
        )

    def _pack(
        self, peer: str, op: BoundOp, offset: int, digest: xxhash.xxh3_128
    ) -> npt.NDArray[np.uint64]:
        """Pack an op at `offset` of the arena and hash it; returns its one piece."""
        if self._arena is None:
            raise PlanError("pack: the sender has no arena; connect first")
        address = self._arena.address + offset
        copy_strided(
            sizes=op.sizes,
            src_address=self._now[op.src_parameter].address + op.src_offset,
            src_strides=op.src_strides,
            src_dtype=op.src_dtype,
            dst_address=address,
            dst_strides=op.packed_strides,
            dst_dtype=op.dst_dtype,
        )
        digest.update(self._arena.bytes[offset : offset + op.nbytes].data)
        binding = self._bindings[peer]
        remote = (
            binding.landing_address + op.landing_offset
            if op.lands
            else binding.parameter_addresses[op.dst_parameter] + op.dst_offset
        )
        return np.array([[address, remote, op.nbytes]], np.uint64)

    def _write_batch(self, peer: str, batch: _Batch, deadline: float) -> None:
        binding = self._bindings[peer]
        self._transport.write(
            WriteBatch(
                endpoint=binding.endpoint,
                local_addresses=batch.local,
                remote_addresses=batch.remote,
                nbytes=batch.nbytes,
                regions=binding.regions,
            ),
            deadline_s=max(deadline - time.monotonic(), 0.001),
        )

    def _failed(self, program: LinkProgram, error: TransferError) -> LinkOutcome:
        match error:
            case PeerUnreachable():
                status = LinkStatus.UNREACHABLE
            case TransferOutcomeUnknown():
                status = LinkStatus.UNKNOWN
                self._abandon_arena()
            case _:
                status = LinkStatus.FAILED
        return LinkOutcome(program.peer, status, 0, "", f"{type(error).__name__}: {error}")

    def _abandon_arena(self) -> None:
        """Bytes may still leave the arena: never reuse or unmap it; later rounds get a new one."""
        if self._arena is None:
            return
        self._abandoned.append(self._arena)
        self._arena = Arena(self._transport, self._arena.nbytes)
        self._ready = {}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _packed_capacity(programs: Sequence[LinkProgram]) -> int:
    return sum(_aligned(op.nbytes) for p in programs for op in p.ops if not op.is_direct)


def _batches(pieces: Sequence[npt.NDArray[np.uint64]]) -> Iterator[_Batch]:
    if not pieces:
        return
    table = np.concatenate(pieces)
    for start in range(0, len(table), WRITE_PIECES):
        part = table[start : start + WRITE_PIECES]
        yield _Batch(part[:, 0].copy(), part[:, 1].copy(), part[:, 2].copy())


def _split(op: BoundOp, limit: int) -> Iterator[BoundOp]:
    """Cut an op along its outermost dims into parts of at most `limit` bytes.

    Only ops whose payload is one run at the destination are cut, which PACKED and landing ops
    are by construction, so a part's bytes follow those of the part before.

    Raises:
        PlanError: the arena cannot hold a single element.
    """
    if op.nbytes <= limit:
        yield op
        return
    if limit < op.dst_dtype.itemsize:
        raise PlanError(f"arena: a half of {limit} bytes cannot hold one element")
    outer = next(dim for dim, size in enumerate(op.sizes) if size > 1)
    row_nbytes = op.nbytes // op.sizes[outer]
    num_rows = max(limit // row_nbytes, 1)
    for start in range(0, op.sizes[outer], num_rows):
        count = min(num_rows, op.sizes[outer] - start)
        sizes = (*op.sizes[:outer], count, *op.sizes[outer + 1 :])
        part = BoundOp(
            mode=op.mode,
            src_parameter=op.src_parameter,
            dst_parameter=op.dst_parameter,
            sizes=sizes,
            src_offset=op.src_offset + start * op.src_strides[outer],
            src_strides=op.src_strides,
            src_dtype=op.src_dtype,
            dst_offset=op.dst_offset + start * op.dst_strides[outer],
            dst_strides=op.dst_strides,
            dst_dtype=op.dst_dtype,
            nbytes=row_nbytes * count,
            landing_offset=op.landing_offset + start * row_nbytes if op.lands else -1,
            run_nbytes=row_nbytes * count,
            run_offsets=op.run_offsets,
        )
        yield from _split(part, limit)
