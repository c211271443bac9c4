"""Unusual checkpoint folders, not written by `save_pretrained`, are read in vLLM's load order."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from windlass.checkpoint_files import INDEX
from windlass.engines.capture.checkpoint import StoredCheckpoint, checkpoint_specs
from windlass.errors import ConfigError


def save(folder: Path, file: str, **values: float) -> None:
    save_file(
        {name: torch.full((2,), float(value)) for name, value in values.items()}, folder / file
    )


def write_index(folder: Path, weight_map: dict[str, str], before: bytes = b"") -> None:
    (folder / INDEX).write_bytes(before + json.dumps({"weight_map": weight_map}).encode())


def read(folder: Path) -> dict[str, float]:
    specs = [spec.name for spec in checkpoint_specs(folder)]
    found = {name: float(t[0]) for name, t in StoredCheckpoint(folder).tensors()}
    assert specs == list(found)
    return found


@pytest.mark.parametrize("indexed", [False, True])
def test_files_are_read_in_natural_order(tmp_path: Path, indexed: bool) -> None:
    save(tmp_path, "model-2.safetensors", a=2, b=1)
    save(tmp_path, "model-10.safetensors", a=10, c=1)
    if indexed:
        write_index(tmp_path, {"b": "model-2.safetensors", "c": "model-10.safetensors"})
    assert read(tmp_path)["a"] == 10


def test_an_adapter_in_the_folder_of_a_model_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", a=1)
    save(tmp_path, "adapter_model.safetensors", b=1)
    assert read(tmp_path) == {"a": 1}


def test_folder_with_only_an_adapter_contains_no_model(tmp_path: Path) -> None:
    save(tmp_path, "adapter_model.safetensors", b=1)
    with pytest.raises(ConfigError, match="must contain safetensors files"):
        read(tmp_path)


def test_the_adapter_alone_is_read_from_its_folder(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", a=1)
    save(tmp_path, "adapter_model.safetensors", b=2)
    assert [spec.name for spec in checkpoint_specs(tmp_path, adapter=True)] == ["b"]
    stored = StoredCheckpoint(tmp_path, adapter=True)
    assert {name: float(tensor[0]) for name, tensor in stored.tensors()} == {"b": 2}


def test_index_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    save(tmp_path, "x.safetensors", a=1)
    save(tmp_path, "y.safetensors", b=1)
    write_index(tmp_path, {"a": "x.safetensors"}, b"\xef\xbb\xbf")
    assert read(tmp_path) == {"a": 1}


@pytest.mark.parametrize("place", ["../x.safetensors", "in/../../x.safetensors", "ABSOLUTE"])
def test_index_must_not_name_files_outside_the_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "in" / "in").mkdir(parents=True)
    save(tmp_path, "x.safetensors", a=1)
    write_index(tmp_path / "in", {"a": place.replace("ABSOLUTE", str(tmp_path / "x.safetensors"))})
    with pytest.raises(ConfigError, match="must name files inside the folder"):
        read(tmp_path / "in")


def test_files_in_subfolders_and_links_are_read(tmp_path: Path) -> None:
    (tmp_path / "in" / "shards").mkdir(parents=True)
    save(tmp_path, "blob", a=1)
    save(tmp_path / "in" / "shards", "y.safetensors", b=2)
    (tmp_path / "in" / "x.safetensors").symlink_to(tmp_path / "blob")
    write_index(tmp_path / "in", {"a": "x.safetensors", "b": "shards/y.safetensors"})
    assert read(tmp_path / "in") == {"a": 1, "b": 2}


@pytest.mark.parametrize("name", [INDEX, "model-00001.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "dangling"])
def test_files_that_are_no_files_are_refused_by_name(tmp_path: Path, kind: str, name: str) -> None:
    """A FIFO made the engine wait for ever, a folder was an error without a name, and a loop was called missing."""
    save_file({"w": torch.ones(4)}, tmp_path / "model-00001.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"w": "model-00001.safetensors"}}')
    path = tmp_path / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else tmp_path / "gone")
    with pytest.raises(ConfigError, match=rf"checkpoint: .*{name} must be a file"):
        checkpoint_specs(tmp_path)
