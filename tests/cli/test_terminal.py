"""Output of commands fits 80 columns, has no unwanted colour, and names the next step."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import io
import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from http_answers import answering
from rich.console import Console
from screens import on_screen
from trained import report, sample
from windlass_command import command

import windlass
from windlass.cli import COMMANDS
from windlass.cli.main import main
from windlass.control.report import Measure
from windlass.observability.terminal import status_of
from windlass.progress import Progress

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "tests/observability/demo-overview.json"
WINDLASS = (sys.executable, "-m", "windlass.cli.main")
TOKEN = "a token of the tests"


def drawn(view: dict[str, Any]) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=80, markup=False, highlight=False).print(status_of(view))
    return text.getvalue().splitlines()


def test_status_truncates_nothing_on_80_columns() -> None:
    view = json.loads(DEMO.read_bytes())
    long = "engine-of-a-cluster-with-a-long-name-0123456789-abcdefghijklmnopqrstuvwxyz"
    view["engines"][0] |= {"name": long, "reason": "why " * 40, "url": f"http://{long}:8000"}
    view["links"][0] |= {"source": f"{long}/0", "destination": f"{long}/1", "gbps": 349.876}
    view["refused"] = {long: "because " * 30}
    view["phase"], view["phase_for_s"] = "write of version 25", 12.34
    figures = {m.value: 99_999.9 / 1e3 if m.unit == "seconds" else 7.9e12 for m in Measure}
    view["rounds"][-1] |= {"measures": figures, "left_out": {long: "it died"}}
    lines = drawn(view)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    assert "now in write of version 25 for 12.3 s" in text.replace("\n", "")
    row = next(line for line in lines if line.startswith("24"))
    assert row.split() == ["24", "published", "7.9", "TB", *["99999.9"] * 6]
    glued = text.replace("\n", "").replace(" ", "")
    assert f"version24:theupdatecontinuedwithout{long}:itdied" in glued
    assert "349.88" in text


async def test_status_watch_shows_each_change_until_the_controller_ends() -> None:
    async with windlass.Controller(token=TOKEN) as controller:
        watching = await asyncio.create_subprocess_exec(
            *(*WINDLASS, "status", controller.url, "--watch"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "WINDLASS_TOKEN": TOKEN, "COLUMNS": "80"},
        )
        assert watching.stdout is not None
        async with asyncio.timeout(30):
            assert b"no version published yet" in await watching.stdout.readuntil(b"none yet")
            controller.coordinator.reports.append(report(41))
            controller.observe_samples([sample(-3)])
            shown = await watching.stdout.readuntil(b"count): 2: 1")
            assert b"1.23 MB" in shown
    async with asyncio.timeout(30):
        shown, errors = await watching.communicate()
    assert watching.returncode == 0
    assert b"the controller has ended" in shown
    assert errors == b""


def test_status_watch_skips_states_that_it_has_no_time_to_draw() -> None:
    """When it drew each state, the screen was 50 versions behind on a busy machine, and went on after the job's end."""
    view, num_states = json.loads(DEMO.read_bytes()), 600
    states = [json.dumps({**view, "published_version": number}) for number in range(num_states)]
    stream = "".join(f"data: {state}\n\n" for state in states).encode()
    with answering(lambda _path, _asked: (200, stream)) as url:
        shown = on_terminal(*WINDLASS, "status", url, "--watch", WINDLASS_TOKEN=TOKEN)
    drawn = re.findall(r"published version (\d+)", shown)
    assert drawn[-1] == str(num_states - 1)
    assert len(drawn) < num_states / 3
    last = without_codes(shown.rpartition("\x1b[?1049l")[2]).splitlines()
    assert f"published version {num_states - 1}" in last[0]
    assert max(map(len, last)) <= 80, last


