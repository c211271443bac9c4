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
from typing import TYPE_CHECKING, Any, final
from urllib.parse import quote

import msgspec
import numpy as np
import xxhash

from windlass.closing import Closing
from windlass.errors import DECODE_ERRORS, TransferFailed
from windlass.files import replacing
from windlass.layout.box import Box
from windlass.layout.columns import UInt8Array
from windlass.layout.dtypes import DType
from windlass.layout.manifest import Shard, ShardManifest, contiguous_strides
from windlass.memory.ops import OWN_WORK_S, MemoryOps
from windlass.memory.packing import (
    bytes_at,
    copy_cast,
    is_contiguous,
    offset_of,
    row_major_blocks,
    split_inner,
)

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
BLOCK_NBYTES = 8 << 20
"""Maximum size of a block when strided boxes are gathered and written."""
OWNERS_FOLDER = 0o700
OWNERS_FILE = 0o600
"""Modes of folders and files that only their owner can read."""
READ_NBYTES = 1 << 20
"""Maximum size of a block when boxes are read: small enough to stay in cache until it is copied."""
RUN_NBYTES = 4 << 10
"""Minimum size of a contiguous run in a file for one system call per run. Shorter runs are read together."""
_LENGTH_NBYTES = 8
_DTYPES = {dtype.safetensors_name: dtype for dtype in DType}
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
    with replacing(path, OWNERS_FILE, is_durable=True) as file:
        for chunk in chunks:
            digest.update(chunk)
            nbytes += file.write(chunk)
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
        The `worker` of each index whose file cannot be read, is not a complete safetensors file, or lacks a tensor that
        the index lists and this rank needs.

    Raises:
        TransferFailed: a tensor in a file has another shape than its index says, an unknown dtype, or a dtype that cannot
            be cast to the parameter's; or a cast overflowed; or work that was queued on the GPU does not end.
    """
    unreadable: list[str] = []
    with ExitStack() as stack:
        files: dict[str, TensorFile] = {}
        for index in indices:
            try:
                files[index.worker] = stack.enter_context(TensorFile(home / index.file))
            except OSError:
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
                    position = parameters[shard.parameter]
                    dtype = manifest.parameters[position].dtype
                    try:
                        view = _view(shard, common, addresses[position], dtype, memory)
                        if files[worker].fill(entry, common, view):
                            blocks: Iterable[tuple[Box, Any]] = ()
                        else:
                            blocks = files[worker].blocks(entry, common)
                        for block, part in blocks:
                            view = _view(shard, block, addresses[position], dtype, memory)
                            copy_cast(view, part.reshape(view.shape), shard.tensor)
                    except OSError:
                        unreadable.append(worker)
                        continue
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
            try:
                with TensorFile(files[worker]) as file:
                    for block, stored in file.blocks(entry, common):
                        held = _view(shard, block, addresses[position], dtype, memory)
                        # Compare bytes, because NaN is not equal to NaN.
                        sent = stored.reshape(held.shape).to(held.device, held.dtype)
                        if not torch.equal(
                            sent.contiguous().view(torch.uint8), held.contiguous().view(torch.uint8)
                        ):
                            names = " and ".join(sorted(repr(entry.tensor) for _, entry in found))
                            return (
                                f"the engine ties {names}, but the files contain different values; keep them tied in "
                                "training, or serve the model with tie_word_embeddings=false"
                            )
            except OSError as error:
                raise TransferFailed(f"disk: {files[worker]}: {error}") from error
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


class _Stored(msgspec.Struct, frozen=True):
    """Tensor in the header of a safetensors file. `data_offsets` begin after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@final
