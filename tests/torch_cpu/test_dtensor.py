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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from windlass.errors import UnsupportedLayout
from windlass.frameworks.dtensor import (
    describe_module,
    held_tensors,
    local_shard,
    local_tensor,
    parameter_addresses,
)
from windlass.layout.manifest import Role
from windlass.layout.naming.stacked import TRANSFORMERS_EXPERTS

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
    shard = local_shard("w", parameter)
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
    with pytest.raises(UnsupportedLayout, match=r"parameter 'w': .* no plain part"):
        local_shard("w", tensor)


class Experts(torch.nn.Module):
    """Stacked experts, as transformers and torchtitan hold them."""

    def __init__(self, num_experts: int, inner: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(distinct(num_experts, 2 * inner, hidden))
        self.down_proj = torch.nn.Parameter(-distinct(num_experts, hidden, inner))


def check_experts(module: torch.nn.Module, full: dict[str, torch.Tensor], inner: int) -> None:
    """Every box of every expert's matrix equals the memory that is said to hold it."""
    names = {"gate_up_proj": "model.layers.0.mlp.experts.gate_up_proj", "down_proj": "model.layers.0.mlp.experts.down_proj"}  # fmt: skip
    manifest = describe_module(module, f"trainer/{dist.get_rank()}", Role.TRAINER, name_map=names.get, stacked=TRANSFORMERS_EXPERTS)  # fmt: skip
    memory = {held.name: local_tensor(held.tensor) for held in held_tensors(module)}
    num_elements = 0
    for shard in manifest.shards():
        expert, kind = shard.tensor.removeprefix("model.layers.0.mlp.experts.").split(".")[:2]
        of_expert = full[shard.parameter][int(expert)]
        want = {"gate_proj": of_expert[:inner], "up_proj": of_expert[inner:], "down_proj": of_expert}[kind]  # fmt: skip
        strides = [step // 4 for step in shard.strides_bytes]
        local = memory[shard.parameter]
        have = local.as_strided(
            shard.box.sizes, strides, local.storage_offset() + shard.offset_bytes // 4
        )
        box = tuple(slice(o, e) for o, e in zip(shard.box.offsets, shard.box.ends, strict=True))
        assert torch.equal(have, want[box])
        num_elements += have.numel()
    assert num_elements == sum(local.numel() for local in memory.values())


def check_expert_parallel_then_fsdp(mesh: DeviceMesh) -> None:
    for num_experts, inner, hidden in ((8, 3, 5), (6, 4, 4), (2, 5, 3)):
        for dim in (0, 1, 2):
            module = Experts(num_experts, inner, hidden)
            full = originals(module)
            for name, parameter in list(module.named_parameters()):
                cut = distribute_tensor(parameter.detach(), mesh["tp"], [Shard(0)])
                module.register_parameter(name, torch.nn.Parameter(cut))
            try:
                fully_shard(module, mesh=mesh["dp"], shard_placement_fn=lambda _, d=dim: Shard(d))  # type: ignore[misc]
            except (NotImplementedError, AssertionError, ValueError):
                assert dim != 0, "FSDP2 refuses some uneven cuts of other dims"
                continue
            check_module(module, full)
            check_experts(module, full, inner)


def check_context_parallel_ranks_join_the_fsdp_axis(mesh: DeviceMesh) -> None:
    # A mesh of its own: torch takes short cuts over flattened axes in later redistributions.
    joined = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))._flatten("dp_cp")
    for rows, cols in SHAPES:
        module = TwoLayers(rows, cols)
        full = originals(module)
        fully_shard(module, mesh=joined)
        check_module(module, full)
    del mesh


def check_gathered_parameters_are_not_mistaken_for_shards(mesh: DeviceMesh) -> None:
    flat = init_device_mesh("cpu", (WORLD_SIZE,))
    module = TwoLayers(10, 6)
    fully_shard(module, mesh=flat)
    before = describe_module(module, "trainer/0", Role.TRAINER).digest()
    module.unshard()  # type: ignore[operator]
    assert not isinstance(module.up.weight, DTensor)
    assert describe_module(module, "trainer/0", Role.TRAINER).digest() == before
    module.unshard()  # type: ignore[operator]
    addresses = parameter_addresses(module)
    assert isinstance(module.up.weight, DTensor)
    assert addresses == tuple(p.to_local().data_ptr() for p in module.parameters())  # type: ignore[attr-defined]
    del mesh


CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    "tensor_parallel_then_fsdp": check_tensor_parallel_then_fsdp,
    "replicated_fsdp": check_replicated_fsdp,
    "plain_fsdp": check_plain_fsdp,
    "expert_parallel_then_fsdp": check_expert_parallel_then_fsdp,
    "context_parallel_ranks_join_the_fsdp_axis": check_context_parallel_ranks_join_the_fsdp_axis,
    "gathered_parameters_are_not_mistaken": check_gathered_parameters_are_not_mistaken_for_shards,
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
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        run_rank,
        (str(directory / "store"), str(directory)),
        nprocs=WORLD_SIZE,
        start_method="forkserver",
    )
    return directory


@pytest.mark.parametrize("name", CHECKS)
def test_every_rank_describes_what_it_holds(failures: Path, name: str) -> None:
    found = {path.name: path.read_text() for path in failures.glob(f"{name}.*")}
    assert found == {}


class Block(torch.nn.Module):
    """Parameters, buffers of both kinds and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 3, bias=False)
        self.head.weight = self.inner.weight
        self.register_buffer("bias_correction", torch.arange(4.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(x))
        return out


def test_wrappers_leave_no_trace_in_names_and_persistent_buffers_are_held() -> None:
    bare = describe_module(torch.nn.Sequential(Block()), "trainer/0", Role.TRAINER)
    names = [spec.name for spec in bare.tensors]
    assert names == ["0.inner.weight", "0.inner.bias", "0.bias_correction"]
    assert dict(bare.aliases) == {"0.head.weight": "0.inner.weight"}
    wrapped = torch.nn.Sequential(torch.compile(checkpoint_wrapper(Block())))  # type: ignore[call-overload]
    found = describe_module(wrapped, "trainer/0", Role.TRAINER)
    assert [spec.name for spec in found.tensors] == names
    assert len(parameter_addresses(wrapped)) == len(found.parameters)


def test_data_parallel_wrappers_are_taken_out_of_names_and_modules_called_module_are_not() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        block = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.compile(block))
        found = describe_module(wrapped, "trainer/0", Role.TRAINER)
        assert [spec.name for spec in found.tensors] == ["module.weight", "module.bias"]
    finally:
        dist.destroy_process_group()


def test_a_name_map_leaves_out_what_it_maps_to_none() -> None:
    block = Block()
    keep = {"bias_correction": "kept"}.get
    found = describe_module(block, "trainer/0", Role.TRAINER, name_map=keep)
    assert [spec.name for spec in found.tensors] == ["kept"]
    assert parameter_addresses(block, keep) == (block.get_buffer("bias_correction").data_ptr(),)
