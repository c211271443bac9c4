"""The digest of GPU memory is the same for any cut of a payload, and changes when a byte moves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from position_digest import PositionDigest


def digest_of(payload: bytes, row_nbytes: int) -> str:
    digest = PositionDigest()
    for start in range(0, len(payload), row_nbytes):
        digest.add_row(np.frombuffer(payload[start : start + row_nbytes], np.uint8), start)
    return digest.hexdigest()


def test_the_digest_equals_that_of_earlier_releases_and_the_kernels() -> None:
    digest, bytes_of = PositionDigest(), np.random.default_rng(3)
    for nbytes, position in ((64, 0), (12, 64), (7, 100), (10, 120), (4096, 1 << 33)):
        digest.add_row(bytes_of.integers(0, 256, nbytes, np.uint8), position)
    assert digest.hexdigest() == "1b83cc63fb874d745af103a31037acc9"


@given(st.binary(min_size=8, max_size=512).map(lambda b: b[: len(b) // 8 * 8]))
def test_rows_of_whole_units_may_be_cut_anywhere(payload: bytes) -> None:
    assert digest_of(payload, 8) == digest_of(payload, 64) == digest_of(payload, len(payload))


@given(st.binary(min_size=16, max_size=256), st.data())
def test_a_changed_or_moved_unit_changes_the_digest(payload: bytes, data: st.DataObject) -> None:
    payload = payload[: len(payload) // 8 * 8]
    at = data.draw(st.integers(0, len(payload) - 1))
    changed = bytearray(payload)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert digest_of(bytes(changed), 8) != digest_of(payload, 8)
    rotated = payload[8:] + payload[:8]
    if rotated != payload:
        assert digest_of(rotated, 8) != digest_of(payload, 8)
