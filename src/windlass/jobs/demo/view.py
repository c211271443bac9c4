"""The live terminal view: what the fleet serves, how the reward goes, what updates cost."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from windlass.jobs.demo.record import DemoRecord
from windlass.jobs.demo.settings import DemoSettings
from windlass.updates.fleet import EngineInfo

__all__ = ["render"]

BARS = " ▁▂▃▄▅▆▇█"
LAST_UPDATES = 8


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values in [0, 1] as bars; the last `width` of them."""
    return "".join(BARS[round(min(max(v, 0.0), 1.0) * (len(BARS) - 1))] for v in values[-width:])


def render(
    settings: DemoSettings, record: DemoRecord, engines: Sequence[EngineInfo], outstanding: int
) -> RenderableType:
    """One frame."""
    return Panel(
        Group(_progress(settings, record, outstanding), _engines(engines), _updates(record)),
        title=f"windlass demo · {settings.transport} · {settings.mode}",
        border_style="cyan",
    )


def _progress(settings: DemoSettings, record: DemoRecord, outstanding: int) -> RenderableType:
    reward = record.rewards[-1] if record.rewards else 0.0
    ages = sum(age * n for age, n in record.staleness.items()) / max(record.staleness.total(), 1)
    lines = Text()
    lines.append(f"step {len(record.rewards)}/{settings.steps}", style="bold")
    lines.append(
        f"   reward {reward:.3f}   mean staleness {ages:.2f}   outstanding {outstanding}\n"
    )
    lines.append(sparkline(record.rewards), style="green")
    for event in record.events[-2:]:
        lines.append(f"\n{event}", style="yellow")
    return lines


def _engines(engines: Sequence[EngineInfo]) -> RenderableType:
    table = Table("engine", "serves version", "address", box=None, padding=(0, 2))
    for engine in engines:
        table.add_row(engine.name, str(engine.version), engine.url)
    return table


def _updates(record: DemoRecord) -> RenderableType:
    table = Table(box=None, padding=(0, 2))
    for column in (
        "version", "bytes", "wire ms", "update ms", "pause ms", "GB/s", "% memcpy", "digests",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in record.updates[-LAST_UPDATES:]:
        table.add_row(
            str(row.version),
            f"{row.nbytes:,}",
            f"{row.wire_s * 1e3:.2f}",
            f"{row.update_s * 1e3:.1f}",
            f"{row.pause_s * 1e3:.1f}",
            f"{row.gbps:.2f}",
            f"{100 * row.gbps / row.ceiling_gbps:.0f}",
            "equal" if row.digest_ok else "DIFFER",
        )
    return table
