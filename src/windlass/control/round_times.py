"""Times of one round: its phases, the longest pause of an engine, and the whole round."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from windlass.control.messages import Command, Pause, Publish
from windlass.control.report import Measure
from windlass.control.round_state import Phase


@final
class RoundTimes:
    """Stopwatch of one round, which begins now.

    Args:
        clock: function that returns seconds.

    Attributes:
        phase_s: name of a phase -> its seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()
        self._phase_began = 0.0
        self._phase: Phase | None = None
        self.phase_s: dict[str, float] = {}
        self._pause_began: dict[str, float] = {}
        self._publishing: set[tuple[str, int]] = set()
        self._pause_s = 0.0

    def enter(self, phase: Phase) -> None:
        """Record that a phase begins now."""
        self._phase, self._phase_began = phase, self._clock()

    def leave(self) -> None:
        """Record that the current phase ends now, if a phase has begun."""
        if self._phase is not None:
            passed_s = self._clock() - self._phase_began
            self.phase_s[self._phase] = self.phase_s.get(self._phase, 0.0) + passed_s
            self._phase = None

    def sent(self, worker: str, seq: int, command: Command) -> None:
        """Record that a command is about to be sent to a rank.

        The pause of a rank lasts from the first `Pause` to the answer to `Publish`.
        """
        if isinstance(command, Pause):
            self._pause_began.setdefault(worker, self._clock())
        elif isinstance(command, Publish):
            self._publishing.add((worker, seq))

    def answered(self, worker: str, seq: int) -> None:
        """Record that a rank has answered the command with number `seq`. The answer to `Publish` ends the rank's pause."""
        if (worker, seq) in self._publishing and worker in self._pause_began:
            self._pause_s = max(self._pause_s, self._clock() - self._pause_began[worker])

    def measures(self) -> dict[str, float]:
        """Return the seconds of the round until now and of the longest pause, by the names of `Measure`."""
        times = {Measure.UPDATE_S: self._clock() - self._began, Measure.PAUSE_S: self._pause_s}
        return {measure.value: seconds for measure, seconds in times.items()}
