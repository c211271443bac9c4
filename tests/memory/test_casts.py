"""Casts in host memory and by kernels in numpy. For a GPU see tests/memory/test_casts_on_gpu.py."""

from __future__ import annotations

import functools
import itertools
import re
from importlib import resources

import pytest
import torch
from cast_conformance import QUANTISED_FROM, HostCasts, KernelCasts
from numpy_gpu import numpy_gpu

from windlass.errors import ConfigError, TransferFailed, UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.dtypes import CASTS, DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.kernels import put_kernel
from windlass.memory.packing import copy_cast
from windlass.memory.torch_dtypes import torch_dtype
from windlass.planning.planner import plan_transfer


class TestHost(HostCasts):
    pass


class TestNumpyKernels(KernelCasts):
    @functools.cached_property
    def _gpu(self) -> Gpu:
        return numpy_gpu()

    def gpu(self) -> Gpu:
        return self._gpu


def kernels_of_the_source() -> set[str]:
    source = resources.files("windlass.memory.cuda").joinpath("put.cu").read_text()
    made = {f"put_{name}" for name in re.findall(r"^PUT_CAST\((\w+),", source, re.MULTILINE)}
    fp8 = re.findall(r"^PUT_FP8\((\w+),", source, re.MULTILINE)
    return made | {f"fp8_{what}_{name}" for name in fp8 for what in ("values", "scales")}


def test_the_source_contains_the_kernels_of_the_list() -> None:
    wanted = {put_kernel(*pair) for pair in CASTS}
    wanted |= {f"fp8_{what}_{d}" for d in QUANTISED_FROM for what in ("values", "scales")}
    assert kernels_of_the_source() == wanted


def manifest(worker: str, role: Role, dtype: DType) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("gate.weight", nbytes=6 * dtype.itemsize, dtype=dtype)
    builder.add_shard("gate.weight", (2, 3), Box((0, 0), (2, 3)), "gate.weight")
    return builder.build()


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DType, 2)))
def test_the_planner_and_the_cast_refuse_pairs_outside_the_list_by_name(
    source: DType, target: DType
) -> None:
    ends = [manifest("t/0", Role.TRAINER, source)], [manifest("e/0", Role.ENGINE, target)]
    tensors = torch.zeros(6, dtype=torch_dtype(source)), torch.ones(6, dtype=torch_dtype(target))
    if (source, target) in CASTS:
        plan_transfer(*ends)
        assert put_kernel(source, target) in kernels_of_the_source()
        copy_cast(tensors[1], tensors[0], "gate.weight")
        assert not tensors[1].any()
        return
    with pytest.raises(UnsupportedLayout, match=rf"tensor 'gate.weight': .*{source} at the source and {target} at"):  # fmt: skip
        plan_transfer(*ends)
    with pytest.raises(ConfigError, match=f"got {source} at the source and {target} at"):
        put_kernel(source, target)
    with pytest.raises(TransferFailed, match=f"tensor 'gate.weight': .*got {source} at the source"):
        copy_cast(tensors[1], tensors[0], "gate.weight")
