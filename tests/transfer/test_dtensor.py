"""A rank's description equals its memory for every placement and uneven sizes, in real processes."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from windlass.errors import (
    ConfigError,
    ManifestError,
    UnsupportedLayout,
    WindlassError,
)
from windlass.layout.manifest import Role
from windlass.layout.naming.stacked import TRANSFORMERS_EXPERTS
from windlass.transfer.dtensor import (
    LiveTensors,
    describe_module,
    held_tensors,
    local_shard,
    local_tensor,
    own_tensors,
    parameter_addresses,
)

WORLD_SIZE = 4
# Rows are even, uneven, uneven over both mesh axes, and fewer than the ranks.
SHAPES = ((8, 6), (10, 6), (7, 6), (3, 5))


def distinct(*shape: int) -> torch.Tensor:
    """Return distinct elements."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


class TwoLayers(torch.nn.Module):
    """Two layers, to be cut by columns and by rows."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(cols, rows)
        self.down = torch.nn.Linear(rows, cols, bias=False)
        for parameter in self.parameters():
            parameter.data = distinct(*parameter.shape)


def check_module(module: torch.nn.Module, full: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        check_parameter(parameter, full[name], by_fsdp=isinstance(module, FSDPModule))


def check_parameter(parameter: torch.Tensor, full: torch.Tensor, *, by_fsdp: bool = False) -> None:
    """Check that the described box of the original equals local memory, and that torch agrees."""
    shard = local_shard("w", parameter, by_fsdp=by_fsdp)
    box = tuple(
        slice(offset, offset + size)
        for offset, size in zip(shard.box.offsets, shard.box.sizes, strict=True)
    )
    assert shard.shape == tuple(full.shape)
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


def check_steps_and_writes_are_told(mesh: DeviceMesh) -> None:
    module = TwoLayers(*SHAPES[0])
    fully_shard(module, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    live = LiveTensors((module,), lambda: own_tensors(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live.locate()
    assert not live.changed()
    optimizer.step()
    assert live.changed()
    live.locate()
    assert not live.changed()
    local_tensor(module.up.weight).zero_()
    assert live.changed()
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
    """Stacked experts as in transformers and torchtitan."""

    def __init__(self, num_experts: int, inner: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(distinct(num_experts, 2 * inner, hidden))
        self.down_proj = torch.nn.Parameter(-distinct(num_experts, hidden, inner))


def check_experts(module: torch.nn.Module, full: dict[str, torch.Tensor], inner: int) -> None:
    """Check that every box of every expert's matrix equals the memory that its shard names."""
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
    # This mesh is separate, because torch takes shortcuts over flattened axes in later
    # redistributions.
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


