"""The arithmetic of a speed-of-light report, and the runner of benchmarks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.cli.main import main
from windlass.errors import ConfigError
from windlass.observability.speed_of_light import SpeedOfLight
from windlass.updates.report import RoundOutcome, UpdateReport


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


def test_bench_runs_what_the_machine_can_and_tells_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts, out = tmp_path / "benchmarks", tmp_path / "out"
    scripts.mkdir()
    (scripts / "harness.py").touch()
    (scripts / "bench_control.py").write_text(SCRIPT)
    (scripts / "bench_xccl.py").write_text("raise SystemExit(3)")
    options = ["--scripts", str(scripts), "--out", str(out)]
    assert main(["bench", "control", *options]) == 0
    assert (out / "bench_control.json").read_text() == "[{}, {}]"
    assert main(["bench", "control", "xccl", *options]) == 1
    assert "failed with 3" in capsys.readouterr().out


def test_bench_refuses_what_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "speed"]) == 2
    assert "suite must be one of" in capsys.readouterr().err
    assert main(["bench", "--scripts", str(tmp_path)]) == 2
    assert "--scripts must be" in capsys.readouterr().err


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
def test_a_benchmark_ends_with_the_command_and_so_does_what_it_started(
    by: signal.Signals, script: str, tmp_path: Path
) -> None:
    """Also an engine's server, which its launcher starts in a session of its own."""
    fifo, scripts = tmp_path / "fifo", tmp_path / "scripts"
    os.mkfifo(fifo)
    scripts.mkdir()
    (scripts / "harness.py").touch()
    (scripts / "bench_planner.py").write_text(script.format(fifo=fifo))
    options = ("--scripts", str(scripts), "--out", str(tmp_path / "out"))
    bench = subprocess.Popen(
        (sys.executable, "-m", "windlass.cli.main", "bench", "planner", *options)
    )
    child = os.pidfd_open(int(fifo.read_text()))
    try:
        bench.send_signal(by)
        assert bench.wait(30) == 128 + by
        assert select.select([child], [], [], 10.0)[0], "it goes on"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        bench.kill()
