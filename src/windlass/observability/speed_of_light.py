"""Comparison of the time of an update with the least time that its bytes need on its links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from msgspec import to_builtins

from windlass.control.report import Measure, UpdateReport
from windlass.errors import ConfigError
from windlass.files import replacing


@final
@dataclass(frozen=True, slots=True)
class SpeedOfLight:
    """One update, compared with the least time that its bytes need.

    Attributes:
        report: report of the update.
        ceiling_gbps: highest rate of one link, measured on this machine, in 10^9 bytes per second.
        num_links: number of links that work in parallel.

    Raises:
        ConfigError: the ceiling or the number of links is not positive.
    """

    report: UpdateReport
    ceiling_gbps: float
    num_links: int

    def __post_init__(self) -> None:
        if self.ceiling_gbps <= 0:
            raise ConfigError(f"speed_of_light: ceiling_gbps must be > 0, got {self.ceiling_gbps}")
        if self.num_links < 1:
            raise ConfigError(f"speed_of_light: num_links must be >= 1, got {self.num_links}")

    @property
    def limit_s(self) -> float:
        """Seconds that the update's bytes need if every link reaches `ceiling_gbps`."""
        return self.report.nbytes / self.num_links / self.ceiling_gbps / 1e9

    @property
    def stages(self) -> tuple[tuple[str, float], ...]:
        """(name, seconds) of each stage in order; the last, `other`, is the time outside all stages."""
        phase_s = self.report.phase_s
        other = max(0.0, self.report.update_s - sum(phase_s.values()))
        return (*phase_s.items(), ("other", other))

    @property
    def achieved_gbps(self) -> float:
        """Rate of one link during the wire time, in 10^9 bytes per second."""
        wire_s = self.report.wire_s
        return self.report.nbytes / self.num_links / wire_s / 1e9 if wire_s else 0.0

    @property
    def wire_fraction(self) -> float:
        """`limit_s` divided by the wire time. Above 1, `ceiling_gbps` or `num_links` is too low."""
        return self.limit_s / self.report.wire_s if self.report.wire_s else 0.0

    @property
    def update_fraction(self) -> float:
        """`limit_s` divided by the time of the whole update."""
        return self.limit_s / self.report.update_s if self.report.update_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain types, for JSON."""
        report = self.report
        return {
            "version": report.version,
            **{measure.value: report.measure(measure) for measure in Measure},
            "phase_s": report.phase_s,
            "wire": to_builtins(report.wire),
            "ceiling_gbps": self.ceiling_gbps,
            "num_links": self.num_links,
            "limit_s": self.limit_s,
            "stages": dict(self.stages),
            "achieved_gbps": self.achieved_gbps,
            "wire_fraction": self.wire_fraction,
            "update_fraction": self.update_fraction,
        }

    def text(self) -> str:
        """Return the figures as lines of text."""
        report = self.report
        head = (
            f"version {report.version}: {report.nbytes / 1e9:.3f} GB over {self.num_links} links of "
            f"{self.ceiling_gbps:.1f} GB/s: limit {1e3 * self.limit_s:.2f} ms"
        )
        wire = (
            f"  wire {1e3 * report.wire_s:.2f} ms = {100 * self.wire_fraction:.0f} % of the limit "
            f"({self.achieved_gbps:.1f} GB/s per link), update {1e3 * report.update_s:.2f} ms = "
            f"{100 * self.update_fraction:.0f} %, pause {1e3 * report.pause_s:.2f} ms"
        )
        lines = [head, wire]
        for name, seconds in self.stages:
            share = seconds / report.update_s if report.update_s else 0.0
            lines.append(f"  {name:<8} {1e3 * seconds:9.2f} ms {100 * share:5.1f} %")
        for transport, sent in report.wire.items():
            lines.append(
                f"  {transport}: {sent.nbytes / 1e9:.3f} GB, links: {sent.num_links}, "
                f"{sent.gbps:.2f} GB/s each; the slowest:"
            )
            lines += [
                f"    {link.source} -> {link.destination} {1e3 * link.wire_s:.2f} ms, "
                f"{link.gbps:.2f} GB/s"
                for link in sent.slowest
            ]
        return "\n".join(lines)


def save_plot(updates: Sequence[SpeedOfLight], path: Path) -> None:
    """Write a PNG with matplotlib (the extra `demo`): the stages of each update as a stacked bar, the limit as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    places = range(len(updates))
    base = [0.0] * len(updates)
    names = dict.fromkeys(name for update in updates for name, _ in update.stages)
    figure, axes = plt.subplots(figsize=(9, 5), constrained_layout=True)
    for name in names:
        heights = [1e3 * dict(update.stages).get(name, 0.0) for update in updates]
        axes.bar(places, heights, bottom=base, label=name)
        base = [below + height for below, height in zip(base, heights, strict=True)]
    axes.plot(places, [1e3 * u.limit_s for u in updates], "k_", markersize=14, label="limit")
    axes.set(ylabel="milliseconds", xlabel="version", title="Updates against the speed of light")
    axes.set_xticks(list(places), [str(update.report.version) for update in updates])
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, dpi=120, format="png")
    plt.close(figure)
