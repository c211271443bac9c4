"""Log lines that contain the rollout, round and version to which they belong.

Code that works on one rollout or one round calls `log_fields`. All later lines of the same asyncio task
contain these fields, including lines of user code.
"""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from typing import TextIO, final

import msgspec

from windlass.envs import environment_value
from windlass.errors import ConfigError

FORMAT_VARIABLE = "WINDLASS_LOG"
LEVEL_VARIABLE = "WINDLASS_LOG_LEVEL"
LOG_VARIABLES = (FORMAT_VARIABLE, LEVEL_VARIABLE)
MAX_KINDS = 256
"""Largest number of kinds of lines that a `LineLimit` remembers; it forgets the kind that was counted longest ago."""
TRACEBACK_EVERY_S = 10.0
"""Seconds between two logged tracebacks of equal exceptions of a user's code."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_fields: ContextVar[Mapping[str, str | int]] = ContextVar("windlass_log_fields")
_NO_FIELDS: Mapping[str, str | int] = {}


class _Undo:
    """Context manager that restores the previous fields at its end."""

    __slots__ = ("_before",)

    def __init__(self, before: Mapping[str, str | int]) -> None:
        self._before = before

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        _fields.set(self._before)


def log_fields(
    *,
    task: str | None = None,
    attempt: int | None = None,
    round_number: int | None = None,
    version: int | None = None,
    engine: str | None = None,
) -> _Undo:
    """Add fields to every later log line of the running asyncio task, and of tasks that it creates.

    Returns:
        A context manager. The end of its `with` block removes the fields again.
    """
    before = _fields.get(_NO_FIELDS)
    given = {
        "task": task,
        "attempt": attempt,
        "round": round_number,
        "version": version,
        "engine": engine,
    }
    _fields.set({**before, **{name: value for name, value in given.items() if value is not None}})
    return _Undo(before)


@final
class LineLimit:
    """Limit on repeated log lines: one line of each kind per `every_s` seconds. Thread-safe.

    Args:
        every_s: seconds between two lines of one kind.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._kinds: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def count(self, kind: str) -> int:
        """Count a log line of this kind. Return 0 if the caller must not write the line.

        Otherwise return the number of lines of this kind since the last written line, including this line.
        """
        with self._lock:
            now = time.monotonic()
            next_s, num_held = self._kinds.pop(kind, (now, 0))
            is_due = now >= next_s
            if len(self._kinds) >= MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[kind] = (now + self._every_s, 0) if is_due else (next_s, num_held + 1)
        return num_held + 1 if is_due else 0

    def count_error(self, error: BaseException) -> int:
        """Count an exception as `count` does. Exceptions of the same type from the same line of code have one kind."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        return self.count(f"{type(error).__name__} {where}")


@final
class JsonFormatter(logging.Formatter):
    """Formatter of records as one line of JSON: UTC time, level, logger, process, message, fields, exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            **_fields.get(_NO_FIELDS),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


@final
class _TextFormatter(logging.Formatter):
    """Formatter of records as text: time, process, level, message, and the fields in brackets."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line of a record without its traceback, with unprintable characters escaped."""
        fields = " ".join(f"{name}={value}" for name, value in _fields.get(_NO_FIELDS).items())
        line = super().formatMessage(record)
        return printable(f"{line} [{fields}]" if fields else line)


def printable(text: str) -> str:
    """Return `text` with unprintable characters escaped, because they could forge a log line or control a terminal."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    """Return a character, or its escape sequence if it is not printable."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


@final
class _StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that looks up `sys.stderr` for each line, because a live view replaces `sys.stderr`.

    On a terminal, a long line continues at a word in the next row. Terminals would break the word.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to the present `sys.stderr`."""
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record. If the stream is a terminal, wrap the text at the terminal's current width."""
        text = super().format(record)
        is_text = isinstance(self.formatter, _TextFormatter)
        if not is_text or self.stream is not sys.__stderr__ or not self.stream.isatty():
            return text
        columns = shutil.get_terminal_size().columns
        return "\n".join(map(partial(_wrapped, columns=columns), text.split("\n")))


def _wrapped(line: str, columns: int) -> str:
    """Break `line` between words into rows of at most `columns` characters. A longer word gets a row of its own."""
    if len(line) <= columns:
        return line
    return textwrap.fill(
        line, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def configure_logging(process: str) -> None:
    """Log to stderr.

    WINDLASS_LOG sets the format (`text` or `json`, default `text`). WINDLASS_LOG_LEVEL sets the level of the loggers of
    Windlass (default `INFO`); other loggers get `WARNING`. Every line contains `process`, the name of the process.
    The entry point of each process calls this function. If the root logger already has a handler, only Windlass's level is
    set.

    Raises:
        ConfigError: a variable has an unknown value.
    """
    kind = environment_value(FORMAT_VARIABLE) or "text"
    if kind not in {"text", "json"}:
        raise ConfigError(f"{FORMAT_VARIABLE} must be text or json, got {kind!r}")
    level = environment_value(LEVEL_VARIABLE).upper() or "INFO"
    if level not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} must be one of {LEVELS}, got {level!r}")
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter(process) if kind == "json" else _TextFormatter(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("windlass").setLevel(level)
