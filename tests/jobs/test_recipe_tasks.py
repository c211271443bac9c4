"""Tasks of a recipe in the checkpoint of a job: the job that continues submits the same tasks."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from windlass.jobs.recipe import Task, decode_tasks, encode_tasks
from windlass.rollout.values import encode_value


def test_tasks_of_any_number_and_size_survive_a_checkpoint() -> None:
    """100 prompts of 2048 tokens, and rows with large tests of programs, are above the limits of a message."""
    tasks = [
        Task(tuple(range(number, number + 2048)), metadata={"tests": f"{number}" * 100_000})
        for number in range(100)
    ]
    encoded, errors = encode_tasks(tasks)
    assert not errors
    assert decode_tasks(encoded) == tasks


@dataclass
class Question:
    text: str


def test_workers_get_the_same_arguments_from_a_checkpoint() -> None:
    arguments = {"question": Question("3 + 4"), "limits": (1, 2)}
    (found,) = decode_tasks(encode_tasks([Task(workflow="ask", arguments=arguments)])[0])
    of_worker = msgspec.msgpack.decode(encode_value("arguments", arguments))
    assert found.arguments == of_worker == {"question": {"text": "3 + 4"}, "limits": [1, 2]}


def test_task_that_cannot_be_recorded_leaves_the_others() -> None:
    tasks = [Task((1,)), Task((2,), metadata=object()), Task((3,), metadata={"id": 1 << 70})]
    encoded, errors = encode_tasks([*tasks, Task((4,))])
    assert decode_tasks(encoded) == [Task((1,)), Task((4,))]
    assert [str(error).partition(", got")[0] for error in errors] == [
        "task: must be msgpack-plain"
    ] * 2
