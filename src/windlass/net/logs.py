"""Log lines that say which rollout, round and version they belong to.

Code that works on one rollout or one round names it with `log_fields`; every line that is logged
meanwhile carries it, a user's own lines too. The fields travel with asyncio tasks, not with threads.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO, final

import msgspec

from windlass.envs import environment_value
from windlass.errors import ConfigError

FORMAT_VARIABLE = "WINDLASS_LOG"
LEVEL_VARIABLE = "WINDLASS_LOG_LEVEL"
LOG_VARIABLES = (FORMAT_VARIABLE, LEVEL_VARIABLE)
MAX_KINDS = 256
"""Kinds of lines that a `LineLimit` remembers."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_fields: ContextVar[Mapping[str, str | int]] = ContextVar("windlass_log_fields")
_NO_FIELDS: Mapping[str, str | int] = {}


class _Undo:
    """A context that sets the fields of before when it ends."""

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
    """Add fields to every later line of the running asyncio task, and of tasks that it creates.

    Returns:
        For `with`: its end takes the fields away again.
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
    """Decides which of many equal log lines to write: one of each kind in `every_s` seconds.

    Args:
        every_s: seconds between two lines of one kind.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._kinds: dict[str, tuple[float, int]] = {}

    def count(self, kind: str) -> int:
        """Return how many lines of this kind came since one was written, this one included; 0 to write none."""
        now = time.monotonic()
        next_s, num_held = self._kinds.pop(kind, (now, 0))
        is_due = now >= next_s
        if len(self._kinds) >= MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = (now + self._every_s, 0) if is_due else (next_s, num_held + 1)
        return num_held + 1 if is_due else 0


@final
class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, process, message, fields, exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
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
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = " ".join(f"{name}={value}" for name, value in _fields.get(_NO_FIELDS).items())
        line = super().formatMessage(record)
        return printable(f"{line} [{fields}]" if fields else line)


def printable(text: str) -> str:
    """Return `text` with escapes for what would forge a line of a log, or speak to a terminal."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


@final
class _StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes each line to the `sys.stderr` of that moment, which a live view replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(process: str) -> None:
    """Log to stderr as WINDLASS_LOG (`text`, `json`) and WINDLASS_LOG_LEVEL (`INFO`) say.

    Called by the entry points of processes; a handler that is there already is left alone. The name of
    the process is in every line.

    Raises:
        ConfigError: a value that is neither.
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
