"""Prompts of text and messages: workers tokenise them, and trainers get the ids that the engine got and made."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from demo_checkpoint import write_checkpoint
from fake_engine import FakeEngine, expected_tokens

from windlass.errors import ConfigError, RolloutError
from windlass.jobs.recipe import Task, decode_tasks, encode_tasks
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    Chat,
    RolloutConfig,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    WorkflowContext,
    mount_rollout_routes,
    text,
    training_samples,
)
from windlass.rollout.chat.conversations import REWRITES, Conversations
from windlass.rollout.chat.messages import NO_TOOLS, Message
from windlass.rollout.chat.session import Branch
from windlass.rollout.text import ModelText, TextPrompts, encode_prompt

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token"
SAMPLING = SamplingParams(max_new_tokens=2)
CHATML = (
    "{% for tool in tools or [] %}<tool>{{ tool.name }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name }}:{{ call.function.arguments.seat }}]{% endfor %}{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if quick %}fast {% endif %}{% endif %}"
)
QUESTION = {"role": "user", "content": "What is 3 + 4?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model"), chat_template=CHATML))


@pytest.fixture(scope="module")
def prompts(folder: str) -> TextPrompts:
    return TextPrompts(ModelText(folder))


class Echo(FakeEngine):
    """Engine whose answers are the ids of `answers`, in turn, so that they can be decoded."""

    answers: list[tuple[int, ...]]

    def _answer(self, request: Any) -> dict[str, Any]:
        answer = super()._answer(request)
        ids = [*self.answers[(self.num_requests - 1) % len(self.answers)]]
        answer["output_ids"] = ids
        meta = answer["meta_info"]
        meta["output_token_logprobs"] = [[-0.5 - n, token, None] for n, token in enumerate(ids)]
        meta["output_token_versions"] = [0] * len(ids)
        meta["finish_reason"] = {"type": "stop"}
        return answer


class Recording(FakeEngine):
    """Engine that records the ids of the prompts that it answers."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.prompts: list[list[int]] = []

    def _answer(self, request: Any) -> dict[str, Any]:
        self.prompts.append(request.input_ids)
        return super()._answer(request)


class Rig:
    """A rollout controller, and the routes for worker processes."""

    def __init__(self, stack: AsyncExitStack, folder: str) -> None:
        self.stack, self.folder = stack, folder
        self.engines = StaticEngines()
        self.controller: RolloutController
        self.url = ""

    async def start(self, engine: FakeEngine, config: RolloutConfig | None = None) -> None:
        await self.stack.enter_async_context(engine)
        self.controller = await self.stack.enter_async_context(
            RolloutController(
                self.engines,
                StalenessPolicy.unbounded(100),
                token=TOKEN,
                config=config or RolloutConfig(retry_backoff_s=0.01),
            )
        )
        self.engines.set([engine.entry])

    async def worker(self, *arguments: str) -> None:
        server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        mount_rollout_routes(server, self.controller, BatchQueue())
        await server.start()
        self.stack.push_async_callback(server.close)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "windlass.rollout.worker"),
            *("--name", "w", "--controller", server.url, *arguments),
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "WINDLASS_TOKEN": TOKEN},
        )

        async def reap() -> None:
            process.kill()
            await process.wait()

        self.stack.push_async_callback(reap)


@pytest.fixture
async def rig(folder: str) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack, folder)


def texts(prompts: TextPrompts, *texts: str) -> list[tuple[int, ...]]:
    """Return the ids of texts; "<end>" is one special token."""
    return [prompts.encode(text) for text in texts]


async def test_a_worker_process_tokenises_text_and_messages(rig: Rig, prompts: TextPrompts) -> None:
    engine = Echo("e")
    engine.answers = texts(prompts, "7<end>")
    await rig.start(engine)
    await rig.worker("--tokenizer", rig.folder)
    plain = rig.controller.submit("3 + 4 =", SAMPLING)
    messages = rig.controller.submit([QUESTION], SAMPLING)
    chat = Chat((QUESTION,), tools=({"name": "sum"},), template_arguments={"quick": True})
    group = rig.controller.submit_group(chat, 3, SAMPLING)
    found = await rig.controller.wait([plain, messages], deadline_s=60)
    (of_chat,) = await rig.controller.next_batch(1, deadline_s=60)
    rendered = [
        "3 + 4 =",
        "<user>What is 3 + 4?<end>\n<assistant>",
        "<tool>sum\n<user>What is 3 + 4?<end>\n<assistant>fast ",
    ]
    expected = texts(prompts, *rendered)
    for rollout, ids in zip(found, expected[:2], strict=True):
        assert rollout.prompt_ids == ids
        assert (rollout.output_ids, rollout.text) == (engine.answers[0], "7")
        assert 0 in rollout.output_ids, "the test needs the end token among the generated tokens"
    assert of_chat.prompt_ids == expected[2]
    assert [r.prompt_ids for r in of_chat.rollouts] == [expected[2]] * 3
    for sample in training_samples(of_chat, [1.0, 0.0, 0.5]):
        assert (sample.prompt_ids, sample.output_ids) == (expected[2], engine.answers[0])
    assert (await group).group_id == of_chat.group_id


