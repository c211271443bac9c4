"""`/generate` of vLLM answers in SGLang's format, and a rollout worker reads the versions of its tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from windlass.engines.vllm.generate_route import CompletionsRoute, GenerateRoute
from windlass.rollout.generate import AttemptError, AttemptResult, Reject, Watch, generate
from windlass.rollout.images import ImagePrompt
from windlass.rollout.messages import EngineTarget, ErrorKind, Partial, RolloutTask
from windlass.sampling import SamplingParams

CHOICE = {
    "index": 0,
    "finish_reason": "length",
    "token_ids": [4, 7, 9],
    "logprobs": {
        "content": [
            {"token_id": t, "logprob": -0.5 * t, "rank": 1, "top_logprobs": []} for t in (4, 7, 9)
        ]
    },
    "weight_versions": [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 3},
    ],
}


class Vllm:
    """The inner application, which records its requests and answers in pieces."""

    def __init__(self, status: int, body: object) -> None:
        self.status, self.body = status, json.dumps(body).encode()
        self.asked: list[tuple[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        headers = dict(scope["headers"])
        assert int(headers[b"content-length"]) == len(message["body"])
        self.asked.append((scope["path"], json.loads(message["body"])))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": self.body[:5], "more_body": True})
        await send({"type": "http.response.body", "body": self.body[5:]})


async def ask(
    app: Vllm,
    body: bytes,
    path: str = "/generate",
    route: type[CompletionsRoute] | type[GenerateRoute] = GenerateRoute,
    *,
    has_tokenizer: bool = True,
    policy: str = "fcfs",
    has_images: bool = True,
) -> tuple[int, bytes]:
    parts = [
        {"type": "http.request", "body": body[:4], "more_body": True},
        {"type": "http.request", "body": body[4:], "more_body": False},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    model = SimpleNamespace(skip_tokenizer_init=not has_tokenizer, is_multimodal_model=has_images)
    config = SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(policy=policy))
    engine = SimpleNamespace(vllm_config=config)
    scope = {
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine)),
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-length", str(len(body)).encode())],
    }
    await route(app)(scope, receive, send)
    return sent[0]["status"], b"".join(m["body"] for m in sent[1:])


async def test_the_route_translates_a_request_for_vllm_and_the_answer_for_sglang() -> None:
    app = Vllm(200, {"choices": [CHOICE]})
    sampling = {"max_new_tokens": 3, "top_k": -1, "stop_token_ids": [2], "ignore_eos": True}
    request = {"rid": "r-1", "input_ids": [1, 2], "sampling_params": sampling}
    status, body = await ask(app, json.dumps(request).encode())
    (path, asked), answer = app.asked[0], json.loads(body)
    assert (status, path) == (200, "/inference/v1/generate")
    assert asked["token_ids"] == [1, 2]
    assert asked["request_id"] == "r-1"
    assert asked["sampling_params"]["max_tokens"] == 3
    assert asked["sampling_params"]["stop_token_ids"] == [2]
    assert answer["output_ids"] == [4, 7, 9]
    assert answer["meta_info"]["finish_reason"] == {"type": "length"}
    assert answer["meta_info"]["output_token_logprobs"] == [
        [-2.0, 4, None],
        [-3.5, 7, None],
        [-4.5, 9, None],
    ]


COMPLETION = {
    "index": 0,
    "text": "",
    "finish_reason": "length",
    "token_ids": [4, 7, 9],
    "logprobs": {
        "tokens": ["token_id:4", "token_id:7", "token_id:9"],
        "token_logprobs": [-2.0, -3.5, -4.5],
        "top_logprobs": [],
        "text_offset": [0, 0, 0],
    },
}
"""Choice in an answer of vLLM 0.24 and 0.32."""
NOTED = {"weight_versions": [{"version": 3, "start": 0, "end": 3}]}


async def test_a_completion_requests_token_ids_and_returns_the_noted_versions() -> None:
    app = Vllm(200, {"choices": [COMPLETION], "kv_transfer_params": NOTED, "id": "cmpl-1"})
    sampling = {"max_new_tokens": 3, "top_k": -1, "stop_token_ids": [2], "ignore_eos": True}
    request = {"rid": "r-1", "input_ids": [1, 2], "sampling_params": sampling, "lora_path": "tuned"}
    status, body = await ask(app, json.dumps(request).encode(), route=CompletionsRoute)
    (path, asked), answer = app.asked[0], json.loads(body)
    assert (status, path) == (200, "/v1/completions")
    assert (asked["prompt"], asked["return_token_ids"], asked["logprobs"]) == ([1, 2], True, 0)
    assert (asked["max_tokens"], asked["ignore_eos"]) == (3, True)
    assert (asked["model"], asked["request_id"]) == ("tuned", "r-1")
    assert answer["output_ids"] == [4, 7, 9]
    assert answer["meta_info"]["weight_versions"] == NOTED["weight_versions"]
    assert [entry[:2] for entry in answer["meta_info"]["output_token_logprobs"]] == [
        [-2.0, 4],
        [-3.5, 7],
        [-4.5, 9],
    ]


async def test_an_aborted_completion_returns_no_tokens_because_their_versions_are_unknown() -> None:
    aborted = {**COMPLETION, "finish_reason": "abort"}
    app = Vllm(200, {"choices": [aborted], "kv_transfer_params": None})
    _, body = await ask(app, b'{"input_ids": [1]}', route=CompletionsRoute)
    answer = json.loads(body)
    assert answer["output_ids"] == answer["meta_info"]["output_token_logprobs"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "abort"}


async def test_an_error_of_vllm_passes_through() -> None:
    status, body = await ask(Vllm(400, {"error": "too long"}), b'{"input_ids": [1]}')
    assert (status, json.loads(body)) == (400, {"error": "too long"})


async def test_nonsense_is_refused_before_vllm_sees_it() -> None:
    app = Vllm(200, {})
    status, _ = await ask(app, b'{"input_ids": "abc"}')
    assert (status, app.asked) == (422, [])


TOP = [
    {"token_id": 4, "logprob": -2.0, "rank": 3, "top_logprobs": [
        {"token_id": 4, "logprob": -2.0, "rank": 3},
        {"token_id": 8, "logprob": -0.5, "rank": 1},
        {"token_id": 6, "logprob": -1.5, "rank": 2},
    ]},
    {"token_id": 7, "logprob": -0.25, "rank": 1, "top_logprobs": [
        {"token_id": 7, "logprob": -0.25, "rank": 1},
        {"token_id": 2, "logprob": -9999.0, "rank": 2},
    ]},
]  # fmt: skip
"""Log-probabilities in vLLM's form: the sampled token first, and -9999 for a token that cannot be sampled."""


