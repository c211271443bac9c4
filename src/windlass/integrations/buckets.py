"""Layout of whole tensors in a bucket: the tensors' bytes at the front, a table of the tensors at the back.

A bucket is a contiguous run of bytes of fixed size, in host memory or on a GPU. The table ends 8 bytes before the end of
the bucket, and the last 8 bytes contain the length of the table. Each tensor begins at a multiple of 64 bytes from the
front. A tensor that is larger than a bucket is cut into parts in successive buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, final

import msgspec

from windlass.errors import ConfigError, ProtocolError
from windlass.layout.dtypes import DType
from windlass.memory.packing import ALIGNMENT, aligned
from windlass.net.messages import Codec, encode

if TYPE_CHECKING:
    import torch

__all__ = [
    "MIN_BUCKET_NBYTES",
    "BucketEntry",
    "BucketFiller",
    "BucketReader",
    "BucketTable",
    "least_capacity",
]

MIN_BUCKET_NBYTES = 64 << 10
MAX_NAME_LENGTH = 1024
TRAILER_NBYTES = 8
TABLE_FRAME_NBYTES = 32
"""Largest size in bytes of a table without its entries."""


class BucketEntry(msgspec.Struct, frozen=True, array_like=True):
    """Place of a tensor, or of a part of a tensor, in a bucket.

    Attributes:
        name: name of the tensor.
        dtype: dtype of the tensor's elements.
        shape: shape of the whole tensor.
        begin: offset of the part in the tensor, in bytes.
        offset: offset of the part in the bucket, in bytes; a multiple of 64.
        nbytes: size of the part in bytes.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    offset: int
    nbytes: int

    @property
    def tensor_nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class BucketTable(msgspec.Struct, frozen=True):
    """Table of a bucket's contents.

    Attributes:
        entries: places of the tensors and parts.
        is_last: whether this bucket is the last one of its stream.
    """

    entries: tuple[BucketEntry, ...]
    is_last: bool


_TABLES: Codec[BucketTable] = Codec(BucketTable, "bucket table")


