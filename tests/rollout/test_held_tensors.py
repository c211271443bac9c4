"""Large tensors of samples go from the worker's memory to trainer ranks, in real processes, some of which are killed."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kept_port import free_port
from tensor_worker import elements

from windlass.errors import ConfigError, PeerTimeout
from windlass.layout.dtypes import DType
from windlass.net.clock import Backoff
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchClient,
    BatchQueue,
    RolloutConfig,
    RolloutController,
    RolloutGroup,
    SampleTensor,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    TrainingBatch,
    TrainingSample,
    mount_rollout_routes,
    training_samples,
)
from windlass.rollout.batches import MAX_WRITES
from windlass.rollout.held import (
    TensorStore,
    TensorsWritten,
    WriteTensors,
    destination_of,
    held_of,
)
from windlass.rollout.tensors import HeldTensor
from windlass.transfer.arena import Arena
from windlass.transports.registry import create_transport, parse_transport

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "held-tensors"
NUMEL = 1 << 20
NBYTES = 8 * NUMEL
SAMPLING = SamplingParams(max_new_tokens=4)
WITHIN_S = 60.0


class Rig:
    """Controller in the test's loop; workers and trainer ranks in processes of their own."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.stack, self.folder, self.port = stack, folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    async def open(
        self,
        *,
        journal: bool = False,
        policy: StalenessPolicy | None = None,
        acknowledge: bool = False,
    ) -> AsyncExitStack:
        """Start a controller with a batch queue; return the stack that closes both."""
        config = RolloutConfig(
            retry_backoff_s=0.01,
            worker_grace_s=1.0,
            journal=self.folder / "journal" if journal else None,
            acknowledge=acknowledge,
        )
        engines = StaticEngines([("engine", "http://unused", 0)])
        stack = AsyncExitStack()
        self.stack.push_async_callback(stack.aclose)
        self.rollouts = await stack.enter_async_context(
            RolloutController(
                engines, policy or StalenessPolicy.unbounded(64), token=TOKEN, config=config
            )
        )
        self.batches = BatchQueue()
        stack.callback(self.batches.close)
        server = ControlServer(host="127.0.0.1", port=self.port, token=TOKEN)
        mount_rollout_routes(server, self.rollouts, self.batches)
        await server.start()
        stack.push_async_callback(server.close)
        return stack

    async def spawn(self, script: str, *words: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "tests/support" / script), *words),
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests/support'}",
                "WINDLASS_TOKEN": TOKEN,
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.stack.push_async_callback(kill, process)
        return process

    async def worker(self, name: str, *words: str) -> asyncio.subprocess.Process:
        process = await self.spawn(
            "tensor_worker.py", "--controller", self.url, "--name", name, *words
        )
        await until(lambda: self.rollouts.has_worker(name))
        return process

    async def ranks(self, transport: str = "auto") -> list[asyncio.subprocess.Process]:
        return [
            await self.spawn("tensor_rank.py", self.url, TOKEN, str(rank), "2", transport)
            for rank in range(2)
        ]

    async def groups(self, *numbers: int, n: int = 1) -> list[RolloutGroup]:
        """Let workers answer these prompts, and return the groups in the order of the prompts."""
        for number in numbers:
            self.rollouts.submit_workflow_group(
                "features", [number, NUMEL], n, SAMPLING, metadata=number
            )
        found = await self.rollouts.next_batch(len(numbers), deadline_s=WITHIN_S)
        return sorted(found, key=lambda group: group.metadata)  # type: ignore[arg-type,return-value]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - the state of other processes
            await asyncio.sleep(0.02)


async def kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGKILL)
    await process.wait()


def samples_of(groups: list[RolloutGroup]) -> list[tuple[TrainingSample, ...]]:
    return [training_samples(group, [1.0] * len(group.rollouts)) for group in groups]


async def ask(rank: asyncio.subprocess.Process, step: int, deadline_s: float = WITHIN_S) -> Any:
    assert rank.stdin is not None
    rank.stdin.write(f"{step} {deadline_s}\n".encode())
    return await line_of(rank)


