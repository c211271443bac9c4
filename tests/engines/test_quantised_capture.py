"""Engines that load block-float8 checkpoints are captured, and bfloat16 trainers update them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_quantized_updates import Rank, by_rows, reference, update, weights

from windlass.config import UpdateMode
from windlass.element_ids.codes import CheckpointSpec, Codes
from windlass.engines.capture.capture import EXACT_NUMEL, capture
from windlass.engines.capture.checkpoint import StoredCheckpoint, checkpoint_specs
from windlass.engines.capture.description import Captured
from windlass.errors import UnsupportedLayout
from windlass.layout.dtypes import DType
from windlass.layout.quantization import QuantizedTensor, scale_shape

INNER, HIDDEN = 512, 200
Weights = Iterator[tuple[str, torch.Tensor]]
FLOAT8 = torch.float8_e4m3fn


def quantised(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the quantised checkpoint that an engine would load at its start."""
    found = {}
    for name, tensor in full.items():
        found[name], found[f"{name}_scale_inv"] = reference(tensor.bfloat16())
    return found


class Engine(torch.nn.Module):
    """One rank: fused gate and up, row-parallel down, in float8 with scales.

    Args:
        transposed: store scales in a kernel's layout: columns first, rows padded to four.
        after: function that changes the memory after every load.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        transposed: bool = False,
        after: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.rank, self.inner, self.after = rank, INNER // size, after
        blocks, columns = self.inner // 128, -(-HIDDEN // 128)
        self.gate_up = _parameter(2 * self.inner, HIDDEN, FLOAT8)
        self.down = _parameter(HIDDEN, self.inner, FLOAT8)
        self.down_scale = _parameter(columns, blocks, torch.float32)
        if transposed:
            self.gate_up_scale = _parameter(columns, -(-2 * blocks // 4) * 4, torch.float32)
            self.scales = self.gate_up_scale.data[:, : 2 * blocks].t()
        else:
            self.gate_up_scale = _parameter(2 * blocks, columns, torch.float32)
            self.scales = self.gate_up_scale.data

    def load(self, tensors: Weights) -> None:
        for name, tensor in tensors:
            base, _, suffix = name.partition("_")
            step = self.inner if not suffix else self.inner // 128
            part = slice(self.rank * step, (self.rank + 1) * step)
            if base == "down":
                target = self.down_scale if suffix else self.down
                target.data.copy_(tensor[:, part])
                continue
            at = 0 if base == "gate" else step
            fused = self.scales if suffix else self.gate_up.data
            fused[at : at + step].copy_(tensor[part])
        self.after(self)

    def bytes(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().view(torch.uint8).clone() for n, p in self.named_parameters()}

    def rank_of(self, captured: Captured) -> Rank:
        """Return the rank with the tensors that an update writes."""
        by_address = {p.data_ptr(): p.detach() for p in self.parameters()}
        if captured.recompute is not None:
            by_address |= {b.data_ptr(): b for _, b in captured.recompute.buffers}
        return Rank(captured.manifest, [by_address[a] for a in captured.addresses])


def _parameter(rows: int, columns: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(rows, columns).to(dtype), requires_grad=False)


SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
SPECS = [
    spec
    for name, shape in SHAPES.items()
    for spec in (
        CheckpointSpec(name, shape, DType.FLOAT8_E4M3),
        CheckpointSpec(f"{name}_scale_inv", scale_shape(shape), DType.FLOAT32),
    )
]
DECLARED = {QuantizedTensor(name, f"{name}_scale_inv") for name in SHAPES}


@pytest.mark.parametrize("exact_numel", [0, EXACT_NUMEL], ids=["by_row", "by_place"])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed_scales"])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
@pytest.mark.parametrize("size", [1, 2])
def test_a_published_version_equals_a_load_of_the_quantised_checkpoint(
    size: int, dtype: DType, transposed: bool, exact_numel: int
) -> None:
    full = weights(torch.bfloat16 if dtype is DType.BFLOAT16 else torch.float32)
    engines, ranks = [], []
    for rank in range(size):
        engine = Engine(rank, size, transposed=transposed)
        engine.load((n, t.clone()) for n, t in quantised(weights(torch.float16)).items())
        captured = capture(
            engine, SPECS, engine.load, worker=f"engine/{rank}", exact_numel=exact_numel
        )
        assert set(captured.manifest.quantized) == DECLARED
        assert (captured.repacks, captured.unplaced) == ((), ())
        engines.append(engine)
        ranks.append(engine.rank_of(captured))
    update(by_rows(2, full, dtype), ranks, UpdateMode.IN_PLACE, 0)
    for rank, engine in enumerate(engines):
        fresh = Engine(rank, size, transposed=transposed)
        fresh.load(iter(quantised(full).items()))
        for name, want in fresh.bytes().items():
            assert torch.equal(engine.bytes()[name], want), name


def test_the_first_load_is_compared_with_a_float8_checkpoint(tmp_path: Path) -> None:
    save_file(quantised(weights(torch.bfloat16)), tmp_path / "m.safetensors")
    specs = checkpoint_specs(tmp_path)
    assert {spec.dtype for spec in specs} == {DType.FLOAT8_E4M3, DType.FLOAT32}
    engine = Engine(0, 1)
    engine.load(StoredCheckpoint(tmp_path).tensors())
    before = engine.bytes()

    def capture_again() -> None:
        capture(engine, specs, engine.load, worker="e/0", reference=StoredCheckpoint(tmp_path))

    capture_again()
    for name, have in engine.bytes().items():
        assert torch.equal(have, before[name]), name
    with torch.no_grad():
        engine.down.view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(UnsupportedLayout, match=r"down.*gives other bytes"):
        capture_again()


class Plain(torch.nn.Module):
    """An engine with the given parameters."""

    def __init__(self, weight: torch.nn.Parameter, scale: torch.nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.scale = weight if scale is None else scale


def test_a_weight_and_its_scales_are_read_together_from_any_files(tmp_path: Path) -> None:
    full = quantised(weights(torch.bfloat16))
    first = ("up_scale_inv", "down", "gate")
    for number in (0, 1):
        part = {name: t for name, t in full.items() if (name in first) == (number == 0)}
        save_file(part, tmp_path / f"model-{number}.safetensors")
    expected = sorted(full)
    assert [spec.name for spec in checkpoint_specs(tmp_path)] == expected
    loaded = list(StoredCheckpoint(tmp_path).tensors())
    assert [name for name, _ in loaded] == expected
    for name, tensor in loaded:
        assert torch.equal(tensor.view(torch.uint8), full[name].view(torch.uint8)), name


def _powers_of_two(engine: Engine) -> None:
    engine.down_scale.data.copy_(torch.exp2(torch.ceil(torch.log2(engine.down_scale.abs()))))


def _requantise(engine: Engine) -> None:
    values = engine.down.data.float() * 0.5
    engine.down.data.copy_(values.to(FLOAT8))
    engine.down_scale.data.mul_(2)


def _negate(engine: Engine) -> None:
    engine.gate_up.data.copy_((-engine.gate_up.data.float()).to(FLOAT8))


@pytest.mark.parametrize(
    ("after", "names"),
    [
        (_powers_of_two, "down_scale"),
        (_requantise, "down_scale down"),
        (_negate, "gate_up"),
    ],
)
def test_tensors_computed_from_float8_are_named_and_computed_again(
    after: Callable[[Engine], None], names: str
) -> None:
    engine = Engine(0, 1, after=after)
    with pytest.raises(UnsupportedLayout, match="cannot compute them again") as refused:
        capture(engine, SPECS, engine.load, worker="e/0", recompute=False)
    found = str(refused.value)
    assert all(f"'{name}'" in found for name in names.split())
    captured = capture(engine, SPECS, engine.load, worker="e/0")
    assert set(captured.manifest.quantized) == DECLARED
    full = weights(torch.bfloat16)
    update(by_rows(2, full, DType.BFLOAT16), [engine.rank_of(captured)], UpdateMode.IN_PLACE, 0)
    captured.finalise()
    fresh = Engine(0, 1, after=after)
    fresh.load(iter(quantised(full).items()))
    for name, want in fresh.bytes().items():
        assert torch.equal(engine.bytes()[name], want), name


def test_scattered_float8_values_are_repacked_from_a_buffer() -> None:
    engine = Plain(_parameter(64, 64, FLOAT8))
    shuffle = torch.randperm(64 * 64, generator=torch.Generator().manual_seed(2))

    def load(tensors: Weights) -> None:
        for _, tensor in tensors:
            flat = tensor.reshape(-1).view(torch.uint8)[shuffle]
            engine.weight.data.copy_(flat.view(FLOAT8).reshape(64, 64))

    captured = capture(
        engine, [CheckpointSpec("w", (64, 64), DType.FLOAT8_E4M3)], load, worker="e/0"
    )
    (repack,) = captured.repacks
    assert captured.manifest.quantized == ()
    patterns = torch.arange(64 * 64).to(torch.uint8)
    repack.buffer.view(torch.uint8).copy_(patterns)
    captured.finalise()
    assert torch.equal(engine.weight.data.reshape(-1).view(torch.uint8), patterns[shuffle])


@pytest.mark.parametrize(
    ("scale", "shape"),
    [("gate_scale_inv", (1,)), ("gate_scale", (4, 2)), ("gate_scale_inv", (2, 4))],
)
def test_a_float8_tensor_without_block_scales_is_not_declared_quantised(
    scale: str, shape: tuple[int, ...]
) -> None:
    engine = Plain(_parameter(512, 200, FLOAT8), torch.nn.Parameter(torch.ones(shape)))

    def load(tensors: Weights) -> None:
        for name, tensor in tensors:
            (engine.weight if name == "gate" else engine.scale).data.copy_(tensor)

    specs = [
        CheckpointSpec("gate", (512, 200), DType.FLOAT8_E4M3),
        CheckpointSpec(scale, shape, DType.FLOAT32),
    ]
    captured = capture(engine, specs, load, worker="e/0")
    assert captured.manifest.quantized == ()
    assert len(captured.manifest.table) == 2


def test_a_scalar_setting_that_no_load_writes_is_a_constant_and_stays() -> None:
    engine = Plain(_parameter(8, 8, torch.float32), torch.nn.Parameter(torch.tensor(0.5)))
    # SGLang reads the scale of its key-value cache in this way.
    taken: list[float] = []

    def load(tensors: Weights) -> None:
        for _, tensor in tensors:
            engine.weight.data.copy_(tensor)
        taken.append(engine.scale.item())

    captured = capture(engine, [CheckpointSpec("w", (8, 8), DType.FLOAT32)], load, worker="e/0")
    assert captured.constants == ("scale",)
    assert set(taken) == {0.5}


def test_only_checkpoints_with_float8_need_more_digits() -> None:
    wide = CheckpointSpec("w", (1 << 20,), DType.BFLOAT16)
    narrow = CheckpointSpec("v", (3,), DType.FLOAT8_E4M3)
    assert (Codes([wide]).num_digits, Codes([wide, narrow]).num_digits) == (3, 6)


def test_float8_codes_contain_every_finite_number_and_no_nan() -> None:
    spec = CheckpointSpec("w", (1 << 14,), DType.FLOAT8_E4M3)
    ((_, values),) = Codes([spec]).random(0)
    assert not values.float().isnan().any()
    assert len(set(values.view(torch.uint8).tolist())) == 254
