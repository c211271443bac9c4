"""What binding a plan to memory needs to know of the other side. Travels in messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from windlass.errors import PlanError
from windlass.layout.dtypes import DType
from windlass.planning.program import DigestKind
from windlass.transports.base import PeerEndpoint, RemoteRegion


class BindingsRefused(PlanError):
    """Some destinations offer memory that cannot be written; the others' can be.

    Attributes:
        reasons: destination worker -> why, one line each.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = dict(reasons)


class DestinationBinding(msgspec.Struct, frozen=True):
    """Where writes to one destination rank land.

    Attributes:
        worker: the destination.
        endpoint: its transport endpoint.
        regions: registered regions that every write must lie in.
        parameter_addresses: per parameter of its manifest: address of the live parameter
            (`in_place`) or of its shadow (`staged`).
        staging_address: address of staging memory for scatter and loader ops; 0 without one.
    """

    worker: str
    endpoint: PeerEndpoint
    regions: tuple[RemoteRegion, ...]
    parameter_addresses: tuple[int, ...]
    staging_address: int = 0
    listener: str = ""
    digest_kind: DigestKind = DigestKind.XXH3


class BucketPart(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of a source parameter, and where they travel.

    Attributes:
        name, dtype, nbytes: of the whole parameter, as its manifest says.
        parameter: index in the source's manifest.
        start, stop: bytes [start, stop) of the parameter.
        bucket: which broadcast carries them. offset: byte offset in that bucket.
    """

    name: str
    dtype: str
    nbytes: int
    parameter: int
    start: int
    stop: int
    bucket: int
    offset: int


class WireTensor(msgspec.Struct, frozen=True):
    """A whole checkpoint tensor that travels by itself."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class GroupOffer(msgspec.Struct, frozen=True):
    """One trainer rank offers a broadcast group; the port is bound before it is published.

    Attributes:
        name: unique; several groups live side by side.
        members: workers by rank; the source is rank 0.
        host, port: of the source's rendezvous store.
        parts: every byte that is broadcast, in order.
        bucket_nbytes: per broadcast.
    """

    name: str
    members: tuple[str, ...]
    host: str
    port: int
    parts: tuple[BucketPart, ...]
    bucket_nbytes: tuple[int, ...]

    @property
    def source(self) -> str:
        """The worker whose bytes the group carries."""
        return self.members[0]


class LinkStatus(StrEnum):
    """How the writes of one link ended; `UNKNOWN` is not `FAILED`."""

    OK = "ok"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


class Carried(msgspec.Struct, frozen=True):
    """Bytes that one link carried or several did, and the seconds that their writes took, added up."""

    nbytes: int
    wire_s: float

    @property
    def gbps(self) -> float:
        """10^9 bytes per second: of a link, or of several on average."""
        return self.nbytes / self.wire_s / 1e9 if self.wire_s else 0.0


class LinkOutcome(msgspec.Struct, frozen=True):
    """What one source did on one link.

    Attributes:
        destination: destination worker.
        status: how it ended.
        nbytes: bytes written.
        digest: hex, of the link's payload: its ops in plan order, each op's elements row-major
            over `sizes`, in the destination dtype. Of which kind, the binding says.
        error: one line when `status` is not OK.
        wire_s: seconds from the begin of its own first write to the end of its last one, less what it
            waited for packing; 0 where links are not written one by one, as in a broadcast.
    """

    destination: str
    status: LinkStatus
    nbytes: int
    digest: str
    error: str = ""
    wire_s: float = 0.0


class Written(msgspec.Struct, frozen=True, tag="written"):
    """Trainer rank: what a write came to.

    Attributes:
        links: outcome of every link that it was asked to write.
        pack_s: seconds of packing and hashing. wire_s: inside transport writes.
        register_s: registering parameters that were not yet, or have moved.
        non_finite: parameters in which it has found NaN or infinity.
    """

    links: tuple[LinkOutcome, ...]
    pack_s: float
    wire_s: float
    register_s: float = 0.0
    non_finite: tuple[str, ...] = ()


class Relayed(msgspec.Struct, frozen=True, tag="relayed"):
    """Engine rank: how its part of a relay went. Every upstream has ended by now, but for `unknown_from`.

    Attributes:
        missing: sources whose link is not complete here.
        unknown_from: upstreams whose bytes may still land here.
        unknown_to: engines in which bytes of this rank may still land.
        unreached: engines that did not let this rank in; nothing was written to them.
        nbytes: passed on. wire_s: from the first chunk here to the last one passed on.
        passed_on: what each engine was written, from its first chunk to its last one.
    """

    missing: tuple[str, ...]
    unknown_from: tuple[str, ...]
    unknown_to: tuple[str, ...]
    unreached: tuple[str, ...]
    nbytes: int
    wire_s: float
    passed_on: dict[str, Carried] = {}


class RelayAddress(msgspec.Struct, frozen=True):
    """Where an engine rank of a relay listens, bound before it is published, and its secret."""

    worker: str
    host: str
    port: int
    token: str
