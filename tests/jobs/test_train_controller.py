"""A scheduler starts two real FSDP2 ranks over gloo, which get collective calls and are killed."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web

from windlass.errors import ConfigError, TrainerError
from windlass.jobs.schedulers.local import LocalScheduler
from windlass.jobs.train_controller import TrainController
from windlass.jobs.train_worker import Groups
from windlass.layout.dtypes import DType
from windlass.net.addresses import free_port
from windlass.net.server import ControlServer
from windlass.rollout.batches import BatchQueue
from windlass.rollout.messages import TrainingSample
from windlass.rollout.tensors import HeldTensor, SampleTensor

TOKEN = "a-token"
RANK = str(Path(__file__).parents[1] / "support" / "train_rank.py")


def sample(reward: float) -> TrainingSample:
    return TrainingSample(
        prompt_ids=(1,),
        output_ids=(2,),
        logprobs=(-0.5,),
        versions=(0,),
        reward=reward,
        group_id=0,
        engine="e",
    )


GROUPS = [[sample(0.25), sample(0.5)], [sample(1.0), sample(2.0)], [sample(4.0), sample(8.0)]]


@asynccontextmanager
async def trainers(
    tmp_path: Path, how: str, collective_s: float = 90.0
) -> AsyncIterator[TrainController]:
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    batches = BatchQueue()
    async with LocalScheduler(tmp_path / "logs") as scheduler:
        controller = TrainController(
            scheduler,
            command=(sys.executable, RANK, how),
            world_size=2,
            token=TOKEN,
            batches=batches,
        )
        controller.mount(server)
        server.add_routes([web.post("/v1/batches/tensors", batches.serve_tensors)])
        await server.start()
        try:
            await controller.start(server.url, deadline_s=60, collective_s=collective_s)
            yield controller
        finally:
            await controller.close(grace_s=5)
            await server.close()
            batches.close()


async def test_timeout_of_collectives_does_not_depend_on_the_deadline_of_the_start(
    tmp_path: Path,
) -> None:
    async with trainers(tmp_path, "raise", collective_s=3.0) as controller:
        with pytest.raises(TrainerError, match="Timed out waiting"):
            await controller.call("wait", 6.0, deadline_s=60)


async def test_groups_are_distributed_to_ranks_until_one_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check steps, checkpoints, operations and a failure with one set of ranks, because ranks start slowly."""
    async with trainers(tmp_path, "raise") as controller:
        first = await controller.train_step(1, GROUPS, deadline_s=30)
        assert [rank["first"] for rank in first.ranks] == [0.25, 1.0]
        assert first.ranks[0]["weights"] == first.ranks[1]["weights"]
        # Expected values: the same model, trained in this process with all six samples.
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 4)
        rows = torch.tensor([[each.reward, 1.0] for group in GROUPS for each in group])
        loss = (model(rows) ** 2).mean()
        loss.backward()
        # FsdpEngine clips gradients to this norm by default.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert first.metrics["loss"] == pytest.approx(loss.item())
        assert [rank["loss"] for rank in first.ranks] == [first.metrics["loss"]] * 2
        assert first.ranks[0]["weights"] == pytest.approx(model.weight.sum().item(), rel=1e-5)
        losses = [(await controller.train_step(s, GROUPS, deadline_s=30)).metrics for s in (2, 3)]
        assert losses[1]["loss"] < losses[0]["loss"] < first.metrics["loss"]
        await check_checkpoint(controller, str(tmp_path / "saved"))
        await check_operations(controller)
        await check_store_of_another_group(controller)
        await check_tensors(controller)
        await check_lost_tensors(controller)
        await check_one_look(controller, monkeypatch)
        await check_failure(controller, 30.0, r"trainer-1: ValueError: bad sample")