def test_an_error_breaks_between_words_on_a_terminal(tmp_path: Path) -> None:
    refused = (*WINDLASS, "demo", "--steps", "3", "--kill-engine-at", "3")
    status, terminal = on_screen(refused, 80, 24, cwd=tmp_path)
    words = subprocess.run(
        refused, capture_output=True, text=True, check=False, timeout=60
    ).stderr.split()
    assert status == 2
    shown = terminal.lines()
    assert len(shown) > 1
    assert " ".join(shown).split() == words


async def test_the_error_of_a_wrong_token_names_the_setting() -> None:
    async with windlass.Controller(token=TOKEN) as controller:
        for watch in ((), ("--watch",)):
            status = (*WINDLASS, "status", controller.url, *watch)
            code, output, errors = await command(*status, token="another")
            assert (code, output) == (2, "")
            assert "next: set WINDLASS_TOKEN to the controller's token" in errors


@pytest.mark.parametrize("name", COMMANDS.names())
def test_every_option_of_a_command_has_a_help_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = argparse.ArgumentParser(name)
    COMMANDS.find(name).add_arguments(parser)
    lines = parser.format_help().splitlines()
    for line, following in pairwise([*lines, ""]):
        if re.match(r"  [-a-z{]", line):
            # The text is in the same line, or the next line begins with it.
            assert "  " in line.strip() or following.startswith(" " * 10), line


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "windlass.cli.main", "doctor"),
        ("-m", "tools.plan", "examples/topologies/qwen3-30b-a3b-4-to-4.toml", "--simulate"),
        ("-m", "windlass.cli.main", "--help"),
        ("-m", "windlass.cli.main", "demo", "--help"),
    ],
    ids=lambda arguments: arguments[1] + arguments[2][:5],
)
@pytest.mark.parametrize("no_color", ["", "1"])
def test_commands_fit_a_terminal_of_80_columns(arguments: tuple[str, ...], no_color: str) -> None:
    """Check in a pseudo-terminal that lines fit and that NO_COLOR removes all colour codes."""
    shown = on_terminal(sys.executable, *arguments, NO_COLOR=no_color)
    assert len(shown) > 100
    for line in without_codes(shown).splitlines():
        assert len(line) <= 80, line
    coloured = any(f"\x1b[{code}m" in shown for code in ("31", "32", "33", "36"))
    assert not (no_color and coloured)
    if "doctor" in arguments and not no_color:
        assert coloured


def on_terminal(*argv: str, **environment: str) -> str:
    """Return the output of a command on a terminal of 80 columns, without its stderr."""
    ours, theirs = pty.openpty()
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    given = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40", **environment}
    process = subprocess.Popen(
        argv,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
        env={**inherited, **{k: v for k, v in given.items() if v}},
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError as error:
        # EIO means that the other end was closed.
        if error.errno != errno.EIO:
            raise
    finally:
        os.close(ours)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
    assert process.returncode == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("watch", [(), ("--watch",)])
@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"no such page", "the server answered with status 404; is this server a controller?"),
        (200, b"<html>hello</html>", "JSON is malformed"),
        (200, b'{"object": "list", "data": []}', "the answer lacks engines, "),
        (200, b"[1]", "Expected `object`, got `array`"),
    ],
)
def test_status_of_a_wrong_address_says_which_address_to_give(
    watch: tuple[str, ...],
    status: int,
    body: bytes,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    if watch:
        body = b"data: " + body + b"\n\n"
    with answering(lambda _path, _asked: (status, body)) as url:
        for command in (("status", url, *watch), *([] if watch else [("report", url)])):
            assert main(command) == 2
            said = capsys.readouterr().err
            assert f"ProtocolError: {url}: " in said
            assert says in said
            assert (
                "next: give the address that `windlass serve` or `windlass launch` prints" in said
            )


def test_status_of_a_silent_controller_does_not_advise_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["status", url, "--deadline-s", "0.2"]) == 2
    said = capsys.readouterr().err
    assert f"PeerTimeout: {url}: no answer within 0.2 s" in said
    assert "next: check that a controller runs at this address, or set a longer" in said
    assert "windlass status" not in said.partition(":")[2]


