"""What a demo shows: a live view or lines while it runs, a picture of it at the end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from windlass.controller import Controller
from windlass.jobs.config import LaunchConfig
from windlass.jobs.demo.recipe import RepeatOperand
from windlass.jobs.progress import Progress
from windlass.updates.messages import UpdateReport

BARS = " ▁▂▃▄▅▆▇█"
NUM_BARS = 60
LAST_UPDATES = 8


def gbps(report: UpdateReport) -> float:
    """Return what an update moved, in 10^9 bytes per second of its wire time."""
    return report.nbytes / report.wire_s / 1e9 if report.wire_s > 0 else 0.0


@final
class DemoView:
    """Shows a recipe's record, live on a terminal and as lines elsewhere. Enter it as a context.

    Args:
        config: of the job. recipe: its record.
        ceiling_gbps: of one memcpy thread, which updates are compared with.
        plain: lines on a terminal, too.
    """

    def __init__(
        self, config: LaunchConfig, recipe: RepeatOperand, ceiling_gbps: float, *, plain: bool
    ) -> None:
        self.console = Console(markup=False, highlight=False)
        self._config, self._recipe, self._ceiling_gbps = config, recipe, ceiling_gbps
        self._is_live = self.console.is_terminal and not plain
        self.progress = Progress()
        self._frame: RenderableType = ""
        self._live = Live(console=self.console, get_renderable=self._draw)
        self._num_events, self._num_updates = 0, 0
        self._stack = ExitStack()

    def __enter__(self) -> DemoView:
        if self._is_live:
            self._stack.enter_context(self._live)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, controller: Controller) -> None:
        """Show what has happened since the last call."""
        recipe = self._recipe
        if self._is_live:
            self._frame = self._make_frame(controller)
            self._live.refresh()
            return
        for event in recipe.events[self._num_events :]:
            self.console.print(event, style="yellow")
        for row in recipe.updates[self._num_updates :]:
            reward = f"{recipe.rewards_by_step[-1]:.3f}" if recipe.rewards_by_step else "  -  "
            self.console.print(
                f"v{row.version:<3d} reward {reward} {row.nbytes / 1e6:8.2f} MB  "
                f"wire {row.wire_s * 1e3:6.2f}  update {row.update_s * 1e3:6.1f}  "
                f"pause {row.pause_s * 1e3:6.1f} ms",
                soft_wrap=True,
            )
        self._num_events, self._num_updates = len(recipe.events), len(recipe.updates)

    def _draw(self) -> RenderableType:
        """Called by a thread of `Live`, several times a second: the time that something takes goes on."""
        return Group(self._frame, *filter(None, [self.progress.text()]))

    def _make_frame(self, controller: Controller) -> RenderableType:
        engines = Table("engine", "serves version", "address", box=None, padding=(0, 1))
        for engine in controller.coordinator.routable():
            engines.add_row(engine.name, str(engine.version), engine.url)
        return Panel(
            Group(self._progress(controller), engines, self._updates()),
            title=f"windlass demo · {self._config.transport} · {self._config.update.mode}",
            border_style="cyan",
        )

    def _progress(self, controller: Controller) -> RenderableType:
        recipe, rewards = self._recipe, self._recipe.rewards_by_step
        staleness = recipe.staleness
        mean = sum(age * n for age, n in staleness.items()) / max(staleness.total(), 1)
        outstanding = controller.rollouts.stats().outstanding
        lines = Text()
        lines.append(f"step {len(rewards)}/{self._config.steps}", style="bold")
        lines.append(
            f"   reward {rewards[-1] if rewards else 0.0:.3f}   mean staleness {mean:.2f}   "
            f"outstanding {outstanding}\n"
        )
        bars = (BARS[round(min(max(r, 0.0), 1.0) * (len(BARS) - 1))] for r in rewards[-NUM_BARS:])
        lines.append("".join(bars), style="green")
        for event in recipe.events[-2:]:
            lines.append(f"\n{event}", style="yellow")
        return lines

    def _updates(self) -> RenderableType:
        table = Table(box=None, padding=(0, 1))
        for column in (
            "version", "bytes", "wire ms", "update ms", "pause ms", "GB/s", "% memcpy", "digests",
        ):  # fmt: skip
            table.add_column(column, justify="right")
        for row in self._recipe.updates[-LAST_UPDATES:]:
            table.add_row(
                str(row.version),
                f"{row.nbytes:,}",
                f"{row.wire_s * 1e3:.2f}",
                f"{row.update_s * 1e3:.1f}",
                f"{row.pause_s * 1e3:.1f}",
                f"{gbps(row):.2f}",
                f"{100 * gbps(row) / self._ceiling_gbps:.0f}",
                "equal" if row.digest_ok else "DIFFER",
            )
        return table


def save_plot(recipe: RepeatOperand, path: Path) -> None:
    """Write a PNG: the reward over steps, and below it the three times of the updates."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 7), constrained_layout=True)
    rewards, updates = recipe.rewards_by_step, recipe.updates
    upper.plot(range(1, len(rewards) + 1), rewards, color="tab:green")
    upper.set(ylabel="mean reward", xlabel="step", ylim=(0, 1), title="Asynchronous GRPO")
    for label, seconds in (
        ("update", [row.update_s for row in updates]),
        ("pause", [row.pause_s for row in updates]),
        ("wire", [row.wire_s for row in updates]),
    ):
        values = [1e3 * value for value in seconds]
        lower.plot([row.version for row in updates], values, marker=".", label=label)
    lower.set(ylabel="milliseconds", xlabel="version", yscale="log", title="Weight updates")
    lower.legend()
    upper.grid(alpha=0.3)
    lower.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
