"""Calls of a train controller to its ranks and its scheduler; the ranks are plain sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import final

import aiohttp
import msgspec
import numpy as np
import pytest
from idle_scheduler import IdleScheduler

from windlass.errors import ConfigError, PeerUnreachable, ProtocolError, TrainerError
from windlass.jobs.train_controller import TrainController
from windlass.jobs.train_worker import (
    CONTROLLER_FRAMES,
    Done,
    Joined,
    Load,
    Save,
    Setup,
    TakeTensors,
    TrainCommand,
    TrainStep,
    TrainWorker,
)
from windlass.net.access import Access, role_token
from windlass.net.messages import PROTOCOL_VERSION, Envelope, Refused, Reply, encode
from windlass.net.server import ControlServer
from windlass.rollout.batches import BatchQueue
from windlass.rollout.messages import TrainingSample
from windlass.rollout.tensors import SampleTensor

TOKEN = "a-token"


@asynccontextmanager
async def mounted(
    scheduler: IdleScheduler, world_size: int = 1, batches: BatchQueue | None = None
) -> AsyncIterator[tuple[TrainController, str]]:
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    trainers = TrainController(
        scheduler, command=("true",), world_size=world_size, token=TOKEN, batches=batches
    )
    trainers.mount(server)
    await server.start()
    try:
        yield trainers, server.url
    finally:
        await server.close()


async def answer_everything(
    url: str,
    scheduler: IdleScheduler,
    name: str = "trainer",
    *,
    rank: int = 0,
    world_size: int = 1,
    place: tuple[int, int] = (0, 1),
    before_answer: Callable[[TrainCommand], Awaitable[object]] | None = None,
) -> None:
    """Run a rank of the job that `scheduler` was asked to start. The rank answers every call.

    `place` is the answer to `Setup`: the data-parallel rank and size. The rank awaits `before_answer` before each answer.
    """
    job = await scheduler.job()
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.TRAINER)}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.ws_connect(f"{url}/v1/train_workers/{name}") as socket,
    ):
        await socket.send_bytes(encode(Joined(PROTOCOL_VERSION, rank, world_size, job, "first")))
        async for message in socket:
            call = CONTROLLER_FRAMES.decode(message.data)
            if isinstance(call, Envelope):
                done = Done()
                if before_answer is not None:
                    await before_answer(call.command)
                if isinstance(call.command, Setup):
                    done = Done(data_parallel_rank=place[0], data_parallel_size=place[1])
                await socket.send_bytes(encode(Reply(call.epoch, call.round, call.seq, done)))


async def test_actor_and_critic_share_a_server_under_different_names() -> None:
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    command = ("true",)
    names, schedulers = ("actor", "critic-1.5"), (IdleScheduler(), IdleScheduler())
    both = [
        TrainController(scheduler, command=command, world_size=1, token=TOKEN, name=name)
        for name, scheduler in zip(names, schedulers, strict=True)
    ]
    for each in both:
        each.mount(server)
    with pytest.raises(ConfigError, match=r"not exist already, got GET /v1/train_workers/.*critic"):
        both[1].mount(server)
    with pytest.raises(ConfigError, match=r"name must consist of .*, got 'a/b'"):
        TrainController(IdleScheduler(), command=command, world_size=1, token=TOKEN, name="a/b")
    await server.start()
    ranks = [
        asyncio.create_task(answer_everything(server.url, scheduler, name))
        for name, scheduler in zip(names, schedulers, strict=True)
    ]
    try:
        # Each controller waits only for its own rank.
        await asyncio.gather(*(each.start(server.url, deadline_s=20) for each in both))
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await answer_everything(server.url, schedulers[1], "critic-1x5")
        headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.ENGINE)}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            answer = await session.get(f"{server.url}/v1/train_workers/actor")
            assert answer.status == 403
        await asyncio.gather(*(each.close(grace_s=1) for each in both))
    finally:
        for rank in ranks:
            rank.cancel()
        await asyncio.gather(*ranks, return_exceptions=True)
        await server.close()


async def test_stopped_ranks_get_the_grace_period_of_close() -> None:
    scheduler = IdleScheduler()
    async with mounted(scheduler) as (trainers, url):
        rank = asyncio.create_task(answer_everything(url, scheduler))
        await trainers.start(url, deadline_s=20)
        await trainers.close(grace_s=7.0)
        assert scheduler.graces == [7.0]
        await rank


@final
class Together(IdleScheduler):
    """A scheduler that ends a process only after it was asked to end all processes."""

    def __init__(self, num_processes: int) -> None:
        super().__init__()
        self._all = asyncio.Barrier(num_processes)

    async def delete(self, name: str, *, grace_s: float = 5.0) -> None:
        await self._all.wait()
        await super().delete(name, grace_s=grace_s)


async def test_ranks_end_concurrently_within_one_grace_period() -> None:
    scheduler = Together(3)
    async with mounted(scheduler, 3) as (trainers, url):
        ranks = [
            asyncio.create_task(answer_everything(url, scheduler, rank=rank, world_size=3))
            for rank in range(3)
        ]
        await trainers.start(url, deadline_s=20)
        async with asyncio.timeout(20):
            await trainers.close(grace_s=7.0)
        assert scheduler.graces == [7.0] * 3
        await asyncio.gather(*ranks)


@final
class FirstFails(IdleScheduler):
    """A scheduler that cannot end the first rank and takes a moment for the others."""

    async def delete(self, name: str, *, grace_s: float = 5.0) -> None:
        if name == "trainer-0":
            raise PeerUnreachable("the first rank's node is gone")
        await asyncio.sleep(0.2)
        await super().delete(name, grace_s=grace_s)


async def test_other_ranks_are_ended_when_one_cannot_be_ended() -> None:
    scheduler = FirstFails()
    async with mounted(scheduler, 3) as (trainers, url):
        ranks = [
            asyncio.create_task(answer_everything(url, scheduler, rank=rank, world_size=3))
            for rank in range(3)
        ]
        await trainers.start(url, deadline_s=20)
        with pytest.raises(PeerUnreachable, match="node is gone"):
            await trainers.close(grace_s=7.0)
        assert scheduler.graces == [7.0] * 2
    await asyncio.gather(*ranks)


async def test_a_rank_outside_the_world_size_is_refused_and_does_not_retry() -> None:
    async with mounted(IdleScheduler()) as (_, url):
        worker = TrainWorker(msgspec.UNSET, url, "trainer", TOKEN, 1, 2)  # type: ignore[arg-type]  # no call comes
        with pytest.raises(ProtocolError, match=r"refused this peer: .*rank must be in \[0, 1\)"):
            await asyncio.to_thread(worker.work)


@pytest.mark.parametrize("job", ["", "the start before", "\u00e9"])
async def test_a_rank_of_an_earlier_start_takes_no_place(job: str) -> None:
    """Regression: a leftover rank of the previous start took the place of the new rank, and `start` failed."""
    scheduler = IdleScheduler()
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.TRAINER)}"}
    async with (
        mounted(scheduler) as (trainers, url),
        aiohttp.ClientSession(headers=headers) as http,
    ):
        starting = asyncio.create_task(trainers.start(url, deadline_s=20))
        await scheduler.job()
        async with http.ws_connect(f"{url}/v1/train_workers/trainer") as socket:
            await socket.send_bytes(encode(Joined(PROTOCOL_VERSION, 0, 1, job, "leftover")))
            refused = CONTROLLER_FRAMES.decode(await socket.receive_bytes())
        assert isinstance(refused, Refused)
        assert (
            refused.final,
            "job must be the id of the newest launch of the trainer ranks" in refused.message,
        ) == (
            True,
            True,
        )
        rank = asyncio.create_task(answer_everything(url, scheduler))
        await starting
        await trainers.close(grace_s=1)
        await rank


async def test_a_second_process_of_a_rank_waits_for_the_first_to_leave() -> None:
    scheduler = IdleScheduler()
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.TRAINER)}"}
    async with (
        mounted(scheduler) as (trainers, url),
        aiohttp.ClientSession(headers=headers) as http,
    ):
        rank = asyncio.create_task(answer_everything(url, scheduler))
        await trainers.start(url, deadline_s=20)
        async with http.ws_connect(f"{url}/v1/train_workers/trainer") as socket:
            job = await scheduler.job()
            await socket.send_bytes(encode(Joined(PROTOCOL_VERSION, 0, 1, job, "second")))
            refused = CONTROLLER_FRAMES.decode(await socket.receive_bytes())
        assert isinstance(refused, Refused)
        assert (refused.final, "another process has already joined" in refused.message) == (
            False,
            True,
        )
        await trainers.close(grace_s=1)
        await rank


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([(0, 2), (0, 2)], r"got no data-parallel rank 1 of 2 from 2 ranks: its groups would not"),
        ([(0, 2), (0, 1)], r"trainer-1: setup must return the same .*, got size 1, and size 2 on"),
    ],
)
async def test_data_parallel_ranks_that_lose_or_double_groups_are_refused(
    places: list[tuple[int, int]], says: str
) -> None:
    """Regression: the first ranks got groups 0 and 2 of each step twice, and no rank got groups 1 and 3."""
    scheduler = IdleScheduler()
    async with mounted(scheduler, 2) as (trainers, url):
        ranks = [
            asyncio.create_task(
                answer_everything(url, scheduler, rank=rank, world_size=2, place=place)
            )
            for rank, place in enumerate(places)
        ]
        with pytest.raises(TrainerError, match=says):
            await trainers.start(url, deadline_s=20)
        await trainers.close(grace_s=1)
        await asyncio.gather(*ranks)


def group(number: int, num_elements: int = 0) -> list[TrainingSample]:
    values = [float(number * 1000 + index) for index in range(num_elements)]
    sample = TrainingSample(
        prompt_ids=(1,),
        output_ids=(2,),
        logprobs=(-0.5,),
        versions=(0,),
        reward=float(number),
        group_id=number,
        engine="e",
        tensors={"x": SampleTensor.of([values])} if values else {},
    )
    return [sample]


async def test_a_cancelled_step_reaches_all_ranks_before_the_next_step() -> None:
    """Regression: rank 0 got a step that was cancelled, and rank 1, without a connection at that time, never got it."""
    scheduler, got = IdleScheduler(), list[tuple[int, int]]()
    begun, finish = asyncio.Event(), asyncio.Event()

    async def run(rank: int) -> None:
        async def note(command: TrainCommand) -> None:
            if isinstance(command, TrainStep):
                got.append((rank, command.step))
                begun.set()
                await finish.wait()

        place = (rank, 2)
        await answer_everything(
            url, scheduler, rank=rank, world_size=2, place=place, before_answer=note
        )

    async with mounted(scheduler, 2) as (trainers, url):
        ranks = [asyncio.create_task(run(rank)) for rank in range(2)]
        await trainers.start(url, deadline_s=20)
        ranks[1].cancel()
        await asyncio.gather(ranks[1], return_exceptions=True)
        step = asyncio.create_task(trainers.train_step(0, [group(0), group(1)], deadline_s=20))
        await begun.wait()
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        assert step.cancelled()
        ranks[1] = asyncio.create_task(run(1))
        finish.set()
        await trainers.train_step(1, [group(2), group(3)], deadline_s=20)
        assert sorted(got) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        await trainers.close(grace_s=1)
        await asyncio.gather(*ranks)


async def test_a_step_gets_its_own_tensors_while_others_are_fetched() -> None:
    """Regression: the ranks trained on the groups that a call at the same time had fetched for the step after it."""
    scheduler, got = IdleScheduler(), list[str]()

    async def note(command: TrainCommand) -> None:
        if isinstance(command, TakeTensors):
            got.append(f"take {[g[0].group_id for g in command.groups]}")
            # By then, the other call waits for the ranks.
            await asyncio.sleep(0.5)
        if isinstance(command, TrainStep):
            given = "taken" if command.groups is None else "sent"
            got.append(f"train step {command.step} on {given} groups")

    batches = BatchQueue(inline_nbytes=8)
    try:
        async with mounted(scheduler, batches=batches) as (trainers, url):
            rank = asyncio.create_task(answer_everything(url, scheduler, before_answer=note))
            await trainers.start(url, deadline_s=20)
            first, second = [group(1, 64)], [group(2, 64)]
            await asyncio.gather(
                trainers.train_step(0, first, deadline_s=20),
                trainers.take_tensors(1, second, deadline_s=20),
            )
            await trainers.train_step(1, second, deadline_s=20)
            assert got == [
                "take [1]",
                "train step 0 on taken groups",
                "take [2]",
                "train step 1 on taken groups",
            ]
            await trainers.close(grace_s=1)
            await rank
    finally:
        batches.close()


async def test_steps_of_numpy_and_paths_reach_the_ranks_as_plain_values() -> None:
    """Regression: a step of `numpy.arange` and a `Path` raised a TypeError of msgpack, without the argument's name."""
    scheduler, got = IdleScheduler(), list[object]()

    async def note(command: TrainCommand) -> None:
        if isinstance(command, TrainStep):
            got.append(command.step)
        elif isinstance(command, Save | Load):
            got.append(command.path)

    async with mounted(scheduler) as (trainers, url):
        rank = asyncio.create_task(answer_everything(url, scheduler, before_answer=note))
        await trainers.start(url, deadline_s=20)
        (step,) = np.array([3])
        await trainers.train_step(step, [group(0)], deadline_s=20)
        await trainers.save(Path("some", "folder"), deadline_s=20)
        await trainers.load(Path("some", "folder"), deadline_s=20)
        assert got == [3, "some/folder", "some/folder"]
        with pytest.raises(ConfigError, match=r"train_step: step must be integers, got \(0\.5,\)"):
            await trainers.train_step(0.5, [group(0)], deadline_s=20)  # type: ignore[arg-type]  # wrong on purpose
        await trainers.close(grace_s=1)
        await rank


async def test_close_does_not_wait_for_the_deadline_of_a_call() -> None:
    """Regression: `close` waited until the step of another task had reached its deadline."""
    scheduler, begun = IdleScheduler(), asyncio.Event()

    async def hang(command: TrainCommand) -> None:
        if isinstance(command, TrainStep):
            begun.set()
            await asyncio.Event().wait()

    async with mounted(scheduler) as (trainers, url):
        rank = asyncio.create_task(answer_everything(url, scheduler, before_answer=hang))
        await trainers.start(url, deadline_s=20)
        step = asyncio.create_task(trainers.train_step(0, [group(0)], deadline_s=15))
        await begun.wait()
        began = time.monotonic()
        await trainers.close(grace_s=0.5)
        assert time.monotonic() - began < 10
        with pytest.raises(TrainerError, match="trainer-0 is ended by `start` or `close`"):
            await step
        rank.cancel()
        await asyncio.gather(rank, return_exceptions=True)
