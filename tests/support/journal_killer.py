"""`python journal_killer.py FOLDER`: run processes that are killed before each system call of a
compaction.

Print one JSON line per process: the call before its death ("" if it survived), the number of the
last entry that it appended, and the state of a journal that is opened afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.control import journal
from windlass.control.journal import Journal, JournalEntry, JournalKind

CALLS = ("open", "write", "fdatasync", "fsync", "ftruncate", "close", "replace", "unlink")
NUM_ENTRIES = 60
FIRST = 20
"""Entries before calls are counted, so that some compactions are already complete."""
journal.COMPACT_NBYTES, journal.KEPT_ENTRIES = 900, 2


def entry(number: int) -> JournalEntry:
    """Return an entry of a history with every kind of entry, where maxima are not always the newest."""
    kinds = (JournalKind.ROUND_BEGAN, JournalKind.PUBLISHING, JournalKind.PUBLISHED)
    kind = JournalKind.QUARANTINED if number % 7 == 3 else kinds[number % 3]
    version = number // 3 if number % 5 else 0
    return JournalEntry(kind, 1 + number // 10, number, version, (f"w{number}",), f"i{number}")


def state(opened: Journal) -> list[Any]:
    return [
        opened.summary.epoch,
        opened.summary.round,
        opened.summary.published,
        opened.summary.reserved,
        sorted(opened.summary.quarantined),
    ]


def arm(nth: int, say: int) -> None:
    """Kill this process in place of the `nth` call from now on."""
    left = nth

    def wrap(name: str) -> None:
        real: Callable[..., Any] = vars(os)[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                real_write(say, f"!{name}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    real_write = os.write
    for name in CALLS:
        wrap(name)


def live(path: Path, nth: int, say: int) -> None:
    opened = Journal(path)
    real_write = os.write
    for number in range(NUM_ENTRIES):
        if number == FIRST:
            arm(nth, say)
        opened.append(entry(number))
        real_write(say, f"{number}\n".encode())


def main() -> None:
    nth, lived = 0, False
    while not lived:
        nth += 1
        path = Path(sys.argv[1]) / f"journal-{nth}"
        heard, say = os.pipe()
        child = os.fork()
        if child == 0:
            live(path, nth, say)
            os._exit(0)
        os.close(say)
        with os.fdopen(heard) as lines:
            told = lines.read().split()
        _, status = os.waitpid(child, 0)
        lived = status == 0
        call = "" if lived else told.pop().removeprefix("!")
        opened = Journal(path)
        print(json.dumps([call, int(told[-1]), state(opened)]))
        # The journal must accept further entries, and compact again.
        opened.append(entry(NUM_ENTRIES))
        for number in range(NUM_ENTRIES + 1, NUM_ENTRIES + 12):
            opened.append(entry(number))
        again = state(opened)
        opened.close()
        if state(Journal(path)) != again:
            raise SystemExit(f"{call}: reopened, it says something else")


if __name__ == "__main__":
    main()
