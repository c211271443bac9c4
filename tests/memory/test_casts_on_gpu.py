"""The casts of tests/memory/test_casts.py on real kernels."""

from __future__ import annotations

import pytest
import torch
from cast_conformance import KernelCasts

from windlass.memory.cuda.gpu import Gpu, shared_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestGpu(KernelCasts):
    def gpu(self) -> Gpu:
        torch.zeros(1, device="cuda")
        return shared_gpu(0)
