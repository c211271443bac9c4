"""Actor, critic and reference: several train controllers on one server, each with separate ranks."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
import torch
from served_linear import served_linear

import windlass
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
