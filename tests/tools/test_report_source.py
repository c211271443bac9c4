"""The report on the source: every file of its list exists, and every figure adds up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import report_source


def test_every_file_on_the_path_of_a_version_exists() -> None:
    way = report_source.way_of_publish()
    assert len(way) == len(set(way)) > 10
    assert [path for path in way if not (report_source.PACKAGE / path).is_file()] == []


def test_a_page_without_the_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_source, "HEADING", "## No such heading")
    with pytest.raises(LookupError, match="must have a numbered list"):
        report_source.way_of_publish()


def test_words_are_found_in_names_of_every_style(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("class RestGate: ...\n_door = doors = 'by-hand'  # indoors\n")
    monkeypatch.setattr(report_source, "PACKAGE", tmp_path)
    assert report_source.private_words() == {"rest gate": 1, "door": 2, "by hand": 1}
    assert report_source.lines_by_room() == {"(top)": (1, 2)}
