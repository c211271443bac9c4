"""Notify third-party routers of the engines that may receive requests.

A router (sglang-router, vllm-router, a user's own) does not know of weight updates. Without notifications it
would continue to send requests to an engine that missed an update. Every notification contains all engines, so
a lost or repeated notification does no harm, and the next update corrects a router that restarted.
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
from windlass.control.coordinator import Coordinator
from windlass.control.engine_state import EngineState, EngineStatus
from windlass.envs import ROUTER_TOKEN_VARIABLE, check_token, secret_value
from windlass.errors import PeerUnreachable, ProtocolError
from windlass.net.addresses import check_url
from windlass.net.clock import Backoff
from windlass.net.sockets import connection_error, open_http

logger = logging.getLogger(__name__)
BACKOFF = Backoff(0.1, 3.0)
"""Pauses between the tries to notify a router."""
MAX_ANSWER_NBYTES = 1 << 22
"""Largest size of a router's answer."""
MAX_SEEN = 4096
"""Number of URLs of engines that `RouterUpdates` remembers, so that it can make routers remove disconnected engines."""


class _Fleet(msgspec.Struct, frozen=True):
    """Content of a notification.

    Attributes:
        published_version: version that every routable engine serves.
        engines: engines that are or were connected to this controller, sorted by name.
        former_urls: earlier URLs of engines that now have another URL.
    """

    published_version: int
    engines: tuple[EngineState, ...]
    former_urls: tuple[str, ...] = ()