async def line_of(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    async with asyncio.timeout(WITHIN_S):
        return json.loads(await process.stdout.readline())


async def resident_nbytes(process: asyncio.subprocess.Process, below: float) -> int:
    """Return the resident memory of a process once it is below a limit, or after some seconds.

    Pages that Linux may take at any time do not count.
    """
    found = 0
    for _ in range(150):
        with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as file:  # noqa: ASYNC230
            words = [line.split() for line in file]
        sizes = {name: int(size) << 10 for name, size, *unit in words if unit == ["kB"]}
        found = sizes["Rss:"] - sizes["LazyFree:"]
        if found < below:
            break
        await asyncio.sleep(0.02)
    return found


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        made = Rig(stack, tmp_path)
        await made.open()
        yield made


@pytest.mark.parametrize("transport", ["cma", "shm", "pull"])
async def test_ranks_get_every_element_from_the_memory_of_workers(rig: Rig, transport: str) -> None:
    workers = [
        await rig.worker(
            f"worker-{index}", "--tensor-transport", transport, "--max-concurrent", "4"
        )
        for index in range(2)
    ]
    ranks = await rig.ranks(transport)
    groups = await rig.groups(0, 1, 2, 3, n=2)
    assert {rollout.worker for group in groups for rollout in group.rollouts} == {
        "worker-0",
        "worker-1",
    }
    features = groups[0].rollouts[0].tensors["features"]
    assert features.data == b""
    assert (features.shape, features.nbytes) == ((NUMEL,), NBYTES)
    with pytest.raises(
        ConfigError,
        match=r"elements are in the memory of worker-\d, not of this process; .* BatchClient",
    ):
        features.to_numpy()
    assert groups[0].rollouts[0].tensors["values"].to_numpy().tolist() == [0.5] * 3
    await rig.batches.put(0, samples_of(groups))
    del groups, features
    answers = await asyncio.gather(*[ask(rank, 0) for rank in ranks])
    assert [answer["numbers"] for answer in answers] == [[0, 0, 2, 2], [1, 1, 3, 3]]
    assert [answer["wrong"] for answer in answers] == [[], []]
    assert await rig.batches.settled(0, deadline_s=1) == ()
    # A repeated request for a kept step gets the same answer.
    assert (await ask(ranks[1], 0))["numbers"] == [1, 1, 3, 3]

    held = [await resident_nbytes(worker, math.inf) for worker in workers]
    for step in (1, 2):
        await rig.batches.put(step, samples_of(await rig.groups(step)))
    left = [
        await resident_nbytes(worker, before - 2 * NBYTES)
        for worker, before in zip(workers, held, strict=True)
    ]
    # The workers held eight tensors of step 0, and hold at most two of steps 1 and 2.
    assert sum(held) - sum(left) >= 5 * NBYTES
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.close()
        assert await line_of(rank) == {"memory_files": 0}


async def test_returned_groups_with_some_held_tensors_do_not_use_the_bound_up(
    tmp_path: Path,
) -> None:
    """Every second rollout has a large tensor. The staleness bound admits one group of two rollouts at a time."""
    async with AsyncExitStack() as stack:
        rig = Rig(stack, tmp_path)
        await rig.open(policy=StalenessPolicy(max_staleness=0, batch_size=2, max_concurrent=8))
        await rig.worker("worker-0", "--max-concurrent", "4")

        async def next_group() -> tuple[object, int]:
            (group,) = await rig.rollouts.next_batch(1, deadline_s=15, keep=True)
            rig.rollouts.count_from(0)
            return group.metadata, sum(len(held_of(each.tensors)) for each in group.rollouts)

        for number in range(2):
            rig.rollouts.submit_workflow_group(
                "mixed", [number, NUMEL], 2, SAMPLING, metadata=number
            )
            assert await next_group() == (number, 1)
        assert len(rig.rollouts.return_groups()) == 2
        rig.rollouts.count_from(0)
        assert [await next_group() for _ in range(2)] == [(0, 1), (1, 1)]


async def test_delivered_groups_of_a_journal_with_some_held_tensors_do_not_use_the_bound_up(
    tmp_path: Path,
) -> None:
    """Controller and worker end before the caller acknowledges two groups. The bound admits one group at a time."""
    async with AsyncExitStack() as stack:
        rig = Rig(stack, tmp_path)

        async def opened() -> AsyncExitStack:
            policy = StalenessPolicy(max_staleness=0, batch_size=2, max_concurrent=8)
            return await rig.open(journal=True, acknowledge=True, policy=policy)

        async def next_group() -> tuple[object, int]:
            (group,) = await rig.rollouts.next_batch(1, deadline_s=15, keep=True)
            rig.rollouts.count_from(0)
            return group.metadata, sum(len(held_of(each.tensors)) for each in group.rollouts)

        first = await opened()
        worker = await rig.worker("worker-0", "--max-concurrent", "4")
        for number in range(2):
            rig.rollouts.submit_workflow_group(
                "mixed", [number, NUMEL], 2, SAMPLING, metadata=number
            )
            assert await next_group() == (number, 1)
        await first.aclose()
        await kill(worker)
        await opened()
        await rig.worker("worker-0", "--max-concurrent", "4")
        assert [await next_group() for _ in range(2)] == [(0, 1), (1, 1)]


async def test_answers_of_a_killed_worker_are_generated_again(rig: Rig) -> None:
    """`kill -9` after the answers are complete, and before their group is: every prompt is delivered once."""
    first = await rig.worker("worker-0", "--max-concurrent", "8")
    handles = [
        rig.rollouts.submit_workflow_group("features", [n, NUMEL], 1, SAMPLING, metadata=n)
        for n in range(4)
    ]
    await until(lambda: len(rig.rollouts.ready_ids()) == 4)
    await kill(first)
    await until(lambda: not rig.rollouts.ready_ids())
    assert rig.rollouts.stats().retried == 4
    await rig.worker("worker-1")
    groups = await rig.rollouts.next_batch(4, deadline_s=WITHIN_S)
    assert {group.rollouts[0].worker for group in groups} == {"worker-1"}
    assert sorted(group.metadata for group in groups) == [0, 1, 2, 3]  # type: ignore[type-var]
    stats = rig.rollouts.stats()
    assert (stats.completed, stats.outstanding, stats.lost) == (4, 0, 0)
    assert all(handle.done() for handle in handles)
    ranks = await rig.ranks()
    await rig.batches.put(0, samples_of(sorted(groups, key=lambda g: g.metadata)))  # type: ignore[arg-type,return-value]
    answers = await asyncio.gather(*[ask(rank, 0) for rank in ranks])
    assert [(a["numbers"], a["wrong"]) for a in answers] == [([0, 2], []), ([1, 3], [])]


async def test_no_rank_gets_a_batch_whose_worker_was_killed(rig: Rig) -> None:
    """`kill -9` after the batch was put: both ranks wait, and get the batch that is put in its place."""
    workers = {name: await rig.worker(name) for name in ("worker-0", "worker-1")}
    lost_group, kept = await rig.groups(0, 1)
    assert lost_group.rollouts[0].worker != kept.rollouts[0].worker
    ranks = await rig.ranks()
    await rig.batches.put(0, samples_of([lost_group, kept]))
    await kill(workers[lost_group.rollouts[0].worker])
    waiting = [asyncio.create_task(ask(rank, 0)) for rank in ranks]
    lost = await rig.batches.settled(0, deadline_s=WITHIN_S)
    assert lost == (lost_group.rollouts[0].task_id,)
    assert not any(each.done() for each in waiting)
    rig.rollouts.decline(lost_group)
    (again,) = await rig.groups(2)
    await rig.batches.put(0, samples_of([again, kept]))
    answers = await asyncio.gather(*waiting)
    assert [(a["numbers"], a["wrong"]) for a in answers] == [([2], []), ([1], [])]
    assert await rig.batches.settled(0, deadline_s=1) == ()


async def test_a_controller_continues_with_tensors_that_workers_hold(
    rig: Rig, tmp_path: Path
) -> None:
    await rig.stack.aclose()
    first = await rig.open(journal=True)
    await rig.worker("worker-0")
    for number in range(2):
        rig.rollouts.submit_workflow_group(
            "features", [number, NUMEL], 1, SAMPLING, metadata=number
        )
    await until(lambda: len(rig.rollouts.ready_ids()) == 2)
    # The journal names the place and the digest, and not the elements.
    journal = (tmp_path / "journal").read_text()
    assert journal.count('"digest"') == 2
    assert len(journal) < 16_384
    await first.aclose()
    await rig.open(journal=True)
    assert len(rig.rollouts.ready_ids()) == 2
    groups = list(await rig.rollouts.next_batch(2, deadline_s=WITHIN_S))
    ranks = await rig.ranks()
    await rig.batches.put(0, samples_of(groups))
    answers = await asyncio.gather(*[ask(rank, 0) for rank in ranks])
    assert sorted(n for a in answers for n in a["numbers"]) == [0, 1]
    assert [a["wrong"] for a in answers] == [[], []]


async def test_a_controller_generates_again_what_a_worker_held_that_never_came_back(
    rig: Rig,
) -> None:
    await rig.stack.aclose()
    first = await rig.open(journal=True)
    worker = await rig.worker("worker-0")
    rig.rollouts.submit_workflow_group("features", [7, NUMEL], 1, SAMPLING, metadata=7)
    await until(rig.rollouts.ready_ids)
    await first.aclose()
    await kill(worker)
    await rig.open(journal=True)
    assert rig.rollouts.ready_ids()
    # The same name, and another process.
    await rig.worker("worker-0")
    assert rig.rollouts.stats().retried == 1
    (group,) = await rig.rollouts.next_batch(1, deadline_s=WITHIN_S)
    assert held_of(group.rollouts[0].tensors)
    ranks = await rig.ranks()
    await rig.batches.put(0, samples_of([group, group]))
    answers = await asyncio.gather(*[ask(rank, 0) for rank in ranks])
    assert [(a["numbers"], a["wrong"]) for a in answers] == [([7], []), ([7], [])]


async def test_the_lease_of_a_tensor_ends(rig: Rig) -> None:
    await rig.worker("worker-0", "--tensor-lease-s", "0.2")
    groups = await rig.groups(0, 1)
    await asyncio.sleep(0.3)
    ranks = await rig.ranks()
    await rig.batches.put(0, samples_of(groups))
    waiting = [asyncio.create_task(ask(rank, 0, 3.0)) for rank in ranks]
    lost = await rig.batches.settled(0, deadline_s=WITHIN_S)
    assert set(lost) <= {group.rollouts[0].task_id for group in groups}
    assert lost
    for answer in await asyncio.gather(*waiting):
        assert "got no batch of step 0" in answer["error"]
        assert f"; the tensors of {len(lost)} samples were lost" in answer["error"]


def recipe_sample(number: int) -> TrainingSample:
    """Return a sample with tensors that a recipe made."""
    return TrainingSample(
        prompt_ids=(1,),
        output_ids=(number, 1, 2),
        logprobs=(-0.5,) * 3,
        versions=(0,) * 3,
        reward=1.0,
        group_id=number,
        engine="engine",
        tensors={
            "features": SampleTensor.of(elements(number, NUMEL), per_token=False),
            "values": SampleTensor.of([number + 0.5] * 3),
        },
    )


async def test_the_queue_holds_tensors_of_a_recipe(rig: Rig) -> None:
    ranks = await rig.ranks()
    made = [recipe_sample(number) for number in range(4)]
    await rig.batches.put(0, [[each] for each in made])
    answers = await asyncio.gather(*[ask(rank, 0) for rank in ranks])
    assert [(a["numbers"], a["wrong"]) for a in answers] == [([0, 2], []), ([1, 3], [])]
    assert rig.batches.store.nbytes == 4 * NBYTES
    for step in (1, 2):
        await rig.batches.put(step, [[msgspec.structs.replace(made[0], tensors={})]])
    await asyncio.sleep(0)
    assert rig.batches.store.nbytes == 0


async def test_failed_writes_are_repeated_in_the_same_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank repeats failed writes until its deadline, also if bytes of the earlier writes may still arrive."""
    monkeypatch.setattr("windlass.rollout.batches.BACKOFF", Backoff(0.01, 0.01))
    held = HeldTensor("worker-0", "one", "key", "0" * 32)
    tensor = SampleTensor(dtype=DType.UINT8, shape=(9,), per_token=False, held=held)
    num_ended = MAX_WRITES + 3
    addresses: list[int] = []

    async def fails(_held: HeldTensor, command: WriteTensors) -> TensorsWritten:
        addresses.append(command.to.regions[0].address)
        return TensorsWritten(error="no route", has_ended=len(addresses) <= num_ended)

    rig.batches.write_with(fails)
    await rig.batches.put(0, [[msgspec.structs.replace(recipe_sample(0), tensors={"t": tensor})]])
    failing = pytest.raises(
        PeerTimeout, match=r"got no batch of step 0 .* \(tensors of step 0: no route\)"
    )
    with BatchClient(rig.url, TOKEN) as client, failing:
        await asyncio.to_thread(client.next_batch, 0, 0, 1, deadline_s=2.0)
    assert len(addresses) > num_ended + MAX_WRITES
    assert len({*addresses}) == 1


async def test_late_memory_stays_bounded_while_shards_grow(rig: Rig, slow: SlowHolder) -> None:
    """The first write of each step may still arrive. Each shard is larger than all earlier ones, until they shrink."""
    sizes = [NUMEL // 32 * (step + 1) for step in range(12)]
    sizes += reversed(sizes)
    slow.num_slow = 0
    regions, seen = dict[int, int](), set[tuple[str, ...]]()

    async def write(held: HeldTensor, command: WriteTensors) -> TensorsWritten:
        (region,) = [each for each in command.to.regions if each.endpoint.transport == "cma"]
        regions[region.address] = region.nbytes
        done = await slow.write(held, command)
        if command.keys in seen:
            return done
        seen.add(command.keys)
        return TensorsWritten(error="no answer")

    rig.batches.write_with(write)
    with BatchClient(rig.url, TOKEN) as client:
        for step, numel in enumerate(sizes):
            await rig.batches.put(step, [[await slow.sample(step, numel)]])
            batch = await asyncio.to_thread(client.next_batch, step, 0, 1, deadline_s=WITHIN_S)
            assert np.array_equal(features_of(batch), elements(step, numel))
            # The tensor stays valid beside the next one, and torch may write to it.
            assert not memoryview(batch.samples[0].tensors["features"].data).readonly
    assert len(seen) == len(sizes)
    assert len(regions) == 5
    assert sum(regions.values()) < 4 * 8 * max(sizes)


class SlowHolder:
    """Holder in this process. It carries out the writes of a rank for real, and the chosen ones late.

    Attributes:
        addresses: address of the rank's memory for each write, in the order of the requests.
        num_slow: number of writes that wait for `release` before their first byte. The others are carried out at once.
        release: event that starts the slow writes.
    """

    def __init__(self, store: TensorStore) -> None:
        self.store, self.addresses, self.num_slow = store, list[int](), 1
        self.release = asyncio.Event()
        self.late: list[asyncio.Task[TensorsWritten]] = []

    async def sample(self, number: int, numel: int = NUMEL) -> TrainingSample:
        tensors = {"features": SampleTensor.of(elements(number, numel), per_token=False)}
        return msgspec.structs.replace(
            recipe_sample(number), tensors=await self.store.hold(tensors, 0)
        )

    async def write(self, _held: HeldTensor, command: WriteTensors) -> TensorsWritten:
        self.addresses.append(command.to.regions[0].address)
        if len(self.addresses) <= self.num_slow:
            self.late.append(asyncio.create_task(self._write_late(command)))
            return await asyncio.shield(self.late[-1])
        return await asyncio.to_thread(self.store.write, command)

    async def _write_late(self, command: WriteTensors) -> TensorsWritten:
        await self.release.wait()
        return await asyncio.to_thread(self.store.write, command)

    async def write_late(self) -> None:
        """Carry out the slow writes now, and wait for their end."""
        self.release.set()
        async with asyncio.timeout(WITHIN_S):
            assert set(await asyncio.gather(*self.late)) == {TensorsWritten()}


@pytest.fixture
async def slow(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SlowHolder]:
    """Holder whose first write is slower than the rank waits for it."""
    monkeypatch.setattr("windlass.rollout.batches.BACKOFF", Backoff(0.01, 0.01))
    monkeypatch.setattr("windlass.rollout.batches.WRITE_S", 0.3)
    monkeypatch.setattr("windlass.rollout.batches.ANSWER_MARGIN_S", 0.1)
    with TensorStore("worker-0", "one", transport="cma") as store:
        holder = SlowHolder(store)
        rig.batches.write_with(holder.write)
        yield holder
        holder.release.set()


def features_of(batch: TrainingBatch) -> Any:
    return batch.samples[0].tensors["features"].to_numpy()


async def test_a_late_write_does_not_reach_a_later_batch(rig: Rig, slow: SlowHolder) -> None:
    """The first write of step 0 arrives after step 0 was repeated, used and dropped, and step 1 was delivered."""
    for step in range(2):
        await rig.batches.put(step, [[await slow.sample(step)]])
    with BatchClient(rig.url, TOKEN) as client:
        first = await asyncio.to_thread(client.next_batch, 0, 0, 1, deadline_s=WITHIN_S)
        assert np.array_equal(features_of(first), elements(0, NUMEL))
        del first
        batch = await asyncio.to_thread(client.next_batch, 1, 0, 1, deadline_s=WITHIN_S)
        assert np.array_equal(features_of(batch), elements(1, NUMEL))
        assert len(slow.addresses) >= 3
        await slow.write_late()
        assert np.array_equal(features_of(batch), elements(1, NUMEL))


async def test_a_late_write_during_a_later_fetch_is_noticed(rig: Rig, slow: SlowHolder) -> None:
    """The first write of step 0 arrives between the write of step 1 and its answer: step 1 is fetched again."""
    for step in range(2):
        await rig.batches.put(step, [[await slow.sample(step)]])
    with BatchClient(rig.url, TOKEN) as client:
        await asyncio.to_thread(client.next_batch, 0, 0, 1, deadline_s=WITHIN_S)

        async def arrives(held: HeldTensor, command: WriteTensors) -> TensorsWritten:
            done = await slow.write(held, command)
            await slow.write_late()
            return done

        rig.batches.write_with(arrives)
        batch = await asyncio.to_thread(client.next_batch, 1, 0, 1, deadline_s=WITHIN_S)
        assert np.array_equal(features_of(batch), elements(1, NUMEL))
    assert await rig.batches.settled(1, deadline_s=1) == ()


async def test_a_write_without_a_common_transport_has_ended() -> None:
    store = TensorStore("worker-0", "one", transport="shm")
    tensors = await store.hold({"t": SampleTensor.of(elements(0, NUMEL), per_token=False)}, 0)
    (held,) = held_of(tensors)
    created = closing(create_transport(parse_transport("cma")))
    with store, created as cma, Arena(cma, NBYTES) as arena:
        to = destination_of(cma, arena.region)
        answer = store.write(WriteTensors((held.key,), (0,), to, WITHIN_S))
    assert (answer.missing, answer.has_ended, "cma" in answer.error) == ((), True, True)


async def test_a_rank_refuses_elements_with_another_digest(rig: Rig) -> None:
    await rig.worker("worker-0")
    groups = await rig.groups(0, 1)
    samples = samples_of(groups)
    (sample,) = samples[1]
    features = sample.tensors["features"]
    assert features.held is not None
    forged = msgspec.structs.replace(
        features, held=msgspec.structs.replace(features.held, digest="0" * 32)
    )
    samples[1] = (msgspec.structs.replace(sample, tensors={**sample.tensors, "features": forged}),)
    ranks = await rig.ranks()
    await rig.batches.put(0, samples)
    waiting = [asyncio.create_task(ask(rank, 0, 20.0)) for rank in ranks]
    # The other rank does not train on a part of the batch either.
    assert await rig.batches.settled(0, deadline_s=WITHIN_S) == (sample.task_id,)
    await rig.batches.put(0, samples_of(groups))
    answers = await asyncio.gather(*waiting)
    assert [(a["numbers"], a["wrong"]) for a in answers] == [([0], []), ([1], [])]


def test_a_copy_uses_the_memory_of_a_freed_copy() -> None:
    def address(array: Any) -> int:
        return int(array.ctypes.data)

    def made(number: int) -> Any:
        return SampleTensor.of(elements(number, NUMEL), per_token=False).to_numpy()

    first, second = made(1), made(2)
    freed = address(first)
    part = first[:10]
    del first
    third = made(3)
    # A view still uses the first copy.
    assert address(third) not in {freed, address(second)}
    assert part.tolist() == elements(1, NUMEL)[:10].tolist()
    del part
    # A much smaller copy does not take the memory.
    small = SampleTensor.of(elements(4, NUMEL // 4), per_token=False).to_numpy()
    assert address(small) != freed
    fourth = made(5)
    assert address(fourth) == freed
    for number, found in ((2, second), (3, third), (5, fourth)):
        assert np.array_equal(found, elements(number, NUMEL))
    assert np.array_equal(small, elements(4, NUMEL // 4))


def test_a_tensor_in_a_view_can_be_pickled_and_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    view = memoryview(bytearray(array.tobytes()))
    tensor = SampleTensor.of(array)
    viewed = msgspec.structs.replace(tensor, data=view)
    for again in (pickle.loads(pickle.dumps(viewed)), copy.deepcopy(viewed)):
        assert again == tensor
        assert again.to_numpy().tolist() == array.tolist()
