"""The launcher gets reports from ranks of all stages, while SGLang answers only for the first."""

from __future__ import annotations

import errno
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from windlass.engines.rank_reports import RankReports, RefusedByOtherRank, Secrets, carry_out
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable

DEADLINE_S = 20.0


def report(folder: str, rank: int, body: bytes) -> None:
    carry_out(folder, rank, lambda _: body)


def report_failure(folder: str, rank: int, error: Exception) -> None:
    def fail(_: Secrets) -> bytes:
        raise error

    carry_out(folder, rank, fail)


@contextmanager
def meanwhile(*calls: Callable[[], None]) -> Iterator[None]:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(DEADLINE_S)


def test_reports_are_gathered_in_rank_order() -> None:
    with RankReports(3) as reports:
        for rank in (2, 0, 1):
            report(reports.folder, rank, b"%d" % rank * 100_000)
        assert reports.gather(DEADLINE_S) == [b"%d" % rank * 100_000 for rank in range(3)]


def test_ranks_report_in_a_folder_of_any_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a folder with a path above 107 bytes, the limit of a socket's path."""
    (deep := tmp_path / ("x" * 200)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with RankReports(1) as reports:
        assert Path(reports.folder).parent == deep
        report(reports.folder, 0, b"heard")
        assert reports.gather(DEADLINE_S) == [b"heard"]


def test_gather_waits_for_a_late_rank() -> None:
    waiting = threading.Event()

    def late() -> None:
        waiting.wait(DEADLINE_S)
        report(reports.folder, 1, b"second stage")

    with RankReports(2) as reports, meanwhile(late):
        report(reports.folder, 0, b"first stage")
        waiting.set()
        assert reports.gather(DEADLINE_S) == [b"first stage", b"second stage"]


def test_gather_fails_at_once_with_the_reason_of_a_failed_rank() -> None:
    with RankReports(2) as reports:
        report_failure(reports.folder, 1, ConfigError("pp: its weights are packed"))
        with pytest.raises(PeerUnreachable, match="rank 1: pp: its weights are packed"):
            reports.gather(DEADLINE_S)


def test_silent_ranks_are_named() -> None:
    with RankReports(3) as reports:
        report(reports.folder, 1, b"")
        with pytest.raises(PeerTimeout, match=r"ranks \[0, 2\] have not reported within 0.05 s"):
            reports.gather(0.05)


def test_a_rank_ignores_that_its_launcher_has_ended() -> None:
    with RankReports(1) as reports:
        folder = reports.folder
    report(folder, 0, b"its loop, and with it the server, must not end by that")
    report_failure(folder, 0, RuntimeError("nor by its own reason"))


def test_only_ranks_can_read_the_secrets() -> None:
    secrets, given = Secrets("token", "key", "own"), list[Secrets]()

    def keep(secrets: Secrets) -> bytes:
        given.append(secrets)
        return b""

    with RankReports(1, secrets) as reports:
        carry_out(reports.folder, 0, keep)
        assert Path(reports.folder).stat().st_mode & 0o077 == 0
    assert given == [secrets]
    assert "token" not in repr(secrets) + str(secrets)
    assert not Path(reports.folder).exists()


def test_gather_names_the_rank_that_caused_a_refusal() -> None:
    with RankReports(2) as reports:
        report_failure(reports.folder, 0, RefusedByOtherRank("another rank"))
        report_failure(reports.folder, 1, RuntimeError("out of memory"))
        with pytest.raises(PeerUnreachable, match="rank 1: RuntimeError: out of memory"):
            reports.gather(DEADLINE_S)


def test_a_failed_start_removes_the_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(socket.socket, "listen", no_room)
    with pytest.raises(OSError, match="No space left") as caught:
        RankReports(1, Secrets("token", "key"))
    assert caught.traceback, "which keeps what the start has made"
    assert list(tmp_path.iterdir()) == []
