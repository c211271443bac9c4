"""Workers, engines, agents and controllers end in the middle of sessions: nothing is lost, nothing is doubled."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import transformers
from agent_checkpoint import ANSWER, CALL, END
from chat_fleet import QUESTION, TOKEN, Client, serving, tool_loop
from fake_engine import FakeEngine

from windlass.errors import (
    AuthenticationError,
    ConfigError,
    PeerTimeout,
    ProtocolError,
    RolloutError,
)
from windlass.net.access import Access, role_environment, role_token
from windlass.net.addresses import free_port
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    ChatSettings,
    Claimed,
    ProcessRewards,
    RewardError,
    RewardPool,
    RolloutConfig,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    WorkflowContext,
    agent_workflow,
    claim_rollout,
    mount_rollout_routes,
    set_reward,
    training_samples,
)

SAMPLING = SamplingParams(max_new_tokens=32)
WITHIN_S = 90.0
ROOT = Path(__file__).resolve().parents[2]
AGENT_TOKEN = role_token(TOKEN, Access.AGENT)


class Rig:
    """Controllers and workers, in processes of their own where the test kills them."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.stack, self.folder = stack, folder
        self.http: aiohttp.ClientSession

    async def controller(self, *engines: tuple[str, str, int]) -> RolloutController:
        config = RolloutConfig(retry_backoff_s=0.01, worker_grace_s=0.5, engine_grace_s=0.5)
        policy = StalenessPolicy.unbounded(100)
        return await self.stack.enter_async_context(
            RolloutController(StaticEngines(engines), policy, token=TOKEN, config=config)
        )

    async def serve(self, controller: RolloutController) -> str:
        server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        mount_rollout_routes(server, controller, BatchQueue())
        await server.start()
        self.stack.push_async_callback(server.close)
        return server.url

    async def process(
        self, *command: str, role: Access = Access.OWNER
    ) -> asyncio.subprocess.Process:
        paths = f"{ROOT / 'src'}:{ROOT / 'tests/support'}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command),
            env={**os.environ, "PYTHONPATH": paths, **role_environment(TOKEN, role)},
            stdout=asyncio.subprocess.PIPE,
        )
        self.stack.push_async_callback(kill, process)
        return process

    async def worker(self, name: str, controller: str) -> tuple[asyncio.subprocess.Process, str]:
        """Start a worker; return it, and the base URL of its endpoint."""
        port = free_port()
        process = await self.process(
            *("-m", "windlass.rollout.worker", "--name", name, "--controller", controller),
            *("--tokenizer", str(self.folder), "--chat-port", str(port), "--max-concurrent", "4"),
            role=Access.WORKER,
        )
        return process, f"http://127.0.0.1:{port}/v1"

    def client(self, claimed: Claimed) -> Client:
        return Client(self.http, claimed.base_url, claimed.api_key)


async def kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGKILL)
    await process.wait()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not is_true():  # noqa: ASYNC110 - the condition may be a file of another process
            await asyncio.sleep(0.02)


async def claim(base_url: str, deadline_s: float = WITHIN_S) -> Claimed:
    return await asyncio.to_thread(claim_rollout, base_url, AGENT_TOKEN, deadline_s=deadline_s)


async def reward(claimed: Claimed, value: float, metadata: object = None) -> None:
    await asyncio.to_thread(set_reward, claimed.base_url, claimed.api_key, value, metadata=metadata)


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        found = Rig(stack, folder)
        found.http = await stack.enter_async_context(aiohttp.ClientSession())
        yield found


def texts(folder: Path, outputs: Any) -> list[str]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(output) for output in outputs]


WHOLE = ["".join([*CALL, END]), "".join([*ANSWER, END])]


async def test_a_session_of_a_killed_worker_starts_again_at_another_worker(
    rig: Rig, engine: str
) -> None:
    controller = await rig.controller(("engine", engine, 0))
    url = await rig.serve(controller)
    first, at_first = await rig.worker("first", url)
    handle = controller.submit_workflow("agent", {"a": 17}, SAMPLING)
    lost = await claim(at_first)
    assert lost.arguments == {"a": 17}
    await rig.client(lost).chat([QUESTION])
    await kill(first)
    _, at_second = await rig.worker("second", url)
    claimed = await claim(at_second)
    assert (claimed.task_id, claimed.attempt) == (lost.task_id, lost.attempt + 1)
    with pytest.raises(AuthenticationError):
        await asyncio.to_thread(set_reward, at_second, lost.api_key, 0.25)
    await tool_loop(rig.client(claimed), [QUESTION])
    with pytest.raises(ConfigError, match="set_reward: metadata must be a JSON value"):
        await reward(claimed, 0.5, metadata=object())
    metadata = {"passed": ["a", "b"], "seconds": 1.5}
    await reward(claimed, 0.5, metadata)
    (rollout,) = await controller.wait([handle], deadline_s=WITHIN_S)
    assert rollout.value == {"reward": 0.5, "metadata": metadata, "branches": []}
    # A repeated request may have lost its answer.
    await reward(claimed, 0.5, metadata)
    with pytest.raises(ProtocolError, match="metadata must be that of the ended session"):
        await reward(claimed, 0.5, {"passed": []})
    assert texts(rig.folder, [turn.output.output_ids for turn in rollout.turns]) == WHOLE
    stats = controller.stats()
    assert (stats.completed, stats.lost, stats.outstanding, stats.failed) == (1, 0, 0, 0)


