"""Samples that user code returns for training are converted, or refused at the return."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Never

import numpy as np
import pytest
import torch
from aiohttp import web

from windlass.errors import ConfigError, ProtocolError, WindlassError
from windlass.jobs import recipe
from windlass.jobs.recipe import Recipe, Task, in_thread, score, tasks_of
from windlass.jobs.train_worker import step_metrics
from windlass.layout.dtypes import DType
from windlass.net.logs import LineLimit
from windlass.net.messages import encode
from windlass.net.server import ControlServer
from windlass.rollout.batches import BatchClient, BatchQueue, training_samples
from windlass.rollout.handles import Rollout, RolloutGroup
from windlass.rollout.messages import TRAINING_BATCHES, Partial, TrainingBatch, TrainingSample, Turn
from windlass.rollout.tensors import SampleTensor
from windlass.rollout.values import encode_value


def rollout(number: int, turns: tuple[Turn, ...] = (), **changes: object) -> Rollout:
    given: dict[str, Any] = {
        "task_id": f"0-{number}",
        "group_id": 5,
        "prompt_ids": (1, 2),
        "output_ids": (3 + number,),
        "logprobs": (-0.5,),
        "versions": (4,),
        "finish_reason": "length",
        "engine": "engine-a",
        "worker": "worker-0",
        "attempts": 1,
        "metadata": None,
        "finished_at": 0.0,
        "seconds": 1.0,
        "turns": turns,
    }
    return Rollout(**{**given, **changes})


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(5, (1, 2), rollouts or (rollout(0), rollout(1)), None)


def sample(**changes: object) -> TrainingSample:
    given: dict[str, Any] = {
        "prompt_ids": (1,),
        "output_ids": (2, 3),
        "logprobs": (-0.5, -0.25),
        "versions": (0, 0),
        "reward": 1.0,
        "group_id": 5,
        "engine": "engine-a",
    }
    return TrainingSample(**{**given, **changes})


def received(*samples: TrainingSample) -> tuple[TrainingSample, ...]:
    """Return the samples as a trainer rank decodes them."""
    return TRAINING_BATCHES.decode(encode(TrainingBatch(0, samples))).samples


REWARDS = {
    "bool": [True, False],
    "int": (1, 0),
    "np.bool": np.array([True, False]),
    "np.float32": [np.float32(1), np.float32(0)],
    "np.float64 array": np.array([1.0, 0.0]),
    "np column": np.array([[1.0], [0.0]]),
    "torch": torch.tensor([1.0, 0.0]),
    "torch column": torch.tensor([[1.0], [0.0]]),
    "torch bfloat16 with gradient": torch.tensor([1.0, 0.0], dtype=torch.bfloat16).requires_grad_(),
    "torch scalars": [torch.tensor(1.0), torch.tensor(0)],
    "decimal": [Decimal(1), Decimal(0)],
    "generator": (n for n in (1.0, 0.0)),
    "map": map(float, ["1", "0"]),
}


@pytest.mark.parametrize("kind", REWARDS)
def test_rewards_of_any_kind_of_number_reach_a_rank_as_floats(kind: str) -> None:
    found = received(*training_samples(group(), REWARDS[kind]))
    assert [type(each.reward) for each in found] == [float, float]
    assert [each.reward for each in found] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ([1.0, None], r"group 5: rewards\[1\] must be one number, got None; .* no samples"),
        ([1.0, math.nan], r"group 5: rewards\[1\] must be finite, got nan"),
        ([-math.inf, 1.0], r"group 5: rewards\[0\] must be finite, got -inf"),
        (torch.tensor([1.0, math.nan]), r"rewards\[1\] must be finite, got tensor\(nan\)"),
        (np.array([1.0, np.inf], dtype=np.float32), r"rewards\[1\] must be finite, got .*inf"),
        ([10**400, 1.0], r"rewards\[0\] must be one number, got 1000.*\.\.\."),
        (["1.0", 1.0], r"rewards\[0\] must be one number, got '1\.0'"),
        ([1j, 1.0], r"rewards\[0\] must be one number, got 1j"),
        ([[1.0, 2.0], 1.0], r"rewards\[0\] must be one number, got \[1\.0, 2\.0\]"),
        (torch.ones(2, 3), r"rewards\[0\] must be one number, got tensor"),
        ([1.0], r"group 5: rewards must have 2 entries, got 1"),
        ([], r"rewards must have 2 entries, got 0"),
        (None, r"group 5: rewards must be one number per rollout, got None"),
        (1.0, r"rewards must be one number per rollout, got 1\.0"),
        (torch.tensor(1.0), r"rewards must be one number per rollout, got tensor\(1\.\)"),
        (np.float32(1), r"rewards must be one number per rollout, got .*1\.0"),
        ("ab", r"rewards must be one number per rollout, got 'ab'"),
        ({0: 1.0, 1: 1.0}, r"rewards must be one number per rollout, got \{0: 1\.0"),
    ],
)
def test_rewards_that_are_not_finite_are_refused_with_group_and_index(
    rewards: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        training_samples(group(), rewards)


def test_a_workflow_gives_one_sample_per_conversation_with_the_reward_of_its_rollout() -> None:
    first = Turn((1, 2), Partial((3, 4), (-0.1, -0.2), (6, 6)), "stop")
    second = Turn((1, 2, 3, 4, 9), Partial((5,), (-0.3,), (7,)), "length")
    nothing = Turn((1,), Partial(), "abort")
    of_workflow = {"prompt_ids": (), "output_ids": (), "logprobs": (), "versions": (6, 6, 7)}
    both = rollout(0, (first, nothing, second), **of_workflow)
    other = Turn((2, 2), Partial((8,), (-0.4,), (5,)), "stop")
    two = rollout(1, (first, other), **of_workflow)
    found = training_samples(group(both, two), [1.0, 0.0])
    assert received(*found) == (
        sample(
            prompt_ids=(1, 2),
            output_ids=(3, 4, 9, 5),
            logprobs=(-0.1, -0.2, 0.0, -0.3),
            versions=(6, 6, -1, 7),
            loss_mask=(True, True, False, True),
            task_id="0-0",
            finish_reason="length",
        ),
        *(
            sample(
                prompt_ids=turn.prompt_ids,
                output_ids=turn.output.output_ids,
                logprobs=turn.output.logprobs,
                versions=turn.output.versions,
                reward=0.0,
                task_id="0-1",
                finish_reason="stop",
            )
            for turn in (first, other)
        ),
    )
    silent = rollout(1, (), **of_workflow)
    with pytest.raises(ConfigError, match=r"group 5: rollout 0-1 has no generated token"):
        training_samples(group(both, silent), [1.0, 0.0])


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": True},
        {"reward": np.float32(1)},
        {"reward": torch.tensor(1)},
        {"output_ids": np.array([2, 3]), "versions": [0, 0], "logprobs": np.array([-0.5, -0.25])},
        {"output_ids": torch.tensor([2, 3]), "logprobs": torch.tensor([-0.5, -0.25])},
        {"output_ids": [np.int64(2), 3], "prompt_ids": [1], "group_id": np.int32(5)},
        {"loss_mask": (True, True)},
        {"loss_mask": np.array([True, True])},
        {"loss_mask": torch.ones(2, dtype=torch.bool)},
        {"loss_mask": [1, np.int64(1)]},
    ],
)
def test_a_sample_of_arrays_and_tensors_becomes_plain_numbers(changes: dict[str, object]) -> None:
    assert received(sample(**changes)) == (sample(),)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_ids": (1 << 63,)}, r"prompt_ids must be integers of at most 63 bits, got \(92"),
        ({"group_id": -(1 << 64)}, r"group_id must be integers of at most 63 bits"),
        ({"reward": None}, r"sample of group 5: reward must be one number, got None"),
        ({"reward": math.nan}, r"sample of group 5: reward must be finite, got nan"),
        ({"output_ids": (2, 3, 4)}, r"must have the same length, at least 1, got 3, 2, 2 and 3"),
        ({"versions": (0,)}, r"must have the same length, at least 1, got 2, 2, 1 and 2"),
        ({"output_ids": (), "logprobs": (), "versions": ()}, r"at least 1, got 0, 0, 0 and 0"),
        ({"output_ids": (2.5, 3)}, r"output_ids must be integers, got \(2\.5, 3\)"),
        ({"output_ids": torch.tensor([2.0, 3.0])}, r"output_ids must be integers, got tensor"),
        ({"prompt_ids": "abc"}, r"prompt_ids must be a sequence of integers, got 'abc'"),
        ({"prompt_ids": None}, r"prompt_ids must be a sequence of integers, got None"),
        ({"logprobs": (-0.5, math.nan)}, r"logprobs\[1\] must be finite, got nan"),
        ({"logprobs": (-0.5, None)}, r"logprobs\[1\] must be one number, got None"),
        ({"group_id": "five"}, r"sample: group_id must be integers, got \('five',\)"),
        ({"engine": None}, r"engine must be text, got None"),
        ({"task_id": 3}, r"task_id must be text, got 3"),
        ({"loss_mask": (True,)}, r"at least 1, got 2, 2, 2 and 1"),
        ({"loss_mask": (1, 2)}, r"loss_mask must be booleans, got \(1, 2\)"),
        ({"loss_mask": torch.tensor([0.0, 1.0])}, r"loss_mask must be booleans, got tensor"),
        ({"tensors": [1]}, r"sample of group 5: tensors must be a mapping, got \[1\]"),
        ({"tensors": {"a": [1, 2]}}, r"got a list for 'a'; use SampleTensor\.of"),
        (
            {"tensors": {"values": SampleTensor.of([0.5, 1.5, 2.5])}},
            r"tensor 'values' must have one entry per output token \(2\), got shape \(3,\); set per_",
        ),
        ({"metadata": {1: 2}}, r"group 5: metadata must be a mapping with text keys, got \{1: 2\}"),
        ({"metadata": {"a": object()}}, r"metadata: must be msgpack-plain, got dict: object is no"),
    ],
)
def test_a_sample_that_a_rank_could_not_read_is_refused_at_creation(
    changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        sample(**changes)


TENSORS = {
    "float32": torch.tensor([[0.5, -1.5], [2.25, 3.0]]),
    "bfloat16": torch.tensor([0.5, -1.5], dtype=torch.bfloat16),
    "float8_e4m3fn": torch.tensor([0.5, -1.5]).to(torch.float8_e4m3fn),
    "int64": torch.tensor([1, -(1 << 62)]),
    "uint8": torch.arange(16, dtype=torch.uint8).reshape(2, 8)[:, ::2],
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("dtype", TENSORS)
def test_tensors_reach_a_rank_with_their_dtype_shape_and_elements(dtype: str) -> None:
    given = TENSORS[dtype]
    (found,) = received(sample(tensors={"values": SampleTensor.of(given)}))
    tensor = found.tensors["values"]
    assert (tensor.dtype, tensor.shape) == (dtype, tuple(given.shape))
    assert tensor.to_torch().dtype == given.dtype
    assert torch.equal(tensor.to_torch().float(), given.float())
    if dtype in {"bfloat16", "float8_e4m3fn"}:
        with pytest.raises(ConfigError, match=rf"NumPy has no dtype {dtype}; use to_torch"):
            tensor.to_numpy()
        return
    array = given.numpy()
    assert np.array_equal(tensor.to_numpy(), array)
    assert SampleTensor.of(array) == tensor
    assert SampleTensor.of(array.astype(array.dtype.newbyteorder(">"))) == tensor


def test_numbers_of_python_become_float32_or_int64() -> None:
    assert SampleTensor.of([0.5, 1.5]).dtype == "float32"
    assert SampleTensor.of(np.array([0.5, 1.5])).dtype == "float64"
    assert SampleTensor.of([3, 4]).dtype == "int64"
    scalar = SampleTensor.of(2.5, per_token=False)
    assert (scalar.shape, scalar.to_torch().item()) == ((), 2.5)
    empty = SampleTensor.of(torch.empty(0, 3), per_token=False)
    assert empty.to_torch().shape == (0, 3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SampleTensor.of(["a"]), r"dtype must be one of float64, .*, got 'str32'"),
        (lambda: SampleTensor.of(torch.ones(1, dtype=torch.complex64)), r"got 'complex64'"),
        (
            lambda: SampleTensor.of([[1], [2, 3]]),
            r"values must be numbers in lists of equal length: .*",
        ),
        (lambda: SampleTensor.of(1.5), r"shape must have 1 to 8 dimensions, got \(\)"),
        (
            lambda: SampleTensor(dtype=DType.INT16, shape=(2, 3), data=bytes(11)),
            r"data must be 12 bytes for int16 of shape \(2, 3\), got 11 bytes",
        ),
        (
            lambda: SampleTensor(dtype=DType.INT16, shape=(-1,), data=b""),
            r"shape must be integers >= 0, got \(-1,\)",
        ),
    ],
)
def test_tensors_that_do_not_match_their_dtype_or_shape_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_rank_refuses_a_tensor_with_too_few_bytes() -> None:
    whole = encode(TrainingBatch(0, (sample(tensors={"a": SampleTensor.of([1, 2])}),)))
    short = whole.replace(b"\xa4data\xc4\x10" + SampleTensor.of([1, 2]).data, b"\xa4data\xc4\x01a")
    assert short != whole
    with pytest.raises(ProtocolError, match=r"data must be 16 bytes for int64 .* got 1 bytes"):
        TRAINING_BATCHES.decode(short)


def test_metadata_reaches_a_rank_as_plain_values() -> None:
    made = sample(metadata={"task": np.int64(3), "tags": ("a", "b"), "nested": {"x": b"y"}})
    assert made.metadata == {"task": 3, "tags": ["a", "b"], "nested": {"x": b"y"}}
    assert received(made) == (made,)


def test_the_oldest_version_of_a_sample_ignores_masked_tokens() -> None:
    made = sample(versions=(3, -1), loss_mask=(True, False))
    assert (made.oldest_version, made.num_trained) == (3, 1)
    nothing = sample(loss_mask=(False, False))
    assert (nothing.oldest_version, nothing.num_trained) == (-1, 0)


async def test_a_queue_refuses_objects_that_are_not_samples() -> None:
    queue = BatchQueue()
    with pytest.raises(
        ConfigError, match=r"step 0: group 1, sample 1 must be a TrainingSample, .*3"
    ):
        await queue.put(0, [[sample()], [sample(), 3]])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"step 0: group 0 must be a sequence of samples, got 3"):
        await queue.put(0, [3])  # type: ignore[list-item]
    await queue.put(np.int64(0), [[sample()]])  # type: ignore[arg-type]
    assert (await queue.shard(0, 0, 1, deadline_s=1)).samples == (sample(),)


class Returns(Recipe):
    """Recipe that returns or raises its argument."""

    def __init__(self, samples: object) -> None:
        self._samples = samples

    def tasks(self) -> Iterator[Task]:
        yield from ()

    def rewards(self, group: RolloutGroup) -> Never:
        raise NotImplementedError

    def samples(self, group: RolloutGroup) -> Any:
        if isinstance(self._samples, BaseException):
            raise self._samples
        return self._samples


def test_samples_of_a_recipe_may_be_any_sequence_of_samples() -> None:
    for given in ([sample()], (sample(),), iter([sample()])):
        assert score(Returns(given), group()) == [sample()]
    assert score(Returns(()), group()) == []
    with pytest.raises(ConfigError, match=r"samples of group 5 must be a sequence of .*, got None"):
        score(Returns(None), group())
    with pytest.raises(ConfigError, match=r"samples of group 5: group 0, sample 0 must be a Train"):
        score(Returns([0.5]), group())


class NoText(Exception):
    def __str__(self) -> str:
        return self.args[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "raised",
    [
        *(SystemExit(3), KeyboardInterrupt(), StopIteration(), GeneratorExit(), KeyError("x")),
        NoText({"code": 3}),
    ],
)
async def test_every_exception_of_a_recipe_thread_is_an_error_at_once(
    raised: BaseException,
) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(WindlassError, match=rf"recipe: group 5 raised {type(raised).__name__}"):
            await in_thread("group 5", lambda: score(Returns(raised), group()))


async def test_the_error_of_a_reward_that_needs_a_signal_names_the_remedy() -> None:
    with pytest.raises(WindlassError, match=r"math_verify parsing_timeout=None and timeout_secon"):
        await in_thread("rewards", lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL))


def test_values_of_workflows_and_operations_may_hold_arrays_and_tensors() -> None:
    value = {"reward": np.float32(0.5), "ids": torch.tensor([1, 2]), "ok": np.bool_(True)}
    assert encode_value("value", value) == encode({"reward": 0.5, "ids": [1, 2], "ok": True})
    with pytest.raises(
        ConfigError, match=r"value: must be msgpack-plain, got dict: object is not a number"
    ):
        encode_value("value", {"tool": object()})


def test_metrics_of_a_step_are_numbers() -> None:
    found = step_metrics(
        {"loss": torch.tensor(0.5, requires_grad=True), "n": np.int64(3), "ok": True}
    )
    assert found == {"loss": 0.5, "n": 3.0, "ok": 1.0}
    assert math.isnan(step_metrics({"kl": math.nan})["kl"])
    assert step_metrics(None) == {}
    for wrong, says in (
        ({"loss": None}, r"train_step: metric loss must be one number, got None"),
        ([0.5], r"train_step must return a mapping of names to numbers, got \[0\.5\]"),
    ):
        with pytest.raises(ConfigError, match=says):
            step_metrics(wrong)


def test_invalid_or_raising_tasks_are_an_error_of_the_recipe() -> None:
    class Asks(Returns):
        def tasks(self) -> Iterator[Task]:
            yield Task((1,))
            if isinstance(self._samples, BaseException):
                raise self._samples
            yield self._samples  # type: ignore[misc]

    for given, says in (
        (KeyError("shard 5"), r"recipe: tasks raised KeyError: 'shard 5'"),
        (SystemExit(3), r"recipe: tasks raised SystemExit: 3"),
        ((1, 2), r"recipe: tasks\[1\] must be a Task, got \(1, 2\)"),
        # `next(tasks, None)` would take None for the end of the tasks.
        (None, r"recipe: tasks\[1\] must be a Task, got None"),
    ):
        with pytest.raises(WindlassError, match=says):
            list(tasks_of(Asks(given)))


async def test_equal_exceptions_of_a_recipe_log_one_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "tracebacks", LineLimit(600))

    def reward(number: int) -> float:
        return [0.5][number]

    def other() -> float:
        raise ValueError("no answer")

    for _ in range(5):
        with pytest.raises(WindlassError, match="rewards raised IndexError"):
            await in_thread("rewards", lambda: reward(1))
    with pytest.raises(WindlassError, match="rewards raised ValueError"):
        await in_thread("rewards", other)
    kinds = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert kinds == [IndexError, ValueError]


async def test_a_batch_above_256_mib_reaches_a_rank() -> None:
    values = np.arange(1 << 22, dtype=np.int64).reshape(2, -1)
    samples = [
        sample(group_id=n, tensors={"values": SampleTensor.of(values + n)}) for n in range(9)
    ]
    queue = BatchQueue(inline_nbytes=1 << 30)
    server = ControlServer(host="127.0.0.1", port=0, token="a-token")
    server.add_routes([web.get("/v1/batches", queue.serve)])
    await server.start()
    try:
        await queue.put(3, [[each] for each in samples])

        def received() -> TrainingBatch:
            with BatchClient(server.url, "a-token") as batches:
                return batches.next_batch(3, 0, 1, deadline_s=60)

        found = await asyncio.to_thread(received)
    finally:
        await server.close()
    assert sum(len(each.tensors["values"].data) for each in found.samples) > 256 << 20
    assert found == TrainingBatch(3, tuple(samples))