async def check_one_look(controller: TrainController, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a step looks once for large tensors in groups that have none."""
    num_looks, lend = 0, BatchQueue.lend

    def counted(queue: BatchQueue, groups: Groups) -> AbstractAsyncContextManager[Groups]:
        nonlocal num_looks
        num_looks += 1
        return lend(queue, groups)

    with monkeypatch.context() as patched:
        patched.setattr(BatchQueue, "lend", counted)
        assert await controller.take_tensors(8, GROUPS, deadline_s=30) == frozenset()
        found = await controller.train_step(8, GROUPS, deadline_s=30)
    assert [rank["first"] for rank in found.ranks] == [0.25, 1.0]
    assert num_looks == 1


async def check_lost_tensors(controller: TrainController) -> None:
    """Check that no rank trains if the holder of a tensor has ended, and that ranks continue."""
    held = HeldTensor("worker-0", "ended", "key", "0" * 32)
    tensor = SampleTensor(dtype=DType.UINT8, shape=(9,), per_token=False, held=held)
    lost = msgspec.structs.replace(sample(1.0), tensors={"features": tensor})
    groups = [*GROUPS, [lost]]
    assert await controller.take_tensors(7, groups, deadline_s=30) == {"key"}
    with pytest.raises(TrainerError, match="the ranks could not fetch 1 tensor of step 7"):
        await controller.train_step(7, groups, deadline_s=30)
    own = SampleTensor.of(list(range(1 << 15)), per_token=False)
    large = [[msgspec.structs.replace(sample(1.5), tensors={"own": own})], *GROUPS]
    assert await controller.take_tensors(7, large, deadline_s=30) == frozenset()
    found = await controller.train_step(7, large, deadline_s=30)
    assert [rank["first"] for rank in found.ranks] == [1.5, 0.25]
    # These groups have no large tensor, and the ranks keep nothing of the last step.
    found = await controller.train_step(7, GROUPS, deadline_s=30)
    assert [rank["first"] for rank in found.ranks] == [0.25, 1.0]


async def check_checkpoint(controller: TrainController, path: str) -> None:
    """Check that steps after a load equal the steps after the save, including momentum."""
    await controller.save(path, deadline_s=30)
    saved = [(await controller.train_step(s, GROUPS, deadline_s=30)).ranks for s in (5, 6)]
    await controller.load(path, deadline_s=30)
    assert [(await controller.train_step(s, GROUPS, deadline_s=30)).ranks for s in (5, 6)] == saved
    await controller.load(path, deadline_s=30)


async def check_operations(controller: TrainController) -> None:
    assert await controller.call("who", "!", deadline_s=30) == ("rank 0!", "rank 1!")
    rows = [[float(n), 1.0] for n in range(5)]
    found = await controller.map("outputs", rows, deadline_s=30)
    # Each row has its own result, in the order of the rows.
    assert len({tuple(each) for each in found}) == len(rows)
    assert [(await controller.map("outputs", [row, row], deadline_s=30))[0] for row in rows] == list(found)  # fmt: skip
    for name, lacking in (("os.system", "trainer-0, trainer-1"), ("only here", "trainer-1")):
        with pytest.raises(
            ConfigError,
            match=rf"got '{name}', which is missing on {lacking}; every rank has: "
            r"\['outputs', 'own store', 'too few', 'twice', 'wait', 'who'\]",
        ):
            await controller.call(name, "true", deadline_s=30)
    with pytest.raises(ConfigError, match="argument: must be msgpack-plain, got object"):
        await controller.call("who", object(), deadline_s=30)
    with pytest.raises(TrainerError, match=r"trainer-1: operation too few must return a list of 2"):
        await controller.map("too few", rows, deadline_s=30)


async def check_store_of_another_group(controller: TrainController) -> None:
    """Check that rank 0 starts the store of a group that is not the ranks' own, as SGLang's transfer over NCCL asks."""
    found = await controller.call("own store", free_port(), deadline_s=30)
    assert found == ("another group", "")


async def check_tensors(controller: TrainController) -> None:
    """Check that tensors keep dtype, shape and bits on the way to the ranks and back."""
    given = {
        "bfloat16": torch.arange(6.0).reshape(2, 3).bfloat16(),
        "columns": torch.arange(6).reshape(2, 3).T,
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "trained": torch.tensor([[0.1]], requires_grad=True),
        "20 MiB": torch.ones(5 << 20),
    }
    for found in await controller.call("twice", given, deadline_s=60):
        for name, tensor in given.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor + tensor), name
    scalar, array = torch.tensor(1.5), np.ones((2, 1))
    found = await controller.call("twice", {"scalar": scalar, "array": array}, deadline_s=30)
    assert found == ({"scalar": 3.0, "array": [[1.0], [1.0], [1.0], [1.0]]},) * 2
    rows = [torch.tensor([float(n), 1.0]) for n in range(5)]
    lists = await controller.map("outputs", [row.tolist() for row in rows], deadline_s=30)
    assert await controller.map("outputs", rows, deadline_s=30) == lists
    for refused, says in (
        (
            torch.zeros(2).to_sparse(),
            r"must be dense and local; call full_tensor\(\) or to_dense\(\)",
        ),
        (torch.zeros(2, dtype=torch.complex64), r"dtype must be one of .*, got torch.complex64"),
    ):
        with pytest.raises(ConfigError, match=f"operation twice: argument: .*{says}"):
            await controller.call("twice", {"x": refused}, deadline_s=30)


@pytest.mark.parametrize(
    ("how", "deadline_s", "says"),
    [
        ("SIGKILL", 30.0, r"TrainStep: trainer-1 ended with exit status -9; its log ends:\n(.*\n)*rank 1 step 4"),
        ("SIGSTOP", 2.0, r"TrainStep: no answer from trainer-0, trainer-1 within 2.0 s"),
    ],
)  # fmt: skip
async def test_a_rank_that_dies_or_hangs_is_reported_within_its_deadline(
    tmp_path: Path, how: str, deadline_s: float, says: str
) -> None:
    async with trainers(tmp_path, how) as controller:
        await controller.train_step(1, GROUPS, deadline_s=30)
        await check_failure(controller, deadline_s, says)


async def check_failure(controller: TrainController, deadline_s: float, says: str) -> None:
    """Check that step 4 and a later call fail with the reason of the failing rank."""
    began = time.monotonic()
    with pytest.raises(TrainerError, match=says) as raised:
        await controller.train_step(4, GROUPS, deadline_s=deadline_s)
    assert time.monotonic() - began < deadline_s + 2
    with pytest.raises(TrainerError) as again:
        await controller.train_step(5, GROUPS, deadline_s=30)
    assert str(again.value) == str(raised.value)
