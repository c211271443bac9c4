"""Whether a live SGLang rank holds what its table says, and the copies that prove every update.

The copies are the parameters of the model that this process has built: the live ones are read into
them one-sided, compared at the start byte for byte with this process's own load, and hashed after
every update. The bytes of an update travel twice; what a peer claims to have written counts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch

from windlass.config import PauseMode
from windlass.engines.attach import stretches
from windlass.engines.capture.capture import Captured
from windlass.engines.sglang.table.model import checksum
from windlass.engines.sglang.table.routes import Entry, TableRoutes, WeightTable
from windlass.errors import PeerUnreachable, TransferFailed, UnsupportedLayout
from windlass.transports.base import MemoryRegion, WriteBatch
from windlass.transports.mooncake.config import MooncakeConfig
from windlass.transports.mooncake.session import MooncakeSession

__all__ = ["RemoteCopies", "TableRank", "check_agreement"]

READ_DEADLINE_S = 60.0
CHECK_DEADLINE_S = 60.0


def check_agreement(
    table: WeightTable, parameters: Mapping[str, torch.Tensor], captured: Captured
) -> None:
    """Compare a live rank's table with a model of the same class, and with what was captured of it.

    Raises:
        UnsupportedLayout: names what is missing, extra or different, and what updates would have
            to reach that is not in the table.
    """
    own = {n: (p.numel(), p.element_size()) for n, p in parameters.items()}
    told = {n: (e.numel, e.itemsize) for n, e in table.entries.items()}
    differing = sorted(n for n in own.keys() & told.keys() if own[n] != told[n])
    faults = {
        "missing in the table": sorted(own.keys() - told.keys()),
        "in the table only": sorted(told.keys() - own.keys()),
        "of another size": [f"{n} {told[n]} instead of {own[n]}" for n in differing],
        "repacked after loading": sorted(captured.repacked),
        "to be rounded to the checkpoint's type after every update": sorted(
            {rounding.name for rounding in captured.roundings}
        ),
    }
    captured_nbytes = {p.name: p.nbytes for p in captured.manifest.parameters}
    faults["derived from weights, and not in the table"] = sorted(
        captured_nbytes.keys() - told.keys()
    )
    faults["not contiguous"] = sorted(
        n
        for n in captured_nbytes.keys() & told.keys()
        if captured_nbytes[n] != table.entries[n].nbytes
    )
    found = "; ".join(f"{what}: {names}" for what, names in faults.items() if names)
    if found:
        raise UnsupportedLayout(f"{captured.manifest.worker}: {found}")


@final
class RemoteCopies:
    """`RemoteMemory` of one rank: copies of its parameters, in manifest order."""

    def __init__(
        self, session: MooncakeSession, local: Sequence[int], there: Sequence[Entry]
    ) -> None:
        self._session = session
        self._local = tuple(local)
        self._nbytes = tuple(entry.nbytes for entry in there)
        self.endpoint = session.endpoint()
        self.regions = session.regions
        self.addresses = tuple(entry.address for entry in there)

    def fetch(self) -> None:
        """See `RemoteMemory.fetch`."""
        read_back(self._session, self._local, self.addresses, self._nbytes)


def read_back(
    session: MooncakeSession, local: Sequence[int], there: Sequence[int], nbytes: Sequence[int]
) -> None:
    """Read the other process's memory into registered memory of this one.

    Raises:
        TransferError: see `MooncakeTransport.read`.
    """
    batch = WriteBatch(
        endpoint=session.endpoint(),
        local_addresses=np.array(local, np.uint64),
        remote_addresses=np.array(there, np.uint64),
        nbytes=np.array(nbytes, np.uint64),
        regions=session.regions,
    )
    session.read(batch, deadline_s=READ_DEADLINE_S)


@final
class TableRank:
    """One rank: the connection to its memory, and `EngineHooks` over the server's routes.

    Args:
        config: of this process's Mooncake engine.
        routes: of the server. rank: tensor-parallel.
        table: as the server tells it now; it must stay so.
        model: of this process, loaded with what the engine should hold. captured: of it.

    Raises:
        UnsupportedLayout: see `check_agreement`.
        TransportUnavailable, RegionError: see `MooncakeSession`.
    """

    def __init__(
        self,
        config: MooncakeConfig,
        routes: TableRoutes,
        rank: int,
        table: WeightTable,
        model: torch.nn.Module,
        captured: Captured,
    ) -> None:
        self.captured = captured
        self._routes, self._rank, self._table = routes, rank, table
        self._parameters = dict(model.named_parameters())
        check_agreement(table, self._parameters, captured)
        entries = table.entries
        spans = [(entry.address, entry.nbytes) for entry in entries.values()]
        self.session = MooncakeSession(config, table.session, spans)
        self.local_regions: tuple[MemoryRegion, ...] = tuple(
            self.session.register(address, nbytes)
            for address, nbytes in stretches(
                (p.data_ptr(), p.nbytes) for p in self._parameters.values()
            )
        )
        there = [entries[p.name] for p in captured.manifest.parameters]
        self.copies = RemoteCopies(self.session, captured.addresses, there)
        self._is_cross_checked = False
        self._paused = False

    def require_equal(self) -> None:
        """Compare every parameter of the live engine with this process's own load.

        Raises:
            UnsupportedLayout: names those whose bytes differ.
            TransferError: they cannot be read.
        """
        own = {name: _bytes(p).clone() for name, p in self._parameters.items()}
        read_back(
            self.session,
            [p.data_ptr() for p in self._parameters.values()],
            [self._table.entries[name].address for name in self._parameters],
            [self._table.entries[name].nbytes for name in self._parameters],
        )
        differing = [n for n, p in self._parameters.items() if not torch.equal(_bytes(p), own[n])]
        if differing:
            raise UnsupportedLayout(
                f"{self.captured.manifest.worker}: {differing}: the engine's bytes are not those of "
                "the checkpoint as its own loader places them: give the folder that it was loaded "
                "from, or that of the weights which it holds now, or start it anew"
            )

    def cross_check(self, device: str) -> bool:
        """Whether SGLang's checksums can be compared with ours: it hashes otherwise on GPUs.

        Raises:
            TransferFailed: they can, and differ.
        """
        self._is_cross_checked = device == "cpu"
        self._compare_checksums()
        return self._is_cross_checked

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:  # noqa: ARG002
        """See `EngineHooks.pause`; what rank 0 asks for holds for all."""
        if self._routes.table(self._rank) != self._table:
            raise PeerUnreachable(
                f"{self.captured.manifest.worker}: the server tells another table than when this "
                "rank joined: it was started anew"
            )
        if self._rank == 0:
            self._paused = True
            self._routes.pause(mode, deadline_s)

    def resume(self, deadline_s: float) -> None:
        """See `EngineHooks.resume`."""
        if self._paused:
            self._routes.resume(deadline_s)
            self._paused = False

    def finalise(self) -> None:
        """Ask SGLang what its model holds: a parameter that it has moved since is found so.

        Raises:
            TransferFailed: not what was read from where the table says.
        """
        self._compare_checksums()

    def set_version(self, version: int, deadline_s: float) -> None:
        """See `EngineHooks.set_version`."""
        if self._rank == 0:
            self._routes.set_version(version, deadline_s)

    def _compare_checksums(self) -> None:
        if not self._is_cross_checked:
            return
        theirs = self._routes.checksums(CHECK_DEADLINE_S)[self._rank]
        ours = {name: checksum(p) for name, p in self._parameters.items() if name in theirs}
        differing = sorted(name for name, value in ours.items() if theirs[name] != value)
        if differing or not ours:
            raise TransferFailed(
                f"{self.captured.manifest.worker}: {differing or 'no parameter'}: SGLang's checksums "
                "must be those of the bytes at the table's addresses"
            )


def _bytes(parameter: torch.Tensor) -> torch.Tensor:
    """(nbytes,) uint8, over the parameter's own memory."""
    return parameter.detach().as_strided((parameter.numel(),), (1,)).view(torch.uint8)
