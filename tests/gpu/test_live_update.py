"""The main job on GPUs: FSDP2 ranks publish into live engines, over NVLink and as between hosts."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import windlass
from windlass.config import ControlConfig, UpdateMode
from windlass.engines.client import EngineClient
from windlass.errors import TransportUnavailable
from windlass.frameworks.dtensor import describe_module, parameter_addresses
from windlass.layout.manifest import Role
from windlass.testing.resting_engine import RestingEngine
from windlass.transports.configs import (
    CudaIpcConfig,
    MooncakeConfig,
    MooncakeProtocol,
    NixlConfig,
    NixlWire,
    TransportConfig,
)
from windlass.transports.registry import create_transport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
TOKEN = "secret of the test"
NUM_TRAINERS = 2
HERE = "127.0.0.1"
WIRES: dict[str, TransportConfig] = {
    "cuda_ipc": CudaIpcConfig(),
    "nixl": NixlConfig(host=HERE),
    "nixl over TCP": NixlConfig(host=HERE, wire=NixlWire.TCP),
    "mooncake over TCP": MooncakeConfig(host=HERE, protocol=MooncakeProtocol.TCP),
}
"""Each rank's GPU is filled in."""


def build() -> torch.nn.Sequential:
    """A decoder-like stack with uneven sizes."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Embedding(1000, 72),
        torch.nn.Linear(72, 200, bias=True),
        torch.nn.GELU(),
        torch.nn.Linear(200, 72, bias=False),
        torch.nn.LayerNorm(72),
        torch.nn.Linear(72, 1000, bias=False),
    )


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
            report = trainer.publish(version)  # the step may still be running on the GPU
            full = {
                name: parameter.full_tensor().detach().cpu()
                for name, parameter in model.named_parameters()
                if isinstance(parameter, DTensor)
            }
            pipe.send((version, report.wire_s, full if rank == 0 else {}))
        pipe.recv()
    dist.destroy_process_group()


def serve(
    name: str,
    device: int,
    dtype: torch.dtype,
    url: str,
    wire: TransportConfig,
    pipe: Connection,
) -> None:
    torch.cuda.set_device(device)
    model = build().to(dtype).cuda().requires_grad_(requires_grad=False)
    manifest = describe_module(model, f"{name}/0", Role.ENGINE)
    addresses = parameter_addresses(model)
    transport = create_transport(wire, memory_at=addresses[0])
    regions = [
        transport.register(address, spec.nbytes)
        for address, spec in zip(addresses, manifest.parameters, strict=True)
    ]
    with EngineClient(
        manifest=manifest,
        addresses=addresses,
        regions=regions,
        transport=transport,
        hooks=RestingEngine(),
        controller=url,
        token=TOKEN,
        group=name,
        url="http://nowhere",
    ) as client:
        pipe.send("ready")
        while pipe.recv():
            torch.cuda.synchronize()
            held = {n: p.detach().cpu() for n, p in model.named_parameters()}
            pipe.send((client.agent.served_version, held))


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
def test_the_same_over_wires_that_reach_other_hosts(
    tmp_path: object, wire: str, mode: UpdateMode, arena_nbytes: int
) -> None:
    try:
        create_transport(WIRES[wire], memory_at=torch.zeros(1, device="cuda").data_ptr()).close()
    except TransportUnavailable as error:
        pytest.skip(str(error))
    asyncio.run(run(str(tmp_path), mode, "on GPU", WIRES[wire], arena_nbytes))


async def run(
    folder: str, mode: UpdateMode, weights: str, wire: TransportConfig, arena_nbytes: int = 0
) -> None:
    context = mp.get_context("spawn")
    processes, pipes = [], {}

    def start(name: str, target: object, *arguments: object) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*arguments, theirs))  # type: ignore[arg-type]
        process.start()
        processes.append(process)
        pipes[name] = ours

    async def receive(name: str) -> object:
        ready = await asyncio.to_thread(pipes[name].poll, 120)
        assert ready, f"{name} does not answer"
        return pipes[name].recv()

    dtypes = {"exact": torch.float32, "cast": torch.bfloat16}
    config = ControlConfig(mode=mode, min_engines=2)
    try:
        async with windlass.Controller(token=TOKEN, config=config) as controller:
            for index, (name, dtype) in enumerate(dtypes.items()):
                device = (NUM_TRAINERS + index) % torch.cuda.device_count()
                start(name, serve, name, device, dtype, controller.url, wire)
            for rank in range(NUM_TRAINERS):
                start(
                    f"trainer{rank}", train, rank, controller.url, f"{folder}/store", weights, wire,
                    arena_nbytes,
                )  # fmt: skip
            for name in dtypes:
                assert await receive(name) == "ready"
            full: dict[str, torch.Tensor] = {}
            for version in range(3):
                found = [await receive(f"trainer{rank}") for rank in range(NUM_TRAINERS)]
                assert isinstance(found[0], tuple)
                assert found[0][0] == version
                full = found[0][2]  # trainers go on at once: engines are looked at in the end
            newcomer = {"late": torch.bfloat16}
            device = torch.cuda.device_count() - 1
            start("late", serve, "late", device, torch.bfloat16, controller.url, wire)
            assert await receive("late") == "ready"
            caught_up = asyncio.Event()

            def look() -> None:
                if len(controller.coordinator.routable()) == 3:
                    caught_up.set()

            controller.coordinator.subscribe(look)
            look()
            async with asyncio.timeout(60):
                await caught_up.wait()
            for name, dtype in (dtypes | newcomer).items():
                pipes[name].send(True)
                held = await receive(name)
                assert isinstance(held, tuple)
                assert held[0] == 2
                for parameter, truth in full.items():
                    assert torch.equal(held[1][parameter], truth.to(dtype)), (name, parameter)
                pipes[name].send(False)
            for rank in range(NUM_TRAINERS):
                pipes[f"trainer{rank}"].send("end")
            for process in processes:
                await asyncio.to_thread(process.join, 60)
    finally:
        for process in processes:
            process.kill()
            process.join()
