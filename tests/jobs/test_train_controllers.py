"""Train controllers of real ranks with an engine: several controllers on one server, and a cancelled publish."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import final

import pytest
import torch
from served_linear import served_linear

import windlass
from windlass.config import PauseMode
from windlass.errors import TrainerError
from windlass.jobs.schedulers.local import LocalScheduler
from windlass.jobs.train_controller import TrainController
from windlass.rollout.messages import TrainingSample

TOKEN = "a-token"
RANK = str(Path(__file__).parents[1] / "support" / "role_rank.py")
WITHIN_S = 60.0
WORLD_SIZES = {"actor": 2, "critic": 1, "reference": 1}


def group(reward: float) -> list[TrainingSample]:
    sample = TrainingSample(
        prompt_ids=(1,),
        output_ids=(2,),
        logprobs=(-0.5,),
        versions=(0,),
        reward=reward,
        group_id=0,
        engine="engine",
    )
    return [sample, sample]


GROUPS = [group(0.5), group(1.0)]


async def weight_of(trainers: TrainController) -> torch.Tensor:
    found = await trainers.call("weights", deadline_s=WITHIN_S)
    assert all(each == found[0] for each in found)
    return torch.tensor(found[0])


async def test_actor_critic_and_reference_share_a_server_and_fail_independently(
    tmp_path: Path,
) -> None:
    """Check that engines get only the actor's weights, and that a dead critic restarts while the actor continues."""
    controller = windlass.Controller(token=TOKEN)
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(LocalScheduler(tmp_path / "logs"))
        roles = {
            name: TrainController(
                scheduler,
                command=(sys.executable, RANK, name),
                world_size=world_size,
                token=TOKEN,
                name=name,
                coordinator=controller.coordinator if name == "actor" else None,
            )
            for name, world_size in WORLD_SIZES.items()
        }
        for each in roles.values():
            each.mount(controller.server)
        await stack.enter_async_context(controller)
        for each in roles.values():
            stack.push_async_callback(each.close, grace_s=5.0)
        engine = ExitStack()
        stack.push_async_callback(asyncio.to_thread, engine.close)
        live = await asyncio.to_thread(engine.enter_context, served_linear(controller.url, TOKEN))
        actor, critic, reference = roles.values()
        await asyncio.gather(
            *(each.start(controller.url, deadline_s=WITHIN_S) for each in roles.values())
        )
        await controller.wait_for_fleet(num_trainers=2, engines=["engine"], deadline_s=WITHIN_S)

        await actor.publish(0, deadline_s=WITHIN_S)
        start = await weight_of(reference)
        assert torch.equal(live, start), "both were made of one seed"
        _, _, sums = await asyncio.gather(
            actor.train_step(0, GROUPS, deadline_s=WITHIN_S),
            critic.train_step(0, GROUPS, deadline_s=WITHIN_S),
            reference.map("sums", [[1.0] * 24, [2.0] * 24], deadline_s=WITHIN_S),
        )
        assert sums == pytest.approx([float(start.sum()), 2 * float(start.sum())], abs=1e-4)
        await actor.publish(1, deadline_s=WITHIN_S)
        trained = await weight_of(actor)
        assert torch.equal(live, trained)
        assert not torch.equal(trained, start)
        assert torch.equal(await weight_of(reference), start)

        await scheduler.signal("critic-0", signal.SIGKILL)
        with pytest.raises(TrainerError, match=r"TrainStep: critic-0 ended with exit status -9"):
            await critic.train_step(1, GROUPS, deadline_s=WITHIN_S)
        await asyncio.gather(
            critic.start(controller.url, deadline_s=WITHIN_S),
            actor.train_step(1, GROUPS, deadline_s=WITHIN_S),
        )
        await actor.publish(2, deadline_s=WITHIN_S)
        assert torch.equal(live, await weight_of(actor))
        assert not torch.equal(live, trained)
        await critic.train_step(1, GROUPS, deadline_s=WITHIN_S)
        reports = controller.coordinator.reports
        assert [report.outcome for report in reports] == [windlass.RoundOutcome.PUBLISHED] * 3


@final
class HeldEngine:
    """`EngineHooks` of an engine whose pause lasts until `go` is set."""

    def __init__(self) -> None:
        self.go, self.is_pausing = threading.Event(), threading.Event()
        self.go.set()

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        self.is_pausing.set()
        assert self.go.wait(WITHIN_S)

    def resume(self, deadline_s: float) -> None: ...

    def finalise(self) -> None: ...

    def set_version(self, version: int, deadline_s: float) -> None: ...


@asynccontextmanager
async def served_actor(
    tmp_path: Path, hooks: HeldEngine
) -> AsyncIterator[tuple[windlass.Controller, TrainController, torch.Tensor]]:
    """Yield a controller, two ranks of the actor, and the weight of an engine with these hooks, which has version 0."""
    controller = windlass.Controller(token=TOKEN)
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(LocalScheduler(tmp_path / "logs"))
        actor = TrainController(
            scheduler,
            command=(sys.executable, RANK, "actor"),
            world_size=2,
            token=TOKEN,
            coordinator=controller.coordinator,
        )
        actor.mount(controller.server)
        await stack.enter_async_context(controller)
        stack.push_async_callback(actor.close, grace_s=5.0)
        engine = ExitStack()
        stack.push_async_callback(asyncio.to_thread, engine.close)
        live = await asyncio.to_thread(
            engine.enter_context, served_linear(controller.url, TOKEN, hooks)
        )
        await actor.start(controller.url, deadline_s=WITHIN_S)
        await controller.wait_for_fleet(num_trainers=2, engines=["engine"], deadline_s=WITHIN_S)
        await actor.publish(0, deadline_s=WITHIN_S)
        yield controller, actor, live


async def test_step_after_a_cancelled_publish_begins_when_the_update_has_ended(
    tmp_path: Path,
) -> None:
    """Regression: the step changed the weights during the update, so the update failed and the engine stayed paused."""
    hooks = HeldEngine()
    async with served_actor(tmp_path, hooks) as (controller, actor, live):
        await actor.train_step(0, GROUPS, deadline_s=WITHIN_S)
        of_version_1 = await weight_of(actor)
        hooks.go.clear()
        hooks.is_pausing.clear()
        publish = asyncio.create_task(actor.publish(1, deadline_s=WITHIN_S))
        assert await asyncio.to_thread(hooks.is_pausing.wait, WITHIN_S)
        publish.cancel()
        await asyncio.gather(publish, return_exceptions=True)
        assert publish.cancelled()
        step = asyncio.create_task(actor.train_step(1, GROUPS, deadline_s=WITHIN_S))
        # A step of this model takes some milliseconds.
        done, _ = await asyncio.wait([step], timeout=1.0)
        hooks.go.set()
        await step
        assert not done
        assert controller.coordinator.fleet.published == 1
        assert torch.equal(live, of_version_1)
        assert not torch.equal(live, await weight_of(actor))


async def test_a_late_update_is_blamed_on_its_phase_and_not_on_the_ranks(tmp_path: Path) -> None:
    """Regression: the error said that no trainer rank had answered, with the ends of their logs."""
    hooks = HeldEngine()
    async with served_actor(tmp_path, hooks) as (_, actor, _):
        await actor.train_step(0, GROUPS, deadline_s=WITHIN_S)
        hooks.go.clear()
        says = r"publish: not done within 3.0 s: the update is in phase \w+$"
        with pytest.raises(TrainerError, match=says):
            await actor.publish(1, deadline_s=3.0)
        hooks.go.set()
