"""All tensor-parallel ranks of vLLM capture their layouts together, or no rank does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from vllm_modules import Worker, stand_in

from windlass.engines.spec import AgentSettings, CapturedLayout, RankStep
from windlass.engines.vllm import worker
from windlass.engines.vllm.api_server import RankAnswer, RankOrder

WORLD_SIZE = 2
DEADLINE_S = 60.0
ROWS = {"a": 0, "b": 4}


class Rank(Worker):
    """Rank with a loader that may fail."""

    def __init__(self, rank: int, checkpoint: Path) -> None:
        self.model = torch.nn.Linear(6, 8, bias=False, dtype=torch.bfloat16)
        self.fails, self.num_loads = False, 0
        super().__init__(
            self.model,
            self.load,
            checkpoint,
            rank=rank,
            world_size=WORLD_SIZE,
            load_format="dummy",
        )

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.num_loads += 1
        if self.fails:
            raise RuntimeError("out of memory")
        for name, tensor in weights:
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
    monkeypatch.setattr(worker, "may_block", lambda _parallel: False)
    monkeypatch.setattr(worker, "stamps_tokens", lambda: False)
    stand_in(monkeypatch)
    yield found
    # The test process continues without an engine.
    gc.unfreeze()


def captured(ranks: list[Rank], settings: AgentSettings) -> list[RankAnswer]:
    """Order all ranks at once to capture, and return their answers."""
    order = RankOrder(step=RankStep.CAPTURE, settings=settings, token="", pauses_itself=True)
    encoded = msgspec.json.encode(order).decode()
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        answers = list(pool.map(lambda rank: rank.windlass_order("capture", encoded), ranks))
    return [msgspec.json.decode(answer, type=RankAnswer) for answer in answers]


def test_a_rank_captures_again_with_a_rank_that_failed(tmp_path: Path, reduced: Reduced) -> None:
    tensors = {name: torch.zeros(4, 6, dtype=torch.bfloat16) for name in ROWS}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = AgentSettings(
        name="a", controller="http://c", transport="cma", url="http://h:1",
        checkpoint="", world_size=WORLD_SIZE,
    )  # fmt: skip
    workers = [Rank(rank, tmp_path) for rank in range(WORLD_SIZE)]
    workers[1].fails = True

    # Only the rank that failed gives a reason.
    told, refused = captured(workers, settings)
    assert told == RankAnswer(failed=True)
    assert refused.failed
    assert refused.said.startswith("rank 1: a/1: the engine's loader failed")
    assert refused.said.endswith("RuntimeError: out of memory")
    assert reduced.groups == ["gloo of the replica"] * WORLD_SIZE

    loads, workers[1].fails = workers[0].num_loads, False
    assert loads
    again = captured(workers, settings)
    for answer, rank in zip(again, workers, strict=True):
        assert not answer.failed
        assert msgspec.json.decode(answer.said, type=CapturedLayout).unplaced == ()
        assert rank.num_loads >= loads
    assert workers[0].num_loads > loads, "it does not load alone, nor stay behind"