class Mixed(torch.nn.Module):
    """Rows cut evenly, as torch requires in a mesh out of order, and rows cut unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.even = torch.nn.Parameter(distinct(8, 12))
        self.odd = torch.nn.Parameter(-distinct(7, 4))


def check_meshes_that_do_not_ascend(mesh: DeviceMesh) -> None:
    turned = DeviceMesh("cpu", [3, 1, 0, 2], mesh_dim_names=("dp",))
    module = Mixed()
    full = originals(module)
    fully_shard(module, mesh=turned)
    check_module(module, full)
    for grid in ([[3, 1], [0, 2]], [[1, 0], [3, 2]], [[2, 3], [0, 1]]):
        both = DeviceMesh("cpu", grid, mesh_dim_names=("dp", "tp"))
        module = Mixed()
        full = originals(module)
        # This mesh has replicas of shards.
        fully_shard(module, mesh=both)
        check_module(module, full)
        layers = TwoLayers(8, 12)
        full = originals(layers)
        parallelize_module(layers, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layers, mesh=both["dp"])
        if grid[0] != [3, 1]:
            check_module(layers, full)
        else:
            # Ranks 0 and 1 hold the same quarter, and no rank holds the second.
            with pytest.raises(
                UnsupportedLayout, match=r"parameter 'w': .* must have the same order in all lines"
            ):
                local_shard("w", layers.up.weight, by_fsdp=True)
        for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
            whole = distinct(8, 12)
            tensor = distribute_tensor(whole, both, placements)
            if grid[0] != [3, 1] or not any(p.is_shard() for p in placements):
                check_parameter(tensor, whole)
                continue
            # Rank 3 is the second of 0 and 3, and of 1 and 3. Rank 1 is the first of 1 and 2.
            with pytest.raises(
                UnsupportedLayout, match=r"parameter 'w': .* must have the same order in all lines"
            ):
                local_shard("w", tensor)
    del mesh


def check_uneven_shards_of_a_turned_mesh_are_exact_or_refused(mesh: DeviceMesh) -> None:
    """Torch scatters by group rank but removes the padding by position in the mesh."""
    turned = DeviceMesh("cpu", [3, 1, 0, 2])
    refused = 0
    for rows in (5, 6, 7, 9, 10):
        whole = distinct(rows, 3)
        tensor = distribute_tensor(whole, turned, [Shard(0)])
        try:
            shard = local_shard("w", tensor)
        except ManifestError:
            refused += 1
            continue
        begin, end = shard.box.offsets[0], shard.box.ends[0]
        assert torch.equal(whole[begin:end], tensor.to_local())
    counts = torch.tensor([refused])
    dist.all_reduce(counts)
    assert int(counts) > 0
    del mesh


def check_another_shape_of_as_many_elements_is_refused(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(distinct(4, 3), mesh["tp"], [Shard(0)], run_check=False)
    assert tuple(tensor.shape) == (8, 3)
    tensor._local_tensor = distinct(3, 4)
    with pytest.raises(ManifestError, match=r"parameter 'w': .* got shape \(3, 4\)"):
        local_shard("w", tensor)


def check_the_order_of_cuts_is_read(mesh: DeviceMesh) -> None:
    whole = distinct(8, 4)
    start = distribute_tensor(whole, mesh, [Replicate(), Replicate()])
    spec = DTensorSpec(
        mesh,
        (Shard(0), Shard(0)),
        tensor_meta=start._spec.tensor_meta,
        shard_order=(ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),),
    )
    local = redistribute_local_tensor(start.to_local(), start._spec, spec)
    tensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    check_parameter(tensor, whole)


def check_a_mesh_without_this_rank_holds_nothing(mesh: DeviceMesh) -> None:
    pair = DeviceMesh("cpu", [1, 3])
    module = torch.nn.Linear(6, 4, bias=False)
    whole = distinct(4, 6)
    module.weight = torch.nn.Parameter(distribute_tensor(whole, pair, [Shard(0)]))
    module.register_buffer("scale", distinct(3))
    manifest = describe_module(module, f"trainer/{dist.get_rank()}", Role.TRAINER)
    held = {shard.tensor: shard.box for shard in manifest.shards()}
    assert held["scale"].sizes == (3,)
    inside = dist.get_rank() in (1, 3)
    assert ("weight" in held) == inside
    assert len(parameter_addresses(module)) == len(manifest.parameters)
    if inside:
        begin, end = held["weight"].offsets[0], held["weight"].ends[0]
        assert torch.equal(whole[begin:end], local_tensor(module.weight))
    else:
        assert local_shard("w", module.weight).box.numel == 0
    del mesh


CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    "tensor_parallel_then_fsdp": check_tensor_parallel_then_fsdp,
    "replicated_fsdp": check_replicated_fsdp,
    "plain_fsdp": check_plain_fsdp,
    "steps_and_writes_are_told": check_steps_and_writes_are_told,
    "expert_parallel_then_fsdp": check_expert_parallel_then_fsdp,
    "context_parallel_ranks_join_the_fsdp_axis": check_context_parallel_ranks_join_the_fsdp_axis,
    "gathered_parameters_are_not_mistaken": check_gathered_parameters_are_not_mistaken_for_shards,
    "any_placements": check_any_placements,
    "partial_is_refused": check_partial_is_refused,
    "meshes_that_do_not_ascend": check_meshes_that_do_not_ascend,
    "uneven_shards_of_a_turned_mesh": check_uneven_shards_of_a_turned_mesh_are_exact_or_refused,
    "another_shape_of_as_many_elements": check_another_shape_of_as_many_elements_is_refused,
    "the_order_of_cuts": check_the_order_of_cuts_is_read,
    "a_mesh_without_this_rank": check_a_mesh_without_this_rank_holds_nothing,
}


def run_rank(rank: int, store: str, failures: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, check in CHECKS.items():
        try:
            check(mesh)
        except (AssertionError, WindlassError, pytest.fail.Exception) as error:
            Path(failures, f"{name}.{rank}").write_text("".join(traceback.format_exception(error)))
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every check once on four real ranks."""
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
def test_every_rank_describes_its_own_shards(failures: Path, name: str) -> None:
    found = {path.name: path.read_text() for path in failures.glob(f"{name}.*")}
    assert found == {}