async def test_the_most_probable_tokens_are_those_of_vllm_in_order() -> None:
    choice = {**CHOICE, "token_ids": [4, 7], "logprobs": {"content": TOP}}
    app = Vllm(200, {"choices": [choice]})
    _, body = await ask(app, b'{"input_ids": [1], "top_logprobs_num": 2}')
    assert app.asked[0][1]["sampling_params"]["logprobs"] == 3
    assert json.loads(body)["meta_info"]["output_top_logprobs"] == [
        [[-0.5, 8, None], [-1.5, 6, None]],
        [[-0.25, 7, None]],
    ]


async def test_the_most_probable_tokens_of_a_completion_have_ids() -> None:
    top = [
        {"token_id:4": -2.0, "token_id:8": -0.5},
        {"token_id:7": -3.5, "token_id:1": -9999.0},
        None,
    ]
    choice = {**COMPLETION, "logprobs": {**COMPLETION["logprobs"], "top_logprobs": top}}  # type: ignore[dict-item]
    app = Vllm(200, {"choices": [choice], "kv_transfer_params": NOTED})
    _, body = await ask(app, b'{"input_ids": [1], "top_logprobs_num": 1}', route=CompletionsRoute)
    assert app.asked[0][1]["logprobs"] == 2
    assert json.loads(body)["meta_info"]["output_top_logprobs"] == [
        [[-0.5, 8, None]],
        [[-3.5, 7, None]],
        [],
    ]


