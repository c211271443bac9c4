"""Weights of one trainer rank on disk: a safetensors file and an index that names it.

    FOLDER/v00000007/trainer%2F0.5f3a9c1e.safetensors    boxes, row-major, in the rank's own dtype
    FOLDER/v00000007/trainer%2F0.json                    which boxes, and xxh3_128 of the file

Both files are written under a temporary name, flushed to the device, and renamed. The index is
written last and names one file, so a reader of the index finds a complete file. Only the owner of
the files can read them. An engine rank reads exactly the boxes that it needs, by slicing.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import xxhash

from windlass.errors import DECODE_ERRORS, TransferFailed
from windlass.files import replacing
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import Shard, ShardManifest
from windlass.memory.ops import OWN_WORK_S, MemoryOps
from windlass.memory.packing import bytes_at, copy_cast, is_contiguous, row_major_blocks

_log = logging.getLogger(__name__)
BLOCK_NBYTES = 8 << 20
"""Maximum size of a block when strided boxes are gathered and written."""
OWNERS_FOLDER = 0o700
OWNERS_FILE = 0o600
"""Modes of folders and files that only their owner can read."""
_VERSION_FOLDER = re.compile(r"v(\d{8,})")


class DiskEntry(msgspec.Struct, frozen=True):
    """One tensor of the file: its key in the file, and its box of a checkpoint tensor."""

    key: str
    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The part of the checkpoint tensor that this file stores, as a box."""
        return Box(self.offsets, self.sizes)


class DiskIndex(msgspec.Struct, frozen=True):
    """Description of the file that a rank wrote. `digest` is xxh3_128 of the whole file."""

    version: int
    worker: str
    file: str
    nbytes: int
    digest: str
    entries: tuple[DiskEntry, ...]
    aliases: dict[str, str]


def version_folder(folder: Path, version: int) -> Path:
    """Return the folder of a version's files, below the shared `folder`."""
    return folder / f"v{version:08d}"


def write_shards(
    folder: Path,
    version: int,
    manifest: ShardManifest,
    addresses: tuple[int, ...],
    memory: MemoryOps,
) -> DiskIndex:
    """Write a rank's shards to a new file, then write the index that names this file. Return the index.

    Readers open the index first, so they never read an incomplete file. Afterwards, delete older files of this rank and
    version; if this fails, log a warning.

    Args:
        folder: shared folder.
        version: version of the weights.
        manifest: layout of the rank's parameters.
        addresses: address of each parameter, in manifest order. The address is 0 if the parameter's layout has changed
            since the manifest was made. No engine needs this parameter, so the file does not contain it.
        memory: memory of the parameters.

    Raises:
        TransferFailed: the file system reported an error.
    """
    home = version_folder(folder, version)
    stem = quote(manifest.worker, safe="")
    name = f"{stem}.{os.urandom(4).hex()}.safetensors"
    memory_of = zip(manifest.parameters, addresses, strict=True)
    changed = {spec.name for spec, address in memory_of if spec.nbytes and not address}
    shards = [shard for shard in manifest.shards() if shard.parameter not in changed]
    entries = tuple(
        DiskEntry(f"{shard.tensor}{shard.box}", shard.tensor, shard.box.offsets, shard.box.sizes)
        for shard in shards
    )
    try:
        home.mkdir(OWNERS_FOLDER, parents=True, exist_ok=True)
        nbytes, digest = _write_durably(
            home / name, _file_chunks(manifest, shards, entries, addresses, memory)
        )
        index = DiskIndex(
            version, manifest.worker, name, nbytes, digest, entries, dict(manifest.aliases)
        )
        _write_durably(home / f"{stem}.json", (msgspec.json.encode(index),))
    except OSError as error:
        raise TransferFailed(f"disk: {home}: {error}") from error
    try:
        for older in home.glob(f"{stem}.*.safetensors"):
            if older.name != name:
                older.unlink(missing_ok=True)
    except OSError as error:
        # No reader opens an older file, because the index names the new one. `prune` tries again.
        _log.warning("an older file of version %d could not be deleted: %s", version, error)
    return index


def read_index(folder: Path, version: int, worker: str) -> DiskIndex:
    """Return the index that a rank wrote for a version.

    Raises:
        TransferFailed: the index or its file is missing or incomplete, or the index belongs to another version or rank.
    """
    home = version_folder(folder, version)
    path = home / f"{quote(worker, safe='')}.json"
    try:
        index = msgspec.json.decode(path.read_bytes(), type=DiskIndex)
        # The file is in the same folder as its index.
        index = msgspec.structs.replace(index, file=Path(index.file).name)
        nbytes = (home / index.file).stat().st_size
    except (OSError, *DECODE_ERRORS) as error:
        raise TransferFailed(f"disk: {path}: {error}") from error
    if (index.version, index.worker) != (version, worker) or nbytes != index.nbytes:
        raise TransferFailed(
            f"disk: {path}: must be version {version} of {worker} with {index.nbytes} bytes, got "
            f"version {index.version} of {index.worker} with {nbytes} bytes"
        )
    return index


