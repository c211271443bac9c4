"""Pages around parameters in host memory: whole, each once, nothing left out."""

from __future__ import annotations

import itertools
import mmap

from hypothesis import given
from hypothesis import strategies as st

from windlass.transports.cuda.sources import covering_pages

PAGE = mmap.PAGESIZE


@given(st.lists(st.tuples(st.integers(0, 40 * PAGE), st.integers(1, 3 * PAGE)), max_size=20))
def test_every_byte_is_covered_by_pages_that_do_not_touch(memory: list[tuple[int, int]]) -> None:
    ranges = list(covering_pages(memory))
    assert all(start % PAGE == 0 and stop % PAGE == 0 for start, stop in ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
    for address, nbytes in memory:
        assert any(start <= address and address + nbytes <= stop for start, stop in ranges)
    wanted = {page for a, n in memory for page in range(a // PAGE, (a + n - 1) // PAGE + 1)}
    assert sum(stop - start for start, stop in ranges) == len(wanted) * PAGE
