"""Routers of others in front of the engines, which are told whom they may send requests to.

Our own rollout controller asks the coordinator. A router that users bring (sglang-router, vLLM's, one of their
own) knows nothing of updates, and would go on sending requests to an engine that was left out of one. What is
told is always the whole fleet as it is then, so that what was lost, or told twice, does no harm; and a router
that was started anew is right again with the next update.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import final
from urllib.parse import quote

import aiohttp
import msgspec

from windlass.config import RouterConfig, RouterKind
from windlass.envs import ROUTER_TOKEN_VARIABLE, check_token, secret_value
from windlass.errors import PeerUnreachable, ProtocolError
from windlass.net.addresses import check_url
from windlass.net.sockets import connection_error, open_http
from windlass.updates.coordinator import Coordinator
from windlass.updates.fleet import EngineState, EngineStatus

logger = logging.getLogger(__name__)
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0
MAX_ANSWER_NBYTES = 1 << 22
MAX_SEEN = 4096
"""Engines that are remembered, so that one that is not connected any more is taken out of routers: the newest."""


class _Fleet(msgspec.Struct, frozen=True):
    """What is told.

    Attributes:
        published_version: which every routable engine serves.
        engines: all that were connected to this controller, or are, in order of their names.
    """

    published_version: int
    engines: tuple[EngineState, ...]


async def _tell_webhook(http: aiohttp.ClientSession, url: str, fleet: _Fleet) -> bool:
    """Post the fleet as JSON; any answer of 200 to 299 is a success."""
    body = msgspec.json.encode(
        {
            "published_version": fleet.published_version,
            "engines": [
                {
                    "name": engine.name,
                    "url": engine.url,
                    "version": engine.version,
                    "routable": engine.routable,
                    "state": engine.status,
                    "reason": engine.reason,
                }
                for engine in fleet.engines
            ],
        }
    )
    headers = {"Content-Type": "application/json"}
    async with http.post(url, data=body, headers=headers) as answer:
        await _body_of(answer)
    return True


class _Worker(msgspec.Struct):
    url: str
    id: str = ""


class _Workers(msgspec.Struct):
    workers: list[_Worker]


async def _tell_workers(http: aiohttp.ClientSession, url: str, fleet: _Fleet) -> bool:
    """Compare with `/workers` of sglang-router 0.3 (SGLang's model gateway) or vllm-router 0.1, and mend it.

    Seen of both by running them: GET lists workers; POST `{"url": ...}` adds one, at once (vllm-router) or
    later (sglang-router, which answers 202 and asks the engine first); DELETE takes the id of a worker where it
    has one, and its quoted URL otherwise. Workers that are no engines of this fleet are left alone.
    """
    url = f"{url.rstrip('/')}/workers"
    async with http.get(url) as answer:
        body = await _body_of(answer)
    try:
        listed = msgspec.json.decode(body, type=_Workers).workers
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{url}: {error}") from error
    known = {worker.url.rstrip("/"): worker for worker in listed}
    is_right = True
    for engine in fleet.engines:
        worker = known.get(engine.url.rstrip("/"))
        if engine.routable == (worker is not None):
            continue
        is_right = False
        if worker is None:
            change = http.post(url, json={"url": engine.url})
        else:
            change = http.delete(f"{url}/{quote(worker.id or worker.url, safe='')}")
        async with change as answer:
            await _body_of(answer)
    return is_right


async def _body_of(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_NBYTES:
            raise ProtocolError(f"{answer.url}: an answer of more than {MAX_ANSWER_NBYTES} bytes")
    if not 200 <= answer.status < 300:
        said = body[:200].decode(errors="replace")
        raise ProtocolError(f"{answer.url}: answered {answer.status}: {said!r}")
    return bytes(body)


_TELL = {RouterKind.WORKERS: _tell_workers, RouterKind.WEBHOOK: _tell_webhook}
"""Each returns whether the router sends requests to the routable engines now, and to no other one, and raises
aiohttp.ClientError, PeerUnreachable or ProtocolError if it is not there, or answered something else."""


@final
class RouterUpdates:
    """Tells routers, beside everything else: no round and no rollout ever waits for one.

    A router is told after every update and whenever an engine comes, goes or falls behind; not in the middle of
    a round, in which every engine is paused, nor before anything is published. Until it has been told it may
    send requests to an engine that is paused or out of date. One that does not answer is tried
    `RouterConfig.num_tries` times, and again at the next change.

    Args:
        coordinator: whose engines they are.
        routers: whom to tell. All are shown the token in WINDLASS_ROUTER_TOKEN, if there is one.

    Raises:
        ConfigError: an address that is none, or not of `https` where this process requires TLS.
    """

    def __init__(self, coordinator: Coordinator, routers: Iterable[RouterConfig]) -> None:
        self._coordinator = coordinator
        self._routers = tuple(routers)
        for each in self._routers:
            check_url(each.url, "RouterConfig: url")
        self._seen: dict[str, EngineState] = {}
        self._changed = [asyncio.Event() for _ in self._routers]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to tell; in the event loop of the coordinator.

        Raises:
            ConfigError: WINDLASS_ROUTER_TOKEN is nothing that a header can carry.
        """
        token = secret_value(ROUTER_TOKEN_VARIABLE)
        if token:
            check_token(token, ROUTER_TOKEN_VARIABLE)
        self._tasks = [
            asyncio.create_task(self._keep_told(config, changed, token), name=f"tell {config.url}")
            for config, changed in zip(self._routers, self._changed, strict=True)
        ]
        if self._tasks:
            self._coordinator.subscribe(self._look)
            self._coordinator.on_update(lambda _: self._look())
            self._look()

    async def close(self) -> None:
        """Tell nobody any more. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _look(self) -> None:
        for engine in self._coordinator.fleet.states():
            if engine.url:
                self._seen.pop(engine.name, None)
                self._seen[engine.name] = engine
        while len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        if not self._coordinator.in_round and self._coordinator.fleet.published >= 0:
            for changed in self._changed:
                changed.set()

    def _fleet(self) -> _Fleet:
        """As it is now: engines that are connected, and those that were, in whose place nobody is."""
        there = [engine for engine in self._coordinator.fleet.states() if engine.url]
        taken = {engine.name for engine in there} | {engine.url for engine in there}
        gone = [
            msgspec.structs.replace(engine, status=EngineStatus.GONE, reason="is not connected")
            for engine in self._seen.values()
            if taken.isdisjoint((engine.name, engine.url))
        ]
        engines = sorted((*there, *gone), key=lambda engine: engine.name)
        return _Fleet(self._coordinator.fleet.published, tuple(engines))

    async def _keep_told(self, config: RouterConfig, changed: asyncio.Event, token: str) -> None:
        told: _Fleet | None = None
        async with open_http(token, to_controller=False) as http:
            while True:
                await changed.wait()
                changed.clear()
                if (fleet := self._fleet()) != told:
                    told = fleet if await self._tell(http, config) else None

    async def _tell(self, http: aiohttp.ClientSession, config: RouterConfig) -> bool:
        """Returns whether it knows; each try tells how the fleet is then."""
        backoff_s, reason = FIRST_BACKOFF_S, ""
        for _ in range(config.num_tries):
            if self._coordinator.in_round:
                return False  # it is told when the round has ended
            try:
                async with asyncio.timeout(config.deadline_s):
                    if await _TELL[config.kind](http, config.url, self._fleet()):
                        return True
                reason = "it has not done yet what it was asked for"
            except TimeoutError:
                reason = f"no answer within {config.deadline_s} s"
            except (aiohttp.ClientError, OSError, PeerUnreachable, ProtocolError) as error:
                reason = connection_error(error)
            # A router that is away, or works it off: nothing can signal that it has come so far.
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        logger.error(
            "router %s does not know the fleet after %d tries, and is told at the next change: %s",
            *(config.url, config.num_tries, reason),
        )
        return False
