"""Agents see an answer while the engine generates it, and the recorded turn has exactly what they saw."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from agent_checkpoint import CALL, TOOL, write_agent_checkpoint
from chat_fleet import QUESTION, TOKEN, Client, post, set_version
from fake_engine import FakeEngine

from windlass.rollout import (
    ChatSettings,
    Rollout,
    RolloutConfig,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    Workflow,
    WorkflowContext,
)
from windlass.rollout.chat.deltas import Choice, Showing
from windlass.rollout.chat.messages import Message
from windlass.rollout.chat.requests import Call
from windlass.rollout.chat.tool_calls import MARKS, PARSERS, split_reasoning
from windlass.rollout.generate import GeneratedToken
from windlass.rollout.messages import Partial, Turn
from windlass.rollout.text import ModelText

WITHIN_S = 120.0
THOUGHTS = ("<think>", "Add", " both", ".\n", "</think>", "\n\nI use", " a tool", ". ", *CALL)
LONG = SamplingParams(max_new_tokens=1500, ignore_eos=True)
"""After the end token, the model generates tokens of single bytes, which are often no characters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agent_checkpoint(tmp_path_factory.mktemp("model"), call=THOUGHTS)


class Rig:
    """A controller that runs a workflow in its own loop."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self.http: aiohttp.ClientSession

    async def run(self, engine: str, workflow: Workflow, sampling: SamplingParams) -> Rollout:
        engines = StaticEngines([("engine", engine, 0)])
        config = RolloutConfig(retry_backoff_s=0.01, max_attempts=1)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        controller = await self._stack.enter_async_context(
            RolloutController(engines, StalenessPolicy.unbounded(64), token=TOKEN, config=config)
        )
        controller.run_here({"w": workflow}, chat=ChatSettings(tokenizer=str(self._folder)))
        handle = controller.submit_workflow("w", None, sampling)
        (rollout,) = await controller.wait([handle], deadline_s=WITHIN_S)
        return rollout

    async def openai_client(self, session: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        return await self._stack.enter_async_context(client)

    def client(self, session: Any) -> Client:
        return Client(self.http, session.base_url, session.api_key)


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack, folder)


def update(engine: str, version: int) -> None:
    """Abort all generations of an engine, and continue with another version."""
    post(f"{engine}/pause_generation", {"mode": "abort"})
    set_version(engine, version)
    post(f"{engine}/continue_generation", {})


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_the_first_delta_arrives_before_an_update(rig: Rig, engine: str, api: str) -> None:
    set_version(engine, 0)
    seen: list[str] = []

    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client = await rig.openai_client(session)
            stream: Any
            if api == "chat":
                stream = await client.chat.completions.create(
                    model="m", messages=[QUESTION], stream=True, logprobs=True
                )
            else:
                stream = await client.completions.create(
                    model="m", prompt="<|say|>", stream=True, logprobs=0
                )
            tokens: list[float] = []
            reasons = []
            async for chunk in stream:
                (choice,) = chunk.choices
                text = choice.delta.content if api == "chat" else choice.text
                if text and not any(seen):
                    await asyncio.to_thread(update, engine, 1)
                seen.append(text or "")
                reasons.append(choice.finish_reason)
                if choice.logprobs is not None:
                    logprobs = choice.logprobs
                    tokens += (
                        [each.logprob for each in logprobs.content]
                        if api == "chat"
                        else logprobs.token_logprobs
                    )
            (turn,) = context.turns
            assert tokens == [*turn.output.logprobs]
            assert reasons[-1] == "length"

    rollout = await rig.run(engine, agent, LONG)
    (turn,) = rollout.turns
    assert sorted(set(turn.output.versions)) == [0, 1]
    assert len(turn.output.output_ids) == LONG.max_new_tokens
    text = "".join(seen)
    if api == "chat":
        _, content = split_reasoning(turn.text)
        assert text == content.strip()
    else:
        assert text == turn.text
    assert sum(map(bool, seen)) > 10


async def test_a_client_that_goes_away_ends_the_generation(rig: Rig, engine: str) -> None:
    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            body = {"model": "m", "messages": [QUESTION], "stream": True}
            path, headers = session.base_url + "/chat/completions", client.headers
            # The other request is first, so that it would end first.
            async with rig.http.post(path, json=body, headers=headers) as other:
                await other.content.readline()
                async with rig.http.post(path, json=body, headers=headers) as gone:
                    await gone.content.readline()
                    assert await asyncio.to_thread(num_running, engine) == 2
                    gone.close()
                while await asyncio.to_thread(num_running, engine) == 2:
                    await other.content.readline()
                assert await asyncio.to_thread(num_running, engine) == 1
                assert context.turns == []
                assert (await other.text()).endswith("data: [DONE]\n\n")

    rollout = await rig.run(engine, agent, LONG)
    assert len(rollout.turns) == 1


def num_running(engine: str) -> int:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(f"{engine}/server_info", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return int(json.load(response)["running"])


async def test_reasoning_and_text_are_streamed_and_a_call_follows_whole(
    rig: Rig, engine: str
) -> None:
    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client = await rig.openai_client(session)
            body: dict[str, Any] = {"model": "m", "messages": [QUESTION], "tools": [TOOL]}
            whole = (await client.chat.completions.create(**body)).choices[0]
            chunks = [c async for c in await client.chat.completions.create(**body, stream=True)]
            deltas = [chunk.choices[0].delta for chunk in chunks]
            reasoning = [getattr(delta, "reasoning_content", None) for delta in deltas]
            assert "".join(each for each in reasoning if each) == "Add both."
            assert "".join(delta.content or "" for delta in deltas) == "I use a tool."
            message: Any = whole.message
            assert message.reasoning_content == "Add both."
            assert message.content == "I use a tool."
            (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
            (expected,) = message.tool_calls
            assert call.function.arguments == expected.function.arguments
            assert (call.index, call.function.name) == (0, "add")
            assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"

    rollout = await rig.run(engine, agent, SamplingParams(max_new_tokens=32))
    first, second = rollout.turns
    assert first.output.output_ids == second.output.output_ids


async def test_each_of_several_choices_is_streamed_and_repeated_as_it_was(
    rig: Rig, engine: str
) -> None:
    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            body = {"messages": [QUESTION], "n": 2, "logprobs": True, "stream": True}
            texts = []
            for retries in "01":
                found: list[Any] = [[], []]
                headers = {**client.headers, "X-Stainless-Retry-Count": retries}
                async with rig.http.post(
                    session.base_url + "/chat/completions", json=body, headers=headers
                ) as response:
                    lines = (await response.text()).split("\n\n")
                for line in lines:
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        found[choice["index"]].append(choice)
                roles = [[c["delta"].get("role") for c in choices] for choices in found]
                assert all(r[0] == "assistant" and not any(r[1:]) for r in roles)
                texts.append(["".join(c["delta"].get("content", "") for c in cs) for cs in found])
            assert texts[0] == texts[1]
            assert texts[0][0] == texts[0][1] != ""

    rollout = await rig.run(engine, agent, SamplingParams(max_new_tokens=32))
    assert len(rollout.turns) == 2


@pytest.mark.parametrize("num_top", [3, 20])
async def test_the_most_probable_tokens_are_returned_by_each_api(
    rig: Rig, engine: str, num_top: int
) -> None:
    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            body = {"messages": [QUESTION], "logprobs": True, "top_logprobs": num_top}
            chat = await client.ask("/chat/completions", body)
            check(chat["choices"][0]["logprobs"]["content"])
            answer = await client.ask("/completions", {"prompt": "<|say|>", "logprobs": num_top})
            found = answer["choices"][0]["logprobs"]
            for token, logprob, top in zip(
                found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
            ):
                assert top[token] == logprob == max(top.values())
            include = ["message.output_text.logprobs"]
            response = await client.ask(
                "/responses", {"input": "x", "include": include, "top_logprobs": num_top}
            )
            check(response["output"][-1]["content"][0]["logprobs"])
            error = await client.ask("/chat/completions", {**body, "top_logprobs": 21}, 400)
            assert "must be in [0, 20], got 21" in error["error"]["message"]
            error = await client.ask("/chat/completions", {**body, "logprobs": False}, 400)
            assert "must be left out without logprobs" in error["error"]["message"]

    def check(content: list[Any]) -> None:
        for token in content:
            top = [each["logprob"] for each in token["top_logprobs"]]
            assert len(top) == num_top
            assert top == sorted(top, reverse=True)
            assert len({each["token"] for each in token["top_logprobs"]}) > 1
            assert token["logprob"] == top[0]

    await rig.run(engine, agent, SamplingParams(max_new_tokens=16, temperature=0.0))


async def test_top_logprobs_are_those_of_the_tokens_that_can_be_sampled(
    rig: Rig, engine: str
) -> None:
    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            body = {"messages": [QUESTION], "logprobs": True, "top_logprobs": 5}
            answer = await rig.client(session).ask("/chat/completions", body)
            for token in answer["choices"][0]["logprobs"]["content"]:
                assert len(token["top_logprobs"]) == 2
                assert token["logprob"] in {each["logprob"] for each in token["top_logprobs"]}

    await rig.run(engine, agent, SamplingParams(max_new_tokens=8, top_k=2, temperature=2.0))


TEXTS = [
    "plain text of several words. ",
    "é漢🙂 and 🙂🙂 \N{REPLACEMENT CHARACTER} end\N{REPLACEMENT CHARACTER}",
    "<think>some é thoughts </think>\n\n the answer 🙂 <b>",
    "<think>never closed </thin",
    "closed by the </think>template",
    "half a tag <tool_cal and a whole <tool_call>\n{}\n</tool_call> after",
    ' say <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> and more',
    '{"name": "add", "parameters": {"a": 1}}',
    '[TOOL_CALLS][{"name": "add", "arguments": {}}]',
    "a [TOOL_CALLS] b",
    "text STO and STOP and more STOP",
    "  white space \n\n in and around \n",
    "",
]


@pytest.mark.parametrize("kind", ["text", "chat", "open", "tools", "forced"])
@pytest.mark.parametrize("stopped", [True, False])
def test_the_parts_of_an_answer_are_the_answer(folder: Path, kind: str, stopped: bool) -> None:
    codec = ModelText(str(folder))
    num_shown = 0
    for text in TEXTS:
        for tool_format in PARSERS:
            num_shown += check_parts(codec, text, tool_format, kind, stopped=stopped)
    # All parts but the last one.
    assert num_shown == 0 if kind == "forced" else num_shown > 100


def check_parts(codec: ModelText, text: str, tool_format: str, kind: str, *, stopped: bool) -> int:
    """Show an answer token by token. If `stopped`, it ends with the stop text STOP. Return the number of early parts."""
    if stopped:
        text = text.partition("STOP")[0] + "STOP"
    ids = codec.encode(text)
    assert codec.decode(ids) == text
    call = Call(
        (),
        SamplingParams(max_new_tokens=1, stop=("STOP",)),
        prompt="x" if kind == "text" else None,
        parses_tools=kind == "tools",
        forced=kind == "forced",
        logprobs=True,
    )
    showing = Showing(codec, call, 0, MARKS[tool_format], is_open=kind == "open")
    tokens = [GeneratedToken(token, -float(n)) for n, token in enumerate(ids)]
    shown = [delta for token in tokens if (delta := showing.more([token])) is not None]
    visible = "".join(delta.content for delta in shown)
    assert "STOP" not in visible
    cut = text.removesuffix("STOP") if stopped else text
    if kind == "text":
        message = Message("assistant", cut)
    else:
        reasoning, content = split_reasoning(cut, is_open=kind == "open")
        if kind == "tools":
            content, _ = PARSERS[tool_format](content)
        message = Message("assistant", content.strip(), reasoning)
    turn = Turn((1,), Partial(), "stop")
    choice = Choice(turn, text, cut, message, "stop", showing.tokens_of(tokens))
    parts = [*shown, showing.rest(choice)]
    assert "".join(part.reasoning for part in parts) == message.reasoning
    assert "".join(part.content for part in parts) == message.content
    assert tuple(token for part in parts for token in part.tokens) == choice.tokens
    assert [part.is_first for part in parts] == [True] + [False] * len(shown)
    offsets = [part.text_offset for part in parts]
    lengths = [sum(len(token.text) for token in part.tokens) for part in parts]
    assert offsets == [sum(lengths[:at]) for at in range(len(parts))]
    return len(shown)


def test_a_part_has_no_half_character(folder: Path) -> None:
    codec = ModelText(str(folder))
    call = Call((), SamplingParams(max_new_tokens=1), prompt="x")
    showing = Showing(codec, call, 0, MARKS["hermes"], is_open=False)
    found = [showing.more([GeneratedToken(token, 0.0)]) for token in codec.encode("aé🙂b")]
    texts = [None if delta is None else delta.content for delta in found]
    assert texts == ["a", None, "é", None, None, None, "🙂", "b"]


async def test_tokens_that_an_update_discards_are_not_shown(folder: Path) -> None:
    """With a stop text of 4 bytes, the next request generates the last 3 tokens of an aborted answer again."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine("engine"))
        rig = Rig(stack, folder)

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                engine.hold(5)
                client = rig.client(session)
                # The engine's tokens have the ids 1, 2, 3 and so on if the prompt begins with 0.
                body = {"prompt": [0], "stop": "STOP", "max_tokens": 9, "logprobs": 0}
                async with rig.http.post(
                    session.base_url + "/completions",
                    json={**body, "stream": True},
                    headers=client.headers,
                ) as response:
                    first = json.loads((await response.content.readline())[len("data: ") :])
                    await engine.until_held(1)
                    engine.version = 1
                    await engine.abort()
                    engine.hold(1000)
                    rest = await response.text()
                events = [json.loads(line[6:]) for line in rest.splitlines() if "{" in line]
                logprobs = [
                    logprob
                    for each in (first, *events)
                    if (found := each["choices"][0]["logprobs"]) is not None
                    for logprob in found["token_logprobs"]
                ]
                (turn,) = context.turns
                assert logprobs == [*turn.output.logprobs]
                assert len(turn.output.output_ids) == 9
                assert turn.output.versions == (0,) * 2 + (1,) * 7
                assert len(first["choices"][0]["logprobs"]["tokens"]) <= 2

        await rig.run(engine.url, agent, SamplingParams(max_new_tokens=9))
