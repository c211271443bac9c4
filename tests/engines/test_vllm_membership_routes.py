"""Routes of a vLLM server that was started with WINDLASS_CONTROLLER; vLLM and its ranks are stand-ins.

`tests/integrations/test_vllm_membership.py` has live servers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_vllm_api_server import GOOD, Cores

from windlass import envs
from windlass.control.engine_state import HoldCause
from windlass.engines.held_server import HeldRecord, note_held
from windlass.engines.member import keep_key
from windlass.engines.private_routes import KEY_HEADER, App, saved_key
from windlass.engines.vllm import membership
from windlass.engines.vllm.membership import Held, Membership
from windlass.errors import ConfigError
from windlass.net.addresses import free_port

TOKEN = "token of the server"
CONTROLLER = "http://127.0.0.1:1"
HELD = HeldRecord(CONTROLLER, HoldCause.MIXED)


class Server:
    """ASGI server with the middleware in front of an application that answers every route with 200."""

    def __init__(self, model: Path, *, client_index: int = 0, nnodes: int = 1) -> None:
        self.cores = Cores([GOOD], [GOOD])
        self.cores.client_index = client_index
        parallel = SimpleNamespace(
            world_size=1, world_size_across_dp=2, data_parallel_size=2, nnodes=nnodes
        )
        config = SimpleNamespace(
            parallel_config=parallel,
            weight_transfer_config=SimpleNamespace(backend="windlass"),
            model_config=SimpleNamespace(model=str(model), revision=None, enable_sleep_mode=False),
        )
        host = "127.0.0.1" if nnodes == 1 else "10.0.0.2"
        args = SimpleNamespace(host=host, port=free_port())
        self.key = keep_key(args.port)
        engine = SimpleNamespace(engine_core=self.cores, vllm_config=config)
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=engine, args=args))
        self.routes: App = Membership(self.answer)

    @staticmethod
    async def answer(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def start(self) -> list[str]:
        """Start the application and return the types of its messages."""
        sent = await self._ask({"type": "lifespan", "app": self.app}, b"")
        return [message["type"] for message in sent]

    async def post(self, path: str, body: object, **headers: str) -> int:
        """Return the status of an answer."""
        given = [(name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()]
        scope = {
            "type": "http", "method": "POST", "path": path, "headers": given, "app": self.app
        }  # fmt: skip
        return int((await self._ask(scope, json.dumps(body).encode()))[0]["status"])

    async def _ask(self, scope: Any, body: bytes) -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.routes(scope, receive, send)
        return sent


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    monkeypatch.setenv("WINDLASS_CONTROLLER", "wait")
    return monkeypatch


@pytest.mark.usefixtures("given")
async def test_private_routes_need_the_key_and_joining_needs_the_token(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert await server.start() == ["lifespan.startup.complete"]
    for path in ("/pause", "/collective_rpc", "/init_weight_transfer_engine", "/update_weights"):
        assert await server.post(path, {}) == 403
        assert await server.post(path, {}, **{KEY_HEADER.replace("-", "_"): server.key}) == 200
    assert await server.post("/v1/completions", {}) == 200
    order = {"controller": CONTROLLER}
    assert await server.post("/windlass/join", order) == 403
    assert await server.post("/windlass/join", order, authorization="Bearer wrong") == 403
    assert server.cores.orders == []
    assert await server.post("/windlass/join", order, authorization=f"Bearer {TOKEN}") == 200
    assert server.cores.orders == [(0, "capture"), (1, "capture"), (0, "join"), (1, "join")]
    assert server.cores.tokens == {TOKEN}


@pytest.mark.usefixtures("given")
async def test_held_server_gets_no_order_that_would_wait_for_its_loop(tmp_path: Path) -> None:
    """The ranks connect to the same controller again by themselves; another one cannot fill the weights."""
    server = Server(tmp_path)
    await server.start()
    port = server.app.state.args.port
    note_held(port, HELD)
    shown = {"authorization": f"Bearer {TOKEN}"}
    assert await server.post("/v1/completions", {}) == 503
    for url in ("", "http://engine.example", "http://proxy.example:80"):
        order = {"controller": "http://127.0.0.1:2", "url": url}
        assert await server.post("/windlass/join", order, **shown) == 409
    assert await server.post("/windlass/join", {"controller": CONTROLLER}, **shown) == 200
    assert server.cores.orders == []
    note_held(port, None)
    assert await server.post("/v1/completions", {}) == 200


@pytest.mark.usefixtures("given")
async def test_launcher_orders_a_join_by_the_key(tmp_path: Path) -> None:
    server = Server(tmp_path)
    await server.start()
    order = {"controller": CONTROLLER, "token": "another", "name": "a", "url": "http://10.0.0.9:1"}
    shown = {KEY_HEADER.replace("-", "_"): server.key}
    assert await server.post("/windlass/join", order, **shown) == 200
    assert server.cores.tokens == {"another"}


@pytest.mark.usefixtures("given")
async def test_no_token_goes_from_host_to_host(tmp_path: Path) -> None:
    """vLLM's channels to ranks on other hosts are not encrypted."""
    server = Server(tmp_path, nnodes=2)
    await server.start()
    shown = {"authorization": f"Bearer {TOKEN}"}
    order = {"controller": CONTROLLER, "token": "another"}
    assert await server.post("/windlass/join", order, **shown) == 400
    assert server.cores.orders == []
    assert await server.post("/windlass/join", {"controller": CONTROLLER}, **shown) == 200
    assert server.cores.tokens == {""}


