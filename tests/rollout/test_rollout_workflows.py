"""Workflows in real worker processes and in the controller's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fake_engine import FakeEngine, expected_tokens
from kept_port import free_port

from windlass.errors import ConfigError, PeerTimeout, RolloutError
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    OnStale,
    Reject,
    RolloutConfig,
    RolloutController,
    SampleTensor,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    WorkflowContext,
    blocked,
    lifecycle,
    mount_rollout_routes,
    workflows,
)
from windlass.rollout.directory import EngineChoice, Routing, prefixes_of
from windlass.rollout.messages import EngineTarget, Partial, Turn

TOKEN = "a-token"
SAMPLING = SamplingParams(max_new_tokens=2)
ROOT = Path(__file__).resolve().parents[2]


class Rig:
    """A controller with engines. The test starts the workers."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.policy = StalenessPolicy.unbounded(5000)
        self.engines = StaticEngines()
        self.controller: RolloutController
        self.url = ""

    async def start(self, num_engines: int = 1) -> list[FakeEngine]:
        config = RolloutConfig(retry_backoff_s=0.01, max_rejections=3)
        self.controller = await self.stack.enter_async_context(
            RolloutController(self.engines, self.policy, token=TOKEN, config=config)
        )
        self.url = await self.serve(self.controller)
        engines = [
            await self.stack.enter_async_context(FakeEngine(f"engine-{index}"))
            for index in range(num_engines)
        ]
        self.engines.set(engine.entry for engine in engines)
        return engines

    async def serve(self, controller: RolloutController) -> str:
        server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        mount_rollout_routes(server, controller, BatchQueue())
        await server.start()
        self.stack.push_async_callback(server.close)
        return server.url

    async def agent_worker(self, name: str, url: str = "") -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "examples" / "agentic.py"), "worker"),
            *("--name", name, "--controller", url or self.url),
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "WINDLASS_TOKEN": TOKEN},
        )
        self.stack.push_async_callback(reap, process)
        return process


async def reap(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack)


async def three_turns(context: WorkflowContext) -> int:
    assert isinstance(context.arguments, int)
    tokens: tuple[int, ...] = (context.arguments,)
    for _ in range(3):
        tokens += (await context.generate(tokens)).output.output_ids
    return sum(tokens)


async def test_a_workflow_in_the_controllers_loop_gets_its_own_turns(rig: Rig) -> None:
    await rig.start()
    rig.controller.run_here({"three": three_turns})
    handles = [rig.controller.submit_workflow("three", n + 1, SAMPLING) for n in range(100)]
    for number, rollout in enumerate(await rig.controller.wait(handles, deadline_s=30)):
        tokens: tuple[int, ...] = (number + 1,)
        for turn in rollout.turns:
            assert turn.prompt_ids == tokens
            assert turn.output.output_ids == expected_tokens(tokens, 2)
            tokens += turn.output.output_ids
        assert (len(rollout.turns), rollout.value) == (3, sum(tokens))
        assert rollout.versions == (0,) * 6
    assert rig.controller.stats().lost == 0


async def raises(context: WorkflowContext) -> object:
    """Raise the exception that the arguments name."""
    await context.generate(np.array([1, 2]))  # type: ignore[arg-type]
    kinds = (SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopAsyncIteration)
    raise {kind.__name__: kind for kind in kinds}[str(context.arguments)]("\ud800 cannot be sent")


async def returns_arrays(context: WorkflowContext) -> object:
    turn = await context.generate(torch.tensor([1, 2]))  # type: ignore[arg-type]
    return {"reward": np.float32(0.5), "ids": np.array(turn.prompt_ids), "ok": np.bool_(True)}


