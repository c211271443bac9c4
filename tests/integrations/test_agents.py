"""The `openai` client and frameworks for agents, in an environment of their own, against real engines.

`agent_run.py` has the agents. Each runs in a process of its own, knows only OPENAI_BASE_URL and OPENAI_API_KEY, and really
calls its tool. The same agents run with the embedded engine, and with live vLLM and SGLang on CPUs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import transformers
from agent_checkpoint import ANSWER, CALL, END
from agent_run import AGENTS
from chat_fleet import QUESTION, TOKEN, Client
from pages import blocks
from servers import TOKEN as LIVE_TOKEN
from servers import Layout, Server
from servers import serving as serving_live

import windlass
from windlass.rollout import (
    ChatSettings,
    Rollout,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    Workflow,
    WorkflowContext,
    merge_turns,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("WINDLASS_AGENTS_VENV", ROOT / ".venv-agents")) / "bin/python"
WITHIN_S = 240.0
CONTEXT = {"vllm": ("--max-model-len", "4096"), "sglang": ("--context-length", "4096")}
SAMPLING = SamplingParams(max_new_tokens=64)


async def run_agent(context: WorkflowContext) -> Any:
    """Run the agent that the arguments name, in a process of its own."""
    async with context.chat_endpoint() as session:
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), str(ROOT / "tests/integrations/agent_run.py"), str(context.arguments)),
            env={"PATH": os.environ["PATH"], **session.environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            printed, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, errors.decode()[-3000:]
    return {"answer": printed.decode().strip(), **session.result()}


async def rollouts(
    engine: tuple[str, str, int], folder: Path, workflow: Workflow, *arguments: str
) -> tuple[Rollout, ...]:
    policy = StalenessPolicy.unbounded(100)
    async with RolloutController(StaticEngines([engine]), policy, token=TOKEN) as controller:
        settings = ChatSettings(tokenizer=str(folder))
        controller.run_here({"agent": workflow}, chat=settings, max_concurrent=2)
        handles = [controller.submit_workflow("agent", each, SAMPLING) for each in arguments]
        found = await controller.wait(handles, deadline_s=WITHIN_S * len(arguments))
        assert controller.stats().lost == 0
        return found


def require_one_trajectory(rollout: Rollout, folder: Path, version: int) -> None:
    """Check that an agent's two turns are one sequence, with the ids and masks as generated."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert isinstance(rollout.value, dict)
    assert (rollout.value["answer"], rollout.value["branches"]) == ("".join(ANSWER), [])
    (trajectory,) = merge_turns(rollout.turns)
    tokens = [tokenizer.decode([token]) for token in trajectory.output_ids]
    generated = [t for t, own in zip(tokens, trajectory.loss_mask, strict=True) if own]
    assert generated == [*CALL, END, *ANSWER, END]
    inserted = [t for t, own in zip(tokens, trajectory.loss_mask, strict=True) if not own]
    assert "<tool_response>" in "".join(inserted)
    assert rollout.versions == (version,) * len(generated)
    assert all(-0.01 < logprob <= 0 for logprob in trajectory.logprobs)


def require_frameworks() -> None:
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: tools/integrations/install_agents.sh installs the frameworks")


@pytest.mark.parametrize("name", sorted(AGENTS))
async def test_an_unchanged_agent_is_one_trajectory(name: str, embedded: str, folder: Path) -> None:
    require_frameworks()
    (rollout,) = await rollouts(("engine", embedded, 0), folder, run_agent, name)
    require_one_trajectory(rollout, folder, 0)


@asynccontextmanager
async def live(engine: str, folder: Path, log: Path) -> AsyncIterator[tuple[Any, Any, Server]]:
    """Serve the checkpoint by a live server that a trainer updates.

    Yield the controller, the trainer's client and the server.
    """
    policy = StalenessPolicy.unbounded(100)
    async with (
        windlass.Controller(token=LIVE_TOKEN, staleness=policy) as controller,
        AsyncExitStack() as stack,
    ):
        started = serving_live(
            *(engine, folder, log),
            layout=Layout(1),
            controller=controller.url,
            flags=CONTEXT[engine],
            tokenizes=True,
        )
        servers = stack.enter_context(ExitStack())
        server = await asyncio.to_thread(servers.enter_context, started)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        trainer = await asyncio.to_thread(
            windlass.connect_trainer, model, controller=controller.url, token=LIVE_TOKEN
        )
        stack.callback(trainer.close)
        await publish(trainer, 1)
        yield controller, trainer, server


