"""Boxes that several sources hold: they must hold the same bytes of them, or there is no right version.

The controller finds these boxes once per fleet of trainers (`find_replicated`) and tells each rank which
are its own (`ReplicatedPart`). Before a round writes anything, ranks digest blocks of them and the
controller compares: all blocks the first time, every `period`-th run of them later, others each time.
Boxes that overlap in part are cut into pieces with the same holders first, as the planner does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from windlass.errors import PlanError, ProtocolError
from windlass.layout.box import Box
from windlass.layout.columns import Int64Array, StructuredArray
from windlass.layout.manifest import MAX_DIMS, ShardManifest
from windlass.planning.intersect import (
    atoms_by_pattern,
    classes_by_pattern,
    counted,
    find_holders,
    unique_boxes,
)
from windlass.planning.plan import ITEMSIZES
from windlass.planning.rows import gather_rows, resolve_names

BLOCK_NBYTES = 256 << 10
"""What boxes are cut into."""
RUN_BLOCKS = 64
"""The most blocks, of one box or of boxes that follow each other, that are due in the same turn: a GPU
digests a long piece of one box as quickly as a short one of it, and many boxes one after the other."""
LEAST_RUNS = 1024
"""Runs are shorter where there would be fewer of them."""
SAMPLE_SHARE = 1 / 64
"""Of the bytes that the busiest rank sends: as many are digested in a round after the first. Sending a
byte costs its digest at both ends and a copy, so that is less than 1 / 64 of an update."""
NAMED_RANKS = 4

HELD = np.dtype(
    [
        ("box", "<i4"),
        ("parameter", "<i4"),
        ("offset", "<i8"),
        ("sizes", "<i8", (MAX_DIMS,)),
        ("strides", "<i8", (MAX_DIMS,)),
        ("first", "<i8"),
        ("run", "<i4"),
    ]
)
"""Where a rank holds a box: `offset` and `strides` in bytes, `sizes` in elements, slowest dim first.
`first`: number of its first block, all boxes of the fleet counted through; `run`: blocks in a run."""
DIGESTED = np.dtype([("box", "<i4"), ("kind", "u1"), ("a", "<u8"), ("b", "<u8")])
"""What a rank found in a box; digests of one `kind` (of algorithm) can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DueBlocks:
    """Blocks to be digested, box after box, in the order of their digest.

    Attributes:
        row: (n,) row of the part. offset: (n,) bytes from the start of the parameter.
        sizes: (n, MAX_DIMS) elements; strides are the row's.
    """

    row: Int64Array
    offset: Int64Array
    sizes: Int64Array


@dataclass(frozen=True, slots=True)
class ReplicatedPart:
    """The boxes of one rank that others hold too.

    Attributes:
        held: (n,) `HELD`, ascending by box.
    """

    held: StructuredArray

    def __len__(self) -> int:
        return len(self.held)

    def encode(self) -> bytes:
        """The wire form."""
        return self.held.tobytes()

    @classmethod
    def decode(cls, data: bytes, manifest: ShardManifest) -> ReplicatedPart:
        """The inverse of `encode`, for the rank of `manifest`.

        Raises:
            ProtocolError: no such table. PlanError: it leaves the rank's parameters.
        """
        try:
            held = np.frombuffer(data, HELD)
        except ValueError as error:
            raise ProtocolError(f"replicated boxes of {manifest.worker}: {error}") from error
        sizes, strides = held["sizes"], held["strides"]
        extents = np.array([spec.nbytes for spec in manifest.parameters], np.int64)
        known = (held["parameter"] >= 0) & (held["parameter"] < len(extents))
        inside = known.all() and (sizes > 0).all() and (strides >= 0).all()
        inside = inside and (held["first"] >= 0).all() and (held["run"] > 0).all()
        if inside and len(held):
            itemsizes = np.array([spec.dtype.itemsize for spec in manifest.parameters], np.int64)
            # In floating point first: integers that are sent may be such that their sum wraps around.
            steps = ((sizes - 1.0) * strides).sum(axis=1) + held["offset"]
            inside = (steps <= 2.0 * extents[held["parameter"]]).all()
            reach = held["offset"] + ((sizes - 1) * strides).sum(axis=1)
            ends = reach + itemsizes[held["parameter"]]
            inside = (
                inside
                and (held["offset"] >= 0).all()
                and (ends <= extents[held["parameter"]]).all()
            )
        if not inside:
            raise PlanError(f"replicated boxes of {manifest.worker} must lie in its parameters")
        return cls(held)


