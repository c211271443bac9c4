"""Record of a job: the samples that each version was trained on, in an SQLite file of the output folder.

The job writes the samples of a step in one transaction, before it publishes the version of the step. If the file cannot be
written, the job logs the version that has no record, and continues.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.layout.dtypes import DType
from windlass.rollout.messages import TrainingSample
from windlass.rollout.tensors import IMAGES, SampleTensor
from windlass.sampling import SamplingParams

AUDIT = "audit.sqlite3"
"""Name of the file in the output folder."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    version INTEGER PRIMARY KEY, step INTEGER, time REAL, sampling TEXT, is_published INTEGER
);
CREATE TABLE IF NOT EXISTS samples (
    version INTEGER, number INTEGER, seed INTEGER, content BLOB, PRIMARY KEY (version, number)
);
CREATE TABLE IF NOT EXISTS tokenizers (version INTEGER PRIMARY KEY, folder TEXT);
"""


class AuditedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The training step that led to one version.

    Attributes:
        version: the version.
        step: number of the step, from 1.
        time: Unix time of the record.
        sampling: sampling parameters of the job. A workflow may have used others.
        is_published: whether the job has published the version.
        samples: samples of the step. The tensors are left out, and those of images are empty. Each has the version of every token.
        seeds: seed of each sample's rollout; None if the rollout had none.
        tokenizer: folder of the job's tokenizer; empty if the job had none.
    """

    version: int
    step: int
    time: float
    sampling: SamplingParams
    is_published: bool
    samples: tuple[TrainingSample, ...]
    seeds: tuple[int | None, ...]
    tokenizer: str = ""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file for one transaction. The end of the block commits the transaction."""
    connection = sqlite3.connect(path, timeout=60.0)
    try:
        with connection:
            yield connection
    finally:
        connection.close()


@final
class AuditRecord:
    """Writer of the record. The methods block until the file is synced, so call them in a thread.

    Args:
        path: the file; created if it is missing.
        sampling: sampling parameters of the job.
        tokenizer: folder of the job's tokenizer; empty for none.
    """

    def __init__(self, path: Path, sampling: SamplingParams, tokenizer: str = "") -> None:
        self._path, self._sampling = path, msgspec.json.encode(sampling).decode()
        self._tokenizer = str(Path(tokenizer).resolve()) if tokenizer else ""

    def add(
        self,
        version: int,
        step: int,
        samples: Sequence[TrainingSample],
        seeds: Mapping[str, int | None],
    ) -> None:
        """Write the samples of the step that leads to `version`.

        Replace an earlier record of this version: if a job ends before it publishes the version, the restarted job
        repeats the step under the same version. `seeds` maps a rollout's id to its seed.

        Raises:
            sqlite3.Error: the file cannot be written.
        """
        rows = [
            (version, number, seeds.get(sample.task_id), zlib.compress(_encoded(sample), level=1))
            for number, sample in enumerate(samples)
        ]
        with _opened(self._path) as connection:
            connection.executescript(_SCHEMA)
            connection.execute("DELETE FROM samples WHERE version = ?", (version,))
            connection.execute(
                "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, 0)",
                (version, step, time.time(), self._sampling),
            )
            connection.execute(
                "INSERT OR REPLACE INTO tokenizers VALUES (?, ?)", (version, self._tokenizer)
            )
            connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?)", rows)

    def note_published(self, version: int) -> None:
        """Record that the job has published `version`.

        Raises:
            sqlite3.Error: the file cannot be written.
        """
        with _opened(self._path) as connection:
            connection.execute("UPDATE versions SET is_published = 1 WHERE version = ?", (version,))


def _encoded(sample: TrainingSample) -> bytes:
    """Return a sample without its tensors as msgpack. Only the names of images' tensors stay, so that no replay ignores images."""
    names = [name for name in sample.tensors if name.startswith(IMAGES)]
    empty = SampleTensor(dtype=DType.UINT8, shape=(0,), per_token=False)
    tensors = dict.fromkeys(names, empty)
    return msgspec.msgpack.encode(msgspec.structs.replace(sample, tensors=tensors))


def read_audit(path: Path, version: int) -> AuditedVersion:
    """Read the record of one version.

    Raises:
        ConfigError: there is no such file, it has no record of this version, or it cannot be read.
    """
    if not path.is_file():
        raise ConfigError(
            f"audit: {path} does not exist; set `audit = true` in the job's file to write the record"
        )
    try:
        with _opened(path) as connection:
            row = connection.execute(
                "SELECT step, time, sampling, is_published FROM versions WHERE version = ?",
                (version,),
            ).fetchone()
            if row is None:
                bounds = connection.execute(
                    "SELECT min(version), max(version) FROM versions"
                ).fetchone()
                raise ConfigError(
                    f"audit: version must be a trained version in {path} ({bounds[0]} to {bounds[1]}), got {version}"
                )
            tokenizer = _tokenizer_of(connection, version)
            rows = connection.execute(
                "SELECT seed, content FROM samples WHERE version = ? ORDER BY number", (version,)
            ).fetchall()
        return AuditedVersion(
            version=version,
            step=row[0],
            time=row[1],
            sampling=msgspec.json.decode(row[2], type=SamplingParams),
            is_published=bool(row[3]),
            samples=tuple(
                msgspec.msgpack.decode(zlib.decompress(content), type=TrainingSample)
                for _, content in rows
            ),
            seeds=tuple(seed for seed, _ in rows),
            tokenizer=tokenizer,
        )
    except (sqlite3.Error, zlib.error, *DECODE_ERRORS) as error:
        raise ConfigError(f"audit: {path} cannot be read: {error}") from error


def _tokenizer_of(connection: sqlite3.Connection, version: int) -> str:
    """Return the folder of the tokenizer that a version's step used.

    Return an empty string if the step used no tokenizer, or if an older release wrote the file.
    """
    known = "SELECT 1 FROM sqlite_master WHERE name = 'tokenizers'"
    if connection.execute(known).fetchone() is None:
        return ""
    found = "SELECT folder FROM tokenizers WHERE version = ?"
    row = connection.execute(found, (version,)).fetchone()
    return "" if row is None else str(row[0])
