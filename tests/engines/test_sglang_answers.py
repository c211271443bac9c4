"""Ranks of every stage are heard, though SGLang answers for the first one only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from windlass.engines.sglang.answers import Answers, report, report_failure
from windlass.errors import PeerTimeout, PeerUnreachable

DEADLINE_S = 20.0


@contextmanager
def meanwhile(*calls: Callable[[], None]) -> Iterator[None]:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(DEADLINE_S)


def test_answers_come_by_rank_whoever_speaks_first() -> None:
    with Answers(3) as answers:
        for rank in (2, 0, 1):
            report(answers.folder, rank, b"%d" % rank * 100_000)
        assert answers.gather(DEADLINE_S) == [b"%d" % rank * 100_000 for rank in range(3)]


def test_a_rank_that_speaks_late_is_waited_for() -> None:
    waiting = threading.Event()

    def late() -> None:
        waiting.wait(DEADLINE_S)
        report(answers.folder, 1, b"second stage")

    with Answers(2) as answers, meanwhile(late):
        report(answers.folder, 0, b"first stage")
        waiting.set()
        assert answers.gather(DEADLINE_S) == [b"first stage", b"second stage"]


def test_a_rank_that_could_not_is_quoted_at_once() -> None:
    with Answers(2) as answers:
        report_failure(answers.folder, 1, "pp: its weights are packed")
        with pytest.raises(PeerUnreachable, match="rank 1: pp: its weights are packed"):
            answers.gather(DEADLINE_S)


def test_ranks_that_report_nothing_are_named() -> None:
    with Answers(3) as answers:
        report(answers.folder, 1, b"")
        with pytest.raises(PeerTimeout, match=r"ranks \[0, 2\] have not reported within 0.05 s"):
            answers.gather(0.05)


def test_a_rank_goes_on_though_whoever_asked_has_ended() -> None:
    with Answers(1) as answers:
        folder = answers.folder
    report(folder, 0, b"its loop, and with it the server, must not end by that")
    report_failure(folder, 0, "nor its own reason be lost")