@final
class BucketFiller:
    """Allocator of places in buckets of one size, one bucket after the other. Not thread-safe.

    Args:
        capacity_nbytes: size of a bucket in bytes, including the table; at least `MIN_BUCKET_NBYTES`.

    Attributes:
        parts: (size of the part, size of its table entry) in bytes, for every part of the stream in order.

    Raises:
        ConfigError: `capacity_nbytes` is too small.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        if capacity_nbytes < MIN_BUCKET_NBYTES:
            raise ConfigError(
                f"bucket_nbytes must be >= {MIN_BUCKET_NBYTES}, got {capacity_nbytes}"
            )
        self._capacity = capacity_nbytes
        self._entries: list[BucketEntry] = []
        self._used = 0
        self._table_nbytes = TABLE_FRAME_NBYTES
        self.parts: list[tuple[int, int]] = []

    def place(self, name: str, tensor: torch.Tensor) -> Iterator[BucketEntry | None]:
        """Find places for a tensor, part by part.

        Yields:
            The place of the next part in this bucket; None when this bucket is full. After None, the caller must call
            `close_bucket` before it requests the next place.

        Raises:
            ConfigError: the name is too long.
            UnsupportedLayout: the tensor has a dtype that checkpoints do not have.
        """
        from windlass.memory.torch_dtypes import dtype_of

        _check_name_length(name, ConfigError)
        dtype, shape, begin = dtype_of(name, tensor), tuple(tensor.shape), 0
        while True:
            left = tensor.nbytes - begin
            entry = BucketEntry(name, dtype, shape, begin, self._used, left)
            entry_nbytes = len(encode(entry))
            room = self._room(entry_nbytes)
            if left <= room:
                self._take(entry, entry_nbytes)
                yield entry
                return
            if self._entries:
                yield None
                continue
            part = BucketEntry(name, dtype, shape, begin, 0, room // ALIGNMENT * ALIGNMENT)
            self._take(part, entry_nbytes)
            begin += part.nbytes
            yield part

    def close_bucket(self, *, is_last: bool) -> bytes:
        """Return the last bytes of this bucket (the table and the table's length), and begin the next bucket."""
        table = encode(BucketTable(tuple(self._entries), is_last))
        self._entries, self._used, self._table_nbytes = [], 0, TABLE_FRAME_NBYTES
        return table + len(table).to_bytes(TRAILER_NBYTES, "little")

    def _room(self, entry_nbytes: int) -> int:
        """Return the bytes that are free in this bucket for a part whose table entry has `entry_nbytes` bytes."""
        return self._capacity - TRAILER_NBYTES - self._table_nbytes - entry_nbytes - self._used

    def _take(self, entry: BucketEntry, entry_nbytes: int) -> None:
        """Add an entry to this bucket's table, and mark its bytes in the bucket as used."""
        self._entries.append(entry)
        self._used = aligned(entry.offset + entry.nbytes)
        self._table_nbytes += entry_nbytes
        self.parts.append((entry.nbytes, entry_nbytes))


@final
class BucketReader:
    """Reader that turns buckets back into tensors. Not thread-safe.

    Args:
        bucket: (nbytes,) uint8: memory that contains every bucket of the stream, one after the other.
    """

    def __init__(self, bucket: torch.Tensor) -> None:
        self._bucket = bucket
        self._joined: torch.Tensor | None = None
        self._next: tuple[str, DType, tuple[int, ...], int] | None = None

    def table(self) -> BucketTable:
        """Return the table of the current bucket.

        Raises:
            ProtocolError: the bytes are not a table, or an entry is out of bounds.
        """
        end = self._bucket.numel() - TRAILER_NBYTES
        nbytes = int.from_bytes(self._host_bytes(end, TRAILER_NBYTES), "little")
        if not 0 < nbytes <= end:
            raise ProtocolError(f"bucket table must have 1 to {end} bytes, got {nbytes}")
        table = _TABLES.decode(self._host_bytes(end - nbytes, nbytes))
        for entry in table.entries:
            _check(entry, end - nbytes)
        return table

    def tensors(self, table: BucketTable) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every tensor that ends in this bucket.

        Memory: if this bucket has all bytes of a tensor, the tensor is a view of the bucket, valid until the bucket is
        filled again. If a tensor spans several buckets, its parts are joined in new memory.

        Raises:
            ProtocolError: a part of a tensor is missing, or parts are in the wrong order.
        """
        import torch

        from windlass.memory.torch_dtypes import torch_dtype

        for entry in table.entries:
            part = self._bucket[entry.offset : entry.offset + entry.nbytes]
            self._check_follows(entry)
            whole = entry.tensor_nbytes
            if entry.nbytes < whole:
                if self._joined is None:
                    self._joined = torch.empty(whole, dtype=torch.uint8, device=self._bucket.device)
                self._joined[entry.begin : entry.begin + entry.nbytes] = part
                if entry.begin + entry.nbytes < whole:
                    self._next = entry.name, entry.dtype, entry.shape, entry.begin + entry.nbytes
                    continue
                part, self._joined, self._next = self._joined, None, None
            yield entry.name, part.view(torch_dtype(entry.dtype)).view(entry.shape)

    def _check_follows(self, entry: BucketEntry) -> None:
        """Raise ProtocolError unless an entry continues the unfinished tensor or, if there is none, begins a tensor."""
        given = entry.name, entry.dtype, entry.shape, entry.begin
        if self._next is not None and given != self._next:
            raise ProtocolError(
                "bucket: the next part must have (name, dtype, shape, first byte) = "
                f"{self._next}, got {given}"
            )
        if self._next is None and entry.begin:
            raise ProtocolError(
                f"bucket: the first part of tensor {entry.name!r} must begin at byte 0, got byte {entry.begin}"
            )

    def _host_bytes(self, begin: int, nbytes: int) -> bytes:
        """Return bytes of the bucket, copied to the host."""
        return self._bucket[begin : begin + nbytes].cpu().numpy().tobytes()


def _check(entry: BucketEntry, limit: int) -> None:
    """Raise ProtocolError unless an entry's bytes are inside its tensor and inside the first `limit` bytes of the bucket."""
    _check_name_length(entry.name, ProtocolError)
    what = f"bucket: tensor {entry.name[:60]!r}"
    if min(entry.shape, default=0) < 0:
        raise ProtocolError(f"{what}: shape must have sizes >= 0, got {entry.shape}")
    whole, begin, nbytes = entry.tensor_nbytes, entry.begin, entry.nbytes
    if min(begin, nbytes) < 0 or begin + nbytes > whole or (nbytes == 0 and whole > 0):
        raise ProtocolError(
            f"{what}: a part must have bytes begin to begin + nbytes inside the tensor's {whole} bytes, and must not be "
            f"empty unless the tensor is, got begin={begin} and nbytes={nbytes}"
        )
    if entry.offset < 0 or entry.offset % ALIGNMENT or entry.offset + nbytes > limit:
        raise ProtocolError(
            f"{what}: offset must be a multiple of {ALIGNMENT}, and the part must end inside the bucket's {limit} bytes, "
            f"got offset={entry.offset} and nbytes={nbytes}"
        )


def _check_name_length(name: str, kind: type[ConfigError | ProtocolError]) -> None:
    """Raise an error of this class if a tensor's name is too long."""
    if len(name) > MAX_NAME_LENGTH:
        raise kind(
            f"tensor {name[:60]!r}...: name must have at most {MAX_NAME_LENGTH} characters, got {len(name)}"
        )


def least_capacity(parts: Sequence[tuple[int, int]], limit_nbytes: int) -> int:
    """Return the smallest bucket size in bytes with which the parts need no more buckets than with `limit_nbytes`.

    Args:
        parts: see `BucketFiller.parts`.
        limit_nbytes: current bucket size in bytes. The result is at most this size.
    """
    fixed = TRAILER_NBYTES + TABLE_FRAME_NBYTES

    def count(capacity: int) -> int:
        num_buckets, used = 1, fixed
        for nbytes, entry_nbytes in parts:
            needed = aligned(nbytes) + entry_nbytes
            if used + needed > capacity:
                num_buckets, used = num_buckets + 1, fixed
            used += needed
        return num_buckets

    largest = max((aligned(nbytes) + entry for nbytes, entry in parts), default=0)
    low, high = max(MIN_BUCKET_NBYTES, largest + fixed), limit_nbytes
    allowed = count(high)
    while low < high:
        middle = (low + high) // 2
        if count(middle) <= allowed:
            high = middle
        else:
            low = middle + 1
    return high
