"""HTTP server of rank 0, with some of SGLang's routes; its event loop runs in a separate thread."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, final

import msgspec
import transformers
from aiohttp import web

from windlass.config import PauseMode
from windlass.engines.embedded.scheduler import Request, Scheduler
from windlass.engines.embedded.spec import EngineSettings
from windlass.errors import DECODE_ERRORS, ConfigError, PeerTimeout, ProtocolError
from windlass.net.access import Access
from windlass.net.server import ControlServer
from windlass.sampling import SamplingParams

PAUSE_DEADLINE_S = 30.0
START_DEADLINE_S = 60.0
MAX_BODY_NBYTES = 1 << 26


class _Generate(msgspec.Struct, frozen=True):
    input_ids: list[int]
    sampling_params: SamplingParams = SamplingParams(max_new_tokens=16)
    rid: str = ""
    stream: bool = False
    lora_path: str = ""
    priority: int = 0
    top_logprobs_num: int = 0
    image_data: list[str] = []


class _Pause(msgspec.Struct, frozen=True):
    mode: PauseMode = PauseMode.ABORT


class _Abort(msgspec.Struct, frozen=True):
    rid: str


CLIENT_ROUTES = dict.fromkeys(
    ("/generate", "/abort_request", "/health", "/health_generate", "/server_info", "/model_info"),
    (Access.CLIENT, Access.WORKER),
)
"""Routes that also accept the token of a rollout client and the client certificate of a worker.

