"""Files that commands write are complete or absent, and never overwrite the target of a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass.files import replacing, write_file


def test_a_link_is_replaced_and_its_target_unchanged(tmp_path: Path) -> None:
    """A report used to overwrite the target of another user's link in a shared folder."""
    victim, planted = tmp_path / "victim", tmp_path / "report.html"
    victim.write_bytes(b"secret")
    planted.symlink_to(victim)
    write_file(planted, b"report")
    assert (victim.read_bytes(), planted.read_bytes()) == (b"secret", b"report")
    assert not planted.is_symlink()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_file(path, b"old")
    with pytest.raises(OSError, match="no space"):
        fail_while_writing(path)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [(path.name, b"old")]


def fail_while_writing(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half of the n")
        raise OSError("no space")


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch(0o600)
    write_file(path, b"")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    with replacing(path, 0o600) as file:
        file.write(b"")
    assert path.stat().st_mode & 0o777 == 0o600


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
