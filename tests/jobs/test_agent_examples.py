"""The examples `tool_agent` and `frozen_lake` train on conversations, also if processes are killed during sessions."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_job import check_on_policy, launch, start, vllm_engine

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE_S = 600
pytestmark = [pytest.mark.rollouts, pytest.mark.timeout(1200)]

RECORDING = """
import json
from collections import Counter
import {module}

class Recording({module}.{recipe}):
    async def before_step(self, step, samples):
        for sample in samples:
            own = list(zip(sample.loss_mask, sample.versions, sample.logprobs, strict=True))
            assert all((version >= 0) == mask for mask, version, _ in own), sample
            assert all(mask or logprob == 0.0 for mask, _, logprob in own), sample
            assert all(logprob <= 0.0 for _, _, logprob in own), sample
        counts = Counter(sample.task_id for sample in samples)
        print("TRAIN", json.dumps({{
            "step": step,
            "tasks": sorted(counts),
            "most": max(counts.values()),
            "versions": sorted({{v for s in samples for v in s.versions if v >= 0}}),
            "turns": sum(
                now and not before
                for s in samples
                for before, now in zip((False, *s.loss_mask), s.loss_mask)
            ) / len(samples),
        }}), flush=True)
"""


class Example:
    """One of the examples, with its tiny model."""

    def __init__(self, name: str, recipe: str, needs: str, folder: Path) -> None:
        if importlib.util.find_spec(needs) is None:
            pytest.skip(f"{needs} is not installed: pip install '.[examples]'")
        self.name, self.recipe, self.folder = name, recipe, EXAMPLES / name
        self.model = folder / name
        command = (sys.executable, str(self.folder / f"{name}.py"), str(self.model))
        subprocess.run(command, check=True, timeout=DEADLINE_S)

    def job(self, folder: Path, *changes: tuple[str, str]) -> Path:
        """Write the example's job with the model's folder, and a recipe that checks and prints all samples."""
        text = (self.folder / f"{self.name}.toml").read_text()
        dashed = self.name.replace("_", "-")
        file = f"{{here}}/{self.name}.py"
        replaced = (
            (f"build/{dashed}", str(self.model)),
            (f'"{dashed}-output"', f'"{folder}/out"'),
            (f'file = "{file}"', f'file = "{folder}/recording.py"'),
            (f'worker_script = "{file}"', f'worker_script = "{self.folder}/{self.name}.py"'),
            (f'name = "{self.recipe}"', 'name = "Recording"'),
            *changes,
        )
        for old, new in replaced:
            assert old in text, old
            text = text.replace(old, new)
        recording = RECORDING.format(module=self.name, recipe=self.recipe)
        (folder / "recording.py").write_text(
            f"import sys\nsys.path.append({str(self.folder)!r})\n{recording}"
        )
        path = folder / "job.toml"
        path.write_text(text)
        return path


@pytest.fixture(scope="module")
def tool_agent(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example("tool_agent", "ToolAgent", "openai", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def frozen_lake(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example("frozen_lake", "FrozenLake", "gymnasium", tmp_path_factory.mktemp("models"))


def trained(printed: str) -> list[dict[str, object]]:
    """Return what the recipe printed about the samples of each step."""
    return [json.loads(line) for line in re.findall(r"^TRAIN (.*)$", printed, re.MULTILINE)]


def rewards(folder: Path) -> list[float]:
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("name", ["tool_agent", "frozen_lake"])
def test_an_example_is_one_short_file_and_one_job(name: str) -> None:
    files = {file.name: file for file in (EXAMPLES / name).iterdir() if file.is_file()}
    assert sorted(files) == [f"{name}.py", f"{name}.toml"]
    assert len(files[f"{name}.py"].read_text().splitlines()) <= 120
    assert tomllib.loads(files[f"{name}.toml"].read_text())["steps"] == 24


def test_the_environment_of_others_learns(tmp_path: Path, frozen_lake: Example) -> None:
    """Each episode is one sample of several turns, and the mean reward of the environment rises."""
    status, printed = launch(frozen_lake.job(tmp_path), deadline_s=DEADLINE_S)
    assert status == 0, printed
    steps = trained(printed)
    assert [step["step"] for step in steps] == [*range(24)]
    assert {step["most"] for step in steps} == {1}
    assert all(float(str(step["turns"])) > 1.5 for step in steps)
    found = rewards(tmp_path)
    assert mean(found[-4:]) > mean(found[:2]) + 0.3, found


def test_the_tool_agent_learns_although_workers_and_engines_are_killed(
    tmp_path: Path, tool_agent: Example
) -> None:
    """SIGKILL ends the worker, then the engine, and then the controller, each while sessions run."""
    job = tool_agent.job(
        tmp_path, ("steps = 24", "steps = 14"), ("save_every = 12", "save_every = 4")
    )
    first = ""
    with start(job) as (process, output):
        for line in output:
            first += line
            if line.startswith("step 2:"):
                kill_child(process.pid, f"{tool_agent.name}.py --controller")
            if line.startswith("step 4:"):
                kill_child(process.pid, "windlass.engines.embedded")
            if line.startswith("step 7:"):
                os.kill(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL, first
    status, second = launch(job, deadline_s=DEADLINE_S)
    assert status == 0, second
    assert "checkpoints/4, after 4 steps" in second
    for printed in (first, second):
        steps = trained(printed)
        tasks = [task for step in steps for task in step["tasks"]]  # type: ignore[attr-defined]
        assert len(tasks) == len({*tasks}) == 48 * len(steps), "a rollout is trained once"
        for step in steps:
            assert step["most"] == 1
            versions = step["versions"]
            assert isinstance(versions, list)
            assert max(versions) <= int(str(step["step"])) + 2
    assert [step["step"] for step in trained(second)] == [*range(4, 14)]
    found = rewards(tmp_path)
    assert mean(found[-3:]) > mean(found[:2]) + 0.1, found


def kill_child(controller: int, wanted: str) -> None:
    """Kill the process below the job's controller whose command contains `wanted`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if wanted in command and parent == controller:
            found.append(int(folder.name))
    assert len(found) == 1, (wanted, found)
    os.kill(found[0], signal.SIGKILL)


def test_the_tool_agent_trains_with_a_live_vllm(tmp_path: Path, tool_agent: Example) -> None:
    engine = vllm_engine(tmp_path, max_model_len=256)
    changes = (
        ('arguments = ["--max-positions", "256"]', engine),
        ("steps = 24", "steps = 3"),
        ("every = 12", "every = 3"),
    )
    status, printed = launch(tool_agent.job(tmp_path, *changes), deadline_s=DEADLINE_S)
    assert status == 0, printed
    check_on_policy(tmp_path)
    assert {step["most"] for step in trained(printed)} == {1}
