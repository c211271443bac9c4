"""Messages with addresses, group offers and link outcomes that ranks exchange."""

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
    """Some destinations offer memory that cannot be written; the other destinations are fine.

    Attributes:
        reasons: destination worker -> reason, one line each.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = dict(reasons)


class DestinationBinding(msgspec.Struct, frozen=True):
    """Addresses that writes to one destination rank go to.

    Attributes:
        worker: the destination.
        endpoint: its transport endpoint.
        regions: registered regions that contain every write.
        parameter_addresses: per parameter of its manifest: address of the live parameter
            (`in_place`) or of its shadow (`staged`).
        staging_address: address of staging memory for scatter and loader ops; 0 without one.
        listener: address of the rank's `ProgressListener`; empty without one.
        digest_kind: kind of digests that the rank computes.
    """

    worker: str
    endpoint: PeerEndpoint
    regions: tuple[RemoteRegion, ...]
    parameter_addresses: tuple[int, ...]
    staging_address: int = 0
    listener: str = ""
    digest_kind: DigestKind = DigestKind.XXH3


class BucketPart(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of a source parameter, and their place in a broadcast.

    Attributes:
        name, dtype, nbytes: name, dtype and size of the whole parameter, as in its manifest.
        parameter: index in the source's manifest.
        start, stop: bytes [start, stop) of the parameter.
        bucket: index of the broadcast that carries them.
        offset: byte offset in that bucket.
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
    """Description of a checkpoint tensor that is sent whole, not as shards."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class GroupOffer(msgspec.Struct, frozen=True):
    """Offer of one trainer rank to form a broadcast group. Its port is bound before the offer is published.

    Attributes:
        name: unique name; several groups can exist at the same time.
        members: workers in the order of their ranks in the group; the source is rank 0.
        host, port: address of the source's rendezvous store.
        parts: all bytes that are broadcast, in order.
        bucket_nbytes: bytes of each broadcast.
    """

    name: str
    members: tuple[str, ...]
    host: str
    port: int
    parts: tuple[BucketPart, ...]
    bucket_nbytes: tuple[int, ...]

    @property
    def source(self) -> str:
        """The worker that sends to the group."""
        return self.members[0]


class LinkStatus(StrEnum):
    """Result of a link's writes. After `FAILED` no more bytes land; after `UNKNOWN` some may still land."""

    OK = "ok"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


class Carried(msgspec.Struct, frozen=True):
    """Bytes that one or several links carried, and the sum of the seconds of their writes."""

    nbytes: int
    wire_s: float

    @property
    def gbps(self) -> float:
        """Rate in 10^9 bytes per second; the average for several links."""
        return self.nbytes / self.wire_s / 1e9 if self.wire_s else 0.0


class LinkOutcome(msgspec.Struct, frozen=True):
    """Result of the writes of one link, as its source reports it.

    Attributes:
        destination: destination worker.
        status: how the link ended.
        nbytes: bytes written.
        digest: hex digest of the link's payload: its ops in plan order, each op's elements
            row-major over `sizes`, in the destination dtype. The binding names the kind of digest.
        error: the reason in one line if `status` is not OK; empty otherwise.
        wire_s: seconds from the start of the link's first write to the end of its last, without
            time spent waiting for packing; 0 if links are not written one by one, as in a
            broadcast.
    """

    destination: str
    status: LinkStatus
    nbytes: int
    digest: str
    error: str = ""
    wire_s: float = 0.0


class Written(msgspec.Struct, frozen=True, tag="written"):
    """Result of a write, as a trainer rank reports it.

    Attributes:
        links: outcome of every link that was requested.
        pack_s: seconds of packing and hashing.
        wire_s: seconds inside transport writes.
        register_s: seconds of registering parameters that are new or have moved.
        non_finite: parameters that contain NaN or infinity, as far as the rank has checked.
    """

    links: tuple[LinkOutcome, ...]
    pack_s: float
    wire_s: float
    register_s: float = 0.0
    non_finite: tuple[str, ...] = ()


class Relayed(msgspec.Struct, frozen=True, tag="relayed"):
    """Result of one engine rank's part in a relay.

    An upstream is a rank that writes to this one. Every upstream has ended, except those in
    `unknown_from`.

    Attributes:
        missing: sources without a complete link to this rank.
        unknown_from: upstreams that may still write to this rank.
        unknown_to: engines that bytes of this rank may still reach.
        unreached: engines that did not accept this rank; nothing was written to them.
        nbytes: bytes passed on.
        wire_s: seconds from the first chunk received to the last chunk passed on.
        passed_on: engine -> bytes passed on to it, and the seconds from its first chunk to its
            last.
    """

    missing: tuple[str, ...]
    unknown_from: tuple[str, ...]
    unknown_to: tuple[str, ...]
    unreached: tuple[str, ...]
    nbytes: int
    wire_s: float
    passed_on: dict[str, Carried] = {}


class RelayAddress(msgspec.Struct, frozen=True):
    """Address and secret of an engine rank that listens for a relay. The port is bound before it is published."""

    worker: str
    host: str
    port: int
    token: str