Every other route requires the engine's own token.
"""


class _Version(msgspec.Struct, frozen=True):
    new_version: int


@final
class EngineServer:
    """HTTP server of the engine; it serves until the process ends.

    Every route accepts `token`. `CLIENT_ROUTES` also accept tokens that are derived from `token` for rollout clients,
    and `engine_token` if it is not empty. Tokens in `eos_token_ids` end a generation, unless the request sets
    `ignore_eos`. `read_weight` returns the values of a parameter by name. `require_weights`
    raises ConfigError while the weights are lost, and `sleep` makes all ranks sleep (`Sleeper.sleep`).
    """

    def __init__(
        self,
        settings: EngineSettings,
        token: str,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        read_weight: Callable[[str], list[Any]],
        require_weights: Callable[[str], None],
        sleep: Callable[[PauseMode, float], None],
        engine_token: str = "",
    ) -> None:
        self._settings = settings
        self._server = ControlServer(
            host=settings.host,
            port=settings.port,
            advertise_host=settings.advertise_host,
            token=token,
            routes=CLIENT_ROUTES,
            extra_token=(engine_token, Access.CLIENT),
            middlewares=[_name_errors],
            max_body_nbytes=MAX_BODY_NBYTES,
            what=f"engine {settings.name}",
        )
        self._server.bind()
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._read_weight, self._require, self._sleep = read_weight, require_weights, sleep
        self._pauses = 0
        self._tokenizer: Any = None

    @property
    def url(self) -> str:
        """Address to which clients connect."""
        return self._server.url

    def start(self) -> None:
        """Start the server in a daemon thread, and wait until it accepts requests.

        Raises:
            PeerTimeout: the server does not accept requests within `START_DEADLINE_S`.
            OSError: the server cannot listen on its address.
        """
        self._server.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/health", self._health),
                web.get("/health_generate", self._health),
                web.get("/server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.get("/get_weights_by_name", self._get_weights),
                web.post("/pause_generation", self._pause),
                web.post("/release_memory_occupation", self._release),
                web.post("/continue_generation", self._continue),
                web.post("/update_weight_version", self._update_version),
                web.post("/abort_request", self._abort),
                web.post("/flush_cache", self._health),
            ]
        )
        loop = asyncio.new_event_loop()

        def serve() -> None:
            loop.run_forever()
            loop.close()

        threading.Thread(target=serve, name="http", daemon=True).start()
        try:
            asyncio.run_coroutine_threadsafe(self._server.start(), loop).result(START_DEADLINE_S)
        except BaseException as error:
            loop.call_soon_threadsafe(loop.stop)
            if not isinstance(error, FutureTimeout):
                raise
            where = f"engine {self._settings.name}: {self.url}"
            raise PeerTimeout(f"{where} does not serve after {START_DEADLINE_S} s") from None

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        """Queue a request. Answer when its generation has ended, or stream the answer.

        Raise ConfigError for an invalid request. The server then answers with status 400.
        """
        body = msgspec.json.decode(await http.read(), type=_Generate)
        if body.lora_path:
            raise ConfigError(
                f"lora_path must be empty, got {body.lora_path!r}: the embedded engine serves no adapters"
            )
        if body.image_data:
            raise ConfigError(
                f"image_data must be empty for the embedded engine, got {len(body.image_data)} images; use vLLM or SGLang"
            )
        if body.priority:
            raise ConfigError(
                f"priority must be 0 for the embedded engine, got {body.priority}; use vLLM or SGLang"
            )
        if not body.input_ids:
            raise ConfigError("input_ids must not be empty, got []")
        if bad := [token for token in body.input_ids if not 0 <= token < self._vocab_size]:
            raise ConfigError(f"input_ids must be in [0, {self._vocab_size}), got {bad[0]}")
        sampling = body.sampling_params
        if sampling.has_structure:
            raise ConfigError(
                "sampling_params: json_schema, regex, ebnf and choice must be empty for the embedded engine; use vLLM or "
                "SGLang"
            )
        if bad := [token for token in sampling.logit_bias if token >= self._vocab_size]:
            raise ConfigError(
                f"sampling_params: logit_bias must have token ids below {self._vocab_size}, got {bad[0]}"
            )
        find_stop = await self._stop_finder(sampling.stop)
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self._eos
        done: Future[Request] = Future()
        # Mark the future as running, so that a client that disconnects cannot cancel it.
        done.set_running_or_notify_cancel()
        request = Request(
            rid=body.rid or uuid.uuid4().hex,
            input_ids=body.input_ids,
            sampling=sampling,
            stop_token_ids=frozenset(stops),
            on_finish=done.set_result,
            has_stop_text=find_stop,
            num_top=body.top_logprobs_num,
        )
        if body.stream:
            return await self._stream(http, request, asyncio.wrap_future(done))
        self._scheduler.submit(request)
        if (finished := await asyncio.wrap_future(done)).failure:
            return web.json_response({"error": finished.failure}, status=500)
        answer = msgspec.json.encode(self._answer(finished, 0))
        return web.Response(body=answer, content_type="application/json")

    async def _stream(
        self, http: web.Request, request: Request, done: asyncio.Future[Request]
    ) -> web.StreamResponse:
        """Queue a request, and send its tokens as server-sent events. If the client disconnects, end the generation.

        Each event has the tokens since the last event, as in SGLang with `--incremental-streaming-output`.
        """
        loop, has_new = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(has_new.set)

        request.on_token = tell
        done.add_done_callback(lambda _: has_new.set())
        self._scheduler.submit(request)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        num_sent = 0
        try:
            await stream.prepare(http)
            while not done.done():
                await has_new.wait()
                has_new.clear()
                # If the request is done, the event after this loop sends the remaining tokens.
                if not done.done() and (num_tokens := len(request.versions)) > num_sent:
                    await stream.write(_event(self._answer(request, num_sent, num_tokens)))
                    num_sent = num_tokens
            if request.failure:
                await stream.write(_event({"error": {"message": request.failure, "code": 500}}))
            else:
                await stream.write(_event(self._answer(request, num_sent)))
            await stream.write(b"data: [DONE]\n\n")
            await stream.write_eof()
        finally:
            self._scheduler.abort(request.rid)
        return stream

    def _answer(self, request: Request, begin: int, end: int | None = None) -> dict[str, object]:
        """Return the tokens [begin, end) of an answer.

        If `end` is None, the answer is finished: return the rest of its tokens, its finish reason, and the versions of
        all its tokens.
        """
        finish = request.finish if end is None else None
        end = len(request.versions) if end is None else end
        tokens, versions = request.output_ids[begin:end], request.versions
        logprobs = request.logprobs[begin:end]
        meta: dict[str, object] = {
            "id": request.rid,
            "finish_reason": None if finish is None else {"type": str(finish)},
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": end,
            "weight_version": str(versions[-1] if versions else self._scheduler.version),
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)
            ],
        }
        if request.num_top:
            meta["output_top_logprobs"] = [
                [[logprob, token, None] for logprob, token in top] for top in request.top[begin:end]
            ]
        if finish is not None:
            meta["output_token_versions"] = versions
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    async def _stop_finder(self, texts: Sequence[str]) -> Callable[[list[int]], bool]:
        """Return a function that takes output ids and returns whether the text of the last ids contains one of `texts`.

        Raises:
            ConfigError: `texts` is not empty, and the model's folder has no tokenizer.
        """
        if not texts:
            return lambda _: False
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(_tokenizer_of, self._settings.model)
        decode = self._tokenizer.decode
        # A text of n bytes has at most n tokens. Four more tokens cover a character that is split into several tokens.
        length = 4 + max(len(text.encode()) for text in texts)

        def has_stop(output_ids: list[int]) -> bool:
            tail = decode(output_ids[-length:])
            return any(text in tail for text in texts)

        return has_stop

    async def _health(self, _http: web.Request) -> web.Response:
        """Answer `GET /health`."""
        return web.json_response({"status": "ok"})

    async def _server_info(self, _http: web.Request) -> web.Response:
        """Return the settings, the numbers of running and waiting requests, and whether the scheduler is paused."""
        running, waiting = self._scheduler.num_requests()
        info = msgspec.to_builtins(self._settings)
        return web.json_response(
            {**info, "running": running, "waiting": waiting, "paused": self._scheduler.is_paused}
        )

    async def _model_info(self, _http: web.Request) -> web.Response:
        """Return the model's folder and the served version."""
        version = str(self._scheduler.version)
        told = {"model_path": self._settings.model, "weight_version": version}
        return web.json_response({**told, "is_generation": True})

    async def _get_weights(self, http: web.Request) -> web.Response:
        """Return the values of the weight that the query names."""
        self._require("get_weights_by_name")
        return web.json_response({"parameter": self._read_weight(http.query.get("name", ""))})

    async def _pause(self, http: web.Request) -> web.Response:
        """Pause the scheduler in the request's mode, and answer when it is paused. Each request gets its own pause id."""
        body = msgspec.json.decode(await http.read() or b"{}", type=_Pause)
        self._pauses += 1
        pause_id = f"http.{self._pauses}"
        await asyncio.to_thread(self._scheduler.pause, pause_id, body.mode, PAUSE_DEADLINE_S)
        return web.json_response({"status": "paused", "mode": body.mode})

    async def _release(self, http: web.Request) -> web.Response:
        """Free the memory of weights and KV cache until the next round."""
        body = msgspec.json.decode(await http.read() or b"{}", type=_Pause)
        await asyncio.to_thread(self._sleep, body.mode, PAUSE_DEADLINE_S)
        return web.json_response({"success": True})

    async def _continue(self, _http: web.Request) -> web.Response:
        """End all pauses."""
        self._require("continue_generation")
        self._scheduler.resume()
        return web.json_response({"status": "running"})

    async def _update_version(self, http: web.Request) -> web.Response:
        """Set the weight version that is reported for later tokens. The weights do not change."""
        body = msgspec.json.decode(await http.read(), type=_Version, strict=False)
        self._scheduler.set_version(body.new_version)
        return web.json_response({"success": True, "new_version": body.new_version})

    async def _abort(self, http: web.Request) -> web.Response:
        """Abort the request with this id. The answer says whether the scheduler had such a request."""
        body = msgspec.json.decode(await http.read(), type=_Abort)
        return web.json_response({"aborted": self._scheduler.abort(body.rid)})


def _event(data: object) -> bytes:
    """Return a server-sent event with JSON data."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _tokenizer_of(model: str) -> Any:
    """Return the tokenizer in the model's folder.

    Raises:
        ConfigError: the folder has no tokenizer.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    # transformers raises errors of many types for a folder without a tokenizer.
    except Exception as error:
        raise ConfigError(
            f"sampling_params: stop must be empty, because the folder {model} has no tokenizer; use stop_token_ids"
        ) from error


@web.middleware
async def _name_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer with JSON: status 400 to an invalid request, 409 during an update, 504 if a pause exceeds its deadline."""
    try:
        return await handler(request)
    except (ConfigError, *DECODE_ERRORS) as error:
        return web.json_response({"error": str(error)}, status=400)
    except ProtocolError as error:
        return web.json_response({"error": str(error)}, status=409)
    except PeerTimeout as error:
        return web.json_response({"error": str(error)}, status=504)