async def publish(trainer: Any, version: int) -> None:
    await asyncio.to_thread(lambda: trainer.publish(version).result())


async def loop_over_an_update(context: WorkflowContext) -> Any:
    """Call the tool, wait until the test has published the next version, and answer."""
    async with aiohttp.ClientSession() as http, context.chat_endpoint() as session:
        client = Client(http, session.base_url, session.api_key)
        called = await client.chat([QUESTION])
        await UPDATES[str(context.arguments)].wait()
        (call,) = called["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        said = await client.chat([QUESTION, called, result])
    return {"answer": said["content"], **session.result()}


async def demand_a_call(context: WorkflowContext) -> Any:
    """Demand a call of the tool, which the engine's guided decoding enforces; the prompt alone leads to an answer."""
    arguments = {"a": {"type": "integer", "enum": [3]}, "b": {"type": "integer", "enum": [4]}}
    parameters = {
        "type": "object",
        "properties": arguments,
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    async with aiohttp.ClientSession() as http, context.chat_endpoint() as session:
        client = Client(http, session.base_url, session.api_key)
        result = {"role": "tool", "tool_call_id": "x", "content": "42"}
        message = await client.chat([QUESTION, result], tools=[tool], tool_choice="required")
    return message["tool_calls"][0]["function"]


UPDATES: dict[str, asyncio.Event] = {}
"""Name of a test's update -> event that the test sets after the update."""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_agents_on_a_live_engine_that_is_updated(
    engine: str, folder: Path, tmp_path: Path
) -> None:
    require_frameworks()
    names = ("openai_chat", "agents_responses", "pydantic_ai")
    async with live(engine, folder, tmp_path / "log") as (controller, trainer, _):
        rollouts = controller.rollouts
        workflows = {
            "agent": run_agent,
            "update": loop_over_an_update,
            "demand": demand_a_call,
            "long": long_answer,
        }
        rollouts.run_here(workflows, chat=ChatSettings(tokenizer=str(folder)))
        handles = [rollouts.submit_workflow("agent", name, SAMPLING) for name in names]
        for rollout in await rollouts.wait(handles, deadline_s=WITHIN_S * 3):
            require_one_trajectory(rollout, folder, 1)
        demand = rollouts.submit_workflow("demand", None, SamplingParams(max_new_tokens=400))
        (rollout,) = await rollouts.wait([demand], deadline_s=WITHIN_S)
        assert isinstance(rollout.value, dict)
        assert rollout.value["name"] == "add"
        assert json.loads(str(rollout.value["arguments"])) == {"a": 3, "b": 4}

        UPDATES[engine] = asyncio.Event()
        handles = [
            rollouts.submit_workflow("update", engine, SAMPLING),
            rollouts.submit_workflow(
                "long", None, SamplingParams(max_new_tokens=1500, ignore_eos=True)
            ),
        ]
        await asyncio.sleep(3.0)
        await publish(trainer, 2)
        UPDATES[engine].set()
        loop, long = await rollouts.wait(handles, deadline_s=WITHIN_S)
        assert isinstance(loop.value, dict)
        assert (loop.value["answer"], loop.value["branches"]) == ("".join(ANSWER), [])
        assert loop.versions == (1,) * (len(CALL) + 1) + (2,) * (len(ANSWER) + 1)
        assert list(long.versions) == sorted(long.versions)
        assert set(long.versions) == {1, 2}
        assert len(merge_turns(loop.turns)) == 1
        assert rollouts.stats().lost == 0


async def long_answer(context: WorkflowContext) -> None:
    """Ask for an answer that is so long that an update happens in it."""
    async with aiohttp.ClientSession() as http, context.chat_endpoint() as session:
        await Client(http, session.base_url, session.api_key).chat([QUESTION])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_live_engine_streams_its_tokens_across_an_update(
    engine: str, folder: Path, tmp_path: Path
) -> None:
    async with live(engine, folder, tmp_path / "log") as (controller, trainer, server):

        async def agent(context: WorkflowContext) -> None:
            async with aiohttp.ClientSession() as http, context.chat_endpoint() as session:
                path = session.base_url + "/chat/completions"
                body = {"messages": [QUESTION], "logprobs": True, "top_logprobs": 3}
                asking: dict[str, Any] = {"json": {**body, "stream": True}}
                asking["headers"] = {"Authorization": f"Bearer {session.api_key}"}
                async with http.post(path, **asking) as response:
                    assert response.status == 200, await response.text()
                    first = await response.content.readuntil(b"\n\n")
                    await publish(trainer, 2)
                    rest = await response.read()
                choices = choices_of(first + rest)
                (turn,) = context.turns
                assert list(turn.output.versions) == sorted(turn.output.versions)
                assert set(turn.output.versions) == {1, 2}
                assert choices[-1]["finish_reason"] == "length"
                text = "".join(choice["delta"].get("content", "") for choice in choices)
                assert text == turn.text.strip()
                assert sum("content" in choice["delta"] for choice in choices) > 100
                tokens = [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
                assert [token["logprob"] for token in tokens] == [*turn.output.logprobs]
                for token in tokens:
                    top = [each["logprob"] for each in token["top_logprobs"]]
                    assert len(top) == 3
                    assert top == sorted(top, reverse=True)
                    assert token["logprob"] <= top[0]
                for token, expected in zip(tokens, CALL, strict=False):
                    assert token["token"] == token["top_logprobs"][0]["token"] == expected
                    assert token["logprob"] == token["top_logprobs"][0]["logprob"]
                # The other request is longer than the time in which an engine notices that a client is gone.
                async with http.post(path, **asking) as other:
                    await other.content.readuntil(b"\n\n")
                    async with http.post(path, **asking) as gone:
                        await gone.content.readuntil(b"\n\n")
                        gone.close()
                    while await asyncio.to_thread(num_running, engine, server) > 1:
                        await other.content.readuntil(b"\n\n")
                    await other.read()
                assert len(context.turns) == 2

        rollouts = controller.rollouts
        rollouts.run_here({"agent": agent}, chat=ChatSettings(tokenizer=str(folder)))
        sampling = SamplingParams(max_new_tokens=1500, ignore_eos=True)
        handle = rollouts.submit_workflow("agent", None, sampling)
        (rollout,) = await rollouts.wait([handle], deadline_s=WITHIN_S)
        assert [len(turn.output.output_ids) for turn in rollout.turns] == [1500, 1500]


def choices_of(stream: bytes) -> list[Any]:
    """Return the choice in each event of a stream."""
    lines = [line.removeprefix(b"data: ") for line in stream.splitlines()]
    return [json.loads(line)["choices"][0] for line in lines if line.startswith(b"{")]


def num_running(engine: str, server: Server) -> int:
    """Return the number of requests that a live engine runs."""
    if engine == "vllm":
        metrics = server.http.get("/metrics", WITHIN_S).decode()
        return sum(
            int(float(line.split()[-1]))
            for line in metrics.splitlines()
            if line.startswith("vllm:num_requests_running")
        )
    loads = json.loads(server.http.get("/v1/loads", WITHIN_S))["loads"]
    return sum(load["num_running_reqs"] for load in loads)


async def test_the_page_and_the_example_run_unchanged(
    embedded: str, folder: Path, tmp_path: Path
) -> None:
    require_frameworks()
    (code,) = (block for block in blocks(ROOT / "docs/agents.md") if block.startswith("import "))
    for old, new in (("http://127.0.0.1:8100", embedded), ("/models/policy", str(folder))):
        assert old in code
        code = code.replace(old, new)
    script = tmp_path / "page.py"
    script.write_text(code)
    num_generated = len(CALL) + len(ANSWER) + 2
    expected = [f"reward 1.0: {num_generated} generated tokens"] * 4
    # The script imports `openai` and Windlass in one process.
    (packages,) = PYTHON.parents[1].glob("lib/python*/site-packages")
    assert await printed(str(script), packages=packages) == expected
    example = await printed(
        *(str(ROOT / "examples/agent_openai.py"), "run", "--engine", embedded),
        *("--model", str(folder), "--python", str(PYTHON)),
    )
    assert example[:4] == ["".join(ANSWER)] * 4
    assert [line.split(": ")[0] for line in example[4:]] == ["reward 1.0"] * 4
    assert all(f"{num_generated} generated" in line for line in example[4:])


async def printed(*command: str, packages: Path | None = None) -> list[str]:
    """Run a script of Python, and return its lines."""
    path = ":".join(filter(None, (str(ROOT / "src"), str(packages or ""))))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        env={**os.environ, "PYTHONPATH": path, "WINDLASS_TOKEN": TOKEN},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(process.communicate(), WITHIN_S)
    assert process.returncode == 0
    return said.decode().splitlines()
