"""Rollout worker whose workflow adds a large tensor with elements that no other rollout has."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from windlass.rollout import SampleTensor, WorkflowContext, run_rollout_worker
from windlass.rollout.messages import Partial, Turn

NUM_TOKENS = 3


def elements(number: int, numel: int) -> np.ndarray:
    """Return the elements of the tensor of prompt `number`."""
    return np.arange(number * numel, (number + 1) * numel, dtype=np.int64)


async def features(context: WorkflowContext) -> int:
    """Answer with three tokens, a tensor of `numel` elements, and a small tensor per token."""
    arguments: Any = context.arguments
    number: int = arguments[0]
    numel: int = arguments[1]
    output = Partial((number, 1, 2), (-0.5,) * NUM_TOKENS, (0,) * NUM_TOKENS)
    context.turns.append(Turn((number + 1,), output, "length"))
    context.tensors["features"] = SampleTensor.of(elements(number, numel), per_token=False)
    context.tensors["values"] = SampleTensor.of([number + 0.5] * NUM_TOKENS)
    return number


async def mixed(context: WorkflowContext) -> int:
    """Answer as `features` does, and leave the large tensor out of every second rollout."""
    number = await features(context)
    if int(context.task_id.rpartition("-")[2]) % 2:
        del context.tensors["features"]
    return number


if __name__ == "__main__":
    sys.exit(run_rollout_worker({"features": features, "mixed": mixed}))