class TensorFile(Closing):
    """Safetensors file that is read with system calls.

    The package safetensors maps the file into memory. If a mapped file is truncated, or a network file system loses it, the
    next access ends the process with SIGBUS. A system call returns an error instead.

    Attributes:
        shapes: name of each tensor -> shape.

    Raises:
        OSError: the file cannot be read, or is not a complete safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        try:
            self._tensors = self._header()
        except BaseException:
            self._file.close()
            raise
        self.shapes = {name: stored.shape for name, stored in self._tensors.items()}

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _header(self) -> dict[str, _Stored]:
        """Return name -> place of each tensor, with offsets in the file.

        Raises:
            OSError: the header is incomplete or malformed, or a tensor does not fill its bytes or lies outside the file.
        """
        nbytes = os.fstat(self._file.fileno()).st_size
        length = bytearray(_LENGTH_NBYTES)
        self._fill(memoryview(length), 0)
        begin = _LENGTH_NBYTES + int.from_bytes(length, "little")
        if begin > nbytes:
            raise OSError(f"{self._path}: the header must end by byte {nbytes}, got {begin}")
        header = bytearray(begin - _LENGTH_NBYTES)
        self._fill(memoryview(header), _LENGTH_NBYTES)
        try:
            found = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            found.pop("__metadata__", None)
            tensors = {n: msgspec.json.decode(raw, type=_Stored) for n, raw in found.items()}
        except DECODE_ERRORS as error:
            raise OSError(f"{self._path}: the header cannot be decoded: {error}") from error
        placed: dict[str, _Stored] = {}
        for name, stored in tensors.items():
            start, stop = stored.data_offsets
            dtype = _DTYPES.get(stored.dtype)
            wanted = stop - start if dtype is None else math.prod(stored.shape) * dtype.itemsize
            if not 0 <= start <= stop <= nbytes - begin or wanted != stop - start:
                raise OSError(
                    f"{self._path}: tensor {name!r} must fill {wanted} of the {nbytes - begin} bytes after the header, "
                    f"got bytes {start} to {stop}"
                )
            placed[name] = msgspec.structs.replace(
                stored, data_offsets=(begin + start, begin + stop)
            )
        return placed

    def fill(self, entry: DiskEntry, part: Box, target: torch.Tensor) -> bool:
        """Read a box directly into `target` if this needs no cast and no strides. Return whether this was possible.

        For arguments and errors see `blocks`. `target` has the elements of `part`, in any memory.
        """
        import torch

        from windlass.memory.torch_dtypes import torch_dtype

        stored, dtype = self._stored(entry)
        is_plain = target.device.type == "cpu" and target.is_contiguous()
        if not is_plain or target.dtype != torch_dtype(dtype):
            return False
        raw = target.view(-1).view(torch.uint8).numpy()
        strides = contiguous_strides(stored.shape, dtype.itemsize)
        place = stored.data_offsets[0] + _within(part.offsets, entry, strides)
        self._read(raw, place, part.sizes, strides, dtype.itemsize)
        return True

    def blocks(self, entry: DiskEntry, part: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield a box of a checkpoint tensor in blocks, each with its elements as a tensor in host memory.

        The next block overwrites this tensor.

        Args:
            entry: the file's tensor that contains the box.
            part: the box, in the checkpoint tensor.

        Raises:
            OSError: the file cannot be read, or has no such tensor.
            TransferFailed: the tensor in the file has another shape than `entry`, or an unknown dtype.
        """
        import torch

        from windlass.memory.torch_dtypes import torch_dtype

        stored, dtype = self._stored(entry)
        strides = contiguous_strides(stored.shape, dtype.itemsize)
        numel = min(READ_NBYTES // dtype.itemsize, part.numel)
        scratch = torch.empty(numel, dtype=torch_dtype(dtype))
        raw = scratch.view(torch.uint8).numpy()
        for start, sizes in row_major_blocks(part.sizes, numel):
            offsets = tuple(at + step for at, step in zip(part.offsets, start, strict=True))
            place = stored.data_offsets[0] + _within(offsets, entry, strides)
            nbytes = math.prod(sizes) * dtype.itemsize
            self._read(raw[:nbytes], place, sizes, strides, dtype.itemsize)
            yield Box(offsets, sizes), scratch[: math.prod(sizes)].view(sizes)

    def _stored(self, entry: DiskEntry) -> tuple[_Stored, DType]:
        """Return the place and the dtype of a tensor of the file. For errors see `blocks`."""
        stored = self._tensors.get(entry.key)
        if stored is None:
            raise OSError(f"{self._path}: has no tensor {entry.key!r}")
        if stored.shape != entry.sizes:
            raise TransferFailed(
                f"disk: {entry.key}: shape must be {entry.sizes}, got {stored.shape}"
            )
        if (dtype := _DTYPES.get(stored.dtype)) is None:
            raise TransferFailed(
                f"disk: {entry.key}: dtype must be one of {list(_DTYPES)}, got {stored.dtype}"
            )
        return stored, dtype

    def _read(
        self,
        target: UInt8Array,
        place: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
    ) -> None:
        """Read a box into `target`, in row-major order. Its first element is at byte `place` of the file."""
        outer, run = split_inner(sizes, strides, itemsize)
        if outer == 0:
            self._fill(target.data, place)
            return
        count, stride = sizes[outer - 1], strides[outer - 1]
        # Short runs are read together with the bytes between them.
        together = max(READ_NBYTES // stride, 1) if run < RUN_NBYTES else 1
        between = np.empty((min(together, count) - 1) * stride + run, np.uint8)
        at = 0
        for index in np.ndindex(sizes[: outer - 1]):
            line = place + offset_of(index, strides)
            for row in range(0, count, together):
                num_rows = min(together, count - row)
                runs = target[at : at + num_rows * run]
                at += num_rows * run
                if num_rows == 1:
                    self._fill(runs.data, line + row * stride)
                    continue
                read, shape = between[: (num_rows - 1) * stride + run], (num_rows, run)
                self._fill(read.data, line + row * stride)
                runs.reshape(shape)[:] = np.lib.stride_tricks.as_strided(read, shape, (stride, 1))

    def _fill(self, target: memoryview, place: int) -> None:
        """Read bytes from `place` on until `target` is full.

        Raises:
            OSError: the file cannot be read, or ends before.
        """
        done = 0
        while done < len(target):
            count = os.preadv(self._file.fileno(), [target[done:]], place + done)
            if count == 0:
                raise OSError(f"{self._path}: the file must have more than {place + done} bytes")
            done += count


def _within(offsets: Sequence[int], entry: DiskEntry, strides: Sequence[int]) -> int:
    """Return the byte offset, in the file's tensor, of the element at `offsets` of the checkpoint tensor."""
    places = zip(offsets, entry.offsets, strict=True)
    return offset_of(tuple(at - first for at, first in places), strides)
