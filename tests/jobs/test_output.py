"""Checkpoints in the output folder of a job."""

from __future__ import annotations

from pathlib import Path

from windlass.jobs.config import Checkpoint
from windlass.jobs.output import CHECKPOINTS, OutputFolder


def save(output: OutputFolder, steps: int) -> None:
    output.checkpoint_folder(steps).mkdir(parents=True)
    output.save_record(Checkpoint(steps=steps, version=steps))


def test_a_checkpoint_that_the_user_has_renamed_stays_and_does_not_count(tmp_path: Path) -> None:
    output = OutputFolder(tmp_path)
    for steps in (2, 4, 6, 8):
        save(output, steps)
    folder = tmp_path / CHECKPOINTS
    (folder / "6").rename(folder / "6-kept")
    output.prune(2)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6-kept", "8"]
