"""Cost of a journal of rollouts for the event loop, per rollout.

Each rollout is submitted, sent to a worker, accepted with 128 tokens and returned, in groups of 8 and with 64 outcomes
per callback, on the machine's file system. The strongest alternative writes the journal to disk before each outcome is
acknowledged (one fdatasync per callback). The lower limit is one write of the same bytes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

from harness import Row, median_p95, parser, report
from windlass.rollout import RolloutConfig, SamplingParams, StalenessPolicy
from windlass.rollout.journal import RolloutJournal
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.messages import OutcomeStatus, Partial, RolloutOutcome, Work

NUM_ROLLOUTS, GROUP_SIZE, CALLBACK, NUM_TOKENS = 4096, 8, 64, 128
NUM_RUNS = 7
SAMPLING = SamplingParams(max_new_tokens=NUM_TOKENS)
WORK = Work(prompt_ids=tuple(range(1000, 1256)), sampling=SAMPLING)
TOKENS = tuple(range(30_000, 30_000 + NUM_TOKENS))
RESULT = Partial(TOKENS, tuple(-token / 7e4 for token in TOKENS), (3,) * NUM_TOKENS)


async def one_run(path: Path | None, *, sync_each: bool) -> tuple[float, float, int]:
    """Return seconds and CPU seconds of the loop for all rollouts, and the bytes of the journal."""
    policy = StalenessPolicy.unbounded(NUM_ROLLOUTS)
    config = RolloutConfig(
        journal=path, acknowledge=path is not None, journal_compact_nbytes=1 << 40
    )
    life = Lifecycle(policy, config, lambda _: None, lambda: None)
    life.open()
    journal = life.journal
    began, began_cpu = time.perf_counter(), time.thread_time()
    for _ in range(NUM_ROLLOUTS // GROUP_SIZE):
        life.submit_group(WORK, GROUP_SIZE)
    for record in list(life.table.waiting.values()):
        life.start_attempt(record, "engine", "worker")
    journal.flush()
    running = list(life.table.by_engine["engine"].values())
    for first in range(0, NUM_ROLLOUTS, CALLBACK):
        for record in running[first : first + CALLBACK]:
            life.end_attempt(record, outcome_of(record.task_id, record.attempt))
        journal.flush()
        if sync_each and journal._file is not None:
            journal._file.sync()
        while life.table.ready:
            group = life.hand_out()
            life.acknowledge(group.rollouts[0].task_id)
        journal.flush()
    seconds, cpu_s = time.perf_counter() - began, time.thread_time() - began_cpu
    nbytes = 0 if journal._file is None else journal._file.nbytes
    await journal.close()
    if life.table.counts.completed != NUM_ROLLOUTS:
        raise RuntimeError(f"completed {life.table.counts.completed} of {NUM_ROLLOUTS}")
    if path is not None:
        left = RolloutJournal(config)
        if left.open(0).tasks:
            raise RuntimeError("the journal does not say that all were acknowledged")
        await left.close()
    return seconds, cpu_s, nbytes


def outcome_of(task_id: str, attempt: int) -> RolloutOutcome:
    return RolloutOutcome(
        task_id=task_id,
        attempt=attempt,
        status=OutcomeStatus.ACCEPTED,
        result=RESULT,
        engine="engine",
        worker="worker",
        finished_at=0.0,
    )


def raw_write(folder: Path, nbytes: int) -> float:
    """Return the CPU seconds to write `nbytes` in the same number of calls as the journal."""
    calls = 2 * NUM_ROLLOUTS // CALLBACK
    data = os.urandom(nbytes // calls)
    path = folder / "raw"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    began = time.thread_time()
    for _ in range(calls):
        os.write(descriptor, data)
    seconds = time.thread_time() - began
    os.close(descriptor)
    path.unlink()
    return seconds


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    off, on, on_wall, synced, raw = [], [], [], [], []
    nbytes = 0
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder, "journal")
        for _ in range(NUM_RUNS):
            off.append(asyncio.run(one_run(None, sync_each=False))[1])
            seconds, cpu_s, nbytes = asyncio.run(one_run(path, sync_each=False))
            on_wall.append(seconds)
            on.append(cpu_s)
            path.unlink()
            synced.append(asyncio.run(one_run(path, sync_each=True))[0])
            path.unlink()
            raw.append(raw_write(Path(folder), nbytes))

    def us(seconds: list[float]) -> tuple[float, float]:
        return tuple(1e6 * s / NUM_ROLLOUTS for s in median_p95(seconds))  # type: ignore[return-value]

    rows = []
    for index, metric in enumerate(("median", "p95")):
        rows += [
            row("CPU with a journal", metric, us(on)[index], "without", us(off)[index]),
            row(
                "loop time with a journal",
                metric,
                us(on_wall)[index],
                "fdatasync per callback",
                us(synced)[index],
            ),
        ]
    share = us([a - b for a, b in zip(on, off, strict=True)])[0]
    rows.append(row("the journal's CPU", "median", share, "one write of its bytes", us(raw)[0]))
    per_rollout = nbytes / NUM_ROLLOUTS
    size = f"journal, 256 prompt tokens per group, {NUM_TOKENS} tokens each"
    raw_size = 8.0 * 3 * NUM_TOKENS
    rows.append(Row(size, "bytes per rollout", per_rollout, "B", "3 x 8 B per token", raw_size))
    report(rows, arguments.json, "Journal of rollouts")


def row(case: str, metric: str, value: float, reference: str, reference_value: float) -> Row:
    return Row(case, f"{metric} per rollout", value, "us", reference, reference_value)


if __name__ == "__main__":
    main()
