"""Files of a checkpoint folder, in the order in which engines read them."""

from __future__ import annotations

import codecs
import os
import re
from pathlib import Path, PurePath

import msgspec

from windlass.errors import ConfigError

INDEX = "model.safetensors.index.json"
"""Name of the file that maps tensor names to safetensors files."""
ADAPTER = "adapter_model.safetensors"
"""Name of the file in which PEFT saves an adapter."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model in the order in which engines read them (`model-2` before `model-10`).

    The order matters if two files have a tensor of the same name: the later file wins. If the folder has an index, return
    only the files that the index names. Otherwise return all safetensors files except the file of an adapter.

    Raises:
        ConfigError: the index is invalid, or names a file that is missing or outside the folder.
    """
    index = folder / INDEX
    if not os.path.lexists(index):
        found = (file for file in folder.glob("*.safetensors") if file.name != ADAPTER)
        return sorted(found, key=_natural)
    require_file(index)
    try:
        content = index.read_bytes().removeprefix(codecs.BOM_UTF8)
        named = msgspec.json.decode(content, type=_Index).weight_map
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"checkpoint: {index} must have a `weight_map` of names to files: {error}"
        ) from error
    for name, file in named.items():
        place = PurePath(file)
        if place.is_absolute() or ".." in place.parts:
            raise ConfigError(
                f"checkpoint: {index} must name files inside the folder, got {file!r} for {name!r}; put the file "
                "into the folder, or a link to it"
            )
        if not os.path.lexists(folder / file):
            raise ConfigError(f"checkpoint: {folder / file} does not exist, but {INDEX} names it")
    return sorted({folder / file for file in named.values()}, key=_natural)


def require_file(path: Path) -> None:
    """Raise ConfigError unless `path` is a file or a link to a file, because opening a FIFO would block."""
    if not path.is_file():
        raise ConfigError(
            f"checkpoint: {path} must be a file or a link to a file, but is a folder, a FIFO or a broken link"
        )


def _natural(file: Path) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key for a file. The key compares numbers in file names by value, so that 10 comes after 9."""
    pieces = re.split(r"(\d+)", file.name)
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in pieces], str(file)