async def test_a_worker_without_a_tokenizer_refuses_text_by_name(rig: Rig) -> None:
    await rig.start(FakeEngine("e"))
    await rig.worker()
    with pytest.raises(RolloutError, match=r"refused: prompt: text and .* with --tokenizer FOLDER"):
        await rig.controller.submit("3 + 4 =", SAMPLING)
    # Token ids need no tokenizer.
    assert (await rig.controller.submit((5, 6), SAMPLING)).text == ""


async def test_messages_that_the_template_refuses_fail_at_once(tmp_path: Path, rig: Rig) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    folder = write_checkpoint(tmp_path / "strict", chat_template=template)
    await rig.start(FakeEngine("e"))
    rig.controller.run_here({}, tokenizer=str(folder))
    with pytest.raises(
        RolloutError, match=r"chat template of .* refuses them: roles must alternate"
    ):
        await rig.controller.submit([QUESTION], SAMPLING)
    assert rig.controller.stats().retried == 0


async def test_a_retry_continues_with_the_tokens_of_the_first_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chat template contains the time, so rendering again would give other tokens."""
    clock = "{{ strftime_now('%H %M %S %f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write_checkpoint(tmp_path / "clock", chat_template=clock)
    monkeypatch.setattr(text, "MAX_CACHED_PROMPTS", 0)
    engine = Recording("e")
    config = RolloutConfig(retry_backoff_s=0.01, carry_partial=True, max_attempts=100)
    async with AsyncExitStack() as stack:
        rig = Rig(stack, str(folder))
        await rig.start(engine, config)
        rig.controller.run_here({}, tokenizer=str(folder))
        engine.hold(2)
        handle = rig.controller.submit([QUESTION], SamplingParams(max_new_tokens=4))
        await engine.until_held(1)
        engine.failing = True
        await engine.abort()
        await asyncio.sleep(0.05)
        engine.failing = False
        rollout = await handle
    first, last = engine.prompts[0], engine.prompts[-1]
    assert rollout.attempts > 1
    assert rollout.prompt_ids == tuple(first)
    assert last == [*first, *rollout.output_ids[:2]]
    assert rollout.output_ids == expected_tokens(tuple(first), 4)


async def test_the_journal_keeps_the_submitted_messages_and_the_tokens_of_the_answer(
    rig: Rig, tmp_path: Path, prompts: TextPrompts
) -> None:
    engine = Echo("e")
    engine.answers = texts(prompts, "7<end>")
    config = RolloutConfig(journal=tmp_path / "journal", acknowledge=True)
    await rig.start(engine, config)
    rig.engines.set([])
    rig.controller.submit_group([QUESTION], 1, SAMPLING, metadata="waiting")
    await rig.controller.close()
    for _ in range(2):
        policy = StalenessPolicy.unbounded(10)
        # The first process answers and does not acknowledge; the second one delivers the stored answer.
        async with RolloutController(rig.engines, policy, token=TOKEN, config=config) as again:
            again.run_here({}, tokenizer=rig.folder)
            rig.engines.set([engine.entry])
            (group,) = await again.next_batch(1, deadline_s=30)
            (rollout,) = group.rollouts
            assert (rollout.text, rollout.metadata) == ("7", "waiting")
            (ids,) = texts(prompts, "<user>What is 3 + 4?<end>\n<assistant>")
            assert group.prompt_ids == rollout.prompt_ids == ids
    assert engine.num_requests == 1


TOOL = {"name": "look", "parameters": {"type": "object"}}


async def agent(context: WorkflowContext) -> object:
    """Hold a conversation with a tool and a second, unrelated one; return what the trainer must get."""
    messages: list[dict[str, Any]] = [QUESTION]
    first = await context.chat(messages, tools=[TOOL])
    messages += [{"role": "assistant", "content": first.text}, {"role": "tool", "content": "x"}]
    second = await context.chat(messages, tools=[TOOL])
    edited = [QUESTION, {"role": "assistant", "content": "other"}, QUESTION]
    branch = await context.chat(edited, tools=[TOOL])
    return [first.text, second.text, branch.text, context.decode(context.encode("a tool"))]


async def same_twice(context: WorkflowContext) -> object:
    """Ask the same question without and with a chat, and return the texts of the turns."""
    await context.generate(context.render([QUESTION]))
    await context.chat([QUESTION])
    return [turn.text for turn in context.turns]


async def test_a_chat_adds_its_text_to_its_own_turn(rig: Rig, prompts: TextPrompts) -> None:
    engine = Echo("e")
    engine.answers = texts(prompts, "7<end>")
    await rig.start(engine)
    rig.controller.run_here({"same": same_twice}, tokenizer=rig.folder)
    rig.controller.submit_workflow_group("same", None, 1, SAMPLING)
    (delivered,) = await rig.controller.next_batch(1, deadline_s=30)
    assert delivered.rollouts[0].value == ["", "7"]


async def test_a_chat_continues_with_the_ids_that_the_engine_generated(
    rig: Rig, prompts: TextPrompts
) -> None:
    engine = Echo("e")
    # "12" as two tokens, although the tokenizer would make one: tokenising again would change it.
    one, two = prompts.encode("1"), prompts.encode("2")
    (end,) = prompts.encode("<end>")
    split = (*one, *two, end)
    assert prompts.encode("12<end>") != split
    engine.answers = [split, (*one, end)]
    await rig.start(engine)
    rig.controller.run_here({"agent": agent}, tokenizer=rig.folder)
    group = rig.controller.submit_workflow_group("agent", None, 1, SAMPLING)
    (delivered,) = await rig.controller.next_batch(1, deadline_s=30)
    (rollout,) = delivered.rollouts
    assert (await group).group_id == delivered.group_id
    assert rollout.value == ["12", "1", "12", "a tool"]
    conversation, branch = training_samples(delivered, [1.0])
    first, inserted, third = texts(
        prompts,
        "<tool>look\n<user>What is 3 + 4?<end>\n<assistant>",
        "\n<tool>x<end>\n<assistant>",
        "<tool>look\n<user>What is 3 + 4?<end>\n<assistant>other<end>\n<user>What is 3 + 4?<end>\n<assistant>",
    )
    assert conversation.prompt_ids == first
    assert conversation.output_ids == (*split, *inserted, *one, end)
    mask = (True,) * 3 + (False,) * len(inserted) + (True,) * 2
    assert conversation.loss_mask == mask
    assert (branch.prompt_ids, branch.output_ids) == (third, split)


@pytest.mark.parametrize("ended", [True, False], ids=["stop", "length"])
async def test_a_continued_prompt_equals_a_whole_rendering(
    prompts: TextPrompts, ended: bool
) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "It is 7."}]
    conversations = Conversations(prompts.codec)
    first = await conversations.prompt([Message.of(QUESTION)], NO_TOOLS)
    output = prompts.encode("It is 7.") + (prompts.encode("<end>") if ended else ())
    conversations.answered(first, NO_TOOLS, Message.of(messages[1]), output)
    messages.append({"role": "user", "content": "And 5 + 6?"})
    second = await conversations.prompt([Message.of(each) for each in messages], NO_TOOLS)
    assert (first.ids, second.ids) == (
        prompts.render(Chat((QUESTION,))),
        prompts.render(Chat(tuple(messages))),
    )
    assert second.ids[: len(first.ids + output)] == first.ids + output


FORGETS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if m.role == 'user' or loop.last else m.content.split('</think>')[-1] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


async def test_a_chat_branches_if_the_template_drops_an_earlier_reasoning(
    rig: Rig, prompts: TextPrompts, tmp_path: Path
) -> None:
    """The endpoint of OpenAI's API has the same rule."""
    folder = str(write_checkpoint(tmp_path / "forgets", chat_template=FORGETS))
    engine = Echo("e")
    engine.answers = texts(prompts, "<think>3</think>7<end>", "8<end>")
    found: list[tuple[Branch, ...]] = []

    async def agent(context: WorkflowContext) -> None:
        messages = [QUESTION]
        for _ in range(2):
            turn = await context.chat(messages)
            messages += [{"role": "assistant", "content": turn.text}, QUESTION]
        found.append(tuple(context.branches))

    await rig.start(engine)
    rig.controller.run_here({"agent": agent}, tokenizer=folder)
    rig.controller.submit_workflow_group("agent", None, 1, SamplingParams(max_new_tokens=24))
    (delivered,) = await rig.controller.next_batch(1, deadline_s=30)
    assert found == [(Branch(1, REWRITES),)]
    _, second = training_samples(delivered, [1.0])
    question = "<user>What is 3 + 4?<end>\n"
    assert [second.prompt_ids] == texts(
        prompts, f"{question}<assistant>7<end>\n{question}<assistant>"
    )


