"""Progress messages of a slow operation, such as the start of an engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

_log = logging.getLogger(__name__)
SAID_FIRST_S = 5.0
SAID_EVERY_S = 15.0


@final
class Progress:
    """Progress of a slow operation, which consists of successive parts.

    A line is logged when a part begins, while it runs, and when it ends. While it runs, the lines are first `SAID_FIRST_S`
    and later `SAID_EVERY_S` seconds apart. One thread begins and ends parts; any thread may call `text`.

    Args:
        say: function that logs one line.
        is_shown: True if the caller shows `text` on a terminal; nothing is then logged while a part runs.
    """

    def __init__(self, say: Callable[[str], object] = _log.info, *, is_shown: bool = False) -> None:
        self._say = say
        self._is_shown = is_shown
        self._part: tuple[str, float, str] | None = None
        self._detail, self._ended = "", threading.Event()

    def begin(self, what: str, at_most_s: float | None = None) -> None:
        """End the previous part, and begin a part that should take `at_most_s` seconds at most (None for no limit)."""
        self.end()
        limit = "" if at_most_s is None else f"at most {at_most_s:.0f} s"
        self._say(f"{what} ({limit})" if limit else what)
        self._part, self._ended = (what, time.monotonic(), limit), threading.Event()
        if not self._is_shown:
            threading.Thread(
                target=self._go_on, args=(self._ended,), name="progress", daemon=True
            ).start()

    def _go_on(self, ended: threading.Event) -> None:
        began_s = time.monotonic()
        # Print often at first, while a user waits for a sign of life. Print rarely later, to keep the log short.
        while not ended.wait(
            min(max((time.monotonic() - began_s) / 4, SAID_FIRST_S), SAID_EVERY_S)
        ):
            self._say(self.text())

    def detail(self, text: str) -> None:
        """Set a text that `text` adds to the current part, such as the missing peers; empty for no text."""
        self._detail = text

    def end(self, *, done: bool = True) -> None:
        """End the current part, if any; `done` is False if the part failed. Idempotent."""
        if self._part is not None:
            what, began_s, _ = self._part
            took_s = time.monotonic() - began_s
            self._ended.set()
            self._say(f"{what} took {took_s:.1f} s" if done else f"gave up: {self.text()}")
        self._part, self._detail = None, ""

    @contextmanager
    def part(self, what: str, at_most_s: float | None = None) -> Iterator[None]:
        """Begin a part of the operation, and end it at the end of the `with` block. The arguments are those of `begin`."""
        self.begin(what, at_most_s)
        try:
            yield
        except BaseException:
            self.end(done=False)
            raise
        self.end()

    def text(self) -> str:
        """Return the current part and the seconds since it began; empty if no part is running."""
        part, detail = self._part, self._detail
        if part is None:
            return ""
        what, began_s, limit = part
        of = f" of {limit}" if limit else ""
        more = f"; {detail}" if detail else ""
        return f"{what}: {time.monotonic() - began_s:.0f} s{of}{more}"
