"""What a machine does to processes of a fleet: clocks that jump, memory, descriptors and disks that run out."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from weight_fleet import TOKEN, Fleet, running_fleet

import windlass
from windlass.config import ControlConfig, PhaseDeadlines

SUPPORT = Path(__file__).parents[1] / "support"
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
CGROUPS = Path("/sys/fs/cgroup/memory")
CONFIG = ControlConfig(deadlines=PhaseDeadlines(connect_s=20, fleet_s=20))
DAY_S = 86400
OFFSETS = ("+0", "+1d", "-2d", "+3650d", "+0")


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
def test_versions_are_published_while_the_clock_of_the_day_jumps(tmp_path: Path) -> None:
    """Back and forth, by days and by years, for controller, trainers and engine; heartbeats go on."""
    clock = tmp_path / "clock"
    clock.write_text("+0")
    environment = {
        **os.environ,
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    ended = subprocess.run(
        [sys.executable, str(SUPPORT / "clock_fleet.py"), str(clock)],
        env=environment,
        input="".join(f"{offset}\n" for offset in OFFSETS),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(lines) == len(OFFSETS), ended.stderr[-3000:]
    today = time.time() // DAY_S
    for version, (offset, line) in enumerate(zip(OFFSETS, lines, strict=True)):
        assert abs(line["day"] - today - int(offset.rstrip("d"))) <= 1, "the clock was not set"
        assert line["outcome"] == "published"
        assert line["held"] == [[version, str(version), False]]


@contextmanager
def no_memory_left(pid: int) -> Iterator[None]:
    """Whatever page that process touches next is one too many: the kernel kills it."""
    group = CGROUPS / f"windlass-test-{pid}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("65536")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield
    finally:
        with suppress(OSError):  # a process in it ends a little later than it is dead
            group.rmdir()


@pytest.mark.timeout(120)
async def test_an_engine_that_the_kernel_kills_for_memory_costs_itself_alone() -> None:
    async with running_fleet(CONFIG, 1) as fleet:
        for name in ("a", "b"):
            fleet.add_engine(name)
        fleet.add_trainers()
        await fleet.ready()
        assert (await fleet.publish(0)).outcome == "published"
        (victim,) = fleet.engines["b"]
        assert victim.process.pid is not None
        with no_memory_left(victim.process.pid):
            version = 0
            while victim.process.is_alive() and version < 20:
                version += 1
                assert (await fleet.publish(version)).outcome == "published"
                assert await fleet.held("a") == [(version, str(version), False)]
            victim.process.join(30)
        assert victim.process.exitcode == -signal.SIGKILL
        fleet.add_engine("b")
        assert await fleet.engines["b"][0].read() == "ready"
        version += 1
        assert (await fleet.publish(version)).outcome == "published"
        victim.close()


@contextmanager
def no_descriptors_left(pid: int) -> Iterator[None]:
    """That process can open none more."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    num_open = max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("who", ["engine", "trainer"])
async def test_a_rank_without_descriptors_is_updated_or_says_so_and_recovers(who: str) -> None:
    """A trainer cannot look whether its peer lives: nothing was written, so nobody is quarantined."""
    async with running_fleet(CONFIG, 1) as fleet:
        fleet.add_engine("a")
        fleet.add_trainers()
        await fleet.ready()
        assert (await fleet.publish(0)).outcome == "published"
        (rank,) = fleet.trainers if who == "trainer" else fleet.engines["a"]
        assert rank.process.pid is not None
        with no_descriptors_left(rank.process.pid):
            outcome, reasons, _ = await fleet.publish(1)
        if who == "trainer":
            assert outcome == "RoundAborted"
            assert "Too many open files" in reasons[0]
        else:
            assert outcome == "published"
        assert (await fleet.publish(2)).outcome == "published"
        assert await fleet.held("a") == [(2, "2", False)]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """256 KiB of it."""
    mount = ("mount", "-t", "tmpfs", "-o", "size=256k", "windlass-test", str(folder))
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=True)


@pytest.mark.timeout(120)
async def test_a_disk_that_fills_up_costs_the_versions_that_it_cannot_record(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path) as disk:
        async with windlass.Controller(
            token=TOKEN, config=CONFIG, journal_path=disk / "journal"
        ) as controller:
            fleet = Fleet(controller.url, 1)
            try:
                fleet.add_engine("a")
                fleet.add_trainers()
                await fleet.ready()
                assert (await fleet.publish(0)).outcome == "published"
                ballast = disk / "ballast"
                with pytest.raises(OSError, match="No space left"):
                    ballast.write_bytes(bytes(1 << 20))
                version, outcome, reasons = 0, "published", [""]
                while outcome == "published" and version < 100:  # the last page has room for some
                    version += 1
                    outcome, reasons, _ = await fleet.publish(version)
                assert outcome == "RoundAborted"
                assert "No space left" in reasons[0]
                ballast.unlink()
                version += 1
                assert (await fleet.publish(version)).outcome == "published"
                assert await fleet.held("a") == [(version, str(version), False)]
            finally:
                fleet.close()
