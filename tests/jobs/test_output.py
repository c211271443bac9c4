"""Checkpoints in the output folder of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass.jobs.config import CHECKPOINT_RECORD, Checkpoint
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


def test_a_record_is_on_disk_before_older_checkpoints_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after a power cut, the only checkpoint that was left could have an empty record."""
    synced, sync = list[int](), os.fsync

    def note(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        sync(file)

    monkeypatch.setattr(os, "fsync", note)
    output = OutputFolder(tmp_path)
    save(output, 2)
    record = output.checkpoint_folder(2) / CHECKPOINT_RECORD
    assert synced == [record.stat().st_ino, record.parent.stat().st_ino]
    assert [checkpoint.steps for _, checkpoint in output.checkpoints()] == [2]
