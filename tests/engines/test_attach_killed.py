"""An unchecked engine gets no weights and no traffic, wherever the process dies that attaches it."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch
from asgi import request
from http_answers import answering_requests
from safetensors.torch import save_file
from vllm_modules import Worker, stand_in

import windlass
from windlass.control.routes import status_of
from windlass.engines.engine_rank import EngineRank
from windlass.engines.join_route import JOIN_PATH, JoinRoute
from windlass.engines.member import Member, keep_key
from windlass.engines.sglang import hook, plugin
from windlass.engines.vllm import worker
from windlass.engines.vllm.engine_core import QUIESCES
from windlass.engines.vllm.membership import VllmMember
from windlass.errors import PeerTimeout, WindlassError

T = TypeVar("T")
TOKEN = "secret of the test"
WITHIN_S = 60.0
ROWS = {"a": 0, "b": 4}
"""First row of each tensor in the engine's one parameter, which has no place for other tensors."""
LATER = pytest.mark.long
"""Mark of repeated tests with another moment of the death."""


class Loader:
    """The loader of an engine that fuses two tensors into one parameter."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(6, 8, bias=False, dtype=torch.bfloat16)
        self.model.weight.data.zero_()

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in ROWS:
                self.model.weight.data[ROWS[name] : ROWS[name] + 4].copy_(tensor)
            else:
                # The loader reads this tensor and keeps the result outside the parameters.
                self.packed = tensor.float() * 2


class Engine:
    """A running server of another user; the main loop of its one rank is in this process.

    Attributes:
        on_call: called before and after each order to the rank, with the order's number and whether it is done.
        over: semaphore that is released after each order.
        asked: paths of the requests, in order.
    """

    name: str

    def __init__(self) -> None:
        self.loader = Loader()
        self.on_call: Callable[[int, bool], None] = lambda _number, _done: None
        self.over = threading.Semaphore(0)
        self.asked: list[str] = []
        self._calls = 0

    @property
    def weight(self) -> torch.Tensor:
        return self.loader.model.weight.data

    @contextmanager
    def serving(self, checkpoint: Path) -> Iterator[str]:
        """Serve the join route of the engine's plugin, and the routes by which ranks pause; yield the URL."""
        with answering_requests(self.answer) as url:
            member = self.member(checkpoint, int(url.rpartition(":")[2]))
            self._route = JoinRoute(self._unknown, member.token, member.key, member.join)
            yield url

    def answer(self, path: str, headers: Mapping[str, str], asked: bytes) -> tuple[int, bytes]:
        self.asked.append(path)
        if path == JOIN_PATH:
            shown = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            status, told = asyncio.run(request(self._route, "POST", path, asked, shown))
            return status, json.dumps(told).encode()
        try:
            return self.carry_out(path, asked)
        except WindlassError as error:
            return 500, repr(error).encode()

    @staticmethod
    async def _unknown(*_: object) -> None:
        raise AssertionError

    def counted(self, call: Callable[[], T]) -> T:
        self._calls += 1
        number = self._calls
        self.on_call(number, False)
        try:
            result = call()
            self.on_call(number, True)
        finally:
            self.over.release()
        return result

    def member(self, checkpoint: Path, port: int) -> Member:
        raise NotImplementedError

    def carry_out(self, path: str, asked: bytes) -> tuple[int, bytes]:
        raise NotImplementedError

    def engine_rank(self) -> EngineRank:
        raise NotImplementedError


class Vllm(Engine):
    name = "vllm"
    core_engines = (0,)

    def member(self, checkpoint: Path, port: int) -> Member:
        self.worker = Worker(self.loader.model, self.loader.load, checkpoint)
        config = self.worker.vllm_config
        config.parallel_config = SimpleNamespace(world_size=1, world_size_across_dp=1, nnodes=1)
        config.weight_transfer_config = SimpleNamespace(backend="windlass")
        keep_key(port)
        return VllmMember(
            SimpleNamespace(engine_core=self, vllm_config=config),
            SimpleNamespace(host="127.0.0.1", port=port),
        )

    async def _call_utility_async(
        self, _method: str, order: str, _s: float, args: tuple[str, str], _: None, *, engine: int
    ) -> list[str]:
        """Call the rank as the client of vLLM's core does."""
        assert (order, engine) == ("windlass_order", 0)
        return [await asyncio.to_thread(self.counted, partial(self.worker.windlass_order, *args))]

    def carry_out(self, path: str, asked: bytes) -> tuple[int, bytes]:
        if path != "/collective_rpc":
            return 200, b"{}"
        body = json.loads(asked)
        assert body["method"] == QUIESCES
        pause_id, blocked_s = body["args"]
        # A core that separates its caches by version passes a namespace.
        result = self.worker.windlass_quiesce(pause_id, blocked_s, "namespace")
        return 200, json.dumps({"results": [result]}).encode()

    def engine_rank(self) -> EngineRank:
        return self.worker.windlass_engine_rank


