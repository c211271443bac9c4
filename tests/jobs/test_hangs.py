"""Processes of a job that hang (SIGSTOP) are noticed and started again, or the job ends with the reason."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launched_jobs import EXAMPLE, launched, write


def write_short(folder: Path, *, max_silence_s: float, steps: int = 6, engine: str = "") -> Path:
    """Write a job of one engine and one worker, whose connections are tested every 4 s."""
    config = write(
        folder,
        steps=steps,
        groups=16,
        rollout="batch_deadline_s = 90.0\nworker_lease_s = 4.0\nworker_grace_s = 4.0",
        top=f"max_silence_s = {max_silence_s}\nshutdown_s = 5.0",
    )
    text = config.read_text()
    text = text.replace('mode = "in_place"', 'mode = "in_place"\nheartbeat_s = 4.0')
    config.write_text(text.replace("[[engines]]", f"[[engines]]\n{engine}", 1))
    return config


NAMES = ["engine-0", pytest.param("worker-0", marks=pytest.mark.long)]


@pytest.mark.parametrize("name", NAMES)
def test_process_that_hangs_is_started_again(tmp_path: Path, name: str) -> None:
    with launched(write_short(tmp_path, max_silence_s=8.0)) as job:
        job.read_until("step 1:")
        (pid,) = job.children(name)
        os.kill(pid, signal.SIGSTOP)
        noticed = job.read_until(f"{name} does not answer: ")
        assert "the job starts it again after max_silence_s=8" in noticed
        said = job.read_until(f"{name} did not answer within max_silence_s=8: ")
        assert "after 0 restarts; starting it again" in said
        assert job.end() == 0, job.text
    assert "done: 6 steps, version 6 published" in job.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.long
def test_process_that_hangs_without_restarts_ends_the_job(tmp_path: Path) -> None:
    config = write_short(tmp_path, max_silence_s=8.0, engine="max_restarts = 0")
    with launched(config) as job:
        job.read_until("step 1:")
        (pid,) = job.children("engine-0")
        os.kill(pid, signal.SIGSTOP)
        assert job.end() == 2, job.text
    assert "engine-0 did not answer within max_silence_s=8: " in job.error, job.text


@pytest.mark.parametrize("name", NAMES)
def test_process_that_continues_in_time_is_not_started_again(tmp_path: Path, name: str) -> None:
    with launched(write_short(tmp_path, max_silence_s=24.0, steps=200)) as job:
        job.read_until("step 1:")
        (pid,) = job.children(name)
        os.kill(pid, signal.SIGSTOP)
        job.read_until(f"{name} does not answer: ")
        os.kill(pid, signal.SIGCONT)
        job.read_until(f"{name} answers again")
        assert job.children(name) == [pid]
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130, job.text
    assert "starting it again" not in job.text


@pytest.mark.long
def test_trainer_rank_that_hangs_is_started_again_after_the_deadline_of_a_step(
    tmp_path: Path,
) -> None:
    config = write_short(tmp_path, max_silence_s=60.0)
    text = config.read_text()
    config.write_text(text.replace("[trainer]", "[trainer]\nstep_deadline_s = 6.0\nsave_every = 1"))
    with launched(config) as job:
        job.read_until("step 1:")
        (pid,) = job.children(f"{EXAMPLE}/trainer.py")
        os.kill(pid, signal.SIGSTOP)
        said = job.read_until("no answer from trainer-0 within 6.0 s")
        assert "starting the ranks again, 1 of at most 3" in said
        assert job.end() == 0, job.text
    assert "done: 6 steps" in job.text
