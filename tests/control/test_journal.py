"""The journal of rounds stays short and has the same content wherever its controller is killed."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_fleet import FakeFleet
from journal_killer import NUM_ENTRIES, entry, state

from windlass.config import ControlConfig
from windlass.control import coordinator, journal, publish_requests
from windlass.control.coordinator import Coordinator
from windlass.control.journal import Journal, JournalEntry, JournalKind
from windlass.control.messages import MAX_COUNT
from windlass.control.report import RoundOutcome
from windlass.control.routes import status_of
from windlass.errors import ConfigError
from windlass.files import sync_directory
from windlass.net import journal_file
from windlass.net.journal_file import add_checksum


@pytest.fixture
def folder() -> Iterator[Path]:
    """Provide a folder in memory if there is one, because these tests sync thousands of times."""
    shm = Path("/dev/shm")
    with TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        yield Path(name)


def expected(entries: list[JournalEntry]) -> list[object]:
    """Return the state that a controller must have after `entries`, computed from definitions."""
    published = [e.version for e in entries if e.kind is JournalKind.PUBLISHED]
    begun = [e.version for e in entries if e.kind is JournalKind.PUBLISHING]
    return [
        max(e.epoch for e in entries),
        max(e.round for e in entries),
        max(published, default=-1),
        max(published + begun, default=-1),
        sorted((e.engines[0], e.detail) for e in entries if e.kind is JournalKind.QUARANTINED),
    ]


def write_lines(path: Path, *lines: str) -> None:
    path.write_bytes(b"".join(add_checksum(line.encode()) for line in lines))


@pytest.mark.parametrize(
    "number", ['"epoch":99999999999999999999', '"epoch":9007199254740992', '"epoch":-1']
)
def test_a_journal_entry_with_an_invalid_epoch_is_refused(number: str, folder: Path) -> None:
    path = folder / "journal"
    good = '{"type":"started","epoch":1,"round":0,"version":-1}'
    write_lines(path, good, good.replace('"epoch":1', number))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="line 2"):
        Journal(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("field", ["engines", "lineage"])
def test_a_journal_entry_with_an_invalid_name_is_refused(field: str, folder: Path) -> None:
    path, name = folder / "journal", json.dumps("n" * 256)
    value = f"[{name}]" if field == "engines" else name
    write_lines(path, f'{{"type":"started","epoch":1,"round":0,"version":-1,"{field}":{value}}}')
    with pytest.raises(ConfigError, match="line 1"):
        Journal(path)


def test_a_journal_at_the_last_epoch_is_refused_before_anything_is_written(folder: Path) -> None:
    path = folder / "journal"
    write_lines(path, f'{{"type":"started","epoch":{MAX_COUNT},"round":0,"version":-1}}')
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"epoch must be < 2\^53, got 9007199254740992"):
            Coordinator(ControlConfig(), journal_path=path)
    assert path.read_bytes() == before


def test_a_journal_with_any_flipped_bit_is_refused_and_unchanged(folder: Path) -> None:
    path = folder / "journal"
    opened = Journal(path)
    opened.start()
    for number in range(4):
        opened.append(entry(number))
    opened.append(JournalEntry(JournalKind.PUBLISHED, 9, 9, 9, ("a",)))
    opened.close()
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ConfigError):
            Journal(path)
        assert path.read_bytes() == damaged


def test_a_second_controller_on_a_journal_is_refused(folder: Path) -> None:
    path, link = folder / "journal", folder / "link"
    first = Journal(path)
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(ConfigError, match="another process has it open"):
            Coordinator(ControlConfig(), journal_path=name)
    first.close()


def test_a_journal_that_is_a_fifo_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "journal")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        Coordinator(ControlConfig(), journal_path=folder / "journal")


@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_a_controller_whose_journal_was_removed_or_replaced_publishes_nothing(
    how: str, folder: Path
) -> None:
    path = folder / "journal"
    async with FakeFleet(journal_path=path) as rig:
        await rig.start({"a": 1})
        assert (await rig.publish(0)).outcome is RoundOutcome.PUBLISHED
        path.unlink()
        if how == "replaced":
            Journal(path).close()
        report = await rig.publish(1)
        assert report.outcome is RoundOutcome.FAILED
        assert f"journal was {how} while it was open" in report.reason
        assert rig.engines["a/0"].version == 0


def test_a_journal_keeps_its_run_after_compactions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "COMPACT_NBYTES", 500)
    monkeypatch.setattr(journal, "KEPT_ENTRIES", 3)
    path = folder / "journal"
    found = set()
    for number in range(20):
        opened = Journal(path)
        opened.start()
        found.add(opened.summary.lineage)
        opened.append(entry(number))
        opened.close()
    assert len(found) == 1
    others = {Journal(folder / f"other-{i}") for i in range(2)}
    for other in others:
        other.start()
    assert len({other.summary.lineage for other in others} | found) == 3


def _held() -> int:
    """Return the bytes that journals and this file allocated and still hold."""
    gc.collect()
    mine = [
        tracemalloc.Filter(True, name)
        for name in (journal.__file__, journal_file.__file__, __file__)
    ]
    found = tracemalloc.take_snapshot().filter_traces(mine).statistics("filename")
    return sum(statistic.size for statistic in found)


def test_neither_the_journal_nor_memory_grows_over_thousands_of_rounds(folder: Path) -> None:
    path = folder / "journal"
    opened = Journal(path)

    def rounds(first: int, last: int) -> None:
        for number in range(first, last):
            for kind in (JournalKind.ROUND_BEGAN, JournalKind.PUBLISHING, JournalKind.PUBLISHED):
                opened.append(JournalEntry(kind, 3, number, number, ("engine-a", "engine-b")))

    rounds(0, 3000)
    tracemalloc.start()
    try:
        rounds(3000, 4000)
        before = _held()
        rounds(4000, 8000)
        after = _held()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000
    assert path.stat().st_size <= journal.COMPACT_NBYTES
    assert state(opened) == [3, 7999, 7999, 7999, []]
    opened.close()
    assert state(Journal(path)) == [3, 7999, 7999, 7999, []]


def test_a_compacted_journal_gives_the_state_of_the_whole_journal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "COMPACT_NBYTES", 500)
    monkeypatch.setattr(journal, "KEPT_ENTRIES", 3)
    path = folder / "journal"
    entries: list[JournalEntry] = []
    for number in range(80):
        opened = Journal(path)
        for each in (entry(2 * number), entry(2 * number + 1)):
            entries.append(each)
            opened.append(each)
            assert state(opened) == expected(entries)
        assert tuple(opened.recent)[-3:] == tuple(entries[-3:])
        opened.close()


def test_a_controller_killed_before_any_call_of_a_compaction_loses_nothing(folder: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "journal_killer.py"
    ended = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    runs = [json.loads(line) for line in ended.stdout.splitlines()]
    for call, told, said in runs:
        # The journal may also contain the entry that was being recorded.
        possible = [
            json.loads(json.dumps(expected([entry(i) for i in range(upto + 1)])))
            for upto in (told, told + 1)
        ]
        assert said in possible, f"killed before {call} after entry {told}"
    assert runs[-1][:2] == ["", NUM_ENTRIES - 1]
    killed = [call for call, _, _ in runs[:-1]]
    assert {"open", "write", "fdatasync", "fsync", "close", "replace"} <= set(killed)
    assert killed.count("replace") >= 2


def test_compaction_syncs_the_file_then_the_name_then_the_next_entry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "COMPACT_NBYTES", 400)
    monkeypatch.setattr(journal, "KEPT_ENTRIES", 2)
    calls: list[str] = []
    real_replace, real_sync, real_directory = Path.replace, os.fdatasync, sync_directory

    def replace(self: Path, target: Path) -> Path:
        calls.append("replace")
        return real_replace(self, target)

    def sync(descriptor: int) -> None:
        calls.append("sync")
        real_sync(descriptor)

    def directory(path: Path) -> None:
        calls.append("directory")
        real_directory(path)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(journal_file, "sync_directory", directory)
    opened = Journal(folder / "journal")
    for number in range(4):
        calls.clear()
        opened.append(entry(number))
    opened.close()
    assert calls == ["sync", "directory", "sync", "replace", "directory", "sync"]


@pytest.mark.parametrize("call", ["replace", "write"])
def test_a_journal_that_cannot_be_compacted_still_appends(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "COMPACT_NBYTES", 400)
    monkeypatch.setattr(journal, "KEPT_ENTRIES", 2)
    opened = Journal(folder / "journal")
    for number in range(3):
        opened.append(entry(number))
    with monkeypatch.context() as broken:
        if call == "replace":
            broken.setattr(Path, "replace", _full)
        else:
            real = journal_file.write_all
            broken.setattr(
                journal_file,
                "write_all",
                lambda fd, data: real(fd, data) if len(data) < 120 else _full(),
            )
        opened.append(entry(3))
    assert (folder / "journal").read_bytes().count(b"\n") == 4
    for number in range(4, 30):
        opened.append(entry(number))
    assert (folder / "journal").read_bytes().count(b"\n") < 20
    opened.close()
    assert state(Journal(folder / "journal")) == expected([entry(i) for i in range(30)])


def _full(*_args: object) -> None:
    raise OSError(28, "No space left on device")


def test_after_a_failed_sync_the_next_entry_rewrites_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed sync, Linux counts the lost lines as written: the next sync succeeds without them."""
    path = folder / "journal"
    kept = Journal(path)
    kept.start()
    kept.append(entry(1))
    inode = path.stat().st_ino

    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fails)
        for number in (2, 3):
            with pytest.raises(OSError, match="Input/output error"):
                kept.append(entry(number))
    assert path.stat().st_ino == inode
    kept.append(entry(4))
    assert path.stat().st_ino != inode
    kept.close()
    again = Journal(path)
    assert (again.summary, [*again.recent][-2:]) == (kept.summary, [entry(1), entry(4)])
    again.close()


