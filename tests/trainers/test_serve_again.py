"""Trainers that wait for a batch publish their version again when no engine serves it any more."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path

import pytest
from batch_trainer import BatchTrainerSettings, run
from embedded_process import CONFIG, start_engine
from weight_fleet import TOKEN, Rank

import windlass
from windlass.config import ReplicaPlace
from windlass.rollout.messages import TrainingSample

DEADLINE_S = 60
SAMPLE = TrainingSample(
    prompt_ids=(1,),
    output_ids=(2,),
    logprobs=(-1.0,),
    versions=(0,),
    reward=1.0,
    group_id=0,
    engine="a",
)


@pytest.mark.parametrize(
    ("late", "replica"),
    [
        pytest.param("a", ReplicaPlace.OFF, id="restarted"),
        pytest.param("a", ReplicaPlace.HOST, id="restarted-host", marks=pytest.mark.long),
        pytest.param("b", ReplicaPlace.OFF, id="another_engine", marks=pytest.mark.long),
        pytest.param("b", ReplicaPlace.HOST, id="another_engine-host", marks=pytest.mark.long),
    ],
)
async def test_a_trainer_that_waits_for_a_batch_sends_its_version_again(
    tmp_path: Path, late: str, replica: ReplicaPlace
) -> None:
    with ExitStack() as stack:
        async with windlass.Controller(token=TOKEN) as controller:
            first = stack.enter_context(ExitStack())
            start_engine(first, "a", tmp_path, controller.url)
            settings = BatchTrainerSettings(controller.url, TOKEN, CONFIG, replica, False)
            stack.callback(Rank(run, settings).close)
            await controller.wait_for_version(0, engines=["a"], deadline_s=DEADLINE_S)
            await controller.batches.requested(0, deadline_s=DEADLINE_S)
            first.close()
            await controller.coordinator.changes.until(
                lambda: controller.coordinator.fleet.unserved == "no engine serves version 0",
                DEADLINE_S,
                lambda: "the engine is still there",
            )
            start_engine(stack, late, tmp_path, controller.url)
            await controller.wait_for_version(0, engines=[late], deadline_s=DEADLINE_S)
            assert controller.coordinator.fleet.published == 0
            await controller.batches.put(0, [[SAMPLE]])
            await controller.wait_for_version(1, engines=[late], deadline_s=DEADLINE_S)


@pytest.mark.long
async def test_weights_that_have_changed_are_not_sent_as_the_published_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "have changed since this rank published version" in record.getMessage():
                loop.call_soon_threadsafe(refused.set)

    logging.getLogger("windlass.control.recovery").addHandler(handler := Heard())
    with ExitStack() as stack:
        stack.callback(logging.getLogger("windlass.control.recovery").removeHandler, handler)
        async with windlass.Controller(token=TOKEN) as controller:
            first = stack.enter_context(ExitStack())
            start_engine(first, "a", tmp_path, controller.url)
            settings = BatchTrainerSettings(controller.url, TOKEN, CONFIG, ReplicaPlace.OFF, True)
            stack.callback(Rank(run, settings).close)
            await controller.wait_for_version(0, engines=["a"], deadline_s=DEADLINE_S)
            await controller.batches.requested(0, deadline_s=DEADLINE_S)
            first.close()
            start_engine(stack, "a", tmp_path, controller.url)
            async with asyncio.timeout(DEADLINE_S):
                await refused.wait()
            assert controller.coordinator.routable() == ()
            await controller.batches.put(0, [[SAMPLE]])
            await controller.wait_for_version(1, engines=["a"], deadline_s=DEADLINE_S)
