"""Attacks on the endpoint for agents: other keys, large and slow bodies, ended sessions, floods."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from chat_fleet import QUESTION, TOKEN, Client
from fake_engine import FakeEngine

from windlass.net.access import Access, role_token
from windlass.rollout import (
    ChatSession,
    ChatSettings,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    WorkflowContext,
)
from windlass.rollout.chat import server
from windlass.rollout.chat import session as session_module

BODY = {"messages": [QUESTION], "max_tokens": 2}
WITHIN_S = 60.0


class Rig:
    """Sessions that stay open until the test has ended."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self.may_end, self.ended = asyncio.Event(), asyncio.Event()
        self.http: aiohttp.ClientSession
        self.engine: FakeEngine

    async def sessions(self, count: int, max_requests: int = 4) -> list[ChatSession]:
        found: asyncio.Queue[ChatSession] = asyncio.Queue()
        done = self.may_end

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                found.put_nowait(session)
                await done.wait()
            self.ended.set()

        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        self.engine = await self._stack.enter_async_context(FakeEngine("engine"))
        engines = StaticEngines([self.engine.entry])
        controller = await self._stack.enter_async_context(
            RolloutController(engines, StalenessPolicy.unbounded(64), token=TOKEN)
        )
        self._stack.callback(done.set)
        settings = ChatSettings(
            tokenizer=str(self._folder), max_body_nbytes=1 << 20, max_requests=max_requests
        )
        controller.run_here({"agent": agent}, chat=settings)
        for _ in range(count):
            controller.submit_workflow("agent", None, SamplingParams(max_new_tokens=8))
        return [await asyncio.wait_for(found.get(), WITHIN_S) for _ in range(count)]

    def client(self, session: ChatSession, key: str = "") -> Client:
        return Client(self.http, session.base_url, key or session.api_key)


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack, folder)


async def test_only_the_whole_key_of_a_session_opens_it(rig: Rig) -> None:
    first, second = await rig.sessions(2)
    stolen = first.api_key.split("-")
    other = second.api_key.split("-")
    wrong = (
        "wrong",
        "",
        "-".join([*stolen[:3], other[3]]),
        first.api_key[:-1],
        first.api_key + "0",
        "sk-windlass-" + first.session_id,
        "sk-windlass-" + first.session_id + "-\u00e9",
        TOKEN,
        role_token(TOKEN, Access.AGENT),
    )
    for key in wrong:
        answer = await rig.client(first, key or "x").ask("/chat/completions", BODY, 401)
        assert answer["error"]["code"] == "invalid_api_key"
    async with rig.http.post(f"{first.base_url}/chat/completions", json=BODY) as refused:
        assert refused.status == 401
    # A session can neither claim rollouts, nor end another session, nor read its responses.
    await rig.client(first).ask("/sessions", {}, 401)
    path = f"/sessions/{second.session_id}/reward"
    await rig.client(first).ask(path, {"reward": 1.0}, 401)
    response = await rig.client(second).ask("/responses", {"input": "x"})
    more = {"input": "y", "previous_response_id": response["id"]}
    await rig.client(first).ask("/responses", more, 404)
    await rig.client(second).ask("/responses", more)
    assert second.reward is None


async def test_an_ended_session_refuses_its_key(rig: Rig) -> None:
    (session,) = await rig.sessions(1)
    client = rig.client(session)
    await client.ask("/chat/completions", BODY)
    path = f"/sessions/{session.session_id}/reward"
    refused = await client.ask(path, {"reward": "much"}, 400)
    assert refused["error"]["type"] == "invalid_request_error"
    await client.ask(path, {"reward": 1.0})
    for later in ("/chat/completions", "/completions", "/responses"):
        await client.ask(later, BODY, 401)
    await client.ask(path, {"reward": 2.0}, 400)
    assert session.reward == 1.0


async def test_an_ended_session_refuses_other_metadata_with_its_reward(rig: Rig) -> None:
    (session,) = await rig.sessions(1)
    client, path = rig.client(session), f"/sessions/{session.session_id}/reward"
    given = {"reward": 1.0, "metadata": {"passed": [1, 2], "failed": None}}
    others = (
        {"reward": 1.0},
        {"reward": 1.0, "metadata": {"passed": [1, 3], "failed": None}},
    )
    await client.ask(path, given)
    for other in others:
        await client.ask(path, other, 400)
    await client.ask(path, given)
    rig.may_end.set()
    await asyncio.wait_for(rig.ended.wait(), WITHIN_S)
    for other in others:
        refused = await client.ask(path, other, 409)
        assert refused["error"]["message"].startswith(
            "reward: metadata must be that of the ended session"
        )
    await client.ask(path, {**given, "reward": 2.0}, 409)
    turned = {"metadata": {"failed": None, "passed": [1, 2]}, "reward": 1}
    assert await client.ask(path, turned) == {"id": session.session_id, "reward": 1.0}


async def test_metadata_that_no_rollout_can_return_is_refused_with_its_reward(rig: Rig) -> None:
    (session,) = await rig.sessions(1)
    client, path = rig.client(session), f"/sessions/{session.session_id}/reward"
    deep: list[object] = []
    for _ in range(400):
        deep = [deep]
    for metadata in ({"sum": 1 << 64}, [0] * (1 << 17), {"tree": [deep] * 400}):
        refused = await client.ask(path, {"reward": 1.0, "metadata": metadata}, 400)
        assert refused["error"]["message"].startswith("reward: metadata"), metadata
        assert session.reward is None
    await client.chat([QUESTION])
    await client.ask(path, {"reward": 1.0, "metadata": {"sum": str(1 << 64)}})


