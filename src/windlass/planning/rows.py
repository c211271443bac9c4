"""Collect all shards of one side in one table, with tensor names resolved across the two sides.

This is the first step of planning. Manifests (one per rank) become two `RowTable`s. Their `tensor`
column contains *classes*: names that share their bytes (tied weights) are one class.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from windlass.errors import IncompleteCoverage, ManifestError
from windlass.layout.columns import Int32Array, UInt8Array, column
from windlass.layout.manifest import ShardManifest, ShardTable
from windlass.layout.naming.patterns import as_argument, renaming, said
from windlass.layout.quantization import require_supported
from windlass.planning.plan import DTYPES, Transform
from windlass.wording import counted

_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable(ShardTable):
    """Shards of all ranks of one side.

    `tensor` is a tensor class, and `parameter` an index into the parameters of the row's manifest.

    Attributes:
        name: (n,) index into `TensorNames.names`, the name that this side uses.
        rank: (n,) index of the row's manifest.
        dtype: (n,) index into `DTYPES`.
        transform: (n,) `Transform` that computes the row's values; NONE in source rows.
    """

    name: Int32Array = column("<i4")
    rank: Int32Array = column("<i4")
    dtype: UInt8Array = column("u1")
    transform: UInt8Array = column("u1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of both sides and their classes.

    A class stands for one tensor. Names that share their bytes (tied weights) have the same class.

    Attributes:
        names: every checkpoint name on either side.
        index: name -> index in `names`.
        shapes: global shape of each name.
        class_of: (num_names,) class of each name, -1 for a destination name without a source.
        derived: names of scales that no source holds; they have the class of their weight.
    """

    names: tuple[str, ...]
    index: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    class_of: Int32Array
    derived: frozenset[str]

    def ids(self, manifest: ShardManifest) -> Int32Array:
        """Return the name index of each tensor of `manifest`."""
        index = self.index
        return np.array([index[spec.name] for spec in manifest.tensors], np.int32)


def resolve_names(
    sources: Sequence[ShardManifest],
    destinations: Sequence[ShardManifest],
    unread: Collection[str] = (),
) -> TensorNames:
    """Give every tensor name a class. Names of one class belong to the same tensor.

    An alias of a source (tied weights) joins two names into one class. An alias of a destination does not join classes.
    But if no source has the name of a destination's tensor, this name gets the class of the tensor's alias.

    Args:
        sources: manifests of the trainer ranks.
        destinations: manifests of the engine ranks.
        unread: names that no engine reads. Sources may give these names different shapes.

    Raises:
        ManifestError: two workers give a name different shapes; a destination ties two tensors that the sources hold
            separately; or one source ties two tensors that another source holds separately.
        UnsupportedLayout: trainers cannot compute the scales that a destination needs.
    """
    index: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    seen_at: list[str] = []
    # Compute this only if two shapes differ: `_read_names` is slow, because it visits all tensors of all destinations.
    read: set[str] | None = None
    for manifest in (*sources, *destinations):
        own = {spec.name: spec.shape for spec in manifest.tensors}
        aliases = manifest.aliases
        for name, shape in (*own.items(), *((a, own[aliases[a]]) for a in aliases)):
            known = index.setdefault(name, len(shapes))
            if known == len(shapes):
                shapes.append(shape)
                seen_at.append(manifest.worker)
            elif shapes[known] != shape and name not in unread:
                read = _read_names(sources, destinations) if read is None else read
                if read and name not in read:
                    continue
                alias = f"as an alias of {aliases[name]!r} " if name in aliases else ""
                raise ManifestError(
                    f"tensor {name!r} must have one shape, got {shapes[known]} at "
                    f"{seen_at[known]} and {shape} {alias}at {manifest.worker}"
                )
    _refuse_ties_of_some(sources, unread)
    class_of = _source_classes(sources, index)
    _apply_destination_aliases(destinations, index, class_of)
    derived = _derive_scales(destinations, index, class_of)
    return TensorNames(
        names=tuple(index),
        index=index,
        shapes=tuple(shapes),
        class_of=np.array(class_of, np.int32),
        derived=derived,
    )


def _read_names(
    sources: Sequence[ShardManifest], destinations: Sequence[ShardManifest]
) -> set[str]:
    """Return the names that destinations have, and the names that a source ties to one of these names."""
    read = {n for m in destinations for n in (*m.aliases, *(spec.name for spec in m.tensors))}
    for alias, target in (pair for m in sources for pair in m.aliases.items()):
        if not read.isdisjoint({alias, target}):
            read |= {alias, target}
    return read


def _derive_scales(
    destinations: Sequence[ShardManifest], index: dict[str, int], class_of: list[int]
) -> frozenset[str]:
    """Find scales that no source has, and set their class in `class_of` to the class of their weight. Return their names.

    Raises:
        UnsupportedLayout: trainers cannot quantise to the scheme of a weight.
    """
    derived = set()
    for manifest in destinations:
        for quantized in manifest.quantized:
            if class_of[index[quantized.scale]] == -1:
                require_supported(quantized)
                derived.add(quantized.scale)
    for manifest in destinations:
        for quantized in manifest.quantized:
            if quantized.scale in derived:
                class_of[index[quantized.scale]] = class_of[index[quantized.weight]]
    return frozenset(derived)


