"""Measure the cost of the journals, and compare their file with an SQLite database.

The first rows are the cost of a journal of rollouts for the event loop. Each rollout is submitted, sent to a worker,
accepted with 128 tokens and returned, in groups of 8 and with 64 outcomes per callback, on the file system of the
current folder. The strongest alternative writes the journal to disk before each outcome is acknowledged (one fdatasync
per callback). The lower limit is one write of the same bytes.

The other rows compare a journal file with a table of SQLite in WAL mode that has the same entries, checksums and syncs.
ADR 0011 uses these figures.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from harness import Row, median_p95, parser, report
from windlass.control.journal import JournalEntry, JournalKind
from windlass.errors import ConfigError
from windlass.net.journal_file import JournalFile
from windlass.rollout import RolloutConfig, SamplingParams, StalenessPolicy
from windlass.rollout.journal import Accepted, Entry, RolloutJournal
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.messages import OutcomeStatus, Partial, RolloutOutcome, Work
from windlass.rollout.table import GroupSize

NUM_ROLLOUTS, GROUP_SIZE, CALLBACK, NUM_TOKENS = 4096, 8, 64, 128
NUM_RUNS = 7
NUM_APPENDS, BLOCK = 2048, 64
"""Appends that are timed, and the number of them after which file and database take turns."""
NUM_ENTRIES = 100_000
"""Entries of a restart."""
NUM_FLIPS = 400
"""Bits that are flipped, one at a time."""
SAMPLING = SamplingParams(max_new_tokens=NUM_TOKENS)
WORK = Work(prompt_ids=tuple(range(1000, 1256)), sampling=SAMPLING)
TOKENS = tuple(range(30_000, 30_000 + NUM_TOKENS))
RESULT = Partial(TOKENS, tuple(-token / 7e4 for token in TOKENS), (3,) * NUM_TOKENS)


async def one_run(path: Path | None, *, sync_each: bool) -> tuple[float, float, int]:
    """Return seconds and CPU seconds of the loop for all rollouts, and the bytes of the journal."""
    policy = StalenessPolicy.unbounded(NUM_ROLLOUTS)
    config = RolloutConfig(
        journal=path, acknowledge=path is not None, journal_compact_nbytes=1 << 40
    )
    life = Lifecycle(policy, config, lambda _: None, lambda: None)
    life.open()
    journal = life.journal
    descriptor = None if path is None else os.open(path, os.O_RDWR)
    began, began_cpu = time.perf_counter(), time.thread_time()
    for _ in range(NUM_ROLLOUTS // GROUP_SIZE):
        life.submit_group(WORK, GroupSize.of(GROUP_SIZE))
    for record in list(life.table.waiting.values()):
        life.start_attempt(record, "engine", "worker")
    journal.flush()
    running = list(life.table.by_engine["engine"].values())
    for first in range(0, NUM_ROLLOUTS, CALLBACK):
        for record in running[first : first + CALLBACK]:
            life.end_attempt(record, outcome_of(record.task_id, record.attempt))
        journal.flush()
        if sync_each and descriptor is not None:
            os.fdatasync(descriptor)
        for group in life.deliver([*life.table.ready]):
            life.acknowledge(group.rollouts[0].task_id)
        journal.flush()
    seconds, cpu_s = time.perf_counter() - began, time.thread_time() - began_cpu
    await journal.close()
    nbytes = 0
    if descriptor is not None:
        nbytes = os.fstat(descriptor).st_size
        os.close(descriptor)
    if life.table.counts.completed != NUM_ROLLOUTS:
        raise RuntimeError(f"completed {life.table.counts.completed} of {NUM_ROLLOUTS}")
    if path is not None:
        left = RolloutJournal(config)
        if left.open(0).tasks:
            raise RuntimeError("the journal does not say that all were acknowledged")
        await left.close()
    return seconds, cpu_s, nbytes


def outcome_of(task_id: str, attempt: int) -> RolloutOutcome:
    return RolloutOutcome(
        task_id=task_id,
        attempt=attempt,
        status=OutcomeStatus.ACCEPTED,
        result=RESULT,
        engine="engine",
        worker="worker",
        finished_at=0.0,
    )


def raw_write(folder: Path, nbytes: int) -> float:
    """Return the CPU seconds to write `nbytes` in the same number of calls as the journal."""
    calls = 2 * NUM_ROLLOUTS // CALLBACK
    data = os.urandom(nbytes // calls)
    path = folder / "raw"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    began = time.thread_time()
    for _ in range(calls):
        os.write(descriptor, data)
    seconds = time.thread_time() - began
    os.close(descriptor)
    path.unlink()
    return seconds


class Database:
    """Journal in SQLite: one row per entry, with the checksum of a line, in WAL mode.

    `synchronous` is "full" to sync each transaction to disk, or "normal" to sync none. Then the caller syncs the WAL
    in another thread, as for a journal file, so no transaction makes a checkpoint.
    """

    def __init__(self, path: Path, entry_type: Any, *, synchronous: str) -> None:
        self._decoder = msgspec.json.Decoder(entry_type)
        self._link = sqlite3.connect(path, isolation_level=None, timeout=0)
        checkpoint_after = 1000 if synchronous == "full" else 0
        for statement in (
            "pragma locking_mode=exclusive",
            "pragma journal_mode=wal",
            f"pragma synchronous={synchronous}",
            f"pragma wal_autocheckpoint={checkpoint_after}",
            "create table if not exists entries(seq integer primary key, body blob, sum int)",
        ):
            self._link.execute(statement)

    def write(self, encoded: Sequence[bytes]) -> None:
        """Append entries in one transaction."""
        rows = [(body, _signed_checksum(body)) for body in encoded]
        if len(rows) > 1:
            self._link.execute("begin immediate")
        self._link.executemany("insert into entries(body, sum) values(?, ?)", rows)
        if self._link.in_transaction:
            self._link.execute("commit")

    def read(self) -> list[Any]:
        """Return all entries; raise `ValueError` if a row is damaged."""
        entries = []
        for body, checksum in self._link.execute("select body, sum from entries order by seq"):
            if _signed_checksum(body) != checksum:
                raise ValueError("checksum")
            entries.append(self._decoder.decode(body))
        return entries

    def check(self) -> None:
        """Raise `ValueError` if the database is damaged."""
        if self._link.execute("pragma integrity_check").fetchone() != ("ok",):
            raise ValueError("integrity_check")

    def close(self) -> None:
        self._link.close()


def _signed_checksum(body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body) - (1 << 63)


def round_entry(number: int) -> JournalEntry:
    kind = (JournalKind.ROUND_BEGAN, JournalKind.PUBLISHING, JournalKind.PUBLISHED)[number % 3]
    engines = tuple(f"engine-{i}/0" for i in range(8))
    return JournalEntry(kind, 3, number // 3, number // 3, engines)


def times_in_turns(*append: Callable[[], None]) -> list[list[float]]:
    """Return the seconds of each call, for each function. The functions take turns, so that load slows each equally."""
    seconds: list[list[float]] = [[] for _ in append]
    for _ in range(NUM_APPENDS // BLOCK):
        for index in random.sample(range(len(append)), len(append)):
            for _ in range(BLOCK):
                began = time.perf_counter()
                append[index]()
                seconds[index].append(time.perf_counter() - began)
    return seconds


def append_rows(folder: Path) -> list[Row]:
    """Compare synced appends of one entry, as of rounds, and unsynced writes of outcomes, as of rollouts."""
    file = JournalFile(folder / "rounds", JournalEntry)
    database = Database(folder / "rounds.db", JournalEntry, synchronous="full")
    encoded = [file.encode(round_entry(0))]

    def append_to_file() -> None:
        file.write(encoded)
        file.sync()

    rows = _compared("append of one entry to disk", append_to_file, lambda: database.write(encoded))
    file.close()
    database.close()
    any_entry: Any = Entry
    outcomes = JournalFile(folder / "rollouts", any_entry)
    table = Database(folder / "rollouts.db", any_entry, synchronous="normal")
    for size in (1, 8, 64):
        batch = [outcomes.encode(Accepted(outcome_of(f"{i:012x}", 1))) for i in range(size)]
        rows += _compared(
            f"write of {size} outcomes",
            partial(outcomes.write, batch, recheck_path_s=0.05),
            partial(table.write, batch),
        )
    outcomes.close()
    table.close()
    return rows


def _compared(case: str, to_file: Callable[[], None], to_database: Callable[[], None]) -> list[Row]:
    in_file, in_database = times_in_turns(to_file, to_database)
    rows = []
    for metric, percent in (("p50", 50), ("p99", 99)):
        ours, theirs = (
            1e6 * statistics.quantiles(times, n=100)[percent - 1]
            for times in (in_file, in_database)
        )
        rows.append(Row(case, metric, ours, "us", "SQLite", theirs))
    return rows


def restart_rows(folder: Path) -> list[Row]:
    """Compare the time to read a journal of many entries, and its size."""
    encoder = msgspec.json.Encoder()
    encoded = [encoder.encode(round_entry(number)) for number in range(NUM_ENTRIES)]
    path, database_path = folder / "restart", folder / "restart.db"
    file, database = JournalFile(path, JournalEntry), _database(database_path)
    file.write(encoded)
    database.write(encoded)
    file.close()
    database.close()
    del encoded
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_RUNS):
        began = time.perf_counter()
        file = JournalFile(path, JournalEntry)
        seconds[0].append(time.perf_counter() - began)
        began = time.perf_counter()
        database = _database(database_path)
        found = database.read()
        seconds[1].append(time.perf_counter() - began)
        if file.found != found or len(found) != NUM_ENTRIES:
            raise RuntimeError(f"{len(file.found)} and {len(found)} of {NUM_ENTRIES} entries")
        file.close()
        database.close()
    case = f"restart with {NUM_ENTRIES} entries of rounds"
    ours, theirs = (statistics.median(times) for times in seconds)
    sizes = path.stat().st_size / 1e6, database_path.stat().st_size / 1e6
    return [
        Row(case, "median", ours, "s", "SQLite", theirs),
        Row(case, "size", sizes[0], "MB", "SQLite", sizes[1]),
    ]


def damage_row(folder: Path) -> Row:
    """Compare how many flipped bits make a start lose entries without an error, in the file of a killed process."""
    entries = [round_entry(number) for number in range(24)]
    path, database_path = folder / "damage", folder / "damage.db"
    wal = folder / "damage.db-wal"
    file, database = JournalFile(path, JournalEntry), _database(database_path)
    for entry in entries:
        file.write([file.encode(entry)])
        database.write([file.encode(entry)])
    file.close()
    # Closing the database would move the entries out of the WAL, which a kill does not do.
    kept = {each: folder / f"{each.name}.kept" for each in (database_path, wal)}
    for each, copy in kept.items():
        shutil.copy(each, copy)
    database.close()
    kept[path] = path.rename(folder / "damage.kept")

    def loses_entries(damaged: Path, bit: int | None) -> bool:
        for each, copy in kept.items():
            shutil.copy(copy, each)
        if bit is not None:
            data = bytearray(damaged.read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            damaged.write_bytes(data)
        try:
            if damaged == path:
                opened = JournalFile(path, JournalEntry)
                opened.close()
                return opened.found != entries
            table = _database(database_path)
            try:
                table.check()
                return bool(table.read() != entries)
            finally:
                table.close()
        except (ConfigError, ValueError, msgspec.MsgspecError, sqlite3.DatabaseError):
            return False

    percent = []
    for damaged in (path, wal):
        if loses_entries(damaged, None):
            raise RuntimeError(f"{damaged} loses entries without damage")
        bits = 8 * kept[damaged].stat().st_size
        trials = [loses_entries(damaged, random.randrange(bits)) for _ in range(NUM_FLIPS)]
        percent.append(100 * sum(trials) / NUM_FLIPS)
    case = "one flipped bit in the file of a killed process"
    return Row(case, "loses entries silently", percent[0], "%", "SQLite's WAL", percent[1])


def _database(path: Path) -> Database:
    return Database(path, JournalEntry, synchronous="full")


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    off, on, on_wall, synced, raw = [], [], [], [], []
    nbytes = 0
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        path = folder / "journal"
        for _ in range(NUM_RUNS):
            off.append(asyncio.run(one_run(None, sync_each=False))[1])
            seconds, cpu_s, nbytes = asyncio.run(one_run(path, sync_each=False))
            on_wall.append(seconds)
            on.append(cpu_s)
            path.unlink()
            synced.append(asyncio.run(one_run(path, sync_each=True))[0])
            path.unlink()
            raw.append(raw_write(folder, nbytes))

    def us(seconds: list[float]) -> tuple[float, float]:
        return tuple(1e6 * s / NUM_ROLLOUTS for s in median_p95(seconds))  # type: ignore[return-value]

    rows = []
    for index, metric in enumerate(("median", "p95")):
        rows += [
            row("CPU with a journal", metric, us(on)[index], "without", us(off)[index]),
            row(
                "loop time with a journal",
                metric,
                us(on_wall)[index],
                "fdatasync per callback",
                us(synced)[index],
            ),
        ]
    share = us([a - b for a, b in zip(on, off, strict=True)])[0]
    rows.append(row("the journal's CPU", "median", share, "one write of its bytes", us(raw)[0]))
    per_rollout = nbytes / NUM_ROLLOUTS
    size = f"journal, 256 prompt tokens per group, {NUM_TOKENS} tokens each"
    raw_size = 8.0 * 3 * NUM_TOKENS
    rows.append(Row(size, "bytes per rollout", per_rollout, "B", "3 x 8 B per token", raw_size))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        rows += [*append_rows(folder), *restart_rows(folder), damage_row(folder)]
    report(rows, arguments.json, "Journals")


def row(case: str, metric: str, value: float, reference: str, reference_value: float) -> Row:
    return Row(case, f"{metric} per rollout", value, "us", reference, reference_value)


if __name__ == "__main__":
    main()
