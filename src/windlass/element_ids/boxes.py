"""Convert pairs (element of a checkpoint tensor, index into an engine tensor's memory) into strided boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.layout.box import Box

Int64Array = npt.NDArray[np.int64]


class TooManyBoxes(Exception):
    """Raised if the elements need more boxes than the limit."""


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box of a checkpoint tensor, and where its elements are in memory.

    Attributes:
        box: offsets and sizes in the checkpoint tensor.
        offset: index of the box's first element in the memory.
        strides: stride of each dim in the memory, in elements.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]

    def element(self, shape: tuple[int, ...], number: int) -> tuple[int, int]:
        """Return where one element of the box is: its index in the flat checkpoint tensor, and its index in memory.

        Args:
            shape: shape of the checkpoint tensor.
            number: index of the element in the box, in row-major order.
        """
        index, place, step = 0, self.offset, 1
        for begin, size, stride, length in reversed(
            [*zip(self.box.offsets, self.box.sizes, self.strides, shape, strict=True)]
        ):
            number, at = divmod(number, size)
            index += (begin + at) * step
            place += at * stride
            step *= length
        return index, place


@dataclass(frozen=True, slots=True)
class Line:
    """`length` elements: row-major indices in the tensor rise by `step`, and places in memory by `stride`."""

    length: int
    step: int
    stride: int = 1


ELEMENT = Line(1, 1)
"""Line of a single element."""


@dataclass(slots=True)
class _Items:
    """Boxes that `_grow` joins step by step.

    Starts, sizes and strides are (n, dims); places (indices into memory) are (n,).
    """

    start: Int64Array
    size: Int64Array
    stride: Int64Array
    place: Int64Array

    def __len__(self) -> int:
        return len(self.place)

    def take(self, index: Int64Array) -> _Items:
        """Return the boxes with these indices, in this order."""
        return _Items(self.start[index], self.size[index], self.stride[index], self.place[index])


def boxes_of(
    shape: tuple[int, ...],
    flat: Int64Array,
    place: Int64Array,
    *,
    limit: int,
    line: Line = ELEMENT,
) -> tuple[PlacedBox, ...]:
    """Join lines of elements into boxes, dim by dim beginning with the last dim, and return the boxes.

    Args:
        shape: shape of the checkpoint tensor.
        flat: index of the first element of each line in the flat checkpoint tensor, (n,). Two lines may have the same
            index, if the memory contains an element twice.
        place: index of the first element of each line in memory, (n,). No two lines have the same index.
        limit: maximum number of boxes.
        line: length and step of every line.

    Raises:
        TooManyBoxes: the elements need more than `limit` boxes, or a line continues past the end of a dim.
    """
    if (whole := _whole(shape, line, flat, place)) is not None:
        return (whole,)
    grown = [_dim_of(shape, line, flat)] if line.length > 1 else []
    found: list[PlacedBox] = []
    for copy_flat, copy_place in _copies(flat, place):
        found.extend(_boxes_of_one_copy(shape, copy_flat, copy_place, line, grown, limit))
        if len(found) > limit:
            raise TooManyBoxes
    return tuple(found)


def _whole(
    shape: tuple[int, ...], line: Line, flat: Int64Array, place: Int64Array
) -> PlacedBox | None:
    """Return one box if the elements are the whole tensor, contiguous and in row-major order; else None."""
    whole = line == ELEMENT and 0 < len(flat) == math.prod(shape)
    if not whole or any((steps[1:] - steps[:-1] != 1).any() for steps in (flat, place)):
        return None
    strides = (math.prod(shape[dim + 1 :]) if size > 1 else 0 for dim, size in enumerate(shape))
    return PlacedBox(Box.full(shape), int(place[0]), tuple(strides))


def _dim_of(shape: tuple[int, ...], line: Line, flat: Int64Array) -> int:
    """Return the dim along which the lines extend.

    Raises:
        TooManyBoxes: no dim has the lines' step, or a line continues past the end of the dim.
    """
    step = 1
    for dim in reversed(range(len(shape))):
        if step == line.step and shape[dim] > 1:
            if ((flat // step) % shape[dim] + line.length > shape[dim]).any():
                raise TooManyBoxes
            return dim
        step *= shape[dim]
    raise TooManyBoxes


def _copies(flat: Int64Array, place: Int64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Split lines into groups, so that an element occurs at most once in a group. Yield (elements, places) per group.

    The first group has the first place of every element. The second group has the second place of every element with
    two or more places, and so on.
    """
    order = np.lexsort((place, flat))
    flat, place = flat[order], place[order]
    first = np.concatenate([[True], flat[1:] != flat[:-1]])
    starts = np.flatnonzero(first)
    rank = np.arange(len(flat)) - np.repeat(starts, np.diff(np.append(starts, len(flat))))
    for copy in range(int(rank.max(initial=-1)) + 1):
        chosen = rank == copy
        yield flat[chosen], place[chosen]


