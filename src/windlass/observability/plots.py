"""Pictures of a run, by matplotlib (the extra `demo`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def drawn_to(path: Path, num_plots: int = 1) -> Iterator[list[Any]]:
    """Yield matplotlib axes, one below the other, to draw on; they are written to `path` as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(
        num_plots, figsize=(9, 3 + 2 * num_plots), constrained_layout=True, squeeze=False
    )
    axes = [row[0] for row in rows]
    yield axes
    for each in axes:
        each.grid(alpha=0.3, axis="y")
        if each.get_legend_handles_labels()[0]:
            each.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
