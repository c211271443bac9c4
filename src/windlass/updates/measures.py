"""The figures of a round: one line of `Measure` each, and whatever shows rounds shows it."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Measure(StrEnum):
    """A figure of a round, by its name on the wire.

    Figures that ranks report add up for each rank; the round's is that of the slowest rank for
    seconds, and that of all together for everything else.

    Attributes:
        unit: "bytes", or "seconds". help: one line for a person.
    """

    unit: str
    help: str

    def __new__(cls, name: str, unit: str, text: str) -> Self:
        """A member from its line."""
        member = str.__new__(cls, name)
        member._value_, member.unit, member.help = name, unit, text
        return member

    NBYTES = "nbytes", "bytes", "Bytes that travelled"
    WIRE_S = "wire_s", "seconds", "The slowest rank's time inside transport writes"
    UPDATE_S = "update_s", "seconds", "First command to last reply"
    PAUSE_S = "pause_s", "seconds", "Longest pause of an engine"
    PACK_S = "pack_s", "seconds", "The slowest rank's time packing; 0 where writes pack"
    REGISTER_S = "register_s", "seconds", "The slowest rank's time registering what had moved"

    COMPARE_S = "compare_s", "seconds", "The slowest rank's time digesting what ranks share"

    @property
    def label(self) -> str:
        """Without its unit: `wire`, `bytes`."""
        return self.removesuffix("_s") if self.unit == "seconds" else self.unit

    def text(self, value: float) -> str:
        """A value of it, for a table: milliseconds, or a count."""
        if self.unit == "seconds":
            return f"{value * 1e3:.1f}" if value else "-"
        return f"{value:,.0f}"

    def of_ranks(self, by_rank: dict[str, float]) -> float:
        """The round's figure, from the sum of every rank that reported it."""
        values = by_rank.values()
        return max(values, default=0.0) if self.unit == "seconds" else sum(values)
