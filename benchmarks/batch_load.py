"""Processes of `bench_batches.py`: a rollout worker with large tensors, trainer ranks, and the same as Ray actors."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import xxhash

from windlass.rollout import BatchClient, SampleTensor, WorkflowContext, run_rollout_worker
from windlass.rollout.messages import Partial, Turn

UNTIL_S = 600.0
_array: Any = np.empty(0, np.int64)


def elements(number: int, nbytes: int) -> Any:
    """Return the elements of tensor `number`: all differ, and the first is its number. The next call changes the array.

    One array for all tensors leaves more memory for the batch. Both ways copy the elements.
    """
    global _array
    if len(_array) != nbytes // 8:
        _array = np.arange(1 << 32, (1 << 32) + nbytes // 8, dtype=np.int64)
    _array[0] = number
    return _array


async def make(context: WorkflowContext) -> float:
    """Answer with a tensor; return the seconds for its copy."""
    arguments: Any = context.arguments
    number, nbytes = arguments
    array = elements(number, nbytes)
    began = time.monotonic()
    context.turns.append(Turn((1,), Partial((number,), (0.0,), (0,)), "length"))
    context.tensors["features"] = SampleTensor.of(array, per_token=False)
    return time.monotonic() - began


def rank_main(url: str, rank: str, world_size: str) -> None:
    """Read a step from each line on stdin, fetch its batch, and print the seconds and the digests."""
    with BatchClient(url, os.environ["WINDLASS_TOKEN"]) as client:
        for line in sys.stdin:
            began = time.monotonic()
            batch = client.next_batch(int(line), int(rank), int(world_size), deadline_s=UNTIL_S)
            arrays = {s.output_ids[0]: s.tensors["features"].to_numpy() for s in batch.samples}
            ended = time.monotonic()
            found = {number: xxhash.xxh3_128_hexdigest(a) for number, a in arrays.items()}
            del batch, arrays
            print(json.dumps({"began": began, "ended": ended, "digests": found}), flush=True)


class RaySource:
    """Ray actor that puts arrays into the object store."""

    def put(self, numbers: list[int], nbytes: int) -> list[Any]:
        import ray

        return [ray.put(elements(number, nbytes)) for number in numbers]


class RayRank:
    """Ray actor that gets arrays from the object store, and reads each byte once, as a rank of Windlass does."""

    def get(self, numbers: list[int], refs: list[list[Any]]) -> dict[str, Any]:
        import ray

        began = time.monotonic()
        arrays = ray.get(refs[0])
        got = time.monotonic()
        found = {
            number: xxhash.xxh3_128_hexdigest(array)
            for number, array in zip(numbers, arrays, strict=True)
        }
        return {"began": began, "got": got, "ended": time.monotonic(), "digests": found}


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank_main(*sys.argv[2:])
    else:
        sys.exit(run_rollout_worker({"make": make}, sys.argv[2:]))