@pytest.mark.parametrize(
    "raised", ["SystemExit", "KeyboardInterrupt", "CancelledError", "StopAsyncIteration"]
)
async def test_an_exception_of_a_workflow_fails_only_its_rollout(
    rig: Rig, raised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test runner cannot send this character either.
    monkeypatch.setattr(workflows.logger, "disabled", True)
    monkeypatch.setattr(lifecycle.logger, "disabled", True)
    await rig.start()
    rig.controller.run_here({"raises": raises, "arrays": returns_arrays})
    failing = rig.controller.submit_workflow("raises", raised, SAMPLING)
    with pytest.raises(RolloutError, match=raised):
        await rig.controller.wait([failing], deadline_s=30)
    (rollout,) = await rig.controller.wait(
        [rig.controller.submit_workflow("arrays", None, SAMPLING)], deadline_s=30
    )
    assert rollout.value == {"reward": 0.5, "ids": [1, 2], "ok": True}
    assert rig.controller.stats().lost == 0


class NoText(Exception):
    def __str__(self) -> str:
        return self.args[0]  # type: ignore[no-any-return]


async def breaks(context: WorkflowContext) -> object:
    finish_reason: Any = None if context.arguments == "text of a turn" else "stop"
    turn = Turn((1,), Partial((2,), (math.nan,), (3,)), finish_reason)
    sound = Turn((1,), Partial((2,), (-0.5,), (3,)), "stop")
    turns: dict[object, Any] = {
        "turns": "no turn",
        "text of a turn": turn,
        "logprob": turn,
        "images": msgspec.structs.replace(sound, images=("a",)),
        "name of a tensor": sound,
    }
    if context.arguments == "name of a tensor":
        context.tensors["images.a.pixels"] = SampleTensor.of([1.0], per_token=False)
    if context.arguments in turns:
        context.turns.append(turns[context.arguments])
        return 1.0
    raise NoText({"code": 3})


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("text", r"NoText: \(no text: its __str__ raised TypeError\)"),
        ("turns", r"ConfigError: workflow breaks: turns\[0\] must be a Turn, got str"),
        ("text of a turn", r"turns\[0\]: finish_reason must be str, got None"),
        ("logprob", r"turns\[0\]: logprobs\[0\] must be finite, got nan"),
        ("images", r"turns\[0\]: images must be those of turns that `chat` has returned, got 'a'"),
        (
            "name of a tensor",
            r"tensors: a name must not begin with 'images\.', got 'images\.a\.pixels'",
        ),
    ],
)
async def test_an_attempt_without_a_valid_outcome_fails_at_once(
    rig: Rig, how: str, error: str
) -> None:
    await rig.start()
    rig.controller.run_here({"breaks": breaks})
    failing = rig.controller.submit_workflow("breaks", how, SAMPLING)
    with pytest.raises(RolloutError, match=error):
        await rig.controller.wait([failing], deadline_s=30)
    assert rig.controller.stats().lost == 0


async def adds_turns(context: WorkflowContext) -> object:
    """Add a turn from another source, with the values that such a source has."""
    await context.generate((1, 2))
    ids: Any = np.array([5, 6])
    output = Partial(torch.tensor([7, 8]), np.float32([-0.5, -0.25]), np.array([3, 4]))  # type: ignore[arg-type]
    context.turns.append(Turn(ids, output, "length"))
    return context.arguments


async def test_turns_that_a_workflow_adds_may_have_arrays(tmp_path: Path) -> None:
    config, policy = RolloutConfig(journal=tmp_path / "journal"), StalenessPolicy.unbounded(8)
    async with (
        FakeEngine("engine") as engine,
        RolloutController(StaticEngines([engine.entry]), policy, config=config) as controller,
    ):
        controller.run_here({"adds_turns": adds_turns})
        handles = [controller.submit_workflow("adds_turns", n, SAMPLING) for n in range(2)]
        for rollout in await controller.wait(handles, deadline_s=30):
            first, second = rollout.turns
            assert first.output.output_ids == expected_tokens((1, 2), 2)
            assert second == Turn((5, 6), Partial((7, 8), (-0.5, -0.25), (3, 4)), "length")
            assert rollout.versions == (0, 0, 3, 4)
        assert controller.stats().lost == 0


