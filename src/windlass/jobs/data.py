"""Data sets of a job: the table `[data]`, and rows from JSON lines or from the library `datasets`."""

from __future__ import annotations

import importlib
from array import array
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final, overload

import msgspec

from windlass.config import check_numbers
from windlass.errors import DECODE_ERRORS, ConfigError

Row = Mapping[str, Any]
LINES = (".jsonl", ".ndjson")
"""Endings of files with one JSON object per line."""


class DataSection(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the data set of a `DatasetRecipe`.

    Attributes:
        path: file of JSON lines (`.jsonl`), folder that `datasets.Dataset.save_to_disk` wrote, or a name of the Hugging
            Face hub.
        name, split: configuration and split of a data set of the hub.
        evaluation: data set of evaluations, as in `path`.
        evaluation_split: split of `evaluation` on the hub.
        prompt: column with the prompt: a text, or a list of messages with `role` and `content`.
        columns: further columns that each row must have, for example those that the reward reads. The check of the job
            reads the first row.
        system: text of a system message before a prompt that is a text; empty for none.
        chat: whether a text is the content of a user's message; if false, the text is the whole prompt.
        shuffle: whether each epoch has its own random order.
        seed: seed of these orders.
        epochs: number of passes over the rows; 0 for no limit.
    """

    path: str
    name: str = ""
    split: str = "train"
    evaluation: str = ""
    evaluation_split: str = "test"
    prompt: str = "prompt"
    columns: tuple[str, ...] = ()
    system: str = ""
    chat: bool = True
    shuffle: bool = True
    seed: int = 0
    epochs: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, {"epochs": 0}, where="data.")
        for key in ("path", "evaluation"):
            file = getattr(self, key)
            if file.endswith(LINES) and not Path(file).is_file():
                raise ConfigError(
                    f"data.{key} must be an existing file of JSON lines, got {file!r}"
                )


_DECODER = msgspec.json.Decoder(dict[str, Any])


@final
class JsonLines(Sequence[Row]):
    """Rows of a file with one JSON object per line. Only the places of the lines are in memory.

    Args:
        path: the file; it must not change.

    Raises:
        ConfigError: the file cannot be read, has no rows, or a line is not a JSON object.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._places = path, array("q")
        place = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    # Editors on Windows begin a file with a byte order mark, which is no part of the first row.
                    skipped = len(BOM_UTF8) if not place and line.startswith(BOM_UTF8) else 0
                    if row := line[skipped:].strip():
                        self._check(number, row)
                        self._places.append(place + skipped)
                    place += len(line)
        except OSError as error:
            raise ConfigError(f"data: path must be a readable file: {error}") from error
        if not self._places:
            raise ConfigError(f"data: {str(path)!r} must have at least one row, got none")

    def _check(self, number: int, row: bytes) -> None:
        """Raise ConfigError if a row is not a JSON object. `number` is the number of its line, from 1."""
        try:
            _DECODER.decode(row)
        except DECODE_ERRORS as error:
            raise ConfigError(
                f"data: line {number} of {str(self._path)!r} must be a JSON object: {error}"
            ) from error

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        """Return the row with this number (from 0), or the rows of a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        with self._path.open("rb") as file:
            file.seek(self._places[index])
            return _DECODER.decode(file.readline())


def load_rows(path: str, *, name: str = "", split: str = "train") -> Sequence[Row]:
    """Return the rows of a data set; see `DataSection`.

    Raises:
        ConfigError: the data set cannot be loaded, or the library `datasets` is not installed.
    """
    if path.endswith(LINES):
        return JsonLines(Path(path))
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"data: path must be a file with the ending {LINES[0]} unless the library `datasets` is installed, got "
            f"{path!r}; install Windlass with the extra `data`"
        ) from error
    try:
        if Path(path).is_dir():
            found = datasets.load_from_disk(path)
            rows = found[split] if isinstance(found, datasets.DatasetDict) else found
        else:
            rows = datasets.load_dataset(path, name or None, split=split)
    # The library raises errors of many types, for example from file systems and from the Hub's client.
    except Exception as error:
        raise ConfigError(
            f"data: the data set {path!r} with split {split!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    loaded: Sequence[Row] = rows
    return loaded
