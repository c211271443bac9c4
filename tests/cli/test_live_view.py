"""Output of every command that draws, in a real terminal and without one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from screens import Terminal, on_screen, unwrapped
from trained import report, sample

import windlass

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples/launch"
WINDLASS = (sys.executable, "-m", "windlass.cli.main")
SIZES = [(80, 24), (140, 40)]
TOKEN = "a token of the tests"
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} controller (INFO|WARNING|ERROR) ")
CLEAN_END = ("ERROR", "connection broke", "is closed", " lost:", "Traceback")
"""Words that must not occur in the log of a job that ended well."""

NOISY = """
import logging, sys, threading, time
from rich.console import Console
from windlass.net.logs import configure_logging
from windlass.observability.live import LiveView

configure_logging("controller")
log, count = logging.getLogger("windlass.noise"), 0
long = "word " * 40

def make_noise(name):
    for n in range(20):
        log.info("%s says %d: %s", name, n, long)
        print(f"{name} prints {n}")
        time.sleep(0.01)

def draw():
    return f"frame {count}\\nsecond line of the frame"

console = Console(markup=False, highlight=False, stderr=sys.argv[1] == "stderr")
with LiveView(console, draw) as view:
    threads = [threading.Thread(target=make_noise, args=(f"thread {n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        count += 1
        view.refresh()
        time.sleep(0.005)
    log.info("the last line")
log.info("after the view")
print("the end")
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("size", SIZES)
def test_log_lines_of_many_threads_do_not_damage_a_live_view(
    size: tuple[int, int], stream: str
) -> None:
    status, terminal = on_screen((sys.executable, "-c", NOISY, stream), *size, cwd=REPOSITORY)
    lines = terminal.lines()
    assert status == 0, lines
    assert sum(line.startswith("frame ") for line in lines) == 1, lines
    assert lines.count("second line of the frame") == 1
    assert lines[-1] == "the end"
    assert "after the view" in lines[-2]
    text = unwrapped(lines)
    for name in ("thread 0", "thread 1", "thread 2"):
        for number in range(20):
            assert lines.count(f"{name} prints {number}") == 1
            assert text.count(f"INFO {name} says {number}: {('word ' * 40).strip()}") == 1
    assert_log_lines_are_whole(lines)


def test_a_live_view_is_not_drawn_where_other_output_may_damage_it() -> None:
    """A pipe may end in the same terminal, and requested colours do not make a file a terminal."""
    script = "import sys; exec(sys.argv.pop())"
    piped = (
        "bash", "-c", '"$0" -c "$1" stdout "$2" 2>&1 | cat; "$0" -c "$1" stderr "$2" | cat',
        sys.executable, script, NOISY,
    )  # fmt: skip
    status, terminal = on_screen(piped, 80, 24, cwd=REPOSITORY)
    assert status == 0
    assert not any(line.startswith("frame ") for line in terminal.lines())
    done = subprocess.run(
        (sys.executable, "-c", NOISY, "stdout"),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "FORCE_COLOR": "1"},
        timeout=60,
        check=True,
    )
    assert "frame " not in done.stdout
    assert "\x1b[" not in done.stdout + done.stderr
    status, terminal = on_screen(
        (sys.executable, "-c", NOISY, "stdout"),
        80,
        24,
        cwd=REPOSITORY,
        environment={"TERM": "dumb"},
    )
    assert status == 0
    assert not any(line.startswith("frame ") for line in terminal.lines())


def assert_log_lines_are_whole(lines: list[str]) -> None:
    """Check that log lines start at the start of a line, not after the rest of an old frame."""
    for line in lines:
        found = LOG_LINE.search(line)
        assert found is None or found.start() == 0, line


@pytest.mark.parametrize("size", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.long)])
def test_the_demo_leaves_one_frame_and_whole_lines(size: tuple[int, int], tmp_path: Path) -> None:
    middle: list[list[str]] = []
    loads: list[str] = []

    def look(terminal: Terminal, _process: subprocess.Popen[bytes]) -> None:
        shown = terminal.shown()
        loads.extend(
            line for line in shown if line.startswith("loading PyTorch and transformers: ")
        )
        if any(re.search(r"step [1-4]/5", line) for line in shown) and len(middle) < 10:
            middle.append(shown)

    demo = (*WINDLASS, "demo", "--steps", "5", "--output", str(tmp_path / "out"))
    status, terminal = on_screen(demo, *size, cwd=tmp_path, look=look)
    lines = terminal.lines()
    assert status == 0, lines
    assert [line for line in lines if line.startswith("step ")] == [
        next(line for line in lines if line.startswith("step 5/5   reward "))
    ]
    assert sum(line.startswith("published version ") for line in lines) == 1
    assert not any("s of at most" in line for line in lines), "a frame of the start is left"
    assert_log_lines_are_whole(lines)
    text = unwrapped(lines)
    assert loads
    for said in (
        "INFO loading PyTorch and transformers took ",
        "INFO checking the model and the environments of the demo took ",
        "engines load their model and capture its layout (at most 600 s",
        "worker worker-0 connected",
        "staleness of trained samples (versions: count): ",
        "versions published, reward ",
        "what each process printed",
    ):
        # A long path wraps within a word, so blanks do not count.
        assert "".join(text.split()).count("".join(said.split())) == 1, said
    assert not [word for word in CLEAN_END if word in text]
    assert middle
    for shown in middle:
        frame = shown[next(n for n, line in enumerate(shown) if line.startswith("step ")) :]
        assert any(line.startswith("staleness of trained samples") for line in frame), shown


