"""FSDP2 ranks on GPUs publish into live engines, over NVLink and over transports between hosts."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from live_fleet import ENGINES, NUM_TRAINERS, TOKEN, WIRES, Fleet, build, needs
from torch.distributed.tensor import DTensor, Shard

import windlass
from windlass.config import ControlConfig, UpdateMode
from windlass.transports.registry import TransportConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def train(
    rank: int,
    url: str,
    store: str,
    weights: str,
    wire: TransportConfig,
    arena_nbytes: int,
    pipe: Connection,
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_TRAINERS,
    )
    offload = OffloadPolicy()
    if weights != "on GPU":
        offload = CPUOffloadPolicy(pin_memory=weights == "pinned")
    model = build().cuda()
    for layer in model:
        by_columns = isinstance(layer, torch.nn.Linear) and layer.in_features == 200
        fully_shard(
            layer,
            offload_policy=offload,
            shard_placement_fn=(lambda _: Shard(1)) if by_columns else None,
        )
    fully_shard(model, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(64, device="cuda").reshape(4, 16) + 64 * rank
    with windlass.connect_trainer(
        model, controller=url, token=TOKEN, transport=wire, arena_nbytes=arena_nbytes
    ) as trainer:
        for version in range(3):
            logits = model(tokens).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            # The step may still run on the GPU.
            report = trainer.publish(version).result()
            full = {
                name: parameter.full_tensor().detach().cpu()
                for name, parameter in model.named_parameters()
                if isinstance(parameter, DTensor)
            }
            pipe.send((version, report.wire_s, full if rank == 0 else {}))
        pipe.recv()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        (UpdateMode.IN_PLACE, "on GPU"),
        (UpdateMode.STAGED, "on GPU"),
        (UpdateMode.IN_PLACE, "pinned"),
        (UpdateMode.STAGED, "pageable"),
    ],
)
def test_engines_hold_the_full_tensors_after_every_publish(
    tmp_path: object, mode: UpdateMode, weights: str
) -> None:
    asyncio.run(run(str(tmp_path), mode, weights, WIRES["cuda_ipc"]))


@pytest.mark.parametrize("arena_nbytes", [0, 1 << 17], ids=["whole", "ring"])
@pytest.mark.parametrize("mode", [UpdateMode.IN_PLACE, UpdateMode.STAGED])
@pytest.mark.parametrize("wire", [name for name in WIRES if name != "cuda_ipc"])
def test_engines_on_gpus_hold_the_full_tensors_over_network_transports(
    tmp_path: object, wire: str, mode: UpdateMode, arena_nbytes: int
) -> None:
    needs(wire)
    asyncio.run(run(str(tmp_path), mode, "on GPU", WIRES[wire], arena_nbytes))


async def run(
    folder: str, mode: UpdateMode, weights: str, wire: TransportConfig, arena_nbytes: int = 0
) -> None:
    config = ControlConfig(mode=mode, min_engines=2)
    trainers = [f"trainer{rank}" for rank in range(NUM_TRAINERS)]
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        with Fleet(controller.url, wire) as fleet:
            fleet.start_engines()
            for rank, name in enumerate(trainers):
                store = f"{folder}/store"
                fleet.start(name, train, rank, controller.url, store, weights, wire, arena_nbytes)
            for name in ENGINES:
                assert await fleet.receive(name) == ("ready",)
            full: dict[str, torch.Tensor] = {}
            for version in range(3):
                found = [await fleet.receive(name) for name in trainers]
                assert found[0][0] == version
                # The trainers continue at once, so the test reads the engines only at the end.
                full = found[0][2]
            fleet.start_engine("late", torch.bfloat16, torch.cuda.device_count() - 1)
            assert await fleet.receive("late") == ("ready",)
            caught_up = asyncio.Event()

            def look() -> None:
                if len(controller.coordinator.routable()) == 3:
                    caught_up.set()

            controller.coordinator.subscribe(look)
            look()
            async with asyncio.timeout(60):
                await caught_up.wait()
            for name, dtype in (ENGINES | {"late": torch.bfloat16}).items():
                fleet.send(name, message=True)
                version, held = await fleet.receive(name)
                assert version == 2
                for parameter, truth in full.items():
                    assert torch.equal(held[parameter], truth.to(dtype)), (name, parameter)
                fleet.send(name, message=False)
            for name in trainers:
                fleet.send(name, "end")
            await fleet.join()
