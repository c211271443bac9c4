"""Trainer rank that reads a batch for each step on stdin, checks every element, and prints what it got as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from tensor_worker import elements

from windlass.errors import WindlassError
from windlass.rollout import BatchClient


def num_memory_files() -> int:
    """Return the number of memory files of the transport `shm` that this process has open."""
    found = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("memfd:windlass" in each for each in found)


def main() -> None:
    url, token, rank, world_size, transport = sys.argv[1:]
    with BatchClient(url, token, transport=transport) as client:
        for line in sys.stdin:
            step, deadline_s = line.split()
            try:
                batch = client.next_batch(
                    int(step), int(rank), int(world_size), deadline_s=float(deadline_s)
                )
            except WindlassError as error:
                print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
                continue
            numbers, wrong = [], []
            for sample in batch.samples:
                number = sample.output_ids[0]
                numbers.append(number)
                tensor = sample.tensors["features"]
                array = tensor.to_numpy()
                if not np.array_equal(array, elements(number, array.size)):
                    wrong.append(number)
                if not (tensor.to_torch().numpy() == array).all():
                    wrong.append(number)
                if sample.tensors["values"].to_numpy().tolist() != [number + 0.5] * 3:
                    wrong.append(number)
                del tensor, array
            del batch, sample
            answer = {"numbers": numbers, "wrong": wrong, "memory_files": num_memory_files()}
            print(json.dumps(answer), flush=True)
    print(json.dumps({"memory_files": num_memory_files()}), flush=True)


if __name__ == "__main__":
    main()
