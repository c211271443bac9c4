"""SGLang's route `POST /generate` for vLLM's API server, so that rollout workers send every engine the same request.

`--middleware windlass.engines.vllm.generate_route.GenerateRoute` adds the route. `GenerateRoute` forwards a request to
`/inference/v1/generate`, where vLLM reports the weight version of each token. Older releases do not have this route;
`CompletionsRoute` forwards to `/v1/completions` instead, and Windlass records the weight versions
(`windlass.engines.vllm.engine_core`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, final

import msgspec

from windlass.engines.private_routes import (
    App,
    Message,
    Receive,
    Send,
    answer,
    body_of,
    route_path,
)
from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.sampling import SamplingParams

PATH = "/generate"
MAX_BODY_NBYTES = 1 << 26
ABORT = "abort"
IMPOSSIBLE = -9999.0
"""vLLM's log-probability of a token that cannot be sampled."""


_Entry = tuple[float, int, None]
"""Entry of a response of `/generate`: log-probability, token, and None in place of the text."""


class _Request(msgspec.Struct, frozen=True):
    input_ids: list[int]
    sampling_params: SamplingParams = SamplingParams(max_new_tokens=16)
    rid: str = ""
    lora_path: str = ""
    """Name of a served LoRA adapter; empty for the base model. SGLang uses this name for the field."""
    priority: int = 0
    top_logprobs_num: int = 0
    stream: bool = False
    image_data: list[str] = []
    """Images as data URLs, in the order of their placeholders in `input_ids`."""
    return_prompt_token_ids: bool = False