class Streaming(Vllm):
    """The inner application, which answers with server-sent events in pieces of a few bytes."""

    def __init__(self, *events: object, size: int = 7) -> None:
        super().__init__(200, {})
        lines = [f"data: {json.dumps(each)}\n\n" for each in events]
        self.body, self.size = "".join([*lines, "data: [DONE]\n\n"]).encode(), size

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append((scope["path"], json.loads((await receive())["body"])))
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for at in range(0, len(self.body), self.size):
            part = self.body[at : at + self.size]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def event(tokens: list[int], **more: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5 * token} for token in tokens]
    choice = {"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": None, **more}
    return {"choices": [choice]}


async def test_a_stream_of_vllm_becomes_increments_and_the_last_has_all_versions() -> None:
    spans = CHOICE["weight_versions"]
    last = event([], finish_reason="abort", weight_versions=spans)
    app = Streaming(event([4, 7]), event([9]), last)
    _, body = await ask(app, b'{"input_ids": [1], "stream": true}')
    assert app.asked[0][1]["stream"] is True
    *lines, done, _ = body.decode().split("\n\n")
    assert done == "data: [DONE]"
    found = [json.loads(line.removeprefix("data: ")) for line in lines]
    metas = [each["meta_info"] for each in found]
    assert [each["output_ids"] for each in found] == [[4, 7], [9], []]
    assert [meta["completion_tokens"] for meta in metas] == [2, 3, 3]
    assert [meta["output_token_logprobs"] for meta in metas[:2]] == [
        [[-2.0, 4, None], [-3.5, 7, None]],
        [[-4.5, 9, None]],
    ]
    assert [meta["finish_reason"] for meta in metas] == [None, None, {"type": "abort"}]
    assert metas[2]["weight_versions"] == spans


async def test_a_stream_is_not_asked_of_a_vllm_that_reports_versions_at_the_end() -> None:
    app = Vllm(200, {"choices": [COMPLETION], "kv_transfer_params": NOTED})
    status, body = await ask(app, b'{"input_ids": [1], "stream": true}', route=CompletionsRoute)
    assert "stream" not in app.asked[0][1]
    assert (status, json.loads(body)["output_ids"]) == (200, [4, 7, 9])


