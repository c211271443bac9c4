"""Agents on the OpenAI endpoint of a workflow, with an engine that really generates the text of tool calls."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import openai
import pytest
import tokenizers
import transformers
from agent_checkpoint import ANSWER, CALL, END, TOOL, write_agent_checkpoint
from aiohttp import web
from chat_fleet import QUESTION, TOKEN, Client, serving, tool_loop
from fake_engine import FakeEngine

from windlass.errors import ConfigError
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
from windlass.rollout.chat.conversations import WITHOUT_END, Conversations
from windlass.rollout.chat.errors import ApiError
from windlass.rollout.chat.messages import NO_TOOLS, Message, Template, ToolCall
from windlass.rollout.chat.requests import (
    ChatRequest,
    Policy,
    ResponseRequest,
    chat_call,
    response_call,
)
from windlass.rollout.chat.tool_calls import PARSERS
from windlass.rollout.text import ModelText

SAMPLING = SamplingParams(max_new_tokens=32)
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


class SeededEngine(FakeEngine):
    """Engine that records the seeds of its requests."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.seeds: list[int] = []

    async def _generate(self, http_request: web.Request) -> web.StreamResponse:
        body = json.loads(await http_request.read())
        self.seeds.append(body["sampling_params"]["sampling_seed"])
        return await super()._generate(http_request)


E = TypeVar("E", bound=FakeEngine)


class Rig:
    """A controller that runs workflows in its own loop."""

    def __init__(self, stack: AsyncExitStack, engine: str, folder: Path) -> None:
        self._stack, self._engine, self._folder = stack, engine, folder
        self.controller: RolloutController
        self.http: aiohttp.ClientSession

    async def run(self, workflow: Workflow, arguments: object = None, **chat: Any) -> Rollout:
        engines = StaticEngines([("engine", self._engine, 0)])
        config = RolloutConfig(retry_backoff_s=0.01, max_attempts=2)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
        self.controller = await self._stack.enter_async_context(
            RolloutController(engines, StalenessPolicy.unbounded(64), token=TOKEN, config=config)
        )
        settings = ChatSettings(tokenizer=str(self._folder), **chat)
        self.controller.run_here({"w": workflow}, chat=settings)
        handle = self.controller.submit_workflow("w", arguments, SAMPLING)
        (rollout,) = await self.controller.wait([handle], deadline_s=WITHIN_S)
        assert self.controller.stats().lost == 0
        return rollout

    def client(self, session: Any) -> Client:
        return Client(self.http, session.base_url, session.api_key)


@asynccontextmanager
async def rig_with(engine: E, folder: Path) -> AsyncIterator[tuple[E, Rig]]:
    """Start an engine, and yield it and a rig whose workflows call it."""
    async with engine, AsyncExitStack() as stack:
        yield engine, Rig(stack, engine.url, folder)


@pytest.fixture
async def rig(engine: str, folder: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack, engine, folder)


def generated(rollout: Rollout, tokenizer: Any) -> list[list[str]]:
    """Return the tokens that the engine generated in each turn, as text."""
    return [
        [tokenizer.decode([token]) for token in turn.output.output_ids] for turn in rollout.turns
    ]


async def test_a_tool_loop_is_one_sequence_of_the_ids_that_were_generated(
    rig: Rig, tokenizer: Any
) -> None:
    async def agent(context: WorkflowContext) -> str:
        async with context.chat_endpoint() as session:
            system = {"role": "system", "content": "Use the tool."}
            messages = await tool_loop(rig.client(session), [system, QUESTION])
            assert session.branches == []
            return str(messages[-1]["content"])

    rollout = await rig.run(agent)
    assert rollout.value == "The sum is 42."
    first, second = rollout.turns
    assert [first.text, second.text] == ["".join(CALL), "".join(ANSWER)]
    assert generated(rollout, tokenizer) == [[*CALL, END], [*ANSWER, END]]
    whole = first.prompt_ids + first.output.output_ids
    assert second.prompt_ids[: len(whole)] == whole
    added = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    added += "<|im_start|>assistant\n<|say|>"
    assert tokenizer.decode(second.prompt_ids[len(whole) :]) == added
    # The tokenizer makes other ids of the same text.
    again = tokenizer.encode(tokenizer.decode(second.prompt_ids), add_special_tokens=False)
    assert tuple(again) != second.prompt_ids


async def test_each_api_answers_whole_and_as_a_stream(rig: Rig) -> None:
    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            await check_chat(rig, client)
            await check_completions(rig, client)
            await check_responses(rig, client)
            models = await client_get(rig, client, "/models")
            assert models["data"][0]["object"] == "model"

    rollout = await rig.run(agent)
    assert {turn.finish_reason for turn in rollout.turns} == {"stop", "length"}


async def client_get(rig: Rig, client: Client, path: str) -> Any:
    async with rig.http.get(client.base_url + path, headers=client.headers) as response:
        assert response.status == 200
        return await response.json()


