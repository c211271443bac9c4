"""Deadlines on the monotonic clock, and pauses between attempts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from windlass.errors import TransferFailed


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time on the monotonic clock by which an operation must end.

    Attributes:
        at_s: end, in seconds of the monotonic clock.
        seconds: length of the deadline from its start, for messages.
        purpose: name of the operation, for messages.
    """

    at_s: float
    seconds: float
    purpose: str

    @classmethod
    def after(cls, seconds: float, purpose: str) -> Deadline:
        """Return a deadline that ends `seconds` from now; `purpose` names the operation in messages."""
        return cls(time.monotonic() + seconds, seconds, purpose)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(self.at_s - time.monotonic(), 0.0)

    def check_before_more(self) -> None:
        """Raise `TransferFailed` if the deadline has passed.

        Call this only while no write is running, because `TransferFailed` means that no bytes will arrive later.
        """
        if time.monotonic() > self.at_s:
            raise TransferFailed(f"{self.purpose}: deadline of {self.seconds} s passed")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts: each pause is twice as long as the previous pause, up to a limit.

    Attributes:
        first_s: seconds after the first failure.
        most_s: seconds of the longest pause.
    """

    first_s: float
    most_s: float

    def after(self, num_failed: int) -> float:
        """Return the seconds to wait after `num_failed` failures in a row; `num_failed` is at least 1."""
        return min(self.first_s * 2.0 ** min(num_failed - 1, 64), self.most_s)

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait after the first failure, the second failure, and so on, without end."""
        return map(self.after, count(1))