class Block(torch.nn.Module):
    """Module with parameters, both kinds of buffers, and a tied weight."""

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


def test_names_omit_wrappers_and_persistent_buffers_are_included() -> None:
    bare = describe_module(torch.nn.Sequential(Block()), "trainer/0", Role.TRAINER)
    names = [spec.name for spec in bare.tensors]
    assert names == ["0.inner.weight", "0.inner.bias", "0.bias_correction"]
    assert dict(bare.aliases) == {"0.head.weight": "0.inner.weight"}
    wrapped = torch.nn.Sequential(torch.compile(checkpoint_wrapper(Block())))  # type: ignore[call-overload]
    found = describe_module(wrapped, "trainer/0", Role.TRAINER)
    assert [spec.name for spec in found.tensors] == names
    assert len(parameter_addresses(wrapped)) == len(found.parameters)


def test_names_omit_data_parallel_wrappers_but_keep_modules_called_module() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        block = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.compile(block))
        found = describe_module(wrapped, "trainer/0", Role.TRAINER)
        assert [spec.name for spec in found.tensors] == ["module.weight", "module.bias"]
    finally:
        dist.destroy_process_group()


def test_a_name_map_leaves_out_tensors_mapped_to_none() -> None:
    block = Block()
    keep = {"bias_correction": "kept"}.get
    found = describe_module(block, "trainer/0", Role.TRAINER, name_map=keep)
    assert [spec.name for spec in found.tensors] == ["kept"]
    assert parameter_addresses(block, keep) == (block.get_buffer("bias_correction").data_ptr(),)


def test_two_parameters_of_one_name_are_refused_unless_they_are_one_object() -> None:
    two = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})

    def same(name: str) -> str:
        return name.removeprefix("a.").removeprefix("b.")

    with pytest.raises(ConfigError, match=r"got 'weight' for both 'a.weight' and 'b.weight'"):
        describe_module(two, "trainer/0", Role.TRAINER, name_map=same)
    two["b"] = two["a"]
    assert len(describe_module(two, "trainer/0", Role.TRAINER, name_map=same).parameters) == 2


class OfOthers(torch.Tensor):
    """Tensor subclass that wraps other tensors, as quantised ones do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OfOthers:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor) -> None:
        self.made_of = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return OfOthers(args[0].made_of)


def test_a_tensor_without_its_own_memory_is_refused_in_its_description() -> None:
    module = torch.nn.Module()
    module.register_buffer("values", OfOthers(distinct(4, 4)))
    with pytest.raises(
        UnsupportedLayout, match=r"'values'.* got a OfOthers without memory of its own"
    ):
        describe_module(module, "engine/0", Role.ENGINE)
    assert not describe_module(module, "trainer/0", Role.TRAINER).parameters


def test_parameters_with_gaps_are_described_and_read_and_written() -> None:
    buffer = distinct(5, 8)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(buffer[:, :6])
    found = describe_module(module, "engine/0", Role.ENGINE)
    assert found.parameters[0].nbytes == (4 * 8 + 6) * 4
    assert found.parameters[0].padding_nbytes == 4 * 2 * 4
    assert found.nbytes == 5 * 6 * 4


@pytest.mark.parametrize("rows", [38, 50])
def test_an_uneven_strided_shard_that_distribute_tensor_made_is_exact_or_refused(
    rows: int,
) -> None:
    """One of 16 ranks has as many rows as FSDP2 would give it, but other rows."""
    whole, outcomes = distinct(rows, 2), []
    for rank in range(16):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
        try:
            mesh = init_device_mesh("cpu", (4, 4))
            placements = [_StridedShard(0, split_factor=4), Shard(0)]
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            try:
                box = local_shard("w", tensor).box
            except UnsupportedLayout as error:
                outcomes.append(type(error).__name__)
                continue
            rows_held = whole[box.offsets[0] : box.ends[0]]
            assert torch.equal(rows_held, tensor.to_local()) or not box.numel
            outcomes.append("exact")
        finally:
            dist.destroy_process_group()
    assert set(outcomes) == {"exact", "UnsupportedLayout"}
