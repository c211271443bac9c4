"""One suite for all schedulers: real subprocesses, a real Slurm cluster, a real Ray cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slurm_cluster import missing_reason, slurm_cluster

from tools.entry_points import write_entry_points
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable
from windlass.jobs.schedulers.base import PluginSchedulerConfig, ProcessSpec, Scheduler
from windlass.jobs.schedulers.configs import KnownScheduler, create_scheduler
from windlass.jobs.schedulers.local import LocalBackend, LocalScheduler
from windlass.jobs.schedulers.ray import RaySchedulerConfig
from windlass.jobs.schedulers.slurm import SlurmSchedulerConfig

PLUGIN = Path(__file__).parents[2] / "examples" / "plugins" / "scheduler"
"""A distribution of another package with a scheduler."""
NO_SLURM = missing_reason()
NO_RAY = "" if importlib.util.find_spec("ray") else "ray is not installed"
SLURM = [pytest.mark.cluster, pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)]
RAY = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(NO_RAY), reason=NO_RAY),
    # Ray does not close its own sockets and files.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LOCAL_AND_SLURM = ("local", pytest.param("slurm", marks=SLURM))
KINDS = (*LOCAL_AND_SLURM, "plugin", pytest.param("ray", marks=RAY))
KILLED = (*LOCAL_AND_SLURM, pytest.param("ray", marks=RAY))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "plugin":
        site = write_entry_points(tmp_path_factory.mktemp("site"), PLUGIN)
        with pytest.MonkeyPatch.context() as m:
            m.setattr(sys, "path", [*sys.path, str(site), str(PLUGIN)])
            yield request.param
        return
    if request.param != "slurm":
        yield request.param
        return
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as conf, pytest.MonkeyPatch.context() as m:
        m.setenv("SLURM_CONF", str(conf))
        yield request.param


@asynccontextmanager
async def opened(kind: str, log_dir: Path) -> AsyncIterator[Scheduler]:
    environment = {"FROM_THE_SCHEDULER": "yes"}
    configs: dict[str, KnownScheduler] = {
        "slurm": SlurmSchedulerConfig(host="127.0.0.1"),
        "ray": RaySchedulerConfig(num_cpus=4),
        "plugin": PluginSchedulerConfig("slots", {"num_cpus": 4}),
    }
    if kind == "local":
        async with LocalScheduler(log_dir, environment) as local:
            yield local
    else:
        async with create_scheduler(configs[kind], log_dir, environment) as scheduler:
            yield scheduler


def python(name: str, code: str, **environment: str) -> ProcessSpec:
    return ProcessSpec(
        name=name, command=(sys.executable, "-u", "-c", code), environment=environment
    )


STAY = "import sys, signal; print('up', flush=True); signal.pause()"


async def test_a_process_is_created_watched_signalled_listed_and_deleted(
    kind: str, tmp_path: Path
) -> None:
    async with opened(kind, tmp_path) as scheduler:
        say = (
            "import os; print(os.environ['FROM_THE_SCHEDULER'], os.environ['OWN'], 'x y'); exit(3)"
        )
        await scheduler.start(python("says", say, OWN="a b"))
        assert (await scheduler.wait("says")).returncode == 3
        # srun writes the end of a task into the same log, perhaps before this line.
        assert "yes a b x y" in (await scheduler.log_tail("says")).splitlines()
        with pytest.raises(
            PeerUnreachable, match=r"ended with exit status 3; its log ends:\n(.*\n)*yes a b x y"
        ):
            await scheduler.wait_healthy("says", deadline_s=10)

        fifo = tmp_path / "pids"
        os.mkfifo(fifo)
        fork = (
            "import os, pathlib, signal, subprocess, sys; "
            "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']); "
            f"pathlib.Path({str(fifo)!r}).write_text(f'{{os.getpid()}} {{child.pid}}\\n'); "
            "signal.pause()"
        )
        await scheduler.start(python("stays", fork))
        status = await scheduler.wait_healthy("stays", deadline_s=60)
        assert status.returncode is None
        assert status.pid > 0
        with pytest.raises(ConfigError, match="'stays' is queued or runs"):
            await scheduler.start(python("stays", STAY))
        await scheduler.start(
            ProcessSpec(name="beside", command=(sys.executable, "-c", STAY), colocate_with="stays")
        )
        await scheduler.wait_healthy("beside", deadline_s=60)
        assert [s.name for s in scheduler.list()] == ["says", "stays", "beside"]
        handles = await pidfds(fifo)
        await scheduler.signal("stays", signal.SIGKILL)
        assert (await asyncio.wait_for(scheduler.wait("stays"), 10)).returncode == -signal.SIGKILL
        assert scheduler.status("beside").returncode is None
        await scheduler.delete("beside")
        await scheduler.delete("says")
        assert [s.name for s in scheduler.list()] == ["stays"]
        with pytest.raises(ConfigError, match="no process named 'says'"):
            scheduler.status("says")
    assert_dead(handles)


async def test_a_process_has_the_niceness_of_its_starter(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as scheduler:
        await scheduler.start(python("says", "import os; print('niceness', os.nice(0))"))
        assert (await scheduler.wait("says")).returncode == 0
        assert f"niceness {os.nice(0)}" in (await scheduler.log_tail("says")).splitlines()


async def test_a_wait_ends_with_its_process_although_the_name_is_used_again(
    tmp_path: Path,
) -> None:
    async with LocalScheduler(tmp_path) as scheduler:
        await scheduler.start(python("again", STAY))

        async def keep() -> None:
            await scheduler.wait("again")
            await scheduler.start(python("again", STAY))

        kept = asyncio.create_task(keep())
        # `keep` waits first, so it continues first.
        await asyncio.sleep(0)
        waited = asyncio.create_task(scheduler.wait("again"))
        await asyncio.sleep(0)
        first = scheduler.status("again").pid
        await scheduler.signal("again", signal.SIGKILL)
        ended = await asyncio.wait_for(waited, 10)
        assert (ended.pid, ended.returncode) == (first, -signal.SIGKILL)
        await asyncio.wait_for(kept, 10)
        assert scheduler.status("again").returncode is None


async def test_a_shared_reservation_survives_a_failed_start(
    tmp_path: Path,
) -> None:
    async with LocalScheduler(tmp_path) as scheduler:
        await scheduler.start(python("first", STAY))
        beside = ProcessSpec(
            name="beside", command=(sys.executable, "-c", STAY), colocate_with="first"
        )
        await scheduler.start(beside)
        await scheduler.delete("first")
        with pytest.raises(ConfigError, match=r"cannot start '/no/such/program'"):
            await scheduler.start(ProcessSpec(name="first", command=("/no/such/program",)))
        await asyncio.sleep(0.2)
        assert scheduler.status("beside").returncode is None
        assert [status.name for status in scheduler.list()] == ["beside"]


async def test_a_stuck_reservation_does_not_shorten_the_grace_of_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = LocalBackend.release

    async def fail_for_one(backend: LocalBackend, reservation: str) -> None:
        await release(backend, reservation)
        if reservation == "stuck":
            raise PeerTimeout("scancel: no answer")

    monkeypatch.setattr(LocalBackend, "release", fail_for_one)
    saved = tmp_path / "saved"
    ends = (
        "import signal, time, pathlib; signal.signal(signal.SIGTERM, lambda *_: None); "
        "print('up', flush=True); signal.pause(); time.sleep(1); "
        f"pathlib.Path({str(saved)!r}).touch()"
    )
    scheduler = LocalScheduler(tmp_path)
    await scheduler.open()
    await scheduler.start(python("stuck", "pass"))
    await scheduler.start(python("saves", ends))
    await scheduler.wait("stuck")
    async with asyncio.timeout(15):
        while "up" not in await scheduler.log_tail("saves"):  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.05)
    with pytest.raises(PeerTimeout, match="scancel"):
        await scheduler.close(grace_s=10)
    assert saved.exists()


async def line_of(fifo: Path, deadline_s: float = 60) -> str:
    """Return the first line that a process writes into a fifo.

    A thread that opens a fifo without a writer would wait for ever, and the event loop could not be closed.
    """
    # Without O_RDWR, the read would end before the first writer opens the fifo.
    file = os.fdopen(os.open(fifo, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), file
    )
    try:
        async with asyncio.timeout(deadline_s):
            return (await reader.readline()).decode()
    finally:
        pipe.close()


async def pidfds(fifo: Path) -> list[int]:
    """Return handles of the processes in a fifo; unlike ids, handles are never reused."""
    return [os.pidfd_open(int(word)) for word in (await line_of(fifo)).split()]


def assert_dead(handles: list[int], deadline_s: float = 10.0) -> None:
    for handle in handles:
        ended, _, _ = select.select([handle], [], [], deadline_s)
        os.close(handle)
        assert ended, "a process outlived its scheduler"


async def test_a_process_that_does_not_fit_is_queued_until_its_deadline(
    kind: str, tmp_path: Path
) -> None:
    if kind == "local":
        pytest.skip("nothing is queued on this machine")
    num_cpus = 8 if kind == "slurm" else 4
    async with opened(kind, tmp_path) as scheduler:
        large = ProcessSpec(name="large", command=(sys.executable, "-c", STAY), num_cpus=num_cpus)
        await scheduler.start(large)
        await scheduler.wait_healthy("large", deadline_s=60)
        await scheduler.start(python("queued", STAY))
        with pytest.raises(PeerTimeout, match="queued is still queued"):
            await scheduler.wait_healthy("queued", deadline_s=0.5)
        await scheduler.delete("large")
        assert (await scheduler.wait_healthy("queued", deadline_s=60)).returncode is None


async def test_close_ends_a_process_that_ignores_sigterm_and_its_children(
    kind: str, tmp_path: Path
) -> None:
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    script = f"trap '' TERM; sleep 1000 & echo $$ $! > {shlex.quote(str(fifo))}; wait; wait"
    async with opened(kind, tmp_path / "logs") as scheduler:
        await scheduler.start(ProcessSpec(name="deaf", command=("/bin/sh", "-c", script)))
        handles = await pidfds(fifo)
        await scheduler.close(grace_s=0.3)
    assert_dead(handles)


OWNER = """
import asyncio, sys
from pathlib import Path
from windlass.jobs.schedulers.base import ProcessSpec
from windlass.jobs.schedulers.configs import *

