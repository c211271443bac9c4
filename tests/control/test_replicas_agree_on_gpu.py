"""Trainer ranks on GPUs publish nothing if their replicas differ, in bf16 and float32 at once.

The same fleet also runs in host memory on any machine.
"""

from __future__ import annotations

import asyncio
import functools
import os
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from live_fleet import NUM_TRAINERS, TOKEN, Fleet
from torch.distributed.tensor import DTensor

import windlass
from windlass.config import ControlConfig
from windlass.errors import RoundAborted
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.planning.replicated import find_replicated
from windlass.transfer.base import ParameterMemory
from windlass.transfer.dtensor import local_tensor
from windlass.transfer.replicated_digests import ReplicatedDigests
from windlass.transports.cma import CmaConfig
from windlass.transports.cuda_ipc import CudaIpcConfig
from windlass.transports.registry import TransportConfig

NUM_GPUS = torch.cuda.device_count()
WIRES: dict[str, TransportConfig] = {"cuda": CudaIpcConfig(), "cpu": CmaConfig()}
TOKENS = 64
WEIGHT = {torch.bfloat16: "1.weight", torch.float32: "4.weight"}
"""Weight of each dtype. Both are compared in one block."""


def on_gpus(count: int) -> list[pytest.MarkDecorator]:
    reason = f"needs {count} CUDA device{'s' * (count > 1)}"
    return [pytest.mark.gpu, pytest.mark.skipif(count > NUM_GPUS, reason=reason)]


def device_of(kind: str, index: int) -> str:
    return f"cuda:{index % NUM_GPUS}" if kind == "cuda" else kind


