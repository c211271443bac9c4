"""The picture at the end: reward and update times over steps."""

from __future__ import annotations

from pathlib import Path

from windlass.jobs.demo.record import DemoRecord

__all__ = ["save_plot"]


def save_plot(record: DemoRecord, path: Path) -> None:
    """Write a PNG with two panels."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 7), constrained_layout=True)
    upper.plot(range(1, len(record.rewards) + 1), record.rewards, color="tab:green")
    upper.set(ylabel="mean reward", xlabel="step", ylim=(0, 1), title="Asynchronous GRPO")
    versions = [row.version for row in record.updates]
    for label, seconds in (
        ("update", [row.update_s for row in record.updates]),
        ("pause", [row.pause_s for row in record.updates]),
        ("wire", [row.wire_s for row in record.updates]),
    ):
        lower.plot(versions, [1e3 * value for value in seconds], marker=".", label=label)
    lower.set(ylabel="milliseconds", xlabel="version", yscale="log", title="Weight updates")
    lower.legend()
    upper.grid(alpha=0.3)
    lower.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