async def exits(context: WorkflowContext) -> object:
    """Call tools in tasks; one tool ends as a program of `argparse` or `click` ends."""

    async def tool(name: str) -> str:
        await asyncio.sleep(0.01)
        if name == "exit":
            sys.exit(2)
        return name

    names = ("a", str(context.arguments))
    if context.arguments == "exit":
        await asyncio.gather(*map(tool, names))
    elif context.arguments == "group":
        async with asyncio.TaskGroup() as group:
            group.create_task(tool("exit"))
    return [await task for task in [asyncio.create_task(tool(name)) for name in names]]


async def test_a_task_of_a_workflow_that_exits_ends_no_process(rig: Rig) -> None:
    await rig.start()
    rig.controller.run_here({"exits": exits})
    for how in ("exit", "group"):
        failing = rig.controller.submit_workflow("exits", how, SAMPLING)
        with pytest.raises(RolloutError, match=r"the workflow raised SystemExit: 2"):
            await rig.controller.wait([failing], deadline_s=30)
    fine = rig.controller.submit_workflow("exits", "b", SAMPLING)
    (rollout,) = await rig.controller.wait([fine], deadline_s=30)
    assert rollout.value == ["a", "b"]


async def in_task_group(context: WorkflowContext) -> None:
    async def reject() -> None:
        raise Reject("no tool was called")

    async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as group:
        outer.create_task(asyncio.sleep(60))
        group.create_task(asyncio.sleep(60))
        if context.arguments == "reject":
            group.create_task(reject())
        else:
            group.create_task(context.generate((1, 2)))


async def test_errors_in_task_groups_count_as_their_first_error(rig: Rig) -> None:
    await rig.start()
    rig.controller.run_here({"in_task_group": in_task_group})
    rejected = rig.controller.submit_workflow("in_task_group", "reject", SAMPLING)
    with pytest.raises(RolloutError, match=r"rejected 3 times .*: no tool was called"):
        await rig.controller.wait([rejected], deadline_s=30)
    rig.engines.set([("dead", f"http://127.0.0.1:{free_port()}", -1)])
    failing = rig.controller.submit_workflow("in_task_group", "engine", SAMPLING)
    # An engine that restarts may be away for more than three attempts.
    with pytest.raises(RolloutError, match=r"failed 8 times .*: engine dead .*: no connection"):
        await rig.controller.wait([failing], deadline_s=30)
    assert rig.controller.failed_alike == 0


async def test_a_killed_worker_in_the_middle_of_a_thousand_conversations_loses_none(
    rig: Rig,
) -> None:
    (engine,) = await rig.start()
    first = await rig.agent_worker("worker-0")
    await rig.agent_worker("worker-1")
    await rig.controller.wait_for_workers(2, deadline_s=60)
    engine.hold(1)
    groups = [
        rig.controller.submit_workflow_group("book_a_seat", number, 4, SAMPLING)
        for number in range(250)
    ]
    await engine.until_held(1000)
    engine.version = 1
    first.send_signal(signal.SIGKILL)
    await first.wait()
    await engine.release()
    delivered = await rig.controller.next_batch(250, deadline_s=60)
    assert sorted(group.group_id for group in delivered) == [group.group_id for group in groups]
    for rollout in (rollout for group in delivered for rollout in group.rollouts):
        assert isinstance(rollout.value, dict)
        assert rollout.value["turns"] == len(rollout.turns) >= 1
    stats = rig.controller.stats()
    assert (stats.completed, stats.lost, stats.outstanding, stats.failed) == (1000, 0, 0, 0)
    assert stats.retried > 0


async def test_waiting_for_workers_that_never_come_ends_by_the_deadline(rig: Rig) -> None:
    await rig.start()
    rig.controller.run_here({})
    with pytest.raises(PeerTimeout, match=r"1 of 2 workers registered within 0\.1 s \(controller"):
        await rig.controller.wait_for_workers(2, deadline_s=0.1)