async def test_an_agent_that_is_lost_fails_its_attempt_and_its_key(rig: Rig, engine: str) -> None:
    controller = await rig.controller(("engine", engine, 0))
    port = free_port()
    settings = ChatSettings(tokenizer=str(rig.folder), port=port)
    controller.run_here({"agent": agent_workflow(idle_s=0.5)}, chat=settings)
    handle = controller.submit_workflow("agent", None, SAMPLING)
    base_url = f"http://127.0.0.1:{port}/v1"
    lost = await claim(base_url)
    await rig.client(lost).chat([QUESTION])
    # The agent sends nothing more.
    claimed = await claim(base_url)
    assert claimed.attempt == lost.attempt + 1
    body = {"messages": [QUESTION]}
    await rig.client(lost).ask("/chat/completions", body, 401)
    with pytest.raises(AuthenticationError):
        await reward(lost, 1.0)
    await rig.client(claimed).chat([QUESTION])
    await reward(claimed, 0.5)
    # An agent that did not get the reply sends its reward again.
    await reward(claimed, 0.5)
    (rollout,) = await controller.wait([handle], deadline_s=WITHIN_S)
    assert len(rollout.turns) == 1
    stats = controller.stats()
    assert (stats.completed, stats.lost, stats.retried) == (1, 0, 1)
    with pytest.raises(PeerTimeout, match="no rollout to claim"):
        await claim(base_url, deadline_s=0.3)


AGENT = """
import json, os, sys, urllib.request

def ask(messages, **more):
    body = {"model": "policy", "messages": messages, "tools": [], **more}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]

question = {"role": "user", "content": "What is 17 + 25?"}
first = ask([question], max_tokens=4)
print("asked", flush=True)
ask([question, first, question], max_tokens=int(sys.argv[1]))
"""


async def test_arguments_that_no_agent_can_get_fail_their_rollout_at_once(rig: Rig) -> None:
    engine = await rig.stack.enter_async_context(FakeEngine("engine"))
    controller = await rig.controller(engine.entry)
    settings = ChatSettings(tokenizer=str(rig.folder), port=free_port())
    controller.run_here({"agent": agent_workflow()}, chat=settings)
    claiming = asyncio.create_task(claim(f"http://127.0.0.1:{settings.port}/v1"))
    handle = controller.submit_workflow("agent", {True: "yes"}, SAMPLING)
    with pytest.raises(RolloutError, match=r"agent: arguments must be JSON.*keys are supported"):
        await controller.wait([handle], deadline_s=WITHIN_S)
    controller.submit_workflow("agent", {"true": "yes"}, SAMPLING)
    assert (await claiming).arguments == {"true": "yes"}


async def test_a_killed_agent_process_costs_only_its_attempt(rig: Rig, engine: str) -> None:
    """SIGKILL ends the agent while the engine generates its second answer. That answer is no turn."""
    controller = await rig.controller(("engine", engine, 0))
    statuses: list[int | None] = []
    begun: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()

    async def solve(context: WorkflowContext) -> int:
        async with context.chat_endpoint() as session:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", AGENT, "1500" if context.attempt == 1 else "4"),
                env={"PATH": os.environ["PATH"], **session.environment},
                stdout=asyncio.subprocess.PIPE,
            )
            rig.stack.push_async_callback(kill, process)
            assert process.stdout is not None
            await process.stdout.readline()
            begun.put_nowait(process)
            statuses.append(await process.wait())
            if process.returncode:
                raise RuntimeError(f"the agent ended with status {process.returncode}")
        return context.attempt

    controller.run_here({"solve": solve}, chat=ChatSettings(tokenizer=str(rig.folder)))
    sampling = SamplingParams(max_new_tokens=1500, ignore_eos=True)
    controller.submit_workflow_group("solve", None, 1, sampling)
    agent = await asyncio.wait_for(begun.get(), WITHIN_S)
    # The second request has 1500 tokens, so it still runs after this time.
    await asyncio.sleep(0.5)
    assert await num_running(rig, engine) == 1
    await kill(agent)
    (group,) = await controller.next_batch(1, deadline_s=WITHIN_S)
    assert statuses == [-signal.SIGKILL, 0]
    (rollout,) = group.rollouts
    assert rollout.value == 2
    (sample,) = training_samples(group, [1.0])
    generated = [turn.output.output_ids for turn in rollout.turns]
    assert [len(ids) for ids in generated] == [4, 4]
    own = [token for token, mask in zip(sample.output_ids, sample.loss_mask, strict=True) if mask]
    assert own == [token for ids in generated for token in ids]
    assert sample.versions == tuple(0 if mask else -1 for mask in sample.loss_mask)
    stats = controller.stats()
    assert (stats.completed, stats.lost, stats.failed, stats.outstanding) == (1, 0, 0, 0)


