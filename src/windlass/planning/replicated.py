"""Boxes that trainer ranks hold several times, and the check that they have the same bytes everywhere.

Several ranks may hold a box, and one rank may hold it in several parameters. The controller finds these
boxes once per fleet of trainers (`find_replicated`) and sends each rank
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

from windlass.errors import ManifestError, PlanError, ProtocolError
from windlass.layout.box import Box
from windlass.layout.columns import Int64Array, StructuredArray
from windlass.layout.manifest import MAX_DIMS, ParameterSpec, ShardManifest
from windlass.planning.intersect import (
    atoms_by_pattern,
    classes_by_pattern,
    counted,
    find_holders,
    ranges,
    unique_boxes,
)
from windlass.planning.plan import ITEMSIZES
from windlass.planning.rows import RowTable, TensorNames, gather_rows, resolve_names
from windlass.wording import listed

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
"""Maximum number of ranks that an error names for each side of a difference."""

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
"""A box at one place of one rank, as rows of `row_nbytes` contiguous bytes; all places use the same `row_nbytes`.
`sizes`: number of rows per dim, slowest dim first. `offset`, `strides`: bytes. `first`: number of
the box's first block, counted over all boxes of the fleet. `run`: number of blocks in a run."""
DIGESTED = np.dtype([("row", "<i4"), ("kind", "u1"), ("a", "<u8"), ("b", "<u8")])
"""Digest (128 bits, as `a` and `b`) of the box in one row of the rank's `HELD`. Only digests of the same
`kind` (algorithm) can be compared."""


