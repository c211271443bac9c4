"""`POST /generate` as SGLang has it, in front of vLLM's own `/inference/v1/generate`.

`--middleware windlass.engines.vllm.generate_route.GenerateRoute` puts it into vLLM's API server, so
that rollout workers speak one dialect with every engine. Weight versions per token are vLLM's own.
"""

from __future__ import annotations

from typing import Any, final

import msgspec

from windlass.engines.private_routes import App, Message, Receive, Send, answer
from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.rollout.messages import SamplingParams

__all__ = ["GenerateRoute"]

PATH = "/generate"
INNER_PATH = "/inference/v1/generate"
OK = 200
UNPROCESSABLE = 422


class _Request(msgspec.Struct, frozen=True):
    input_ids: list[int]
    sampling_params: SamplingParams = SamplingParams(max_new_tokens=16)
    rid: str = ""
    lora_path: str = ""
    """Name of a served adapter, as in SGLang's requests; empty asks the model itself."""


class _Candidate(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Candidate] | None = None


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[dict[str, Any]] | None = None


class _Response(msgspec.Struct, frozen=True):
    choices: list[_Choice]


@final
class GenerateRoute:
    """ASGI middleware. Everything but `POST /generate` passes through.

    Args:
        app: vLLM's.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        asked = (scope["type"], scope.get("path"), scope.get("method"))
        if asked != ("http", PATH, "POST"):
            await self._app(scope, receive, send)
            return
        try:
            body = _to_inner(msgspec.json.decode(await _body(receive), type=_Request))
        except (ConfigError, *DECODE_ERRORS) as error:
            await answer(send, UNPROCESSABLE, str(error).encode())
            return
        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        inner = {**scope, "path": INNER_PATH, "raw_path": INNER_PATH.encode(), "headers": headers}
        collected = _Collected()
        await self._app(inner, _replay(body, receive), collected.send)
        if collected.status == OK:
            await answer(send, OK, _to_outer(msgspec.json.decode(collected.body, type=_Response)))
        else:
            await answer(send, collected.status, collected.body)


class _Collected:
    """What the inner application sent."""

    def __init__(self) -> None:
        self.status = 500
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return what receives the new body first; afterwards what the client does (it may hang up)."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


def _to_inner(request: _Request) -> bytes:
    sampling = request.sampling_params
    body: dict[str, object] = {
        "token_ids": request.input_ids,
        "sampling_params": {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
        },
    }
    if request.lora_path:
        body["model"] = request.lora_path
    if request.rid:
        body["request_id"] = request.rid
    return msgspec.json.encode(body)


def _to_outer(response: _Response) -> bytes:
    choice = response.choices[0]
    tokens = choice.token_ids or []
    content = choice.logprobs.content if choice.logprobs is not None else None
    meta = {
        "finish_reason": {"type": choice.finish_reason or "stop"},
        "completion_tokens": len(tokens),
        "output_token_logprobs": [[c.logprob, c.token_id, None] for c in content or []],
        "weight_versions": choice.weight_versions,
    }
    return msgspec.json.encode({"output_ids": tokens, "meta_info": meta})