class ToFloat32(torch.nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.float()


def build(seed: int) -> torch.nn.Sequential:
    """Return a stack like a decoder, with its first half in bf16."""
    torch.manual_seed(seed)
    half = torch.bfloat16
    return torch.nn.Sequential(
        torch.nn.Embedding(1000, 72, dtype=half),
        torch.nn.Linear(72, 200, dtype=half),
        torch.nn.GELU(),
        ToFloat32(),
        torch.nn.Linear(200, 72, bias=False),
        torch.nn.LayerNorm(72),
        torch.nn.Linear(72, 1000, bias=False),
    )


def hybrid_sharded(model: torch.nn.Sequential, kind: str) -> torch.nn.Sequential:
    """Apply HSDP with two replicas of one shard each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(kind, (NUM_TRAINERS, 1), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in [*model, model]:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model


@torch.no_grad()
def flip(parameter: torch.Tensor) -> None:
    """Flip the last bit of the last element."""
    held = local_tensor(parameter).view(torch.uint8).view(-1)
    held[-parameter.element_size()] ^= 1


def train(
    rank: int,
    url: str,
    store: str,
    kind: str,
    hybrid: bool,
    wire: TransportConfig,
    pipe: Connection,
) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.set_num_threads(1)
    device = device_of(kind, rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if hybrid and kind == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_TRAINERS,
        timeout=timedelta(seconds=60),
    )
    model = build(3).to(device)
    if hybrid:
        model = hybrid_sharded(model, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(TOKENS, device=device) + (TOKENS * rank if hybrid else 0)

    def step() -> None:
        # The optimizer reduces gradients of different tokens over both ranks.
        if hybrid:
            logits = model(tokens)
            torch.autograd.backward(torch.nn.functional.cross_entropy(logits, tokens))
        else:
            for parameter in model.parameters():
                parameter.grad = parameter.detach().sign()
        optimizer.step()
        optimizer.zero_grad()

    with windlass.connect_trainer(model, controller=url, token=TOKEN, transport=wire) as trainer:
        pipe.send("ready")
        while (told := pipe.recv()) is not None:
            version, steps, flipped = told
            for name in flipped:
                flip(model.get_parameter(name))
            if steps:
                step()
            why = ""
            try:
                # The step may still run on the GPU.
                trainer.publish(version, deadline_s=60)
            except RoundAborted as error:
                why = str(error)
            assert all(isinstance(p, DTensor) is hybrid for p in model.parameters())
            held = {n: local_tensor(p).to("cpu", copy=True) for n, p in model.named_parameters()}
            pipe.send((why, held))
    dist.destroy_process_group()


class Publisher:
    """Counter of versions that sends each version to both ranks."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._version = -1

    async def publish(self, *flipped: str, steps: bool = False) -> str:
        """Return why the version was refused.

        Return an empty string if both ranks published and the engine serves it.
        """
        self._version += 1
        names = [f"trainer{rank}" for rank in range(NUM_TRAINERS)]
        for rank, name in enumerate(names):
            self._fleet.send(name, (self._version, steps, flipped if rank else ()))
        (why, held), (other_why, other) = [await self._fleet.receive(name) for name in names]
        assert why == other_why
        same = {name for name, values in held.items() if torch.equal(values, other[name])}
        self._fleet.send("engine", message=True)
        self.served_version, self.served = await self._fleet.receive("engine")
        if not why:
            assert self.served_version == self._version
            for name in same:
                assert self.served[name].dtype == held[name].dtype
                assert torch.equal(self.served[name], held[name]), name
        self.differing = held.keys() - same
        return str(why)


@pytest.mark.parametrize(
    ("kind", "hybrid"),
    [
        pytest.param("cuda", False, marks=on_gpus(1)),
        pytest.param("cuda", True, marks=on_gpus(2)),
        ("cpu", False),
        ("cpu", True),
    ],
)
def test_one_differing_bit_is_named_and_nothing_is_published(
    tmp_path: object, kind: str, hybrid: bool
) -> None:
    asyncio.run(run(f"{tmp_path}/store", kind, hybrid))


async def run(store: str, kind: str, hybrid: bool) -> None:
    wire = WIRES[kind]
    config = ControlConfig(compare_share=1.0)
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        with Fleet(controller.url, wire) as fleet:
            engine = functools.partial(build, 4)
            fleet.start_model("engine", engine, device_of(kind, NUM_TRAINERS))
            for rank in range(NUM_TRAINERS):
                more = rank, controller.url, store, kind, hybrid, wire
                fleet.start(f"trainer{rank}", train, *more)
            for name in ("engine", "trainer0", "trainer1"):
                await fleet.receive(name)
            await check(Publisher(fleet))
            for name in ("trainer0", "trainer1"):
                fleet.send(name, None)
            fleet.send("engine", message=False)
            await fleet.join()


MOST_TURNS = 32


async def check(publisher: Publisher) -> None:
    async def refuse(weight: str, *flipped: str) -> None:
        why = await publisher.publish(*flipped)
        assert f"{weight!r} [0:" in why
        assert "differs: trainer/0 versus trainer/1" in why
        assert publisher.differing == {weight}

    # The first update compares everything.
    before = dict(build(4).named_parameters())
    half, single = WEIGHT[torch.bfloat16], WEIGHT[torch.float32]
    for weight, changes in ((half, [half]), (single, [half, single])):
        await refuse(weight, *changes)
        assert publisher.served_version < 0
        assert all(torch.equal(publisher.served[name], before[name]) for name in before)
    assert await publisher.publish(single, steps=True) == ""
    assert publisher.differing == set()

    # Later updates compare some of the blocks in turn.
    for weight in (half, single, half, single):
        num_published = 0
        while not (why := await publisher.publish(*([] if num_published else [weight]))):
            assert publisher.differing == {weight}
            num_published += 1
            assert num_published < MOST_TURNS
        assert f"{weight!r} [0:" in why
        last = publisher.served_version, publisher.served
        await refuse(weight)
        assert publisher.served_version == last[0]
        assert all(torch.equal(values, last[1][name]) for name, values in publisher.served.items())
        assert await publisher.publish(weight, steps=True) == ""
        assert publisher.differing == set()


class Holders:
    """Two ranks in this process with a parameter of every dtype at unaligned addresses."""

    SHAPE = (3, 700, 101)

    def __init__(self, kind: str) -> None:
        self.held: list[dict[DType, torch.Tensor]] = []
        self._digests = {}
        manifests = []
        generator = torch.Generator().manual_seed(5)
        numel = torch.Size(self.SHAPE).numel()
        sizes = {dtype: numel * dtype.itemsize for dtype in DType}
        values = {
            dtype: torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
            for dtype, size in sizes.items()
        }
        for rank in range(2):
            device = device_of(kind, rank)
            tensors = {}
            builder = ManifestBuilder(f"trainer/{rank}", Role.TRAINER)
            for dtype, size in sizes.items():
                ahead = rank * dtype.itemsize
                tensors[dtype] = torch.zeros(size + ahead, dtype=torch.uint8, device=device)[ahead:]
                tensors[dtype].copy_(values[dtype])
                builder.add_parameter(dtype.value, nbytes=size, dtype=dtype)
                builder.add_shard(dtype.value, self.SHAPE, Box.full(self.SHAPE), dtype.value)
            manifests.append(builder.build())
            self.held.append(tensors)
        self.found = find_replicated(manifests)
        for manifest, tensors in zip(manifests, self.held, strict=True):
            at = [
                ParameterMemory(tensors[DType(p.name)].data_ptr(), p.nbytes)
                for p in manifest.parameters
            ]
            digests = ReplicatedDigests(manifest, lambda at=at: at)  # type: ignore[misc]
            digests.bind(self.found.parts[manifest.worker].tobytes())
            self._digests[manifest.worker] = digests

    def compare(self, turn: int = 0, period: int = 1) -> str:
        taken = {worker: digests.take(turn, period) for worker, digests in self._digests.items()}
        return self.found.disagreement(taken)


@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=on_gpus(1)), "cpu"])
def test_a_rotation_of_samples_finds_one_differing_bit_in_every_dtype(kind: str) -> None:
    holders, period = Holders(kind), 5
    for turn in range(period):
        assert holders.compare(turn, period) == ""
    for dtype, values in holders.held[1].items():
        for at in (0, len(values) // 2 + 1, len(values) - 1):
            values[at] ^= 0x10
            why = holders.compare()
            assert f"'{dtype.value}' [0:3, 0:700, 0:101] differs: trainer/0 versus" in why
            found = [turn for turn in range(period) if holders.compare(turn, period)]
            assert len(found) == 1, (dtype, at)
            values[at] ^= 0x10
    assert holders.compare() == ""