@final
class BlockSchedule:
    """Which blocks of a rank's boxes are due when.

    Args:
        held: `ReplicatedPart.held`.
        itemsizes: (n,) of each row's elements.
    """

    def __init__(self, held: StructuredArray, itemsizes: Int64Array) -> None:
        self._sizes = held["sizes"].astype(np.int64)
        self._strides = held["strides"].astype(np.int64)
        self._offset = held["offset"].astype(np.int64)
        self._first = held["first"].astype(np.int64)
        self._run = held["run"].astype(np.int64)
        self._cut = _Cut.of(self._sizes, itemsizes)
        self._stop = self._first + self._cut.num_blocks

    def due(self, turn: int, period: int) -> DueBlocks:
        """The blocks whose turn it is: those of run r if r % period == turn % period.

        Args:
            turn: counts comparisons.
            period: in so many turns every block is due once; >= 1.
        """
        lowest, highest = self._first // self._run, (self._stop - 1) // self._run
        lowest = lowest + (turn - lowest) % period
        num_runs = np.maximum((highest - lowest) // period + 1, 0)
        row = np.repeat(np.arange(len(num_runs)), num_runs)
        run = lowest[row] + counted(num_runs) * period
        start = np.maximum(self._first[row], run * self._run[row])
        stop = np.minimum(self._stop[row], (run + 1) * self._run[row])
        number = np.repeat(start - self._first[row], stop - start) + counted(stop - start)
        row = np.repeat(row, stop - start)
        at, block = self._cut.place(self._sizes, row, number)
        offset = self._offset[row] + (at * self._strides[row]).sum(axis=1)
        return DueBlocks(row=row, offset=offset, sizes=block)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How boxes are cut into blocks that follow each other row-major: by their sizes alone.

    Attributes:
        dim: (n,) dims before `dim - 1` are walked one by one, it in chunks, the others whole; 0: one block.
        chunk, per_dim: (n,) elements of that dim in a block, and blocks along it.
        num_blocks: (n,).
    """

    dim: Int64Array
    chunk: Int64Array
    per_dim: Int64Array
    num_blocks: Int64Array

    @classmethod
    def of(cls, sizes: Int64Array, itemsizes: Int64Array) -> _Cut:
        limit = BLOCK_NBYTES // itemsizes
        inner, dim = sizes.prod(axis=1), np.zeros(len(sizes), np.int64)
        for axis in range(MAX_DIMS):
            over = inner > limit
            inner = np.where(over, inner // sizes[:, axis], inner)
            dim = np.where(over, axis + 1, dim)
        chunk = np.maximum(limit // np.maximum(inner, 1), 1)
        along = np.take_along_axis(sizes, np.maximum(dim - 1, 0)[:, None], 1)[:, 0]
        per_dim = np.where(dim > 0, -(-along // chunk), 1)
        before = np.arange(MAX_DIMS)[None, :] < dim[:, None] - 1
        return cls(dim, chunk, per_dim, np.where(before, sizes, 1).prod(axis=1) * per_dim)

    def place(
        self, sizes: Int64Array, row: Int64Array, number: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Where block `number` of box `row` starts and how large it is: (m, MAX_DIMS) each."""
        whole, at = sizes[row], self.dim[row] - 1
        outer, along = np.divmod(number, self.per_dim[row])
        start = np.zeros_like(whole)
        for axis in range(MAX_DIMS - 1, -1, -1):
            walked = axis < at
            start[:, axis] = np.where(walked, outer % whole[:, axis], 0)
            outer = np.where(walked, outer // whole[:, axis], outer)
            start[:, axis] += np.where(axis == at, along * self.chunk[row], 0)
        axes = np.arange(MAX_DIMS)[None, :]
        left = np.minimum(self.chunk[row][:, None], whole - start)
        block = np.where(axes < at[:, None], 1, np.where(axes == at[:, None], left, whole))
        return start, block


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """All boxes that several ranks hold, each with one dtype.

    Attributes:
        parts: by worker, of those that hold any.
        names: (n,) checkpoint tensor of each box. boxes: (n,) which elements.
        num_holders: (n,).
        nbytes: that the rank with most of them holds.
        num_runs: of blocks, of all boxes together.
    """

    parts: Mapping[str, ReplicatedPart]
    names: Sequence[str]
    boxes: Sequence[Box]
    num_holders: Int64Array
    nbytes: int
    num_runs: int

    def period(self, sent_nbytes: int) -> int:
        """In how many turns every block is compared once.

        Args:
            sent_nbytes: what the busiest rank sends in an update.
        """
        wanted = int(self.nbytes // max(sent_nbytes * SAMPLE_SHARE, 1)) + 1
        return max(min(wanted, self.num_runs), 1)  # so that no turn is empty

    def disagreement(self, found: Mapping[str, StructuredArray]) -> str:
        """Why ranks do not hold the same bytes; empty where they do.

        Args:
            found: worker -> (n,) `DIGESTED`, of all that have a part.
        """
        workers = sorted(found)
        table = np.concatenate([np.zeros(0, DIGESTED), *(found[w] for w in workers)])
        rank = np.repeat(np.arange(len(workers)), [len(found[w]) for w in workers])
        if (table["box"] < 0).any() or (table["box"] >= len(self.boxes)).any():
            return "ranks speak of boxes that nobody asked them for"
        num_reports = np.bincount(table["box"], minlength=len(self.boxes))
        if (odd := np.flatnonzero((num_reports > 0) & (num_reports != self.num_holders))).size:
            box = int(odd[0])
            return (
                f"{self._describe(box)} is held by {self.num_holders[box]} ranks, and {num_reports[box]} "
                "said what they hold"
            )
        order = np.lexsort((rank, table["b"], table["a"], table["kind"], table["box"]))
        table, rank = table[order], rank[order]
        alike = (table["box"][1:] == table["box"][:-1]) & (table["kind"][1:] == table["kind"][:-1])
        differ = alike & ((table["a"][1:] != table["a"][:-1]) | (table["b"][1:] != table["b"][:-1]))
        if not differ.any():
            return ""
        bad = np.unique(table["box"][1:][differ])
        box = int(bad[0])
        of_box = table["box"] == box
        groups: dict[tuple[int, int, int], list[str]] = {}
        for row, index in zip(table[of_box], rank[of_box], strict=True):
            key = int(row["kind"]), int(row["a"]), int(row["b"])
            groups.setdefault(key, []).append(workers[int(index)])
        sides = " but not ".join(_listed(names) for names in sorted(groups.values()))
        names = {self.names[int(index)] for index in bad}
        more = f" (and {len(bad) - 1} more boxes, of {len(names)} tensors)" if len(bad) > 1 else ""
        return (
            f"ranks that hold the same box must hold the same bytes: {self._describe(box)} is the same "
            f"at {sides}{more}; a step that is not gathered or reduced everywhere, or pieces described "
            "as replicas, look like this"
        )

    def _describe(self, box: int) -> str:
        return f"{self.names[box]!r} {self.boxes[box]}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED_RANKS])
    return shown + (f" and {len(names) - NAMED_RANKS} more" if len(names) > NAMED_RANKS else "")


def decode_digested(data: bytes) -> StructuredArray:
    """`DIGESTED` from its bytes.

    Raises:
        ProtocolError: no such table.
    """
    try:
        return np.frombuffer(data, DIGESTED)
    except ValueError as error:
        raise ProtocolError(f"digests of replicated boxes: {error}") from error


def find_replicated(sources: Sequence[ShardManifest]) -> Replicated:
    """Every piece of a tensor that more than one rank holds, in one dtype.

    Raises:
        ManifestError: manifests contradict each other.
    """
    names = resolve_names(sources, ())
    table = gather_rows(sources, names)
    boxes = unique_boxes(table, len(names.names))
    atoms = atoms_by_pattern(boxes)
    base, holders = find_holders(boxes, atoms, table)
    offsets = np.zeros((int(base[-1]), MAX_DIMS), np.int64)
    sizes = np.ones_like(offsets)
    for of_pattern, classes in zip(atoms, classes_by_pattern(boxes), strict=True):
        for name in classes:
            at = slice(int(base[name]), int(base[name]) + len(of_pattern))
            offsets[at], sizes[at] = of_pattern.offsets, of_pattern.sizes
    rows = holders.rows
    atom = np.repeat(np.arange(len(offsets)), np.diff(holders.start))
    key = atom * len(ITEMSIZES) + table.dtype[rows]
    _, number, count = np.unique(key, return_inverse=True, return_counts=True)
    several = count > 1
    box_of_key = np.cumsum(several) - 1
    keep = several[number]
    rows, atom, box = rows[keep], atom[keep], box_of_key[number[keep]]
    order = np.argsort(box, kind="stable")
    rows, atom, box = rows[order], atom[order], box[order]
    held = np.zeros(len(rows), HELD)
    held["box"], held["parameter"] = box, table.parameter[rows]
    strides = table.strides_bytes[rows]
    inside = offsets[atom] - table.offsets[rows]
    held["offset"] = table.offset_bytes[rows] + (inside * strides).sum(axis=1)
    first = np.searchsorted(box, np.arange(int(several.sum())))
    dims = _slowest_first(sizes[atom[first]], strides[first])[box]
    of_box = np.take_along_axis(sizes[atom[first]], dims[first], 1)
    num_blocks = _Cut.of(of_box, ITEMSIZES[table.dtype[rows[first]]].astype(np.int64)).num_blocks
    total = int(num_blocks.sum())
    run = min(max(total // LEAST_RUNS, 1), RUN_BLOCKS)
    held["first"], held["run"] = (np.cumsum(num_blocks) - num_blocks)[box], run
    held["sizes"] = np.take_along_axis(sizes[atom], dims, 1)
    held["strides"] = np.take_along_axis(strides, dims, 1)
    rank, nbytes = table.rank[rows], sizes[atom].prod(axis=1) * ITEMSIZES[table.dtype[rows]]
    per_rank = np.bincount(rank, nbytes, len(sources))
    tensors = [names.names[int(name)] for name in table.tensor[rows[first]]]
    lead = [MAX_DIMS - len(names.shapes[int(name)]) for name in table.tensor[rows[first]]]
    return Replicated(
        parts={
            sources[index].worker: ReplicatedPart(held[rank == index])
            for index in np.unique(rank).tolist()
        },
        names=tensors,
        boxes=[
            Box(tuple(offsets[a, n:].tolist()), tuple(sizes[a, n:].tolist()))
            for a, n in zip(atom[first].tolist(), lead, strict=True)
        ],
        num_holders=count[several],
        nbytes=int(per_rank.max(initial=0)),
        num_runs=-(-total // run),
    )


def _slowest_first(sizes: Int64Array, strides: Int64Array) -> Int64Array:
    """Order of dims by stride, those of one element first: rows are contiguous wherever they can be."""
    order: Int64Array = np.argsort(
        np.where(sizes == 1, np.iinfo(np.int64).min, -strides), 1, "stable"
    )
    return order
