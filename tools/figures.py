"""Draw docs/figures/*.svg, in light and dark colours. Figures of measurements use benchmarks/results.

python -m tools.figures [--check]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 800
STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#1f2328}
.small{font-size:11.5px}.bold{font-weight:600}.soft{fill:#59636e}
.box{fill:#f3f5f8;stroke:#8c959f}.line{stroke:#59636e;fill:none;stroke-width:1.4}.grid{stroke:#d8dee4}
.a{fill:#3566c2}.b{fill:#c4501b}.c{fill:#2b8a57}.d{fill:#8a5fc7}.idle{fill:#cfd6de}
.on{fill:#fff}.badtext{fill:#b3261e}
@media(prefers-color-scheme:dark){
text{fill:#e2e6eb}.soft{fill:#a2abb6}.box{fill:#252b33;stroke:#6b7683}.line{stroke:#a2abb6}.grid{stroke:#3a424c}
.a{fill:#5b8def}.b{fill:#e8794a}.c{fill:#45b57b}.d{fill:#a986e0}.idle{fill:#48515c}.on{fill:#10141a}
.badtext{fill:#ff8a80}}
"""


class Drawing:
    """Shapes in drawing order. `title` and `told` describe the drawing for screen readers."""

    def __init__(self, height: int, title: str, told: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title><desc>{escape(told)}</desc><style>{STYLE}</style>",
            (
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" class="soft"/></marker></defs>'
            ),
        ]

    def text(self, x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> None:
        """Add a line of text with its base line at y."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(said)}</text>'
        )

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Add a rectangle with round corners."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
        )

    def box(self, x: float, y: float, width: float, lines: Sequence[str]) -> None:
        """Add a box with n lines of text. It is 17 n + 13 high, and the first line is bold."""
        self.rect(x, y, width, 17 * len(lines) + 13, "box")
        for number, line in enumerate(lines):
            kind = "bold" if number == 0 else "small soft"
            self.text(x + width / 2, y + 20 + 17 * number, line, kind, "middle")

    def bar(self, x: float, y: float, width: float, said: str, kind: str) -> None:
        """Add a bar with a word in it."""
        self.rect(x, y, width, 24, kind)
        self.text(x + width / 2, y + 16, said, "small on" if kind != "idle" else "small", "middle")

    def arrow(self, path: str, kind: str = "line") -> None:
        """Add a path with an arrow head."""
        self._parts.append(f'<path d="{path}" class="{kind}" marker-end="url(#tip)"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "line") -> None:
        """Add a straight line."""
        self._parts.append(f'<path d="M{x:g} {y:g} {to_x:g} {to_y:g}" class="{kind}"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """Add a point of a plot."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="6" class="{kind}"/>')

    def svg(self) -> str:
        """Return the text of the SVG file."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def clocks() -> Drawing:
    """Draw the two clocks."""
    drawing = Drawing(
        318,
        "Two clocks: connect and update",
        "Connect runs once per topology and pauses nothing. Update runs once per version; in_place pauses "
        "the engines before the write, staged after the verification.",
    )
    drawing.text(20, 26, "CONNECT", "bold")
    drawing.text(100, 26, "once per topology: seconds, and nothing is paused", "soft")
    steps = [
        ("describe", "the boxes of each rank", "ShardManifest"),
        ("plan", "every byte, or an error", "TransferPlan"),
        ("bind", "register memory once", "addresses"),
    ]
    for number, step in enumerate(steps):
        drawing.box(20 + 265 * number, 40, 220, step)
        if number:
            drawing.arrow(f"M{265 * number - 23} 72h41")
    drawing.text(20, 152, "UPDATE", "bold")
    drawing.text(100, 152, "once per version: milliseconds, reuses the results of Connect", "soft")
    widths = {"PREPARE": 120, "WRITE": 230, "VERIFY": 100, "APPLY": 80, "PUBLISH": 80}
    for mode, top, stands in (("in_place", 170, (110, 720)), ("staged", 240, (560, 720))):
        drawing.text(20, top + 17, mode, "bold")
        x = 110.0
        for name, width in widths.items():
            drawing.bar(x, top, width - 4, name, "a")
            x += width
        drawing.text(20, top + 47, "engine", "small soft")
        start, end = stands
        if start > 110:
            drawing.bar(110, top + 31, start - 114, "generates with the old version", "c")
        drawing.bar(start, top + 31, end - start - 4, "paused", "idle")
        drawing.bar(end, top + 31, 60, "new", "c")
    return drawing


def way() -> Drawing:
    """Draw the way of a byte from a trainer to an engine."""
    drawing = Drawing(
        250,
        "A byte's way from a trainer's shard to an engine's parameter",
        "The trainer packs and hashes its shard, writes it one-sided into the engine's memory, and the engine "
        "compares digests before the parameter goes live.",
    )
    drawing.text(150, 26, "trainer rank", "bold", "middle")
    drawing.text(650, 26, "engine rank", "bold", "middle")
    drawing.line(400, 14, 400, 240, "grid")
    drawing.box(30, 40, 240, ("local shard", "FSDP2, TP, Megatron-core; no gather"))
    drawing.box(30, 112, 240, ("pack, cast, quantise", "only where layouts differ"))
    drawing.box(30, 184, 240, ("digest per link", "of the bytes that are sent"))
    drawing.arrow("M150 87v23")
    drawing.arrow("M150 159v23")
    drawing.box(530, 40, 240, ("live parameter", "the tensor that the engine serves"))
    drawing.box(530, 112, 240, ("registered memory", "in_place: the parameter itself"))
    drawing.box(530, 184, 240, ("digests equal?", "otherwise the link is written again"))
    drawing.arrow("M270 135h256")
    drawing.text(400, 126, "one-sided write", "small bold", "middle")
    drawing.text(400, 152, "cma, shm, cuda_ipc,", "small soft", "middle")
    drawing.text(400, 167, "Mooncake, NIXL", "small soft", "middle")
    drawing.arrow("M270 208h256")
    drawing.text(400, 224, "by the controller", "small soft", "middle")
    drawing.arrow("M650 159v23")
    drawing.arrow("M770 208h14v-145h-12")
    return drawing


def transaction() -> Drawing:
    """Draw the transaction and its failures."""
    drawing = Drawing(
        330,
        "An update is one transaction, with these outcomes of failures",
        "Each phase and the outcome of a failure in it: before PUBLISH no engine serves the new version.",
    )
    phases = (
        ("PREPARE", "pack, hash"),
        ("WRITE", "one-sided"),
        ("VERIFY", "digests equal"),
        ("APPLY", "unpack, flip"),
        ("PUBLISH", "stamp, resume"),
    )
    for number, lines in enumerate(phases):
        drawing.box(20 + 156 * number, 40, 132, lines)
        if number:
            drawing.arrow(f"M{156 * number - 4} 63h22")
    drawing.text(
        20, 26, "Every participating engine completes all five phases, or is left out.", "soft"
    )
    failures = (
        (
            "PREPARE",
            "a trainer fails, or replicas differ",
            "nothing was written: the fleet keeps the old version",
        ),
        ("WRITE", "a write fails", "it is written again; then its engine is left out"),
        (
            "WRITE",
            "the result of a write is unknown",
            "no second write until the process is replaced",
        ),
        ("VERIFY", "a digest differs", "its link is written again; then its engine is left out"),
        (
            "any",
            "an engine dies or is late",
            "left out; the others publish; it catches up from a peer",
        ),
    )
    for number, (phase, event, then) in enumerate(failures):
        y = 118 + 38 * number
        drawing.text(20, y, phase, "small soft")
        drawing.text(90, y, event, "badtext")
        drawing.text(380, y, then)
        drawing.line(20, y + 14, 780, y + 14, "grid")
    drawing.text(
        20,
        316,
        "A paused engine resumes with exactly one published version, or does not resume.",
        "bold",
    )
    return drawing


def staleness() -> Drawing:
    """Draw the staleness of rollouts that continue across updates."""
    drawing = Drawing(
        268,
        "Staleness: how many versions old a sample may be",
        "Rollouts continue across updates. A sample is as old as its oldest token; with max_staleness 1 a sample "
        "with an oldest token two versions behind is not trained on.",
    )
    drawing.text(
        20, 26, "Rollouts continue while weights change. Every token has its version.", "soft"
    )
    edges = (150, 350, 550, 750)
    for number, x in enumerate(edges):
        drawing.line(x, 44, x, 232, "grid")
        if number < 3:
            drawing.text(x + 8, 56, f"version {number + 3}", "bold")
    drawing.text(20, 56, "published", "small soft")
    kinds = ("a", "d", "c")
    rows = (
        ("rollout 1", 170, 330, "age 0 at version 3"),
        ("rollout 2", 230, 480, "age 1 at version 4: trained on"),
        ("rollout 3", 300, 690, "age 2 at version 5: too old, not trained on"),
        ("rollout 4", 400, 680, "age 1 at version 5: trained on"),
    )
    for number, (name, start, end, said) in enumerate(rows):
        y = 72 + 40 * number
        drawing.text(20, y + 15, name)
        for version, kind in enumerate(kinds):
            first, last = max(start, edges[version]), min(end, edges[version + 1])
            if first < last:
                drawing.rect(first, y, last - first - 2, 18, kind)
        drawing.text(end, y + 32, said, "small badtext" if "not" in said else "small soft", "end")
    drawing.text(
        20,
        256,
        "StalenessPolicy(max_staleness=1): age = published version - version of the oldest token",
        "small",
    )
    return drawing


UPDATES = (
    (
        "vLLM 0.24, 61 GB, 4 x H200",
        "its own NCCL transfer, no load",
        "bench_live_vllm_4xH200_2026-11-21",
        ("in_place", "update against", "own transfer"),
    ),
    (
        "SGLang 0.5.16, 61 GB, 4 x H200",
        "its own NCCL transfer, no load",
        "bench_live_sglang_4xH200_2026-11-21",
        ("in_place", "update against", "own transfer"),
    ),
    (
        "SGLang 0.5.16, 61 GB, 2 x H200",
        "its own NCCL transfer, no load",
        "bench_live_sglang_2xH200_2026-11-22",
        ("in_place", "update against", "own transfer"),
    ),
    (
        "2 to 2 processes, 201 MB, 2 cores",
        "gather, gloo broadcast, load",
        "bench_update_2core-epyc_2026-11-21",
        ("windlass cma", "update_median", "gather"),
    ),
    (
        "vLLM 0.32, 67 MB, 2 cores",
        "its reload_weights",
        "bench_engines_vllm_2core-epyc_2026-11-21",
        ("vllm", "update, median", "reload"),
    ),
    (
        "SGLang 0.5.23, 67 MB, 2 cores",
        "its gloo broadcast, unverified",
        "bench_engines_sglang_2core-epyc_2026-11-21",
        ("sglang", "update, median", "distributed"),
    ),
    (
        "TRL 1.16 and vLLM, 43 MB, 2 cores",
        "reload_weights",
        "bench_trl_2core-epyc_2026-11-23",
        ("Windlass, attached", "weight_sync_s median", "reload"),
    ),
)
"""Updated engine, alternative of the same run, file, and text in the case, metric and reference of its row."""


def measured(file: str, wanted: tuple[str, str, str]) -> tuple[float, float]:
    """Return the seconds of an update and of its alternative.

    Raises:
        ValueError: none or several rows of the file match.
    """
    rows = [
        row
        for row in json.loads((RESULTS / f"{file}.json").read_text())
        if all(
            part in row[key]
            for part, key in zip(wanted, ("case", "metric", "reference"), strict=True)
        )
    ]
    if len(rows) != 1:
        raise ValueError(f"{file}: {len(rows)} rows with {wanted}, need one")
    scale = {"s": 1.0, "ms": 1e-3}[rows[0]["unit"]]
    return rows[0]["value"] * scale, rows[0]["reference_value"] * scale


def spell(seconds: float) -> str:
    """Return a time in s or ms as text."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def update_time() -> Drawing:
    """Draw the time of an update and of its alternative."""
    low, high, left, right = 0.03, 5.0, 265, 690
    top, step = 74, 42

    def at(seconds: float) -> float:
        return left + (right - left) * math.log(seconds / low) / math.log(high / low)

    height = top + step * len(UPDATES) + 22
    found = [(row, measured(row[2], row[3])) for row in UPDATES]
    drawing = Drawing(
        height,
        "Time of one weight update",
        "; ".join(f"{row[0]}: {spell(a)}, {row[1]} {spell(b)}" for row, (a, b) in found),
    )
    drawing.text(20, 26, "Time of one whole update, median, logarithmic scale", "bold")
    drawing.dot(430, 22, "a")
    drawing.text(442, 26, "Windlass")
    drawing.dot(522, 22, "b")
    drawing.text(534, 26, "alternative, same run")
    for mark in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0):
        drawing.line(at(mark), 46, at(mark), height - 24, "grid")
        drawing.text(at(mark), height - 8, spell(mark).replace(".00", ""), "small soft", "middle")
    for number, ((what, other, _, _), (here, there)) in enumerate(found):
        y = top + step * number
        drawing.text(20, y, what)
        drawing.text(20, y + 15, other, "small soft")
        drawing.line(at(here), y, at(there), y)
        drawing.dot(at(here), y, "a")
        drawing.dot(at(there), y, "b")
        drawing.text(at(here) - 11, y + 4, spell(here), "small", "end")
        drawing.text(at(there) + 11, y + 4, spell(there), "small")
    return drawing


FIGURES: dict[str, Callable[[], Drawing]] = {
    "clocks": clocks,
    "way": way,
    "transaction": transaction,
    "staleness": staleness,
    "update-time": update_time,
}


def main() -> int:
    """Write the figures, or with --check name the outdated ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    FOLDER.mkdir(exist_ok=True)
    old = []
    for name, draw in FIGURES.items():
        path, svg = FOLDER / f"{name}.svg", draw().svg()
        if check and (not path.exists() or path.read_text() != svg):
            old.append(name)
        elif not check:
            path.write_text(svg)
    if old:
        print(f"out of date, run python -m tools.figures: {', '.join(old)}", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