def _refuse_ties_of_some(sources: Sequence[ShardManifest], unread: Collection[str]) -> None:
    """Raise ManifestError if one source has two separate tensors that another source ties.

    Accept a source with only one of the two tensors. For example, the last stage of a pipeline has the output matrix
    without the embedding.
    """
    ties = {pair: manifest.worker for manifest in sources for pair in manifest.aliases.items()}
    for manifest in sources if ties else ():
        own = {spec.name for spec in manifest.tensors}
        for (alias, target), worker in ties.items():
            if alias in own and target in own and alias not in unread:
                raise ManifestError(
                    f"{worker} ties {alias!r} to {target!r}, but {manifest.worker} has two separate tensors; build the "
                    "model from the same configuration on all trainer ranks"
                )


def _source_classes(sources: Sequence[ShardManifest], index: dict[str, int]) -> list[int]:
    """Return the class of each name: the same class for names that a source ties, and -1 for a name that no source has."""
    class_of = [-1] * len(index)
    for manifest in sources:
        for spec in manifest.tensors:
            name = index[spec.name]
            class_of[name] = name
    for manifest in sources:
        for alias, target in manifest.aliases.items():
            old, new = class_of[index[alias]], class_of[index[target]]
            class_of[index[alias]] = new
            if old not in (-1, new):
                class_of = [new if value == old else value for value in class_of]
    return class_of


def _apply_destination_aliases(
    destinations: Sequence[ShardManifest], index: dict[str, int], class_of: list[int]
) -> None:
    """Give a destination's tensor the class of its alias if no source has the tensor's name. Change `class_of`.

    Raises:
        ManifestError: the sources have two separate tensors with these names.
    """
    for manifest in destinations:
        for alias, target in manifest.aliases.items():
            of_alias, of_target = class_of[index[alias]], class_of[index[target]]
            if of_target == -1:
                class_of[index[target]] = of_alias
            elif of_alias not in (-1, of_target):
                raise ManifestError(
                    f"{manifest.worker} ties {alias!r} to {target!r}, but the sources hold them "
                    "as two separate tensors"
                )


def gather_rows(manifests: Sequence[ShardManifest], names: TensorNames) -> RowTable:
    """Concatenate the shards of `manifests`.

    Raises:
        ManifestError: two manifests have the same worker name.
        IncompleteCoverage: no source has the tensor of a shard.
    """
    workers = [manifest.worker for manifest in manifests]
    if len(set(workers)) != len(workers):
        twice = next(worker for worker in workers if workers.count(worker) > 1)
        raise ManifestError(f"worker {twice!r} must have one manifest per side, got several")
    _refuse_missing(manifests, names)
    rows = ShardTable.join(manifest.table for manifest in manifests).columns()
    name, dtype = np.zeros(len(rows["tensor"]), np.int32), np.zeros(len(rows["tensor"]), np.uint8)
    rank, transform = np.zeros_like(name), np.zeros_like(dtype)
    stop = 0
    for index, manifest in enumerate(manifests):
        start, stop = stop, stop + len(manifest.table)
        at, table = slice(start, stop), manifest.table
        name[at], rank[at] = names.ids(manifest)[table.tensor], index
        dtypes = np.array([_DTYPE_INDEX[p.dtype] for p in manifest.parameters], np.uint8)
        dtype[at] = dtypes[table.parameter]
        transform[at] = _transforms(manifest, names)[table.tensor]
    rows["tensor"] = names.class_of[name]
    return RowTable(**rows, name=name, rank=rank, dtype=dtype, transform=transform)


def _refuse_missing(manifests: Sequence[ShardManifest], names: TensorNames) -> None:
    """Raise `IncompleteCoverage` if no source has the tensor of a shard. The error lists these tensors, with advice."""
    missing: set[str] = set()
    workers: list[str] = []
    for manifest in manifests:
        name = names.ids(manifest)[np.unique(manifest.table.tensor)]
        if (nowhere := name[names.class_of[name] < 0]).size:
            missing.update(names.names[index] for index in nowhere.tolist())
            workers.append(manifest.worker)
    if not missing:
        return
    needed = {
        name for each in manifests for name in (*each.aliases, *(t.name for t in each.tensors))
    }
    shapes = dict(zip(names.names, names.shapes, strict=True))
    there = {name: shape for name, shape in shapes.items() if name not in needed}
    matched = shapes.keys() - there.keys() - missing
    others = f" and {counted(len(workers) - 1, 'more rank')}" if len(workers) > 1 else ""
    advice = renaming({name: shapes[name] for name in missing}, there, matched)
    if not there:
        advice = (
            "; publish these tensors too. If no training step and no adapter changes the tensors, and engines should "
            "keep their current values, pass this to the trainer: "
            f"keep={as_argument(sorted(missing))}"
        )
    raise IncompleteCoverage(
        f"no source has these tensors of {workers[0]}{others}: {said(missing)}{advice}"
    )


def _transforms(manifest: ShardManifest, names: TensorNames) -> UInt8Array:
    """Return the `Transform` of each tensor of a manifest, (num_tensors,). It is NONE for all tensors of a source."""
    transform = np.zeros(len(manifest.tensors), np.uint8)
    if manifest.quantized:
        at = {spec.name: index for index, spec in enumerate(manifest.tensors)}
        for quantized in manifest.quantized:
            if quantized.scale in names.derived:
                transform[at[quantized.weight]] = Transform.FP8_BLOCK_VALUES
                transform[at[quantized.scale]] = Transform.FP8_BLOCK_SCALES
    return transform