def job_file(tmp_path: Path) -> Path:
    text = (EXAMPLE / "job.toml").read_text().replace("{here}", str(EXAMPLE))
    text = text.replace("launch-output", "out").replace("steps = 4", "steps = 1")
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("size", [pytest.param(SIZES[0], marks=pytest.mark.long), SIZES[1]])
def test_a_launched_job_leaves_no_frame_and_ends_quietly(
    size: tuple[int, int], tmp_path: Path
) -> None:
    command = (*WINDLASS, "launch", str(job_file(tmp_path)))
    begun: list[list[str]] = []

    def look(terminal: Terminal, _process: subprocess.Popen[bytes]) -> None:
        if "not connected yet" in unwrapped(terminal.shown()) and len(begun) < 10:
            begun.append(terminal.lines())

    status, terminal = on_screen(command, *size, cwd=tmp_path, look=look)
    lines = terminal.lines()
    assert status == 0, lines
    assert begun
    for each in begun:
        assert unwrapped(each).count("not connected yet") == 1, each
    assert not any("s of at most" in line for line in lines), "a frame of the start is left"
    assert_log_lines_are_whole(lines)
    text = unwrapped(lines)
    assert text.count("worker worker-0 connected") == 1
    assert text.count("running recipe.py, which has the recipe took ") == 1
    assert not [word for word in CLEAN_END if word in text], lines
    assert lines[-2] == "done: 1 step, version 1 published"
    assert lines[-1] == "in out: report.html, summary.json, metrics.jsonl, logs, checkpoints/1"


@pytest.mark.long
def test_a_launched_job_without_a_terminal_draws_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        (*WINDLASS, "launch", str(job_file(tmp_path))),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[2:]] == [
        "step 1",
        "done",
        "in out",
    ]
    said = done.stderr.splitlines()
    assert all(LOG_LINE.match(line) for line in said), done.stderr
    begun = dict.fromkeys(line.partition(" INFO ")[2].split(" ")[0] for line in said)
    assert [*begun][:3] == ["checking", "running", "starting"], done.stderr
    assert not [word for word in CLEAN_END if word in done.stderr], done.stderr


@pytest.mark.parametrize("size", SIZES)
async def test_status_watch_fills_the_terminal_and_restores_it(size: tuple[int, int]) -> None:
    seen: list[list[str]] = []
    loop = asyncio.get_running_loop()
    async with windlass.Controller(token=TOKEN) as controller:

        def look(terminal: Terminal, process: subprocess.Popen[bytes]) -> None:
            if seen and "count): 2: 1" in unwrapped(seen[-1]):
                return
            if not terminal.shown()[0].startswith("no version published yet"):
                return
            seen.append(terminal.shown())
            if len(seen) == 1:

                def change() -> None:
                    controller.coordinator.reports.extend(report(n) for n in range(40))
                    controller.observe_samples([sample(-3)])

                loop.call_soon_threadsafe(change)
            elif "count): 2: 1" in unwrapped(seen[-1]):
                process.send_signal(signal.SIGINT)

        command = (*WINDLASS, "status", controller.url, "--watch")
        environment = {"WINDLASS_TOKEN": TOKEN}
        status, terminal = await asyncio.to_thread(
            on_screen, command, *size, cwd=REPOSITORY, environment=environment, look=look
        )
    assert status == 130
    assert seen[0][0].startswith("no version published yet")
    last = seen[-1]
    assert last[0].startswith("no version published yet")
    assert "count): 2: 1" in unwrapped(last)
    assert any(line.startswith("39 ") for line in last), last
    assert "Traceback" not in unwrapped(terminal.lines())


@pytest.mark.parametrize("columns", [80, 140])
def test_doctor_fits_its_terminal(columns: int, tmp_path: Path) -> None:
    seen: set[str] = set()
    status, terminal = on_screen(
        (*WINDLASS, "doctor"),
        *(columns, 24),
        cwd=tmp_path,
        look=lambda terminal, _process: seen.update(terminal.shown()),
    )
    lines = terminal.lines()
    assert status == 0
    assert any(line.startswith("checking this environment: ") for line in seen), seen
    # The first line names the interpreter: no output of a library may precede a result.
    assert lines[0].startswith(sys.executable[: columns - 1]), lines[:3]
    assert "found, and what to do" in unwrapped(lines[:4])
    assert "…" not in unwrapped(lines)
