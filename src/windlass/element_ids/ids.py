"""Find the checkpoint element at every place (index into the memory) of one of the engine's tensors.

Every checkpoint element has a number (see `Codes`). Capture loads the digits of these numbers into the engine instead
of weights, one digit per load, and reads the digits from the engine's tensors. It reads every place of a small tensor.

Of a large tensor, capture reads only the first element of every row, and up to three whole rows per group. A group is
one index of the outermost dim (for example an expert). The sampled rows show the row's pattern: the differences between
the numbers in a row and the first number. Capture assumes that all rows of a group have the same pattern. A load of
random values then checks this assumption at every place.
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

from windlass.element_ids.boxes import ELEMENT, Line, PlacedBox, TooManyBoxes, boxes_of
from windlass.element_ids.codes import CheckpointSpec, Codes, bits_of, chunk_on, hash_seed
from windlass.element_ids.kernels import NAMES, kernels_on
from windlass.element_ids.memory import memory_of, places_sum, reach_of

Int64Array = npt.NDArray[np.int64]
Parts = list[tuple[CheckpointSpec, tuple[PlacedBox, ...]]]
"""Checkpoint tensors, each with the boxes of its elements in one of the engine's tensors."""

_NOTHING = -(1 << 58)
"""Value that is added for a place without a digit. A sum with this value stays negative, and never wraps around."""


def scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `values * factor`, computed in the tensor's dtype as an engine's loader does.

    Return `values` itself if the factor is 1.
    """
    return values if factor == 1.0 else values * factor


def read_digit(values: torch.Tensor, bits: int, position: int, factor: float = 1.0) -> torch.Tensor:
    """Return the digits that the engine has loaded into a tensor.

    Args:
        values: memory of the tensor.
        bits: bits per digit.
        position: position of the loaded digit in the element numbers; 0 is the lowest.
        factor: factor by which the engine's loader multiplies values. The product is rounded to the tensor's dtype.
            Different digits still give different products: loaded digits are at most 128, and even bfloat16 has a
            significand of eight bits.

    Returns:
        For each place, the digit as a part of the element number (digit << bits * position); `_NOTHING` for a place
        without a digit.
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
    """Join lines of elements into boxes. Return the boxes of each checkpoint tensor.

    Args:
        codes: numbering of the checkpoint's elements.
        numbers: (n,) element number at which each line starts.
        places: (n,) place at which each line starts.
        limit: maximum number of boxes per tensor.
        line: length and step of all lines.

    Raises:
        TooManyBoxes: a tensor needs more than `limit` boxes.
    """
    return [
        (spec, boxes_of(spec.shape, flat, lies, limit=limit, line=line))
        for spec, flat, lies in _by_tensor(codes, numbers, places)
    ]


def _by_tensor(
    codes: Codes, numbers: Int64Array, places: Int64Array
) -> Iterator[tuple[CheckpointSpec, Int64Array, Int64Array]]:
    """Split element numbers by checkpoint tensor: yield (tensor, flat indices into that tensor, places).

    The tensors come in the order of the checkpoint.
    """
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
    """Return (groups, rows per group, places per row) of a tensor, with dims ordered by stride.

    Return None if the tensor has gaps or has fewer than two dims longer than 1.
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
    """Columns [begin, begin + length) of a row; their element numbers are evenly spaced.

    Attributes:
        first: difference between the element number in column `begin` and the row's first number.
        step: difference between successive element numbers.
    """

    begin: int
    length: int
    first: int
    step: int


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a comparison of a tensor with its expected values.

    Attributes:
        is_right: True if every place with a checkpoint element has the expected value.
        padding: fingerprint of the places without a checkpoint element; 0 if there are none.
        numel: number of places with a checkpoint element.
    """

    is_right: bool
    padding: int = 0
    numel: int = 0


