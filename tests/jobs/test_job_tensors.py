"""Large tensors in jobs of `windlass launch`: from the memory of rollout workers to two trainer ranks, with `kill -9`."""

from __future__ import annotations

import importlib.util
import json
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
from small_job import EXAMPLE, launch, start, write_job

NUMEL = 1 << 17
TRAINER = """
    import json
    import os
    import sys
    from pathlib import Path

    sys.path.insert(0, {example!r})

    import numpy as np
    import torch
    from trainer import build_model, loss
    from windlass.jobs import FsdpEngine, run_train_worker
    from windlass.jobs.train_worker import WrappedEngine

    class Checked(WrappedEngine):
        def train_step(self, step, groups):
            wrong, found = 0, []
            for sample in (sample for group in groups for sample in group):
                number, pid, first = sample.tensors["place"].to_numpy().tolist()
                features = sample.tensors["features"].to_torch().numpy()
                own = sample.tensors["own"].to_numpy()
                wrong += not np.array_equal(features, np.arange(first, first + {numel}))
                wrong += not np.array_equal(own, np.arange(number, number + {numel}))
                found.append((number, pid))
            line = json.dumps({{"step": step, "wrong": wrong, "found": found}})
            with open({folder!r} + f"/trained-{{os.environ['RANK']}}.jsonl", "a") as file:
                file.write(line + "\\n")
            return self.engine.train_step(step, groups)

    if __name__ == "__main__":
        torch.set_num_threads(1)
        run_train_worker(
            Checked(
                FsdpEngine(
                    model=build_model,
                    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
                    loss=loss,
                    units=lambda model: list(model.get_submodule("model.layers").children()),
                    transport=os.environ["WINDLASS_TRANSPORT"],
                )
            )
        )
"""
WORKER = """
    import itertools
    import os
    import sys

    import numpy as np
    from windlass.rollout import SampleTensor, run_rollout_worker

    numbers = itertools.count(1)

    async def features(context):
        number = context.arguments
        await context.generate((1, 2, number % 60))
        # No two tensors of the job have an element in common.
        first = (os.getpid() << 40) + next(numbers) * {numel}
        context.tensors["features"] = SampleTensor.of(
            np.arange(first, first + {numel}), per_token=False
        )
        context.tensors["place"] = SampleTensor.of([number, os.getpid(), first], per_token=False)
        return number

    sys.exit(run_rollout_worker({{"features": features}}))
"""
RECIPE = """
    import itertools, os, signal, threading, time

    import msgspec
    import numpy as np
    from windlass.jobs import Recipe, Task
    from windlass.rollout import SampleTensor

    class R(Recipe):
        def __init__(self):
            self.number = 0
            self.scored, self.lock = 0, threading.Lock()

        def tasks(self):
            while self.number < {num_tasks}:
                self.number += 1
                yield Task(workflow="features", arguments=self.number, metadata=self.number)

        def state(self):
            return self.number

        def load(self, state):
            self.number = state

        def rewards(self, group):
            return [float(r.output_ids.count(7)) for r in group.rollouts]

        def samples(self, group):
            own = np.arange(group.metadata, group.metadata + {numel})
            found = []
            for sample in super().samples(group):
                features = sample.tensors["features"]
                assert features.data == b"" and features.held.holder.startswith("worker-")
                tensors = {{**sample.tensors, "own": SampleTensor.of(own, per_token=False)}}
                found.append(msgspec.structs.replace(sample, tensors=tensors))
            with self.lock:
                self.scored += 1
                pid = found[-1].tensors["place"].to_numpy().tolist()[1]
                {after_score}
            return found

        async def before_step(self, step, samples):
            # The recipe can still read the tensors that it has made.
            assert all(each.tensors["own"].to_numpy()[0] > 0 for each in samples)

        async def after_step(self, step, result):
            print("AFTER", step + 1, flush=True)
"""


def write(
    folder: Path, *, steps: int, after_score: str = "pass", num_tasks: int = 0, **lines: str
) -> Path:
    """Write a job with two ranks and two workers; `after_score` is a statement after each scored group."""
    (folder / "trainer.py").write_text(
        textwrap.dedent(TRAINER).format(example=str(EXAMPLE), folder=str(folder), numel=NUMEL)
    )
    (folder / "worker.py").write_text(textwrap.dedent(WORKER).format(numel=NUMEL))
    recipe = RECIPE.format(num_tasks=num_tasks or 2 * steps, numel=NUMEL, after_score=after_score)
    return write_job(
        folder,
        recipe,
        top=f"steps = {steps}\n{lines.get('top', '')}",
        trainer=f"world_size = 2\n{lines.get('trainer', '')}",
        rollout=f'worker_script = "{folder}/worker.py"\n{lines.get("rollout", "")}',
        script=folder / "trainer.py",
        num_workers=2,
    )