async def generated(
    serve: Callable[[web.Request], Awaitable[web.StreamResponse]],
    sampling: SamplingParams,
    watch: Watch | None = None,
    images: ImagePrompt | None = None,
) -> AttemptResult:
    """Return a worker's result for one prompt, from an engine whose route `/generate` is `serve`."""
    app = web.Application()
    app.add_routes([web.post("/generate", serve)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession() as session:
            task = RolloutTask(
                task_id="t",
                attempt=1,
                engine=EngineTarget(name="e", url=f"http://{host}:{port}"),
                prompt_ids=(1,) if images is None else images.ids,
                sampling=sampling,
                deadline_s=10.0,
            )
            return await generate(session, task, watch, images)
    finally:
        await runner.cleanup()


async def watched(
    *events: object, sampling: SamplingParams, kind: str = "text/event-stream", num_top: int = 0
) -> tuple[list[list[int]], Any]:
    """Return the tokens that a worker shows, in order, and the answer of an engine that streams these events."""

    async def serve(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for each in events if kind == "text/event-stream" else ():
            await response.write(f"data: {json.dumps(each)}\n\n".encode())
        if kind == "application/json":
            await response.write(json.dumps(events[-1]).encode())
        return response

    asked: list[Any] = []
    shown: list[list[int]] = []
    watch = Watch(lambda new: shown.append([each.token_id for each in new]), True, num_top)
    result = await generated(serve, sampling, watch)
    assert asked[0].get("stream", False) is not sampling.needs_whole_answer
    return shown, result.tokens


def part(tokens: list[int], total: int, reason: str = "", **more: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": reason} if reason else None,
        "completion_tokens": total,
        "output_token_logprobs": [[-0.5 * token, token, None] for token in tokens],
        "weight_version": "4",
        **more,
    }
    return {"output_ids": tokens, "meta_info": meta}


WHOLE = part([4, 4, 9, 5, 6], 5, "length")
CUMULATIVE = (part([4], 1), part([4, 4, 9], 3), WHOLE)
INCREMENTS = (part([4], 1), part([4, 9], 3), part([], 3), part([5, 6], 5, "length"))


@pytest.mark.parametrize("events", [CUMULATIVE, INCREMENTS], ids=["cumulative", "increments"])
async def test_both_kinds_of_streams_have_the_same_tokens(events: Any) -> None:
    shown, tokens = await watched(*events, sampling=SamplingParams(max_new_tokens=9))
    assert shown == [[4], [4, 9], [5, 6]]
    assert tokens.output_ids == (4, 4, 9, 5, 6)
    assert tokens.logprobs == (-2.0, -2.0, -4.5, -2.5, -3.0)
    assert tokens.versions == (4,) * 5
    shown, _ = await watched(*events, sampling=SamplingParams(max_new_tokens=9, stop=("ab",)))
    assert shown == [[4, 4], [9, 5], [6]]


async def test_tokens_come_at_the_end_if_the_engine_may_begin_again_or_does_not_stream() -> None:
    penalised = SamplingParams(max_new_tokens=9, frequency_penalty=0.5)
    shown, _ = await watched(WHOLE, sampling=penalised, kind="application/json")
    assert shown == [[4, 4, 9, 5, 6]]
    plain = SamplingParams(max_new_tokens=9)
    shown, _ = await watched(WHOLE, sampling=plain, kind="application/json")
    assert shown == [[4, 4, 9, 5, 6]]


@pytest.mark.parametrize(
    ("last", "says", "kind"),
    [
        ({"error": {"message": "too long", "code": 400}}, "HTTP 400: too long", ErrorKind.REFUSED),
        ({"error": {"message": "oh", "code": 503}}, "HTTP 503: oh", ErrorKind.PASSING),
        (
            {
                "meta_info": {
                    "finish_reason": {"type": "abort", "message": "bad", "status_code": 400}
                }
            },
            "HTTP 400: bad",
            ErrorKind.REFUSED,
        ),
        (part([4], 1), "ended the stream before the end of the answer", ErrorKind.PASSING),
    ],
)
async def test_an_error_in_a_stream_fails_the_attempt(
    last: Any, says: str, kind: ErrorKind
) -> None:
    with pytest.raises(AttemptError, match=says) as failed:
        await watched(part([4], 1), last, sampling=SamplingParams(max_new_tokens=9))
    assert failed.value.kind is kind


async def test_an_engine_without_top_logprobs_refuses_them() -> None:
    with pytest.raises(
        AttemptError, match="top_logprobs: must be left out for this engine, got 2"
    ) as failed:
        await watched(WHOLE, sampling=SamplingParams(max_new_tokens=9), num_top=2)
    assert failed.value.kind is ErrorKind.REFUSED


async def answered(
    spans: list[dict[str, Any]], *, adapter: str = "", asked: list[Any] | None = None
) -> tuple[int, ...]:
    """Return the versions that a rollout worker reads from an engine's answer of three tokens."""
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.0, t, None] for t in (4, 7, 9)],
        "weight_version": "4",
        "weight_versions": spans,
    }

    async def serve(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(await request.json())
        return web.json_response({"output_ids": [4, 7, 9], "meta_info": meta})

    result = await generated(serve, SamplingParams(max_new_tokens=3, adapter=adapter))
    return result.tokens.versions


async def test_every_token_carries_the_version_of_its_span() -> None:
    assert await answered(CHOICE["weight_versions"]) == (3, 3, 4)  # type: ignore[arg-type]


async def test_spans_with_a_gap_are_refused() -> None:
    with pytest.raises(AttemptError, match="must be spans without gaps"):
        await answered([{"version": "4", "start": 1, "end": 3}])


async def test_the_named_adapter_answers_a_rollout() -> None:
    asked: list[Any] = []
    spans: Any = CHOICE["weight_versions"]
    await answered(spans, adapter="math", asked=asked)
    await answered(spans, asked=asked)
    inner = Vllm(200, {"choices": [CHOICE]})
    for request in asked:
        await ask(inner, json.dumps(request).encode())
    assert [body.get("model") for _, body in inner.asked] == ["math", None]


class Answering:
    """A server of `/generate` that records requests and gives the next of its answers."""

    def __init__(
        self, *answers: tuple[list[int], str], prompts: Sequence[list[int] | None] = ()
    ) -> None:
        self.answers, self.asked = [*answers], list[Any]()
        self.prompts = [*prompts]

    async def serve(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        tokens, reason = self.answers.pop(0)
        meta = {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "weight_version": "4",
        }
        prompt = self.prompts.pop(0) if self.prompts else None
        body = {"output_ids": tokens, "meta_info": meta, "prompt_token_ids": prompt}
        return web.json_response(body)

    async def answer(
        self, sampling: SamplingParams, images: ImagePrompt | None = None
    ) -> tuple[int, ...]:
        return (await generated(self.serve, sampling, images=images)).tokens.output_ids


@pytest.mark.parametrize(
    ("sampling", "continued", "tokens"),
    [
        ({}, [1, 4, 5, 6, 7], (4, 5, 6, 7, 8)),
        ({"min_new_tokens": 6}, [1, 4, 5, 6, 7], (4, 5, 6, 7, 8)),
        # The tokens 6 and 7 may be the first two bytes of the stop text.
        ({"stop": ("end",)}, [1, 4, 5], (4, 5, 8)),
        ({"stop": ("a long stop text", ".")}, [1], (8,)),
        ({"json_schema": "{}"}, [1], (8,)),
        ({"regex": "a+"}, [1], (8,)),
        ({"ebnf": 'root ::= "a"'}, [1], (8,)),
        ({"choice": ("a", "b")}, [1], (8,)),
        ({"frequency_penalty": 0.5}, [1], (8,)),
        ({"presence_penalty": -0.5}, [1], (8,)),
        ({"sampling_seed": 3}, [1, 4, 5, 6, 7], (4, 5, 6, 7, 8)),
    ],
    ids=str,
)
async def test_an_aborted_answer_continues_where_the_engine_can_still_match_it(
    sampling: dict[str, Any], continued: list[int], tokens: tuple[int, ...]
) -> None:
    engine = Answering(([4, 5, 6, 7], "abort"), ([8], "stop"))
    assert await engine.answer(SamplingParams(max_new_tokens=9, **sampling)) == tokens
    first, second = engine.asked
    assert (first["input_ids"], second["input_ids"]) == ([1], continued)
    seeds = [each["sampling_params"].get("sampling_seed") for each in (first, second)]
    assert seeds == ([3, 7] if "sampling_seed" in sampling else [None, None])
    num_left = 9 - (len(continued) - 1)
    assert second["sampling_params"]["max_new_tokens"] == num_left
    least = sampling.get("min_new_tokens", 0)
    assert second["sampling_params"]["min_new_tokens"] == max(least - len(continued) + 1, 0)


@pytest.mark.parametrize("route", [GenerateRoute, CompletionsRoute])
async def test_all_sampling_parameters_reach_vllm_under_its_names(
    route: type[GenerateRoute] | type[CompletionsRoute],
) -> None:
    engine = Answering(([8], "stop"))
    await engine.answer(
        SamplingParams(
            max_new_tokens=9,
            min_p=0.25,
            repetition_penalty=1.5,
            min_new_tokens=2,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={7: 1.5},
            sampling_seed=5,
            priority=2,
            stop=("end", "."),
            choice=("a+", "[b]"),
        )
    )
    inner = Vllm(400, {})
    asked = json.dumps(engine.asked[0]).encode()
    assert await ask(inner, asked, route=route) == (
        422,
        b"priority must be 0 without --scheduling-policy priority, got 2",
    )
    await ask(inner, asked, route=route, policy="priority")
    body = inner.asked[0][1]
    given = body["sampling_params"] if route is GenerateRoute else body
    expected = {
        "max_tokens": 9,
        "min_tokens": 2,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "stop": ["end", "."],
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"7": 1.5},
        "seed": 5,
        # No engine but vLLM knows a choice, so the worker sends an expression.
        "structured_outputs": {"regex": r"a\+|\[b\]"},
    }
    assert body["priority"] == 2
    assert {name: given[name] for name in expected} == expected
    assert given.get("detokenize", True) is True


@pytest.mark.parametrize(("stop", "status"), [(["."], 422), ([], 200)])
async def test_stop_texts_are_refused_by_a_server_without_a_tokenizer(
    stop: list[str], status: int
) -> None:
    app = Vllm(200, {"choices": [CHOICE]})
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3, "stop": stop}}
    answered = await ask(app, json.dumps(body).encode(), has_tokenizer=False)
    assert answered[0] == status
    assert (b"--skip-tokenizer-init" in answered[1]) == bool(stop)