async def test_a_workflow_that_no_worker_knows_waits_and_delays_no_other(rig: Rig) -> None:
    await rig.start()
    unknown = [rig.controller.submit_workflow("book_a_seat", n, SAMPLING) for n in range(20)]
    plain = [rig.controller.submit((n + 1,), SAMPLING) for n in range(20)]
    rig.controller.run_here({}, max_concurrent=2)
    await rig.controller.wait(plain, deadline_s=20)
    assert rig.controller.stats().parked == 20
    unknown[3].cancel()
    await rig.agent_worker("worker-0")
    del unknown[3]
    rollouts = await rig.controller.wait(unknown, deadline_s=20)
    assert {rollout.worker for rollout in rollouts} == {"worker-0"}
    stats = rig.controller.stats()
    assert (stats.completed, stats.cancelled, stats.parked, stats.lost) == (39, 1, 0, 0)


async def test_a_rejected_trajectory_is_retried_until_its_last_attempt(rig: Rig) -> None:
    seen: dict[object, int] = {}

    async def picky(context: WorkflowContext) -> int:
        await context.generate((1,))
        seen[context.arguments] = seen.get(context.arguments, 0) + 1
        if context.arguments == "never" or seen[context.arguments] < 3:
            raise Reject("not good enough")
        return seen[context.arguments]

    await rig.start()
    rig.controller.run_here({"picky": picky})
    assert (await rig.controller.submit_workflow("picky", "third", SAMPLING)).value == 3
    with pytest.raises(RolloutError, match=r"rejected 3 times .* not good enough"):
        await rig.controller.submit_workflow("picky", "never", SAMPLING)
    assert rig.controller.stats().lost == 0


async def test_a_paused_controller_dispatches_nothing_until_it_is_resumed(rig: Rig) -> None:
    (engine,) = await rig.start()
    rig.controller.run_here({})
    rig.controller.pause()
    handles = [rig.controller.submit((n + 1,), SAMPLING) for n in range(10)]
    with pytest.raises(PeerTimeout, match=r"10 of 10 rollouts were not done within 0\.1 s"):
        await rig.controller.wait(handles, deadline_s=0.1)
    assert engine.num_requests == 0
    rig.controller.resume()
    assert len(await rig.controller.wait(handles, deadline_s=10)) == 10


async def test_an_engine_too_old_for_the_bound_gets_no_traffic(rig: Rig) -> None:
    rig.policy = StalenessPolicy(1, 100, 100)
    old, new = await rig.start(2)
    old.version, new.version = 3, 5
    rig.engines.set((old.entry, new.entry))
    rig.controller.run_here({})
    handles = [rig.controller.submit((n + 1,), SAMPLING) for n in range(20)]
    rollouts = await rig.controller.wait(handles, deadline_s=10)
    assert {version for rollout in rollouts for version in rollout.versions} == {5}
    assert old.num_requests == 0


async def test_arguments_that_cannot_travel_are_refused_at_submission(rig: Rig) -> None:
    await rig.start()
    with pytest.raises(ConfigError, match="workflow three: arguments: must be msgpack-plain"):
        rig.controller.submit_workflow("three", object(), SAMPLING)
    with pytest.raises(ConfigError, match="workflow must be text and not empty"):
        rig.controller.submit_workflow("", 1, SAMPLING)


def test_equal_prefixes_stay_on_an_engine_until_its_load_is_too_high() -> None:
    load = {"a": 0, "b": 0}
    engines = [EngineTarget("a", ""), EngineTarget("b", "")]
    choice = EngineChoice(slack=4)

    def choose(prefix: int, avoid: str = "") -> str:
        name = choice.choose(engines, load.__getitem__, [prefix], avoid).name
        load[name] += 1
        return name

    assert [choose(1) for _ in range(6)] == ["a", "a", "a", "a", "a", "b"]
    assert choose(2) == "b"
    assert choose(2, avoid="b") == "a", "the engine that failed is left while there is another"


