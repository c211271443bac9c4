"""Deadlines on the monotonic clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

from windlass.errors import TransferFailed


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock, and the operation that must end by then."""

    at_s: float
    seconds: float
    purpose: str

    @classmethod
    def after(cls, seconds: float, purpose: str) -> Deadline:
        """Return a deadline `seconds` from now."""
        return cls(time.monotonic() + seconds, seconds, purpose)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(self.at_s - time.monotonic(), 0.0)

    def check_before_more(self) -> None:
        """Raise if the deadline has passed, before another piece of work starts.

        Raises:
            TransferFailed: the deadline has passed; nothing is in flight.
        """
        if time.monotonic() > self.at_s:
            raise TransferFailed(f"{self.purpose}: deadline of {self.seconds} s passed")
