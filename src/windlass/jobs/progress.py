"""What a job does before its first step, and since when: the slow parts of its start."""

from __future__ import annotations

import logging
import time
from typing import final

_log = logging.getLogger(__name__)


@final
class Progress:
    """The slow part that a job is in. Set in the job's loop; any thread may read `text`.

    Each part is logged when it begins and when it ends, so that a log says what a terminal shows.
    """

    def __init__(self) -> None:
        self._part: tuple[str, float, float] | None = None
        self._waits_for = ""

    def begin(self, what: str, at_most_s: float) -> None:
        """Begin a part, and end the one before it.

        Args:
            what: one line for a person.
            at_most_s: after which the job gives up.
        """
        self.end()
        _log.info("%s (at most %.0f s)", what, at_most_s)
        self._part = (what, time.monotonic(), at_most_s)

    def waits_for(self, names: str) -> None:
        """Who is missing in this part; empty for nobody."""
        self._waits_for = names

    def end(self) -> None:
        """The part has ended. Idempotent."""
        if self._part is not None:
            what, began_s, _ = self._part
            _log.info("%s took %.1f s", what, time.monotonic() - began_s)
        self._part, self._waits_for = None, ""

    def text(self) -> str:
        """What is being done and since when; empty where nothing slow is."""
        part, waits_for = self._part, self._waits_for
        if part is None:
            return ""
        what, began_s, at_most_s = part
        missing = f"; not there yet: {waits_for}" if waits_for else ""
        return f"{what}: {time.monotonic() - began_s:.0f} s of at most {at_most_s:.0f} s{missing}"
