"""Checks of an engine's weights against a fresh engine and against the engine's own transfer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness import Row, median_p95
from live_engine.servers import Sglang, Vllm
from live_engine.trainers import Trainers

Held = tuple[list[dict[str, str]], list[int]]
"""Fingerprints per rank, and greedy tokens."""


async def save(options: argparse.Namespace, trainers: Trainers, folder: Path, say: Any) -> None:
    differ = (await trainers.all("check_quantiser", options.engine))[0][1]
    assert differ == (0, 0), f"bytes of values and scales that differ: {differ}"
    answers = await trainers.all("save_quantised", options.engine, str(folder))
    seconds, quantiser = answers[0]
    say(f"weights quantised by {quantiser} and saved in {seconds:.1f} s")


async def settle(server: Vllm | Sglang, trainers: Trainers) -> Held:
    """Publish other weights, then reproducible weights, and return the state of the engine."""
    await trainers.all("fill", 8)
    await trainers.all("publish", 500)
    other = await server.fingerprints()
    await trainers.all("fill", 7)
    await trainers.all("publish", 501)
    held = await server.fingerprints()
    assert held != other, "other weights must be other fingerprints"
    return held, await server.tokens()


def require_fresh(ours: Held, fresh: Held, say: Any) -> None:
    """Raise an error if parameters, buffers or tokens differ; only report other tensors of modules."""
    different = [
        f"rank {rank}: {name}"
        for rank, (a, b) in enumerate(zip(ours[0], fresh[0], strict=True))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]
    required = [name for name in different if ": attribute:" not in name]
    say(f"attributes of modules that differ: {len(different) - len(required)} {different[:5]}")
    assert not required, f"{len(required)} tensors differ from a fresh load: {required[:5]}"
    assert ours[1] == fresh[1], f"tokens differ: {ours[1]} and {fresh[1]}"
    say(
        f"{sum(map(len, ours[0]))} tensors and the tokens {ours[1][:8]} are those of a fresh server "
        f"that loaded the quantised checkpoint"
    )


async def compare(
    options: argparse.Namespace,
    server: Vllm | Sglang,
    trainers: Trainers,
    rows: list[Row],
    ours: Held,
    say: Any,
) -> list[Row]:
    """Send the weights of `settle` by the engine's own transfer, and require the state `ours`.

    vLLM's own transfer is timed without load, in its favour.
    """
    gather_s, num_tensors = (await trainers.all("gather"))[0]
    say(f"gathered {num_tensors} full tensors in {gather_s:.2f} s")
    await server.own_init(trainers, options.port + 77)
    own = [await server.own_update(trainers) for _ in range(options.own)]
    say(f"the engine's own transfer: {[round(seconds, 3) for seconds in own]}")
    theirs = (await server.fingerprints(), await server.tokens())
    different = [
        f"rank {rank}: {name}"
        for rank, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True))
        for name in a
        if a[name] != b.get(name)
    ]
    assert not different, f"{len(different)} tensors differ: {different[:5]}"
    assert ours[1] == theirs[1], f"tokens differ: {ours[1]} and {theirs[1]}"
    say(f"{sum(map(len, ours[0]))} tensors and the tokens {ours[1][:8]} are equal by both ways")
    median = median_p95(own)[0]
    return [
        Row(
            row.case,
            "update against the engine's own NCCL transfer (packed, gathered before)",
            row.value,
            "s",
            "own transfer, median",
            median,
            ratio=median / row.value,
        )
        for row in rows
        if row.metric == "update, median"
    ]
