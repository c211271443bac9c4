"""Whole tensors in a bucket: bytes at the front, the table of what they are at the back.

A bucket is one run of bytes of fixed size, in host memory or on a GPU. Its last 8 bytes say how long the
table is that lies before them; tensors begin at multiples of 64 from the front. A tensor that is
larger than a bucket comes in parts, in successive buckets.
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
"""Of a table without its entries, at most."""


class BucketEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, or a part of one, in a bucket.

    Attributes:
        name: of the tensor. dtype: of its elements. shape: of the whole tensor.
        begin: first byte of the tensor that lies here.
        offset: in the bucket, a multiple of 64. nbytes: of the part.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    offset: int
    nbytes: int

    @property
    def tensor_nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class BucketTable(msgspec.Struct, frozen=True):
    """What lies in a bucket. `is_last`: no other bucket of this stream follows."""

    entries: tuple[BucketEntry, ...]
    is_last: bool


_TABLES: Codec[BucketTable] = Codec(BucketTable, "bucket table")


@final
class BucketFiller:
    """Fills buckets of one size, one after the other. Not thread-safe.

    Args:
        capacity_nbytes: of a bucket, table included; at least `MIN_BUCKET_NBYTES`.

    Attributes:
        parts: (nbytes, bytes of its entry in the table) of every part of the stream that was placed.

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
        """Find room for a tensor, part by part.

        Yields:
            The place of the next part in this bucket; None when this bucket is full and the caller must
            take what `close_bucket` returns before it goes on.

        Raises:
            ConfigError: the name is too long.
            UnsupportedLayout: a dtype that checkpoints do not have.
        """
        from windlass.memory.torch_dtypes import dtype_of

        if len(name) > MAX_NAME_LENGTH:
            raise ConfigError(
                f"tensor {name[:60]!r}...: name must be of at most {MAX_NAME_LENGTH} characters, got {len(name)}"
            )
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
        """Return the end of this bucket, table and trailer, and begin the next one."""
        table = encode(BucketTable(tuple(self._entries), is_last))
        self._entries, self._used, self._table_nbytes = [], 0, TABLE_FRAME_NBYTES
        return table + len(table).to_bytes(TRAILER_NBYTES, "little")

    def _room(self, entry_nbytes: int) -> int:
        return self._capacity - TRAILER_NBYTES - self._table_nbytes - entry_nbytes - self._used

    def _take(self, entry: BucketEntry, entry_nbytes: int) -> None:
        self._entries.append(entry)
        self._used = aligned(entry.offset + entry.nbytes)
        self._table_nbytes += entry_nbytes
        self.parts.append((entry.nbytes, entry_nbytes))


@final
class BucketReader:
    """Turns buckets back into tensors. Not thread-safe.

    Args:
        bucket: (nbytes,) uint8: the memory that every bucket of the stream lies in, in its turn.
    """

    def __init__(self, bucket: torch.Tensor) -> None:
        self._bucket = bucket
        self._joined: torch.Tensor | None = None
        self._next: tuple[str, DType, tuple[int, ...], int] | None = None

    def table(self) -> BucketTable:
        """Read the table of the bucket that lies there now.

        Raises:
            ProtocolError: it is none, or says what cannot be.
        """
        end = self._bucket.numel() - TRAILER_NBYTES
        nbytes = int.from_bytes(self._host_bytes(end, TRAILER_NBYTES), "little")
        if not 0 < nbytes <= end:
            raise ProtocolError(f"bucket table must be of 1 to {end} bytes, got {nbytes}")
        table = _TABLES.decode(self._host_bytes(end - nbytes, nbytes))
        for entry in table.entries:
            _check(entry, end - nbytes)
        return table

    def tensors(self, table: BucketTable) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every tensor that ends in this bucket.

        Memory: one that lies in one bucket is a view of it, valid until the bucket is filled again; one
        that came in parts has memory of its own.

        Raises:
            ProtocolError: parts of a tensor that do not follow one another.
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
        given = entry.name, entry.dtype, entry.shape, entry.begin
        if self._next is not None and given != self._next:
            raise ProtocolError(f"bucket: part {self._next} must come next, got {given}")
        if self._next is None and entry.begin:
            raise ProtocolError(f"bucket: tensor {entry.name!r} must begin at 0, got {entry.begin}")

    def _host_bytes(self, begin: int, nbytes: int) -> bytes:
        return self._bucket[begin : begin + nbytes].cpu().numpy().tobytes()


def _check(entry: BucketEntry, limit: int) -> None:
    whole = entry.tensor_nbytes
    if (
        len(entry.name) > MAX_NAME_LENGTH
        or min(entry.shape, default=0) < 0
        or entry.begin < 0
        or entry.nbytes < 0
        or (entry.nbytes == 0 and whole > 0)
        or entry.begin + entry.nbytes > whole
        or entry.offset < 0
        or entry.offset % ALIGNMENT
        or entry.offset + entry.nbytes > limit
    ):
        raise ProtocolError(
            f"bucket: tensor {entry.name[:60]!r}: bytes [{entry.begin}, +{entry.nbytes}) of {whole} at "
            f"{entry.offset} must lie in the tensor and in the bucket's {limit} bytes"
        )


def least_capacity(parts: Sequence[tuple[int, int]], limit_nbytes: int) -> int:
    """Return the smallest bucket in which these parts need no more buckets than in one of `limit_nbytes`.

    Args:
        parts: see `BucketFiller.parts`.
        limit_nbytes: that they were placed with.
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
