"""`RankSaver` where no CPU can go: a GPU with too little memory, and requests at a wrong time.

SGLang's scheduler and its handlers are stand-ins; `test_sglang_sleep.py` has the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.rank_sleep import RankSleep
from windlass.engines.sglang import sleep
from windlass.engines.sglang.sleep import RankSaver
from windlass.errors import TransferFailed

SIZES = {"weights": 100, "kv_cache": 50, "cuda_graph": 0}


class Gpu:
    """A GPU, and SGLang's handlers that free its memory and map it again."""

    def __init__(self) -> None:
        self.free, self.calls = 10, list[tuple[str, list[str]]]()

    def handle(self, what: str, message: Any) -> None:
        self.calls.append((what, list(message.tags)))
        sign = 1 if what == "release" else -1
        self.free += sign * sum(SIZES[tag] for tag in message.tags)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Rank:
    """A rank with one weight, two requests that wait, and a saver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu, self.model = Gpu(), torch.nn.Linear(3, 2)
        self.model.register_buffer("constant", torch.arange(4.0))
        weight = self.model.weight
        captured = SimpleNamespace(
            manifest=SimpleNamespace(parameters=[SimpleNamespace(nbytes=weight.nbytes)]),
            addresses=[weight.data_ptr()], repacked=(), recomputed=(), look=lambda: None,
        )  # fmt: skip
        self.hooks = SimpleNamespace(turn=threading.Lock(), in_round=False)
        self.state, self.gate, self.num_outdated = RankSleep(), QuiesceGate(), 0
        rank: Any = SimpleNamespace(
            sleep=self.state, gate=self.gate, captured=captured,
            required=lambda: (None, captured, self.hooks),
        )  # fmt: skip
        self.scheduler = SimpleNamespace(
            _engine_paused=True, waiting_queue=["a", "b"],
        )  # fmt: skip
        self.updater = SimpleNamespace(scheduler=self.scheduler, tp_cpu_group=None)
        monkeypatch.setattr(sleep, "free_nbytes", lambda: self.gpu.free)
        monkeypatch.setattr(sleep, "has_backup", lambda: False)
        monkeypatch.setattr(sleep, "retract", lambda _scheduler: None)
        monkeypatch.setattr(sleep, "go_on", self.run)
        self.obeyed: list[tuple[str, str, frozenset[str]]] = []
        self.saver = RankSaver(rank, self.model, self.outdate, self.obey)

    def outdate(self) -> None:
        self.num_outdated += 1

    def obey(self, order: str, refusal: str) -> None:
        self.obeyed.append((order, refusal, self.state.asleep))

    def run(self, scheduler: Any) -> None:
        vars(scheduler)["_engine_paused"] = False

    def paused(self) -> bool:
        return bool(vars(self.scheduler)["_engine_paused"])

    def ask(self, what: str, *tags: str) -> str:
        message = SimpleNamespace(tags=list(tags) or None)
        handle = self.saver.release if what == "release" else self.saver.resume
        return handle(message, self.updater, lambda: self.gpu.handle(what, message))


@pytest.mark.usefixtures("group")
def test_memory_is_mapped_only_if_the_gpu_has_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    assert rank.ask("release") == ""
    assert rank.scheduler.waiting_queue == ["a", "b"]
    assert rank.num_outdated == 1
    # The trainer takes most of the memory.
    rank.gpu.free -= 80
    refusal = rank.ask("resume", "weights", "windlass_order=first")
    assert refusal.startswith("wake: weights need 100 bytes, and the GPU has 80 bytes free")
    assert rank.state.asleep == {*SIZES}
    rank.gpu.free += 30
    assert rank.ask("resume", "weights", "windlass_order=second") == ""
    # The rank carries out an order when its weights are mapped.
    others = frozenset({"kv_cache", "cuda_graph"})
    assert rank.obeyed == [("first", refusal, {*SIZES}), ("second", "", others)]
    assert rank.ask("resume").startswith("wake: cuda_graph and kv_cache need 50 bytes")
    rank.gpu.free += 50
    assert rank.ask("resume") == ""
    assert rank.ask("resume") == ""
    assert [tags for what, tags in rank.gpu.calls if what == "resume"] == [
        ["weights"],
        ["cuda_graph", "kv_cache"],
    ]
    assert rank.paused()
    assert rank.state.is_lost


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("by", ["round", "framework"])
def test_the_scheduler_runs_only_when_the_round_says_so(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(monkeypatch)
    rank.run(rank.scheduler)
    rank.gpu.free = 1000
    assert rank.ask("release") == ""
    vars(rank.scheduler)["_engine_paused"] = True
    assert rank.ask("resume", "weights", "windlass_order=rest") == ""
    if by == "framework":
        assert rank.ask("resume", "kv_cache", "cuda_graph") == ""
    # APPLY: the weights are those of the new version, which is not stamped yet.
    rank.state.is_lost = False
    assert rank.ask("resume", "weights") == ""
    assert rank.paused()
    last = sorted(rank.state.asleep)
    assert rank.ask("resume", *last, "windlass_go_on") == ""
    assert not rank.paused()
    assert rank.gpu.free == 1000


@pytest.mark.usefixtures("group")
def test_lost_weights_keep_the_scheduler_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.gpu.free = 1000
    assert rank.ask("release") == ""
    assert rank.ask("resume", *SIZES, "windlass_go_on") == ""
    assert rank.paused()


@pytest.mark.usefixtures("group")
def test_a_rank_refuses_to_sleep_during_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.hooks.in_round = True
    assert rank.ask("release") == "an update runs; ask again after its end"
    assert rank.scheduler.waiting_queue == ["a", "b"]
    assert rank.gpu.calls == []
    assert not rank.state.is_empty


@pytest.mark.usefixtures("group")
def test_tensors_that_no_update_fills_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    bias = rank.model.bias.detach().clone()
    assert rank.ask("release", "weights") == ""
    with torch.no_grad():
        for tensor in (*rank.model.parameters(), *rank.model.buffers()):
            tensor.fill_(-1.0)
    assert rank.ask("resume", "weights") == ""
    assert torch.equal(rank.model.bias, bias)
    assert torch.equal(rank.model.get_buffer("constant"), torch.arange(4.0))
    assert bool((rank.model.weight == -1).all()), "the update fills the weight"
    rank.saver.check_awake()
    rank.model.weight.data = rank.model.weight.data.clone()
    with pytest.raises(TransferFailed, match=r"1 that have moved \(weight\)"):
        rank.saver.check_awake()