def test_longest_cached_beginning_of_a_prompt_decides_until_an_update() -> None:
    load = {"a": 0, "b": 0}
    engines = [EngineTarget("a", ""), EngineTarget("b", "")]
    choice = EngineChoice(slack=4)

    def choose(prompt_ids: tuple[int, ...]) -> str:
        return choice.choose(engines, load.__getitem__, prefixes_of(prompt_ids), "").name

    system, other = tuple(range(800)), tuple(range(1000, 1800))
    assert choose(system) == "a"
    load["a"] = 1
    assert choose(other) == "b"
    assert choose((*system[:520], 7)) == "a", "two whole blocks are equal"
    assert choose((*other[:256], *system)) == "b"
    assert choose((3, *system)) == "b", "nothing is cached, so the load decides"
    load["b"] = 1
    assert choose((*system[:512], *other)) == "a"
    load["a"] = 6
    assert choose((*system[:256], *other)) == "b", "the engine with the block is too busy"
    load["a"] = 2
    assert choose((*system[:256], 5)) == "b", "both have the block, so the load decides"
    assert choose((*system[:512], 5)) == "a", "one has a longer beginning"
    choice.forget()
    assert choose(system) == "b", "an update discards caches"


def test_other_rules_ignore_what_engines_have_cached() -> None:
    load = {"a": 0, "b": 2}
    engines = [EngineTarget("a", ""), EngineTarget("b", "")]

    def names(routing: Routing) -> list[str]:
        choice = EngineChoice(slack=4, routing=routing)
        return [choice.choose(engines, load.__getitem__, [1], "").name for _ in range(4)]

    assert names(Routing.LEAST_LOADED) == ["a"] * 4
    assert sorted(names(Routing.ROUND_ROBIN)) == ["a", "a", "b", "b"]


@pytest.mark.parametrize("on_stale", OnStale)
async def test_a_conversation_over_too_many_versions_ends_as_configured(
    rig: Rig, on_stale: OnStale
) -> None:
    rig.policy = StalenessPolicy(1, 8, 8, on_stale=on_stale, max_resubmits=1)
    (engine,) = await rig.start()
    turns_made = 0

    async def one_turn_per_version(context: WorkflowContext) -> None:
        nonlocal turns_made
        for _ in range(6):
            await context.generate((7,))
            turns_made += 1
            engine.version += 1

    rig.controller.run_here({"long": one_turn_per_version})
    handle = rig.controller.submit_workflow("long", None, SAMPLING)
    if on_stale is OnStale.TRAIN:
        assert (await handle).versions == tuple(v for version in range(6) for v in [version] * 2)
        assert turns_made == 6
        return
    with pytest.raises(RolloutError, match="dropped because it is too old"):
        await handle
    # The third turn shows that a run cannot be used, so its last three turns are never made.
    runs = 2 if on_stale is OnStale.RESUBMIT else 1
    assert engine.num_requests == 3 * runs
    stats = rig.controller.stats()
    assert (stats.stopped_early, stats.dropped, stats.failed, stats.lost) == (runs, 1, 0, 0)


async def test_a_workflow_that_continues_after_a_turn_that_is_too_old_has_no_such_turn(
    rig: Rig,
) -> None:
    rig.policy = StalenessPolicy(1, 8, 8, on_stale=OnStale.DROP)
    (engine,) = await rig.start()

    async def careless(context: WorkflowContext) -> None:
        for version in (0, 2, 1):
            engine.version = version
            with contextlib.suppress(RolloutError):
                await context.generate((7,))

    rig.controller.run_here({"careless": careless})
    rollout = await rig.controller.submit_workflow("careless", None, SAMPLING)
    assert rollout.versions == (0, 0, 1, 1)


async def test_evaluation_uses_none_of_the_bound_of_training(rig: Rig) -> None:
    rig.policy = StalenessPolicy(max_staleness=0, batch_size=4, max_concurrent=4)
    await rig.start()
    rig.controller.run_here({})
    async with RolloutController(
        rig.engines, StalenessPolicy.unbounded(64), token=TOKEN
    ) as evaluation:
        evaluation.run_here({})
        asked = [evaluation.submit((n + 1,), SAMPLING) for n in range(40)]
        assert len(await evaluation.wait(asked, deadline_s=20)) == 40
    assert rig.policy.capacity() == 4
    group = rig.controller.submit_group((1,), 4, SAMPLING)
    (handed,) = await rig.controller.next_batch(1, deadline_s=20)
    assert handed.group_id == group.group_id