def test_a_message_of_a_chat_reaches_the_template_unchanged() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "book", "arguments": {"seat": 4}}}
    for message in (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": ["a form of its own"]},
        {"role": "tool", "content": "x", "tool_call_id": "c", "name": "book"},
        {"role": "user", "content": "x", "weather": ["sunny"], "name": 3},
        {"role": "assistant", "content": "x", "reasoning_content": "y"},
    ):
        assert Message.of(message).for_template() == message
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert Message.of({"role": "user", "content": parts}).content == "one\ntwo"


def test_arguments_of_tool_calls_and_parts_of_contents_reach_the_template(
    prompts: TextPrompts,
) -> None:
    call = {"type": "function", "function": {"name": "book", "arguments": '{"seat": 4}'}}
    broken = {"type": "function", "function": {"name": "book", "arguments": "{"}}
    seat = f'{{"seat": {1 << 64}}}'
    large = {"type": "function", "function": {"name": "book", "arguments": seat}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = (
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [broken]},
        # msgpack has no integers of 65 bits, but the arguments are JSON.
        {"role": "assistant", "content": "", "tool_calls": [large]},
    )
    assert prompts.render(Chat(messages)) == prompts.encode(
        "<user>one\ntwo<end>\n<assistant>[book:4]<end>\n<assistant>[book:]<end>\n"
        "<assistant>[book:18446744073709551616]<end>\n<assistant>"
    )


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", r"prompt must not be empty, got ''"),
        ([], r"prompt_ids must not be empty"),
        ([{"content": "hi"}], r"messages\[0\]: role must be text, got None"),
        ([{"role": "user", "content": 3}], r"content must be text, a list .* or None, got 3"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}],
            r"messages\[0\]: content must be parts with text or images, got a part of type 'input_audio'; audio",
        ),
        ([QUESTION, 3], r"messages\[1\] must be a mapping with text keys, got 3"),
        (
            [{"role": "user", "content": "a", "x": object()}],
            r"messages\[0\]: must be msgpack-plain",
        ),
    ],
)
async def test_invalid_prompts_are_refused_at_submission(prompt: Any, says: str, rig: Rig) -> None:
    await rig.start(FakeEngine("e"))
    with pytest.raises(ConfigError, match=says):
        rig.controller.submit(prompt, SAMPLING)
    assert rig.controller.stats().submitted == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"messages": ()}, r"messages must not be empty"),
        ({"messages": "hi"}, r"messages must be a sequence of mappings, got 'hi'"),
        ({"tools": (print,)}, r"tools\[0\] must be a mapping with text keys, got <built-in"),
        (
            {"template_arguments": {"tokenize": True}},
            r"only arguments of the template, got 'tokenize'",
        ),
    ],
)
def test_invalid_chats_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Chat(**{"messages": (QUESTION,), **changes})


def test_folders_without_a_tokenizer_or_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer: must be a folder with a tokenizer, got"):
        ModelText(str(tmp_path))
    plain = TextPrompts(ModelText(str(write_checkpoint(tmp_path / "plain"))))
    assert plain.prompt(encode_prompt("3 + 4 =")).ids == plain.encode("3 + 4 =")
    with pytest.raises(ConfigError, match="must have a chat template for messages, got none"):
        plain.prompt(encode_prompt([QUESTION]))


def test_tasks_with_text_and_messages_survive_a_checkpoint() -> None:
    chat = Chat((QUESTION,), tools=(TOOL,))
    tasks = [Task((1, 2)), Task(prompt="3 + 4 ="), Task(prompt=[QUESTION]), Task(prompt=chat)]
    assert decode_tasks(encode_tasks(tasks)[0]) == tasks
