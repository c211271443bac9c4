"""Output folder of a job, with checkpoints and metrics, and the check for files of an earlier run."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.files import replacing
from windlass.jobs.config import (
    CHECKPOINT_RECORD,
    Checkpoint,
    LaunchConfig,
    Resume,
    read_checkpoint,
)

_log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
METRICS, SUMMARY, REPORT = "metrics.jsonl", "summary.json", "report.html"
LOGS, TOKEN = "logs", "token"
EVALUATIONS = "evaluations.jsonl"
"""Name of a file in the output folder. The constants above are also names of files and folders in it."""
OF_A_RUN = (METRICS, SUMMARY)
"""Files that exist once a run has trained a step or ended."""


@final
class OutputFolder:
    """Output folder of a job.

    Attributes:
        path: absolute path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other jobs while the block runs. The kernel frees the lock if this process dies.

        If the file system cannot lock folders, log this and run the block without a lock.

        Raises:
            ConfigError: another running job uses this folder.
        """
        opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"output_dir must be a folder that no running job uses, got {str(self.path)!r}; wait until the "
                    "other job ends, or choose another folder"
                ) from error
            except OSError as error:
                # Some network file systems cannot lock folders.
                _log.info("%s is not locked against other jobs: %s", self.path, error)
            yield
        finally:
            os.close(opened)

    def checkpoints(self) -> list[tuple[Path, Checkpoint]]:
        """Return the finished checkpoints with their folders, oldest first. Leave out and log unreadable records."""
        found = []
        for record in (self.path / CHECKPOINTS).glob(f"*/{CHECKPOINT_RECORD}"):
            try:
                checkpoint = msgspec.json.decode(record.read_bytes(), type=Checkpoint)
            except (OSError, *DECODE_ERRORS) as error:
                _log.warning("%s is not used; its record cannot be read: %s", record.parent, error)
                continue
            found.append((record.parent, checkpoint))
        return sorted(found, key=lambda each: each[1].steps)

    def save_record(self, checkpoint: Checkpoint) -> Path:
        """Write the record that marks the folder of a checkpoint as finished, and return the folder.

        The caller must first have waited until all ranks have saved into the folder.
        """
        folder = self.checkpoint_folder(checkpoint.steps)
        # `prune` deletes older checkpoints next, so this record must survive a power cut.
        with replacing(folder / CHECKPOINT_RECORD, is_durable=True) as record:
            record.write(msgspec.json.encode(checkpoint))
        return folder

    def checkpoint_folder(self, steps: int) -> Path:
        """Return the folder of the checkpoint after `steps` steps, whether or not it exists."""
        return self.path / CHECKPOINTS / str(steps)

    def prune(self, keep: int) -> None:
        """Keep the newest `keep` finished checkpoints and delete all older checkpoint folders, also unfinished ones.

        With `keep` = 0, delete nothing. If the user has renamed a checkpoint, do not delete or count it.
        """
        finished = [folder for folder, _ in self.checkpoints() if folder.name.isdecimal()]
        if not keep or len(finished) <= keep:
            return
        oldest_kept = int(finished[-keep].name)
        for folder in (self.path / CHECKPOINTS).iterdir():
            if folder.name.isdecimal() and int(folder.name) < oldest_kept:
                # Delete the record first: a partly deleted folder must not count as a checkpoint.
                (folder / CHECKPOINT_RECORD).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def add_metrics(self, line: dict[str, Any], file_name: str = METRICS) -> None:
        """Append metrics to a file of JSON lines. If this fails, log the first failure and continue."""
        path = self.path / file_name
        try:
            with path.open("ab") as file:
                file.write(msgspec.json.encode({**line, "time": time.time()}) + b"\n")
        except OSError as error:
            if not self._warned:
                _log.warning("%s: metrics were not written: %s", path, error)
            self._warned = True


def find_start(config: LaunchConfig) -> tuple[Path, Checkpoint] | None:
    """Return the folder and record of the checkpoint from which a job starts; None to start without a checkpoint.

    With `resume = "auto"`, this is the newest checkpoint of the output folder, or `trainer.resume_from` if the folder
    has no checkpoint. Otherwise only `trainer.resume_from` counts.

    Raises:
        ConfigError: `resume_from` is not a finished checkpoint; or the output folder contains files of a run, `resume` is
            not "auto", and `resume_from` is not the newest checkpoint of this folder.
    """
    output = OutputFolder(Path(config.output_dir).resolve())
    found = output.checkpoints()
    resume_from = config.trainer.resume_from
    if config.resume is Resume.AUTO and found:
        return found[-1]
    named = (Path(resume_from).resolve(), read_checkpoint(resume_from)) if resume_from else None
    if config.resume is Resume.AUTO:
        return named
    if named is not None and found and named[0] == found[-1][0]:
        return named
    left = [f"{CHECKPOINTS}/{folder.name}" for folder, _ in found]
    left += [name for name in OF_A_RUN if (output.path / name).exists()]
    if left:
        raise ConfigError(
            f"output_dir must be a folder without another run, got {config.output_dir!r} with "
            f'{", ".join(left)}; set resume = "auto" to continue that run, or choose another folder'
        )
    return named