def test_a_file_that_cannot_be_rewritten_after_a_failed_sync_is_an_os_error(folder: Path) -> None:
    """A round ends on an OSError of the journal. Another error would escape from the round."""
    kept = Journal(folder / "journal")
    kept.start()

    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fdatasync", fails)
        with pytest.raises(OSError, match="Input/output error"):
            kept.append(entry(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            kept.append(entry(2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    kept.append(entry(3))
    kept.close()


def test_a_file_that_is_replaced_while_it_is_opened_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "journal"
    Journal(path).close()
    real = fcntl.flock

    def flock(descriptor: int, flags: int) -> None:
        other = folder / "other"
        other.touch()
        other.replace(path)
        real(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="was replaced while it was open"):
        Journal(path)


def test_a_controller_that_cannot_write_its_first_line_releases_the_journal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "journal"
    with monkeypatch.context() as full:
        full.setattr(journal_file, "write_all", _full)
        with pytest.raises(ConfigError, match="No space left"):
            Coordinator(ControlConfig(), journal_path=path)
    opened = Journal(path)
    assert opened.summary.epoch == 0
    opened.close()


async def test_a_coordinator_keeps_the_newest_reports_and_counts_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert publish_requests.KEPT_REPORTS > 100
    monkeypatch.setattr(coordinator, "KEPT_REPORTS", 5)
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        for version in range(12):
            await rig.publish(version)
        assert [report.version for report in rig.coordinator.reports] == [7, 8, 9, 10, 11]
        assert status_of(rig.coordinator)["updates"] == 12
