"""The join route of an engine's server: access, requests and answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from asgi import request

from windlass.engines.join_route import JOIN_PATH, MAX_BODY_NBYTES, JoinOrder, JoinRoute
from windlass.engines.private_routes import KEY_HEADER, Message
from windlass.errors import (
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    ProtocolError,
    WindlassError,
)
from windlass.net.access import Access, role_token
from windlass.net.messages import MustWait

SECRET = "secret of the test"
ENGINE = role_token(SECRET, Access.ENGINE)
KEY = "key of the server"
ORDER = JoinOrder("http://10.0.0.1:8000")


class Joined:
    """Callback that records its orders and threads."""

    def __init__(self, error: WindlassError | None = None) -> None:
        self.asked: list[JoinOrder] = []
        self.threads: set[threading.Thread] = set()
        self._error = error

    def __call__(self, order: JoinOrder) -> str:
        self.asked.append(order)
        self.threads.add(threading.current_thread())
        if self._error:
            raise self._error
        return "10.0.0.2:30000"


async def engine(_scope: Message, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b'"the engine\'s"'})


async def ask(
    join: Callable[[JoinOrder], str],
    body: bytes = msgspec.json.encode(ORDER),
    *shown: str,
    server: str = ENGINE,
    method: str = "POST",
    path: str = JOIN_PATH,
) -> tuple[int, Any]:
    headers = [(b"authorization", f"Bearer {token}".encode()) for token in shown]
    return await request(JoinRoute(engine, server, KEY, join), method, path, body, headers)


@pytest.mark.parametrize(
    ("server", "shown"), [(ENGINE, ENGINE), (SECRET, SECRET), (SECRET, ENGINE)]
)
async def test_callers_with_the_servers_token_or_role_choose_its_controller(
    server: str, shown: str
) -> None:
    joined = Joined()
    answer = await ask(joined, msgspec.json.encode(ORDER), shown, server=server)
    assert answer == (200, {"name": "10.0.0.2:30000", "controller": ORDER.controller})
    assert joined.asked == [ORDER]
    # The server's own thread stays free for other requests.
    assert threading.current_thread() not in joined.threads


@pytest.mark.parametrize("server", [SECRET, ""])
@pytest.mark.parametrize(
    ("keys", "status"),
    [([KEY], 200), ([], 403), ([""], 403), (["wrong"], 403), ([KEY, "wrong"], 403)],
)
async def test_key_of_the_server_opens_its_join_route(
    keys: list[str], status: int, server: str
) -> None:
    joined = Joined()
    headers = [(KEY_HEADER.encode(), key.encode()) for key in keys]
    route = JoinRoute(engine, server, KEY, joined)
    body = msgspec.json.encode(ORDER)
    assert (await request(route, "POST", JOIN_PATH, body, headers))[0] == status
    assert joined.asked == [ORDER] * (status == 200)


async def test_server_without_a_key_opens_its_join_route_to_no_key() -> None:
    joined = Joined()
    route = JoinRoute(engine, "", "", joined)
    headers = [(KEY_HEADER.encode(), b"")]
    assert (await request(route, "POST", JOIN_PATH, b"{}", headers))[0] == 403
    assert joined.asked == []


@pytest.mark.parametrize(
    ("server", "shown"),
    [
        *((ENGINE, token) for token in ("", "wrong", SECRET, ENGINE + " ")),
        *((SECRET, role_token(SECRET, role)) for role in (Access.TRAINER, Access.CLIENT)),
        ("", ""),
        ("", ENGINE),
    ],
)
async def test_strangers_and_other_roles_are_refused(server: str, shown: str) -> None:
    joined = Joined()
    status, answer = await ask(joined, b"{}", shown, server=server)
    assert (status, answer["error"]) == (
        403,
        "/windlass/join requires a token of role owner or engine or the server's key, got neither",
    )
    assert (await ask(joined, b"{}", server=server))[0] == 403
    assert (await ask(joined, b"{}", ENGINE, shown, server=server))[0] == 403
    assert joined.asked == []


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{}", 400, "missing required field `controller`"),
        (b'{"controller": 1}', 400, "Expected `str`, got `int` - at `$.controller`"),
        (b'{"controller": "x", "secret": "y"}', 400, "unknown field `secret`"),
        (b"not JSON at all", 400, "body must be a join order"),
        (b" " * (MAX_BODY_NBYTES + 1), 413, "body must be at most 65536 bytes"),
    ],
)
async def test_a_malformed_join_order_is_refused(body: bytes, status: int, says: str) -> None:
    joined = Joined()
    answered, answer = await ask(joined, body, ENGINE)
    assert (answered, says in answer["error"]) == (status, True), answer
    assert joined.asked == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("controller must be http://"), 400),
        (ProtocolError("join: the engine is on its way"), 409),
        (MustWait("the controller before must have gone"), 409),
        (PeerUnreachable("rank 1: UnsupportedLayout: x"), 502),
        (PeerTimeout("ranks [1] have not reported"), 502),
    ],
)
async def test_a_failed_join_answers_with_its_reason(error: WindlassError, status: int) -> None:
    answer = await ask(Joined(error), msgspec.json.encode(ORDER), ENGINE)
    assert answer == (status, {"error": f"{type(error).__name__}: {error}"})


async def test_requests_to_other_routes_reach_the_engine() -> None:
    assert await ask(Joined(), b"{}", ENGINE, path="/generate") == (204, "the engine's")
    status, answer = await ask(Joined(), b"{}", ENGINE, method="GET")
    assert (status, answer["error"]) == (405, "/windlass/join takes POST")
