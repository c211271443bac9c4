"""Figures equal the output of their script for the committed results."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import figures

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_equals_the_output_of_its_script(name: str) -> None:
    drawn = figures.FIGURES[name]().svg()
    assert (figures.FOLDER / f"{name}.svg").read_text() == drawn, "run python -m tools.figures"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_fits_its_frame_and_has_a_description(name: str) -> None:
    """A letter counts as half an em, which is more than the average."""
    root = ET.fromstring(figures.FIGURES[name]().svg())
    height = float(root.get("viewBox", "").split()[3])
    assert all((root.findtext(f"{SVG}{tag}") or "") for tag in ("title", "desc"))
    for x, y, width, said in texts(root):
        assert 0 <= x <= x + width <= figures.WIDTH, said
        assert 0 < y < height, said


def texts(root: ET.Element) -> Iterator[tuple[float, float, float, str]]:
    for each in root.iter(f"{SVG}text"):
        said = each.text or ""
        width = len(said) * 13 * 0.5
        shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[each.get("text-anchor", "start")]
        yield float(each.get("x", "")) - shift * width, float(each.get("y", "")), width, said


def test_every_figure_is_on_a_page() -> None:
    pages = "".join(p.read_text() for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert not [name for name in figures.FIGURES if f"figures/{name}.svg" not in pages]


def test_a_changed_result_changes_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in figures.RESULTS.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text().replace("3.162", "4.162"))
    before = figures.update_time().svg()
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert figures.update_time().svg() != before


def test_a_missing_or_duplicate_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 rows"):
        figures.measured("bench_update_2core-epyc_2026-11-21", ("no case", "update", ""))
    with pytest.raises(ValueError, match="2 rows"):
        figures.measured(
            "bench_update_2core-epyc_2026-11-21", ("windlass cma", "update_median", "")
        )
