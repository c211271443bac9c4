"""Boxes that several sources hold, and the check that all of them hold the same bytes.

The controller finds these boxes once per fleet of trainers (`find_replicated`) and sends each rank
a table of the boxes that it holds (`HELD`). Before a round writes anything, ranks compute digests
of blocks of the boxes, and the controller compares them. The first comparison includes all blocks.
Each later comparison (a turn) includes every `period`-th run of blocks, so that `period` turns
compare everything once. Boxes that overlap in part are first cut into pieces with the same holders,
as in the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
    ranges,
    unique_boxes,
)
from windlass.planning.plan import ITEMSIZES
from windlass.planning.rows import gather_rows, resolve_names

BLOCK_NBYTES = 256 << 10
"""Size of the blocks that boxes are cut into."""
RUN_BLOCKS = 64
"""Maximum number of blocks in a run: consecutive blocks, numbered over all boxes, that are compared in
the same turn. With long runs, a turn includes parts of few boxes. This is faster, because a GPU digests
boxes one after another, and digests a long part of a box as fast as a short part."""
LEAST_RUNS = 1024
"""Number of runs below which runs are made shorter than `RUN_BLOCKS`."""
SAMPLE_SHARE = 1 / 64
"""Bytes that a rank digests in each turn after the first, as a fraction of the bytes that the busiest
rank sends. Sending a byte costs a digest at both ends and a copy, so comparing takes less than
1 / 64 of the time of an update."""
NAMED_RANKS = 4

HELD = np.dtype(
    [
        ("box", "<i4"),
        ("parameter", "<i4"),
        ("offset", "<i8"),
        ("sizes", "<i8", (MAX_DIMS,)),
        ("strides", "<i8", (MAX_DIMS,)),
        ("row_nbytes", "<i8"),
        ("first", "<i8"),
        ("run", "<i4"),
    ]
)
"""A box in one rank, as rows of `row_nbytes` contiguous bytes; all holders use the same `row_nbytes`.
`sizes`: number of rows per dim, slowest dim first. `offset`, `strides`: bytes. `first`: number of
the box's first block, counted over all boxes of the fleet. `run`: number of blocks in a run."""
DIGESTED = np.dtype([("box", "<i4"), ("kind", "u1"), ("a", "<u8"), ("b", "<u8")])
"""Digest (128 bits, as `a` and `b`) of a box in one rank. Only digests of the same `kind` (algorithm)
can be compared."""


def decode_held(data: bytes, manifest: ShardManifest) -> StructuredArray:
    """Decode the (n,) `HELD` table of one rank, ascending by box, and check the table against `manifest`.

    Raises:
        ProtocolError: `data` is not a `HELD` table.
        PlanError: a box reaches outside the rank's parameters, or contains a byte twice.
    """
    try:
        held = np.frombuffer(data, HELD)
    except ValueError as error:
        raise ProtocolError(f"replicated boxes of {manifest.worker}: {error}") from error
    sizes, strides, row_nbytes = held["sizes"], held["strides"], held["row_nbytes"]
    extents = np.array([*(spec.nbytes for spec in manifest.parameters), 0], np.int64)
    known = (held["parameter"] >= 0) & (held["parameter"] < len(extents) - 1)
    extent = extents[np.where(known, held["parameter"], -1)]
    inside = known & (held["offset"] >= 0) & (held["first"] >= 0) & (held["run"] > 0)
    inside &= (row_nbytes > 0) & (sizes > 0).all(axis=1) & (strides >= 0).all(axis=1)
    # Use floating point, because integers from a bad table could overflow. Floats are exact for
    # offsets inside a parameter.
    inside &= held["offset"] + ((sizes - 1.0) * strides).sum(axis=1) + row_nbytes <= extent
    inside &= sizes.prod(axis=1, dtype=np.float64) * row_nbytes <= extent
    if not inside.all():
        row = int(np.flatnonzero(~inside)[0])
        index = int(held["parameter"][row])
        where = (
            f"parameter {manifest.parameters[index].name!r}" if known[row] else f"parameter {index}"
        )
        raise PlanError(
            f"{where} of {manifest.worker}: replicated boxes must be inside the parameter and contain each byte "
            "once; make an expanded tensor contiguous"
        )
    return held