@final
class ElementIds:
    """Numbers of the checkpoint elements in one tensor of the engine, gathered digit by digit.

    If `by_place` is True, or `_grid_of` returns None, every place is read, which takes 8 bytes of memory per place.
    Otherwise only the first place of each row and some whole rows are read; see the module docstring.
    """

    def __init__(self, tensor: torch.Tensor, *, by_place: bool) -> None:
        grid = None if by_place else _grid_of(tensor)
        self._shape = groups, rows, width = grid or (1, reach_of(tensor), 1)
        self._at = sorted({0, rows // 2, rows - 1})
        samples, device = (groups, len(self._at), width), tensor.device
        self._like: tuple[ElementIds, range, int] | None = None
        self._found: dict[int, Parts | None] = {}
        self._heads = torch.zeros((groups, rows), dtype=torch.int64, device=device)
        self._samples = torch.zeros(samples, dtype=torch.int64, device=device)

    @property
    def by_place(self) -> bool:
        """True if `observe` reads every place of the tensor; False if it reads only samples."""
        return self._shape[2] == 1

    def observe(
        self, tensor: torch.Tensor, codes: Codes, position: int, factor: float = 1.0
    ) -> None:
        """Read the digits that the engine has loaded into the tensor, and add them to the element numbers.

        Call this after the engine has loaded the digits at `position` (0 is the lowest).
        `factor` is the constant by which the engine's loader multiplies this tensor.
        """
        memory, bits = memory_of(tensor), codes.digit_bits
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
        """If `moved` returned this object, the object on which `moved` was called; otherwise this object."""
        return self if self._like is None else self._like[0]

    @property
    def highest(self) -> int:
        """Highest element number at the start of a row; negative if all rows start with padding."""
        return int(self._heads.max())

    def moved(self, codes: Codes, tensors: range, by: int) -> ElementIds:
        """Return the element numbers of a tensor of another layer.

        The other layer has the same structure as this tensor's layer, and the tensor has the same place in it.

        Args:
            codes: numbering of the checkpoint's elements.
            tensors: indices in `codes.specs` of the checkpoint tensors of this tensor's layer. Elements of all other
                checkpoint tensors keep their numbers.
            by: number to add to these indices to get the checkpoint tensors of the other layer. Corresponding tensors
                have the same size.
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
        """Return whether the sampled rows give the pattern of every group of rows.

        If a group contains checkpoint elements, a sampled row of the group must start with such an element.
        """
        filled = (self._heads >= 0).any(dim=1)
        sampled = (self._samples[:, :, 0] >= 0).any(dim=1)
        return self.by_place or bool((filled == sampled).all())

    def _patterns(self) -> torch.Tensor:
        """Return the pattern of each group of rows, (groups, width).

        A pattern has, for each place of a row, the element number minus the element number of the row's first place. It
        has `_NOTHING` for a place without an element.
        """
        if self.by_place:
            return torch.zeros_like(self._samples[:, 0])
        chosen = (self._samples[:, :, 0] >= 0).to(torch.int8).argmax(dim=1)
        rows = self._samples[torch.arange(len(chosen), device=chosen.device), chosen]
        return torch.where((rows >= 0) & (rows[:, :1] >= 0), rows - rows[:, :1], _NOTHING)

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first place, element numbers) for successive chunks of the tensor.

        The number of a padding place is negative.
        """
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

    def check(
        self, tensor: torch.Tensor, codes: Codes, seed: int | None, factor: float = 1.0
    ) -> Check:
        """Compare every place of a tensor with the value that the place should have after a load of `codes.random(seed)`.

        If `seed` is None, compare nothing (`is_right` is False). Return only the fingerprint of the padding and the
        number of checkpoint elements.
        """
        memory, end = memory_of(tensor), int(codes.starts[-1])
        if not self.is_consistent() or len(memory) != math.prod(self._shape):
            return Check(False)
        dtype, kernels = memory.dtype, kernels_on(memory.device)
        fits = codes.dtypes == (dtype,) and dtype in NAMES and len(memory) < 1 << 32
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
        """Return (element numbers, places) for all places that have an element. `by_place` must be True."""
        numbers = self._heads.view(-1).cpu().numpy()
        places = np.flatnonzero(numbers >= 0)
        return numbers[places], places

    def parts(self, codes: Codes, limit: int) -> Parts | None:
        """Return the boxes of all checkpoint tensors, or None if a checkpoint tensor has more than `limit` boxes.

        Call `check` first, because the boxes are only right if every place has the expected value.
        """
        if limit not in self._found:
            try:
                self._found[limit] = self._parts(codes, limit)
            except TooManyBoxes:
                self._found[limit] = None
        return self._found[limit]

    def _parts(self, codes: Codes, limit: int) -> Parts | None:
        """Compute the result of `parts`. If `moved` made this object, use the boxes of the original object."""
        if self._like is not None:
            like, tensors, by = self._like
            if (found := like.parts(codes, limit)) is None:
                return None
            indices = [codes.index[spec.name] for spec, _ in found]
            return [
                (codes.specs[index + by] if index in tensors else codes.specs[index], boxes)
                for index, (_, boxes) in zip(indices, found, strict=True)
            ]
        return [
            part
            for line, numbers, places in self._lines(limit)
            for part in parts_of(codes, numbers, places, limit, line)
        ]

    def sources(
        self, codes: Codes, shape: tuple[int, ...], chosen: range, limit: int
    ) -> Parts | None:
        """Return the boxes of this tensor that contain elements of the checkpoint tensors in `chosen`.

        Here each box is a part of this tensor, and its offset and strides are places in a checkpoint tensor. In `parts`
        it is the reverse. Call `check` first, as for `parts`.

        Args:
            codes: numbering of the checkpoint's elements.
            shape: shape of this tensor, which must be contiguous.
            chosen: indices in `codes.specs`.
            limit: maximum number of boxes per checkpoint tensor.

        Returns:
            The chosen tensors with elements in this tensor, each with its boxes; None if a tensor has more than
            `limit` boxes, or if a line of elements goes past the end of its checkpoint tensor.
        """
        parts: Parts = []
        try:
            for line, numbers, places in self._lines(limit):
                for spec, flat, lies in _by_tensor(codes, numbers, places):
                    if (flat + (line.length - 1) * line.step >= spec.numel).any():
                        return None
                    if codes.index[spec.name] in chosen:
                        turned = Line(line.length, 1, line.step)
                        parts.append((spec, boxes_of(shape, lies, flat, limit=limit, line=turned)))
        except TooManyBoxes:
            return None
        return parts

    def _lines(self, limit: int) -> Iterator[tuple[Line, Int64Array, Int64Array]]:
        """Yield all lines of elements. Lines with the same length and step are yielded together.

        Yields:
            (length and step, element number at which each line starts, place at which each line starts).

        Raises:
            TooManyBoxes: a row has more than `limit` pieces.
        """
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
        for (length, step), lines in by_kind.items():
            numbers = np.concatenate([line[0] for line in lines])
            places = np.concatenate([line[1] for line in lines])
            yield Line(length, step), numbers, places


def _pieces(pattern: Int64Array, limit: int) -> list[_Piece]:
    """Split a row's pattern into pieces of evenly spaced numbers. A piece of one place has step 0.

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