class Sglang(Engine):
    name = "sglang"

    def member(self, checkpoint: Path, port: int) -> Member:
        return plugin.SglangMember(
            SimpleNamespace(
                host="127.0.0.1",
                port=port,
                nnodes=1,
                enable_memory_saver=False,
                model_path=str(checkpoint),
                tp_size=1,
                pp_size=1,
                dp_size=1,
                load_format="auto",
                revision=None,
                download_dir=None,
                quantization=None,
                api_key=None,
                admin_api_key=None,
            )
        )

    def carry_out(self, path: str, asked: bytes) -> tuple[int, bytes]:
        if path == "/server_info":
            return 404, b""
        if path == "/update_weights_from_tensor":
            [encoded] = json.loads(asked)["serialized_named_tensors"]
            [(order, tensor)] = ForkingPickler.loads(base64.b64decode(encoded))
            call = partial(hook.run, self.loader.model, [(order, tensor)])
            call() if json.loads(order)["type"] == "quiesce" else self.counted(call)
        return 200, b'{"success": true}'

    def engine_rank(self) -> EngineRank:
        return hook.this_rank.engine_rank


@pytest.fixture(params=[Vllm, Sglang])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    monkeypatch.setenv("WINDLASS_CONTROLLER", "wait")
    engine: Engine = request.param()
    monkeypatch.setattr(worker, "may_block", lambda _parallel: False)
    monkeypatch.setattr(worker, "stamps_tokens", lambda: False)
    stand_in(monkeypatch)
    monkeypatch.setattr(hook, "this_rank", hook.SglangRank())
    monkeypatch.setattr(hook, "own_rank", lambda: 0)
    monkeypatch.setattr(hook, "has_sessions", lambda: False)
    # The stand-in has no loop that could be held.
    monkeypatch.setattr(hook, "orders_change_nothing", lambda _model: False)
    monkeypatch.setattr(hook, "all_ranks", lambda mine, device: mine)
    # `separate_caches` patches the class of SGLang's requests, which is not installed here.
    monkeypatch.setattr(hook, "separate_caches", lambda: None)
    # SGLang's settings, which are not here, say whether its memory may sleep.
    monkeypatch.setattr(hook, "is_enabled", lambda: False)
    monkeypatch.setattr(hook, "install", lambda *_: None)
    monkeypatch.setattr(hook, "load_again", lambda _model, weights: engine.loader.load(weights))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    yield engine
    engine.engine_rank().leave(10.0)
    # The test process continues without an engine.
    gc.unfreeze()