CONFIGS = {
    "local": LocalSchedulerConfig(),
    "slurm": SlurmSchedulerConfig(host="127.0.0.1"),
    "ray": RaySchedulerConfig(num_cpus=4),
}

async def main(kind, log_dir, script):
    async with create_scheduler(CONFIGS[kind], Path(log_dir), {}) as scheduler:
        await scheduler.start(ProcessSpec(name="deaf", command=("/bin/sh", "-c", script)))
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", KILLED, indirect=True)
async def test_processes_end_when_their_owner_is_killed(kind: str, tmp_path: Path) -> None:
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    script = f"trap '' TERM HUP; sleep 1000 & echo $$ $! > {shlex.quote(str(fifo))}; wait; wait"
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, kind, str(tmp_path / "logs"), script)
    )
    try:
        handles = await pidfds(fifo)
    finally:
        owner.kill()
        await owner.wait()
    assert_dead(handles, deadline_s=30)


async def test_deleted_logs_fail_no_process_of_this_host(tmp_path: Path) -> None:
    """Regression: the error for a log that cannot be opened was empty, and a deleted log hid the end of its process."""
    logs = tmp_path / "logs"
    async with LocalScheduler(logs) as scheduler:
        await scheduler.start(ProcessSpec(name="first", command=("true",)))
        shutil.rmtree(logs)
        await scheduler.wait("first")
        assert "the log cannot be read: " in await scheduler.log_tail("first")
        await scheduler.start(ProcessSpec(name="second", command=("echo", "here")))
        await scheduler.wait("second")
        assert await scheduler.log_tail("second") == "here\n"
        with pytest.raises(ConfigError, match=r"cannot write the log .*File name too long"):
            await scheduler.start(ProcessSpec(name="n" * 300, command=("true",)))