def num_pieces(held: StructuredArray) -> Int64Array:
    """Return the number of pieces of each box. A piece is a row, or a part of a row that is longer than a block."""
    pieces: Int64Array = held["sizes"].prod(axis=1) * -(-held["row_nbytes"] // BLOCK_NBYTES)
    return pieces


def _pieces_per_block(held: StructuredArray) -> Int64Array:
    pieces: Int64Array = np.maximum(BLOCK_NBYTES // held["row_nbytes"], 1)
    return pieces


def _num_blocks(held: StructuredArray) -> Int64Array:
    return -(-num_pieces(held) // _pieces_per_block(held))


def due_pieces(
    held: StructuredArray, turn: int, period: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the pieces of one rank that are compared in one turn.

    Pieces form blocks, and consecutive blocks form runs. Run number r is compared if r % period == turn % period. So
    `period` turns cover every run once.

    Args:
        held: replicated boxes of one rank, one row each.
        turn: number of earlier comparisons.
        period: number of comparisons that cover every run once.

    Returns:
        (row of `held`, byte offset in the parameter, size in bytes) per piece, in the order of hashing.
    """
    first, run, per_block = held["first"], held["run"].astype(np.int64), _pieces_per_block(held)
    stop = first + _num_blocks(held)
    lowest, highest = first // run, (stop - 1) // run
    lowest = lowest + (turn - lowest) % period
    num_runs = np.maximum((highest - lowest) // period + 1, 0)
    row = np.repeat(np.arange(len(held)), num_runs)
    number = lowest[row] + counted(num_runs) * period
    begin = np.maximum(number * run[row], first[row]) - first[row]
    end = np.minimum((number + 1) * run[row], stop[row]) - first[row]
    begin, end = begin * per_block[row], np.minimum(end * per_block[row], num_pieces(held)[row])
    piece, row = ranges(begin, end - begin), np.repeat(row, end - begin)
    row_nbytes = held["row_nbytes"][row]
    at_row, part = np.divmod(piece, -(-row_nbytes // BLOCK_NBYTES))
    offset = held["offset"][row] + part * BLOCK_NBYTES
    for dim in range(MAX_DIMS - 1, -1, -1):
        at_row, index = np.divmod(at_row, held["sizes"][row, dim])
        offset += index * held["strides"][row, dim]
    return row, offset, np.minimum(row_nbytes - part * BLOCK_NBYTES, BLOCK_NBYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """All boxes that several ranks hold in the same dtype.

    Attributes:
        parts: worker -> (n,) `HELD`, ascending by box, for workers that hold any box.
        names: (n,) checkpoint tensor of each box.
        boxes: (n,) elements of each box.
        num_holders: (n,) number of ranks that hold each box.
        nbytes: bytes of these boxes in the rank that holds most of them.
        num_runs: number of runs of blocks, over all boxes.
    """

    parts: Mapping[str, StructuredArray]
    names: Sequence[str]
    boxes: Sequence[Box]
    num_holders: Int64Array
    nbytes: int
    num_runs: int

    def period(self, sent_nbytes: int) -> int:
        """Return the period: the number of turns after which every block was compared once.

        A rank then digests about `SAMPLE_SHARE` of `sent_nbytes` in a turn. `sent_nbytes` is the number of bytes that
        the busiest rank sends in an update.
        """
        wanted = int(self.nbytes // max(sent_nbytes * SAMPLE_SHARE, 1)) + 1
        # At most `num_runs`, so that no turn is empty.
        return max(min(wanted, self.num_runs), 1)

    def disagreement(self, found: Mapping[str, StructuredArray]) -> str:
        """Compare the digests of all ranks. Return an error text if ranks hold different bytes of a box; otherwise "".

        `found` has the (n,) `DIGESTED` table that each worker in `parts` reported. Return an error text also if a
        worker did not report a box that it holds, or reported an unknown box.
        """
        workers = sorted(found)
        table = np.concatenate([np.zeros(0, DIGESTED), *(found[w] for w in workers)])
        rank = np.repeat(np.arange(len(workers)), [len(found[w]) for w in workers])
        if (table["box"] < 0).any() or (table["box"] >= len(self.boxes)).any():
            return "ranks reported digests of boxes that are not replicated"
        num_reports = np.bincount(table["box"], minlength=len(self.boxes))
        if (odd := np.flatnonzero((num_reports > 0) & (num_reports != self.num_holders))).size:
            box = int(odd[0])
            return (
                f"{self._describe(box)} is held by {self.num_holders[box]} ranks, but {num_reports[box]} "
                "reported a digest of it"
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
            f"at {sides}{more}; usual causes: a step that is not gathered or reduced on all ranks, or "
            "different pieces that are described as replicas"
        )

    def _describe(self, box: int) -> str:
        return f"{self.names[box]!r} {self.boxes[box]}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED_RANKS])
    return shown + (f" and {len(names) - NAMED_RANKS} more" if len(names) > NAMED_RANKS else "")


def decode_digested(data: bytes) -> StructuredArray:
    """Return the (n,) `DIGESTED` table from its wire form `data`.

    Raises:
        ProtocolError: `data` is not a `DIGESTED` table.
    """
    try:
        return np.frombuffer(data, DIGESTED)
    except ValueError as error:
        raise ProtocolError(f"digests of replicated boxes: {error}") from error


def find_replicated(sources: Sequence[ShardManifest], unread: Collection[str] = ()) -> Replicated:
    """Return the boxes of tensors that more than one rank holds in one dtype.

    Tensors in `unread` are left out: no engine takes these tensors, so their bytes may differ between ranks.

    Raises:
        ManifestError: manifests contradict each other.
    """
    names = resolve_names(sources, (), unread)
    table = gather_rows(sources, names)
    if unread:
        is_read = np.array([name not in unread for name in names.names], np.bool_)
        table = table.select(np.flatnonzero(is_read[table.name]))
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
    held["sizes"] = np.take_along_axis(sizes[atom], dims, 1)
    held["strides"] = np.take_along_axis(strides, dims, 1)
    held["row_nbytes"] = ITEMSIZES[table.dtype[rows]]
    _join_rows(held, first)
    num_blocks = _num_blocks(held[first])
    total = int(num_blocks.sum())
    run = min(max(total // LEAST_RUNS, 1), RUN_BLOCKS)
    held["first"], held["run"] = (np.cumsum(num_blocks) - num_blocks)[box], run
    rank, nbytes = table.rank[rows], sizes[atom].prod(axis=1) * ITEMSIZES[table.dtype[rows]]
    per_rank = np.bincount(rank, nbytes, len(sources))
    tensors = [names.names[int(name)] for name in table.tensor[rows[first]]]
    lead = [MAX_DIMS - len(names.shapes[int(name)]) for name in table.tensor[rows[first]]]
    return Replicated(
        parts={sources[i].worker: held[rank == i] for i in np.unique(rank).tolist()},
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
    """Return an order of the dims for each box, (b, MAX_DIMS): dims of size 1 first, then by descending stride.

    `_join_rows` then finds the longest contiguous rows.
    """
    order: Int64Array = np.argsort(
        np.where(sizes == 1, np.iinfo(np.int64).min, -strides), 1, "stable"
    )
    return order


def _join_rows(held: StructuredArray, first: Int64Array) -> None:
    """Merge inner dims into the rows of a box if they are contiguous at every holder of the box. Change `held` in place.

    `held` is sorted by box. `first`, (b,), has the index of the first entry of each box.
    """
    sizes, joins = held["sizes"], np.ones(len(held), np.bool_)
    for dim in range(MAX_DIMS - 1, -1, -1):
        follows = (sizes[:, dim] == 1) | (held["strides"][:, dim] == held["row_nbytes"])
        joins &= np.logical_and.reduceat(follows, first)[held["box"]]
        held["row_nbytes"] *= np.where(joins, sizes[:, dim], 1)
        sizes[joins, dim] = 1