async def events(rig: Rig, client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the data of all events of a stream."""
    body = {**body, "stream": True}
    async with rig.http.post(client.base_url + path, json=body, headers=client.headers) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = await response.text()
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(data) for data in found if data != "[DONE]"]


async def check_chat(rig: Rig, client: Client) -> None:
    body = {"messages": [QUESTION], "model": "m", "logprobs": True}
    answer = await client.ask("/chat/completions", {**body, "n": 2, "max_tokens": 4})
    assert answer["usage"]["completion_tokens"] == 8
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in tokens] == list(CALL[:4])
    assert all(abs(token["logprob"]) < 1e-3 for token in tokens)
    stopped = await client.ask("/chat/completions", {**body, "stop": ["17, "]})
    assert stopped["choices"][0]["message"]["content"] == "".join(CALL[:4]).strip()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    chunks = await events(
        rig, client, "/chat/completions", {**body, "stream_options": {"include_usage": True}}
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    # Without tools in the request, a call is text.
    assert "".join(delta.get("content", "") for delta in deltas) == "".join(CALL)
    assert chunks[-1]["usage"]["completion_tokens"] == len(CALL) + 1
    error = await client.ask("/chat/completions", {**body, "audio": {}}, 400)
    assert error["error"]["type"] == "invalid_request_error"
    assert "audio" in error["error"]["message"]


async def check_completions(rig: Rig, client: Client) -> None:
    body = {"prompt": "<|say|>", "model": "m", "logprobs": 0}
    answer = await client.ask("/completions", body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("".join(ANSWER), "stop")
    assert choice["logprobs"]["tokens"] == [*ANSWER, ""]
    assert choice["logprobs"]["text_offset"] == [0, 7, 10, 14]
    chunks = await events(rig, client, "/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "".join(ANSWER)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def check_responses(rig: Rig, client: Client) -> None:
    body: dict[str, Any] = {
        "model": "m",
        "input": "What is 17 + 25?",
        "tools": [{"type": "function", **TOOL["function"]}],
    }
    first = await client.ask("/responses", body)
    (call,) = first["output"]
    assert (call["type"], call["name"]) == ("function_call", "add")
    assert json.loads(call["arguments"]) == {"a": 17, "b": 25}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    more = {**body, "input": [result], "previous_response_id": first["id"]}
    found = await events(rig, client, "/responses", more)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    last = found[-1]
    assert last["type"] == "response.completed"
    assert last["response"]["output"][0]["content"][0]["text"] == "The sum is 42."
    deltas = [each["delta"] for each in found if each["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "The sum is 42."
    # The same conversation without stored responses: the whole input again.
    items = [{"role": "user", "content": "What is 17 + 25?"}, call, result]
    whole = await client.ask("/responses", {**body, "input": items})
    assert whole["output"][0]["content"][0]["text"] == "The sum is 42."
    assert whole["usage"]["input_tokens"] == last["response"]["usage"]["input_tokens"]


async def test_a_changed_history_begins_a_branch_and_the_session_reports_it(rig: Rig) -> None:
    async def agent(context: WorkflowContext) -> Any:
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            messages = await tool_loop(client, [QUESTION])
            changed = [QUESTION, {"role": "assistant", "content": "I forgot."}, QUESTION]
            await client.chat(changed)
            await client.chat([*messages, QUESTION])
        return session.result()

    rollout = await rig.run(agent)
    assert isinstance(rollout.value, dict)
    (branch,) = rollout.value["branches"]
    assert branch["turn"] == 2
    assert "do not continue" in branch["reason"]
    _, second, third, fourth = rollout.turns
    whole = second.prompt_ids + second.output.output_ids
    assert third.prompt_ids[: len(whole)] != whole
    assert fourth.prompt_ids[: len(whole)] == whole


async def test_clients_may_write_arguments_in_another_way_and_drop_reasoning(
    folder: Path,
) -> None:
    conversations = Conversations(ModelText(str(folder)))
    question = Message("user", "x")
    prompt = await conversations.prompt([question], NO_TOOLS)
    call = ToolCall("call_1", "add", '{"a":1,"b":2}')
    generated = (400, 401)
    answer = Message("assistant", "", "Hm.", (call,))
    conversations.answered(prompt, NO_TOOLS, answer, generated)
    echoed = Message("assistant", "", tool_calls=(ToolCall("call_1", "add", '{"b": 2, "a": 1}'),))
    result = Message("tool", "3", tool_call_id="call_1")
    continued = await conversations.prompt([question, echoed, result], NO_TOOLS)
    assert continued.ids[: len(prompt.ids) + 2] == prompt.ids + generated
    assert continued.branch == ""


async def test_reasoning_that_the_agent_returns_tells_equal_answers_apart(folder: Path) -> None:
    conversations = Conversations(ModelText(str(folder)))
    question, result = Message("user", "x"), Message("tool", "3", tool_call_id="call_1")
    prompt = await conversations.prompt([question], NO_TOOLS)
    call = ToolCall("call_1", "add", "{}")
    for reasoning, generated in (("One.", (400, 401)), ("Two.", (402, 403)), ("Two.", (404, 405))):
        answer = Message("assistant", "", reasoning, (call,))
        conversations.answered(prompt, NO_TOOLS, answer, generated)
    for reasoning, ids in (("One.", (400, 401)), (" Two.\n", (404, 405)), ("", (404, 405))):
        echoed = Message("assistant", "", reasoning, (call,))
        continued = await conversations.prompt([question, echoed, result], NO_TOOLS)
        assert continued.ids[: len(prompt.ids) + 2] == prompt.ids + ids
        assert continued.branch == ""


async def test_reasoning_of_a_foreign_history_reaches_the_template(
    rig: Rig, tokenizer: Any
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    items = [
        {"role": "user", "content": "x"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "3"},
    ]

    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            for name in ("reasoning_content", "reasoning"):
                called = {"role": "assistant", "content": None, "tool_calls": [call], name: "Hm."}
                await client.chat([{"role": "user", "content": "x"}, called, result])
            await client.ask("/responses", {"input": items})

    rollout = await rig.run(agent)
    assert len(rollout.turns) == 3
    for turn in rollout.turns:
        assert "<think>Hm.</think>" in tokenizer.decode(turn.prompt_ids)


async def test_a_template_that_drops_reasoning_begins_a_branch(folder: Path) -> None:
    conversations = Conversations(ModelText(str(folder)))
    question = Message("user", "x")
    prompt = await conversations.prompt([question], NO_TOOLS)
    conversations.answered(prompt, NO_TOOLS, Message("assistant", "y", "Hm."), (400, 401))
    echoed = Message("assistant", "y")
    # The template shows reasoning only after the last question.
    branch = await conversations.prompt([question, echoed, question], NO_TOOLS)
    assert "template" in branch.branch
    assert branch.ids[: len(prompt.ids) + 2] != (*prompt.ids, 400, 401)


async def test_a_template_with_a_special_last_answer_continues_the_conversation(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    plain = "{{ message.content }}\n"
    assert tokenizer.chat_template.count(plain) == 1
    special = "{% if loop.last %}{{ '<think></think>' }}{% endif %}" + plain
    tokenizer.chat_template = tokenizer.chat_template.replace(plain, special)
    tokenizer.save_pretrained(tmp_path)
    text = ModelText(str(tmp_path))
    conversations = Conversations(text)
    question, template = Message("user", "x"), Template((TOOL,))
    prompt = await conversations.prompt([question], template)
    answer = Message("assistant", "", tool_calls=(ToolCall("call_1", "add", '{"a":"}}"}'),))
    end = text.encode(END)
    conversations.answered(prompt, template, answer, (260, 261, *end))
    result = Message("tool", "3", tool_call_id="call_1")
    continued = await conversations.prompt([question, answer, result], template)
    assert continued.branch == ""
    added = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    added += "<|im_start|>assistant\n<|say|>"
    assert continued.ids == (*prompt.ids, 260, 261, *end, *text.encode(added))


async def test_text_that_continues_a_completion_keeps_its_ids(folder: Path) -> None:
    text = ModelText(str(folder))
    conversations = Conversations(text)
    first = await conversations.text_prompt("ab")
    conversations.text_answered("ab tail", first, (260, 261))
    second = await conversations.text_prompt("ab tail and more")
    assert second.ids == (*text.encode("ab"), 260, 261, *text.encode(" and more"))
    assert (await conversations.text_prompt("other")).branch != ""


@pytest.fixture(scope="module")
def beginning(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Save a tokenizer that begins every text with a special token. Return its folder, and the token's id."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (first,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
    )
    saved = tmp_path_factory.mktemp("beginning")
    tokenizer.save_pretrained(saved)
    return saved, first


async def test_a_text_prompt_begins_once_with_the_special_tokens_of_its_model(
    beginning: tuple[Path, int],
) -> None:
    folder, first = beginning
    text = ModelText(str(folder))
    plain = text.encode("ab")
    assert text.encode("ab", add_special_tokens=True) == (first, *plain)
    conversations = Conversations(text)
    prompt = await conversations.text_prompt("ab")
    assert prompt.ids == (first, *plain)
    conversations.text_answered("ab tail", prompt, (260, 261))
    continued = await conversations.text_prompt("ab tail and more")
    assert continued.ids == (first, *plain, 260, 261, *text.encode(" and more"))
    # A client may write the special tokens itself, or ask for none.
    assert (await conversations.text_prompt("<|im_start|>ab")).ids == (first, *plain)
    without = await conversations.text_prompt("ab", add_special_tokens=False)
    assert without.ids == plain
    assert (await conversations.text_prompt("<|im_start|>")).ids == (first,)


async def test_a_completion_has_the_prompt_of_a_submitted_text(
    engine: str, beginning: tuple[Path, int]
) -> None:
    async with AsyncExitStack() as stack:
        rig = Rig(stack, engine, beginning[0])

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                for more in ({}, {"add_special_tokens": False}, {"add_special_tokens": None}):
                    await rig.client(session).ask("/completions", {"prompt": "<|say|>", **more})

        rollout = await rig.run(agent)
        submitted = rig.controller.submit("<|say|>", SAMPLING)
        (alone,) = await rig.controller.wait([submitted], deadline_s=WITHIN_S)
    first, second, third = (turn.prompt_ids for turn in rollout.turns)
    assert first == third == alone.prompt_ids == (beginning[1], *second)


async def test_a_text_prompt_has_the_end_token_of_an_answer_once_or_not(
    rig: Rig, tokenizer: Any
) -> None:
    first = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<|say|>"
    answered = first + "".join(ANSWER)
    # Agents that render the chat template themselves write the end token after an answer. Others leave it out.
    rendered = (
        answered + "<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n<|say|>"
    )
    plain = answered + "<|say|>"

    async def agent(context: WorkflowContext) -> Any:
        async with context.chat_endpoint() as session:
            for prompt in (first, rendered, plain):
                await rig.client(session).ask("/completions", {"prompt": prompt})
        return session.result()

    rollout = await rig.run(agent)
    prompts = [turn.prompt_ids for turn in rollout.turns]
    assert [tokenizer.decode(prompt) for prompt in prompts] == [first, rendered, plain]
    output = rollout.turns[0].output.output_ids
    assert prompts[1][: len(prompts[0] + output)] == prompts[0] + output
    assert prompts[2][: len(prompts[0] + output) - 1] == prompts[0] + output[:-1]
    assert isinstance(rollout.value, dict)
    (branch,) = rollout.value["branches"]
    assert (branch["turn"], branch["reason"]) == (2, WITHOUT_END)


async def test_a_text_prompt_never_continues_an_answer_without_text(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        # The tokenizer does not have the tokens of this engine.
        engine = await stack.enter_async_context(FakeEngine("engine"))
        rig = Rig(stack, engine.url, folder)

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                for _ in range(2):
                    body = {"prompt": "ab", "max_tokens": 2}
                    answer = await rig.client(session).ask("/completions", body)
                    assert answer["choices"][0]["text"] == ""

        rollout = await rig.run(agent)
    assert [turn.prompt_ids for turn in rollout.turns] == [(64, 65)] * 2


async def test_a_list_with_one_prompt_is_this_prompt(rig: Rig) -> None:
    prompts: tuple[object, ...] = ("ab", ["ab"], [64, 65], [[64, 65]])
    refused: tuple[object, ...] = (
        *(["a", "b"], [[64], [65]], [64, "b"], [[]], [""], []),
        *([-1], [1 << 31], [1 << 70], [[-1]]),
    )

    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            for prompt in prompts:
                await client.ask("/completions", {"prompt": prompt, "max_tokens": 2})
            for prompt in refused:
                await client.ask("/completions", {"prompt": prompt}, 400)

    rollout = await rig.run(agent)
    assert [turn.prompt_ids for turn in rollout.turns] == [(64, 65)] * len(prompts)


async def test_an_agent_without_parallel_calls_gets_the_first_call(tmp_path: Path) -> None:
    more = ("<tool_call>{", '"name": "ad', 'd", "arguments', '": {}}', "</tool_call>.")
    folder = write_agent_checkpoint(tmp_path, call=(*CALL, *more))
    async with AsyncExitStack() as stack:
        engine, _ = stack.enter_context(serving(folder))
        rig = Rig(stack, engine, folder)

        async def agent(context: WorkflowContext) -> list[int]:
            async with context.chat_endpoint() as session:
                client, tool = rig.client(session), {"type": "function", **TOOL["function"]}
                messages = await tool_loop(client, [QUESTION], parallel_tool_calls=False)
                both = await client.chat([QUESTION])
                body = {"input": "x", "tools": [tool], "parallel_tool_calls": False}
                response = await client.ask("/responses", body)
                assert response["parallel_tool_calls"] is False
                output = [item for item in response["output"] if item["type"] == "function_call"]
            return [len(messages[1]["tool_calls"]), len(both["tool_calls"]), len(output)]

        rollout = await rig.run(agent)
    assert rollout.value == [1, 2, 1]
    first, second, *_ = rollout.turns
    whole = first.prompt_ids + first.output.output_ids
    assert second.prompt_ids[: len(whole)] == whole


async def test_a_generation_that_an_update_aborts_continues_with_both_versions(
    folder: Path,
) -> None:
    async with rig_with(FakeEngine("engine"), folder) as (engine, rig):

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                engine.hold(3)
                asking = asyncio.create_task(rig.client(session).chat([QUESTION], max_tokens=5))
                await engine.until_held(1)
                engine.version = 1
                await engine.abort()
                await asking

        rollout = await rig.run(agent)
    assert rollout.versions == (0, 0, 0, 1, 1)


async def test_a_conversation_continues_after_a_call_with_a_large_number(
    rig: Rig, tokenizer: Any
) -> None:
    arguments = f'{{"a": {10**29 + 7}, "b": 1}}'
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}

    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            called = {"role": "assistant", "content": None, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "call_1", "content": str(10**29 + 8)}
            await client.chat([QUESTION, called, result])
        await context.chat([QUESTION, called, result])

    rollout = await rig.run(agent)
    for turn in rollout.turns:
        assert f'"arguments": {arguments}' in tokenizer.decode(turn.prompt_ids)
    assert len(rollout.turns) == 2


async def test_text_parts_make_the_prompt_that_context_chat_makes_of_them(rig: Rig) -> None:
    parts = [{"type": "text", "text": "A document."}, {"type": "text", "text": "A question?"}]
    messages = [{"role": "user", "content": parts}]
    items = [{"role": "user", "content": [{**part, "type": "input_text"} for part in parts]}]

    async def agent(context: WorkflowContext) -> None:
        await context.chat(messages)
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            await client.ask("/chat/completions", {"messages": messages})
            await client.ask("/responses", {"input": items})

    rollout = await rig.run(agent)
    first, *others = (turn.prompt_ids for turn in rollout.turns)
    assert others == [first, first]


async def test_requests_only_shorten_answers_unless_they_decide_about_sampling() -> None:
    sampling = SamplingParams(max_new_tokens=8, temperature=0.7, stop=("END",))
    request = msgspec.convert(
        {
            "messages": [QUESTION],
            "temperature": 0.0,
            "top_p": 0.5,
            "max_completion_tokens": 100,
            "stop": "X",
        },
        ChatRequest,
    )
    kept = chat_call(request, Policy(sampling)).sampling
    assert kept == SamplingParams(max_new_tokens=8, temperature=0.7, stop=("END", "X"))
    changed = chat_call(request, Policy(sampling, request_sampling=True)).sampling
    assert (changed.temperature, changed.top_p, changed.max_new_tokens) == (0.0, 0.5, 8)


def test_a_request_biases_and_seeds_an_answer_only_if_it_decides_about_sampling() -> None:
    body = {"messages": [QUESTION], "seed": 7, "presence_penalty": 1.5, "logit_bias": {"5": -100}}
    request = msgspec.json.decode(msgspec.json.encode(body), type=ChatRequest)
    with pytest.raises(ConfigError, match=r"presence_penalty: must be left out, got 1.5; .*=True"):
        chat_call(request, Policy(SAMPLING))
    found = chat_call(request, Policy(SAMPLING, request_sampling=True)).sampling
    assert (found.sampling_seed, found.presence_penalty) == (7, 1.5)
    assert dict(found.logit_bias) == {5: -100}


async def test_choices_of_one_seeded_request_differ(rig: Rig) -> None:
    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint(request_sampling=True) as session:
            body = {"messages": [QUESTION], "n": 4, "seed": 3, "temperature": 1000.0}
            await rig.client(session).ask("/chat/completions", body)

    rollout = await rig.run(agent)
    assert len({turn.output.output_ids for turn in rollout.turns}) == 4


async def test_a_template_of_mistral_accepts_the_ids_of_calls(tmp_path: Path) -> None:
    call = (
        "[TOOL_CALLS]",
        ' [{"name": "',
        "ad",
        'd", "arguments": {"a": ',
        "17, ",
        '"b": ',
        "25}}]",
    )
    folder = write_agent_checkpoint(tmp_path, call=call)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    template = tokenizer.chat_template
    for name, after in (
        ("call.id", "{%- for call in message.tool_calls or [] -%}"),
        ("message.tool_call_id", "{%- elif message.role == 'tool' -%}"),
    ):
        assert template.count(after) == 1
        # The templates of Mistral's models contain this check.
        check = f"{{%- if {name} | length != 9 %}}{{{{ raise_exception('must have 9 characters') }}}}{{% endif -%}}"
        template = template.replace(after, after + check)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    async with AsyncExitStack() as stack:
        engine, _ = stack.enter_context(serving(folder))
        rig = Rig(stack, engine, folder)

        async def agent(context: WorkflowContext) -> str:
            async with context.chat_endpoint() as session:
                messages = await tool_loop(rig.client(session), [QUESTION])
                assert session.branches == []
            (found,) = messages[1]["tool_calls"]
            assert found["id"].isalnum()
            return str(messages[-1]["content"])

        rollout = await rig.run(agent, tool_format="mistral")
    assert (rollout.value, len(rollout.turns)) == ("The sum is 42.", 2)


@pytest.mark.parametrize(
    ("effort", "given", "found"),
    [
        (None, {}, {}),
        ("low", {}, {"reasoning_effort": "low", "enable_thinking": True}),
        ("none", {}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            "low",
            {"enable_thinking": False, "x": 1},
            {"reasoning_effort": "low", "enable_thinking": False, "x": 1},
        ),
    ],
)
def test_the_effort_of_reasoning_reaches_the_chat_template(
    effort: str | None, given: dict[str, object], found: dict[str, object]
) -> None:
    body = {"messages": [QUESTION], "reasoning_effort": effort, "chat_template_kwargs": given}
    call = chat_call(msgspec.convert(body, ChatRequest), Policy(SAMPLING))
    assert call.template.arguments == found
    if not given:
        body = {"input": "x", "reasoning": {"effort": effort, "summary": None}}
        call = response_call(msgspec.convert(body, ResponseRequest), Policy(SAMPLING), ())
        assert call.template.arguments == found


def test_a_demanded_call_becomes_a_json_schema() -> None:
    body = {"messages": [QUESTION], "tools": [TOOL], "tool_choice": "required"}
    call = chat_call(msgspec.convert(body, ChatRequest), Policy(SAMPLING))
    schema = json.loads(call.sampling.json_schema)
    assert schema["properties"]["name"]["enum"] == ["add"]
    assert schema["properties"]["arguments"] == TOOL["function"]["parameters"]
    wrong = {"type": "function", "function": {"name": "subtract"}}
    with pytest.raises(
        ConfigError, match=r"tools: must have a function for tool_choice='subtract', got \['add'\]"
    ):
        chat_call(msgspec.convert({**body, "tool_choice": wrong}, ChatRequest), Policy(SAMPLING))


CALLED = [("add", {"a": 1, "b": "x<y"})]
WRITTEN = {
    "hermes": 'Hm.<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x<y"}}\n</tool_call>',
    "llama_json": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x<y"}}',
    "mistral": 'Hm.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "x<y"}}]',
    "qwen3_coder": "Hm.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\nx<y\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_parsers_find_calls_and_leave_other_text(name: str) -> None:
    parse = PARSERS[name]
    content, calls = parse(WRITTEN[name])
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLED
    assert content.strip() == ("" if name == "llama_json" else "Hm.")
    assert len({call.id for call in parse(WRITTEN[name])[1] + calls}) == 2
    for text in ("The sum is 42.", '<tool_call>{"name": </tool_call>', "[TOOL_CALLS][{]", "{}"):
        if not (name == "qwen3_coder" and "tool_call" in text):
            assert parse(text) == (text, [])


class CountedText(str):
    """Text that counts the characters that its methods read. Parts of it share the count."""

    __slots__ = ("work",)
    work: list[int]

    def part(self, text: str) -> CountedText:
        made = CountedText(text)
        made.work = self.work
        self.work[0] += len(text)
        return made

    def find(self, wanted: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        limit = len(self) if end is None else end
        found = str.find(self, wanted, start, limit)
        self.work[0] += max(0, (limit if found < 0 else found + len(wanted)) - start)
        return found

    def __contains__(self, wanted: str) -> bool:  # type: ignore[override]
        return self.find(wanted) >= 0

    def __getitem__(self, key: int | slice) -> CountedText:  # type: ignore[override]
        return self.part(str.__getitem__(self, key))

    def strip(self, chars: str | None = None) -> CountedText:
        return self.part(str.strip(self, chars))


DEGENERATE = {
    "parameters without an end": "<parameter=a>",
    "parameters without a name": "<parameter=",
    "functions without a name": "<function=",
    "functions with a line break in the name": "<function=\n",
    "functions without an end": "<function=f>",
    "calls in calls": "<tool_call><function=f><parameter=a>",
    "calls without functions": "<tool_call></tool_call>",
}


@pytest.mark.parametrize("repeated", DEGENERATE.values(), ids=DEGENERATE)
def test_parser_reads_degenerate_calls_a_constant_number_of_times(repeated: str) -> None:
    for tail in ("", "</parameter>", "</function>", ">"):
        text = CountedText(f"<tool_call><function=f>{repeated * 2000}{tail}")
        text.work = [0]
        PARSERS["qwen3_coder"](text)
        assert len(text) <= text.work[0] <= 10 * len(text), tail


async def test_an_engine_that_fails_ends_the_attempt_and_the_next_attempt_succeeds(
    folder: Path,
) -> None:
    clients: list[Client] = []
    failing: list[asyncio.Task[Any]] = []
    body = {"messages": [QUESTION]}
    async with rig_with(FakeEngine("engine"), folder) as (engine, rig):

        async def agent(context: WorkflowContext) -> int:
            engine.failing = False
            async with context.chat_endpoint() as session:
                clients.append(rig.client(session))
                await clients[-1].chat([QUESTION])
                if context.attempt == 1:
                    engine.failing = True
                    asking = clients[0].ask("/chat/completions", body, 503)
                    failing.append(asyncio.create_task(asking))
                    await asyncio.sleep(WITHIN_S)
                # The key of the first attempt is refused.
                await clients[0].ask("/chat/completions", body, 401)
            return context.attempt

        rollout = await rig.run(agent)
        stats = rig.controller.stats()
        assert (await failing[0])["error"]["code"] == "attempt_failed"
    assert (rollout.value, len(rollout.turns), stats.retried) == (2, 1, 1)


@pytest.mark.parametrize("raises", [False, True])
async def test_a_block_that_ends_with_a_failed_request_fails_its_attempt(
    folder: Path, raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig_with(FakeEngine("engine"), folder) as (engine, rig):
        asking: list[asyncio.Task[Any]] = []

        async def agent(context: WorkflowContext) -> int:
            engine.failing = context.attempt == 1
            async with context.chat_endpoint() as session:
                client = rig.client(session)
                if context.attempt == 1:
                    body = {"messages": [QUESTION]}
                    asking.append(asyncio.create_task(client.ask("/chat/completions", body, 503)))
                    # Leave the block before its cancellation.
                    while session.is_open:  # noqa: ASYNC110 - the session has no event
                        await asyncio.sleep(0)
                    if raises:
                        raise OSError("clean-up")
            return context.attempt

        rollout = await rig.run(agent)
        await asking[0]
    assert rollout.value == 2
    assert "clean-up" not in caplog.text


async def test_a_failed_session_accepts_no_reward(folder: Path) -> None:
    statuses: list[int] = []
    refused: list[BaseException | None] = []
    async with rig_with(FakeEngine("engine"), folder) as (engine, rig):

        async def agent(context: WorkflowContext) -> int:
            engine.failing = context.attempt == 1
            async with context.chat_endpoint() as session:
                client = rig.client(session)
                url = f"{session.base_url}/sessions/{session.session_id}/reward"
                asking = asyncio.create_task(client.chat([QUESTION]))
                try:
                    await asyncio.wait({asking})
                    if engine.failing:
                        await asyncio.sleep(WITHIN_S)
                finally:
                    await asyncio.wait({asking})
                    refused.append(asking.exception())
                    # The agent is told that its reward counts only if it does.
                    body = {"reward": 1.0}
                    async with rig.http.post(url, json=body, headers=client.headers) as answer:
                        statuses.append(answer.status)
            return context.attempt

        rollout = await rig.run(agent)
    assert (rollout.value, statuses) == (2, [401, 200])
    assert [error is None for error in refused] == [False, True]


async def test_a_request_that_the_engine_refuses_fails_alone(rig: Rig) -> None:
    async def agent(context: WorkflowContext) -> str:
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            long = {"role": "user", "content": "x" * 5000}
            error = await client.ask("/chat/completions", {"messages": [long]}, 400)
            await client.chat([QUESTION])
            return str(error["error"]["message"])

    rollout = await rig.run(agent)
    assert "4096 positions" in str(rollout.value)
    assert len(rollout.turns) == 1


async def test_answers_are_shortened_to_the_context(rig: Rig) -> None:
    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client = rig.client(session)
            answer = await client.ask("/chat/completions", {"messages": [QUESTION]})
            assert answer["usage"]["total_tokens"] == 40
            long = {"role": "user", "content": "x" * 40}
            error = await client.ask("/chat/completions", {"messages": [long]}, 400)
            assert error["error"]["code"] == "context_length_exceeded"

    rollout = await rig.run(agent, max_context=40)
    assert rollout.turns[0].finish_reason == "length"


async def test_a_repeated_request_gets_the_same_answer_and_makes_no_second_turn(
    rig: Rig,
) -> None:
    async def agent(context: WorkflowContext) -> None:
        async with context.chat_endpoint() as session:
            client, body = rig.client(session), {"messages": [QUESTION]}
            first = await client.ask("/chat/completions", body)
            again = await client.ask(
                "/chat/completions", body, headers={"X-Stainless-Retry-Count": "1"}
            )
            assert first == again
            other = await client.ask("/chat/completions", body)
            assert other["id"] != first["id"]
            named = {"Idempotency-Key": "k"}
            answers = [await client.ask("/chat/completions", body, headers=named) for _ in range(2)]
            assert answers[0] == answers[1] != first

    rollout = await rig.run(agent)
    assert len(rollout.turns) == 3


async def test_equal_requests_above_the_limit_wait_for_answers_of_their_own(folder: Path) -> None:
    async with rig_with(FakeEngine("engine"), folder) as (engine, rig):

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                engine.hold(2)
                key, url = session.api_key, session.base_url
                async with openai.AsyncOpenAI(api_key=key, base_url=url) as client:
                    ask = partial(client.chat.completions.create, model="m", max_tokens=3)
                    asking = [asyncio.create_task(ask(messages=[QUESTION])) for _ in range(6)]
                    await engine.until_held(2)
                    assert engine.num_active == 2
                    await engine.release()
                    answers = await asyncio.gather(*asking)
                assert len({answer.id for answer in answers}) == 6

        rollout = await rig.run(agent, max_requests=2)
    assert len(rollout.turns) == 6


async def test_a_repetition_of_an_unanswered_request_gets_no_earlier_answer(folder: Path) -> None:
    again = {"X-Stainless-Retry-Count": "1"}
    async with rig_with(FakeEngine("engine"), folder) as (engine, rig):

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                ask = partial(
                    rig.client(session).ask, "/chat/completions", {"messages": [QUESTION]}
                )
                first = await ask()
                engine.hold(2)
                asking = asyncio.create_task(ask())
                await engine.until_held(1)
                asking.cancel()
                await engine.until(lambda: not engine.num_active)
                await engine.release()
                second = await ask(headers=again)
                assert second["id"] != first["id"]
                # Now the agent repeats a request that was answered.
                assert await ask(headers=again) == second

        rollout = await rig.run(agent)
    assert len(rollout.turns) == 2


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("goes_away", [False, True])
async def test_a_repetition_of_a_running_request_gets_its_answer(
    folder: Path, *, streams: bool, goes_away: bool
) -> None:
    """The client's timeout has passed, or its connection is lost; the endpoint learns of that later, or never."""
    async with rig_with(FakeEngine("engine"), folder) as (engine, rig):

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                engine.hold(2)
                url = f"{session.base_url}/chat/completions"
                body = {"messages": [QUESTION], "stream": streams}
                key = {"Authorization": f"Bearer {session.api_key}"}

                async def ask(**headers: str) -> bytes:
                    async with rig.http.post(url, json=body, headers=key | headers) as answer:
                        assert answer.status == 200
                        return await answer.read()

                asking = asyncio.create_task(ask())
                await engine.until_held(1)
                again = asyncio.create_task(ask(**{"X-Stainless-Retry-Count": "1"}))
                await asyncio.sleep(0.5)
                assert engine.num_active == 1
                if goes_away:
                    asking.cancel()
                    await asyncio.wait({asking})
                    await asyncio.sleep(0.2)
                await engine.release()
                answer = await again
                if not goes_away and not streams:
                    assert await asking == answer
                assert b"finish_reason" in answer

        rollout = await rig.run(agent)
    assert len(rollout.turns) == 1


async def test_the_seed_of_a_request_reaches_the_engine_unchanged(folder: Path) -> None:
    async with rig_with(SeededEngine("engine"), folder) as (engine, rig):

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint(request_sampling=True) as session:
                client = rig.client(session)
                for body in ({"seed": 7}, {"seed": 7}, {"seed": 7, "n": 2}):
                    await client.ask("/chat/completions", {"messages": [QUESTION], **body})

        await rig.run(agent)
    assert sorted(engine.seeds) == [7, 7, 7, 8]


async def test_a_request_in_the_moment_when_its_session_expires_gets_the_reason(
    folder: Path,
) -> None:
    """The request arrives before the loop has told the workflow that the idle time is over."""
    refused: list[ApiError] = []
    async with rig_with(FakeEngine("engine"), folder) as (_, rig):

        async def agent(context: WorkflowContext) -> None:
            if context.attempt > 1:
                return
            async with context.chat_endpoint() as session:
                loop, asking = asyncio.get_running_loop(), list[asyncio.Task[None]]()

                async def ask() -> None:
                    with pytest.raises(ApiError) as found:
                        async with session.request():
                            pass
                    refused.append(found.value)

                loop.call_later(0.4, lambda: asking.append(loop.create_task(ask())))
                loop.call_later(0.2, time.sleep, 0.6)
                try:
                    await session.wait_for_reward(idle_s=0.5)
                finally:
                    await asyncio.gather(*asking)

        await rig.run(agent)
    (error,) = refused
    assert error.status == 401
    assert "the agent sent no request within 0.5 s" in str(error)


async def test_a_client_that_goes_away_leaves_no_turn(folder: Path) -> None:
    async with rig_with(FakeEngine("engine"), folder) as (engine, rig):

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                engine.hold(2)
                asking = asyncio.create_task(rig.client(session).chat([QUESTION]))
                await engine.until_held(1)
                asking.cancel()
                await engine.until(lambda: not engine.num_active)
                await engine.release()
                await rig.client(session).chat([QUESTION], max_tokens=3)

        rollout = await rig.run(agent)
    (turn,) = rollout.turns
    assert len(turn.output.output_ids) == 3


async def test_the_end_of_a_session_ends_its_requests_without_turns(folder: Path) -> None:
    async with rig_with(FakeEngine("engine"), folder) as (engine, rig):
        asking: list[asyncio.Task[Any]] = []

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                engine.hold(2)
                client = rig.client(session)
                body = {"messages": [QUESTION]}
                asking.append(asyncio.create_task(client.ask("/chat/completions", body, 401)))
                await engine.until_held(1)

        rollout = await rig.run(agent)
        assert (await asking[0])["error"]["code"] == "invalid_api_key"
    assert rollout.turns == ()


class HoldsOne(FakeEngine):
    """Engine that holds only the first request that it may hold."""

    _first: Any = None

    def _held(self, request: Any) -> bool:
        if not super()._held(request):
            return False
        self._first = self._first or request
        return request is self._first


async def until_turns(context: WorkflowContext, num_turns: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while len(context.turns) < num_turns:  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0.01)


async def test_branches_name_their_turns_if_requests_overlap(folder: Path) -> None:
    async with rig_with(HoldsOne("engine"), folder) as (engine, rig):

        async def agent(context: WorkflowContext) -> Any:
            async with context.chat_endpoint() as session:
                client = rig.client(session)
                await client.chat([QUESTION], max_tokens=1)
                engine.hold(2)
                other = {"role": "user", "content": "Another question."}
                asking = asyncio.create_task(client.chat([other], n=2, max_tokens=3))
                await until_turns(context, 2)
                await client.chat([{"role": "user", "content": "x"}], max_tokens=1)
                await engine.release()
                await asking
            return session.result()

        rollout = await rig.run(agent)
    lengths = [len(turn.output.output_ids) for turn in rollout.turns]
    assert lengths == [1, 3, 1, 3]
    assert isinstance(rollout.value, dict)
    branches = rollout.value["branches"]
    assert [branch["turn"] for branch in branches] == [1, 2, 3]


async def test_a_lost_request_of_a_session_that_ends_leaves_no_finished_choice(
    folder: Path,
) -> None:
    async with rig_with(HoldsOne("engine"), folder) as (engine, rig):

        async def agent(context: WorkflowContext) -> None:
            async with context.chat_endpoint() as session:
                engine.hold(2)
                client = rig.client(session)
                asking = asyncio.create_task(client.chat([QUESTION], n=2, max_tokens=3))
                await until_turns(context, 1)
                # The lost connection cancels the request, and the end of the session cancels it again.
                asking.cancel()
                path = f"/sessions/{session.session_id}/reward"
                await client.ask(path, {"reward": 1.0})

        rollout = await rig.run(agent)
    assert rollout.turns == ()