async def test_a_process_that_reuses_a_pid_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a long job, the kernel may have reused the number of a process that ended hours ago."""
    other = subprocess.Popen((sys.executable, "-c", STAY), start_new_session=True)  # noqa: ASYNC220
    start = asyncio.create_subprocess_exec

    async def start_with_that_pid(*command: str, **options: Any) -> SimpleNamespace:
        process = await start(*command, **options)
        returncode = await process.wait()
        return SimpleNamespace(pid=other.pid, returncode=returncode, wait=process.wait)

    try:
        async with LocalScheduler(tmp_path) as scheduler:
            with monkeypatch.context() as patch:
                patch.setattr(asyncio, "create_subprocess_exec", start_with_that_pid)
                await scheduler.start(python("short", "pass"))
            assert (await scheduler.wait("short")).returncode == 0
            await scheduler.delete("short")
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
    finally:
        other.kill()
        other.wait()


def sees_gpus(num_gpus: int, name: str, *, beside: str = "") -> ProcessSpec:
    """Return a process that prints its visible GPUs and runs until SIGTERM."""
    code = (
        "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(0));"
        "os.write(1, os.environ.get('CUDA_VISIBLE_DEVICES', 'unset').encode());"
        "print(file=open(os.environ['FIFO'], 'w'), flush=True); signal.pause()"
    )
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-c", code),
        num_gpus=num_gpus,
        colocate_with=beside,
    )


async def test_processes_of_this_host_see_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The owner of a container may have set the variable like this.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5e1f,7")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    seen = {}
    async with LocalScheduler(tmp_path, {"FIFO": str(fifo)}) as scheduler:
        for spec in (
            sees_gpus(2, "trainer-0"),
            sees_gpus(1, "engine-a"),
            sees_gpus(0, "worker-0"),
            sees_gpus(0, "engine-b", beside="trainer-0"),
        ):
            await scheduler.start(spec)
            # The process has printed when it writes into the fifo.
            await line_of(fifo)
            seen[spec.name] = await scheduler.log_tail(spec.name)
        full = r"'engine-c': num_gpus must be at most 0, the number of free GPUs on this host, got 1; reserved: GPU 3 \(trainer-0\)"
        with pytest.raises(ConfigError, match=full):
            await scheduler.start(sees_gpus(1, "engine-c"))
        await scheduler.delete("engine-a")
        missing = ProcessSpec(name="missing", command=("/no/such/program",), num_gpus=1)
        with pytest.raises(ConfigError, match=r"cannot start '/no/such/program'"):
            await scheduler.start(missing)
        # The deleted process and the failed start have released their GPU.
        await scheduler.start(sees_gpus(1, "engine-c"))
        await line_of(fifo)
        # The rank starts again in its reservation, which the colocated engine has kept.
        await scheduler.delete("trainer-0")
        await scheduler.start(sees_gpus(2, "trainer-0"))
        assert scheduler.status("engine-b").returncode is None
        await line_of(fifo)
        assert (await scheduler.log_tail("trainer-0")).endswith("3,GPU-5e1f" * 2)
    assert seen == {
        "trainer-0": "3,GPU-5e1f",
        "engine-a": "7",
        "worker-0": "3,GPU-5e1f,7",
        "engine-b": "3,GPU-5e1f",
    }
