"""Each role has its own token and routes, and a refusal names the role and the route."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import combinations

import aiohttp
import pytest
from aiohttp import web
from fake_agents import (
    FakeEngineRank,
    engine_manifest,
    fake_hello,
    trainer_manifest,
)
from fake_fleet import TOKEN, FakeFleet

import windlass
from windlass.cli.main import main
from windlass.control.connect_messages import Hello, Welcome
from windlass.control.messages import CONTROLLER_FRAMES
from windlass.errors import AuthenticationError
from windlass.net.access import ROUTES, Access, AccessGate, role_environment, role_token
from windlass.net.messages import Refused, encode
from windlass.net.server import ControlServer
from windlass.rollout import BatchClient

SECRET = "the owner's"
METHODS = {"/v1/callback": "POST"}
OUTSIDE = {"/", "/v1/train_workers/{name}"}
"""Public routes, and routes that `TrainController` mounts."""


def headers(role: Access, secret: str = SECRET) -> dict[str, str]:
    return {"Authorization": f"Bearer {role_token(secret, role)}"}


def test_tokens_of_roles_differ_and_do_not_reveal_the_secret() -> None:
    tokens = [role_token(SECRET, role) for role in Access]
    assert len(set(tokens)) == len(Access)
    assert role_token(SECRET, Access.OWNER) == SECRET
    for token, other in combinations(tokens, 2):
        assert token not in other
    assert role_token(SECRET, Access.ENGINE) != role_token("another", Access.ENGINE)
    gate = AccessGate(SECRET)
    assert [gate.role_of(f"Bearer {token}") for token in tokens] == list(Access)
    for stranger in ("", "Bearer ", "Bearer x", SECRET, f"Bearer {tokens[1]} ", "Bearer \udcff"):
        assert gate.role_of(stranger) is None


async def test_exactly_the_routes_of_a_controller_are_declared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mounted, add_routes = set[str](), ControlServer.add_routes

    def note(server: ControlServer, routes: Iterable[web.AbstractRouteDef]) -> None:
        added = list(routes)
        mounted.update(route.path for route in added if isinstance(route, web.RouteDef))
        add_routes(server, added)

    monkeypatch.setattr(ControlServer, "add_routes", note)
    async with windlass.Controller(token=SECRET):
        pass
    assert mounted - OUTSIDE == set(ROUTES) - OUTSIDE
    assert "/v1/train_workers/{name}" in ROUTES


async def test_a_role_may_call_only_its_own_routes() -> None:
    async with windlass.Controller(token=SECRET) as controller, aiohttp.ClientSession() as http:
        for role in Access:
            for route, allowed in ROUTES.items():
                if route in OUTSIDE:
                    continue
                method = METHODS.get(route, "GET")
                async with http.request(
                    method, controller.url + route, headers=headers(role)
                ) as answer:
                    if role in {Access.OWNER, *allowed}:
                        assert answer.status not in {401, 403}, (role, route)
                        continue
                    assert answer.status == 403, (role, route)
                    said = (await answer.json())["error"]
                assert said == (
                    f"{method} {route} needs role {' or '.join(['owner', *allowed])}, "
                    f"but this caller has role {role}"
                )


@pytest.mark.parametrize("role", [role for role in Access if role is not Access.OWNER])
async def test_only_the_owner_reaches_undeclared_routes(role: Access) -> None:
    async with windlass.Controller(token=SECRET) as controller, aiohttp.ClientSession() as http:
        url = f"{controller.url}/v1/nothing"
        async with http.get(url, headers=headers(role)) as answer:
            assert answer.status == 403
        async with http.get(url, headers=headers(Access.OWNER)) as answer:
            assert answer.status == 404
        async with http.get(url, headers=headers(role, "another")) as answer:
            assert answer.status == 401
        async with http.get(f"{controller.url}/") as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("role", "hello", "welcome"),
    [
        (Access.ENGINE, fake_hello(engine_manifest("a/0", 2), group="a"), True),
        (Access.OWNER, fake_hello(engine_manifest("a/0", 2), group="a"), True),
        (Access.TRAINER, fake_hello(engine_manifest("a/0", 2), group="a"), False),
        (Access.ENGINE, fake_hello(trainer_manifest("t/0", 0, 1), group="t"), False),
        (Access.TRAINER, fake_hello(trainer_manifest("t/0", 0, 1), group="t"), True),
    ],
)
async def test_a_token_of_one_role_cannot_join_as_another_role(
    role: Access, hello: Hello, welcome: bool
) -> None:
    async with (
        FakeFleet() as rig,
        aiohttp.ClientSession(headers=headers(role, TOKEN)) as http,
        http.ws_connect(f"{rig.server.url}/v1/agents") as socket,
    ):
        await socket.send_bytes(encode(hello))
        frame = CONTROLLER_FRAMES.decode(await socket.receive_bytes(timeout=20))
        if welcome:
            assert isinstance(frame, Welcome)
        else:
            assert isinstance(frame, Refused)
            assert frame.final
            assert f"token of role {role} may not join as {hello.role}" in frame.message
            assert "/v1/agents" in frame.message


async def test_an_engine_joins_with_the_token_of_its_role_and_not_with_an_observers() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        hello = fake_hello(engine_manifest("b/0", 2), group="b")
        await rig.connect(hello, FakeEngineRank("b/0", 2), token=role_token(TOKEN, Access.ENGINE))
        await rig.coordinator.members.wait_for_fleet(
            num_trainers=2, engines=("a", "b"), deadline_s=20
        )
        other = fake_hello(engine_manifest("c/0", 2), group="c")
        with pytest.raises(AuthenticationError):
            await rig.connect(
                other, FakeEngineRank("c/0", 2), token=role_token(TOKEN, Access.OBSERVER)
            )


async def test_client_errors_name_the_refused_role_and_route(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with windlass.Controller(token=SECRET) as controller:

        def ask() -> None:
            with BatchClient(controller.url, role_token(SECRET, Access.WORKER)) as batches:
                batches.next_batch(0, 0, 1, deadline_s=5)

        with pytest.raises(
            AuthenticationError, match="GET /v1/batches needs role owner or trainer"
        ):
            await asyncio.to_thread(ask)
        monkeypatch.setenv("WINDLASS_TOKEN", role_token(SECRET, Access.ENGINE))
        assert await asyncio.to_thread(main, ["status", controller.url]) == 2
        assert "this caller has role engine" in capsys.readouterr().err
        monkeypatch.setenv("WINDLASS_TOKEN", role_token(SECRET, Access.OBSERVER))
        assert await asyncio.to_thread(main, ["status", controller.url, "--json"]) == 0


def test_the_token_command_prints_only_the_tokens_of_the_role(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", SECRET)
    assert main(["token", "worker"]) == 0
    said = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    assert said == role_environment(SECRET, Access.WORKER)
    assert said == {
        "WINDLASS_TOKEN": role_token(SECRET, Access.WORKER),
        "WINDLASS_ENGINE_TOKEN": role_token(SECRET, Access.CLIENT),
        "WINDLASS_AGENT_TOKEN": role_token(SECRET, Access.AGENT),
    }
    assert main(["token", "trainer"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["token", "owner"])
