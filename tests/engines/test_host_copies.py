"""Copies between the memory of a GPU and host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from windlass.element_ids.codes import CheckpointSpec, Codes
from windlass.element_ids.ids import ElementIds
from windlass.element_ids.memory import fingerprint
from windlass.engines.capture.memory import Holding, Kind, Watched
from windlass.engines.capture.mirrors import find_mirrors
from windlass.engines.capture.snapshot import CHUNK_NBYTES, HostCopies, Snapshot
from windlass.layout.dtypes import DType

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_host_copies_restore_the_chosen_memories() -> None:
    sizes = (5, 3 * CHUNK_NBYTES + 7, 20 * CHUNK_NBYTES)
    memories = [torch.randint(0, 255, (n,), dtype=torch.uint8, device="cuda") for n in sizes]
    before = [memory.clone() for memory in memories]
    copies = HostCopies(memories)
    for memory in memories:
        memory.fill_(1)
    copies.restore([0, 2])
    assert torch.equal(memories[0], before[0])
    assert bool((memories[1] == 1).all()), "nobody has asked for it"
    assert torch.equal(memories[2], before[2])
    copies.restore([1])
    assert torch.equal(memories[1], before[1])


@pytest.mark.gpu
@needs_gpu
def test_a_snapshot_restores_a_model_that_fills_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    with torch.inference_mode():
        model = torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    snapshot = Snapshot(model, copies=True)
    with torch.inference_mode():
        model.weight.mul_(2)
    snapshot.restore()
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT8_E4M3])
def test_codes_on_a_gpu_equal_codes_on_the_host(dtype: DType) -> None:
    specs = [CheckpointSpec(str(n), (n, 3), dtype) for n in (1, 5, 1000)]
    made = {device: dict(Codes(specs, device).random(1)) for device in ("cpu", "cuda")}
    for name, tensor in made["cpu"].items():
        found = made["cuda"][name].cpu()
        assert torch.equal(tensor.view(torch.uint8), found.view(torch.uint8))
        assert fingerprint(tensor.view(-1)) == fingerprint(made["cuda"][name].view(-1))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
@pytest.mark.parametrize("by_place", [False, True])
def test_a_gpu_finds_wrong_places_and_padding_as_the_host_does(
    dtype: DType, by_place: bool
) -> None:
    """The last rows of each expert are padding."""
    specs, found = [CheckpointSpec(str(n), (300, 96), dtype) for n in range(6)], []
    for device in ("cpu", "cuda"):
        codes = Codes(specs, device)
        experts = torch.zeros(6, 310, 96, dtype=codes.dtypes[0], device=device)
        holding = Holding("experts", experts, Kind.PARAMETER)
        ids = ElementIds(holding.tensor, by_place=by_place)
        for position in range(codes.num_digits):
            for name, tensor in codes.digits(position):
                experts[int(name), :300] = tensor
            ids.observe(holding.tensor, codes, position)
        checks = [ids.check(holding.tensor, codes, None)]
        for name, tensor in codes.random(5):
            experts[int(name), :300] = tensor
        checks.append(ids.check(holding.tensor, codes, 5))
        experts[5, 309, 95] = 1
        checks.append(ids.check(holding.tensor, codes, 5))
        experts[5, 299, 95] = 1
        checks.append(ids.check(holding.tensor, codes, 5))
        found.append(checks)
    assert [check.is_right for check in found[0]] == [False, True, True, False]
    assert found[0] == found[1]
    assert found[0][1].numel == 6 * 300 * 96
    assert len({check.padding for check in found[0]}) == 2


def test_a_fingerprint_depends_on_values_and_places() -> None:
    memory = torch.arange(64, dtype=torch.int16)
    swapped = memory.clone()
    swapped[[0, 5]] = memory[[5, 0]]
    prints = {fingerprint(memory), fingerprint(swapped), fingerprint(memory[:63])}
    assert len(prints) == 3
    shifted = torch.cat([memory[:1], memory])[1:]
    assert fingerprint(shifted) == fingerprint(memory), "whatever it is aligned to"


class WithHostCopies(torch.nn.Module):
    """A model on a GPU that keeps copies of its weights, and values computed from them, on the host."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.randn(96, 64, device="cuda").bfloat16()
        self.weight = torch.nn.Parameter(made, requires_grad=False)
        self.norm = torch.nn.Parameter(
            torch.randn(64, device="cuda").bfloat16(), requires_grad=False
        )

    def copied(self) -> dict[str, Any]:
        weight = self.weight.detach().cpu()
        return {
            "cast": weight.float(),
            "slice": weight[8:40].clone(),
            "transposed": weight.float().T.contiguous(),
            "strided": torch.empty(64, 96).T.copy_(weight),
            "numpy": weight.float().numpy(),
            "bits": weight.view(torch.int16).clone(),
            "bytes": bytearray(weight.float().numpy().tobytes()),
            "joined": torch.cat([self.norm.detach().cpu(), weight[0]]),
        }


def values_of(kept: Any) -> torch.Tensor:
    if isinstance(kept, bytearray):
        return torch.frombuffer(kept, dtype=torch.float32).clone()
    return torch.as_tensor(kept).clone()


@pytest.mark.gpu
@needs_gpu
def test_copies_on_the_host_follow_weights_on_a_gpu() -> None:
    model = WithHostCopies()
    vars(model)["kept"] = model.copied()
    held = Watched(model)
    weights = [h for h in held().values() if h.kind is Kind.PARAMETER]
    targets = [
        *(h for h in held().values() if h.kind is not Kind.PARAMETER),
        *held.copies().values(),
    ]
    found = find_mirrors(targets, weights)
    found.require_refilled()
    before = {name: values_of(kept) for name, kept in vars(model)["kept"].items()}
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
        for mirror in found.mirrors.values():
            mirror.refill()
    for name, expected in model.copied().items():
        assert torch.equal(values_of(vars(model)["kept"][name]), values_of(expected)), name
        assert not torch.equal(before[name], values_of(expected)), name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("holder", [lambda t: t, lambda t: t.numpy()], ids=["tensor", "numpy"])
def test_values_on_the_host_that_follow_from_weights_on_a_gpu_are_refused(
    holder: Callable[[torch.Tensor], object],
) -> None:
    model = WithHostCopies()
    vars(model)["kept"] = holder(model.weight.detach().cpu().float() * 1.5)
    held = Watched(model)
    weights = [h for h in held().values() if h.kind is Kind.PARAMETER]
    found = find_mirrors([h for h in held().values() if h.kind is not Kind.PARAMETER], weights)
    assert "follows from weight" in found.derived["kept"]
