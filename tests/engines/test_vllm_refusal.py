"""All tensor-parallel ranks of vLLM capture their layouts together, or no rank does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from vllm_modules import stand_in

from windlass.engines.rank_reports import RankReports
from windlass.engines.spec import AgentSettings, CapturedLayout
from windlass.engines.vllm import extension
from windlass.engines.vllm.extension import WindlassExtension
from windlass.errors import PeerUnreachable

WORLD_SIZE = 2
DEADLINE_S = 60.0
ROWS = {"a": 0, "b": 4}


class Worker(WindlassExtension):
    """A rank with the attributes that vLLM gives it, and with a loader that may fail."""

    def __init__(self, rank: int) -> None:
        self.model = torch.nn.Linear(6, 8, bias=False, dtype=torch.bfloat16)
        self.rank, self.fails, self.num_loads = rank, False, 0
        self.model_runner = SimpleNamespace(kv_caches=[], get_model=lambda: self.model)
        self.parallel_config = SimpleNamespace(
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            world_size=WORLD_SIZE,
        )
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(), speculative_config=None)

    def reload_weights(
        self, *, weights_iterator: Iterator[tuple[str, torch.Tensor]], is_checkpoint_format: bool
    ) -> None:
        self.num_loads += 1
        if self.fails:
            raise RuntimeError("out of memory")
        for name, tensor in weights_iterator:
            self.model.weight.data[ROWS[name] : ROWS[name] + 4].copy_(tensor)


class Reduced:
    """`all_reduce` between ranks that are threads; returns the minimum."""

    def __init__(self) -> None:
        self.groups: list[object] = []
        self._given: list[int] = []
        self._least = 0
        self._barrier = threading.Barrier(WORLD_SIZE, self._reduce)

    def _reduce(self) -> None:
        self._least, self._given = min(self._given), []

    def __call__(self, tensor: torch.Tensor, op: object, group: object) -> None:
        assert op is dist.ReduceOp.MIN
        self.groups.append(group)
        self._given.append(int(tensor))
        self._barrier.wait(DEADLINE_S)
        tensor.fill_(self._least)


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reduced]:
    found = Reduced()
    monkeypatch.setattr(dist, "all_reduce", found)
    monkeypatch.setattr(extension, "_can_block", lambda _parallel: False)
    monkeypatch.setattr(extension, "stamps_tokens", lambda: False)
    stand_in(monkeypatch)
    yield found
    # The test process continues without an engine.
    gc.unfreeze()


def captured(workers: list[Worker], settings: AgentSettings) -> list[CapturedLayout]:
    """Run `windlass_capture` in all ranks at once, and return their reports."""
    encoded = msgspec.json.encode(settings).decode()
    with RankReports(WORLD_SIZE) as reports, ThreadPoolExecutor(WORLD_SIZE) as pool:
        list(pool.map(lambda worker: worker.windlass_capture(encoded, reports.folder), workers))
        found = reports.gather(DEADLINE_S)
    return [msgspec.json.decode(each, type=CapturedLayout) for each in found]


def test_a_rank_captures_again_with_a_rank_that_failed(tmp_path: Path, reduced: Reduced) -> None:
    tensors = {name: torch.zeros(4, 6, dtype=torch.bfloat16) for name in ROWS}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = AgentSettings(
        name="a", controller="http://c", transport="cma", url="http://h:1",
        checkpoint=str(tmp_path), world_size=WORLD_SIZE, loaded=False,
    )  # fmt: skip
    workers = [Worker(rank) for rank in range(WORLD_SIZE)]
    workers[1].fails = True

    # The error names the rank that failed, not the other rank.
    with pytest.raises(PeerUnreachable, match=r"rank 1: .*out of memory"):
        captured(workers, settings)
    assert reduced.groups == ["gloo of the replica"] * WORLD_SIZE

    loads, workers[1].fails = workers[0].num_loads, False
    assert loads
    again = captured(workers, settings)
    for found, worker in zip(again, workers, strict=True):
        assert found.unplaced == ()
        assert worker.num_loads >= loads
    assert workers[0].num_loads > loads, "it does not load alone, nor stay behind"