def decode_held(data: bytes, manifest: ShardManifest) -> StructuredArray:
    """Decode the (n,) `HELD` table of one rank, ascending by box, and check the table against `manifest`.

    Raises:
        ProtocolError: `data` is not a `HELD` table.
        PlanError: a box is not inside its parameter, or contains a byte of the parameter twice.
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
    """Return the number of pieces that form a block, for each box."""
    pieces: Int64Array = np.maximum(BLOCK_NBYTES // held["row_nbytes"], 1)
    return pieces


def _num_blocks(held: StructuredArray) -> Int64Array:
    """Return the number of blocks of each box."""
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
        (row of `held`, byte offset in the parameter, size in bytes) per piece, in the order in which ranks hash them.
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
    """All boxes that ranks hold several times in the same dtype.

    Attributes:
        parts: worker -> (n,) `HELD`, ascending by box, for workers that hold any box.
        parameters: worker -> the parameters that its part refers to.
        names: (n,) checkpoint tensor of each box.
        boxes: (n,) elements of each box.
        num_places: (n,) number of places that hold each box, in all ranks.
        nbytes: largest number of bytes of these boxes that one rank holds.
        num_runs: number of runs of blocks, over all boxes.
    """

    parts: Mapping[str, StructuredArray]
    parameters: Mapping[str, Sequence[ParameterSpec]]
    names: Sequence[str]
    boxes: Sequence[Box]
    num_places: Int64Array
    nbytes: int
    num_runs: int

    def period(self, sent_nbytes: int) -> int:
        """Return the period: the number of turns in which every block is compared once.

        With this period, a rank digests about `SAMPLE_SHARE` of `sent_nbytes` in a turn. `sent_nbytes` is the number of
        bytes that the busiest rank sends in an update.
        """
        wanted = int(self.nbytes // max(sent_nbytes * SAMPLE_SHARE, 1)) + 1
        # At most `num_runs`, so that no turn is empty.
        return max(min(wanted, self.num_runs), 1)

    def disagreement(self, found: Mapping[str, StructuredArray]) -> str:
        """Compare the digests of all ranks. Return an error text if a box has different bytes at two places; otherwise "".

        `found` has the (n,) `DIGESTED` table that each worker in `parts` reported. Return an error text also if a
        worker did not report a box that it holds, or reported an unknown box.
        """
        workers = sorted(found)
        table = np.concatenate([np.zeros(0, DIGESTED), *(found[w] for w in workers)])
        rank = np.repeat(np.arange(len(workers)), [len(found[w]) for w in workers])
        num_rows = np.array([len(self.parts[w]) for w in workers], np.int64)
        if (table["row"] < 0).any() or (table["row"] >= num_rows[rank]).any():
            return "ranks reported digests of boxes that are not replicated"
        boxes = np.concatenate(
            [np.zeros(0, np.int32), *(self.parts[w]["box"][found[w]["row"]] for w in workers)]
        )
        num_reports = np.bincount(boxes, minlength=len(self.boxes))
        if (odd := np.flatnonzero((num_reports > 0) & (num_reports != self.num_places))).size:
            box = int(odd[0])
            return (
                f"ranks must report {self.num_places[box]} digests of {self._describe(box)}, one for "
                f"each place that holds this box, got {num_reports[box]}"
            )
        order = np.lexsort((rank, table["b"], table["a"], table["kind"], boxes))
        table, rank, boxes = table[order], rank[order], boxes[order]
        alike = (boxes[1:] == boxes[:-1]) & (table["kind"][1:] == table["kind"][:-1])
        differ = alike & ((table["a"][1:] != table["a"][:-1]) | (table["b"][1:] != table["b"][:-1]))
        if not differ.any():
            return ""
        bad = np.unique(boxes[1:][differ])
        box = int(bad[0])
        of_box = boxes == box
        groups: dict[tuple[int, int, int], list[str]] = {}
        is_in_one_rank = len(np.unique(rank[of_box])) < int(of_box.sum())
        for digest, index in zip(table[of_box], rank[of_box], strict=True):
            key = int(digest["kind"]), int(digest["a"]), int(digest["b"])
            place = self._place(workers[int(index)], int(digest["row"]))
            groups.setdefault(key, []).append(place)
        sides = " versus ".join(listed(names, NAMED_RANKS) for names in sorted(groups.values()))
        names = {self.names[int(index)] for index in bad}
        more = f" (and {len(bad) - 1} more boxes, of {len(names)} tensors)" if len(bad) > 1 else ""
        if is_in_one_rank:
            return (
                "parameters of one rank that hold the same box must hold the same bytes, but "
                f"{self._describe(box)} differs: {sides}{more}; give each parameter its own checkpoint name, "
                "leave all but one of them out, or tie them"
            )
        return (
            f"ranks that hold the same box must hold the same bytes, but {self._describe(box)} differs: "
            f"{sides}{more}; usual causes are gradients that are not reduced over all ranks, updated parameters "
            "that are not gathered on all ranks, and different pieces that are described as replicas"
        )

    def _describe(self, box: int) -> str:
        return f"{self.names[box]!r} {self.boxes[box]}"

    def _place(self, worker: str, row: int) -> str:
        """Return the worker, and the parameter in brackets if the worker holds the box of `row` several times."""
        held = self.parts[worker]
        if (held["box"] == held["box"][row]).sum() == 1:
            return worker
        return f"{worker} ({self.parameters[worker][int(held['parameter'][row])].name!r})"


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
    """Return each box that several ranks hold, or that one rank holds at several places, in the same dtype.

    Leave out the tensors in `unread`. No engine reads these tensors, so their bytes may differ between ranks.

    Raises:
        ManifestError: manifests contradict each other; or one rank holds a box in two dtypes.
    """
    names = resolve_names(sources, (), unread)
    table = gather_rows(sources, names)
    if unread:
        is_read = np.array([name not in unread for name in names.names], np.bool_)
        table = table.select(np.flatnonzero(is_read[table.name]))
    boxes = unique_boxes(table, len(names.names))
    atoms = atoms_by_pattern(boxes)
    base, holders = find_holders(boxes, atoms, table, one_per_rank=False)
    offsets = np.zeros((int(base[-1]), MAX_DIMS), np.int64)
    sizes = np.ones_like(offsets)
    for of_pattern, classes in zip(atoms, classes_by_pattern(boxes), strict=True):
        for name in classes:
            at = slice(int(base[name]), int(base[name]) + len(of_pattern))
            offsets[at], sizes[at] = of_pattern.offsets, of_pattern.sizes
    atom = np.repeat(np.arange(len(offsets)), np.diff(holders.start))
    rows, atom = _distinct_places(table, holders.rows, atom, offsets, sizes)
    _refuse_two_dtypes(sources, names, table, rows, (offsets[atom], sizes[atom]))
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
    held["offset"] = _offset_bytes(table, rows, offsets[atom])
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
    named = [
        _named_box(names, tensor, offsets[a], sizes[a])
        for tensor, a in zip(table.tensor[rows[first]].tolist(), atom[first].tolist(), strict=True)
    ]
    return Replicated(
        parts={sources[i].worker: held[rank == i] for i in np.unique(rank).tolist()},
        parameters={sources[i].worker: sources[i].parameters for i in np.unique(rank).tolist()},
        names=[name for name, _ in named],
        boxes=[box for _, box in named],
        num_places=count[several],
        nbytes=int(per_rank.max(initial=0)),
        num_runs=-(-total // run),
    )


def _offset_bytes(table: RowTable, rows: Int64Array, offsets: Int64Array) -> Int64Array:
    """Return, for each row, the byte offset of one element in the row's parameter.

    `offsets`, (n, MAX_DIMS), has the index of this element in the row's tensor.
    """
    inside = (offsets - table.offsets[rows]) * table.strides_bytes[rows]
    found: Int64Array = table.offset_bytes[rows] + inside.sum(axis=1)
    return found


def _distinct_places(
    table: RowTable, rows: Int64Array, atom: Int64Array, offsets: Int64Array, sizes: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return `rows` and `atom` without duplicates. A duplicate describes the same bytes of a rank as an earlier row."""
    rank = table.rank[rows]
    again = (atom[1:] == atom[:-1]) & (rank[1:] == rank[:-1])
    at = np.flatnonzero(np.append(again, False) | np.append(False, again))
    if not len(at):
        return rows, atom
    strides = np.where(sizes[atom[at]] > 1, table.strides_bytes[rows[at]], 0)
    offset = _offset_bytes(table, rows[at], offsets[atom[at]])
    place = np.column_stack([atom[at], rank[at], table.parameter[rows[at]], offset, strides])
    _, first = np.unique(place, axis=0, return_index=True)
    keep = np.ones(len(rows), np.bool_)
    keep[at] = False
    keep[at[first]] = True
    return rows[keep], atom[keep]


