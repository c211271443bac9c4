"""`tools/measure_english.py` counts hard words in prose, and compares each room with its limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import measure_english

CODE = '''"""Names whoever came."""
whoever = "whoever"  # The one that is gone.


class Room:
    """A room."""

    size: int
    """Square metres of which nobody knows."""


def enter() -> None:
    """Enter the room."""
'''


def test_docstrings_and_comments_are_counted_and_code_is_not(tmp_path: Path) -> None:
    (tmp_path / "room.py").write_text(CODE)
    found = measure_english.measure([tmp_path])
    assert found.num_words == 3 + 5 + 2 + 6 + 3
    assert [number for number, _ in found.lines] == [1, 2, 2]


def test_code_of_pages_is_not_counted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Plain words.\n\n    whoever\n\n```\nwhoever\n```\nIt names `whoever` anew.\n")
    found = measure_english.measure([page])
    assert (found.num_words, [number for number, _ in found.lines]) == (5, [1])


def test_a_room_above_its_limit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("part/hard", "part/plain"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "part" / "hard" / "room.py").write_text(CODE)
    (tmp_path / "part" / "plain" / "room.py").write_text('"""Sums up rows."""\n' * 1000)
    (tmp_path / "part" / "page.md").write_text("Plain words.\n")
    monkeypatch.setattr(measure_english, "ROOT", tmp_path)
    monkeypatch.setattr(measure_english, "LIMITS", {"part": 3.0})
    assert measure_english.main([]) == 1
    said = capsys.readouterr().out
    assert f"{tmp_path}/part/hard: hard words must be at most 3.0 per 1,000, got 263.2" in said
    assert "plain" not in said
    monkeypatch.setattr(measure_english, "LIMITS", {"part": 300.0})
    assert measure_english.main([]) == 0
    assert "3 rooms within their limits" in capsys.readouterr().out
