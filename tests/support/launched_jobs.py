"""Jobs of one trainer rank that run as a process, whose lines a test reads while they run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["EXAMPLE", "RECIPE", "Job", "launched", "write"]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "launch"
DEADLINE_S = 100
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
    """Write a job with one trainer rank and answers of eight tokens."""
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
        """The whole output of the job until now."""
        return "".join(self.lines)

    @property
    def error(self) -> str:
        """The line with the reason of the job's failure."""
        return next(line for line in self.lines if line.startswith("windlass launch: "))

    def read_until(self, part: str) -> str:
        """Return the next line with this part."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if part in line:
                return line
        raise AssertionError(f"no line with {part!r}: {self.text}")

    def end(self) -> int:
        """Wait for the job's end and return its exit status."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout
        return self.process.wait(DEADLINE_S)

    def children(self, part: str) -> list[int]:
        """Return the child processes that have this word in their command line."""
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
    job = Job(process)
    try:
        yield job
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
