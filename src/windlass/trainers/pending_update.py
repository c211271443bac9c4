"""Number and handle of an update that a trainer rank publishes. A round is the controller's attempt to publish it."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import Any, final

from windlass.control.messages import MAX_COUNT
from windlass.control.report import UpdateReport
from windlass.errors import ConfigError, PeerTimeout
from windlass.transfer.replica import CopyTimes


def version_number(version: int, what: str) -> int:
    """Return `version` as a plain integer; numpy and torch integers are accepted.

    Raises:
        ConfigError: `version` is not an integer in [0, 2^53).
    """
    try:
        number = operator.index(version)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"{what}: version must be an integer >= 0, got {version!r}")
    if number > MAX_COUNT:
        raise ConfigError(f"{what}: version must be < 2^53, got {version!r}")
    return number


@final
class PendingUpdate:
    """Handle of an update, returned by `TrainerClient.publish`. `await` on this object returns the report.

    Attributes:
        version: number of the version.
        stood_s: seconds that `publish` took.
        copy: seconds in which `publish(copy=True)` waited for the optimizer step and copied the weights; `stood_s`
            includes them.
    """

    def __init__(self, version: int, report: Future[UpdateReport]) -> None:
        self.version = version
        self.stood_s = 0.0
        self.copy = CopyTimes()
        self._report = report

    def __await__(self) -> Generator[Any, None, UpdateReport]:
        return asyncio.wrap_future(self._report).__await__()

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return self._report.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, as soon as `done` returns True. The call may be in any thread."""
        self._report.add_done_callback(lambda _: callback())

    def result(self, *, deadline_s: float = 600.0) -> UpdateReport:
        """Wait until the round has ended, and return its report.

        Raises:
            RoundAborted: the version was not published; the message has the reason. The engines continue to serve the
                old version.
            PeerTimeout: the round did not end within `deadline_s` (the caller may call `result` again), or it did not end
                within the deadline of `publish`.
        """
        if not wait([self._report], deadline_s).done:
            raise PeerTimeout(
                f"version {self.version}: the round did not end within {deadline_s} s"
            )
        return self._report.result()
