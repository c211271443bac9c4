"""The kernels of capture, compiled for the CPU, give the same results as torch."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_layers import Engine, require_delivered, specs

from windlass.element_ids import codes, ids, kernels, memory
from windlass.element_ids.codes import CheckpointSpec, Codes
from windlass.element_ids.ids import ElementIds
from windlass.element_ids.kernels import Kernels
from windlass.element_ids.memory import fingerprint
from windlass.engines.capture.capture import EXACT_NUMEL
from windlass.engines.capture.memory import held_by
from windlass.errors import TransferFailed
from windlass.layout.dtypes import DType

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")

ONE_THREAD = """
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
static const struct { unsigned x; } blockIdx{0}, threadIdx{0}, blockDim{1}, gridDim{1};
static unsigned long long __shfl_down_sync(unsigned, unsigned long long, int) { return 0; }
static void atomicAdd(unsigned long long* out, unsigned long long value) { *out += value; }
static unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
"""


class OneThread:
    """Replacement for `Device` that runs each kernel in one thread of this process."""

    ordinal, architecture, num_multiprocessors = 0, "", 1

    def __init__(self, _ordinal: int) -> None:
        pass

    def load(self, image: bytes) -> ctypes.CDLL:
        return ctypes.CDLL(image.decode())

    def function(self, module: ctypes.CDLL, name: str) -> Any:
        return module[name]

    def launch(
        self, function: Any, grid: int, block: int, arguments: Sequence[object], _stream: object
    ) -> None:
        assert grid * block >= 1
        function(*arguments)


@functools.cache
def compiled(folder: Path) -> bytes:
    source = resources.files("windlass.element_ids").joinpath("kernels.cu").read_text()
    (folder / "capture.cpp").write_text(ONE_THREAD + source)
    built = folder / "capture.so"
    words = ["g++", "-O1", "-shared", "-fPIC", "-o", str(built), str(folder / "capture.cpp")]
    subprocess.run(words, check=True)
    return str(built).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def of_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setattr(kernels, "Device", OneThread)
    monkeypatch.setattr(kernels, "compile_source", lambda _source, _to: compiled(folder))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    return Kernels(torch.device("cpu", 0))


@pytest.fixture
def in_use(of_host: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (codes, ids, memory):
        monkeypatch.setattr(module, "kernels_on", lambda _: of_host)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
@pytest.mark.parametrize("first", [0, 77, (1 << 32) + 5, 5 << 32])
def test_kernels_make_the_values_of_torch(of_host: Kernels, first: int, dtype: DType) -> None:
    numbers = [CheckpointSpec("before", (first,), dtype), CheckpointSpec("w", (1000,), dtype)]
    expected = dict(Codes(numbers).some(frozenset({"w"}), 3))["w"] / codes.LOUDNESS
    made = torch.empty_like(expected)
    of_host.fill(made, first, codes.hash_seed(3))
    assert torch.equal(made, expected)
    assert len(set(made.tolist())) > 200


def test_kernels_make_the_fingerprints_of_torch(of_host: Kernels) -> None:
    words = torch.randint(-(1 << 62), 1 << 62, (50_000,))
    assert of_host.fingerprint(words) == fingerprint(words)


@pytest.mark.parametrize("exact_numel", [0, EXACT_NUMEL], ids=["by_row", "by_place"])
def test_kernels_find_wrong_places_and_padding_as_torch_does(
    of_host: Kernels, monkeypatch: pytest.MonkeyPatch, exact_numel: int
) -> None:
    engine, stored = Engine(range(3)), [s for s in specs() if s.dtype is DType.BFLOAT16]
    numbering, layer = Codes(stored), "layers.2.experts"
    numbers: dict[str, ElementIds] = {}
    for position in range(numbering.num_digits):
        engine.load(numbering.digits(position))
        for name, holding in held_by(engine).items():
            of_name = numbers.setdefault(
                name, ElementIds(holding.tensor, by_place=holding.reach <= exact_numel)
            )
            of_name.observe(holding.tensor, numbering, position)
    engine.load(numbering.random(7))

    def checked(seed: int | None = 7) -> list[ids.Check]:
        holding, found = held_by(engine)[layer], []
        for chosen in (None, of_host):
            monkeypatch.setattr(ids, "kernels_on", lambda _, chosen=chosen: chosen)
            found.append(numbers[layer].check(holding.tensor, numbering, seed))
        return found

    by_torch, by_kernel = checked()
    assert by_torch == by_kernel
    assert by_kernel.is_right
    assert by_kernel.numel == 3 * 8 * 6
    experts = engine.get_parameter(layer).data
    # This element is padding.
    experts[1, 9, 3] = -1.5
    by_torch, changed = checked()
    assert by_torch == changed
    assert changed.is_right
    assert changed.padding != by_kernel.padding
    assert checked(None) == [changed.__class__(False, changed.padding, changed.numel)] * 2
    experts[2, 7, 5] *= 2
    assert [check.is_right for check in checked()] == [False, False]
    assert [check.is_right for check in checked(8)] == [False, False]


def test_a_kernel_that_did_not_run_fails_its_check(
    of_host: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneThread, "launch", lambda *_: None)
    memory, numbers = torch.zeros(4), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(TransferFailed, match="compared only 0 of 4 elements"):
        of_host.check(memory, numbers, numbers[:, :1], 4, 0)


@pytest.mark.usefixtures("in_use")
@pytest.mark.parametrize("exact_numel", [0, EXACT_NUMEL], ids=["by_row", "by_place"])
@pytest.mark.parametrize("odd", [None, 7])
def test_a_layout_is_captured_by_kernels(odd: int | None, exact_numel: int) -> None:
    require_delivered(Engine(range(12), odd=odd), exact_numel)
