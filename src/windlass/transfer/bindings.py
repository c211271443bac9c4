"""Messages between ranks and controller: addresses to write to, offers of groups, and outcomes of links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from windlass.errors import PlanError
from windlass.layout.dtypes import DType
from windlass.planning.program import DigestKind
from windlass.transports.peers import PeerEndpoint, RemoteRegion


class BindingsRefused(PlanError):
    """Raised by a sender that cannot write to some of its destinations.

    Attributes:
        reasons: destination -> reason in one line. Destinations that are not listed have no fault.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = dict(reasons)


class DestinationBinding(msgspec.Struct, frozen=True):
    """Addresses of one destination rank that sources write to.

    Attributes:
        worker: the destination.
        endpoint: transport endpoint of the destination.
        regions: registered regions of the destination. Every write must be inside them.
        parameter_addresses: one address per parameter of the destination's manifest: of the live parameter (`in_place`)
            or of its shadow copy (`staged`).
        staging_address: address of the staging memory. Sources write the payload of an op there if a contiguous write
            cannot store the elements at their final places. 0 without such ops.
        listener: address of the rank's `ProgressListener`; empty without one.
        digest_kind: algorithm of the rank's digests.
    """

    worker: str
    endpoint: PeerEndpoint
    regions: tuple[RemoteRegion, ...]
    parameter_addresses: tuple[int, ...]
    staging_address: int = 0
    listener: str = ""
    digest_kind: DigestKind = DigestKind.XXH3


class BucketPart(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of a source parameter, and their place in the buffer of a broadcast (a bucket).

    Attributes:
        name, dtype, nbytes: name, dtype and size in bytes of the whole parameter, as in the source's manifest.
        parameter: index of the parameter in the source's manifest.
        start, stop: range [start, stop) of the bytes in the parameter.
        bucket: index of the bucket.
        offset: byte offset in the bucket.
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
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class GroupOffer(msgspec.Struct, frozen=True):
    """Offer of a trainer rank to form a broadcast group with its destinations.

    Attributes:
        name: unique name of the group.
        members: workers of the group; the source is the first and has rank 0.
        host, port: address of the rendezvous store, at which the source listens already.
        parts: all bytes that the source broadcasts, in order.
        bucket_nbytes: size in bytes of each broadcast.
    """

    name: str
    members: tuple[str, ...]
    host: str
    port: int
    parts: tuple[BucketPart, ...]
    bucket_nbytes: tuple[int, ...]

    @property
    def source(self) -> str:
        """Worker that broadcasts to the group."""
        return self.members[0]


class LinkStatus(StrEnum):
    """Result of the writes of a link.

    Attributes:
        OK: all bytes have arrived.
        FAILED: some bytes have not arrived, and no more bytes will arrive.
        UNREACHABLE: the source could not connect to the destination, or the destination's process has ended.
        UNKNOWN: some bytes may still arrive.
    """

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
        """Rate in 10^9 bytes per second; 0 if no seconds were measured."""
        return self.nbytes / self.wire_s / 1e9 if self.wire_s else 0.0


class LinkOutcome(msgspec.Struct, frozen=True):
    """Result of the writes of one link, as its source reports it.

    Attributes:
        destination: destination worker.
        status: result of the writes.
        nbytes: number of bytes written.
        digest: hex digest of the link's payload: the ops in plan order, the elements of each op row-major over `sizes`,
            in the destination's dtype. `DestinationBinding.digest_kind` is the algorithm. Empty unless OK.
        error: reason in one line; empty if `status` is OK.
        wire_s: seconds inside transport writes of this link, without waits for packing; 0 if links are not written one
            by one, as in a broadcast.
    """

    destination: str
    status: LinkStatus
    nbytes: int
    digest: str
    error: str = ""
    wire_s: float = 0.0


class Written(msgspec.Struct, frozen=True, tag="written"):
    """Answer of a source to a command that writes links.

    Attributes:
        links: outcomes of the links in the command.
        pack_s: seconds of packing and hashing since the previous answer.
        wire_s: seconds during which transport writes ran.
        register_s: seconds of registering new and moved parameters since the previous answer.
        non_finite: names of checked parameters that contain NaN or infinity.
        memory_nbytes: bytes of the source's memory that are in use after the writes; 0 if not measured.
    """

    links: tuple[LinkOutcome, ...]
    pack_s: float
    wire_s: float
    register_s: float = 0.0
    non_finite: tuple[str, ...] = ()
    memory_nbytes: int = 0


class Relayed(msgspec.Struct, frozen=True, tag="relayed"):
    """Answer of an engine rank that took part in a relay.

    An upstream is a rank that writes to this rank. After this answer, only the upstreams in `unknown_from` may still
    write to this rank.

    Attributes:
        missing: sources whose links to this rank are not complete.
        unknown_from: upstreams that may still write to this rank.
        unknown_to: engine ranks that bytes from this rank may still reach.
        unreached: engine ranks that did not accept a connection from this rank. It has written nothing to them.
        nbytes: number of bytes that this rank passed on.
        wire_s: seconds from the first received chunk to the last chunk that was passed on.
        passed_on: engine rank -> bytes passed on to it, and seconds from the first to the last of these chunks.
    """

    missing: tuple[str, ...]
    unknown_from: tuple[str, ...]
    unknown_to: tuple[str, ...]
    unreached: tuple[str, ...]
    nbytes: int
    wire_s: float
    passed_on: dict[str, Carried] = {}


class RelayAddress(msgspec.Struct, frozen=True):
    """Address at which an engine rank listens for upstreams of a relay, and the secret that an upstream must send."""

    worker: str
    host: str
    port: int
    token: str
