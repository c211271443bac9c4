"""What of an engine's memory is registered at once."""

from __future__ import annotations

from windlass.engines.attach import allocation_of, stretches


def test_overlapping_spans_share_a_stretch_wherever_they_lie() -> None:
    assert stretches([(100, 50), (120, 10), (140, 20), (160, 5)]) == [(100, 60), (160, 5)]


def test_parameters_of_one_allocation_are_registered_once() -> None:
    blocks = {0: (0, 1000), 2000: (2000, 500), 2500: (2500, 500)}

    def allocation(address: int) -> tuple[int, int]:
        return next(b for b in blocks.values() if b[0] <= address < sum(b))

    spans = [(0, 10), (400, 100), (900, 100), (2000, 100), (2400, 100), (2500, 100)]
    assert stretches(spans, allocation) == [(0, 1000), (2000, 500), (2500, 100)]


def test_a_span_that_reaches_past_its_allocation_is_not_joined_with_the_next() -> None:
    assert stretches([(0, 150), (160, 10)], lambda address: (address // 100 * 100, 100)) == [
        (0, 150),
        (160, 10),
    ]


def test_host_memory_is_joined_where_parameters_touch() -> None:
    assert allocation_of(4096) is None
    assert stretches([(0, 64), (64, 64), (132, 4)], allocation_of) == [(0, 128), (132, 4)]
