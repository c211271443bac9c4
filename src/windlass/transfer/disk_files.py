"""Weights of one trainer rank on disk: a safetensors file and an index that names it.

    FOLDER/v00000007/trainer%2F0.5f3a9c1e.safetensors    boxes, row-major, in the rank's own dtype
    FOLDER/v00000007/trainer%2F0.json                    which boxes, and xxh3_128 of the file

Both are written under a temporary name, flushed to the device, and renamed. The index comes
last and names one file, so that whoever reads it finds that file whole or not at all.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec
import xxhash

from windlass.errors import DECODE_ERRORS, TransferFailed
from windlass.layout.box import Box
from windlass.layout.dtypes import SAFETENSORS_NAMES, DType
from windlass.layout.manifest import Shard, ShardManifest
from windlass.memory.ops import MemoryOps
from windlass.memory.packing import bytes_at, is_contiguous, row_major_blocks

__all__ = [
    "DiskEntry",
    "DiskIndex",
    "file_digest",
    "prune",
    "read_index",
    "version_folder",
    "write_shards",
]

BLOCK_NBYTES = 8 << 20
"""Strided boxes are gathered and written in blocks of at most this size."""
_VERSION_FOLDER = re.compile(r"v(\d{8,})")


class DiskEntry(msgspec.Struct, frozen=True):
    """One tensor of the file: `key` in the file, and which box of which checkpoint tensor it is."""

    key: str
    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Its elements in the checkpoint tensor."""
        return Box(self.offsets, self.sizes)


class DiskIndex(msgspec.Struct, frozen=True):
    """What a rank has written. `digest` is xxh3_128 of the whole file."""

    version: int
    worker: str
    file: str
    nbytes: int
    digest: str
    entries: tuple[DiskEntry, ...]
    aliases: dict[str, str]


def version_folder(folder: Path, version: int) -> Path:
    """Where the files of a version are, below the root."""
    return folder / f"v{version:08d}"


def write_shards(
    folder: Path,
    version: int,
    manifest: ShardManifest,
    addresses: tuple[int, ...],
    memory: MemoryOps,
) -> DiskIndex:
    """Write one rank's shards of one version; visible only when complete and on the device.

    Args:
        folder: the root.
        version: names the subfolder.
        manifest: of the rank.
        addresses: of its parameters.
        memory: that these are in.

    Raises:
        TransferFailed: the file system refused something; nothing became visible.
    """
    home = version_folder(folder, version)
    stem = quote(manifest.worker, safe="")
    name = f"{stem}.{os.urandom(4).hex()}.safetensors"
    shards = list(manifest.shards())
    entries = tuple(
        DiskEntry(f"{shard.tensor}{shard.box}", shard.tensor, shard.box.offsets, shard.box.sizes)
        for shard in shards
    )
    try:
        home.mkdir(parents=True, exist_ok=True)
        nbytes, digest = _write_durably(
            home / name, _content(manifest, shards, entries, addresses, memory)
        )
        index = DiskIndex(
            version, manifest.worker, name, nbytes, digest, entries, dict(manifest.aliases)
        )
        _write_durably(home / f"{stem}.json", (msgspec.json.encode(index),))
        for older in home.glob(f"{stem}.*.safetensors"):
            if older.name != name:
                older.unlink(missing_ok=True)
    except OSError as error:
        raise TransferFailed(f"disk: {home}: {error}") from error
    return index


def read_index(folder: Path, version: int, worker: str) -> DiskIndex:
    """The index that a rank wrote for a version.

    Raises:
        TransferFailed: there is none, it is torn, or its file has another size.
    """
    home = version_folder(folder, version)
    path = home / f"{quote(worker, safe='')}.json"
    try:
        index = msgspec.json.decode(path.read_bytes(), type=DiskIndex)
        nbytes = (home / Path(index.file).name).stat().st_size
    except (OSError, *DECODE_ERRORS) as error:
        raise TransferFailed(f"disk: {path}: {error}") from error
    if (index.version, index.worker) != (version, worker) or nbytes != index.nbytes:
        raise TransferFailed(
            f"disk: {path}: must be version {version} of {worker} with {index.nbytes} bytes, got "
            f"version {index.version} of {index.worker} with {nbytes} bytes"
        )
    return index


def file_digest(path: Path) -> str:
    """xxh3_128 of a file.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK_NBYTES):
            digest.update(block)
    return digest.hexdigest()


def prune(folder: Path, version: int, worker: str, keep_versions: int) -> None:
    """Remove what this rank wrote for versions older than the newest `keep_versions` before `version`.

    Leftovers of a writer that was killed go too. What others wrote stays.
    """
    homes = {
        int(match[1]): home
        for home in (folder.iterdir() if folder.is_dir() else ())
        if (match := _VERSION_FOLDER.fullmatch(home.name))
    }
    kept = sorted(v for v in homes if v < version)[-keep_versions:]
    stem = quote(worker, safe="")
    for number, home in homes.items():
        for path in home.glob(f"{stem}.*"):
            if path.name.endswith(".tmp") or (number < version and number not in kept):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: other ranks have files there
            home.rmdir()


def _content(
    manifest: ShardManifest,
    shards: list[Shard],
    entries: tuple[DiskEntry, ...],
    addresses: tuple[int, ...],
    memory: MemoryOps,
) -> Iterator[bytes | memoryview]:
    parameters = {p.name: (i, p.dtype) for i, p in enumerate(manifest.parameters)}
    header: dict[str, object] = {}
    at = 0
    for shard, entry in zip(shards, entries, strict=True):
        dtype = parameters[shard.parameter][1]
        nbytes = shard.box.numel * dtype.itemsize
        header[entry.key] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": shard.box.sizes,
            "data_offsets": (at, at + nbytes),
        }
        at += nbytes
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little")
    yield encoded
    for shard in shards:
        index, dtype = parameters[shard.parameter]
        yield from _elements(shard, addresses[index] + shard.offset_bytes, dtype, memory)


def _elements(shard: Shard, address: int, dtype: DType, memory: MemoryOps) -> Iterator[memoryview]:
    """A box row-major; what does not lie so in host memory is gathered there, block by block."""
    import torch

    from windlass.memory.torch_dtypes import torch_dtype

    sizes = shard.box.sizes or (1,)
    strides = shard.strides_bytes or (dtype.itemsize,)
    if memory.ordinal < 0 and is_contiguous(sizes, strides, dtype.itemsize):
        yield bytes_at(address, shard.box.numel * dtype.itemsize)
        return
    scratch = torch.empty(
        BLOCK_NBYTES // dtype.itemsize, dtype=torch_dtype(dtype), pin_memory=memory.ordinal >= 0
    )
    raw = scratch.view(torch.uint8).numpy()
    for start, block in row_major_blocks(sizes, len(scratch)):
        first = address + sum(i * s for i, s in zip(start, strides, strict=True))
        numel = math.prod(block)
        scratch[:numel].view(block).copy_(memory.view(first, block, strides, dtype))
        yield raw[: numel * dtype.itemsize].data


def _write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write under a temporary name, flush, rename, flush the folder; returns bytes and digest."""
    temporary = path.with_name(path.name + ".tmp")
    digest, nbytes = xxhash.xxh3_128(), 0
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                digest.update(chunk)
                nbytes += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # whatever it is: half a file must not stay behind
        temporary.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return nbytes, digest.hexdigest()