@pytest.mark.parametrize(("client_index", "num_orders"), [(0, 4), (1, 0)])
async def test_first_of_several_api_servers_joins_at_the_start(
    client_index: int, num_orders: int, tmp_path: Path, given: pytest.MonkeyPatch
) -> None:
    given.setenv("WINDLASS_CONTROLLER", CONTROLLER)
    server = Server(tmp_path, client_index=client_index)
    assert await server.start() == ["lifespan.startup.complete"]
    if num_orders:
        await asyncio.wait_for(server.cores.is_done.wait(), 30)
    assert len(server.cores.orders) == num_orders


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide stand-ins for the modules of vLLM that `prepare` imports, and the options of a plain `vllm serve`."""
    config, core = ModuleType("vllm.config"), ModuleType("vllm.v1.engine.core")
    vars(config)["WeightTransferConfig"] = SimpleNamespace
    vars(core)["EngineCore"] = type("EngineCore", (), {"set_weight_version": None})
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", core)
    monkeypatch.setattr(membership, "check_installed", lambda _releases: [])
    monkeypatch.setattr(membership, "generate_route", lambda: "some.GenerateRoute")
    monkeypatch.setattr(membership, "set_values", lambda _values: None)
    return SimpleNamespace(
        weight_transfer_config=None,
        scheduler_cls=None,
        middleware=["own.Middleware"],
        port=free_port(),
        nnodes=1,
        enable_sleep_mode=False,
    )


@pytest.mark.usefixtures("given")
def test_plain_server_gets_the_middleware_that_closes_its_private_routes(vllm: Any) -> None:
    for _ in range(2):
        membership.prepare(vllm)
        # vLLM puts the last middleware in front.
        route = "some.GenerateRoute"
        assert vllm.middleware == ["own.Middleware", membership.MEMBERSHIP, route]
        assert vllm.weight_transfer_config.backend == "windlass"
        assert vllm.enable_scale_out
    assert saved_key(f"http://127.0.0.1:{vllm.port}")


def test_only_a_server_that_joins_at_its_start_must_have_windlass_backend(
    vllm: Any, given: pytest.MonkeyPatch
) -> None:
    vllm.weight_transfer_config = SimpleNamespace(backend="nccl")
    given.setenv("WINDLASS_CONTROLLER", "http://127.0.0.1:1")
    with pytest.raises(
        ConfigError, match=r"--weight-transfer-config must name the backend windlass .* got nccl"
    ):
        membership.prepare(vllm)
    given.setenv("WINDLASS_CONTROLLER", "wait")
    membership.prepare(vllm)
    assert vllm.weight_transfer_config.backend == "nccl"
    assert membership.MEMBERSHIP in vllm.middleware


def test_server_of_a_trainer_says_why_it_is_held(vllm: Any) -> None:
    """Only the trainer's `/init_weight_transfer_engine` makes this server join, so its routes stay open."""
    membership.refuse_while_held(vllm)
    assert vllm.middleware == ["own.Middleware"]
    vllm.weight_transfer_config = SimpleNamespace(backend="windlass")
    for _ in range(2):
        membership.refuse_while_held(vllm)
        assert vllm.middleware == ["own.Middleware", membership.HELD]
    assert f"{Held.__module__}.{Held.__qualname__}" == membership.HELD


async def test_routes_of_a_trainers_server_refuse_while_it_is_held(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.routes = Held(server.answer)
    await server.start()
    port = server.app.state.args.port
    note_held(port, HELD)
    assert await server.post("/v1/completions", {}) == 503
    assert await server.post("/update_weights", {}) == 200
    note_held(port, None)
    assert await server.post("/v1/completions", {}) == 200


@pytest.mark.usefixtures("vllm")
def test_server_without_windlass_controller_is_not_changed(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WINDLASS_CONTROLLER", raising=False)
    before = {**vars(vllm)}
    membership.prepare(vllm)
    assert vars(vllm) == before


@pytest.mark.parametrize("headless", [False, True])
def test_every_host_of_a_server_has_the_token_in_a_file(
    headless: bool, vllm: Any, given: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given.setattr(envs, "removed_secrets", {})
    vllm.nnodes, vllm.headless = 2, headless
    with pytest.raises(ConfigError, match="WINDLASS_TOKEN_FILE must be set on every host"):
        membership.prepare(vllm)
    assert "WINDLASS_TOKEN" not in os.environ
    given.setattr(envs, "removed_secrets", {})
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    given.setenv("WINDLASS_TOKEN_FILE", str(file))
    membership.prepare(vllm)
    assert (membership.MEMBERSHIP in vllm.middleware) is not headless


async def test_server_that_cannot_be_a_member_does_not_start(
    tmp_path: Path, given: pytest.MonkeyPatch
) -> None:
    given.setenv("WINDLASS_CONTROLLER", "http://192.0.2.1:1")
    assert await Server(tmp_path).start() == ["lifespan.startup.failed"]
