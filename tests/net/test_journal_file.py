"""A shorter journal file can replace a journal file while entries are written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from windlass.errors import ConfigError
from windlass.net.journal_file import JournalFile


class Line(msgspec.Struct, frozen=True, tag="started"):
    number: int


def lines_of(path: Path) -> list[int]:
    file = JournalFile(path, Line)
    file.close()
    return [line.number for line in file.found]


def test_a_journal_file_continues_with_its_replacement_and_later_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = JournalFile(path, Line)
    file.write([file.encode(Line(number)) for number in range(5)])
    upto = file.nbytes
    (tmp_path / "lines.new").write_bytes(b"of a process that was killed here")
    file.write_replacement([Line(sum(line.number for line in file.read(upto)))])
    file.write([file.encode(Line(5))])
    assert lines_of(tmp_path / "lines.new") == [10]
    file.replace(upto)
    file.write([file.encode(Line(6))])
    file.close()
    assert lines_of(path) == [10, 5, 6]
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_journal_file_is_locked_against_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = JournalFile(path, Line)
    file.write_replacement([Line(1)])
    file.replace(file.nbytes)
    with pytest.raises(ConfigError, match="another process has it open"):
        JournalFile(path, Line)
    file.close()
    assert lines_of(path) == [1]


@pytest.mark.parametrize(("torn", "is_ours"), [(b'{"type":"sta', True), (b"#!/bin/sh", False)])
def test_a_journal_file_cuts_off_only_its_own_torn_first_line(
    torn: bytes, is_ours: bool, tmp_path: Path
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(torn)
    if is_ours:
        JournalFile(path, Line).close()
        assert path.read_bytes() == b""
        return
    with pytest.raises(ConfigError, match="must be a journal"):
        JournalFile(path, Line)
    assert path.read_bytes() == torn
