"""Trainers hold bfloat16, engines float8 with block scales: packing quantises bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tools.plan.reports import plan_with_reports
from windlass.config import UpdateMode
from windlass.errors import ManifestError, PlanError, UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.layout.quantization import (
    CAPABILITIES,
    Capability,
    QuantizedTensor,
    Scheme,
    scale_shape,
)
from windlass.planning.plan import CopyMode, Reason, TransferPlan
from windlass.planning.planner import PlanPolicy, plan_transfer
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import LinkStatus
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transfer.source import SourceMemory
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

TORCH = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT8_E4M3: torch.float8_e4m3fn,
}
SHAPES = {"gate": (512, 200), "up": (512, 200), "down": (200, 512)}


def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the blocks of a matrix as DeepGEMM and vLLM do on a GPU."""
    rows, columns = weight.shape
    blocks = scale_shape((rows, columns))
    padded = torch.zeros(blocks[0] * 128, blocks[1] * 128, dtype=weight.dtype)
    padded[:rows, :columns] = weight
    view = padded.view(blocks[0], 128, blocks[1], 128)
    amax = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    # This equals amax / 448.0 on a GPU.
    scale = amax * torch.tensor(1.0).div(448.0)
    values = (view * (1.0 / scale)).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:rows, :columns].contiguous(), scale.view(blocks)


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return random weights with a zero block, an outlier and tiny values, to reach every branch."""
    generator = torch.Generator().manual_seed(7)
    full = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
    full["gate"][:128, :128] = 0
    full["up"][130, 150] = 3000.0
    full["down"][:, 256:] *= 1e-7
    return {name: tensor.to(dtype) for name, tensor in full.items()}


@dataclass
class Rank:
    manifest: ShardManifest
    memory: list[torch.Tensor]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))


def trainer(index: int, boxes: dict[str, Box], full: dict[str, torch.Tensor], dtype: DType) -> Rank:
    builder = ManifestBuilder(f"trainer/{index}", Role.TRAINER)
    memory = []
    for name, box in boxes.items():
        # The buffer is wider than the shard, so that the shard is strided.
        local = torch.zeros(box.sizes[0], box.sizes[1] + 3, dtype=TORCH[dtype])
        local[:, : box.sizes[1]] = full[name][slices(box)]
        size = dtype.itemsize
        builder.add_parameter(name, nbytes=local.nbytes, dtype=dtype)
        builder.add_shard(
            name, SHAPES[name], box, name, strides_bytes=(local.stride(0) * size, size)
        )
        memory.append(local)
    return Rank(builder.build(), memory)


def by_rows(num_ranks: int, full: dict[str, torch.Tensor], dtype: DType) -> list[Rank]:
    """Return ranks that hold `gate` and `up` by rows of blocks and `down` by columns of blocks."""
    ranks = []
    for index in range(num_ranks):
        inner = 512 // num_ranks
        rows = Box((index * inner, 0), (inner, 200))
        columns = Box((0, index * inner), (200, inner))
        ranks.append(trainer(index, {"gate": rows, "up": rows, "down": columns}, full, dtype))
    return ranks


def engine(index: int, num_ranks: int, scheme: Scheme = Scheme.FP8_BLOCK) -> Rank:
    """Return a rank with fused gate_up and row-parallel down, in float8 with equally cut scales."""
    builder = ManifestBuilder(f"engine/{index}", Role.ENGINE)
    inner = 512 // num_ranks
    memory = []
    for parameter, parts, dim in (("gate_up", ("gate", "up"), 0), ("down", ("down",), 1)):
        for suffix, dtype in (("", DType.FLOAT8_E4M3), ("_scale_inv", DType.FLOAT32)):
            boxes = {}
            for name in parts:
                shape = SHAPES[name] if not suffix else scale_shape(SHAPES[name])
                offsets, sizes = [0, 0], list(shape)
                sizes[dim] = inner if not suffix else inner // 128
                offsets[dim] = index * sizes[dim]
                boxes[name] = (shape, Box(tuple(offsets), tuple(sizes)))
            nbytes = sum(box.numel for _, box in boxes.values()) * dtype.itemsize
            builder.add_parameter(parameter + suffix, nbytes=nbytes, dtype=dtype)
            offset = 0
            for name, (shape, box) in boxes.items():
                builder.add_shard(
                    name + suffix, shape, box, parameter + suffix, offset_bytes=offset
                )
                offset += box.numel * dtype.itemsize
            memory.append(torch.zeros(nbytes, dtype=torch.uint8))
        for name in parts:
            builder.add_quantized(QuantizedTensor(name, f"{name}_scale_inv", scheme))
    return Rank(builder.build(), memory)


def expected(index: int, num_ranks: int, full: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    inner = 512 // num_ranks
    rows, blocks = slice(index * inner, (index + 1) * inner), slice(index * inner // 128, (index + 1) * inner // 128)  # fmt: skip
    gate, up, down = (reference(full[name].bfloat16()) for name in ("gate", "up", "down"))
    return [
        torch.cat([gate[0][rows], up[0][rows]]),
        torch.cat([gate[1][blocks], up[1][blocks]]),
        down[0][:, rows].contiguous(),
        down[1][:, blocks].contiguous(),
    ]


def update(
    trainers: list[Rank], engines: list[Rank], mode: UpdateMode, arena_nbytes: int
) -> TransferPlan:
    """Run one whole update over `cma` and verify its digests."""
    plan = plan_transfer(
        [t.manifest for t in trainers],
        [e.manifest for e in engines],
        PlanPolicy(min_split_bytes=1024),
    )
    plan = TransferPlan.decode(plan.encode())
    transports, receivers, bindings = [], {}, []
    for rank in engines:
        transport = create_transport(CmaConfig())
        transports.append(transport)
        regions = [transport.register(m.data_ptr(), m.nbytes) for m in rank.memory]
        receiver = Receiver(transport, rank.manifest, [m.data_ptr() for m in rank.memory], regions)
        bindings.append(
            receiver.connect(plan.parts(sending=False, all_names=True)[rank.manifest.worker], mode)
        )
        receivers[rank.manifest.worker] = receiver
    digests: dict[str, dict[str, str]] = {worker: {} for worker in receivers}
    senders = []
    try:
        for rank in trainers:
            transport = create_transport(CmaConfig())
            transports.append(transport)
            memory = [ParameterMemory(m.data_ptr(), m.nbytes) for m in rank.memory]
            sender = Sender(transport, rank.manifest, lambda m=memory: m, arena_nbytes=arena_nbytes)  # type: ignore[misc]
            senders.append(sender)
            part = plan.parts(sending=True, all_names=True)[rank.manifest.worker]
            sender.connect(part, bindings)
            sender.prepare()
            for outcome in sender.write(0, sorted({plan.destinations[link.dst] for link in part.links()}), 10.0).links:  # fmt: skip
                assert outcome.status is LinkStatus.OK, outcome.error
                digests[outcome.destination][rank.manifest.worker] = outcome.digest
        for worker, receiver in receivers.items():
            assert receiver.verify(0, digests[worker]) == ()
            receiver.apply()
    finally:
        for sender in senders:
            sender.close()
        for receiver in receivers.values():
            receiver.close()
        for transport in transports:
            transport.close()
    return plan


@pytest.mark.parametrize("mode", UpdateMode)
@pytest.mark.parametrize("arena_nbytes", [0, 150_000])
@pytest.mark.parametrize(
    ("num_trainers", "num_engines", "dtype"),
    [(2, 1, DType.BFLOAT16), (1, 2, DType.BFLOAT16), (4, 2, DType.FLOAT32), (2, 4, DType.BFLOAT16)],
)
def test_engine_bytes_equal_the_quantised_checkpoint(
    num_trainers: int, num_engines: int, dtype: DType, mode: UpdateMode, arena_nbytes: int
) -> None:
    full = weights(TORCH[dtype])
    engines = [engine(index, num_engines) for index in range(num_engines)]
    plan = update(by_rows(num_trainers, full, dtype), engines, mode, arena_nbytes)
    for index, rank in enumerate(engines):
        for have, want in zip(rank.memory, expected(index, num_engines, full), strict=True):
            assert torch.equal(have, want.reshape(-1).view(torch.uint8))
    as_bfloat16 = 2 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert plan.quantizes
    assert 0.5 < plan.nbytes / as_bfloat16 < 0.51


def test_replicas_share_the_work_in_whole_blocks() -> None:
    full = weights(torch.bfloat16)
    whole = {name: Box.full(shape) for name, shape in SHAPES.items()}
    replicas = [trainer(index, whole, full, DType.BFLOAT16) for index in range(3)]
    engines = [engine(0, 1)]
    plan = update(replicas, engines, UpdateMode.IN_PLACE, 0)
    for have, want in zip(engines[0].memory, expected(0, 1, full), strict=True):
        assert torch.equal(have, want.reshape(-1).view(torch.uint8))
    shares = [plan.parts(sending=True, all_names=True)[worker].nbytes for worker in plan.sources]
    assert min(shares) > plan.nbytes // 5


def test_a_quantised_update_is_packed_and_the_plan_gives_the_reason() -> None:
    full = weights(torch.bfloat16)
    planned = plan_with_reports([by_rows(1, full, DType.BFLOAT16)[0].manifest], [engine(0, 1).manifest])  # fmt: skip
    assert planned.coverage.fraction == 1.0
    assert planned.coverage.by_mode[CopyMode.PACKED] == planned.plan.nbytes
    assert planned.coverage.by_reason[Reason.QUANTIZED] == planned.plan.nbytes


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_shards_that_cut_through_blocks_are_refused(num_ranks: int) -> None:
    full = weights(torch.bfloat16)
    bounds = [512 * i // num_ranks for i in range(num_ranks + 1)]
    trainers = []
    for index in range(num_ranks):
        first, count = bounds[index], bounds[index + 1] - bounds[index]
        rows, columns = Box((first, 0), (count, 200)), Box((0, first), (200, count))
        trainers.append(trainer(index, {"gate": rows, "up": rows, "down": columns}, full, DType.BFLOAT16))  # fmt: skip
    with pytest.raises(UnsupportedLayout, match=r"blocks of 128 x 128 must each be on one source"):
        plan_transfer([t.manifest for t in trainers], [engine(0, 1).manifest])


def test_a_trainer_that_has_scales_sends_its_own() -> None:
    values = {name: reference(tensor) for name, tensor in weights(torch.bfloat16).items()}
    builder = ManifestBuilder("trainer/0", Role.TRAINER)
    memory = []
    for name, (quantised, scale) in values.items():
        scale = scale * 2
        for tensor, key, dtype in ((quantised, name, DType.FLOAT8_E4M3), (scale, f"{name}_scale_inv", DType.FLOAT32)):  # fmt: skip
            builder.add_parameter(key, nbytes=tensor.nbytes, dtype=dtype)
            builder.add_shard(key, tuple(tensor.shape), Box.full(tuple(tensor.shape)), key)
            memory.append(tensor)
    engines = [engine(0, 1)]
    plan = update([Rank(builder.build(), memory)], engines, UpdateMode.IN_PLACE, 0)
    assert not plan.quantizes
    want = torch.cat([values["gate"][1], values["up"][1]]) * 2
    assert torch.equal(engines[0].memory[1], want.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("row", CAPABILITIES, ids=lambda c: c.scheme.value)
def test_schemes_are_served_or_refused_with_the_reason_in_the_table(row: Capability) -> None:
    manifests = [by_rows(1, weights(torch.bfloat16), DType.BFLOAT16)[0].manifest]
    plan: Callable[[], TransferPlan] = lambda: plan_transfer(  # noqa: E731
        manifests, [engine(0, 1, row.scheme).manifest]
    )
    if row.supported:
        assert plan().quantizes
    else:
        with pytest.raises(UnsupportedLayout, match=row.reason[:30]):
            plan()


def test_float8_without_a_declaration_is_refused() -> None:
    full = weights(torch.bfloat16)
    builder = ManifestBuilder("engine/0", Role.ENGINE)
    builder.add_parameter("gate", nbytes=512 * 200, dtype=DType.FLOAT8_E4M3)
    builder.add_shard("gate", SHAPES["gate"], Box.full(SHAPES["gate"]), "gate")
    with pytest.raises(UnsupportedLayout, match="must be declared quantised"):
        plan_transfer([by_rows(1, full, DType.BFLOAT16)[0].manifest], [builder.build()])


def test_a_declaration_with_scales_of_another_shape_is_refused() -> None:
    builder = ManifestBuilder("engine/0", Role.ENGINE)
    for name, shape, dtype in (("w", (256, 128), DType.FLOAT8_E4M3), ("s", (1, 1), DType.FLOAT32)):
        builder.add_parameter(name, nbytes=shape[0] * shape[1] * dtype.itemsize, dtype=dtype)
        builder.add_shard(name, shape, Box.full(shape), name)
    builder.add_quantized(QuantizedTensor("w", "s"))
    with pytest.raises(ManifestError, match="one scale per block of 128 x 128 elements"):
        builder.build()


def test_an_arena_smaller_than_a_row_of_blocks_is_refused() -> None:
    trainers = by_rows(1, weights(torch.bfloat16), DType.BFLOAT16)
    with pytest.raises(
        PlanError, match="half of the arena must hold one piece, or one row of quantisation blocks"
    ):
        update(trainers, [engine(0, 1)], UpdateMode.IN_PLACE, 40_000)


def test_a_backend_that_sends_unpacked_parameters_refuses_to_quantise() -> None:
    rank = by_rows(1, weights(torch.bfloat16), DType.BFLOAT16)[0]
    plan = plan_transfer([rank.manifest], [engine(0, 1).manifest])
    memory = [ParameterMemory(m.data_ptr(), m.nbytes) for m in rank.memory]
    with pytest.raises(PlanError, match="the plan quantises, and this backend sends"):
        SourceMemory(rank.manifest, lambda: memory).bind(plan, ())
