"""Everything the demo measured, and the JSON it becomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from windlass.jobs.demo.checker import TornReport
from windlass.updates.messages import RoundOutcome, UpdateReport

__all__ = ["DemoRecord", "UpdateRow"]

GB = 1e9


class UpdateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published version.

    Attributes:
        version: published. nbytes: that travelled.
        wire_s, update_s, pause_s: the three clocks.
        gbps: GB/s on the wire clock. ceiling_gbps: one memcpy thread, measured at start.
        digest_ok: every written range had its sender's digest on the receiving side.
        phase_s: seconds per phase of the round.
        engines: that serve the version. left_out: engine -> why not.
    """

    version: int
    nbytes: int
    wire_s: float
    update_s: float
    pause_s: float
    gbps: float
    ceiling_gbps: float
    digest_ok: bool
    phase_s: dict[str, float]
    engines: tuple[str, ...]
    left_out: dict[str, str]


@dataclass(slots=True)
class DemoRecord:
    """Filled in while the demo runs; owned by the demo's event loop."""

    ceiling_gbps: float
    updates: list[UpdateRow] = field(default_factory=list)
    failed_updates: list[UpdateReport] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    rollouts: dict[str, int] = field(default_factory=dict)
    torn: TornReport | None = None
    events: list[str] = field(default_factory=list)
    missing_engines: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    def add_update(self, report: UpdateReport) -> None:
        """Record a round as its report says it ended."""
        if report.outcome is not RoundOutcome.PUBLISHED:
            self.failed_updates.append(report)
            return
        self.updates.append(
            UpdateRow(
                version=report.version,
                nbytes=report.nbytes,
                wire_s=report.wire_s,
                update_s=report.update_s,
                pause_s=report.pause_s,
                gbps=report.nbytes / report.wire_s / GB if report.wire_s > 0 else 0.0,
                ceiling_gbps=self.ceiling_gbps,
                digest_ok=report.digest_ok,
                phase_s=report.phase_s,
                engines=report.engines,
                left_out=report.left_out,
            )
        )

    def add_step(self, rewards: Sequence[float], staleness: Sequence[int]) -> None:
        """Record the batch of one step."""
        self.rewards.append(sum(rewards) / len(rewards))
        self.staleness.update(staleness)

    def problems(self) -> list[str]:
        """What a demo must not show, one line each; empty when it went well."""
        found = []
        if self.torn is None or self.torn.torn:
            found.append(f"torn answers: {self.torn.torn if self.torn else 'not checked'}")
        if self.rollouts.get("lost", -1) != 0:
            found.append(f"lost rollouts: {self.rollouts.get('lost', 'not counted')}")
        found += [f"{name} does not serve the last version" for name in self.missing_engines]
        found += [f"digest of version {u.version} differs" for u in self.updates if not u.digest_ok]
        found += [f"version {u.version}: {u.outcome}: {u.reason}" for u in self.failed_updates]
        third = max(len(self.rewards) // 3, 1)
        first, last = self.rewards[:third], self.rewards[-third:]
        if len(self.rewards) >= 12 and sum(last) / len(last) <= sum(first) / len(first):
            found.append(f"reward did not rise: first third {first}, last third {last}")
        return found

    def save_json(self, path: Path) -> None:
        """Write everything measured."""
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.torn
        content = {
            "updates": self.updates,
            "rewards": self.rewards,
            "rollouts": self.rollouts,
            "torn": torn.torn if torn is not None else None,
            "torn_check": torn,
            "staleness": {str(age): n for age, n in sorted(self.staleness.items())},
            "ceiling_gbps": self.ceiling_gbps,
            "events": self.events,
            "problems": self.problems(),
            "wall_s": self.wall_s,
        }
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
