"""Jobs that lose what they wait for: they get it again, or end with the reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "launch"
DEADLINE_S = 100
pytestmark = pytest.mark.timeout(120)

RECIPE = """
import itertools, time
from windlass.jobs import Recipe, Task
class R(Recipe):
    def tasks(self):
        for n in itertools.count():
            yield Task(prompt_ids=(1, 2, n % 60))
    def rewards(self, group):
        return [float(r.output_ids.count(7)) for r in group.rollouts]
"""


def write(
    folder: Path,
    *,
    recipe: str = RECIPE,
    worker: str = "",
    steps: int = 3,
    groups: int = 2,
    num_engines: int = 1,
    rollout: str = "",
    top: str = "",
) -> Path:
    """Write a job of one trainer rank that answers in eight tokens."""
    (folder / "recipe.py").write_text(recipe)
    if worker:
        (folder / "worker.py").write_text(worker)
        rollout += f'\nworker_script = "{folder}/worker.py"'
    engines = "".join(
        f'[[engines]]\nname = "engine-{n}"\nmodel = "{EXAMPLE}/model.json"\n'
        'arguments = ["--max-positions", "32"]\n'
        for n in range(num_engines)
    )
    path = folder / "job.toml"
    path.write_text(f"""
steps = {steps}
output_dir = "{folder}/out"
transport = "cma"
{top}
[environment]
OMP_NUM_THREADS = "1"
HF_HUB_OFFLINE = "1"
[scheduler]
kind = "local"
[recipe]
file = "{folder}/recipe.py"
name = "R"
[trainer]
script = "{EXAMPLE}/trainer.py"
arguments = ["{EXAMPLE}/model.json"]
world_size = 1
{engines}
[rollout]
groups_per_step = {groups}
samples_per_group = 2
max_staleness = 1
sampling = {{ max_new_tokens = 8, ignore_eos = true }}
{rollout}
[update]
mode = "in_place"
backend = {{ type = "p2p" }}
""")
    return path


class Job:
    """A running job and the lines that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    @property
    def text(self) -> str:
        """All that the job has printed so far."""
        return "".join(self.lines)

    def read_until(self, part: str) -> str:
        """Return the next line with this part."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if part in line:
                return line
        raise AssertionError(f"no line with {part!r}: {self.text}")

    def end(self) -> int:
        """Return the status of the job once it has ended."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout
        return self.process.wait(DEADLINE_S)

    def children(self, part: str) -> list[int]:
        """Return child processes whose command line contains this part."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if int(parent) == self.process.pid and part.encode() in words:
                    found.append(int(entry.name))
        return found


@contextmanager
def launched(config: Path) -> Iterator[Job]:
    process = subprocess.Popen(
        (sys.executable, "-m", "windlass.cli.main", "launch", str(config)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = subprocess.Popen(("sleep", str(DEADLINE_S)))
    job = Job(process)
    try:
        yield job
    finally:
        timer.kill()
        timer.wait()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize(
    ("num_engines", "groups"),
    [(1, 16), pytest.param(2, 4, marks=pytest.mark.long)],
    ids=["one", "two_together"],
)
def test_engines_that_die_while_the_trainer_waits_get_its_version_again(
    tmp_path: Path, num_engines: int, groups: int
) -> None:
    config = write(
        tmp_path,
        groups=groups,
        num_engines=num_engines,
        rollout="batch_deadline_s = 40.0",
        top="shutdown_s = 5.0",
    )
    with launched(config) as job:
        job.read_until("step 1:")
        for number in range(num_engines):
            (pid,) = job.children(f"engine-{number}")
            os.kill(pid, signal.SIGKILL)
        assert job.end() == 0, job.text
    assert "no engine serves version 1" in job.text
    assert "done: 3 steps, version 3 published" in job.text
