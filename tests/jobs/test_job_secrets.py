"""Processes get only the token of their role, and their child processes get no token."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.envs import (
    control_token,
    environment_outside_jobs,
    inherited_environment,
    secret_value,
)
from windlass.jobs.launch import owner_token
from windlass.jobs.schedulers.base import ProcessSpec, Scheduler
from windlass.jobs.schedulers.configs import create_scheduler
from windlass.jobs.schedulers.local import LocalScheduler
from windlass.jobs.schedulers.ray import RaySchedulerConfig
from windlass.jobs.schedulers.slurm import SlurmSchedulerConfig
from windlass.net.access import Access, role_environment, role_token

SECRET = "of-the-owner-alone"
NAMES = ("WINDLASS_TOKEN", "WINDLASS_ENGINE_TOKEN")
SHOW = (
    "import os; from pathlib import Path; parent = Path('/proc', str(os.getppid()), 'environ'); "
    "print({k: v for k, v in sorted(os.environ.items()) if 'WINDLASS' in k and 'TOKEN' in k}, parent.read_bytes())"
)
NO_RAY = "" if importlib.util.find_spec("ray") else "ray is not installed"

TOOLS = {
    "scontrol": "exit 0",
    "squeue": "exit 0",
    "scancel": "exit 0",
    # This program runs the job's script with its arguments, as a node would.
    "sbatch": 'env >"$RECORDED/sbatch"; echo 7; while [ "${1#*slurm-lease.sh}" = "$1" ]; do shift; done; echo "$3 $4" >"$RECORDED/lease"; exec sh "$@"',
    "srun": 'env >"$RECORDED/srun"; while [ "$1" != "--" ]; do shift; done; shift; exec "$@"',
}


@pytest.fixture(autouse=True)
def owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the owner's token and the engines' token of this process to the owner's secret."""
    for name in NAMES:
        monkeypatch.setenv(name, SECRET)


async def shown(scheduler: Scheduler) -> str:
    """Return the output of an engine's process about its own variables and its parent's."""
    spec = ProcessSpec(
        name="engine",
        command=(sys.executable, "-c", SHOW),
        environment=role_environment(SECRET, Access.ENGINE),
    )
    await scheduler.start(spec)
    assert (await scheduler.wait("engine")).returncode == 0
    return await scheduler.log_tail("engine")


def check(said: str) -> None:
    assert str(dict(sorted(role_environment(SECRET, Access.ENGINE).items()))) in said
    assert SECRET not in said


def lease_address(recorded: Path) -> tuple[str, int]:
    host, port = (recorded / "lease").read_text().split()
    return host, int(port)


async def test_a_slurm_job_gets_only_the_token_of_its_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in TOOLS.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORDED", str(tmp_path))
    outer = {
        f"{name}7": "outer" for name in ("SLURM_CPU_BIND", "SRUN_DEBUG", "PMIX_RANK", "PMI_FD")
    }
    for name, value in {**outer, "SLURM_JOB_ID": "77", "SBATCH_PARTITION": "outer"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    config = SlurmSchedulerConfig(host="127.0.0.1")
    async with create_scheduler(config, tmp_path / "logs") as scheduler:
        check((await shown(scheduler)).partition(" b'")[0])
        script = (tmp_path / "logs" / "slurm-lease.sh").read_text()
        assert SECRET not in script
        for line in (b"0" * 32, b"\xff" * (1 << 17), b""):
            reader, writer = await asyncio.open_connection(*lease_address(tmp_path))
            writer.write(line + b"\n")
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()
    batch, step = ((tmp_path / name).read_text() for name in ("sbatch", "srun"))
    assert not any(name in batch for name in NAMES)
    assert SECRET not in batch + step
    assert f"WINDLASS_TOKEN={role_token(SECRET, Access.ENGINE)}\n" in step
    # sbatch and srun would read options from variables of the surrounding job.
    for seen in (batch, step):
        assert "SLURM_CONF=/etc/slurm/slurm.conf\n" in seen
        assert not [line for line in seen.splitlines() if line.endswith("=outer")]
        assert "SLURM_JOB_ID=" not in seen


async def test_a_local_process_gets_only_the_token_of_its_role(tmp_path: Path) -> None:
    async with LocalScheduler(tmp_path) as scheduler:
        check((await shown(scheduler)).partition(" b'")[0])
        await scheduler.start(ProcessSpec(name="none", command=(sys.executable, "-c", SHOW)))
        await scheduler.wait("none")
        assert (await scheduler.log_tail("none")).startswith("{} ")


@pytest.mark.skipif(bool(NO_RAY), reason=NO_RAY)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_ray_process_and_its_actor_get_only_the_token_of_its_role(tmp_path: Path) -> None:
    async with create_scheduler(RaySchedulerConfig(num_cpus=1), tmp_path) as scheduler:
        check(await shown(scheduler))


def test_a_token_is_removed_from_the_environment_after_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert control_token() == SECRET
    assert "WINDLASS_TOKEN" not in os.environ
    assert control_token() == SECRET
    assert not set(NAMES) & set(inherited_environment())
    assert inherited_environment(with_tokens=True)["WINDLASS_ENGINE_TOKEN"] == SECRET
    monkeypatch.setenv("WINDLASS_TOKEN", "another")
    assert secret_value("WINDLASS_TOKEN") == "another"


def test_a_process_hides_its_token_after_reading_it() -> None:
    program = (
        "import os, subprocess, sys\n"
        "from windlass.envs import control_token\n"
        f"assert control_token() == '{SECRET}'\n"
        "sys.stdout.flush(); subprocess.run(['cat', f'/proc/{os.getpid()}/environ', '/proc/self/environ'])"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, timeout=60, check=True
    )
    assert b"PATH=" in done.stdout
    assert b"WINDLASS_TOKEN=" + SECRET.encode() not in done.stdout
    engine_token = b"WINDLASS_ENGINE_TOKEN=" + SECRET.encode()
    # Nothing has read this variable yet.
    assert done.stdout.count(engine_token) == 2


async def test_workflows_of_a_worker_see_no_token(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys\n"
        "from windlass.rollout.worker import run_rollout_worker\n"
        "import windlass.rollout.worker as runner\n"
        "async def show(*_, **__):\n"
        "    print([name for name in os.environ if 'WINDLASS' in name and 'TOKEN' in name])\n"
        "    return True\n"
        "runner.run_worker = show\n"
        "sys.exit(run_rollout_worker({}, ['--controller', 'http://127.0.0.1:1', '--name', 'w']))\n"
    )
    worker = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await worker.communicate()
    assert (worker.returncode, said) == (0, b"[]\n")


def test_a_job_takes_its_token_from_the_file_that_other_commands_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("of-the-file\n")
    monkeypatch.setattr("windlass.envs.removed_secrets", {})
    monkeypatch.delenv("WINDLASS_TOKEN")
    made_up = {owner_token(), owner_token()}
    assert len(made_up) == 2
    monkeypatch.setenv("WINDLASS_TOKEN_FILE", str(tmp_path / "token"))
    assert owner_token() == control_token() == "of-the-file"
    monkeypatch.setenv("WINDLASS_TOKEN", "of-the-variable")
    assert owner_token() == "of-the-variable"


def test_a_user_keeps_defaults_of_slurm_outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_JOB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet,mask_cpu:0x3")
    monkeypatch.setenv("PMIX_RANK", "0")
    found = environment_outside_jobs()
    assert found["SBATCH_ACCOUNT"] == "mine"
    assert not {"SLURM_CPU_BIND", "PMIX_RANK"} & {*found}