async def test_parameters_that_are_not_given_replace_the_servers_own_defaults() -> None:
    engine = Answering(([8], "stop"))
    await engine.answer(SamplingParams(max_new_tokens=1))
    given = engine.asked[0]["sampling_params"]
    assert (given["min_p"], given["repetition_penalty"], given["min_new_tokens"]) == (0.0, 1.0, 0)
    more = {"ebnf", "logit_bias", "sampling_seed"}
    assert not ({"stop", "json_schema", "regex"} | more) & set(given)
    assert "priority" not in engine.asked[0]
    assert (given["frequency_penalty"], given["presence_penalty"]) == (0.0, 0.0)


URLS = ("data:image/png;base64,AAAA", "data:image/png;base64,BBBB")
IMAGES = ImagePrompt((1, 7, 7, 7, 2, 7, 7), (1, 7, 2, 7), URLS, 7)
"""Prompt with two images of 3 and 2 tokens."""


async def test_every_request_of_an_aborted_answer_has_the_images() -> None:
    whole = [*IMAGES.ids]
    # An engine may abort a request before it has made the prompt.
    engine = Answering(
        *(([], "abort"), ([4, 5], "abort"), ([8], "stop")),
        prompts=[None, whole, [*whole, 4, 5]],
    )
    assert await engine.answer(SamplingParams(max_new_tokens=9), IMAGES) == (4, 5, 8)
    asked = [each["input_ids"] for each in engine.asked]
    assert asked == [[1, 7, 2, 7], [1, 7, 2, 7], [1, 7, 2, 7, 4, 5]]
    for asked in engine.asked:
        assert asked["image_data"] == [*URLS]
        assert asked["return_prompt_token_ids"] is True


