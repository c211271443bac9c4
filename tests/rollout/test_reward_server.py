"""Rewards from a server: the content of requests, their repetition, and the cost of each fault."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate

import pytest
from aiohttp import web
from kept_port import free_port
from test_rewards import rollouts

from windlass.envs import removed_secrets
from windlass.errors import ConfigError
from windlass.rollout import RewardError, RewardServer, ServerRewards

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, port: int = 0) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/score", handler)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    finally:
        await runner.cleanup()


async def sums(request: web.Request) -> web.StreamResponse:
    asked = (await request.json())["rollouts"]
    return web.json_response({"rewards": [sum(each["output_ids"]) for each in asked]})


async def failure_of(handler: Handler, **settings: object) -> tuple[str, RewardServer]:
    """Return the one reason that all three rollouts get."""
    async with serving(handler) as url:
        config = ServerRewards(url=url, **settings)  # type: ignore[arg-type]
        async with RewardServer(config) as server:
            found = await server.score(rollouts(["x"] * 3))
    assert all(isinstance(each, RewardError) for each in found)
    (reason,) = {str(each) for each in found}
    assert server.counts.failed == 3
    return reason.replace(url, "URL"), server


async def test_rollouts_travel_in_batches_and_get_their_own_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WINDLASS_REWARD_TOKEN", "a-token")
    sizes: list[int] = []

    async def score(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer a-token"
        asked = json.loads(await request.text())["rollouts"]
        sizes.append(len(asked))
        rewards = [{"error": "no number"} if r["metadata"] == 4 else r["metadata"] for r in asked]
        return web.json_response({"rewards": rewards})

    try:
        async with (
            serving(score) as url,
            RewardServer(ServerRewards(url=url, batch_size=4)) as server,
        ):
            found = await server.score(rollouts(range(10)))
    finally:
        removed_secrets.pop("WINDLASS_REWARD_TOKEN", None)
    assert sorted(sizes) == [2, 4, 4]
    assert str(found[4]) == f"rollout task-4: {url}: no number"
    assert [each for n, each in enumerate(found) if n != 4] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert (server.counts.scored, server.counts.reasons) == (9, {"server": 1})


async def test_request_that_fails_in_passing_is_repeated() -> None:
    statuses = [503, 429, 500]

    async def score(request: web.Request) -> web.StreamResponse:
        return web.Response(status=statuses.pop(), text="busy") if statuses else await sums(request)

    async with serving(score) as url, RewardServer(ServerRewards(url=url)) as server:
        assert await server.score(rollouts(["x"] * 2)) == (1.0, 21.0)
    assert statuses == []


@pytest.mark.parametrize("as_date", [False, True])
async def test_a_request_is_not_repeated_before_the_time_that_the_server_names(
    *, as_date: bool
) -> None:
    times: list[float] = []

    async def score(request: web.Request) -> web.StreamResponse:
        times.append(time.time())
        if len(times) > 1:
            return await sums(request)
        # A date has whole seconds.
        value = formatdate(times[0] + 3, usegmt=True) if as_date else "2"
        return web.Response(status=429, text="busy", headers={"Retry-After": value})

    async with serving(score) as url, RewardServer(ServerRewards(url=url)) as server:
        assert await server.score(rollouts(["x"] * 2)) == (1.0, 21.0)
    first, second = times
    assert second - first >= 1.9


async def test_invalid_waits_are_ignored_and_too_long_waits_are_an_error() -> None:
    for value in ("soon", "-1", "9" * 400):
        times: list[float] = []

        async def score(
            _: web.Request, seen: list[float] = times, value: str = value
        ) -> web.Response:
            seen.append(time.time())
            return web.Response(status=503, text="busy", headers={"Retry-After": value})

        reason, _ = await failure_of(score, deadline_s=0.8)
        is_long = value.startswith("9")
        assert ("Retry-After must end before the deadline of 0.8 s" in reason) is is_long
        assert ("no rewards within 0.8 s" in reason) is not is_long
        assert "HTTP 503: busy" in reason
        assert (len(times) == 1) is is_long


async def test_server_that_starts_late_costs_no_rollout() -> None:
    port = free_port()
    config = ServerRewards(url=f"http://127.0.0.1:{port}/score")
    async with RewardServer(config) as server:
        scoring = asyncio.create_task(server.score(rollouts(["x"] * 2)))
        await asyncio.sleep(0.3)
        async with serving(sums, port):
            assert await scoring == (1.0, 21.0)


async def test_reason_names_the_address_and_the_status_or_the_rule() -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=422, text="no such\nfield")

    async def fail(_: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="out of memory")

    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def too_few(_: web.Request) -> web.StreamResponse:
        return web.json_response({"rewards": [1.0]})

    async def text(_: web.Request) -> web.StreamResponse:
        return web.Response(text="1.0")

    async def elsewhere(_: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/other"})

    async def half(_: web.Request) -> web.StreamResponse:
        return web.Response(text='{"rewards": [1.0, 2.0')

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * (1 << 20))

    assert (await failure_of(refuse))[0] == "URL: HTTP 422: no such field"
    reason, _ = await failure_of(fail, deadline_s=0.5)
    assert reason.startswith("URL: no rewards within 0.5 s, in ")
    assert reason.endswith("newest: HTTP 502: out of memory")
    reason, _ = await failure_of(hang, deadline_s=0.5)
    assert reason == "URL: no rewards within 0.5 s, in 1 requests; newest: no answer"
    assert (await failure_of(too_few))[0] == "URL: rewards must have 3 entries, got 1"
    assert (await failure_of(text))[0].startswith("URL: Expected `object`, got `float`")
    assert (await failure_of(half))[0].startswith("URL: ")
    assert (await failure_of(elsewhere))[
        0
    ] == "URL: URL redirects to '/other', which is not followed"
    assert "at most 4194304 bytes" in (await failure_of(endless))[0]


async def test_invalid_reward_costs_only_its_rollout() -> None:
    async def score(_: web.Request) -> web.StreamResponse:
        # Python's own encoder sends NaN and Infinity in this way.
        entries = [
            "0.5",
            "NaN",
            "-Infinity",
            "null",
            "true",
            '"1.5"',
            "[1.5]",
            '{"error": "bad\\nrow"}',
        ]
        entries += ["1e999", "1" + "0" * 400, "{}", "2"]
        return web.Response(text=f'{{"rewards": [{", ".join(entries)}]}}')

    async with serving(score) as url, RewardServer(ServerRewards(url=url)) as server:
        found = await server.score(rollouts(["x"] * 12))
        assert (server.counts.scored, server.counts.failed) == (3, 9)
        assert server.counts.reasons == {"answer": 8, "server": 1}
    assert {n: each for n, each in enumerate(found) if not isinstance(each, RewardError)} == {
        0: 0.5,
        4: 1.0,
        11: 2.0,
    }
    reasons = {n: str(each).replace(url, "URL") for n, each in enumerate(found)}
    assert reasons[1] == "rollout task-1: URL: reward must be finite, got nan"
    assert reasons[3] == "rollout task-3: URL: reward must be one number, got None"
    assert reasons[5] == "rollout task-5: URL: reward must be one number, got '1.5'"
    assert reasons[7] == "rollout task-7: URL: bad row"
    assert reasons[10] == "rollout task-10: URL: reward must be one number, got {}"


@pytest.mark.parametrize("status", [400, 413, 422, 500])
async def test_rollout_that_fails_its_request_costs_only_itself(status: int) -> None:
    sizes: list[int] = []

    async def score(request: web.Request) -> web.StreamResponse:
        asked = (await request.json())["rollouts"]
        sizes.append(len(asked))
        if any(each["metadata"] == "poison" for each in asked):
            return web.Response(status=status, text="no number in the answer")
        return await sums(request)

    async with serving(score) as url:
        config = ServerRewards(url=url, deadline_s=5.0, max_requests=2)
        async with RewardServer(config) as server:
            found = await server.score(rollouts(["poison" if n == 21 else "x" for n in range(40)]))
        assert (server.counts.scored, server.counts.failed) == (39, 1)
    assert f"HTTP {status}: no number in the answer" in str(found[21])
    for number, reward in enumerate(found):
        assert number == 21 or reward == 20.0 * number + 1
    assert sizes[0] == 40
    assert sorted(sizes)[-2:] == [20, 40] if status != 500 else sizes.count(40) > 1


async def test_refusal_of_every_request_is_not_repeated_for_each_rollout() -> None:
    num_requests = 0

    async def refuse(_: web.Request) -> web.StreamResponse:
        nonlocal num_requests
        num_requests += 1
        return web.Response(status=403, text="wrong token")

    assert (await failure_of(refuse))[0] == "URL: HTTP 403: wrong token"
    assert num_requests == 1


async def test_request_above_its_size_limit_is_not_sent() -> None:
    async with serving(sums) as url:
        config = ServerRewards(url=url, max_request_nbytes=2000)
        async with RewardServer(config) as server:
            found = await server.score(rollouts(["x", "y" * 3000, "z"]))
    assert (found[0], found[2]) == (1.0, 41.0)
    assert "a request must have at most 2000 bytes, got 3" in str(found[1])


async def test_settings_and_values_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.url must be"):
        ServerRewards(url="reward-host:80")
    with pytest.raises(ConfigError, match=r"rewards\.batch_size must be >= 1, got 0"):
        ServerRewards(url="http://host", batch_size=0)
    async with RewardServer(ServerRewards(url="http://127.0.0.1:9/score")) as server:
        with pytest.raises(ConfigError, match="metadata and value must be msgpack-plain"):
            await server.score(rollouts([object()]))
