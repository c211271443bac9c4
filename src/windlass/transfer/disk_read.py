"""From safetensors files into parameters: exactly the boxes that one rank needs, by slicing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from windlass.errors import TransferFailed
from windlass.layout.box import Box
from windlass.layout.manifest import Shard, ShardManifest
from windlass.memory.ops import OWN_WORK_S, MemoryOps
from windlass.memory.packing import copy_cast
from windlass.transfer.disk_files import DiskEntry, DiskIndex

__all__ = ["read_boxes"]


def read_boxes(
    home: Path,
    indices: Sequence[DiskIndex],
    manifest: ShardManifest,
    addresses: Sequence[int],
    memory: MemoryOps,
) -> list[str]:
    """Fill a rank's parameters from files; a box that several files hold is read once.

    Args:
        home: folder of the files.
        indices: what they hold.
        manifest: of the rank.
        addresses: where its parameters are to be filled.
        memory: that these are in; all is there on return.

    Raises:
        TransferFailed: a cast overflowed, nothing casts a file's dtype to the parameter's, or what was
            queued on the GPU does not end.

    Returns:
        Workers whose files cannot be read as their index says.
    """
    from safetensors import SafetensorError, safe_open

    unreadable: list[str] = []
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for index in indices:
            try:
                files[index.worker] = stack.enter_context(
                    safe_open(str(home / Path(index.file).name), framework="pt")
                )
            except (SafetensorError, OSError):
                unreadable.append(index.worker)
        holders = _holders([index for index in indices if index.worker in files])
        parameters = {p.name: i for i, p in enumerate(manifest.parameters)}
        for shard in manifest.shards():
            todo = [shard.box]
            for worker, entry in _found(shard.tensor, holders, indices, manifest):
                for wanted in list(todo):
                    common = wanted.intersect(entry.box)
                    if common is None or worker in unreadable:
                        continue
                    try:
                        position = parameters[shard.parameter]
                        dtype = manifest.parameters[position].dtype
                        view = memory.view(
                            addresses[position] + _offset(shard, common),
                            common.sizes or (1,),
                            shard.strides_bytes or (dtype.itemsize,),
                            dtype,
                        )
                        part = _slice(files[worker], entry, common).reshape(view.shape)
                    except (SafetensorError, OSError, RuntimeError):
                        unreadable.append(worker)
                        continue
                    copy_cast(view, part, shard.tensor)
                    todo.remove(wanted)
                    todo.extend(wanted.subtract(common))
    memory.settle(OWN_WORK_S)
    return unreadable


def _holders(indices: Sequence[DiskIndex]) -> dict[str, list[tuple[str, DiskEntry]]]:
    holders: dict[str, list[tuple[str, DiskEntry]]] = {}
    for index in indices:
        for entry in index.entries:
            holders.setdefault(entry.tensor, []).append((index.worker, entry))
    return holders


def _found(
    tensor: str,
    holders: Mapping[str, list[tuple[str, DiskEntry]]],
    indices: Sequence[DiskIndex],
    manifest: ShardManifest,
) -> list[tuple[str, DiskEntry]]:
    """Entries of a tensor, under its own name or one that is tied to it on either side."""
    tied = {tensor}
    for aliases in (manifest.aliases, *(index.aliases for index in indices)):
        for pair in aliases.items():
            if tied & set(pair):
                tied |= set(pair)
    return [found for name in sorted(tied) for found in holders.get(name, ())]


def _offset(shard: Shard, part: Box) -> int:
    return shard.offset_bytes + sum(
        (at - start) * stride
        for at, start, stride in zip(
            part.offsets, shard.box.offsets, shard.strides_bytes, strict=True
        )
    )


def _slice(file: Any, entry: DiskEntry, part: Box) -> Any:
    """The elements of `part`, read alone.

    Raises:
        TransferFailed: the file's tensor has another shape than the index says.
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
