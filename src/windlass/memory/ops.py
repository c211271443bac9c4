"""Operations on memory: the only interface that differs between host memory and GPU memory.

`HostMemory` and `CudaMemory` implement `MemoryOps`. Code that moves weights gets one of them from
`memory_at` (`place.py`) and is the same for both. `tests/memory/test_ops.py` is the conformance
suite.
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
"""Deadline in seconds of work on memory of this process, which takes milliseconds."""


class Buffer(Protocol):
    """Memory with a single user, from `MemoryOps.allocate` to `close`."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Free the memory. Idempotent."""
        ...


class Digests(Protocol[Key]):
    """Digests of memory, taken any number of times: of links by peer, or of chunks by number.

    Attributes:
        links: tables of a link's pieces by peer, for hashing part by part. Only at the destination
            on a GPU, otherwise empty. `close` frees them.
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
            TransferFailed: a cast at the source overflows.
            TransferOutcomeUnknown: the result was not ready within `deadline_s`.
        """
        ...

    def close(self) -> None:
        """Free the prepared data, unless late kernels may still use it. Idempotent."""
        return


LinkDigests = Digests[str]
ChunkDigests = Digests[int]


class LinkPack(Protocol):
    """The payload of a link's ops that must be packed, packed into fixed memory any number of times.

    Attributes:
        turns: parts that are packed together, in the order of the payload. Later turns overwrite
            earlier ones.
    """

    @property
    def turns(self) -> Sequence[Sequence[PackedPart]]: ...

    def pack(self, turn: int, deadline_s: float) -> None:
        """Gather, cast or quantise one turn, and wait for it.

        Raises:
            TransferFailed: a cast in host memory overflows.
            TransferOutcomeUnknown: the turn did not end within `deadline_s`.
        """
        ...

    def pack_and_hash(self, deadline_s: float) -> str:
        """Pack all turns and return the digest of the link, including ops that are not packed.

        Raises:
            TransferFailed: a cast overflows.
            TransferOutcomeUnknown: the work did not end within `deadline_s`.
        """
        ...

    def close(self) -> None:
        """Free the prepared data, unless late kernels may still use it. Idempotent."""
        return


class MemoryOps(Protocol):
    """Host memory, or the memory of one GPU. Thread-safe; the objects that it creates are not.

    `addresses` is always (num_parameters,): the start of each parameter of this rank, in manifest
    order. The caller closes the objects that it prepared. Preparing raises `TransferFailed` if a
    GPU has too little memory for the tables, and `UnsupportedLayout` if quantised rows on a GPU
    have gaps.

    Attributes:
        ordinal: ordinal of the GPU; -1 for host memory.
        digest_kind: kind of its digests.
    """

    ordinal: int
    digest_kind: DigestKind

    @property
    def gpu(self) -> Gpu | None:
        """GPU that queues the work in its stream; None for host memory."""
        return None

    def allocation(self, address: int) -> tuple[int, int] | None:  # noqa: ARG002
        """Return start and bytes of the allocation that contains an address; None if it is unknown.

        Raises:
            RegionError: the address is not in the memory of this GPU.
        """
        return None

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate `nbytes` >= 1 bytes, aligned to 64 bytes, not zeroed. The caller closes the buffer.

        Raises:
            TransferFailed: there is too little memory.
        """
        ...

    def prepare(
        self, copies: Sequence[StridedCopy], *, beside_transfers: bool = False
    ) -> PreparedCopies:
        """Prepare copies that run repeatedly. No copy reads what another one stores.

        Source or destination may be pinned host memory.

        Args:
            copies: the copies.
            beside_transfers: whether they run while bytes of the same memory are on the wire, and
                must leave most of a GPU to the transfer.

        Raises:
            ConfigError: no cast exists between the dtypes.
        """
        ...

    def sent_digests(
        self, programs: Mapping[str, LinkProgram], addresses: UInt64Array
    ) -> LinkDigests:
        """Prepare digests of the payloads of links, by peer: in plan order, in the destination's dtype.

        Elements are cast as they are read; nothing is stored.
        """
        ...

    def received_digests(
        self, programs: Mapping[str, LinkProgram], addresses: UInt64Array, staging_address: int = 0
    ) -> LinkDigests:
        """Prepare digests of received links. They equal the sent digests if everything has arrived.

        `staging_address` is where peers write the payload of staged ops; 0 if they write each
        element to its final place.
        """
        ...

    def chunk_digests(
        self, addresses: UInt64Array, nbytes: Int64Array, chunk_start: Int64Array
    ) -> ChunkDigests:
        """Prepare digests of chunks of pieces. Equal piece sizes and bytes give equal digests.

        Args:
            addresses: (n,) addresses of the pieces.
            nbytes: (n,) bytes of each piece, >= 1.
            chunk_start: (num_chunks + 1,) first piece of each chunk, and n.
        """
        ...

    def least_pack_nbytes(self, program: LinkProgram) -> int:
        """Return the least bytes of memory for one turn of `pack_link`."""
        ...

    def pack_link(
        self, program: LinkProgram, addresses: UInt64Array, places: Sequence[range]
    ) -> LinkPack:
        """Prepare to pack a link at its source.

        `places` are the address ranges for turns, used in rotation, all of one length. Every op
        begins at a multiple of `ALIGNMENT`.

        Raises:
            PlanError: a place has less than the needed `least_pack_nbytes`.
        """
        ...

    def view(
        self, address: int, sizes: Sequence[int], strides_bytes: Sequence[int], dtype: DType
    ) -> torch.Tensor:
        """Return this memory as a tensor of `sizes`. The caller keeps the memory alive and in place."""
        ...

    def settle(self, deadline_s: float) -> None:  # noqa: ARG002
        """Wait for work of this process on this memory through any library, such as an optimiser step.

        Raises:
            TransferFailed: the work failed or did not end within `deadline_s`.
            TransferOutcomeUnknown: kernels exceeded an earlier deadline.
        """
        return

    def finish(self, deadline_s: float) -> None:  # noqa: ARG002
        """Wait for all work that was queued through this object.

        Raises:
            TransferFailed: the work failed.
            TransferOutcomeUnknown: the work did not end within `deadline_s` and may continue
                without limit.
        """
        return