async def test_a_killed_reward_process_costs_one_answer_while_sessions_go_on(
    rig: Rig, engine: str, tmp_path: Path
) -> None:
    """The answer that could not be scored is generated again. The others keep their ids, masks and rewards."""
    file = tmp_path / "reward.py"
    file.write_text(
        "import os, pathlib, time\n"
        "def reward(rollout):\n"
        f"    place = pathlib.Path({str(tmp_path)!r}, rollout.task_id)\n"
        "    if rollout.attempts == 1 and not place.exists():\n"
        "        place.write_text(str(os.getpid()))\n"
        "        time.sleep(600 if rollout.value == 'slow' else 0)\n"
        "    return float(len(rollout.turns))\n"
    )
    controller = await rig.controller(("engine", engine, 0))
    first: list[str] = []
    goes_on = asyncio.Event()

    async def solve(context: WorkflowContext) -> str:
        async with context.chat_endpoint() as session:
            client = Client(rig.http, session.base_url, session.api_key)
            if context.arguments == "later":
                await client.chat([QUESTION])
                await goes_on.wait()
            await tool_loop(client, [QUESTION])
        first.append(context.task_id)
        return "slow" if first == [context.task_id] else "quick"

    controller.run_here({"solve": solve}, chat=ChatSettings(tokenizer=str(rig.folder)))
    handle = controller.submit_workflow_group("solve", None, 3, SAMPLING)
    later = controller.submit_workflow_group("solve", "later", 1, SAMPLING)
    async with (
        RewardPool(ProcessRewards(file=str(file), num_processes=1)) as pool,
    ):
        await until(lambda: handle.group_id in controller.ready_ids())
        before = controller.peek(handle.group_id)
        scoring = asyncio.create_task(pool.score(before.rollouts))
        lost = first[0]
        await until(lambda: (tmp_path / lost).exists() and (tmp_path / lost).read_text() != "")
        os.kill(int((tmp_path / lost).read_text()), signal.SIGKILL)
        found = dict(zip([each.task_id for each in before.rollouts], await scoring, strict=True))
        assert [task for task, each in found.items() if isinstance(each, RewardError)] == [lost]
        controller.replace({lost: str(found[lost])})
        goes_on.set()
        groups = {each.group_id: each for each in await controller.next_batch(2, deadline_s=60)}
        assert set(groups) == {handle.group_id, later.group_id}
        group = groups[handle.group_id]
        rewards = await pool.score(group.rollouts)
    assert rewards == (2.0, 2.0, 2.0)
    for old, new in zip(before.rollouts, group.rollouts, strict=True):
        assert new.task_id == old.task_id
        assert (new == old, new.attempts) == ((False, 2) if old.task_id == lost else (True, 1))
    samples = [*training_samples(group, rewards), *training_samples(groups[later.group_id], [0.0])]
    # The conversation that waited has two samples, because it asked its question twice.
    assert len({sample.task_id for sample in samples}) == 4
    for sample in samples[:3]:
        parts = zip(sample.output_ids, sample.loss_mask, strict=True)
        assert texts(rig.folder, [[token for token, own in parts if own]]) == ["".join(WHOLE)]
        assert sample.versions == tuple(0 if own else -1 for own in sample.loss_mask)
    stats = controller.stats()
    assert (stats.completed, stats.lost, stats.failed, stats.outstanding) == (4, 0, 0, 0)


