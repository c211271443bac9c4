"""Every update backend with weights on GPUs, between real processes."""

from __future__ import annotations

import asyncio
import multiprocessing
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import weight_fleet
import weight_rank
from live_fleet import needs
from safetensors.torch import save_file
from test_backends import DEADLINES
from weight_fleet import TOKEN, running_fleet

import windlass
from windlass.config import (
    CollectiveFabric,
    ControlConfig,
    DiskBackend,
    P2pBackend,
    RelayShape,
    UpdateBackend,
    UpdateMode,
    XcclBackend,
)

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
]
FABRICS = [
    pytest.param(
        fabric,
        marks=pytest.mark.skipif(
            NUM_GPUS < 2 and fabric is CollectiveFabric.NCCL, reason="NCCL needs a GPU per member"
        ),
    )
    for fabric in CollectiveFabric
]


@pytest.fixture(autouse=True)
def _spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawn the ranks. A rank of a fork server cannot use CUDA if an imported package has used CUDA in the fork server."""
    monkeypatch.setattr(weight_fleet, "PROCESSES", multiprocessing.get_context("spawn"))


def fleet_on_gpus(
    backend: UpdateBackend,
    mode: UpdateMode,
    num_trainers: int,
    transport: str = "cuda_ipc",
    **common: Any,
) -> AbstractAsyncContextManager[Any]:
    """Put trainers on the first GPU and engines on the last, so that ranks of a group share no GPU."""
    config = ControlConfig(mode=mode, backend=backend, deadlines=DEADLINES, max_rewrites=1)
    engines = dict.fromkeys(("one", "halves", "newcomer"), f"cuda:{NUM_GPUS - 1}")
    return running_fleet(
        config,
        num_trainers,
        devices={"trainer": "cuda:0", **engines},
        transport=transport,
        **common,
    )


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("fabric", FABRICS)
async def test_broadcasts_deliver_every_byte_from_gpu_to_gpu(
    mode: UpdateMode, fabric: CollectiveFabric
) -> None:
    """Use buckets that cut rows: NCCL with one trainer and one engine, gloo with three and two."""
    backend = XcclBackend(bucket_nbytes=1024, fabric=fabric)
    is_nccl = fabric is CollectiveFabric.NCCL
    async with fleet_on_gpus(backend, mode, 1 if is_nccl else 3) as fleet:
        fleet.add_trainers()
        fleet.add_engine("one")
        if not is_nccl:
            fleet.add_engine("halves", 2)
        await fleet.ready()
        for version in range(3):
            assert (await fleet.publish(version))[:2] == ("published", [])
            assert await fleet.held("one") == [(version, str(version), False)]
            if not is_nccl:
                assert await fleet.held("halves") == [(version, str(version), False)] * 2


@pytest.mark.parametrize(
    "fabric",
    [
        CollectiveFabric.GLOO,
        pytest.param(
            CollectiveFabric.NCCL,
            marks=pytest.mark.skip(
                "the trainer's communicator is not released in time: docs/backends.md"
            ),
        ),
    ],
)
async def test_an_engine_killed_during_a_broadcast_releases_the_trainer(
    fabric: CollectiveFabric,
) -> None:
    """Kernels of the trainer wait for the dead engine until the group is aborted."""
    backend = XcclBackend(bucket_nbytes=1024, fabric=fabric)
    async with fleet_on_gpus(backend, UpdateMode.STAGED, 1) as fleet:
        fleet.add_trainers()
        fleet.add_engine("one", 1, "die")
        await fleet.ready()
        update = asyncio.create_task(fleet.publish(0))
        await asyncio.to_thread(fleet.engines["one"][0].process.join, 60)
        fleet.add_engine("newcomer")
        assert (await update)[:2] == ("published", [])
        assert await fleet.engines["newcomer"][0].read() == "ready"
        assert await fleet.held("newcomer") == [(0, "0", False)]
        assert (await fleet.publish(1))[:2] == ("published", [])
        assert await fleet.held("newcomer") == [(1, "1", False)]


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("transport", ["cuda_ipc", "pull"])
async def test_trainers_publish_out_of_and_into_expandable_segments(
    transport: str, mode: UpdateMode
) -> None:
    async with fleet_on_gpus(P2pBackend(), mode, 3, transport, expandable=True) as fleet:
        fleet.add_trainers()
        fleet.add_engine("halves", 2)
        fleet.add_engine("one")
        await fleet.ready()
        for version in range(3):
            assert (await fleet.publish(version))[:2] == ("published", [])
            assert await fleet.held("halves") == [(version, str(version), False)] * 2
            assert await fleet.held("one") == [(version, str(version), False)]


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_files_are_written_from_and_read_into_gpu_memory(
    tmp_path: Path, mode: UpdateMode
) -> None:
    async with fleet_on_gpus(DiskBackend(folder=str(tmp_path)), mode, 3) as fleet:
        fleet.add_trainers()
        fleet.add_engine("halves", 2)
        fleet.add_engine("one")
        await fleet.ready()
        for version in range(2):
            assert (await fleet.publish(version))[:2] == ("published", [])
            assert await fleet.held("halves") == [(version, str(version), False)] * 2
            assert await fleet.held("one") == [(version, str(version), False)]


def drive(url: str, fabric: CollectiveFabric, device: str, folder: Path) -> None:
    """Publish two versions by broadcast, in two buckets each, and one from checkpoint files."""
    if device != "cpu":
        torch.cuda.set_device(device)
    with windlass.RolloutCallback(url, TOKEN, deadline_s=30.0) as head:
        head.pause_generation()
        group = windlass.WeightGroup(
            head, "weights", bucket_nbytes=1 << 16, fabric=fabric, deadline_s=30.0
        )
        for version in range(2):
            if version:
                head.pause_generation()
            whole = weight_rank.truth(version)
            for names in (("embed", "norm"), ("down", "gate")):
                group.broadcast({n: torch.from_numpy(whole[n]).to(device) for n in names})
            head.continue_generation(version)
        group.close()
        head.pause_generation()
        save_file(
            {n: torch.from_numpy(w) for n, w in weight_rank.truth(2).items()},
            folder / "model.safetensors",
        )
        head.update_weights_from_disk(str(folder)).result(30)
        head.continue_generation(2)


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_trainer_that_drives_its_updates_fills_gpu_memory(
    tmp_path: Path, fabric: CollectiveFabric
) -> None:
    async with fleet_on_gpus(P2pBackend(), UpdateMode.IN_PLACE, 1) as fleet:
        fleet.add_engine("one")
        if fabric is CollectiveFabric.GLOO:
            fleet.add_engine("halves", 2)
        await fleet.ready()
        await asyncio.to_thread(drive, fleet.url, fabric, "cuda:0", tmp_path)
        assert await fleet.held("one") == [(2, "2", False)]
        if fabric is CollectiveFabric.GLOO:
            assert await fleet.held("halves") == [(2, "2", False)] * 2


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_a_newcomer_on_a_gpu_catches_up_from_an_engine(mode: UpdateMode) -> None:
    async with fleet_on_gpus(P2pBackend(), mode, 2, can_send=True) as fleet:
        fleet.add_trainers()
        fleet.add_engine("halves", 2)
        await fleet.ready()
        assert (await fleet.publish(4))[:2] == ("published", [])
        fleet.add_engine("newcomer")
        for rank in fleet.engines["newcomer"]:
            assert await rank.read() == "ready"
        async with asyncio.timeout(30):
            while await fleet.held("newcomer") != [(4, "4", False)]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


TOLD = {
    "nixl": '{"type": "nixl", "host": "127.0.0.1"}',
    "nixl over TCP": '{"type": "nixl", "host": "127.0.0.1", "wire": "tcp"}',
    "mooncake over TCP": '{"type": "mooncake", "host": "127.0.0.1", "protocol": "tcp"}',
}
"""The wires of `live_fleet.WIRES`, for processes that read theirs from settings."""


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("wire", ["nixl", "nixl over TCP", "mooncake over TCP"])
async def test_engines_relay_verified_bytes_from_gpu_memory(wire: str, mode: UpdateMode) -> None:
    """Trainers send one copy. The GPU computes the digests of chunks and links."""
    needs(wire)
    backend = P2pBackend(relay=RelayShape.TREE, relay_chunk_nbytes=4096)
    config = ControlConfig(mode=mode, backend=backend, deadlines=DEADLINES, min_engines=3)
    names = ("a", "b", "c")
    devices = {"trainer": "cuda:0"} | dict.fromkeys(names, f"cuda:{NUM_GPUS - 1}")
    async with running_fleet(
        config, 2, scale=8, devices=devices, transport=TOLD[wire], can_send=True
    ) as fleet:
        fleet.add_trainers()
        for name in names:
            fleet.add_engine(name, 2)
        await fleet.ready()
        # Both ranks of an engine hold the norm.
        nbytes = weight_rank.model_nbytes(8) + weight_rank.truth(0, 8)["norm"].nbytes
        for version in range(2):
            assert await fleet.publish(version) == ("published", [], nbytes)
            for name in names:
                assert await fleet.held(name) == [(version, str(version), False)] * 2
        assert await fleet.relayed() == 2 * (len(names) - 1) * nbytes
