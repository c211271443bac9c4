"""Progress of a slow job: its current part and the time since the part began."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

_log = logging.getLogger(__name__)
SAID_EVERY_S = 15.0


@final
class Progress:
    """Progress of a start or of another slow job, in parts. One thread begins and ends the parts; any thread may call `text`.

    Each part is logged when it begins, every `SAID_EVERY_S` while it runs, and when it ends, so that a log
    shows the same as a terminal.

    Args:
        say: logs one line.
        is_shown: whether a terminal shows `text`; running parts are then not logged.
    """

    def __init__(self, say: Callable[[str], object] = _log.info, *, is_shown: bool = False) -> None:
        self._say = say
        self._every_s = None if is_shown else SAID_EVERY_S
        self._part: tuple[str, float, str] | None = None
        self._detail, self._ended = "", threading.Event()

    def begin(self, what: str, at_most_s: float | None = None) -> None:
        """Begin a part and end the previous one. `at_most_s` is the caller's deadline, or None if it has no deadline."""
        self.end()
        limit = "" if at_most_s is None else f"at most {at_most_s:.0f} s"
        self._say(f"{what} ({limit})" if limit else what)
        self._part, self._ended = (what, time.monotonic(), limit), threading.Event()
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
        what, began_s, limit = part
        of = f" of {limit}" if limit else ""
        more = f"; {detail}" if detail else ""
        return f"{what}: {time.monotonic() - began_s:.0f} s{of}{more}"