async def test_large_bodies_and_deep_or_odd_json_are_refused(rig: Rig) -> None:
    (session,) = await rig.sessions(1)
    client = rig.client(session)
    url = f"{session.base_url}/chat/completions"
    large = io.BytesIO(b'{"messages": [{"role": "user", "content": "' + b"x" * (2 << 20))
    async with rig.http.post(url, data=large, headers=client.headers) as response:
        assert response.status == 413
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    many = {"messages": [QUESTION] * 8193}
    assert "at most 8192" in (await client.ask("/chat/completions", many, 400))["error"]["message"]
    for body in (b"[" * 100_000, b'{"messages": ' + b"[" * 100_000, b"\xff", b"", b"null"):
        async with rig.http.post(url, data=body, headers=client.headers) as response:
            assert response.status == 400, body[:20]
            assert (await response.json())["error"]["type"] == "invalid_request_error"
    await client.ask("/chat/completions", BODY)


async def test_the_body_of_a_stranger_is_never_read(rig: Rig) -> None:
    (session,) = await rig.sessions(1)
    sent = await send_slowly(session, key="wrong", num_parts=200, pause_s=0.0)
    assert b"401" in sent


async def test_slow_bodies_end_at_a_deadline_and_delay_no_other_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (session,) = await rig.sessions(1)
    monkeypatch.setattr(server, "BODY_DEADLINE_S", 1.0)
    begin = time.monotonic()
    slow = [asyncio.create_task(send_slowly(session, session.api_key, 100, 0.1)) for _ in range(3)]
    await asyncio.sleep(0.2)
    await rig.client(session).ask("/chat/completions", BODY)
    assert time.monotonic() - begin < 0.9
    assert all(b"408" in answer for answer in await asyncio.gather(*slow))


async def send_slowly(session: ChatSession, key: str, num_parts: int, pause_s: float) -> bytes:
    """Send a body in parts, and return the beginning of the answer."""
    parts = urlsplit(session.base_url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Length: {num_parts * 1000}\r\n\r\n"
    )
    writer.write(head.encode())
    answer = asyncio.create_task(reader.read(200))
    for _ in range(num_parts):
        if answer.done():
            break
        writer.write(b"x" * 1000)
        await asyncio.sleep(pause_s)
    found = await asyncio.wait_for(answer, WITHIN_S)
    writer.close()
    return found


async def test_requests_of_a_session_wait_and_too_many_are_refused_and_of_others_answered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MAX_WAITING_REQUESTS", 2)
    greedy, other = await rig.sessions(2)
    rig.engine.hold(1)
    client = rig.client(greedy)
    asking = [asyncio.create_task(client.ask("/chat/completions", BODY)) for _ in range(4)]
    await rig.engine.until_held(4)
    asking += [asyncio.create_task(client.ask("/chat/completions", BODY)) for _ in range(2)]
    await asyncio.sleep(0.2)
    assert rig.engine.num_active == 4
    answer = await client.ask("/chat/completions", BODY, 429)
    assert answer["error"]["type"] == "rate_limit_error"
    await rig.engine.release()
    await rig.client(other).ask("/chat/completions", BODY)
    await asyncio.gather(*asking)
    await client.ask("/chat/completions", BODY)


async def test_a_client_that_reads_no_stream_holds_up_no_other_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "READ_DEADLINE_S", 1.0)
    (session,) = await rig.sessions(1, max_requests=1)
    parts = urlsplit(session.base_url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    # Each event has the name of the model, so the stream has more bytes than the buffers of the connection.
    body = json.dumps({**BODY, "model": "m" * 500_000, "n": 16, "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    assert (await reader.read(12)).endswith(b"200")
    await asyncio.wait_for(rig.client(session).ask("/chat/completions", BODY), 20)
    writer.close()


async def test_a_waiting_request_learns_that_its_session_has_ended(rig: Rig) -> None:
    (session,) = await rig.sessions(1, max_requests=1)
    rig.engine.hold(1)
    client = rig.client(session)
    asking = [asyncio.create_task(client.ask("/chat/completions", BODY, 401)) for _ in range(3)]
    await rig.engine.until_held(1)
    await client.ask(f"/sessions/{session.session_id}/reward", {"reward": 1.0})
    await asyncio.wait_for(asyncio.gather(*asking), WITHIN_S)


async def test_a_session_with_too_many_tokens_is_refused_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MAX_SESSION_TOKENS", 100)
    (session,) = await rig.sessions(1)
    await rig.client(session).ask("/chat/completions", BODY)
    await rig.client(session).ask("/chat/completions", BODY)
    answer = await rig.client(session).ask("/chat/completions", BODY, 400)
    assert answer["error"]["code"] == "session_full"


async def test_requests_at_a_time_share_the_tokens_of_their_session(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MAX_SESSION_TOKENS", 100)
    (session,) = await rig.sessions(1)
    client = rig.client(session)
    rig.engine.hold(1)
    asking = [asyncio.create_task(client.ask("/chat/completions", BODY)) for _ in range(2)]
    await rig.engine.until_held(2)
    answer = await client.ask("/chat/completions", BODY, 400)
    assert answer["error"]["code"] == "session_full"
    # A cancelled request gives its tokens back.
    asking.pop().cancel()
    await rig.engine.until(lambda: rig.engine.num_active == 1)
    await rig.engine.release()
    await client.ask("/chat/completions", BODY)
    await asyncio.gather(*asking)


async def test_idle_strangers_do_not_keep_agents_out(rig: Rig) -> None:
    (session,) = await rig.sessions(1)
    parts = urlsplit(session.base_url)
    strangers = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(300)]
    await rig.client(session).ask("/chat/completions", BODY)
    for _, writer in strangers:
        writer.close()