def _refuse_two_dtypes(
    sources: Sequence[ShardManifest],
    names: TensorNames,
    table: RowTable,
    rows: Int64Array,
    boxes: tuple[Int64Array, Int64Array],
) -> None:
    """Raise ManifestError if one rank holds a box in two dtypes, because bytes of two dtypes cannot be compared.

    `boxes`: offsets and sizes of the box in each of `rows`, (n, MAX_DIMS). Rows of one box and rank are adjacent.
    """
    offsets, sizes = boxes
    again = (offsets[1:] == offsets[:-1]).all(axis=1) & (sizes[1:] == sizes[:-1]).all(axis=1)
    for column in (table.tensor, table.rank):
        again &= column[rows[1:]] == column[rows[:-1]]
    again &= table.dtype[rows[1:]] != table.dtype[rows[:-1]]
    if not again.any():
        return
    at = int(again.argmax())
    source = sources[int(table.rank[rows[at]])]
    first, second = (source.parameters[int(table.parameter[row])] for row in rows[at : at + 2])
    name, box = _named_box(names, int(table.tensor[rows[at]]), offsets[at], sizes[at])
    raise ManifestError(
        f"{source.worker}: {name!r} {box} must have one dtype, got {first.dtype} in parameter {first.name!r} and "
        f"{second.dtype} in parameter {second.name!r}; give each parameter its own checkpoint name, or leave one out"
    )


def _named_box(
    names: TensorNames, tensor: int, offsets: Int64Array, sizes: Int64Array
) -> tuple[str, Box]:
    """Return the name of a tensor class, and the box with these offsets and sizes. The box has no padding dims."""
    lead = MAX_DIMS - len(names.shapes[tensor])
    return names.names[tensor], Box(tuple(offsets[lead:].tolist()), tuple(sizes[lead:].tolist()))


def _slowest_first(sizes: Int64Array, strides: Int64Array) -> Int64Array:
    """Return an order of the dims for each box, (b, MAX_DIMS): first dims of size 1, then by descending stride.

    In this order of the dims, `_join_rows` finds the longest contiguous rows.
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