def trained(folder: Path) -> dict[int, list[tuple[int, int]]]:
    """Return step -> (number, worker's process id) of its samples on both ranks; check that no element was wrong."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rank in range(2):
        for line in (folder / f"trained-{rank}.jsonl").read_text().splitlines():
            record: Any = json.loads(line)
            assert record["wrong"] == 0
            found.setdefault(record["step"], []).extend(map(tuple, record["found"]))
    return found


def numbers(steps: dict[int, list[tuple[int, int]]]) -> list[int]:
    return sorted(number for samples in steps.values() for number, _ in samples)


def twice(last: int) -> list[int]:
    """Return each number of a group for each of its two samples."""
    return sorted([*range(1, last + 1)] * 2)


@pytest.mark.parametrize(
    "transport",
    [
        "cma",
        pytest.param("nixl", marks=pytest.mark.rollouts),
        pytest.param("mooncake", marks=pytest.mark.rollouts),
    ],
)
def test_a_job_trains_on_tensors_from_the_memory_of_workers(tmp_path: Path, transport: str) -> None:
    if transport != "cma" and importlib.util.find_spec(transport) is None:
        pytest.skip(f"{transport} is not installed")
    job = write(tmp_path, steps=3)
    job.write_text(job.read_text().replace('transport = "cma"', f'transport = "{transport}"'))
    status, printed = launch(job)
    assert status == 0, printed
    steps = trained(tmp_path)
    assert numbers(steps) == twice(6)
    assert len({pid for samples in steps.values() for _, pid in samples}) == 2


@pytest.mark.rollouts
def test_a_job_generates_again_what_a_killed_worker_held(tmp_path: Path) -> None:
    """`kill -9` of the worker that holds the last group of a step, when this group is scored: three times."""
    kill = "self.scored in (2, 5, 9) and (os.kill(pid, signal.SIGKILL), print('KILLED', pid, flush=True))"
    status, printed = launch(write(tmp_path, steps=5, after_score=kill))
    assert status == 0, printed
    killed = {int(line.split()[1]) for line in printed.splitlines() if line.startswith("KILLED")}
    assert len(killed) == 3
    steps = trained(tmp_path)
    assert numbers(steps) == twice(10)
    assert printed.count("ended with exit status -9") == 3


@pytest.mark.rollouts
def test_a_job_generates_again_what_a_living_worker_has_freed(tmp_path: Path) -> None:
    wait = "time.sleep(6.0 if self.scored == 1 else 0.0)"
    job = write(
        tmp_path,
        steps=2,
        after_score=wait,
        rollout='worker_arguments = ["--tensor-lease-s", "4"]',
    )
    status, printed = launch(job)
    assert status == 0, printed
    assert numbers(trained(tmp_path)) == twice(4)
    assert "again, because the worker no longer has the tensors" in printed
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["rollouts"]["rejected"] >= 1


@pytest.mark.rollouts
def test_a_restart_of_ranks_generates_the_tensors_since_the_checkpoint_again(
    tmp_path: Path,
) -> None:
    """Kill a rank in the fifth step, after a checkpoint of three steps. The workers have freed the tensors of the fourth step."""
    job = write(tmp_path, steps=6, trainer="save_every = 3")
    script, killed = tmp_path / "trainer.py", f"Path({str(tmp_path / 'killed')!r})"
    kill = f"step == 4 and not {killed}.exists() and ({killed}.touch(), os.kill(os.getpid(), 9))"
    first = "wrong, found = 0, []"
    assert script.read_text().count(first) == 1
    script.write_text(script.read_text().replace(first, f"{kill}; {first}"))
    status, printed = launch(job)
    assert status == 0, printed
    assert "starting the ranks again (restart 1 of at most 3)" in printed
    assert sorted(trained(tmp_path)) == [*range(6)]
    # The last line of each step on each rank is of the steps that the last weights contain.
    last = {
        (rank, record["step"]): [number for number, _ in record["found"]]
        for rank in range(2)
        for line in (tmp_path / f"trained-{rank}.jsonl").read_text().splitlines()
        if (record := json.loads(line))
    }
    assert sorted(number for found in last.values() for number in found) == twice(12)


@pytest.mark.rollouts
def test_a_job_continues_with_a_journal_of_held_tensors(tmp_path: Path) -> None:
    """`kill -9` of the controller: the workers and their tensors end with it, and no group is lost or trained on twice."""
    job = write(
        tmp_path,
        steps=8,
        top='resume = "auto"',
        trainer="save_every = 2",
        rollout=f'journal = "{tmp_path}/journal"',
    )
    with start(job) as (process, output):
        first = ""
        for line in output:
            first += line
            if line.startswith("AFTER 3"):
                process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=120) == -signal.SIGKILL, first
    journal = (tmp_path / "journal").read_text()
    assert '"digest"' in journal
    before = trained(tmp_path)
    for rank in range(2):
        (tmp_path / f"trained-{rank}.jsonl").unlink()
    status, second = launch(job)
    assert status == 0, second
    (saved,) = (int(x.split()[-2]) for x in second.splitlines() if x.startswith("continues from"))
    assert saved in {2, 4}
    kept = {step: samples for step, samples in before.items() if step < saved}
    after = trained(tmp_path)
    assert sorted([*numbers(kept), *numbers(after)]) == twice(16)
    pids = {pid for samples in before.values() for _, pid in samples}
    assert not pids & {pid for samples in after.values() for _, pid in samples}


@pytest.mark.long
def test_a_job_fails_with_the_reason_if_ranks_and_workers_have_no_common_transport(
    tmp_path: Path,
) -> None:
    job = write(
        tmp_path,
        steps=1,
        trainer="max_restarts = 0",
        rollout='worker_arguments = ["--tensor-transport", "shm"]',
    )
    status, printed = launch(job)
    assert status == 2, printed
    failed = next(line for line in printed.splitlines() if line.startswith("windlass launch: "))
    assert (
        "TransferFailed: tensors of step 0: worker-0: transport must be available at both" in failed
    )
    assert "got shm at the source and cma at the destination" in failed
