"""Stages 8 and 9, the engine's half: where writes land, whether the right bytes did, making them live.

In come a plan part (once) and the digests that the senders took (per version); out go a
`DestinationBinding`, with the addresses that peers write, and the names of sources whose bytes differ.

While bytes arrive this code does nothing: writes are one-sided. `in_place` writes land in the
live parameters; `staged` ones in a shadow of the same layout, and `apply` copies it over. Ops
whose destination is strided land packed in a landing region and are unpacked by `apply`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, final

from windlass.config import UpdateMode
from windlass.errors import PlanError
from windlass.layout.manifest import ShardManifest
from windlass.memory.digest import hash_strided, new_digest
from windlass.memory.ops import ALIGNMENT, aligned_offsets
from windlass.memory.packing import copy_strided
from windlass.planning.plan import TransferPlan
from windlass.planning.program import BoundOp, LinkProgram, bind_links
from windlass.transfer.arena import Arena
from windlass.transfer.bind import check_part
from windlass.transfer.bindings import DestinationBinding
from windlass.transports.base import (
    MemoryRegion,
    OneSidedTransport,
    PeerEndpoint,
    RemoteRegion,
)

__all__ = ["Elsewhere", "Receiver"]


class Elsewhere(Protocol):
    """Live parameters of another process, which runs no code of ours; here are copies of them.

    Attributes:
        endpoint: of the other process. regions: what it has registered.
        addresses: of the live parameters there, in manifest order.
    """

    endpoint: PeerEndpoint
    regions: tuple[RemoteRegion, ...]
    addresses: tuple[int, ...]

    def fetch(self) -> None:
        """Bring the copies up to date; blocks.

        Raises:
            TransferError: they may not be.
        """
        ...


@final
class Receiver:
    """One engine rank.

    Args:
        transport: the live parameters are registered with it. Stays open; the caller closes it.
        manifest: of this rank.
        parameter_addresses: of the live parameters, in manifest order; they never move.
        regions: registered regions that contain every live parameter.
        elsewhere: peers write these, and `parameter_addresses` are the copies that are verified.
    """

    def __init__(
        self,
        transport: OneSidedTransport,
        manifest: ShardManifest,
        parameter_addresses: Sequence[int],
        regions: Sequence[MemoryRegion],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        if len(parameter_addresses) != len(manifest.parameters):
            raise PlanError(
                f"{manifest.worker}: {len(parameter_addresses)} addresses for "
                f"{len(manifest.parameters)} parameters"
            )
        self._transport = transport
        self._manifest = manifest
        self._live = tuple(parameter_addresses)
        self._regions = tuple(regions)
        self._elsewhere = elsewhere
        self._targets = self._live
        self._shadow: Arena | None = None
        self._landing: Arena | None = None
        self._programs: dict[str, LinkProgram] = {}
        self._written: tuple[tuple[int, int, int], ...] = ()

    @property
    def transport(self) -> OneSidedTransport:
        """What the live parameters are registered with."""
        return self._transport

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """Registered regions that contain every live parameter."""
        return self._regions

    @property
    def is_elsewhere(self) -> bool:
        """Whether the live parameters are another process's; only one-sided writes reach those."""
        return self._elsewhere is not None

    @property
    def manifest(self) -> ShardManifest:
        """What this rank holds."""
        return self._manifest

    @property
    def programs(self) -> Mapping[str, LinkProgram]:
        """Source -> its link, as bound by the last `connect`."""
        return self._programs

    @property
    def target_addresses(self) -> tuple[int, ...]:
        """Of the memory that is written, in manifest order: live parameters or their shadow."""
        return self._targets

    @property
    def landing_address(self) -> int:
        """Of the landing region; 0 without one."""
        return self._landing.address if self._landing is not None else 0

    @property
    def live_addresses(self) -> tuple[int, ...]:
        """Of the live parameters, in manifest order."""
        return self._live

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Bind a plan part (`TransferPlan.for_destination`).

        Allocates the shadow and the landing region that the plan and the mode need, once.

        Raises:
            PlanError: the plan is for another layout, or asks for the engine's own loader.
            RegionError: memory cannot be registered.
        """
        index = check_part(
            self._manifest, plan.destinations, plan.destination_digests, "destinations"
        )
        self._programs = {p.peer: p for p in bind_links(plan, sending=False)}
        if self._elsewhere is not None:
            return self._bind_elsewhere(self._elsewhere, mode, plan.landing_nbytes[index])
        self._prepare_shadow(mode)
        self._written = _written_ranges(self._programs.values())
        self._prepare_landing(plan.landing_nbytes[index])
        arenas = [a for a in (self._shadow, self._landing) if a is not None]
        return DestinationBinding(
            worker=self._manifest.worker,
            endpoint=self._transport.endpoint(),
            regions=(*(r.remote for r in self._regions), *(a.region.remote for a in arenas)),
            parameter_addresses=self._targets,
            landing_address=self.landing_address,
        )

    def verify(self, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Sources whose bytes do not have the expected digest, or that send nothing here."""
        if self._elsewhere is not None:
            self._elsewhere.fetch()
        mismatched = []
        for source, digest in sorted(expected.items()):
            program = self._programs.get(source)
            if program is None or self._digest(program) != digest:
                mismatched.append(source)
        return tuple(mismatched)

    def apply(self) -> None:
        """Make verified bytes live: copy the shadow over, unpack the landing region. Idempotent.

        The engine must be at rest.
        """
        if self._targets is not self._live:
            for index, offset, nbytes in self._written:
                ctypes.memmove(self._live[index] + offset, self._targets[index] + offset, nbytes)
        for program in self._programs.values():
            for op in program.ops:
                if op.lands:
                    self._unpack(op)

    def close(self) -> None:
        """Free shadow and landing region. No peer may write after this. Idempotent."""
        for arena in (self._shadow, self._landing):
            if arena is not None:
                arena.close()
        self._shadow = self._landing = None

    def _bind_elsewhere(
        self, elsewhere: Elsewhere, mode: UpdateMode, landing_nbytes: int
    ) -> DestinationBinding:
        worker = self._manifest.worker
        if mode is not UpdateMode.IN_PLACE:
            raise PlanError(f"{worker}: mode must be in_place, as no shadow fits there, got {mode}")
        if landing_nbytes:
            raise PlanError(
                f"{worker}: {landing_nbytes} bytes are strided there and would have to land in a "
                "buffer of that process: use a trainer layout that cuts no columns, or the engine's "
                "tensor-parallel size"
            )
        return DestinationBinding(
            worker=worker,
            endpoint=elsewhere.endpoint,
            regions=elsewhere.regions,
            parameter_addresses=elsewhere.addresses,
        )

    def _prepare_shadow(self, mode: UpdateMode) -> None:
        if mode is UpdateMode.IN_PLACE:
            self._targets = self._live
            return
        offsets, total = aligned_offsets(p.nbytes for p in self._manifest.parameters)
        if self._shadow is None:
            self._shadow = Arena(self._transport, max(total, ALIGNMENT))
        self._targets = tuple(self._shadow.address + offset for offset in offsets)

    def _prepare_landing(self, nbytes: int) -> None:
        if self._landing is not None and self._landing.nbytes < nbytes:
            self._landing.close()
            self._landing = None
        if self._landing is None and nbytes:
            self._landing = Arena(self._transport, nbytes)

    def _digest(self, program: LinkProgram) -> str:
        digest = new_digest()
        for op in program.ops:
            if op.lands:
                address, strides = self._landing_address(op), op.packed_strides
            else:
                address = self._targets[op.dst_parameter] + op.dst_offset
                strides = op.dst_strides
            hash_strided(
                digest,
                address=address,
                sizes=op.sizes,
                strides_bytes=strides,
                dtype=op.dst_dtype,
            )
        return digest.hexdigest()

    def _unpack(self, op: BoundOp) -> None:
        copy_strided(
            sizes=op.sizes,
            src_address=self._landing_address(op),
            src_strides=op.packed_strides,
            src_dtype=op.dst_dtype,
            dst_address=self._live[op.dst_parameter] + op.dst_offset,
            dst_strides=op.dst_strides,
            dst_dtype=op.dst_dtype,
        )

    def _landing_address(self, op: BoundOp) -> int:
        if self._landing is None:
            raise PlanError(f"{self._manifest.worker}: the plan asked for no landing region")
        return self._landing.address + op.landing_offset


def _written_ranges(programs: Iterable[LinkProgram]) -> tuple[tuple[int, int, int], ...]:
    """(parameter, offset, bytes) of what is written into parameters, joined where adjacent.

    What belongs to no tensor (padding) and what is unpacked from the landing region is left out:
    a shadow holds nothing for it.
    """
    rows: list[tuple[int, int, int]] = []
    for program in programs:
        rows.extend(
            (op.dst_parameter, op.dst_offset, op.nbytes)
            for op in program.ops
            if not op.lands and not op.is_direct
        )
        runs = program.direct
        columns = (runs.dst_parameter.tolist(), runs.dst_offset.tolist(), runs.nbytes.tolist())
        rows.extend(zip(*columns, strict=True))
    joined: list[tuple[int, int, int]] = []
    for parameter, offset, nbytes in sorted(rows):
        if joined and joined[-1][0] == parameter and sum(joined[-1][1:]) == offset:
            joined[-1] = (parameter, joined[-1][1], joined[-1][2] + nbytes)
        else:
            joined.append((parameter, offset, nbytes))
    return tuple(joined)
