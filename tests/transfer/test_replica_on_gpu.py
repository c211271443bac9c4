"""FSDP2 ranks on GPUs with a replica overwrite or free weights as soon as they are copied."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_fleet import ENGINES, NUM_TRAINERS, TOKEN, WIRES, Fleet, build, needs
from torch.distributed.tensor import DTensor

import windlass
from windlass.config import ControlConfig, ReplicaPlace, UpdateMode
from windlass.errors import ConfigError
from windlass.transports.registry import TransportConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NUM_VERSIONS = 3
STEP_CYCLES = 1_000_000_000
"""Cycles of about 0.5 s on the GPU: the step still runs when its weights are requested."""
NEXT_STEP_CYCLES = 4_000_000_000
"""Cycles of about 2 s: an update that waited for this step would take as long."""
POISON = -7.0
CUDA: Any = torch.cuda


def train(
    rank: int, url: str, store: str, wire: TransportConfig, replica: ReplicaPlace, pipe: Connection
) -> None:
    from torch.distributed.fsdp import fully_shard

    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=NUM_TRAINERS
    )
    model = build().cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(64, device="cuda").reshape(4, 16) + 64 * rank
    side = CUDA.Stream()
    with windlass.connect_trainer(
        model, controller=url, token=TOKEN, transport=wire, replica=replica
    ) as trainer:
        for version in range(NUM_VERSIONS):
            logits = model(tokens).flatten(0, 1)
            torch.autograd.backward(torch.nn.functional.cross_entropy(logits, tokens.flatten()))
            torch.cuda.synchronize()
            stream: AbstractContextManager[object] = nullcontext()
            if version % 2:
                stream = torch.cuda.stream(side)
            with stream:
                CUDA._sleep(STEP_CYCLES)
                optimizer.step()
                stepped = CUDA.Event()
                stepped.record()
                was_running = not stepped.query()
                pending = trainer.publish(version, wait=False, copy=True)
                kept = _keep(model)
                _overwrite(model, free=replica is ReplicaPlace.HOST)
                CUDA._sleep(NEXT_STEP_CYCLES)
                ended = CUDA.Event()
                ended.record()
                pending.result(deadline_s=60)
                waited_for_the_next = ended.query()
            torch.cuda.synchronize()
            _restore(model, kept)
            optimizer.zero_grad()
            full = {
                name: parameter.full_tensor().detach().cpu()
                for name, parameter in model.named_parameters()
                if isinstance(parameter, DTensor)
            }
            told = was_running, waited_for_the_next, pending.copy.nbytes
            pipe.send((version, full if rank == 0 else {}, *told))
            assert pipe.recv() == version
    dist.destroy_process_group()


def _locals(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]


@torch.no_grad()
def _keep(model: torch.nn.Module) -> list[tuple[torch.Tensor, int]]:
    """Return copies of the local tensors and the sizes of their storages in bytes."""
    return [(tensor.clone(), tensor.untyped_storage().nbytes()) for tensor in _locals(model)]


@torch.no_grad()
def _overwrite(model: torch.nn.Module, *, free: bool) -> None:
    """Overwrite the weights.

    With `free`, also free their memory, as a trainer that offloads does.
    """
    for tensor in _locals(model):
        tensor.fill_(POISON)
        if free:
            tensor.untyped_storage().resize_(0)
    if free:
        torch.cuda.empty_cache()


@torch.no_grad()
def _restore(model: torch.nn.Module, kept: Sequence[tuple[torch.Tensor, int]]) -> None:
    # Other tensors take the freed memory.
    hold = [torch.full_like(was, POISON) for was, _ in kept]
    for tensor, (was, nbytes) in zip(_locals(model), kept, strict=True):
        storage = tensor.untyped_storage()
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)
        tensor.copy_(was)
    del hold


@pytest.mark.parametrize(
    ("wire", "replica", "mode"),
    [
        ("cuda_ipc", ReplicaPlace.HOST, UpdateMode.IN_PLACE),
        ("cuda_ipc", ReplicaPlace.HOST, UpdateMode.STAGED),
        ("cuda_ipc", ReplicaPlace.DEVICE, UpdateMode.IN_PLACE),
        ("cuda_ipc", ReplicaPlace.DEVICE, UpdateMode.STAGED),
        ("nixl", ReplicaPlace.DEVICE, UpdateMode.STAGED),
        ("mooncake over TCP", ReplicaPlace.DEVICE, UpdateMode.STAGED),
    ],
)
def test_engines_get_the_copy_although_the_weights_changed(
    tmp_path: object, wire: str, replica: ReplicaPlace, mode: UpdateMode
) -> None:
    needs(wire)
    asyncio.run(run(str(tmp_path), wire, replica, mode))


async def run(folder: str, wire: str, replica: ReplicaPlace, mode: UpdateMode) -> None:
    config = ControlConfig(mode=mode, min_engines=2)
    trainers = [f"trainer{rank}" for rank in range(NUM_TRAINERS)]
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        with Fleet(controller.url, WIRES[wire]) as fleet:
            fleet.start_engines()
            for rank, name in enumerate(trainers):
                store = f"{folder}/store"
                fleet.start(name, train, rank, controller.url, store, WIRES[wire], replica)
            for name in ENGINES:
                assert await fleet.receive(name) == ("ready",)
            for version in range(NUM_VERSIONS):
                found = [await fleet.receive(name) for name in trainers]
                for rank, told in enumerate(found):
                    published, _, was_running, waited_for_the_next, nbytes = told
                    assert published == version
                    assert nbytes > 0
                    # The first version loads kernels. NIXL and Mooncake may wait for the next step.
                    if version:
                        assert was_running, "the step ended before its weights were requested"
                    if version and wire == "cuda_ipc":
                        assert not waited_for_the_next, f"rank {rank}, version {version}"
                full = found[0][1]
                for name, dtype in ENGINES.items():
                    fleet.send(name, message=True)
                    served, held = await fleet.receive(name)
                    assert served == version
                    for parameter, truth in full.items():
                        same = torch.equal(held[parameter], truth.to(dtype))
                        assert same, (version, name, parameter)
                for name in trainers:
                    fleet.send(name, version)
            for name in ENGINES:
                fleet.send(name, message=False)
            await fleet.join()


@pytest.mark.parametrize("wire", ["nixl", "mooncake over TCP"])
def test_a_copy_in_host_memory_is_refused_where_bytes_leave_from_the_gpu(wire: str) -> None:
    needs(wire)
    module = torch.nn.Linear(8, 8).cuda()
    with pytest.raises(ConfigError, match="replica: must be 'device' with"):
        windlass.connect_trainer(
            module,
            controller="http://127.0.0.1:1",
            token=TOKEN,
            transport=WIRES[wire],
            replica=ReplicaPlace.HOST,
        )
