"""Files of the disk backend belong to their owner, even if other users may write to the folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_agents import engine_manifest

from windlass.backends import disk_files
from windlass.backends.disk_files import DiskIndex, read_boxes, read_index, write_shards
from windlass.errors import TransferFailed
from windlass.memory.host import HostMemory

MANIFEST = engine_manifest("trainer/0", 1)


def write(folder: Path) -> DiskIndex:
    held = [np.full(parameter.nbytes, 7, np.uint8) for parameter in MANIFEST.parameters]
    addresses = tuple(int(memory.ctypes.data) for memory in held)
    return write_shards(folder, 1, MANIFEST, addresses, HostMemory())


@pytest.fixture(autouse=True)
def everybody_may_read() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_only_the_owner_can_read_weights_on_disk(tmp_path: Path) -> None:
    index = write(tmp_path)
    home = disk_files.version_folder(tmp_path, 1)
    assert home.stat().st_mode & 0o777 == 0o700
    files = sorted(home.iterdir())
    assert {path.name for path in files} == {index.file, "trainer%2F0.json"}
    assert [path.stat().st_mode & 0o777 for path in files] == [0o600, 0o600]


def test_older_file_that_cannot_be_deleted_does_not_fail_the_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers follow the index, which names the new file."""
    home = disk_files.version_folder(tmp_path, 1)
    # `unlink` fails for a folder.
    (home / "trainer%2F0.older.safetensors").mkdir(parents=True)
    index = write(tmp_path)
    assert read_index(tmp_path, 1, "trainer/0") == index
    assert "trainer%2F0.older.safetensors" in caplog.text


def test_a_link_under_a_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("secret")
    home = disk_files.version_folder(tmp_path, 1)
    home.mkdir()
    (home / "trainer%2F0.json.tmp").symlink_to(victim)
    write(tmp_path)
    assert victim.read_text() == "secret"
    assert read_index(tmp_path, 1, "trainer/0").version == 1

    # Even if an attacker guesses the name, the file is not opened through a link.
    monkeypatch.setattr(os, "urandom", lambda nbytes: bytes(nbytes))
    (home / f"trainer%2F0.{bytes(4).hex()}.safetensors.{bytes(8).hex()}.tmp").symlink_to(victim)
    with pytest.raises(TransferFailed, match="File exists"):
        write(tmp_path)
    assert victim.read_text() == "secret"


class _LostMemory:
    """Host memory whose views fail, as those of a GPU that has been lost."""

    def __getattr__(self, name: str) -> object:
        return getattr(HostMemory(), name)

    def view(self, *_: object) -> object:
        raise TransferFailed("the GPU is lost")


def test_a_fault_of_the_readers_memory_is_not_a_fault_of_the_files(tmp_path: Path) -> None:
    index = write(tmp_path)
    home = disk_files.version_folder(tmp_path, 1)
    held = [np.zeros(parameter.nbytes, np.uint8) for parameter in MANIFEST.parameters]
    addresses = tuple(int(memory.ctypes.data) for memory in held)
    memory: Any = _LostMemory()
    with pytest.raises(TransferFailed, match="the GPU is lost"):
        read_boxes(home, [index], MANIFEST, addresses, memory)
    assert read_boxes(home, [index], MANIFEST, addresses, HostMemory()) == []
    assert all((memory == 7).all() for memory in held)
