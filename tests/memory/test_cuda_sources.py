"""Memory that kernels read: pages around parameters in host memory, and memory of the GPU."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy_gpu import numpy_gpu
from recorded_driver import RecordedDriver

from windlass.memory.copy_sources import SourceMemory, covering_pages
from windlass.memory.cuda import driver
from windlass.memory.cuda.driver import MemoryKind

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


def test_a_parameter_without_local_bytes_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # This function asks a driver.
    kind = "windlass.memory.copy_sources.memory_kind"
    monkeypatch.setattr(kind, lambda _: MemoryKind.PAGEABLE)
    held = np.arange(8, dtype=np.uint8)
    sources = SourceMemory(numpy_gpu().device)
    address = int(held.ctypes.data)
    assert sources.reach([(0, 0)]) == [0]
    assert not sources.has_pinned
    assert sources.reach([(0, 0), (address, 8)]) == [0, address]
    assert sources.has_pinned


class ExpandableLibrary:
    """The driver's library on a host whose GPU memory comes from cuMemCreate, as torch's expandable segments do."""

    def cuPointerGetAttribute(self, found: Any, kind: int, _address: ctypes.c_uint64) -> int:  # noqa: N802
        kinds = driver.driver().CUpointer_attribute
        values = {
            kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: 2,
            kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: 0,
        }
        found.contents.value = values[kinds(kind)]
        return 0


def test_kernels_read_parameters_in_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = RecordedDriver()
    monkeypatch.setattr(driver, "driver", lambda: found)
    monkeypatch.setattr(driver, "library", ExpandableLibrary)
    monkeypatch.setattr(driver, "has_driver", lambda: True)
    sources = SourceMemory(numpy_gpu().device)
    assert sources.reach([(PAGE, 8), (3 * PAGE, 8)]) == [PAGE, 3 * PAGE]
