"""Stages that declare an order, but call real engine processes in the opposite order."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_callback import (
    engines,
    holds,
    tensors,
)
from weight_fleet import TOKEN
from weight_rank import shapes

import windlass
from windlass.errors import ConfigError, RoundAborted
from windlass.layout.dtypes import DType
from windlass.transfer.bindings import WireTensor

NUM_STAGES = 2
DEADLINE_S = 30.0
BUCKETS = (["embed"], ["gate", "down", "norm"])
"""Tensors of each stage, sent with one call each, so that the stages make different numbers of calls."""


def stage(url: str, index: int) -> windlass.RolloutCallback:
    return windlass.RolloutCallback(
        url,
        TOKEN,
        leader=f"pp{index}",
        stage=index,
        num_stages=NUM_STAGES,
        deadline_s=DEADLINE_S,
    )


def group(leader: windlass.RolloutCallback, name: str) -> windlass.WeightGroup:
    return windlass.WeightGroup(leader, name, bucket_nbytes=1 << 16, deadline_s=DEADLINE_S)


def crossing(url: str, version: int) -> None:
    """Let stage 1 always call first, but do its own half only after stage 0.

    In the order of arrival, this would deadlock: stage 1's call would hold the engines while stage 1 waits for stage 0,
    and stage 0's call would wait for the engines.
    """
    with stage(url, 0) as first, stage(url, 1) as second:
        first.pause_generation()
        second.pause_generation()
        formed = [threading.Event(), threading.Event()]

        def form(leader: windlass.RolloutCallback, index: int) -> windlass.WeightGroup:
            if index == 0:
                # Stage 1's call may have arrived or not. Both cases must work.
                assert not formed[1].wait(0.3), "stage 1 does not overtake stage 0"
            made = group(leader, f"group-{index}")
            formed[index].set()
            return made

        with ThreadPoolExecutor(2) as pool:
            later = pool.submit(form, second, 1)
            groups = [form(first, 0), later.result(60)]
            sent = threading.Event()

            def send(index: int) -> None:
                for number, name in enumerate(BUCKETS[index]):
                    if index == 0:
                        assert not sent.wait(0.3), "stage 1 does not overtake stage 0"
                    groups[index].broadcast(tensors(version, name))
                    if index == 1 and number == 0:
                        sent.set()
                (first, second)[index].continue_generation(version)

            works = [pool.submit(send, index) for index in (1, 0)]
            for work in works:
                work.result(60)
        for made in groups:
            made.close()


async def test_calls_of_leaders_run_in_the_declared_order() -> None:
    async with engines() as (fleet, url):
        for version in range(2):
            await asyncio.to_thread(crossing, url, version)
            await holds(fleet, (version, str(version), False))


def early(url: str) -> None:
    """Check that the end of the first leader does not publish before the other leader has begun."""
    with stage(url, 0) as first, stage(url, 1) as second, ThreadPoolExecutor(1) as pool:
        first.pause_generation()
        ended = pool.submit(first.continue_generation, 0)
        second.pause_generation()
        made = group(second, "weights")
        assert not ended.done()
        made.broadcast(tensors(0, *shapes()))
        second.continue_generation(0)
        ended.result(60)
        made.close()


async def test_an_update_waits_for_the_last_declared_leader() -> None:
    async with engines() as (fleet, url):
        await asyncio.to_thread(early, url)
        await holds(fleet, (0, "0", False))


def absent(url: str) -> None:
    """Check that stage 1 gets an error by its deadline if stage 0 never calls."""
    with stage(url, 0) as first, stage(url, 1) as second:
        first.pause_generation()
        second.pause_generation()
        began = time.monotonic()
        spec = (WireTensor("norm", DType.INT32, (24,)),)
        half = second.update_weights_from_distributed("weights", spec, stamp="", deadline_s=1.0)
        with pytest.raises((RoundAborted, TimeoutError)):
            half.result(DEADLINE_S)
        assert time.monotonic() - began < DEADLINE_S
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(leader.continue_generation, 0) for leader in (first, second)]
            for end in ends:
                with pytest.raises(RoundAborted, match="was not published"):
                    end.result(60)


def not_agreed(url: str) -> None:
    with stage(url, 0) as first, windlass.RolloutCallback(url, TOKEN, leader="other") as other:
        first.pause_generation()
        with pytest.raises(RoundAborted, match=r"num_stages must be 2 as in .*, got 0"):
            other.pause_generation()
        with stage(url, 1) as second, ThreadPoolExecutor(2) as pool:
            second.pause_generation()
            ends = [pool.submit(leader.continue_generation, 0) for leader in (first, second)]
            for end in ends:
                with pytest.raises(RoundAborted, match="num_stages"):
                    end.result(60)
    with pytest.raises(ConfigError, match=r"stage must be in \[0, num_stages=2\), got 2"):
        windlass.RolloutCallback(url, TOKEN, stage=2, num_stages=2)


async def test_an_absent_or_disagreeing_leader_fails_only_its_update() -> None:
    async with engines() as (fleet, url):
        await asyncio.to_thread(absent, url)
        await asyncio.to_thread(not_agreed, url)
        await holds(fleet, (-1, "untouched", False))
        await asyncio.to_thread(crossing, url, 0)
        await holds(fleet, (0, "0", False))


def test_buckets_of_both_stages_make_up_the_whole_model() -> None:
    assert sorted(name for names in BUCKETS for name in names) == sorted(shapes())


@pytest.mark.parametrize("call", ["offload", "onload"])
def test_calls_that_release_the_memory_of_engines_are_refused(call: str) -> None:
    says = rf"{call}: engines must keep .*; remove the call, .* replica=ReplicaPlace\.HOST"
    with (
        windlass.RolloutCallback("http://127.0.0.1:1", TOKEN) as leader,
        pytest.raises(ConfigError, match=says),
    ):
        getattr(leader, call)()
