"""For any mesh, placements and sizes, a rank's description equals its shard or is refused.

Four gloo processes carry out the drawn cases. The local shards of torch are the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from windlass.errors import ManifestError, UnsupportedLayout
from windlass.layout.box import Box
from windlass.transfer.dtensor import local_shard, local_tensor

WORLD_SIZE = 4
DEADLINE_S = 90.0


@dataclass(frozen=True)
class Case:
    """A tensor and its distribution.

    Attributes:
        ranks: ranks of the mesh, row by row, with `row` ranks per row.
        cuts: dim that each mesh axis cuts, or -1 for replicas.
        strided: whether the first axis cuts after the second, if both cut one dim.
        by_fsdp: whether FSDP2 cuts over the first axis, after the second axis distributed the
            tensor, or over the only axis.
    """

    ranks: tuple[int, ...]
    row: int
    shape: tuple[int, int]
    cuts: tuple[int, ...]
    strided: bool
    by_fsdp: bool

    @property
    def whole(self) -> torch.Tensor:
        """Distinct elements."""
        return torch.arange(math.prod(self.shape), dtype=torch.float32).reshape(self.shape)

    @property
    def placements(self) -> tuple[Placement, ...]:
        found: list[Placement] = [Replicate() if cut < 0 else Shard(cut) for cut in self.cuts]
        if self.strided and len(found) == 2 and self.cuts[0] == self.cuts[1] >= 0:
            found[0] = _StridedShard(self.cuts[0], split_factor=self.row)
        return tuple(found)

    @property
    def ascends(self) -> bool:
        return list(self.ranks) == sorted(self.ranks)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.one_of(st.just(tuple(range(4))), st.permutations(range(4)).map(tuple)))
    num_axes = draw(st.integers(1, 2))
    shape = draw(st.tuples(st.integers(1, 11), st.integers(1, 9)))
    cuts = draw(st.tuples(*[st.integers(-1, 1)] * num_axes))
    by_fsdp = draw(st.booleans())
    return Case(ranks, 4 // num_axes, shape, cuts, draw(st.booleans()), by_fsdp)


@lru_cache(maxsize=128)
def mesh_of(ranks: tuple[int, ...], row: int) -> DeviceMesh:
    grid = list(ranks) if row == 4 else [list(ranks[:row]), list(ranks[row:])]
    names = ("tp",) if row == 4 else ("dp", "tp")
    return DeviceMesh("cpu", grid, mesh_dim_names=names)


def carry_out(case: Case) -> torch.Tensor:
    mesh = mesh_of(case.ranks, case.row)
    if not case.by_fsdp:
        return distribute_tensor(case.whole, mesh, case.placements)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(case.whole)
    if len(case.cuts) == 2:
        inner = distribute_tensor(case.whole, mesh["tp"], case.placements[1:])
        module.weight = torch.nn.Parameter(inner)
        mesh = mesh["dp"]
    fully_shard(module, mesh=mesh)
    return module.get_parameter("weight")


Outcome = tuple[Box, torch.Tensor] | str


def describe(case: Case) -> Outcome:
    try:
        tensor = carry_out(case)
    except AssertionError:
        assert case.strided
        return "torch distributes no uneven strided shards whose padded parts differ"
    try:
        shard = local_shard("w", tensor, by_fsdp=case.by_fsdp)
    except (UnsupportedLayout, ManifestError) as error:
        return str(error)
    return shard.box, local_tensor(tensor).clone()


def run_rank(rank: int, store: str, pipes: list[Connection]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    pipe = pipes[rank]
    while (case := pipe.recv()) is not None:
        pipe.send(describe(case))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    folder: Path = tmp_path_factory.mktemp("properties")
    context = mp.get_context("forkserver")
    pairs = [context.Pipe() for _ in range(WORLD_SIZE)]
    far = [pair[1] for pair in pairs]
    started = [
        context.Process(target=run_rank, args=(rank, str(folder / "store"), far), daemon=True)
        for rank in range(WORLD_SIZE)
    ]
    for process in started:
        process.start()
    near = [pair[0] for pair in pairs]
    yield near
    for pipe in near:
        pipe.send(None)
    for process in started:
        process.join(10)
        process.kill()


UNEVEN_AND_DESCENDING = Case((3, 1, 2, 0), 2, (3, 1), (0, 0), strided=False, by_fsdp=False)
"""Case: torch gives ranks the part sizes of other ranks."""


@settings(max_examples=60, deadline=None)
@example(case=UNEVEN_AND_DESCENDING)
@given(case=cases())
def test_descriptions_match_the_shards_of_torch(ranks: list[Connection], case: Case) -> None:
    for pipe in ranks:
        pipe.send(case)
    outcomes: list[Outcome] = []
    for pipe in ranks:
        assert pipe.poll(DEADLINE_S), "a rank does not answer"
        outcomes.append(pipe.recv())
    covered = torch.zeros(case.shape, dtype=torch.bool)
    for outcome in outcomes:
        if isinstance(outcome, str):
            assert not case.ascends or case.strided, outcome
            continue
        box, local = outcome
        at = tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))
        assert torch.equal(case.whole[at], local) or (not box.numel and not local.numel())
        covered[at] = True
    if not any(isinstance(outcome, str) for outcome in outcomes):
        assert covered.all()
