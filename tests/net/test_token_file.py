"""The file of the token: accepted files and refused files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass import envs
from windlass.envs import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, control_token
from windlass.errors import ConfigError

TOKEN = "secret of the test"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(envs, "removed_secrets", {})
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(TOKEN + "\n")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))
    return path


def test_the_token_is_read_from_a_file_of_the_user(file: Path, tmp_path: Path) -> None:
    assert control_token() == TOKEN
    file.chmod(0o400)
    assert control_token() == TOKEN


def test_a_link_to_a_token_file_of_the_user_is_followed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(link))
    assert control_token() == TOKEN
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="must be a file that its user alone can read"):
        control_token()


def test_the_token_variable_takes_precedence_over_the_token_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    assert control_token() == "another"


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o644, 0o666])
def test_a_token_file_that_other_users_can_read_or_change_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode 0600\), got {file} of mode {mode:04o}"):
        control_token()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match=f"must be a file of this user, got {file} of user 12345"):
        control_token()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must not be empty"),
        (b"\n", "must not be empty"),
        (
            b"two\nlines\n",
            r"printable ASCII without blanks at its ends; remove these characters: \['\\n'\]",
        ),
        (b" blank\n", "without blanks at its ends"),
        (b"\xff\xfe\n", "must be a file that this user can read as text: 'utf-8' codec"),
    ],
)
def test_a_file_without_a_token_is_refused_and_not_repeated(
    file: Path, content: bytes, says: str
) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{TOKEN_FILE_VARIABLE}.*{says}") as refused:
        control_token()
    assert "lines" not in str(refused.value)


def test_a_token_path_that_is_not_a_file_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (fifo, tmp_path, tmp_path / "none"):
        monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))
        with pytest.raises(ConfigError, match=f"{TOKEN_FILE_VARIABLE} must be a file"):
            control_token()