@pytest.mark.parametrize(
    ("reported", "says"),
    [
        (None, "got none"),
        # An engine that ignores images.
        ([1, 7, 2, 7], "got 4 other tokens"),
        # The processor of the engine makes other tokens of the images.
        ([1, 7, 7, 2, 7, 7, 7], "got 7 other tokens"),
    ],
)
async def test_an_engine_with_another_prompt_than_the_trainers_is_refused(
    reported: list[int] | None, says: str
) -> None:
    engine = Answering(([4], "stop"), prompts=[reported])
    with pytest.raises(
        AttemptError, match=f"prompt_token_ids must be the 7 tokens .*{says}; the engine must serve"
    ) as failed:
        await engine.answer(SamplingParams(max_new_tokens=9), IMAGES)
    assert failed.value.kind is ErrorKind.REFUSED
    assert failed.value.partial == Partial()


async def test_an_answer_with_the_token_of_an_image_is_rejected() -> None:
    """The next request would put an image in the place of this token, also after an update has aborted the answer."""
    says = r"must not have the token of an image, got token 7 at place 1; .*logit_bias={7: -100\.0}"
    for answers in ([([4, 7], "abort"), ([8], "stop")], [([4, 7], "stop")]):
        engine = Answering(*answers, prompts=[[*IMAGES.ids], [*IMAGES.ids, 4, 7]])
        with pytest.raises(Reject, match=says):
            await engine.answer(SamplingParams(max_new_tokens=9), IMAGES)
        assert len(engine.asked) == 1
    # Without images, the token is one like any other.
    text = Answering(([4, 7], "stop"))
    assert await text.answer(SamplingParams(max_new_tokens=9)) == (4, 7)


