"""Find the checkpoint element at every place of one of the engine's tensors.

Capture reads small tensors place by place. It reads a *grid* of large ones: the first element of every row,
and some whole rows of each group (the outermost dim, for example an expert) as a pattern. It assumes that each
row is its first element plus the pattern. The load of random values then checks this at every place.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from windlass.engines.capture.boxes import ELEMENT, Line, PlacedBox, TooManyBoxes, boxes_of
from windlass.engines.capture.codes import CheckpointSpec, Codes, bits_of, chunk_on, hash_seed
from windlass.engines.capture.kernels import NAMES, kernels_on
from windlass.engines.capture.memory import Holding, places_sum

Int64Array = npt.NDArray[np.int64]
Parts = list[tuple[CheckpointSpec, tuple[PlacedBox, ...]]]
"""Boxes of each checkpoint tensor in one of the engine's tensors."""

_NOTHING = -(1 << 58)
"""Value added for a place without a digit. The sum stays negative whatever digits are added, and never wraps around."""


def scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in the type of the tensor, as an engine does. Return the tensor itself if the factor is 1."""
    return values if factor == 1.0 else values * factor


def read_digit(values: torch.Tensor, bits: int, position: int, factor: float = 1.0) -> torch.Tensor:
    """Return the digits in a tensor of any shape, shifted to their position; `_NOTHING` for any other value.

    The engine rounds the product of a digit and `factor`, but no two digits give the same product: digits have
    at most eight bits, as many as the coarsest type that engines multiply.
    """
    base = 1 << bits
    exact = values.double() if values.element_size() > 4 or factor != 1.0 else values.float()
    digit = (exact if factor == 1.0 else exact / factor).round()
    spelt = digit == exact if factor == 1.0 else scaled(digit.to(values.dtype), factor) == values
    valid = spelt.logical_and_(digit >= 1).logical_and_(digit <= base)
    found = digit.where(valid, 0).to(torch.int64).sub_(1).bitwise_left_shift_(bits * position)
    return found.masked_fill_(valid.logical_not_(), _NOTHING)


def parts_of(
    codes: Codes, numbers: Int64Array, places: Int64Array, limit: int, line: Line = ELEMENT
) -> Parts:
    """Return the boxes of each checkpoint tensor. Line i starts with the element `numbers[i]` at `places[i]` in memory."""
    return [
        (spec, boxes_of(spec.shape, flat, lies, limit=limit, line=line))
        for spec, flat, lies in _by_tensor(codes, numbers, places)
    ]


def _by_tensor(
    codes: Codes, numbers: Int64Array, places: Int64Array
) -> Iterator[tuple[CheckpointSpec, Int64Array, Int64Array]]:
    """Yield (tensor, indices in it, places) for every tensor in `numbers`, in the order of the checkpoint."""
    tensors = codes.tensor_of(numbers)
    if (tensors[1:] < tensors[:-1]).any():
        order = np.argsort(tensors, kind="stable")
        tensors, numbers, places = tensors[order], numbers[order], places[order]
    bounds = [0, *(np.flatnonzero(np.diff(tensors)) + 1).tolist(), len(tensors)]
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            index = int(tensors[begin])
            flat = numbers[begin:end] - codes.starts[index]
            yield codes.specs[index], flat, places[begin:end]


def _grid_of(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Return groups, rows and width of a tensor, with dims ordered by stride.

    Return None if the tensor has gaps or fewer than two dims longer than 1.
    """
    dims = sorted(
        ((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
         if size > 1), reverse=True
    )  # fmt: skip
    expected = 1
    for step, size in reversed(dims):
        if step != expected:
            return None
        expected *= size
    if len(dims) < 2:
        return None
    groups, width = dims[0][1] if len(dims) > 2 else 1, dims[-1][1]
    return groups, expected // groups // width, width


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a row with evenly spaced element numbers: columns [begin, begin + length)."""

    begin: int
    length: int
    first: int
    step: int


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a comparison of a tensor with its expected values.

    Attributes:
        is_right: True if every place of an element has the expected value.
        padding: fingerprint of the places without an element; 0 without such places.
        numel: number of places with an element.
    """

    is_right: bool
    padding: int = 0
    numel: int = 0


@final
class ElementIds:
    """Element numbers of one tensor, gathered digit by digit.

    The grid has groups, rows, and places in a row. `ElementIds` reads the first elements of all rows, and up to
    three whole rows per group. With `by_place`, and for tensors with gaps, a row has one place: every place is
    read and takes 8 bytes.
    """

    def __init__(self, holding: Holding, *, by_place: bool) -> None:
        grid = None if by_place else _grid_of(holding.tensor)
        self._shape = groups, rows, width = grid or (1, holding.reach, 1)
        self._at = sorted({0, rows // 2, rows - 1})
        samples, device = (groups, len(self._at), width), holding.tensor.device
        self._like: tuple[ElementIds, range, int] | None = None
        self._found: dict[int, Parts | None] = {}
        self._heads = torch.zeros((groups, rows), dtype=torch.int64, device=device)
        self._samples = torch.zeros(samples, dtype=torch.int64, device=device)

    @property
    def by_place(self) -> bool:
        """True if every place was read and no pattern is assumed."""
        return self._shape[2] == 1

    def observe(self, holding: Holding, codes: Codes, position: int, factor: float = 1.0) -> None:
        """Read the digit at `position` from the tensor and add it. `factor` is the loader's factor of the tensor."""
        memory, bits = holding.memory(), codes.digit_bits
        heads, firsts = self._heads.view(-1), memory[:: self._shape[2]]
        step = chunk_on(heads.device)
        for begin in range(0, len(heads), step):
            found = read_digit(firsts[begin : begin + step], bits, position, factor)
            heads[begin : begin + step] += found
        if not self.by_place:
            rows = memory.view(self._shape)[:, self._at]
            self._samples += read_digit(rows, bits, position, factor)

    @property
    def origin(self) -> ElementIds:
        """Object whose numbers were read from a tensor: the source of a copy that `moved` made, else this object."""
        return self if self._like is None else self._like[0]

    @property
    def highest(self) -> int:
        """Highest element number at the start of a row; below 0 if all rows start with padding."""
        return int(self._heads.max())

    def moved(self, codes: Codes, tensors: range, by: int) -> ElementIds:
        """Return a copy for an identical layer.

        It replaces elements of `tensors` (indices in the checkpoint) by elements of the checkpoint tensors `by`
        positions further on. Both ranges have tensors of equal size.
        """
        first, last = int(codes.starts[tensors.start]), int(codes.starts[tensors.stop])
        step = int(codes.starts[tensors.start + by]) - first

        def moved(numbers: torch.Tensor) -> torch.Tensor:
            return torch.where((numbers >= first) & (numbers < last), numbers + step, numbers)

        found = copy.copy(self)
        found._found = {}
        found._heads, found._samples = moved(self._heads), moved(self._samples)
        found._like = self, tensors, by
        return found

    def is_consistent(self) -> bool:
        """Return whether each group with an element also has an element at the start of a sampled row."""
        filled = (self._heads >= 0).any(dim=1)
        sampled = (self._samples[:, :, 0] >= 0).any(dim=1)
        return self.by_place or bool((filled == sampled).all())

    def _patterns(self) -> torch.Tensor:
        """Return offsets from the first element of a row, (groups, width); `_NOTHING` for padding."""
        if self.by_place:
            return torch.zeros_like(self._samples[:, 0])
        chosen = (self._samples[:, :, 0] >= 0).to(torch.int8).argmax(dim=1)
        rows = self._samples[torch.arange(len(chosen), device=chosen.device), chosen]
        return torch.where((rows >= 0) & (rows[:, :1] >= 0), rows - rows[:, :1], _NOTHING)

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first place, element numbers) in order until every place is covered; padding is below 0."""
        groups, rows, width = self._shape
        patterns = self._patterns()
        size = chunk_on(self._heads.device)
        num_groups, num_rows = max(1, size // (rows * width)), max(1, size // width)
        for group in range(0, groups, num_groups):
            pattern = patterns[group : group + num_groups, None]
            for row in range(0, rows, num_rows):
                heads = self._heads[group : group + num_groups, row : row + num_rows, None]
                numbers = torch.where(heads >= 0, heads + pattern, _NOTHING)
                yield (group * rows + row) * width, numbers.reshape(-1)

    def check(self, holding: Holding, codes: Codes, seed: int | None, factor: float = 1.0) -> Check:
        """Compare every place of a tensor with its value after a load of `random(seed)`.

        Without a seed, only fingerprint the padding and count elements; `is_right` is then False.
        """
        memory, end = holding.memory(), int(codes.starts[-1])
        if not self.is_consistent() or holding.reach != math.prod(self._shape):
            return Check(False)
        dtype, kernels = memory.dtype, kernels_on(memory.device)
        fits = codes.dtypes == (dtype,) and dtype in NAMES and holding.reach < 1 << 32
        if kernels is not None and fits and factor == 1.0:
            patterns = self._patterns().contiguous()
            wrong, padding, numel = kernels.check(
                memory, self._heads.contiguous(), patterns, end, hash_seed(seed or 0)
            )
            return Check(seed is not None and not wrong, padding, numel)
        bits, is_right, padding, numel = bits_of(memory), seed is not None, 0, 0
        for begin, chunk in self.chunks():
            found, numbers = bits[begin : begin + len(chunk)], chunk
            least, most = (int(bound) for bound in torch.stack(chunk.aminmax()).tolist())
            if least < 0:
                filled = chunk >= 0
                places = torch.arange(begin, begin + len(chunk), device=memory.device)
                padding += places_sum(found[~filled], places[~filled])
                found, numbers = found[filled], chunk[filled]
            numel += len(numbers)
            if is_right and seed is not None:
                expected = bits_of(scaled(codes.expected(numbers, seed, dtype), factor))
                is_right = most < end and torch.equal(expected, found)
        return Check(is_right, padding % (1 << 64), numel)

    def placed(self) -> tuple[Int64Array, Int64Array]:
        """Return (numbers, places) of all places with an element, for a tensor that was read `by_place`."""
        numbers = self._heads.view(-1).cpu().numpy()
        places = np.flatnonzero(numbers >= 0)
        return numbers[places], places

    def parts(self, codes: Codes, limit: int) -> Parts | None:
        """Return the boxes, or None if a checkpoint tensor has more than `limit`. The numbers must be proven first."""
        if limit not in self._found:
            try:
                self._found[limit] = self._parts(codes, limit)
            except TooManyBoxes:
                self._found[limit] = None
        return self._found[limit]

    def _parts(self, codes: Codes, limit: int) -> Parts | None:
        if self._like is not None:
            like, tensors, by = self._like
            if (found := like.parts(codes, limit)) is None:
                return None
            indices = [codes.index[spec.name] for spec, _ in found]
            return [
                (codes.specs[index + by] if index in tensors else codes.specs[index], boxes)
                for index, (_, boxes) in zip(indices, found, strict=True)
            ]
        groups, rows, width = self._shape
        patterns, which = np.unique(self._patterns().cpu().numpy(), axis=0, return_inverse=True)
        which = which.reshape(-1)
        heads = self._heads.cpu().numpy()
        pieces = [_pieces(pattern, limit) for pattern in patterns]
        by_kind: dict[tuple[int, int], list[tuple[Int64Array, Int64Array]]] = {}
        for group in range(groups):
            filled = np.flatnonzero(heads[group] >= 0)
            if not len(filled):
                continue
            base = (group * rows + filled) * width
            for piece in pieces[which[group]]:
                lines = by_kind.setdefault((piece.length, piece.step), [])
                lines.append((heads[group][filled] + piece.first, base + piece.begin))
        parts: Parts = []
        for (length, step), lines in by_kind.items():
            numbers = np.concatenate([line[0] for line in lines])
            places = np.concatenate([line[1] for line in lines])
            parts.extend(parts_of(codes, numbers, places, limit, Line(length, step)))
        return parts


def _pieces(pattern: Int64Array, limit: int) -> list[_Piece]:
    """Cut a row into evenly spaced pieces; a piece of one element has step 0.

    Raises:
        TooManyBoxes: there are more than `limit` pieces.
    """
    width = len(pattern)
    filled = np.append(np.flatnonzero(pattern > _NOTHING // 2), width)
    steps = np.diff(pattern)
    changes = np.append(np.flatnonzero(np.diff(steps)) + 1, width - 1)
    pieces: list[_Piece] = []
    begin = int(filled[0])
    while begin < width:
        end, step = begin, 0
        if begin < width - 1 and steps[begin] > 0:
            end = int(changes[np.searchsorted(changes, begin, side="right")])
            step = int(steps[begin])
        pieces.append(_Piece(begin, end - begin + 1, int(pattern[begin]), step))
        if len(pieces) > limit:
            raise TooManyBoxes
        begin = int(filled[np.searchsorted(filled, end + 1)])
    return pieces