async def test_an_engine_that_dies_in_a_turn_costs_only_its_attempt(rig: Rig) -> None:
    engines = [await rig.stack.enter_async_context(FakeEngine(f"engine-{n}")) for n in range(2)]
    controller = await rig.controller(*(engine.entry for engine in engines))
    attempts: list[int] = []

    async def agent(context: WorkflowContext) -> int:
        attempts.append(context.attempt)
        async with context.chat_endpoint() as session:
            client = Client(rig.http, session.base_url, session.api_key)
            await client.chat([QUESTION], max_tokens=4)
            if context.attempt == 1:
                busy = next(engine for engine in engines if engine.num_requests)
                busy.hold(2)
                asking = asyncio.create_task(client.chat([QUESTION, QUESTION]))
                await busy.until_held(1)
                await busy.die()
                await asking
            await client.chat([QUESTION, QUESTION], max_tokens=4)
        return context.attempt

    controller.run_here({"agent": agent}, chat=ChatSettings(tokenizer=str(rig.folder)))
    handle = controller.submit_workflow("agent", None, SAMPLING)
    (rollout,) = await controller.wait([handle], deadline_s=WITHIN_S)
    assert (rollout.value, attempts) == (2, [1, 2])
    assert [len(turn.output.output_ids) for turn in rollout.turns] == [4, 4]
    stats = controller.stats()
    assert (stats.completed, stats.lost, stats.retried, stats.failed) == (1, 0, 1, 0)


async def test_a_killed_engine_process_costs_only_its_attempt(rig: Rig) -> None:
    engines = dict([await started(rig), await started(rig)])
    controller = await rig.controller(*((url, url, 0) for url in engines))
    begun = asyncio.Event()

    async def agent(context: WorkflowContext) -> int:
        async with context.chat_endpoint() as session:
            client = Client(rig.http, session.base_url, session.api_key)
            await client.chat([QUESTION], max_tokens=4)
            begun.set()
            await client.chat([QUESTION, QUESTION], max_tokens=3500 if context.attempt == 1 else 4)
        return context.attempt

    controller.run_here({"agent": agent}, chat=ChatSettings(tokenizer=str(rig.folder)))
    sampling = SamplingParams(max_new_tokens=3500, ignore_eos=True)
    handle = controller.submit_workflow("agent", None, sampling)
    await asyncio.wait_for(begun.wait(), WITHIN_S)
    # The second request has 3500 tokens, so it still runs after this time.
    await asyncio.sleep(1.0)
    busy = [url for url in engines if await num_running(rig, url)]
    engines[busy[0]].kill()
    (rollout,) = await controller.wait([handle], deadline_s=WITHIN_S)
    assert rollout.value == 2
    assert rollout.engine not in busy
    assert [len(turn.output.output_ids) for turn in rollout.turns] == [4, 4]
    stats = controller.stats()
    assert (stats.completed, stats.lost, stats.retried, stats.failed) == (1, 0, 1, 0)


async def started(rig: Rig) -> tuple[str, subprocess.Popen[str]]:
    """Start an engine; return its URL and its process."""
    return await asyncio.to_thread(rig.stack.enter_context, serving(rig.folder))


async def num_running(rig: Rig, engine: str) -> int:
    """Return the number of requests that run at an engine."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with rig.http.get(f"{engine}/server_info", headers=headers) as response:
        return int((await response.json())["running"])


async def test_sessions_continue_while_the_controller_is_killed_and_restarted(
    rig: Rig, engine: str, tmp_path: Path
) -> None:
    port, store = str(free_port()), tmp_path / "store"
    script = str(ROOT / "tests/support/agent_controller.py")
    command = (script, port, str(tmp_path / "journal"), str(store), engine, "2")
    controller = await rig.process(*command)
    assert controller.stdout is not None
    url = (await controller.stdout.readline()).decode().strip()
    _, base_url = await rig.worker("worker", url)
    claims = [await claim(base_url), await claim(base_url)]
    messages = [QUESTION, await rig.client(claims[0]).chat([QUESTION])]
    await kill(controller)
    # While no controller runs, the first session ends and the second begins.
    result = {
        "role": "tool",
        "tool_call_id": messages[-1]["tool_calls"][0]["id"],
        "content": "42",
    }
    await rig.client(claims[0]).chat([*messages, result])
    await reward(claims[0], 0.25)
    begun = await rig.client(claims[1]).chat([QUESTION])
    controller = await rig.process(*command)
    result["tool_call_id"] = begun["tool_calls"][0]["id"]
    await rig.client(claims[1]).chat([QUESTION, begun, result])
    await reward(claims[1], 0.75)
    printed, _ = await asyncio.wait_for(controller.communicate(), WITHIN_S)
    assert printed.decode().splitlines()[-1] == "done 0 0 0"
    lines = [json.loads(line) for line in store.read_text().splitlines()]
    assert sorted(line["number"] for line in lines) == [0, 1]
    assert {line["value"]["reward"] for line in lines} == {0.25, 0.75}
    for line in lines:
        assert texts(rig.folder, line["outputs"]) == WHOLE
        first = line["prompts"][0] + line["outputs"][0]
        assert line["prompts"][1][: len(first)] == first
        assert set(line["versions"]) == {0}
