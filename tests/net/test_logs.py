"""JSON log lines have the fields of the task that logs them, and of no other task."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest

from windlass.errors import ConfigError
from windlass.net.logs import JsonFormatter, configure_logging, log_fields


@pytest.fixture
def lines() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(lines: io.StringIO) -> Iterator[logging.Logger]:
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonFormatter("worker-0"))
    logger = logging.getLogger("mine")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    logger.propagate = False
    yield logger
    logger.removeHandler(handler)


def read(lines: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_its_fields(
    logger: logging.Logger, lines: io.StringIO
) -> None:
    with log_fields(version=7, round_number=3):
        logger.info("two\nlines, %s", "an argument")
        with log_fields(task="t-1", attempt=0, engine="e"):
            logger.error("failed", exc_info=ValueError("bad"))
    logger.info("after")
    first, second, third = read(lines)
    assert first["message"] == "two\nlines, an argument"
    assert (first["level"], first["logger"], first["process"]) == ("INFO", "mine", "worker-0")
    assert (first["version"], first["round"]) == (7, 3)
    assert "task" not in first
    fields = [second[name] for name in ("task", "attempt", "engine", "version", "round")]
    assert fields == ["t-1", 0, "e", 7, 3]
    assert "ValueError: bad" in str(second["exception"])
    assert not {"task", "version", "round"} & set(third)
    assert str(first["time"]).endswith("+00:00")


async def test_tasks_keep_the_fields_of_their_creation_and_their_own_apart(
    logger: logging.Logger, lines: io.StringIO
) -> None:
    turn = asyncio.Barrier(2)

    async def work(task: str) -> None:
        log_fields(task=task)
        await turn.wait()
        logger.info("ran")

    with log_fields(version=5):
        tasks = [asyncio.create_task(work(name)) for name in ("a", "b")]
    await asyncio.gather(*tasks)
    logger.info("outside")
    *ran, outside = read(lines)
    assert sorted((str(line["task"]), line["version"]) for line in ran) == [("a", 5), ("b", 5)]
    assert "version" not in outside


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("WINDLASS_LOG", "xml", "WINDLASS_LOG must be text or json, got 'xml'"),
        ("WINDLASS_LOG_LEVEL", "loud", "WINDLASS_LOG_LEVEL must be one of .* got 'LOUD'"),
    ],
)
def test_an_unknown_format_or_level_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        configure_logging("x")


def test_text_lines_end_with_their_fields_and_cannot_be_forged() -> None:
    import subprocess

    code = (
        "from windlass.net.logs import configure_logging, log_fields\n"
        "import logging\n"
        "configure_logging('worker-1')\n"
        "with log_fields(task='t-9', version=2):\n"
        "    logging.getLogger('windlass.x').info('hello')\n"
    )
    code += "logging.getLogger('windlass.x').info('a\\nforged %s', '\\x1b[2J')\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    first, second = done.stderr.splitlines()
    assert first.endswith(" worker-1 INFO hello [task=t-9 version=2]")
    assert second.endswith(r" worker-1 INFO a\nforged \x1b[2J")


def test_long_lines_on_a_terminal_continue_at_a_word() -> None:
    code = (
        "import logging; from windlass.net.logs import configure_logging; configure_logging('p'); "
        "logging.getLogger('windlass.x').info('engine a: left out: ' + 'replicated-boxes ' * 12)"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60"}
    process = subprocess.Popen((sys.executable, "-c", code), stderr=theirs, env=environment)
    assert process.wait(60) == 0
    rows = os.read(ours, 65536).decode().splitlines()
    os.close(ours)
    os.close(theirs)
    assert len(rows) > 3
    assert max(map(len, rows)) <= 60
    assert " ".join(map(str.strip, rows)).count("replicated-boxes") == 12
