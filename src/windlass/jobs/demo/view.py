"""What a demo shows: a live view or lines while it runs, a picture of it at the end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from windlass.controller import Controller
from windlass.jobs.config import LaunchConfig
from windlass.jobs.demo.recipe import RepeatOperand
from windlass.jobs.progress import Progress
from windlass.observability.plots import drawn_to
from windlass.observability.terminal import status_of

BARS = " ▁▂▃▄▅▆▇█"
NUM_BARS = 60
LAST_UPDATES = 5


@final
class DemoView:
    """Shows a recipe's record, live on a terminal and as lines elsewhere.

    Args:
        config: of the job. recipe: its record.
        plain: lines on a terminal, too.

    Attributes:
        shown: entered for as long as the job runs.
    """

    def __init__(self, config: LaunchConfig, recipe: RepeatOperand, *, plain: bool) -> None:
        self.console = Console(markup=False, highlight=False)
        self.progress = Progress()
        self._config, self._recipe = config, recipe
        self._frame: RenderableType = ""
        self._live: Live | None = None
        if self.console.is_terminal and not plain:
            self._live = Live(console=self.console, get_renderable=self._draw)
        self.shown: AbstractContextManager[object] = self._live or nullcontext()
        self._num_events = self._num_updates = 0

    def show(self, controller: Controller) -> None:
        """Show what has happened since the last call."""
        recipe, rewards = self._recipe, self._recipe.rewards_by_step
        if self._live is not None:
            fleet = status_of(controller.overview(), last_rounds=LAST_UPDATES)
            self._frame = Group(self._training(), fleet)
            self._live.refresh()
            return
        for event in recipe.events[self._num_events :]:
            self.console.print(event, style="yellow")
        for row in recipe.updates[self._num_updates :]:
            reward = f"{rewards[-1]:.3f}" if rewards else "  -  "
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

    def _training(self) -> Text:
        rewards = self._recipe.rewards_by_step
        reward = rewards[-1] if rewards else 0.0
        lines = Text(
            f"step {len(rewards)}/{self._config.steps}   reward {reward:.3f}\n", style="bold"
        )
        bars = (BARS[round(min(max(r, 0.0), 1.0) * (len(BARS) - 1))] for r in rewards[-NUM_BARS:])
        lines.append("".join(bars), style="green")
        for event in self._recipe.events[-2:]:
            lines.append(f"\n{event}", style="yellow")
        return lines


def save_plot(recipe: RepeatOperand, path: Path) -> None:
    """Write a PNG: the reward over steps, and below it the three times of the updates."""
    rewards, updates = recipe.rewards_by_step, recipe.updates
    with drawn_to(path, 2) as (upper, lower):
        upper.plot(range(1, len(rewards) + 1), rewards, color="tab:green")
        upper.set(ylabel="mean reward", xlabel="step", ylim=(0, 1), title="Asynchronous GRPO")
        versions = [row.version for row in updates]
        for label, seconds in (
            ("update", [row.update_s for row in updates]),
            ("pause", [row.pause_s for row in updates]),
            ("wire", [row.wire_s for row in updates]),
        ):
            lower.plot(versions, [1e3 * value for value in seconds], marker=".", label=label)
        lower.set(ylabel="milliseconds", xlabel="version", yscale="log", title="Weight updates")