def checkpoint(folder: Path, *more: str) -> Path:
    tensors = {n: torch.zeros(4, 6, dtype=torch.bfloat16) for n in (*ROWS, *more)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def trainer(*more: str) -> torch.nn.ParameterDict:
    names = (*ROWS, *more)
    values = torch.arange(1, 1 + 24 * len(names), dtype=torch.float32).reshape(-1, 4, 6)
    return torch.nn.ParameterDict(
        {n: value.clone() for n, value in zip(names, values, strict=True)}
    )


def attaching(engine: Engine, url: str, model: Path, controller: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", f"windlass.engines.{engine.name}", "--attach", url),
            *("--name", "engine", "--model", str(model), "--controller", controller),
        ],
        env={**os.environ, "WINDLASS_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def publish(weights: torch.nn.ParameterDict, url: str, deadline_s: float) -> None:
    with windlass.connect_trainer(weights, controller=url, token=TOKEN) as client:
        client.publish(1, deadline_s=deadline_s)


async def assert_nothing_reaches(controller: windlass.Controller, engine: Engine) -> None:
    with pytest.raises(PeerTimeout):
        await asyncio.to_thread(publish, trainer("c"), controller.url, 1.0)
    assert controller.coordinator.routable() == ()
    assert status_of(controller.coordinator)["engines"] == []
    assert not engine.weight.any()


async def assert_whole_after(controller: windlass.Controller, engine: Engine) -> None:
    weights = trainer()
    await asyncio.to_thread(publish, weights, controller.url, WITHIN_S)
    assert [each.version for each in controller.coordinator.routable()] == [1]
    expected = torch.cat([weights["a"], weights["b"]]).to(torch.bfloat16)
    assert torch.equal(engine.weight, expected)


async def killed_in_call(
    engine: Engine,
    model: Path,
    controller: str,
    url: str,
    number: int,
    *,
    done: bool,
    by: signal.Signals = signal.SIGKILL,
) -> int | None:
    """Kill an attaching process before its call `number` is carried out or, with `done`, before the answer."""
    attacher: Future[subprocess.Popen[bytes]] = Future()

    def on_call(call: int, carried_out: bool) -> None:
        if (call, carried_out) == (number, done):
            process = attacher.result(WITHIN_S)
            process.send_signal(by)
            process.communicate(timeout=WITHIN_S)

    engine.on_call = on_call
    process = attaching(engine, url, model, controller)
    attacher.set_result(process)
    for _ in range(number):
        assert await asyncio.to_thread(engine.over.acquire, timeout=WITHIN_S)
    engine.on_call = lambda _number, _done: None
    return process.returncode


@pytest.mark.parametrize("done", [False, pytest.param(True, marks=LATER)])
async def test_an_attach_that_dies_before_its_check_leaves_no_engine_in_the_fleet(
    done: bool, engine: Engine, tmp_path: Path
) -> None:
    # No rank has a place for `c`.
    model = checkpoint(tmp_path, "c")
    with engine.serving(model) as url:
        async with windlass.Controller(token=TOKEN) as controller:
            await killed_in_call(engine, model, controller.url, url, 1, done=done)
            await assert_nothing_reaches(controller, engine)


@LATER
async def test_an_attach_that_is_refused_leaves_no_engine_in_the_fleet(
    engine: Engine, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path, "c")
    with engine.serving(model) as url:
        async with windlass.Controller(token=TOKEN) as controller:
            for _ in range(2):
                process = attaching(engine, url, model, controller.url)
                _, said = await asyncio.to_thread(process.communicate, timeout=WITHIN_S)
                assert process.returncode == 2, said
                assert b"loader reads 'c', but the memory of no rank contains" in said
            await assert_nothing_reaches(controller, engine)


async def test_attach_makes_a_server_join(engine: Engine, tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    with engine.serving(model) as url:
        async with windlass.Controller(token=TOKEN) as controller:
            process = attaching(engine, url, model, controller.url)
            said, _ = await asyncio.to_thread(process.communicate, timeout=WITHIN_S)
            assert json.loads(said) == {"name": "engine", "url": url}
            await assert_whole_after(controller, engine)


@pytest.mark.parametrize(
    ("number", "done", "by"),
    [
        (1, True, signal.SIGKILL),
        (1, False, signal.SIGTERM),
        pytest.param(2, False, signal.SIGKILL, marks=LATER),
        pytest.param(2, True, signal.SIGINT, marks=LATER),
    ],
)
async def test_server_joins_although_the_attaching_process_has_died(
    number: int, done: bool, by: signal.Signals, engine: Engine, tmp_path: Path
) -> None:
    """If it left its session open, SGLang's weights would stay unpacked until the next session ends it."""
    model = checkpoint(tmp_path)
    with engine.serving(model) as url:
        async with windlass.Controller(token=TOKEN) as controller:
            status = await killed_in_call(
                engine, model, controller.url, url, number, done=done, by=by
            )
            assert status == (-by if by is signal.SIGKILL else 128 + by)
            await assert_whole_after(controller, engine)
            assert engine.asked.count("/begin_weight_update") == engine.asked.count(
                "/end_weight_update"
            )