class _Candidate(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    top_logprobs: list[_Candidate] = []

    def most_probable(self, num_tokens: int) -> list[_Entry]:
        """Return the `num_tokens` most probable tokens, the most probable first.

        In vLLM's list, the sampled token is first, even if other tokens are more probable.
        """
        found = [(each.logprob, each.token_id, None) for each in self.top_logprobs]
        possible = [each for each in found if each[0] > IMPOSSIBLE]
        return sorted(possible, key=lambda each: -each[0])[:num_tokens]


class _Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities: `content` from `/inference/v1/generate`, `token_logprobs` from `/v1/completions`."""

    content: list[_Candidate] | None = None
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float] | None] | None = None

    def candidates(self, tokens: Sequence[int]) -> list[_Candidate]:
        """Return one candidate for each generated token, from either form of vLLM's log-probabilities."""
        if self.content is not None:
            return self.content
        tops = self.top_logprobs or [None] * len(tokens)
        return [
            _Candidate(token, logprob, [_named_token(*each) for each in (top or {}).items()])
            for token, logprob, top in zip(tokens, self.token_logprobs, tops, strict=False)
        ]


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[dict[str, Any]] | None = None


def _named_token(name: str, logprob: float) -> _Candidate:
    """Return a token of `/v1/completions`, which has the name `token_id:ID`."""
    return _Candidate(int(name.removeprefix("token_id:")), logprob)


class _Noted(msgspec.Struct, frozen=True):
    weight_versions: list[dict[str, Any]] | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: _Noted | None = None


class GenerateRoute:
    """ASGI middleware that serves `POST /generate` and passes on all other requests."""

    path: ClassVar[str] = "/inference/v1/generate"
    """Path of vLLM's route to which a request is forwarded."""

    def __init__(self, app: App) -> None:
        self._app = app

    def to_inner(self, request: _Request) -> dict[str, object]:
        """Convert a request of `/generate` into a request of vLLM's route.

        Raises:
            ConfigError: the request has images, and this release of vLLM takes none.
        """
        # vLLM finds stop texts only in detokenized answers.
        sampling = {**_sampling(request), "detokenize": bool(request.sampling_params.stop)}
        inner = {"token_ids": request.input_ids, "sampling_params": sampling, **_named(request)}
        if request.stream:
            inner["stream"] = True
        if request.return_prompt_token_ids:
            inner["return_token_ids"] = True
        if request.image_data:
            _require_images()
            inner["content_parts"] = [{"type": "image_url", "url": u} for u in request.image_data]
        return inner

    def to_outer(self, body: bytes, num_top: int) -> dict[str, object]:
        """Convert the response of vLLM's route into a response of `/generate` with `num_top` tokens at each place."""
        found = msgspec.json.decode(body, type=_Answer)
        choice = found.choices[0]
        outer = _outer(choice, choice.token_ids or [], choice.weight_versions, num_top)
        return {**outer, **_prompt(found)}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, or pass it on to vLLM's application if it is not for `/generate`."""
        is_asked = scope["type"] == "http" and scope["method"] == "POST"
        if not is_asked or route_path(scope) != PATH:
            await self._app(scope, receive, send)
            return
        body = await body_of(receive, MAX_BODY_NBYTES)
        if len(body) > MAX_BODY_NBYTES:
            reason = f"body: must have at most {MAX_BODY_NBYTES} bytes, got more"
            await answer(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason.encode())
            return
        try:
            request = msgspec.json.decode(body, type=_Request)
            _check(request, scope)
            body = msgspec.json.encode(self.to_inner(request))
        except (ConfigError, *DECODE_ERRORS) as error:
            await answer(send, HTTPStatus.UNPROCESSABLE_ENTITY, str(error).encode())
            return
        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        path = scope.get("root_path", "") + self.path
        inner = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        status, found, events = 500, b"", None
        num_top = request.top_logprobs_num

        async def collect(message: Message) -> None:
            nonlocal status, found, events
            status = message.get("status", status)
            if _is_stream(message):
                events = _Events(num_top)
                await send({"type": message["type"], "status": status, "headers": _STREAM_HEADERS})
            elif events is not None:
                new = b"".join(events.of(message.get("body", b"")))
                await send({**message, "body": new})
            else:
                found += message.get("body", b"")

        await self._app(inner, _replay(body, receive), collect)
        if events is not None:
            return
        if status == HTTPStatus.OK:
            found = msgspec.json.encode(self.to_outer(found, num_top))
        await answer(send, status, found)


@final
class CompletionsRoute(GenerateRoute):
    """ASGI middleware that forwards `POST /generate` to vLLM's route `/v1/completions`.

    If a request is aborted, vLLM does not return the weight versions of the generated tokens. The response then has no
    tokens, and the rollout worker must send the request again.
    """

    path = "/v1/completions"

    def to_inner(self, request: _Request) -> dict[str, object]:
        """Return the body of the request to `/v1/completions`.

        Raises:
            ConfigError: the request has images, or needs the token ids of the prompt.
        """
        if request.image_data or request.return_prompt_token_ids:
            raise ConfigError(
                f"image_data must be empty for this vLLM server, got {len(request.image_data)} images: its route "
                f"{self.path} takes no token ids with images"
            )
        tokens = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return {"prompt": request.input_ids, **tokens, **_sampling(request), **_named(request)}

    def to_outer(self, body: bytes, num_top: int) -> dict[str, object]:
        """Return the response to `POST /generate` from vLLM's response."""
        found = msgspec.json.decode(body, type=_Answer)
        choice, noted = found.choices[0], found.kv_transfer_params
        versions = noted.weight_versions if noted is not None else None
        # The rollout worker cannot use tokens without versions. So return no tokens; the worker sends the request again.
        if choice.finish_reason == ABORT and versions is None:
            return _outer(choice, [], None, num_top)
        return _outer(choice, choice.token_ids or [], versions, num_top)


_STREAM_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


def _is_stream(message: Message) -> bool:
    """Return whether an ASGI message begins a response of server-sent events."""
    if message["type"] != "http.response.start" or message["status"] != HTTPStatus.OK:
        return False
    kind = dict(message.get("headers", ())).get(b"content-type", b"")
    return bool(kind.startswith(b"text/event-stream"))


@final
class _Events:
    """Conversion of the events of one answer of vLLM. Each event has the tokens since the last one."""

    def __init__(self, num_top: int) -> None:
        self._num_top, self._num_tokens, self._rest = num_top, 0, b""

    def of(self, body: bytes) -> Iterator[bytes]:
        """Append `body`, the next part of vLLM's response, and yield each event that is complete now."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield b"data: " + self._converted(line.removeprefix(b"data: ")) + b"\n\n"

    def _converted(self, data: bytes) -> bytes:
        """Return the data of an event in the form of `/generate`."""
        # An event without choices is an error or the end of the stream.
        found = msgspec.json.decode(data, type=_Answer) if data[:1] == b"{" else _Answer()
        if not found.choices:
            return data
        (choice,) = found.choices
        tokens = choice.token_ids or []
        self._num_tokens += len(tokens)
        outer = _outer(choice, tokens, choice.weight_versions, self._num_top)
        meta: dict[str, object] = {**outer["meta_info"], "completion_tokens": self._num_tokens}
        if choice.finish_reason is None:
            meta["finish_reason"] = None
        return msgspec.json.encode({**outer, "meta_info": meta, **_prompt(found)})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that returns `body` first, and then the client's messages (such as its disconnect)."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


def _check(request: _Request, scope: Message) -> None:
    """Check that the server can honour a request's stop texts and images (they need a tokenizer), and its priority.

    Raises:
        ConfigError: the server would ignore a part of the request, or load an image from a network.
    """
    if bad := [url for url in request.image_data if not url.startswith("data:image/")]:
        raise ConfigError(f"image_data must be data URLs of images, got {bad[0][:60]!r}")
    if not request.sampling_params.stop and not request.priority and not request.image_data:
        return
    # vLLM sets `state` before the server starts.
    config: Any = scope["app"].state.engine_client.vllm_config
    if request.priority and config.scheduler_config.policy != "priority":
        raise ConfigError(
            f"priority must be 0 without --scheduling-policy priority, got {request.priority}"
        )
    if request.image_data and not config.model_config.is_multimodal_model:
        raise ConfigError(
            f"image_data must be empty, got {len(request.image_data)} images: the server's model takes no images"
        )
    if request.image_data and config.model_config.skip_tokenizer_init:
        raise ConfigError(
            f"image_data must be empty, got {len(request.image_data)} images, because the server was started with "
            "--skip-tokenizer-init; remove this option"
        )
    if request.sampling_params.stop and config.model_config.skip_tokenizer_init:
        raise ConfigError(
            "sampling_params: stop must be empty, because the server was started with --skip-tokenizer-init; remove "
            "this option, or use stop_token_ids"
        )


def _require_images() -> None:
    """Raise `ConfigError` if vLLM's route would ignore images. Earlier releases have the route without them."""
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    if "content_parts" not in GenerateRequest.model_fields:
        raise ConfigError(
            f"image_data must be empty for this release of vLLM: {GenerateRoute.path} takes no images"
        )


def _prompt(found: _Answer) -> dict[str, object]:
    """Return the token ids of the prompt under SGLang's name, if vLLM reports them."""
    ids = found.prompt_token_ids
    return {} if ids is None else {"prompt_token_ids": ids}


def _sampling(request: _Request) -> dict[str, object]:
    """Return the sampling parameters under vLLM's names. Both of vLLM's routes use these names."""
    sampling = request.sampling_params
    structure = {
        "json": sampling.json_schema,
        "regex": sampling.regex,
        "grammar": sampling.ebnf,
        "choice": sampling.choice,
    }
    given = {
        "logit_bias": sampling.logit_bias,
        "stop": sampling.stop,
        "structured_outputs": {name: value for name, value in structure.items() if value},
    }
    return {
        **{name: value for name, value in given.items() if value},
        **({} if sampling.sampling_seed is None else {"seed": sampling.sampling_seed}),
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        # With 0, vLLM returns the log-probability of the sampled token only. Otherwise vLLM's list begins with the
        # sampled token, so ask for one more token.
        "logprobs": request.top_logprobs_num + 1 if request.top_logprobs_num else 0,
    }


def _named(request: _Request) -> dict[str, object]:
    """Return the fields for a request's adapter, id and priority. Leave out empty fields."""
    return {
        **({"model": request.lora_path} if request.lora_path else {}),
        **({"request_id": request.rid} if request.rid else {}),
        **({"priority": request.priority} if request.priority else {}),
    }


def _outer(
    choice: _Choice, tokens: Sequence[int], versions: object, num_top: int
) -> dict[str, Any]:
    """Return the response of `/generate` with these tokens. `versions` may be None."""
    given = choice.logprobs.candidates(tokens) if choice.logprobs is not None and tokens else []
    meta: dict[str, object] = {
        "finish_reason": {"type": choice.finish_reason or "stop"},
        "completion_tokens": len(tokens),
        "output_token_logprobs": [[each.logprob, each.token_id, None] for each in given],
        "weight_versions": versions,
    }
    if num_top:
        meta["output_top_logprobs"] = [each.most_probable(num_top) for each in given]
    return {"output_ids": tokens, "meta_info": meta}
