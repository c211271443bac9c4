"""Operations of every kind of memory: on the host, by kernels in numpy, and on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_gpu import numpy_gpu

from windlass.errors import PlanError, RegionError, TransferFailed
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.memory.device import CudaMemory
from windlass.memory.host import HostMemory
from windlass.memory.ops import MemoryOps
from windlass.memory.packing import ALIGNMENT, StridedCopy
from windlass.memory.place import memory_at
from windlass.memory.torch_dtypes import torch_dtype
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.planning.program import bind_links

SECONDS = 30.0
FLOATS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass
class Rig:
    """Memory and the device of its tensors."""

    memory: MemoryOps
    device: str

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device)


def made(kind: str) -> Rig:
    if kind == "host":
        return Rig(HostMemory(), "cpu")
    if kind == "numpy":
        return Rig(CudaMemory(numpy_gpu()), "cpu")
    from windlass.memory.cuda.gpu import shared_gpu

    return Rig(CudaMemory(shared_gpu(0)), "cuda:0")


KINDS = ["host", "numpy", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest) -> Rig:
    return made(request.param)


def copy_of(source: torch.Tensor, target: torch.Tensor, tensor: str = "w") -> StridedCopy:
    from windlass.memory.torch_dtypes import dtype_of

    return StridedCopy(
        sizes=tuple(source.shape),
        src_address=source.data_ptr(),
        src_strides=tuple(s * source.element_size() for s in source.stride()),
        src_dtype=dtype_of(tensor, source),
        dst_address=target.data_ptr(),
        dst_strides=tuple(s * target.element_size() for s in target.stride()),
        dst_dtype=dtype_of(tensor, target),
        tensor=tensor,
    )


def distinct(shape: tuple[int, ...], dtype: DType, first: int = 1) -> torch.Tensor:
    numel = math.prod(shape)
    return (torch.arange(first, first + numel) % 2039).to(torch_dtype(dtype)).reshape(shape)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_copies_store_what_torch_stores_between_any_strides(kind: str, data: st.DataObject) -> None:
    rig = made(kind)
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    have, want = data.draw(
        st.one_of(
            st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
            st.sampled_from([(d, d) for d in (DType.UINT8, DType.INT64, DType.FLOAT8_E4M3)]),
        )
    )
    gap = data.draw(st.integers(0, 3))
    turned = data.draw(st.booleans())
    base = distinct((*shape[:-1], shape[-1] + gap), have)
    source = rig.tensor(base)[..., : shape[-1]]
    held = rig.tensor(
        torch.zeros(tuple(reversed(shape)) if turned else shape, dtype=torch_dtype(want))
    )
    target = held.permute(*reversed(range(len(shape)))) if turned else held
    copies = rig.memory.prepare([copy_of(source, target)])
    for _ in range(2):
        copies.run()
        rig.memory.finish(SECONDS)
        copies.check()
    copies.close()
    expected = base[..., : shape[-1]].to(torch_dtype(want))
    assert torch.equal(target.cpu().view(torch.uint8) if want is DType.FLOAT8_E4M3 else target.cpu(), expected.view(torch.uint8) if want is DType.FLOAT8_E4M3 else expected)  # fmt: skip


def test_an_overflowing_cast_names_its_tensor_and_does_not_affect_the_next_run(rig: Rig) -> None:
    fine, large = (rig.tensor(torch.tensor([1.0, value])) for value in (2.0, 1e30))
    held = [rig.tensor(torch.zeros(2, dtype=torch.float16)) for _ in range(2)]
    pairs = zip((fine, large), held, ("fine", "large"), strict=True)
    copies = rig.memory.prepare([copy_of(s, t, name) for s, t, name in pairs])

    def run() -> None:
        copies.run()
        rig.memory.finish(SECONDS)
        copies.check()

    with pytest.raises(TransferFailed, match="tensor 'large': a finite float32"):
        run()
    large[1] = 3.0
    rig.memory.settle(SECONDS)
    run()
    copies.close()
    copies.close()
    assert held[1].tolist() == [1.0, 3.0]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_memory_outside_the_gpu_has_no_gpu_allocation(kind: str) -> None:
    with pytest.raises(RegionError, match="register: 0x40 must be in memory of GPU 0"):
        made(kind).memory.allocation(64)


def test_allocated_memory_is_aligned_and_does_not_overlap(rig: Rig) -> None:
    buffers = [rig.memory.allocate(nbytes) for nbytes in (1, 4096, 100_001)]
    spans = sorted((b.address, b.address + b.nbytes) for b in buffers)
    assert all(b.address % ALIGNMENT == 0 for b in buffers)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for buffer in buffers:
        around = rig.memory.allocation(buffer.address + buffer.nbytes - 1)
        # The allocation of host memory is unknown.
        if rig.memory.ordinal < 0:
            assert around is None
        else:
            assert around is not None
            assert around[0] <= buffer.address
            assert sum(around) >= buffer.address + buffer.nbytes
    for buffer in buffers:
        buffer.close()
        buffer.close()


@pytest.fixture
def link() -> Callable[[DType, DType], tuple[TransferPlan, TransferPlan]]:
    """Provide one link of three parameters, cut by rows at the source and columns at the target."""

    def plan(have: DType, want: DType) -> tuple[TransferPlan, TransferPlan]:
        shapes = {"a": (9, 14), "b": (5,), "c": (6, 3, 4)}
        manifests = []
        for worker, role, dtype in (
            ("trainer/0", Role.TRAINER, have),
            ("engine/0", Role.ENGINE, want),
        ):
            builder = ManifestBuilder(worker, role)
            for name, shape in shapes.items():
                sizes = (*shape[:-1], -(-shape[-1] // 2)) if role is Role.ENGINE else shape
                box = Box((0,) * len(shape), sizes)
                builder.add_parameter(name, nbytes=box.numel * dtype.itemsize, dtype=dtype)
                builder.add_shard(name, shape, box, name)
            manifests.append(builder.build())
        found = plan_transfer([manifests[0]], [manifests[1]])
        return found.parts(sending=True, all_names=True)["trainer/0"], found.parts(
            sending=False, all_names=True
        )["engine/0"]

    return plan


@pytest.mark.parametrize(
    ("have", "want"), [(DType.BFLOAT16, DType.BFLOAT16), (DType.FLOAT32, DType.BFLOAT16)]
)
def test_both_ends_of_a_link_get_the_same_digest_until_an_element_changes(
    rig: Rig,
    link: Callable[[DType, DType], tuple[TransferPlan, TransferPlan]],
    have: DType,
    want: DType,
) -> None:
    at_source, at_destination = link(have, want)
    shapes = {"a": (9, 14), "b": (5,), "c": (6, 3, 4)}
    sources = [rig.tensor(distinct(s, have, 100 * i)) for i, s in enumerate(shapes.values())]
    targets = [
        rig.tensor(t.cpu()[..., : -(-t.shape[-1] // 2)].to(torch_dtype(want)).contiguous())
        for t in sources
    ]
    (sent,) = bind_links(at_source, sending=True)
    (received,) = bind_links(at_destination, sending=False)
    ends = [
        digests({"peer": program}, np.array([t.data_ptr() for t in tensors], np.uint64))
        for digests, program, tensors in (
            (rig.memory.sent_digests, sent, sources),
            (rig.memory.received_digests, received, targets),
        )
    ]
    rig.memory.settle(SECONDS)
    here, there = (end.take(["peer"], SECONDS)["peer"] for end in ends)
    assert here == there
    targets[2].view(-1)[7] += 1
    rig.memory.settle(SECONDS)
    assert ends[1].take(["peer"], SECONDS)["peer"] != here
    assert ends[0].take(["peer"], SECONDS)["peer"] == here
    if have is not want:
        sources[0][0, 0] = 3.4e38
        rig.memory.settle(SECONDS)
        with pytest.raises(TransferFailed, match="tensor 'a': a finite float32"):
            ends[0].take(["peer"], SECONDS)
    for end in ends:
        end.close()
        end.close()


def test_a_view_shares_the_memory(rig: Rig) -> None:
    if isinstance(rig.memory, CudaMemory) and rig.device == "cpu":
        pytest.skip("torch sees no GPU there")
    held = rig.tensor(distinct((4, 6), DType.BFLOAT16))
    view = rig.memory.view(held.data_ptr() + 2, (4, 2), (12, 4), DType.BFLOAT16)
    assert torch.equal(view, held[:, 1:5:2])
    view.fill_(0)
    assert not held[:, 1:5:2].any()
    assert held[:, 0].all()


def test_weights_in_two_memories_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.memory import place

    monkeypatch.setattr(place, "gpu_of", lambda address: {1: -1, 2: 0, 3: 1}[address])
    with pytest.raises(
        PlanError, match=r"engine/0: .* on one GPU or in host memory, got GPUs \[-1, 0\]"
    ):
        memory_at([1, 2, 0], "engine/0")
    assert memory_at([0, 1], "engine/0").ordinal == -1


def test_digests_of_no_chunks_do_not_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading back waits without a deadline behind kernels that have not been waited for."""
    gpu, held = numpy_gpu(), np.arange(8, dtype=np.uint8)
    where = np.array([held.ctypes.data], np.uint64)
    digests = CudaMemory(gpu).chunk_digests(where, np.array([8]), np.array([0, 1]))

    def wait_for_ever(*_: object) -> bytes:
        raise AssertionError("the driver waits for kernels")

    with monkeypatch.context() as patch:
        patch.setattr(gpu.device, "download", wait_for_ever)
        assert digests.take([], SECONDS) == {}
    assert list(digests.take([0], SECONDS)) == [0]
    digests.close()


@pytest.mark.parametrize("num", [2, 70_000])
@pytest.mark.parametrize("item", [1, 2, 4, 64])
def test_short_ranges_have_the_digest_of_their_bytes_in_order(num: int, item: int) -> None:
    """The ranges are elements with gaps, in any order."""
    buffer = np.random.default_rng(3).integers(0, 256, num * (item + 3), np.uint8)
    order = np.random.default_rng(4).permutation(num)
    addresses = buffer.ctypes.data + order.astype(np.uint64) * np.uint64(item + 3)
    digests = HostMemory().chunk_digests(addresses, np.full(num, item), np.array([0, num]))
    whole = buffer.reshape(num, item + 3)[order, :item].tobytes()
    assert digests.take([0], 5.0) == {0: xxhash.xxh3_128_hexdigest(whole)}
