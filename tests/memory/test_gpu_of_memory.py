"""The GPU of an address is the GPU that torch allocated it on, also if it is not the first."""

from __future__ import annotations

import pytest
import torch

from windlass.memory.cuda.driver import gpu_of, pointer_device
from windlass.memory.place import memory_on

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ordinal", [0, 1])
def test_the_gpu_of_an_address_is_the_one_that_allocated_it(ordinal: int) -> None:
    if torch.cuda.device_count() <= ordinal:
        pytest.skip(f"this host has no GPU {ordinal}")
    held = torch.empty(1 << 22, dtype=torch.uint8, device=f"cuda:{ordinal}")
    address = held.data_ptr()
    assert gpu_of(address) == pointer_device(address) == ordinal
    found = memory_on(ordinal).allocation(address)
    assert found is not None
    assert found[0] <= address < sum(found)
    assert gpu_of(torch.empty(8).data_ptr()) == -1
