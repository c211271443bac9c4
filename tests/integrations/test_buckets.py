"""Headers of buckets: readers get the written header, and refuse invalid ones."""

from __future__ import annotations

import msgspec
import pytest
import torch

from windlass.errors import ConfigError, ProtocolError
from windlass.integrations.buckets import (
    MIN_BUCKET_NBYTES,
    BucketEntry,
    BucketFiller,
    BucketReader,
    BucketTable,
    least_capacity,
)
from windlass.layout.dtypes import DType

GOOD = BucketEntry("w", DType.FLOAT32, (4, 4), 0, 64, 64)


def bucket_of(table: bytes) -> torch.Tensor:
    bucket = torch.zeros(MIN_BUCKET_NBYTES, dtype=torch.uint8)
    end = table + len(table).to_bytes(8, "little")
    bucket[-len(end) :] = torch.frombuffer(bytearray(end), dtype=torch.uint8)
    return bucket


def table_of(*entries: BucketEntry) -> bytes:
    return msgspec.msgpack.encode(BucketTable(entries, is_last=True))


def test_an_encoded_bucket_table_is_decoded() -> None:
    assert BucketReader(bucket_of(table_of(GOOD))).table() == BucketTable((GOOD,), is_last=True)


IN_TENSOR = r"tensor 'w': a part must have bytes begin to begin \+ nbytes inside the tensor's"
IN_BUCKET = "tensor 'w': offset must be a multiple of 64, and the part must end inside"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"offset": 1}, f"{IN_BUCKET} the bucket's .* bytes, got offset=1 and nbytes=64"),
        ({"offset": -64}, f"{IN_BUCKET} .* got offset=-64 "),
        ({"offset": MIN_BUCKET_NBYTES - 64}, IN_BUCKET),
        ({"nbytes": 128}, f"{IN_TENSOR} 64 bytes, .* got begin=0 and nbytes=128"),
        ({"nbytes": -64}, IN_TENSOR),
        ({"nbytes": 0}, IN_TENSOR),
        ({"begin": 4}, IN_TENSOR),
        ({"begin": -4}, IN_TENSOR),
        ({"shape": (-4, -4)}, r"tensor 'w': shape must have sizes >= 0, got \(-4, -4\)"),
        ({"shape": (1 << 40, 1 << 40), "nbytes": 1 << 60}, IN_BUCKET),
        (
            {"name": "n" * 2000},
            "tensor 'n{60}'...: name must have at most 1024 characters, got 2000",
        ),
    ],
)
def test_an_invalid_entry_is_refused(changes: dict[str, object], text: str) -> None:
    entry = msgspec.structs.replace(GOOD, **changes)
    with pytest.raises(ProtocolError, match=text):
        BucketReader(bucket_of(table_of(entry))).table()


@pytest.mark.parametrize("nbytes", [0, MIN_BUCKET_NBYTES, 1 << 62])
def test_a_table_of_no_possible_size_is_refused(nbytes: int) -> None:
    bucket = torch.zeros(MIN_BUCKET_NBYTES, dtype=torch.uint8)
    bucket[-8:] = torch.frombuffer(bytearray(nbytes.to_bytes(8, "little")), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="bucket table must have"):
        BucketReader(bucket).table()


def test_bytes_that_are_not_a_table_are_refused() -> None:
    with pytest.raises(ProtocolError, match="bucket table of 5 bytes"):
        BucketReader(bucket_of(b"\xff" * 5)).table()


@pytest.mark.parametrize("begin", [0, 32])
def test_parts_that_do_not_follow_one_another_are_refused(begin: int) -> None:
    first = BucketEntry("w", DType.FLOAT32, (16,), begin, 0, 16)
    other = BucketEntry("v", DType.FLOAT32, (4,), 0, 64, 16)
    reader = BucketReader(bucket_of(table_of(first, other)))
    with pytest.raises(ProtocolError, match=r"the next part must have|must begin at byte 0"):
        list(reader.tensors(reader.table()))


def test_a_too_long_name_is_refused_before_any_tensor_is_placed() -> None:
    with pytest.raises(ConfigError, match="name must have at most 1024 characters, got 1025"):
        list(BucketFiller(MIN_BUCKET_NBYTES).place("n" * 1025, torch.zeros(1)))


def count_buckets(capacity: int, sizes: list[int]) -> tuple[int, BucketFiller]:
    filler, num_buckets = BucketFiller(capacity), 1
    for n, size in enumerate(sizes):
        for entry in filler.place(f"layer.{n}", torch.empty(size, dtype=torch.uint8)):
            if entry is None:
                filler.close_bucket(is_last=False)
                num_buckets += 1
    return num_buckets, filler


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_capacity_needs_no_more_buckets(seed: int) -> None:
    chosen = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 60_000, (40,), generator=chosen).tolist()
    limit = 16 * MIN_BUCKET_NBYTES
    wanted, filler = count_buckets(limit, sizes)
    least = least_capacity(filler.parts, limit)
    assert count_buckets(least, sizes)[0] <= wanted
    assert count_buckets(least - 4096, sizes)[0] > wanted
