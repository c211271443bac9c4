"""An engine without a model: SGLang's `/generate`, with faults that the test controls."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from aiohttp import web

from windlass.net.addresses import listen
from windlass.net.listener import stop_accepting
from windlass.sampling import SamplingParams

__all__ = ["FakeEngine", "expected_tokens"]


def expected_tokens(prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Return the tokens that every `FakeEngine` answers: distinct per prompt and per position."""
    return tuple(prompt_ids[0] * 1000 + len(prompt_ids) + i for i in range(num_tokens))


@dataclass(slots=True, eq=False)
class _Request:
    input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False


class _Body(msgspec.Struct):
    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: bool
    stream: bool = False


class FakeEngine:
    """Engine that serves on its own port. All methods run in its event loop.

    Args:
        name: name in the directory.
        version: version of further tokens; may be assigned.
        token_versions: whether answers contain `output_token_versions`.
        token_s: seconds per token.
    """

    def __init__(
        self, name: str, *, version: int = 0, token_versions: bool = True, token_s: float = 0.0
    ) -> None:
        self.name = name
        self.version = version
        self.url = ""
        self.failing = False
        self.num_requests = 0
        self.authorizations: set[str] = set()
        self._token_versions = token_versions
        self._token_s = token_s
        self._hold_at: int | None = None
        self._hold_per_version = False
        self._active: set[_Request] = set()
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.post("/generate", self._generate)])
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05
        )
        await self._runner.setup()
        self._listener = listen("127.0.0.1", 0, "FakeEngine")
        await web.SockSite(self._runner, self._listener, backlog=4096).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Close every connection and the port. Idempotent."""
        if self._runner is not None and self._listener is not None:
            runner, self._runner = self._runner, None
            await stop_accepting(self._listener)
            await runner.cleanup()

    @property
    def entry(self) -> tuple[str, str, int]:
        """Return the engine's line in a directory."""
        return (self.name, self.url, self.version)

    @property
    def num_active(self) -> int:
        """Number of running requests."""
        return len(self._active)

    def hold(self, num_tokens: int, *, per_version: bool = False) -> None:
        """Hold each request after `num_tokens` new tokens.

        With `per_version`, only tokens of the current version count, and `serve` continues held
        requests.
        """
        self._hold_at, self._hold_per_version = num_tokens, per_version

    async def serve(self, version: int) -> None:
        """Make all further tokens with `version`."""
        self.version = version
        async with self._changed:
            self._changed.notify_all()

    async def release(self) -> None:
        """Continue held requests."""
        self._hold_at = None
        async with self._changed:
            self._changed.notify_all()

    async def abort(self) -> None:
        """End every running request with the tokens that it has."""
        self._hold_at = None
        async with self._changed:
            for request in self._active:
                request.aborted = True
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool], *, deadline_s: float = 60.0) -> None:
        """Wait until `condition` holds; check it whenever a request changes."""
        async with asyncio.timeout(deadline_s), self._changed:
            await self._changed.wait_for(condition)

    async def until_held(self, num_requests: int) -> None:
        """Wait until `num_requests` requests are held."""
        await self.until(lambda: sum(map(self._held, self._active)) >= num_requests)

    def _held(self, request: _Request) -> bool:
        made = request.versions
        count = made.count(self.version) if self._hold_per_version else len(made)
        return self._hold_at is not None and count >= self._hold_at

    async def _generate(self, http_request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await http_request.read(), type=_Body)
        self.num_requests += 1
        self.authorizations.add(http_request.headers.get("Authorization", ""))
        if self.failing:
            return web.json_response({"error": "out of order"}, status=500)
        request = _Request(body.input_ids)
        self._active.add(request)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if body.stream:
            await stream.prepare(http_request)
        try:
            for _ in range(body.sampling_params.max_new_tokens):
                if self._token_s:
                    await asyncio.sleep(self._token_s)
                if self._held(request):
                    async with self._changed:
                        self._changed.notify_all()
                        await self._changed.wait_for(
                            lambda: request.aborted or not self._held(request)
                        )
                if request.aborted:
                    break
                context = len(request.input_ids) + len(request.output_ids)
                request.output_ids.append(request.input_ids[0] * 1000 + context)
                request.versions.append(self.version)
                if body.stream:
                    await stream.write(self._event(request, is_last=False))
        finally:
            self._active.discard(request)
            # Notify waiters even if the client has disconnected.
            async with self._changed:
                self._changed.notify_all()
        if body.stream:
            await stream.write(self._event(request, is_last=True))
            await stream.write(b"data: [DONE]\n\n")
            return stream
        return web.json_response(self._answer(request))

    def _event(self, request: _Request, *, is_last: bool) -> bytes:
        """Return an event with all tokens so far, as SGLang's."""
        answer = self._answer(request)
        if not is_last:
            answer["meta_info"]["finish_reason"] = None
        return b"data: " + msgspec.json.encode(answer) + b"\n\n"

    def _answer(self, request: _Request) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "finish_reason": {"type": "abort" if request.aborted else "length"},
            "output_token_logprobs": [[-token / 1e6, token, None] for token in request.output_ids],
            "weight_version": str(self.version),
        }
        if self._token_versions:
            meta["output_token_versions"] = request.versions
        return {"output_ids": request.output_ids, "meta_info": meta}
