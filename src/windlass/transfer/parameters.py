"""Where a trainer rank's parameters lie now, and the registration of those that are read in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np
import numpy.typing as npt

from windlass.errors import PlanError
from windlass.layout.manifest import ShardManifest
from windlass.transfer.base import ParameterMemory
from windlass.transports.base import MemoryRegion, OneSidedTransport

__all__ = ["LocatedParameters", "SourceParameters", "check_described"]


def check_described(manifest: ShardManifest, memories: Sequence[ParameterMemory]) -> None:
    """Refuse parameters that are not those of the manifest.

    Raises:
        PlanError: another number of them, or other sizes, than described.
    """
    specs = manifest.parameters
    if len(memories) != len(specs):
        raise PlanError(
            f"{manifest.worker}: {len(memories)} parameters where {len(specs)} were described"
        )
    for spec, memory in zip(specs, memories, strict=True):
        if memory.nbytes != spec.nbytes:
            raise PlanError(
                f"{manifest.worker}: parameter {spec.name!r} has {memory.nbytes} bytes where "
                f"{spec.nbytes} were described"
            )


@final
class LocatedParameters:
    """Where a rank's parameters lie, asked of their owner at every call, or once for several.

    Locating thousands of tensors takes tens of milliseconds. One thread at a time.

    Args:
        locate: returns (num_parameters,) in manifest order.
    """

    def __init__(self, locate: Callable[[], Sequence[ParameterMemory]]) -> None:
        self._locate = locate
        self._keeps = False
        self._kept: tuple[ParameterMemory, ...] | None = None

    def __call__(self) -> tuple[ParameterMemory, ...]:
        """Return where each parameter lies, in manifest order."""
        found = tuple(self._locate()) if self._kept is None else self._kept
        if self._keeps:
            self._kept = found
        return found

    @contextmanager
    def once(self) -> Iterator[None]:
        """Within, the owner is asked at the first call only: parameters must not move meanwhile."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._kept = False, None


@final
class SourceParameters:
    """See the module.

    Args:
        transport: registers.
        manifest: of the rank.
        parameters: where the parameters lie, in manifest order; asked at every `locate`.
        registered: regions that the owner has registered already; what lies in them is not again.
    """

    def __init__(
        self,
        transport: OneSidedTransport,
        manifest: ShardManifest,
        parameters: Callable[[], Sequence[ParameterMemory]],
        registered: Sequence[MemoryRegion],
    ) -> None:
        self._transport, self._manifest = transport, manifest
        self._parameters = LocatedParameters(parameters)
        self._by_owner = tuple(registered)
        self._registered: dict[int, MemoryRegion] = {}

    @property
    def memory(self) -> LocatedParameters:
        """Asks the owner."""
        return self._parameters

    def locate(self) -> tuple[ParameterMemory, ...]:
        """Ask where parameters lie, in manifest order.

        Raises:
            PlanError: another number of them, or other sizes, than described.
        """
        now = self._parameters()
        check_described(self._manifest, now)
        return now

    def register(
        self, now: Sequence[ParameterMemory], read_in_place: Sequence[int]
    ) -> npt.NDArray[np.uint64]:
        """Register those that are read in place and have moved; all addresses.

        Args:
            now: see `locate`.
            read_in_place: indices of the parameters that writes read from.

        Raises:
            RegionError: memory cannot be registered.
        """
        wanted = _union(now[i] for i in read_in_place if not self._is_registered(now[i]))
        for address, region in list(self._registered.items()):
            if wanted.get(address) != region.nbytes:
                self._transport.unregister(region)
                del self._registered[address]
        for address, nbytes in wanted.items():
            if address not in self._registered:
                self._registered[address] = self._transport.register(address, nbytes)
        return np.array([memory.address for memory in now], np.uint64)

    def close(self) -> None:
        """Unregister. Idempotent."""
        for region in self._registered.values():
            self._transport.unregister(region)
        self._registered = {}

    def _is_registered(self, memory: ParameterMemory) -> bool:
        return any(
            region.address <= memory.address
            and memory.address + memory.nbytes <= region.address + region.nbytes
            for region in self._by_owner
        )


def _union(memories: Iterable[ParameterMemory]) -> dict[int, int]:
    """Address -> bytes of disjoint ranges; parameters that share storage are one range."""
    merged: dict[int, int] = {}
    last = -1
    for memory in sorted(memories, key=lambda m: m.address):
        if not memory.nbytes:
            continue
        if last in merged and memory.address < last + merged[last]:
            merged[last] = max(merged[last], memory.address + memory.nbytes - last)
        else:
            last = memory.address
            merged[last] = memory.nbytes
    return merged
