"""`RankSaver` where no CPU can go: a GPU with too little memory, and requests at a wrong time.

SGLang's scheduler and its handlers are stand-ins; `test_sglang_sleep.py` has the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from http_answers import answering
from torch.distributed import HashStore  # type: ignore[attr-defined]

from windlass.config import PauseMode
from windlass.engines.engine_rank import RankHooks
from windlass.engines.http import EngineHttp
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.rank_sleep import RankSleep
from windlass.engines.sglang import sleep
from windlass.engines.sglang.orders import Quiesce, SglangApi
from windlass.engines.sglang.sleep import RELEASE, RESUME, RankSaver, ServerSleep
from windlass.errors import TransferFailed, WindlassError

DEADLINE_S = 20.0
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
        self.captured = captured = SimpleNamespace(
            manifest=SimpleNamespace(
                parameters=[SimpleNamespace(nbytes=weight.nbytes, padding_nbytes=0)]
            ),
            addresses=[weight.data_ptr()], repacks=(), roundings=(), recompute=None, look=lambda: None,
        )  # fmt: skip
        self.hooks = SimpleNamespace(turn=threading.Lock(), in_round=False)
        self.state, self.gate, self.num_outdated = RankSleep(), QuiesceGate(), 0
        rank: Any = SimpleNamespace(
            sleep=self.state, gate=self.gate, captured=captured, kept=(),
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
        if not order.startswith("{"):
            return
        quiesce = msgspec.json.decode(order, type=Quiesce)
        if refusal:
            self.gate.fail(quiesce.pause_id, TransferFailed(refusal))
        elif quiesce.blocked_s is None:
            self.gate.quiesced(quiesce.pause_id)
        else:
            self.gate.block(quiesce.pause_id, quiesce.blocked_s, DEADLINE_S)

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
    assert refusal.startswith("wake: the GPU must have 100 bytes free for weights, got 80")
    assert rank.state.asleep == {*SIZES}
    rank.gpu.free += 30
    assert rank.ask("resume", "weights", "windlass_order=second") == ""
    # The rank carries out an order when its weights are mapped.
    others = frozenset({"kv_cache", "cuda_graph"})
    assert rank.obeyed == [("first", refusal, {*SIZES}), ("second", "", others)]
    assert rank.ask("resume").startswith(
        "wake: the GPU must have 50 bytes free for cuda_graph and kv_cache"
    )
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
def test_failed_search_for_copies_refuses_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search reads the engine's own objects. An exception would end SGLang's loop, and the server with it."""
    rank = Rank(monkeypatch)

    def look() -> None:
        # torch refuses to read a parameter that has no memory yet.
        torch.nn.UninitializedParameter() + 1

    rank.captured.look = look
    assert "uninitialized" in rank.ask("release")
    assert not rank.state.asleep
    rank.captured.look = lambda: None
    assert rank.ask("release") == ""


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
    with pytest.raises(TransferFailed, match=r"1 at other addresses \(such as weight\)"):
        rank.saver.check_awake()


@contextmanager
def serving(rank: Rank, *, blocks: bool) -> Iterator[tuple[RankHooks, EngineHttp, list[str]]]:
    """Yield hooks of a rank that sleeps, its server, and the paths of the requests that the server has got since."""
    loop, seen = threading.Lock(), list[str]()

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        seen.append(path)
        # The main loop carries out one request after the other.
        with loop:
            if path in (RELEASE, RESUME):
                tags = msgspec.json.decode(body).get("tags") or ()
                if refusal := rank.ask("release" if path == RELEASE else "resume", *tags):
                    return 400, refusal.encode()
        return 200, b'{"success": true}'

    with answering(answer) as url:
        server = EngineHttp(url)
        server_sleep = ServerSleep(server, rank.state)
        api = SglangApi(server, 1, rank.gate, blocks=blocks, sleep=server_sleep)
        server_sleep.fall_asleep(PauseMode.RETRACT, DEADLINE_S)
        assert seen == [RELEASE]
        seen.clear()
        yield RankHooks(None, rank.gate, api, looks=False, sleep=rank.state), server, seen


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("woken", ["", "weights", "weights kv_cache cuda_graph"])
def test_a_turn_takes_three_requests(
    woken: str, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework has woken nothing, the weights, or everything before the round."""
    rank = Rank(monkeypatch)
    rank.gpu.free = 1000
    with serving(rank, blocks=blocks) as (hooks, server, seen):
        if woken:
            server.post(RESUME, {"tags": woken.split()})
            seen.clear()
        hooks.pause("7.1", PauseMode.RETRACT, DEADLINE_S)
        assert rank.state.asleep == {*SIZES} - {*(woken or "weights").split()}
        assert rank.state.is_lost
        hooks.finalise()
        assert rank.paused()
        hooks.set_version(7, DEADLINE_S)
        assert rank.paused(), "the caches still sleep, or the round has not ended"
        hooks.resume(DEADLINE_S)
        hooks.round_ended()
        assert seen == [RESUME, "/update_weight_version", RESUME]
        if woken == "weights":
            assert rank.paused(), "the framework wakes the caches"
            server.post(RESUME, {"tags": ["kv_cache", "cuda_graph"]})
        assert not rank.paused()
        assert not rank.state.is_at_rest


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("blocks", [True, False])
def test_a_pause_fails_if_the_weights_find_no_memory(
    blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(monkeypatch)
    rank.gpu.free = 1000
    with serving(rank, blocks=blocks) as (hooks, _, seen):
        rank.gpu.free = 99
        with pytest.raises(WindlassError, match="must have 100 bytes free for weights, got 99"):
            hooks.pause("7.1", PauseMode.RETRACT, DEADLINE_S)
        hooks.round_ended()
        assert rank.state.asleep == {*SIZES}
        rank.gpu.free = 1000
        hooks.pause("7.2", PauseMode.RETRACT, DEADLINE_S)
        hooks.finalise()
        hooks.set_version(7, DEADLINE_S)
        hooks.resume(DEADLINE_S)
        assert not rank.paused()
        assert seen == [RESUME, RESUME, "/update_weight_version", RESUME]