def test_status_watch_names_the_silence_that_ended_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controller answers and then falls silent. A longer `--deadline-s` would not help."""
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    monkeypatch.setattr("windlass.cli.controller.HEARTBEAT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n: still here\n\n")
                # The client closes the connection after its error.
                connection.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["status", url, "--watch", "--deadline-s", "9"]) == 2
        thread.join()
    said = capsys.readouterr().err
    assert f"PeerTimeout: {url}: the controller sent nothing for 0.3 s" in said
    assert "--deadline-s" not in said


def test_a_call_without_a_command_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for name in COMMANDS.names():
        assert re.search(rf"^    {name} +\w+|^    {name}$", shown.err, re.MULTILINE), name
    assert "asynchronous GRPO on this machine" in shown.err


def test_a_real_bash_completes_commands_and_options() -> None:
    script = """
eval "$(windlass() { "$PYTHON" -m windlass.cli.main "$@"; }; windlass completion bash)"
complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_windlass; echo "${COMPREPLY[*]}"; }
complete_words windlass st
complete_words windlass demo --kill
complete_words windlass demo --backend ""
"""
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["status", "--kill-engine-at", "p2p xccl disk"]


def test_a_missing_package_names_the_extra_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [n for n in sys.modules if n.startswith("windlass.jobs.demo")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["demo", "--output", str(tmp_path / "out")]) == 2
    assert (
        "next: `pip install '.[demo]'` in the folder of Windlass's sources"
        in capsys.readouterr().err
    )


def test_progress_names_a_slow_part_with_its_time_and_missing_members(
    caplog: pytest.LogCaptureFixture,
) -> None:
    progress = Progress()
    assert progress.text() == ""
    with caplog.at_level("INFO", "windlass.progress"):
        progress.begin("engines load", 300)
        progress.detail("not there yet: engine-a, engine-b")
        assert progress.text() == (
            "engines load: 0 s of at most 300 s; not there yet: engine-a, engine-b"
        )
        progress.begin("binding", 60)
        assert progress.text() == "binding: 0 s of at most 60 s"
        progress.end()
    assert progress.text() == ""
    assert caplog.messages == [
        "engines load (at most 300 s)",
        "engines load took 0.0 s",
        "binding (at most 60 s)",
        "binding took 0.0 s",
    ]


@pytest.mark.parametrize("setting", ["SAID_FIRST_S", "SAID_EVERY_S"])
def test_a_log_shows_a_slow_part_while_it_runs_and_a_terminal_shows_it_instead(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr(f"windlass.progress.{setting}", 0.02)
    said: SimpleQueue[str] = SimpleQueue()
    with Progress(said.put).part("engines load", 300):
        assert [said.get(timeout=10) for _ in range(3)] == [
            "engines load (at most 300 s)",
            *["engines load: 0 s of at most 300 s"] * 2,
        ]
    on_terminal = Progress(said.put, is_shown=True)
    while not said.get(timeout=10).startswith("engines load took"):
        pass
    on_terminal.begin("engines load", 300)
    assert on_terminal.text() == "engines load: 0 s of at most 300 s"
    time.sleep(0.1)
    on_terminal.end(done=False)
    assert [said.get(timeout=10), said.get(timeout=10), said.empty()] == [
        "engines load (at most 300 s)",
        "gave up: engines load: 0 s of at most 300 s",
        True,
    ]


async def test_a_misspelt_option_gets_the_command_and_the_option_that_was_meant() -> None:
    code, output, errors = await command(*WINDLASS, "launch", "--chek", "job.toml", token="")
    assert (code, output) == (2, "")
    assert "usage: windlass launch" in errors
    assert "--chek; did you mean --check?" in errors


async def test_an_abbreviated_option_is_refused() -> None:
    code, _, errors = await command(*WINDLASS, "demo", "--step", "6", token="")
    assert code == 2
    assert "--step 6; did you mean --steps?" in errors
