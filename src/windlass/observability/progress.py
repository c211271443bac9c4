"""Progress of a slow job: its current part, the time since the part began, and the time that it took last time."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from windlass.envs import environment_value

_log = logging.getLogger(__name__)
SAID_EVERY_S = 15.0
MAX_KEPT = 200


@final
class Progress:
    """Progress of a start or of another slow job, part by part. One thread begins and ends parts; any thread may read `text`.

    Each part is logged when it begins, every `SAID_EVERY_S` while it runs, and when it ends, so that a log
    shows what a terminal shows. The user's cache stores the duration of a part for the next start.

    Args:
        of: key for the stored durations, the same at each start with the same parts: a job's file, an engine
            with its model; empty stores none.
        say: logs one line.
        is_shown: whether a terminal shows `text`; running parts are then not logged.
    """

    def __init__(
        self, of: str = "", say: Callable[[str], object] = _log.info, *, is_shown: bool = False
    ) -> None:
        self._of, self._say = of, say
        self._every_s = None if is_shown else SAID_EVERY_S
        self._part: tuple[str, float, str] | None = None
        self._detail, self._ended = "", threading.Event()

    def begin(self, what: str, at_most_s: float | None = None) -> None:
        """Begin a part and end the previous one; the caller gives up after `at_most_s`, or never if that is None."""
        self.end()
        last_s = _last_times().get(f"{self._of}: {what}", 0.0) if self._of else 0.0
        parts = [] if at_most_s is None else [f"at most {at_most_s:.0f} s"]
        if last_s >= 1:
            parts.append(f"{last_s:.0f} s the last time")
        limits = ", ".join(parts)
        self._say(f"{what} ({limits})" if limits else what)
        self._part, self._ended = (what, time.monotonic(), limits), threading.Event()
        threading.Thread(
            target=self._go_on, args=(self._ended,), name="progress", daemon=True
        ).start()

    def _go_on(self, ended: threading.Event) -> None:
        while not ended.wait(self._every_s):
            self._say(self.text())

    def detail(self, text: str) -> None:
        """Set the detail of the part, such as the missing peers; empty for none."""
        self._detail = text

    def end(self, *, done: bool = True) -> None:
        """End the part; `done` is false if it was given up. Idempotent."""
        if self._part is not None:
            what, began_s, _ = self._part
            took_s = time.monotonic() - began_s
            self._ended.set()
            self._say(f"{what} took {took_s:.1f} s" if done else f"gave up: {self.text()}")
            if done and self._of:
                _keep(f"{self._of}: {what}", took_s)
        self._part, self._detail = None, ""

    @contextmanager
    def part(self, what: str, at_most_s: float | None = None) -> Iterator[None]:
        """Begin a part for the `with` block and end it after the block; see `begin`."""
        self.begin(what, at_most_s)
        try:
            yield
        except BaseException:
            self.end(done=False)
            raise
        self.end()

    def text(self) -> str:
        """Return the current part and its duration; empty if no part is running."""
        part, detail = self._part, self._detail
        if part is None:
            return ""
        what, began_s, limits = part
        of = f" of {limits}" if limits else ""
        more = f"; {detail}" if detail else ""
        return f"{what}: {time.monotonic() - began_s:.0f} s{of}{more}"


def _kept_in() -> Path:
    return (
        Path(environment_value("XDG_CACHE_HOME") or "~/.cache").expanduser() / "windlass/took.json"
    )


def _last_times() -> dict[str, float]:
    """Return the stored seconds per part; an empty dict if no readable file exists."""
    try:
        found = json.loads(_kept_in().read_bytes())
        return {str(what): float(took_s) for what, took_s in found.items()}
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):
        return {}


def _keep(what: str, took_s: float) -> None:
    """Store a duration. It is only a hint for people: a concurrent or failed write may lose it."""
    times = _last_times()
    times.pop(what, None)
    newest = dict([*times.items(), (what, round(took_s, 1))][-MAX_KEPT:])
    with contextlib.suppress(OSError, RuntimeError):
        path = _kept_in()
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{threading.get_native_id()}")
        written.write_text(json.dumps(newest))
        written.rename(path)
