"""Terminal view of a controller's state, for `windlass status` and for the running demo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass.control.report import Measure
from windlass.net.logs import printable
from windlass.wording import counted

MAX_LINKS = 20
"""Largest number of links in the table."""
MAX_ROUNDS = 10
"""Largest number of rounds in the table; the table shows the newest rounds."""


def status_of(
    view: Mapping[str, Any], *, last_rounds: int = MAX_ROUNDS, max_links: int = MAX_LINKS
) -> RenderableType:
    """Draw the answer of `/v1/overview` for a terminal of 80 columns.

    Args:
        view: the answer.
        last_rounds: largest number of rounds to show; older rounds are left out.
        max_links: largest number of links to show.
    """
    rounds = view["rounds"][max(len(view["rounds"]) - last_rounds, 0) :]
    return Group(*_parts(_printable({**view, "rounds": rounds}), max_links))


def status_within(
    view: Mapping[str, Any], console: Console, height: int, *, last_rounds: int = MAX_ROUNDS
) -> RenderableType:
    """Draw the answer of `/v1/overview` in the largest of six sizes that fits into `height` lines of the console.

    If no size fits, use the smallest. If there were more lines, the terminal would cut off the last lines, which contain the totals.
    """
    sizes = [(last_rounds, MAX_LINKS), (last_rounds, 6), (last_rounds, 0), (3, 0), (1, 0), (0, 0)]
    drawn: RenderableType = ""
    for rounds, links in sizes:
        drawn = status_of(view, last_rounds=min(rounds, last_rounds), max_links=links)
        if len(console.render_lines(drawn, pad=False)) <= height:
            break
    return drawn


def _printable(value: Any) -> Any:
    """Return a value without control characters: text from peers must not control the terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): _printable(each) for key, each in value.items()}
    return value


def _table(*columns: str, right: int = 0, gap: int = 2) -> Table:
    """Return a table with figures in its last `right` columns."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        is_figure = number >= len(columns) - right
        table.add_column(
            column, overflow="fold", justify="right" if is_figure else "left", no_wrap=is_figure
        )
    return table


def _parts(view: dict[str, Any], max_links: int) -> Iterator[RenderableType]:
    now = f", now in {view['phase']} for {view['phase_for_s']:.1f} s" if view["phase"] else ""
    version = view["published_version"]
    published = "no version published yet" if version < 0 else f"published version {version}"
    yield Text(f"{published}, epoch {view['epoch']}, mode {view['mode']}{now}")
    yield from _engines(view)
    yield from _links(view["links"], max_links)
    yield from _rounds(view["rounds"])
    rollouts = view["rollouts"]
    for what, words in (
        ("", ("outstanding", "running", "waiting", "completed", "failed", "lost", "workers")),
        (" thrown away", ("too_old", "stopped_early", "dropped", "rejected", "wasted_tokens")),
    ):
        counts = ", ".join(f"{word.replace('_', ' ')} {rollouts[word]}" for word in words)
        yield Text(f"rollouts{what}: {counts}")
    ages = ", ".join(f"{age}: {count}" for age, count in view["staleness"].items()) or "none yet"
    yield Text(f"staleness of trained samples (versions: count): {ages}")


_STYLES = {"serving": "green", "waiting": "yellow", "incomplete": "yellow"}
"""State of an engine -> style; red for all other states."""


def _engines(view: dict[str, Any]) -> Iterator[RenderableType]:
    engines = _table("engine", "version", "ranks", "state", "address")
    for each in view["engines"]:
        state = Text(each["state"], style=_STYLES.get(each["state"], "red"))
        ranks = f"{each['ranks']}/{each['world_size']}"
        engines.add_row(each["name"], str(each["version"]), ranks, state, each["url"])
    yield engines
    for each in view["engines"]:
        if each["reason"]:
            yield Text(f"{each['name']}: {each['reason']}", style="red")
    for who, reason in view["refused"].items():
        yield Text(f"refused: {who}: {reason}", style="red")


def _links(links: list[dict[str, Any]], max_links: int) -> Iterator[RenderableType]:
    table = _table("from", "to", "transport", "ms", "GB/s", "at best", right=3)
    for each in links[:max_links]:
        reached = f"{each['gbps']:.2f}" if each["gbps"] else "-"
        ends = each["source"], each["destination"], each["transport"]
        took = f"{1e3 * each['wire_s']:.1f}" if each["wire_s"] else "-"
        table.add_row(*ends, took, reached, f"{each['ceiling_gbps']:g}")
    if table.rows:
        yield table
    if (left := len(links) - max_links) > 0:
        shown = f"and {left} more" if table.rows else counted(left, "link")
        yield Text(f"{shown}: `windlass status URL --json` shows all")
    for transport, reason in dict.fromkeys((e["transport"], e["reason"]) for e in links):
        yield Text(f"{transport}: {reason}", style="dim")


def _rounds(rounds: list[dict[str, Any]]) -> Iterator[RenderableType]:
    """Yield a table of rounds, and a line for each failure and each engine that was left out.

    Times that are 0 in every round have no column.
    """
    taken = [
        measure
        for measure in Measure
        if measure.unit == "seconds" and any(each["measures"].get(measure) for each in rounds)
    ]
    figures = [measure.label for measure in taken]
    table = _table("version", "outcome", "bytes", *figures, right=len(figures) + 1, gap=1)
    table.caption, table.caption_justify = "times in milliseconds", "left"
    for each in rounds:
        nbytes = each["measures"].get(Measure.NBYTES, 0)
        values = (measure.text(each["measures"].get(measure, 0.0)) for measure in taken)
        table.add_row(str(each["version"]), each["outcome"], size(nbytes), *values)
    if rounds:
        yield table
    for each in rounds:
        version = f"version {each['version']}"
        if each["reason"]:
            yield Text(f"{version} {each['outcome']}: {each['reason']}", style="red")
        for name, reason in each["left_out"].items():
            yield Text(f"{version}: the update continued without {name}: {reason}", style="yellow")


def size(nbytes: float) -> str:
    """Return a size in bytes in at most 7 characters: `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
