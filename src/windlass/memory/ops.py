"""What memory can do: the one seam between host memory and the memory of GPUs.

`HostMemory` and `CudaMemory` implement `MemoryOps`; whoever moves weights asks `memory_at` (`place.py`) where they lie
and is the same code for both. `tests/memory/test_ops.py` is the conformance suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Protocol, TypeVar

from windlass.layout.columns import Int64Array, UInt64Array
from windlass.layout.dtypes import DType
from windlass.memory.packing import PackedPart, PreparedCopies, StridedCopy
from windlass.planning.program import DigestKind, LinkProgram

if TYPE_CHECKING:
    import torch

    from windlass.memory.cuda.gpu import Gpu
    from windlass.memory.cuda.links import DeviceLink

Key = TypeVar("Key")

OWN_WORK_S = 60.0
"""Deadline of work on memory of one's own, which takes milliseconds."""


class Buffer(Protocol):
    """Memory that nobody else uses, from `MemoryOps.allocate` to `close`."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Free it. Idempotent."""
        ...


class Digests(Protocol[Key]):
    """Digests of what lies in memory, to be taken any number of times: of links by peer, of chunks by number.

    Attributes:
        links: at the destination, on a GPU: by peer, the tables of its pieces, for whoever hashes them
            part by part; they go with `close`. Empty otherwise.
    """

    @property
    def links(self) -> Mapping[str, DeviceLink]:
        return {}

    def take(
        self, keys: Iterable[Key], deadline_s: float, threads: Executor | None = None
    ) -> dict[Key, str]:
        """Read these links or chunks as they are now, and wait for the result.

        Returns:
            key -> digest, hex, in the order of `keys`.

        Raises:
            TransferFailed: at the source: a cast overflows.
            TransferOutcomeUnknown: not within `deadline_s`.
        """
        ...

    def close(self) -> None:
        """Free what was prepared, unless late kernels may still use it. Idempotent."""
        return


LinkDigests = Digests[str]
ChunkDigests = Digests[int]


class LinkPack(Protocol):
    """The payload of a link's ops that do not go as they lie, packed into fixed memory any number of times.

    Attributes:
        turns: what is packed at once, in the order of the payload; later turns go over earlier ones.
    """

    @property
    def turns(self) -> Sequence[Sequence[PackedPart]]: ...

    def pack(self, turn: int, deadline_s: float) -> None:
        """Gather, cast or quantise one turn, and wait for it.

        Raises:
            TransferFailed: in host memory, a cast overflows.
            TransferOutcomeUnknown: not within `deadline_s`.
        """
        ...

    def pack_and_hash(self, deadline_s: float) -> str:
        """Pack all turns; the digest of the link, of ops that go as they lie too.

        Raises:
            TransferFailed: a cast overflows.
            TransferOutcomeUnknown: not within `deadline_s`.
        """
        ...

    def close(self) -> None:
        """Free what was prepared, unless late kernels may still use it. Idempotent."""
        return


class MemoryOps(Protocol):
    """Host memory, or the memory of one GPU. Thread-safe; what it makes is not.

    Everywhere `addresses` is (num_parameters,) where this rank's parameters begin, in manifest order. What
    is prepared is closed by the caller; to prepare raises `TransferFailed` where a GPU has no room for its
    tables, and `UnsupportedLayout` where quantised rows on a GPU have gaps.

    Attributes:
        ordinal: of the GPU; -1 for host memory.
        digest_kind: of the digests it takes.
    """

    ordinal: int
    digest_kind: DigestKind

    @property
    def gpu(self) -> Gpu | None:
        """In whose stream its work is queued; None for host memory."""
        return None

    def allocation(self, address: int) -> tuple[int, int] | None:  # noqa: ARG002
        """Return start and bytes of what is mapped and freed as one around an address; None where nobody knows.

        Raises:
            RegionError: it is not in the memory of this GPU.
        """
        return None

    def allocate(self, nbytes: int) -> Buffer:
        """Memory of `nbytes` >= 1, aligned to 64 bytes, not cleared; the caller closes it.

        Raises:
            TransferFailed: there is not so much.
        """
        ...

    def prepare(
        self, copies: Sequence[StridedCopy], *, beside_transfers: bool = False
    ) -> PreparedCopies:
        """Copies that are run again and again; none reads what another one stores. Either side may be pinned host memory.

        `beside_transfers`: they run while bytes of the same memory are on the wire, and are to leave most of a GPU
        to that.

        Raises:
            ConfigError: nothing casts between the dtypes.
        """
        ...

    def sent_digests(
        self, programs: Mapping[str, LinkProgram], addresses: UInt64Array
    ) -> LinkDigests:
        """Prepare digests of what links, by peer, are to deliver: in plan order, in the destination's dtype.

        Elements are cast as they are read; nothing is stored.
        """
        ...

    def received_digests(
        self, programs: Mapping[str, LinkProgram], addresses: UInt64Array, staging_address: int = 0
    ) -> LinkDigests:
        """Prepare digests of what links have delivered: those of `sent_digests` where all of it arrived.

        `staging_address`: where peers write the payload of ops that are staged; 0: where each element belongs.
        """
        ...

    def chunk_digests(
        self, addresses: UInt64Array, nbytes: Int64Array, chunk_start: Int64Array
    ) -> ChunkDigests:
        """Prepare digests of chunks that lie in pieces; equal wherever pieces of the same sizes hold the same bytes.

        Args:
            addresses: (n,) of the pieces.
            nbytes: (n,) of each, >= 1.
            chunk_start: (num_chunks + 1,) first piece of each chunk, and n.
        """
        ...

    def least_pack_nbytes(self, program: LinkProgram) -> int:
        """Return what the memory of one turn of `pack_link` must hold at least."""
        ...

    def pack_link(
        self, program: LinkProgram, addresses: UInt64Array, places: Sequence[range]
    ) -> LinkPack:
        """Prepare to pack a link at its source.

        `places`: addresses that turns are packed at, in rotation, all of one length; every op begins at a multiple
        of `ALIGNMENT`.

        Raises:
            PlanError: less than `least_pack_nbytes`, where it is needed.
        """
        ...

    def view(
        self, address: int, sizes: Sequence[int], strides_bytes: Sequence[int], dtype: DType
    ) -> torch.Tensor:
        """This memory as a tensor of `sizes`; the caller keeps it alive and in place."""
        ...

    def settle(self, deadline_s: float) -> None:  # noqa: ARG002
        """Wait for what this process has queued there by whatever library, such as an optimiser step.

        Raises:
            TransferFailed: it is not over within `deadline_s`, or it failed.
            TransferOutcomeUnknown: kernels outlived an earlier deadline.
        """
        return

    def finish(self, deadline_s: float) -> None:  # noqa: ARG002
        """Wait for what was queued through this object.

        Raises:
            TransferFailed: it failed.
            TransferOutcomeUnknown: it is not over within `deadline_s`, and may go on for ever.
        """
        return
