"""The picture at the end: reward and update times over steps."""

from __future__ import annotations

from pathlib import Path

from windlass.demo.record import DemoRecord

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
    for name in ("update_s", "pause_s", "wire_s"):
        times = [1e3 * {"update_s": r.update_s, "pause_s": r.pause_s, "wire_s": r.wire_s}[name]
                 for r in record.updates]  # fmt: skip
        lower.plot(versions, times, marker=".", label=name.removesuffix("_s"))
    lower.set(ylabel="milliseconds", xlabel="version", yscale="log", title="Weight updates")
    lower.legend()
    upper.grid(alpha=0.3)
    lower.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