def file_digest(path: Path) -> str:
    """Return the xxh3_128 digest of a whole file, in hexadecimal.

    Raises:
        OSError: the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK_NBYTES):
            digest.update(block)
    return digest.hexdigest()


def prune(folder: Path, version: int, worker: str, keep_versions: int) -> None:
    """Delete the files that one rank wrote for old versions, and temporary files that a killed process of this rank left.

    Args:
        folder: shared folder.
        version: version that the rank is about to write. Files of later versions stay.
        worker: name of the rank. Files of other ranks stay.
        keep_versions: number of versions to keep; these are the newest versions before `version`.

    Raises:
        OSError: a file cannot be deleted.
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
        with suppress(OSError):
            # The folder is not empty if other ranks have files in it.
            home.rmdir()


def _file_chunks(
    manifest: ShardManifest,
    shards: list[Shard],
    entries: tuple[DiskEntry, ...],
    addresses: tuple[int, ...],
    memory: MemoryOps,
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file, in chunks. Tensor i of the file has the elements of `shards[i]`."""
    parameters = {p.name: (i, p.dtype) for i, p in enumerate(manifest.parameters)}
    header: dict[str, object] = {}
    at = 0
    for shard, entry in zip(shards, entries, strict=True):
        dtype = parameters[shard.parameter][1]
        nbytes = shard.box.numel * dtype.itemsize
        header[entry.key] = {
            "dtype": dtype.safetensors_name,
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
    """Yield the bytes of a shard's elements, in row-major order.

    Yield a contiguous shard in host memory as one view. Copy all other shards block by block into one host buffer. Each
    block overwrites the block before it.

    Args:
        shard: the shard.
        address: address of its first element.
        dtype: dtype of its elements.
        memory: memory of the rank's parameters.
    """
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
    """Write a file under a temporary name, flush it to disk, and rename it. Return its size in bytes and its digest.

    Raises:
        OSError: the file system reported an error.
    """
    digest, nbytes = xxhash.xxh3_128(), 0
    with replacing(path, OWNERS_FILE) as file:
        for chunk in chunks:
            digest.update(chunk)
            nbytes += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return nbytes, digest.hexdigest()


def read_boxes(
    home: Path,
    indices: Sequence[DiskIndex],
    manifest: ShardManifest,
    addresses: Sequence[int],
    memory: MemoryOps,
) -> list[str]:
    """Copy the boxes of an engine rank from files into the rank's memory, and wait until the copies have ended.

    A box that several files contain is read from one of these files.

    Args:
        home: folder of the files.
        indices: indices of the files.
        manifest: layout of the engine rank's parameters.
        addresses: address of each parameter (or of its shadow copy), in manifest order.
        memory: memory at these addresses.

    Returns:
        The `worker` of each index whose file cannot be opened or does not match the index.

    Raises:
        TransferFailed: a cast overflowed, a file's dtype cannot be cast to the parameter's, or work
            that was queued on the GPU does not end.
    """
    from safetensors import SafetensorError, safe_open

    unreadable: list[str] = []
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for index in indices:
            try:
                files[index.worker] = stack.enter_context(
                    safe_open(str(home / index.file), framework="pt")
                )
            except (SafetensorError, OSError):
                unreadable.append(index.worker)
        holders = _holders([index for index in indices if index.worker in files])
        parameters = {p.name: i for i, p in enumerate(manifest.parameters)}
        for shard in manifest.shards():
            todo = [shard.box]
            for worker, entry in _entries_of(shard.tensor, holders, indices, manifest):
                for wanted in list(todo):
                    common = wanted.intersect(entry.box)
                    if common is None or worker in unreadable:
                        continue
                    # The call of `_view` is outside the `try` below: its errors come from this rank's memory, so the
                    # file must not be reported as unreadable.
                    position = parameters[shard.parameter]
                    dtype = manifest.parameters[position].dtype
                    view = _view(shard, common, addresses[position], dtype, memory)
                    try:
                        part = _slice(files[worker], entry, common).reshape(view.shape)
                    except (SafetensorError, OSError, RuntimeError):
                        unreadable.append(worker)
                        continue
                    copy_cast(view, part, shard.tensor)
                    todo.remove(wanted)
                    todo.extend(wanted.subtract(common))
    memory.settle(OWN_WORK_S)
    return unreadable


def differing_ties(
    home: Path,
    indices: Sequence[DiskIndex],
    manifest: ShardManifest,
    addresses: Sequence[int],
    memory: MemoryOps,
) -> str:
    """Compare tied tensors that the files contain under several names.

    Call this after `read_boxes`, with the same arguments.

    Returns:
        Message about two tied tensors with different values; empty if there are none.

    Raises:
        TransferFailed: a file cannot be read.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    holders = _holders(indices)
    files = {index.worker: home / index.file for index in indices}
    parameters = {p.name: i for i, p in enumerate(manifest.parameters)}
    for shard in manifest.shards():
        found = _entries_of(shard.tensor, holders, indices, manifest)
        if len({entry.tensor for _, entry in found}) < 2:
            continue
        position = parameters[shard.parameter]
        dtype = manifest.parameters[position].dtype
        for worker, entry in found:
            if (common := shard.box.intersect(entry.box)) is None:
                continue
            held = _view(shard, common, addresses[position], dtype, memory)
            try:
                with safe_open(str(files[worker]), framework="pt") as file:
                    stored = _slice(file, entry, common).reshape(held.shape)
            except (SafetensorError, OSError, RuntimeError) as error:
                raise TransferFailed(f"disk: {files[worker]}: {error}") from error
            # Compare bytes, because NaN is not equal to NaN.
            sent = stored.to(held.device, held.dtype).contiguous().view(torch.uint8)
            if not torch.equal(sent, held.contiguous().view(torch.uint8)):
                names = " and ".join(sorted(repr(entry.tensor) for _, entry in found))
                return (
                    f"the engine ties {names}, but the files contain different values; keep them tied in training, or serve "
                    "the model with tie_word_embeddings=false"
                )
    return ""


def _view(shard: Shard, part: Box, address: int, dtype: DType, memory: MemoryOps) -> Any:
    """Return a part of a shard as a tensor. `address` and `dtype` are those of the shard's parameter."""
    return memory.view(
        address + _offset_in_parameter(shard, part),
        part.sizes or (1,),
        shard.strides_bytes or (dtype.itemsize,),
        dtype,
    )


def _holders(indices: Sequence[DiskIndex]) -> dict[str, list[tuple[str, DiskEntry]]]:
    """Return a map of each checkpoint tensor to its boxes in the files, as pairs (rank that wrote the file, entry)."""
    holders: dict[str, list[tuple[str, DiskEntry]]] = {}
    for index in indices:
        for entry in index.entries:
            holders.setdefault(entry.tensor, []).append((index.worker, entry))
    return holders


def _entries_of(
    tensor: str,
    holders: Mapping[str, list[tuple[str, DiskEntry]]],
    indices: Sequence[DiskIndex],
    manifest: ShardManifest,
) -> list[tuple[str, DiskEntry]]:
    """Return the entries that store elements of a tensor, under the tensor's name or an alias (tied weights).

    Args:
        tensor: name of the checkpoint tensor.
        holders: result of `_holders` for the readable files.
        indices: indices of all files, for their aliases.
        manifest: layout of the engine rank's parameters.
    """
    tied = {tensor}
    for aliases in (manifest.aliases, *(index.aliases for index in indices)):
        for pair in aliases.items():
            if tied & set(pair):
                tied |= set(pair)
    return [found for name in sorted(tied) for found in holders.get(name, ())]


def _offset_in_parameter(shard: Shard, part: Box) -> int:
    """Return the byte offset of the first element of `part` in the shard's parameter.

    `part` is a box inside the shard's box.
    """
    return shard.offset_bytes + sum(
        (at - start) * stride
        for at, start, stride in zip(
            part.offsets, shard.box.offsets, shard.strides_bytes, strict=True
        )
    )


def _slice(file: Any, entry: DiskEntry, part: Box) -> Any:
    """Read only the box `part` of a checkpoint tensor from `file`. `entry` describes the tensor in this file.

    Raises:
        TransferFailed: the tensor in the file has another shape than `entry`.
    """
    if not entry.sizes:
        return file.get_tensor(entry.key)
    sliced = file.get_slice(entry.key)
    shape = tuple(sliced.get_shape())
    if shape != entry.sizes:
        raise TransferFailed(f"disk: {entry.key}: shape must be {entry.sizes}, got {shape}")
    return sliced[
        tuple(
            slice(at - start, at - start + size)
            for at, start, size in zip(part.offsets, entry.offsets, part.sizes, strict=True)
        )
    ]
