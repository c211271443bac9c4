"""The arithmetic of a speed-of-light report, and the runner of benchmarks."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.control.report import RoundOutcome, UpdateReport
from windlass.errors import ConfigError
from windlass.observability.speed_of_light import SpeedOfLight

ROOT = Path(__file__).parents[2]


def report(ceiling_gbps: float = 100.0, num_links: int = 2) -> SpeedOfLight:
    update = UpdateReport(
        version=3,
        outcome=RoundOutcome.PUBLISHED,
        measures={"nbytes": 20_000_000_000, "wire_s": 0.125, "update_s": 0.2, "pause_s": 0.05},
        phase_s={"write": 0.13, "verify": 0.02},
    )
    return SpeedOfLight(update, ceiling_gbps, num_links)


def test_the_limit_is_the_bytes_over_all_links_at_their_ceiling() -> None:
    made = report()
    assert made.limit_s == pytest.approx(0.1)
    assert made.wire_fraction == pytest.approx(0.8)
    assert made.update_fraction == pytest.approx(0.5)
    assert made.achieved_gbps == pytest.approx(80.0)


def test_the_stages_add_up_to_the_update() -> None:
    name, seconds = report().stages[-1]
    assert (name, round(seconds, 9)) == ("other", 0.05)
    assert sum(seconds for _, seconds in report().stages) == pytest.approx(0.2)
    assert "other" in report().text()


@pytest.mark.parametrize(("ceiling_gbps", "num_links"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_a_ceiling_and_links_must_be_positive(ceiling_gbps: float, num_links: int) -> None:
    with pytest.raises(ConfigError, match=r"speed_of_light: (ceiling_gbps|num_links) must be"):
        report(ceiling_gbps, num_links)


SCRIPT = """import sys
open(sys.argv[2], "w").write("[{}, {}]")
"""


def runner_in(scripts: Path) -> tuple[str, ...]:
    """Return the command of a copied runner, in a folder for other benchmarks."""
    scripts.mkdir()
    runner = str(shutil.copy(ROOT / "benchmarks/run.py", scripts))
    return sys.executable, runner, "--out", str(scripts.parent / "out")


def test_the_runner_runs_the_named_suites_and_reports_failures(tmp_path: Path) -> None:
    runner = runner_in(tmp_path / "scripts")
    (tmp_path / "scripts/bench_control.py").write_text(SCRIPT)
    (tmp_path / "scripts/bench_xccl.py").write_text("raise SystemExit(3)")
    assert subprocess.run([*runner, "control"], timeout=60).returncode == 0
    assert (tmp_path / "out/bench_control.json").read_text() == "[{}, {}]"
    both = subprocess.run(
        [*runner, "control", "xccl"], timeout=60, stdout=subprocess.PIPE, text=True
    )
    assert both.returncode == 1
    assert "failed with 3" in both.stdout


def test_the_runner_refuses_an_unknown_suite(tmp_path: Path) -> None:
    done = subprocess.run(
        [*runner_in(tmp_path / "scripts"), "speed"], timeout=60, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 2
    assert "suite must be one of" in done.stderr


LEAVING_A_CHILD = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
with open("{fifo}", "w") as told:
    told.write(str(child.pid))
signal.pause()
"""
LEAVING_A_SERVER = """
import subprocess, sys
launcher = '''
import os, signal, subprocess, sys
ended = [signal.SIGINT, signal.SIGTERM]
signal.pthread_sigmask(signal.SIG_BLOCK, ended)
command = [sys.executable, "-c", "import signal; signal.pause()"]
server = subprocess.Popen(command, start_new_session=True)
with open("{fifo}", "w") as told:
    told.write(str(server.pid))
signal.sigwait(ended)
server.kill()
'''
subprocess.Popen([sys.executable, "-c", launcher]).wait()
"""


@pytest.mark.parametrize("script", [LEAVING_A_CHILD, LEAVING_A_SERVER])
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_and_its_processes_end_with_the_runner(
    by: signal.Signals, script: str, tmp_path: Path
) -> None:
    """This includes an engine's server, which its launcher starts in a separate session."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    runner = runner_in(tmp_path / "scripts")
    (tmp_path / "scripts/bench_planner.py").write_text(script.format(fifo=fifo))
    bench = subprocess.Popen([*runner, "planner"])
    child = os.pidfd_open(int(fifo.read_text()))
    try:
        bench.send_signal(by)
        assert bench.wait(30) == 128 + by
        assert select.select([child], [], [], 10.0)[0], "the child still runs"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        bench.kill()
