"""A live server of two ranks says why its requests would wait: it has no version yet, or one of its ranks is cut off.

A rank that loses its connection to the controller while it is paused cannot know how the round ends. So it stays paused, and
the engine cannot generate without it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from cut_ranks import cut_off
from servers import HTTP_S, TOKEN, Layout, build, save, serving
from turn_rig import (
    DEADLINE_S,
    KIND,
    Rig,
    control_config,
    serving_first_version,
    until_refused,
)

import windlass
from windlass.config import Reaction, UpdateMode
from windlass.control.messages import Command, Prepare, Publish, Result
from windlass.control.trainer_agent import TrainerAgent
from windlass.errors import RoundAborted

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]
PAUSED_S = 5.0
"""Seconds after which all ranks of the engine have paused."""


def refused_first_version(url: str) -> str:
    """Publish a version with NaN, which ends its round before a write. Return the error."""
    model = build(KIND, 3)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    connecting = windlass.connect_trainer(model, controller=url, token=TOKEN, transport="cma")
    with connecting as trainer, pytest.raises(RoundAborted, match="lm_head") as refused:
        trainer.publish(0, deadline_s=DEADLINE_S).result()
    return str(refused.value)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_server_says_why_after_an_aborted_first_version_and_if_a_rank_is_cut_off(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save(KIND, 1, tmp_path / "first")
    async with windlass.Controller(
        token=TOKEN,
        config=control_config(mode=UpdateMode.IN_PLACE, non_finite=Reaction.REFUSE),
    ) as controller:
        running = serving(
            engine, first, tmp_path / "server.log", layout=Layout(tp=2), controller=controller.url
        )
        with ExitStack() as stack:
            # The server joins while the controller's loop runs.
            server = await asyncio.to_thread(stack.enter_context, running)
            members, loop = controller.coordinator.members, asyncio.get_running_loop()
            handle, cuts = TrainerAgent.handle, [True]

            def handle_late(agent: TrainerAgent, command: Command, **numbers: int) -> Result:
                """Cut off rank 1 of the engine when all its ranks have paused, before this rank may write."""
                if isinstance(command, Prepare) and not cuts:
                    cuts.append(True)
                    time.sleep(PAUSED_S)
                    session = members.sessions["engine/1"]
                    asyncio.run_coroutine_threadsafe(session.close(), loop).result(HTTP_S)
                return handle(agent, command, **numbers)

            monkeypatch.setattr(TrainerAgent, "handle", handle_late)
            assert await asyncio.to_thread(refused_first_version, controller.url)
            await until_refused(server, "this engine has no version yet")
            async with serving_first_version(
                Rig, server, controller, tmp_path, transport="cma"
            ) as rig:
                cuts.clear()
                rig.step()
                with pytest.raises(RoundAborted, match="engine/1"):
                    await rig.publish()
                await rig.must_refuse("may be of two versions")
                await controller.wait_for_fleet(
                    num_trainers=1, engines=["engine"], deadline_s=HTTP_S
                )
                await rig.publish_again()
                await asyncio.to_thread(server.http.get, "/health", HTTP_S)
                await rig.check()


async def test_server_serves_a_version_although_a_rank_was_cut_off_in_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two commands to serve the version, the main loop of rank 0 is blocked, and that of rank 1 may be free."""
    first = save(KIND, 1, tmp_path / "first")
    config = control_config(mode=UpdateMode.IN_PLACE)
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        running = serving(
            "vllm", first, tmp_path / "server.log", layout=Layout(tp=2), controller=controller.url
        )
        with ExitStack() as stack:
            server = await asyncio.to_thread(stack.enter_context, running)
            async with serving_first_version(
                Rig, server, controller, tmp_path, transport="cma"
            ) as rig:
                for answered in (False, True):
                    rig.step()
                    with monkeypatch.context() as patch:
                        cut_off(patch, "engine/1", at=Publish, answered=answered)
                        with pytest.raises(RoundAborted, match="engine/1"):
                            await rig.publish()
                        await controller.wait_for_version(
                            rig.version, engines=["engine"], deadline_s=HTTP_S
                        )
                    await rig.check()
                    await rig.publish_again()
                    await rig.check()
