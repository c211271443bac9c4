"""What a rank says it holds is what it holds: every placement, uneven sizes, real processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from windlass.errors import UnsupportedLayout
from windlass.frameworks.dtensor import describe_module, local_shard, local_tensor
from windlass.layout.manifest import Role

WORLD_SIZE = 4
SHAPES = ((8, 6), (10, 6), (7, 6), (3, 5))  # even, uneven, uneven twice, fewer rows than ranks


def distinct(*shape: int) -> torch.Tensor:
    """Every element another value."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


class TwoLayers(torch.nn.Module):
    """One layer that is cut by columns, one by rows."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(cols, rows)
        self.down = torch.nn.Linear(rows, cols, bias=False)
        for parameter in self.parameters():
            parameter.data = distinct(*parameter.shape)


def check_module(module: torch.nn.Module, full: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        check_parameter(parameter, full[name])


def check_parameter(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """The described box of the original tensor equals local memory, and torch agrees."""
    shard = local_shard(parameter)
    box = tuple(
        slice(offset, offset + size)
        for offset, size in zip(shard.box.offsets, shard.box.sizes, strict=True)
    )
    assert shard.global_shape == tuple(full.shape)
    assert torch.equal(full[box], local_tensor(parameter))
    if isinstance(parameter, DTensor):
        assert torch.equal(parameter.full_tensor(), full)


def originals(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def check_tensor_parallel_then_fsdp(mesh: DeviceMesh) -> None:
    for rows, cols in SHAPES:
        module = TwoLayers(rows, cols)
        full = originals(module)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(module, mesh["tp"], plan)
        fully_shard(module, mesh=mesh["dp"])
        check_module(module, full)


def check_replicated_fsdp(mesh: DeviceMesh) -> None:
    for rows, cols in SHAPES:
        module = TwoLayers(rows, cols)
        full = originals(module)
        fully_shard(module, mesh=mesh)
        check_module(module, full)


def check_plain_fsdp(mesh: DeviceMesh) -> None:
    flat = init_device_mesh("cpu", (WORLD_SIZE,))
    for rows, cols in SHAPES:
        module = TwoLayers(rows, cols)
        full = originals(module)
        fully_shard(module, mesh=flat)
        check_module(module, full)
        manifest = describe_module(module, f"trainer/{dist.get_rank()}", Role.TRAINER)
        held = torch.tensor([sum(shard.box.numel for shard in manifest.shards())])
        dist.all_reduce(held)
        assert int(held) == sum(tensor.numel() for tensor in full.values())
    del mesh


def check_any_placements(mesh: DeviceMesh) -> None:
    choices = (Replicate(), Shard(0), Shard(1), Shard(-1))
    for placements in itertools.product(choices, repeat=2):
        for shape in SHAPES:
            full = distinct(*shape)
            check_parameter(distribute_tensor(full, mesh, placements), full)


def check_partial_is_refused(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(distinct(4, 4), mesh, (Partial(), Replicate()), run_check=False)
    with pytest.raises(UnsupportedLayout, match="no plain part"):
        local_shard(tensor)


CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    "tensor_parallel_then_fsdp": check_tensor_parallel_then_fsdp,
    "replicated_fsdp": check_replicated_fsdp,
    "plain_fsdp": check_plain_fsdp,
    "any_placements": check_any_placements,
    "partial_is_refused": check_partial_is_refused,
}


def run_rank(rank: int, store: str, failures: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, check in CHECKS.items():
        try:
            check(mesh)
        except AssertionError as error:
            Path(failures, f"{name}.{rank}").write_text(str(error))
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every check once, on four real ranks."""
    directory = tmp_path_factory.mktemp("dtensor")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(run_rank, (str(directory / "store"), str(directory)), nprocs=WORLD_SIZE)  # type: ignore[attr-defined,no-untyped-call]
    return directory


@pytest.mark.parametrize("name", CHECKS)
def test_every_rank_describes_what_it_holds(failures: Path, name: str) -> None:
    found = {path.name: path.read_text() for path in failures.glob(f"{name}.*")}
    assert found == {}