async def test_an_evaluation_server_has_its_own_workers(rig: Rig) -> None:
    await rig.start()
    evaluation = await rig.stack.enter_async_context(
        RolloutController(rig.engines, StalenessPolicy.unbounded(64), token=TOKEN)
    )
    url = await rig.serve(evaluation)
    await rig.agent_worker("trains")
    await rig.agent_worker("evaluates", url)
    for controller, worker in ((rig.controller, "trains"), (evaluation, "evaluates")):
        await controller.wait_for_workers(1, deadline_s=60)
        handles = [controller.submit_workflow("book_a_seat", n, SAMPLING) for n in range(10)]
        rollouts = await controller.wait(handles, deadline_s=30)
        assert {rollout.worker for rollout in rollouts} == {worker}
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    mount_rollout_routes(server, rig.controller, BatchQueue())
    with pytest.raises(ConfigError, match=r"not exist already, got .*/v1/workers"):
        mount_rollout_routes(server, evaluation, BatchQueue())


async def test_groups_and_single_rollouts_that_are_declined_are_replaced(rig: Rig) -> None:
    rig.policy = StalenessPolicy(max_staleness=0, batch_size=2, max_concurrent=2)
    await rig.start()
    rig.controller.run_here({})
    # The version does not change, so without `decline` the second would wait forever.
    for number in range(5):
        rig.controller.submit_group((number + 1,), 2, SAMPLING)
        (group,) = await rig.controller.next_batch(1, deadline_s=20)
        rig.controller.decline(group)
        rollout = await rig.controller.submit((number + 1,), SAMPLING)
        rig.controller.decline(rollout)
        with pytest.raises(RolloutError, match="not declined yet"):
            rig.controller.decline(rollout)
    stats = rig.controller.stats()
    assert (stats.completed, stats.declined, stats.lost, stats.capacity) == (15, 15, 0, 2)


async def blocks(context: WorkflowContext) -> None:
    await context.generate((1, 2))
    time.sleep(0.6)  # noqa: ASYNC251 - the fault


async def test_a_workflow_that_blocks_the_loop_is_named(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocked, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(blocked, "BLOCKED_AFTER_S", 0.2)
    await rig.start()
    rig.controller.run_here({"blocks": blocks})
    handle = rig.controller.submit_workflow("blocks", None, SAMPLING)
    await rig.controller.wait([handle], deadline_s=20)
    said = f"workflow blocks (rollout {handle.task_id}) has blocked the event loop of the controller for 0 s"
    assert said in caplog.text
    assert "time.sleep(0.6)" in caplog.text


async def test_a_wait_for_a_workflow_that_no_worker_knows_names_it(rig: Rig) -> None:
    await rig.start()
    rig.controller.run_here({"blocks": blocks})
    handle = rig.controller.submit_workflow("blokcs", None, SAMPLING)
    says = r"1 of 1 rollouts were not done within .* \(.*workflow 'blokcs'; registered workflows: \['blocks'\]"
    with pytest.raises(PeerTimeout, match=says):
        await rig.controller.wait([handle], deadline_s=0.2)


async def hook() -> None:
    """Block the loop deep inside a library call."""
    json.loads("{}", object_hook=lambda _: time.sleep(0.6))


@pytest.mark.parametrize("num_local", [0, 2], ids=["no_local_worker", "two_local_workers"])
async def test_a_warning_names_code_that_blocks_the_controllers_loop_once(
    rig: Rig, num_local: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocked, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(blocked, "BLOCKED_AFTER_S", 0.2)
    await rig.start()
    async with RolloutController(StaticEngines([]), StalenessPolicy.unbounded(1)) as evaluation:
        for controller in (rig.controller, evaluation)[:num_local]:
            controller.run_here({})
        await asyncio.sleep(0.2)
        await hook()
    assert caplog.text.count("something has blocked the event loop of the controller for 0 s") == 1
    assert "in hook" in caplog.text