def _boxes_of_one_copy(
    shape: tuple[int, ...],
    flat: Int64Array,
    place: Int64Array,
    line: Line,
    along: list[int],
    limit: int,
) -> Iterator[PlacedBox]:
    """Join lines of elements into boxes, and yield the boxes. No element may occur twice.

    `along` contains the dim along which the lines extend; it is empty if each line is one element. For the other arguments
    see `boxes_of`.

    Raises:
        TooManyBoxes: the lines need more than `limit` boxes.
    """
    if not shape:
        yield PlacedBox(Box((), ()), int(place[0]), ())
        return
    start = np.stack(np.unravel_index(flat, shape), axis=1).astype(np.int64)
    items = _Items(start, np.ones_like(start), np.zeros_like(start), place)
    for dim in along:
        items.size[:, dim], items.stride[:, dim] = line.length, line.stride
    grown = list(along)
    for dim in reversed(range(len(shape))):
        if dim not in grown:
            items = _grow(items, dim, grown, limit)
            grown.append(dim)
    if len(items) > limit:
        raise TooManyBoxes
    for row in range(len(items)):
        yield PlacedBox(
            Box(tuple(items.start[row].tolist()), tuple(items.size[row].tolist())),
            int(items.place[row]),
            tuple(items.stride[row].tolist()),
        )


def _grow(items: _Items, dim: int, grown: list[int], limit: int) -> _Items:
    """Join boxes that differ only in `dim`, are adjacent in `dim`, and are evenly spaced in memory.

    `grown` has the dims in which boxes have been joined before.
    """
    keys = [items.start[:, d] for d in range(items.start.shape[1]) if d != dim]
    keys += [items.size[:, d] for d in grown]
    keys += [items.stride[:, d] for d in grown]
    order = np.lexsort((items.start[:, dim], *keys))
    items = items.take(order)
    if len(items) < 2:
        return items
    same = np.ones(len(items) - 1, bool)
    for key in keys:
        ordered = key[order]
        same &= ordered[1:] == ordered[:-1]
    same &= np.diff(items.start[:, dim]) == 1
    step = np.where(same, np.diff(items.place), 0)
    # Plans have no negative strides, so do not join items whose place decreases.
    step[step < 0] = 0
    first, length, stride = _chains(step, limit)
    joined = items.take(first)
    joined.size[:, dim] = length
    joined.stride[:, dim] = stride
    return joined


def _chains(step: Int64Array, limit: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Split a sequence of items into chains. Within a chain, the step between successive items is constant and not 0.

    Args:
        step: (num_items - 1,) step from each item to the next; 0 if the two items cannot be joined.
        limit: maximum number of boxes.

    Returns:
        Index of the first item, length and step of every chain. A chain of one item has step 0.

    Raises:
        TooManyBoxes: the step changes so often that there are certainly more than `limit` boxes.
    """
    starts = np.concatenate([[0], np.flatnonzero(step[1:] != step[:-1]) + 1])
    ends = np.append(starts[1:], len(step))
    if len(starts) > 64 * limit + len(step) // 8:
        raise TooManyBoxes
    first: list[Int64Array] = []
    length: list[int] = []
    stride: list[int] = []
    # `at` is the first item that is not in a chain yet.
    at = 0
    for end, value in zip(ends.tolist(), step[starts].tolist(), strict=True):
        if at >= end:
            continue
        if value == 0:
            first.append(np.arange(at, end))
            length += [1] * (end - at)
            stride += [0] * (end - at)
            at = end
        else:
            first.append(np.array([at]))
            length.append(end - at + 1)
            stride.append(value)
            at = end + 1
    if at <= len(step):
        first.append(np.array([at]))
        length.append(1)
        stride.append(0)
    return np.concatenate(first), np.array(length, np.int64), np.array(stride, np.int64)
