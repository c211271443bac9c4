"""Files of tensors are read as safetensors reads them, and a file that changes while it is read does not end the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from windlass.backends import disk_files
from windlass.backends.disk_files import DiskEntry, TensorFile, read_boxes
from windlass.backends.push_halves import PushReceiver
from windlass.errors import TransferFailed
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.memory.host import HostMemory

SHAPE = (6, 5, 8)
BOXES = (
    Box.full(SHAPE),
    Box((2, 0, 0), (3, 5, 8)),
    Box((1, 2, 0), (4, 2, 8)),
    Box((0, 1, 3), (6, 3, 2)),
    Box((5, 4, 7), (1, 1, 1)),
    Box((0, 0, 1), (6, 5, 7)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("block", [2, 64, 1 << 20])
@pytest.mark.parametrize("run", [1, 16, 1 << 20])
def test_boxes_equal_slices_of_the_whole_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int, run: int
) -> None:
    monkeypatch.setattr(disk_files, "READ_NBYTES", 4 * block)
    monkeypatch.setattr(disk_files, "RUN_NBYTES", run)
    whole = torch.arange(240).view(SHAPE)
    held = {
        "first": torch.ones(3),
        "w": (whole % 3 == 0) if dtype == torch.bool else whole.to(dtype),
    }
    save_file(held, tmp_path / "x.safetensors", metadata={"format": "pt"})
    # The entry is itself a box of a larger checkpoint tensor.
    entry = DiskEntry("w", "w", (10, 20, 30), SHAPE)
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert file.shapes == {"first": (3,), "w": SHAPE}
        for box in BOXES:
            found = torch.zeros(SHAPE, dtype=dtype)
            moved = tuple(at + by for at, by in zip(box.offsets, entry.offsets, strict=True))
            for part, values in file.blocks(entry, Box(moved, box.sizes)):
                starts = [at - by for at, by in zip(part.offsets, entry.offsets, strict=True)]
                found[tuple(slice(s, s + n) for s, n in zip(starts, part.sizes, strict=True))] = (
                    values
                )
            wanted = torch.zeros(SHAPE, dtype=dtype)
            place = tuple(slice(s, e) for s, e in zip(box.offsets, box.ends, strict=True))
            wanted[place] = held["w"][place]
            assert torch.equal(found, wanted)
            target = torch.zeros(box.sizes, dtype=dtype)
            assert file.fill(entry, Box(moved, box.sizes), target)
            assert torch.equal(target, held["w"][place])
            strided = torch.zeros(SHAPE, dtype=dtype)[..., ::2]
            assert not file.fill(entry, Box(entry.offsets, tuple(strided.shape)), strided)
            assert not file.fill(entry, Box(moved, box.sizes), target.double())


def test_a_scalar_and_an_empty_tensor_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"scalar": torch.tensor(7.0), "empty": torch.zeros(0, 3)}, path)
    with TensorFile(path) as file:
        ((box, value),) = file.blocks(DiskEntry("scalar", "s", (), ()), Box((), ()))
        assert (box, float(value)) == (Box((), ()), 7.0)
        assert file.shapes["empty"] == (0, 3)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"{]}",
        (9).to_bytes(8, "little") + b'{"w": 3} ',
        (62).to_bytes(8, "little")
        + b'{"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}     '
        + bytes(15),
        (62).to_bytes(8, "little")
        + b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,16]}}     '
        + bytes(16),
    ],
)
def test_damaged_files_are_refused_with_their_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"x\.safetensors"):
        TensorFile(path)
    with pytest.raises(Exception, match=r"."), safe_open(path, framework="np"):
        pass


class _Overwriting:
    """Host memory whose user overwrites the file while it is read, as another `save_file` to the same path does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getattr__(self, name: str) -> object:
        return getattr(HostMemory(), name)

    def view(self, *arguments: Any) -> object:
        self._path.write_bytes(b"x")
        return HostMemory().view(*arguments)


def overwrite(folder: Path) -> None:
    """Read a file of 64 MiB that is truncated after its first block. This function runs in another process."""
    rows, width = 1 << 12, 1 << 12
    builder = ManifestBuilder("engine/0", Role.ENGINE)
    builder.add_parameter("w", nbytes=4 * rows * width, dtype=DType.FLOAT32)
    builder.add_shard("w", (rows, width), Box((0, 0), (rows, width)), "w")
    served = np.zeros(rows * width, "<f4")
    save_file({"w": torch.ones(rows, width)}, folder / "x.safetensors")
    index = disk_files.DiskIndex(
        0, "t", "x.safetensors", 0, "", (DiskEntry("w", "w", (0, 0), (rows, width)),), {}
    )
    memory: Any = _Overwriting(folder / "x.safetensors")
    address = int(served.ctypes.data)
    assert read_boxes(folder, [index], builder.build(), [address], memory) == ["t"]


def test_engine_survives_a_file_that_is_overwritten_while_it_is_read(tmp_path: Path) -> None:
    """A mapped file that another process truncates, or that a network file system loses, ended the engine with SIGBUS."""
    code = f"import test_tensor_files, pathlib; test_tensor_files.overwrite(pathlib.Path({str(tmp_path)!r}))"
    paths = [str(Path(__file__).parent), *sys.path]
    child = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr


def test_pushed_file_of_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    builder = ManifestBuilder("engine/0", Role.ENGINE)
    builder.add_parameter("w", nbytes=8, dtype=DType.FLOAT32)
    builder.add_shard("w", (2,), Box((0,), (2,)), "w")
    header = b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(1)
    (tmp_path / "model.safetensors").write_bytes(content)
    served = np.zeros(2, "<f4")
    receiver = PushReceiver(builder.build(), [int(served.ctypes.data)], "127.0.0.1")
    receiver.begin()
    with pytest.raises(TransferFailed, match=r"w: dtype must be one of \['F64', .*got F4"):
        receiver.read_files(str(tmp_path))
    receiver.close()
