"""The example `examples/arithmetic` trains, continues after `kill -9`, and leaves a checkpoint that engines load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from small_job import check_on_policy, launch, start, vllm_engine

from windlass.jobs.config import Checkpoint
from windlass.jobs.output import OutputFolder

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
NUM_ROWS, GROUPS, STEPS, DEADLINE_S = 36, 12, 16, 300
MAX_OPEN = 3 * GROUPS
"""Largest number of groups that are generated and not trained while a step waits."""
pytestmark = [pytest.mark.rollouts, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic") / "model"
    command = (sys.executable, str(EXAMPLE / "arithmetic.py"), str(folder))
    done = subprocess.run(
        command, check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True
    )
    printed = done.stdout.splitlines()
    assert printed[0] == "importing torch and transformers"
    assert len([line for line in printed if line.startswith("step ")]) == 20
    return folder


RECORDING = """
import dataclasses
from arithmetic import Arithmetic

class Recording(Arithmetic):
    places = {}

    def task(self, row):
        place = self._epoch * len(self.rows) + self._index
        return dataclasses.replace(super().task(row), metadata={**row, "place": place})

    def samples(self, group):
        self.places[group.group_id] = group.metadata["place"]
        return super().samples(group)

    async def before_step(self, step, samples):
        print("TRAIN", step, sorted({self.places[s.group_id] for s in samples}), flush=True)
"""


def write_job(folder: Path, model: Path, *, changes: tuple[tuple[str, str], ...] = ()) -> Path:
    """Write the example's job with the model's folder and an output folder of its own."""
    text = (EXAMPLE / "arithmetic.toml").read_text()
    replaced = (
        ("build/arithmetic", str(model)),
        ('"arithmetic-output"', f'"{folder}/out"'),
        ("{here}/arithmetic.py", f"{folder}/recording.py"),
        ('name = "Arithmetic"', 'name = "Recording"'),
        ('kind = "processes"', f'kind = "processes"\nfile = "{EXAMPLE}/arithmetic.py"'),
        *changes,
    )
    for old, new in replaced:
        assert old in text, old
        text = text.replace(old, new)
    (folder / "recording.py").write_text(
        f"import sys\nsys.path.append({str(EXAMPLE)!r})\n{RECORDING}"
    )
    job = folder / "job.toml"
    job.write_text(text)
    return job


def trained(printed: str) -> dict[int, list[int]]:
    """Return the places of the tasks of each step in the order of all epochs, by the step's number."""
    found = re.findall(r"^TRAIN (\d+) (\[.*\])$", printed, re.MULTILINE)
    return {int(step): json.loads(places) for step, places in found}


def rewards(folder: Path) -> list[float]:
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


def test_the_example_is_one_short_file_and_one_job() -> None:
    for file in EXAMPLE.iterdir():
        assert file.suffix == ".toml" or len(file.read_text().splitlines()) <= 120
    assert len(tomllib.loads((EXAMPLE / "arithmetic.toml").read_text())) > 5


def test_the_example_learns_and_continues_after_a_kill_with_each_row_once(
    tmp_path: Path, model: Path
) -> None:
    """SIGKILL ends the controller between two checkpoints. No task is trained twice or left out."""
    changes = (("save_every = 12", "save_every = 4"), ("steps = 24", f"steps = {STEPS}"))
    job = write_job(tmp_path, model, changes=changes)
    first = ""
    with start(job) as (process, output):
        for line in output:
            first += line
            if line.startswith("step 6:"):
                os.kill(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL, first
    status, second = launch(job)
    assert status == 0, second
    assert "checkpoints/4, after 4 steps" in second
    steps = {n: places for n, places in trained(first).items() if n < 4} | trained(second)
    assert sorted(steps) == [*range(STEPS)]
    places = [place for step in range(STEPS) for place in steps[step]]
    assert len(places) == len({*places}) == STEPS * GROUPS
    # Later tasks are still open at the end.
    assert {*range(1, STEPS * GROUPS - MAX_OPEN)} <= {*places}
    assert max(places) <= STEPS * GROUPS + MAX_OPEN
    found = rewards(tmp_path)
    assert sum(found[-4:]) / 4 > sum(found[:2]) / 2 + 0.05, found
    (newest, checkpoint) = OutputFolder(tmp_path / "out").checkpoints()[-1]
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.steps == STEPS
    evaluations = (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(evaluations[-1])["version"] == json.loads(evaluations[-1])["step"] == STEPS
    check_exported(tmp_path, newest / "hf", model)


def check_exported(tmp_path: Path, exported: Path, model: Path) -> None:
    """Start the same job from the exported checkpoint: its first rewards are those of the trained model."""
    assert not (exported / "questions.jsonl").exists(), "a data set is no part of a checkpoint"
    folder = tmp_path / "again"
    folder.mkdir()
    job = write_job(folder, exported, changes=(("steps = 24", "steps = 1"),))
    text = job.read_text().replace(f"{exported}/questions.jsonl", f"{model}/questions.jsonl")
    job.write_text(text)
    status, printed = launch(job)
    assert status == 0, printed
    assert rewards(folder)[0] > rewards(tmp_path)[0] + 0.05


def test_the_example_trains_with_a_live_vllm(tmp_path: Path, model: Path) -> None:
    engine = vllm_engine(tmp_path, max_model_len=64)
    changes = (
        ('arguments = ["--max-positions", "64"]', engine),
        ("steps = 24", "steps = 3"),
        ("every = 8", "every = 3"),
    )
    status, printed = launch(write_job(tmp_path, model, changes=changes))
    assert status == 0, printed
    check_on_policy(tmp_path)
