"""Operations on memory: the only interface that differs between host memory and GPU memory.

`HostMemory` and `CudaMemory` implement `MemoryOps`. Code that moves weights gets one of them from `memory_at`
(`place.py`) and is the same for both. `tests/memory/test_ops.py` is the conformance suite.
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
"""Deadline in seconds for work on memory of this process. The work usually takes milliseconds."""


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
    """Prepared digests of memory, which can be computed any number of times.

    A key is the peer of a link, or the number of a chunk.

    Attributes:
        links: peer -> tables of the link's pieces on the GPU, with which `ProgressDigests` hashes parts of the
            link during a write. Only a destination on a GPU has these tables. `close` frees them.
    """

    @property
    def links(self) -> Mapping[str, DeviceLink]:
        return {}

    def take(
        self, keys: Iterable[Key], deadline_s: float, threads: Executor | None = None
    ) -> dict[Key, str]:
        """Compute the digests of these links or chunks from the current bytes; return key -> digest (hex).

        Args:
            keys: peers of the links, or numbers of the chunks, in the order of the result.
            deadline_s: longest wait for a GPU, in seconds.
            threads: threads for the hashing in host memory; None for the calling thread. Not used on a GPU.

        Raises:
            TransferFailed: a cast at the source overflows, or the GPU reports an error.
            TransferOutcomeUnknown: the result was not ready within `deadline_s`.
        """
        ...

    def close(self) -> None:
        """Free the prepared data, unless kernels that exceeded a deadline may still use it. Idempotent."""
        return


LinkDigests = Digests[str]
ChunkDigests = Digests[int]


class LinkPack(Protocol):
    """Preparation to pack the payload of a link into fixed memory, any number of times.

    Only the ops of the link that cannot be sent directly are packed.

    Attributes:
        turns: parts of the payload that each turn packs, in the order of the payload. Turn i writes to place i
            modulo the number of places, so a later turn overwrites the parts of an earlier turn.
    """

    @property
    def turns(self) -> Sequence[Sequence[PackedPart]]: ...

    def pack(self, turn: int, deadline_s: float) -> None:
        """Gather, cast or quantise the parts of one turn. Return when all parts are packed.

        Raises:
            TransferFailed: a cast in host memory overflows, or the GPU reports an error.
            TransferOutcomeUnknown: the packing did not end within `deadline_s`.
        """
        ...

    def pack_and_hash(self, deadline_s: float) -> str:
        """Pack all turns. Return the digest of the whole link, including ops that are sent directly.

        Raises:
            TransferFailed: a cast overflows, or the GPU reports an error.
            TransferOutcomeUnknown: the work did not end within `deadline_s`.
        """
        ...

    def close(self) -> None:
        """Free the prepared data, unless late kernels may still use it. Idempotent."""
        return


class MemoryOps(Protocol):
    """Operations on host memory, or on the memory of one GPU. Thread-safe; the objects that it creates are not.

    `addresses` is always (num_parameters,): the start address of each parameter of this rank, in manifest order. The
    caller closes the objects that it gets. The methods that prepare work raise `TransferFailed` if a GPU has too little
    memory for the tables, and `UnsupportedLayout` if rows to quantise on a GPU are not contiguous.

    Attributes:
        ordinal: ordinal of the GPU; -1 for host memory.
        digest_kind: algorithm of the digests; both ends of a link must use the same algorithm.
    """

    ordinal: int
    digest_kind: DigestKind

    @property
    def gpu(self) -> Gpu | None:
        """GPU that queues the work in its stream; None for host memory."""
        return None

    def allocation(self, address: int) -> tuple[int, int] | None:  # noqa: ARG002
        """Return the start address and the size in bytes of the GPU allocation that contains `address`.

        If this object is for host memory, return None for every address.

        Raises:
            RegionError: this object is for a GPU, and `address` is not in the memory of that GPU.
        """
        return None

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate `nbytes` >= 1 bytes, aligned to 64 bytes, not zeroed. The caller closes the buffer.

        Raises:
            TransferFailed: the GPU has too little memory.
            OSError: the host has too little memory.
        """
        ...

    def prepare(
        self, copies: Sequence[StridedCopy], *, beside_transfers: bool = False
    ) -> PreparedCopies:
        """Prepare copies that run repeatedly. No copy may read bytes that another copy writes.

        On a GPU, sources and destinations may also be in pinned host memory.

        Args:
            copies: the copies.
            beside_transfers: whether the copies run while a transfer uses the same GPU, and must
                leave most of the GPU to the transfer.

        Raises:
            ConfigError: no cast exists between the dtypes.
        """
        ...

    def sent_digests(
        self, programs: Mapping[str, LinkProgram], addresses: UInt64Array
    ) -> LinkDigests:
        """Prepare the digests of the links that this rank sends, one per peer.

        A digest covers the payload of the link in plan order and in the destination's dtype.
        Elements are cast while they are hashed; the parameters do not change.
        """
        ...

    def received_digests(
        self, programs: Mapping[str, LinkProgram], addresses: UInt64Array, staging_address: int = 0
    ) -> LinkDigests:
        """Prepare the digests of the links that this rank receives, one per peer.

        A digest equals the digest that the source computes if all bytes have arrived. `staging_address` is the address
        to which peers write the payload of staged ops; 0 if they write each element to its final address.
        """
        ...

    def chunk_digests(
        self, addresses: UInt64Array, nbytes: Int64Array, chunk_start: Int64Array
    ) -> ChunkDigests:
        """Prepare one digest per chunk. A chunk is a sequence of pieces of memory.

        Two chunks have the same digest if their pieces have the same sizes and the same bytes.

        Args:
            addresses: (n,) addresses of the pieces.
            nbytes: (n,) size of each piece in bytes, >= 1.
            chunk_start: (num_chunks + 1,) index of the first piece of each chunk, followed by n.
        """
        ...

    def least_pack_nbytes(self, program: LinkProgram) -> int:
        """Return the smallest size in bytes that a place of `pack_link` may have."""
        ...

    def pack_link(
        self, program: LinkProgram, addresses: UInt64Array, places: Sequence[range]
    ) -> LinkPack:
        """Prepare to pack a link at its source.

        Args:
            program: the link.
            addresses: addresses of the parameters.
            places: address ranges of equal length, see `LinkPack.turns`. Each packed part begins at a multiple
                of `ALIGNMENT`.

        Raises:
            PlanError: a place is smaller than `least_pack_nbytes`.
        """
        ...

    def view(
        self, address: int, sizes: Sequence[int], strides_bytes: Sequence[int], dtype: DType
    ) -> torch.Tensor:
        """Return the memory at `address` as a tensor of `sizes`, without a copy. The caller keeps the memory allocated."""
        ...

    def settle(self, deadline_s: float) -> None:  # noqa: ARG002
        """Wait for all work of this process on this memory, including work of other libraries (an optimiser step).

        Raises:
            TransferFailed: the work failed or did not end within `deadline_s`.
            TransferOutcomeUnknown: kernels exceeded the deadline of an earlier call and may still run.
        """
        return

    def finish(self, deadline_s: float) -> None:  # noqa: ARG002
        """Wait for all work that was queued through this object.

        Raises:
            TransferFailed: the work failed.
            TransferOutcomeUnknown: the work did not end within `deadline_s` and may still run.
        """
        return