async def _tell_webhook(http: aiohttp.ClientSession, url: str, fleet: _Fleet) -> bool:
    """Post the fleet as JSON and return True. Raise `ProtocolError` unless the HTTP status is 200 to 299."""
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
    """Correct the router's list of workers at `/workers`; return whether the list was correct already.

    Workers that are not engines of this fleet stay unchanged. sglang-router 0.3 (SGLang's model gateway) and
    vllm-router 0.1 have the same routes: GET lists workers, POST `{"url": ...}` adds a worker, and DELETE takes the
    worker's id, or its quoted URL if the worker has no id. vllm-router asks the engine and adds the worker before it
    answers, and refuses an engine that does not answer. sglang-router answers 202, asks the engine and then adds the worker.

    Raises:
        ProtocolError: the router's list cannot be decoded, or the router refused a change. All other changes are made.
    """
    url = f"{url.rstrip('/')}/workers"
    async with http.get(url) as answer:
        body = await _body_of(answer)
    try:
        listed = msgspec.json.decode(body, type=_Workers).workers
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{url}: {error}") from error
    known = {worker.url.rstrip("/"): worker for worker in listed}
    wanted = {engine.url.rstrip("/"): engine.routable for engine in fleet.engines}
    wanted |= {former.rstrip("/"): False for former in fleet.former_urls}
    changes = [
        _body_at(http, "DELETE", f"{url}/{quote(known[each].id or known[each].url, safe='')}")
        for each, routable in wanted.items()
        if not routable and each in known
    ]
    changes += [
        _body_at(http, "POST", url, {"url": engine.url})
        for engine in fleet.engines
        if engine.routable and engine.url.rstrip("/") not in known
    ]
    # Make all changes at the same time. If the router cannot add one engine, it must still remove the
    # other engines.
    found = await asyncio.gather(*changes, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return not changes


async def _body_at(
    http: aiohttp.ClientSession, method: str, url: str, content: object = None
) -> bytes:
    """Send a request to a router, and return the body of the response; see `_body_of`."""
    async with http.request(method, url, json=content) as answer:
        return await _body_of(answer)


async def _body_of(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of a router's response.

    Raises:
        ProtocolError: the body has more than `MAX_ANSWER_NBYTES` bytes, or the HTTP status is not 200 to 299.
    """
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_NBYTES:
            raise ProtocolError(
                f"{answer.url}: the answer is larger than {MAX_ANSWER_NBYTES} bytes"
            )
    if not 200 <= answer.status < 300:
        said = body[:200].decode(errors="replace")
        raise ProtocolError(f"{answer.url}: answered {answer.status}: {said!r}")
    return bytes(body)


_TELL = {RouterKind.WORKERS: _tell_workers, RouterKind.WEBHOOK: _tell_webhook}
"""Router kind -> function that notifies a router, and returns True if the router is known to be up to date. The
function raises aiohttp.ClientError or PeerUnreachable if the router is unreachable, and ProtocolError if the
router's answer is not a success."""


@final
class RouterUpdates:
    """Background tasks that notify routers, so that no round and no rollout waits for a router.

    Each router is notified after every update, and when an engine joins, leaves or falls behind. There are no
    notifications before the first publish, and none during a round (an update), because a round pauses engines only
    briefly.
    Until a router is notified, it may send requests to an engine that is paused or has old weights. A failed
    notification is tried `RouterConfig.num_tries` times, and again at the next change.

    Args:
        coordinator: coordinator of the engines.
        routers: routers to notify. All receive the token in WINDLASS_ROUTER_TOKEN, if it is set.

    Raises:
        ConfigError: an address is not a URL, or is not `https` although this process requires TLS.
    """

    def __init__(self, coordinator: Coordinator, routers: Iterable[RouterConfig]) -> None:
        self._coordinator = coordinator
        self._routers = tuple(routers)
        for each in self._routers:
            check_url(each.url, "RouterConfig: url")
        self._seen: dict[str, EngineState] = {}
        """URL -> engine that was connected with this URL most recently."""
        self._changed = [asyncio.Event() for _ in self._routers]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the notifications; call this in the event loop of the coordinator.

        Raises:
            ConfigError: an HTTP header cannot carry the token in WINDLASS_ROUTER_TOKEN.
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
        """Stop the notifications. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _look(self) -> None:
        """Record the connected engines. Start notifications if a version is published and no round runs."""
        for engine in self._coordinator.fleet.states():
            if engine.url:
                self._seen.pop(engine.url, None)
                self._seen[engine.url] = engine
        while len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        if not self._coordinator.in_round and self._coordinator.fleet.published >= 0:
            for changed in self._changed:
                changed.set()

    def _fleet(self) -> _Fleet:
        """Return all known engines. Leave out a disconnected engine if a connected engine has its name or its URL."""
        there = [engine for engine in self._coordinator.fleet.states() if engine.url]
        urls, names = {engine.url for engine in there}, {engine.name for engine in there}
        gone = [engine for engine in self._seen.values() if engine.url not in urls]
        # An engine may have had several URLs. The last one is the newest.
        newest = {engine.name: engine for engine in gone if engine.name not in names}
        engines = there + [
            msgspec.structs.replace(engine, status=EngineStatus.GONE, reason="is not connected")
            for engine in newest.values()
        ]
        former = {engine.url for engine in gone} - {engine.url for engine in newest.values()}
        engines.sort(key=lambda engine: engine.name)
        return _Fleet(self._coordinator.fleet.published, tuple(engines), tuple(sorted(former)))

    async def _keep_told(self, config: RouterConfig, changed: asyncio.Event, token: str) -> None:
        """When `changed` is set, notify one router, unless the router has already confirmed the current fleet."""
        told: _Fleet | None = None
        async with open_http(token, to_controller=False) as http:
            while True:
                await changed.wait()
                changed.clear()
                if (fleet := self._fleet()) != told:
                    told = fleet if await self._tell(http, config) else None

    async def _tell(self, http: aiohttp.ClientSession, config: RouterConfig) -> bool:
        """Send the current fleet to one router, in up to `num_tries` tries; return whether the router is up to date.

        During a round, return False and send nothing: a new notification starts when the round ends.
        """
        reason = ""
        for num_tries in range(1, config.num_tries + 1):
            if self._coordinator.in_round:
                return False
            try:
                async with asyncio.timeout(config.deadline_s):
                    if await _TELL[config.kind](http, config.url, self._fleet()):
                        return True
                reason = "the router has not applied the changes yet"
            except TimeoutError:
                reason = f"no answer within {config.deadline_s} s"
            except (aiohttp.ClientError, OSError, PeerUnreachable, ProtocolError) as error:
                reason = connection_error(error)
            # Wait, because a router does not report when it has applied a change.
            await asyncio.sleep(BACKOFF.after(num_tries))
        logger.error(
            "router %s is not up to date after %d tries; the controller notifies it again at the next change; newest reason: %s",
            *(config.url, config.num_tries, reason),
        )
        return False