@pytest.mark.parametrize("reported", [[*IMAGES.ids], None])
async def test_a_stream_reports_the_prompt_of_its_images_once(reported: list[int] | None) -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(INCREMENTS):
            more = {"prompt_token_ids": reported} if not number else {}
            await response.write(b"data: " + json.dumps({**event, **more}).encode() + b"\n\n")
        return response

    watch = Watch(lambda _: None, streams=True)
    answer = generated(serve, SamplingParams(max_new_tokens=9), watch, IMAGES)
    if reported is None:
        with pytest.raises(AttemptError, match="got none"):
            await answer
    else:
        assert (await answer).tokens.output_ids == (4, 4, 9, 5, 6)


@pytest.fixture
def vllm_fields(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Provide the fields of a request of vLLM's route. vLLM is not installed here."""
    fields: dict[str, object] = {"content_parts": None}
    home = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
    parents = home.split(".")
    for length in range(1, len(parents) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parents[:length]), ModuleType("stub"))
    request = SimpleNamespace(model_fields=fields)
    monkeypatch.setattr(sys.modules[home], "GenerateRequest", request, raising=False)
    return fields


WITH_IMAGES = {"input_ids": [1, 7, 2, 7], "image_data": [*URLS], "return_prompt_token_ids": True}


@pytest.mark.usefixtures("vllm_fields")
async def test_the_route_passes_images_on_and_returns_the_prompt() -> None:
    app = Vllm(200, {"choices": [CHOICE], "prompt_token_ids": [*IMAGES.ids]})
    status, body = await ask(app, json.dumps(WITH_IMAGES).encode())
    ((_, asked),) = app.asked
    assert status == 200
    assert asked["content_parts"] == [{"type": "image_url", "url": url} for url in URLS]
    assert asked["return_token_ids"] is True
    assert json.loads(body)["prompt_token_ids"] == [*IMAGES.ids]
    # Requests without images are as before.
    await ask(app, b'{"input_ids": [1]}')
    assert not {"content_parts", "return_token_ids", "features"} & set(app.asked[1][1])


@pytest.mark.parametrize(
    ("changed", "settings", "says"),
    [
        ({"image_data": ["http://host/a.png"]}, {}, "image_data must be data URLs of images, got"),
        ({}, {"has_tokenizer": False}, "got 2 images, because the server was started with --skip-to"),
        ({}, {"has_images": False}, "got 2 images: the server's model takes no images"),
        ({}, {"route": CompletionsRoute}, "its route /v1/completions takes no token ids with images"),
        ({}, {"old": True}, "for this release of vLLM: /inference/v1/generate takes no images"),
    ],
)  # fmt: skip
async def test_a_server_that_would_ignore_or_load_images_refuses_them(
    changed: dict[str, Any], settings: dict[str, Any], says: str, vllm_fields: dict[str, object]
) -> None:
    app = Vllm(200, {"choices": [CHOICE]})
    if settings.pop("old", False):
        vllm_fields.clear()
    status, body = await ask(app, json.dumps({**WITH_IMAGES, **changed}).encode(), **settings)
    assert (status, app.asked) == (422, [])
    assert says in body.decode()
