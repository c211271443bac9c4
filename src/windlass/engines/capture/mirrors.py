"""Mirrors: copies of weights that the engine makes once (at its start or in its first forward pass).

The engine's loader does not write a mirror, so this module finds the copied weight by its values. If every row of a
tensor equals a row of a weight (cast to the tensor's dtype), the tensor is a mirror, and every update copies the
weight's rows into the tensor again. A mirror may be a cast, slice, transposition or concatenation of weights.

If a tensor is not a mirror but correlates with a weight of the same shape, the engine has computed the tensor from the
weight in a way that is unknown here (a product, a quantised copy). Capture then raises UnsupportedLayout.

The search runs on the weights' device. A tensor on another device is copied there for the search. The search first
compares a few elements of a row, and compares the whole row only if these elements are equal.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import final

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from windlass.engines.capture.memory import Holding, Kind, Watched, bytes_in, refuse
from windlass.engines.capture.reach import BUFFERS, Number, Signature

FEW = 4
"""Minimum length of a row or piece that the search looks for. A shorter row might equal a weight's row by chance."""
NUM_KEYS = 4
"""Number of elements of a row that the search compares first."""
NUM_SAMPLES = 4096
"""Maximum number of elements of a tensor that are used for a correlation."""
LEAST_CORRELATED = 16
"""Minimum number of elements of a tensor for a correlation. A smaller tensor might correlate by chance."""
CORRELATION = 0.99
"""Correlation with a weight above which a tensor counts as computed from this weight."""
MAX_PIECES = 64
"""Maximum number of pieces of weights in a vector that is a concatenation of them."""
NUM_NEAR, NEAR_NUMEL = 16, 1 << 22
"""Maximum number of weights that `_from_block` searches, and the maximum number of elements of such a weight."""
_WIDE = (torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a mirror that are copies of rows of one weight.

    Attributes:
        target: view of the mirror's memory as a matrix.
        source: view of the weight's memory as a matrix.
        places: row indices in `target`; None for all rows.
        rows: row indices in `source`, one per entry of `places`; None for all rows.
    """

    target: torch.Tensor
    source: torch.Tensor
    places: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def refill(self) -> None:
        """Copy the weight's rows into the mirror."""
        if self.places is None or self.rows is None:
            self.target.copy_(self.source)
        else:
            rows = self.source[self.rows].to(self.target)
            self.target[self.places.to(rows.device)] = rows


@final
@dataclass(frozen=True, slots=True)
class Mirror:
    """A tensor with rows that are copies of rows of the weights named in `sources`.

    Attributes:
        holder: Python object (such as a bytearray); the tensor is a separate copy of its bytes. `refill` also writes
            these bytes. None if the tensor itself shares the engine's memory.
    """

    name: str
    sources: tuple[str, ...]
    parts: tuple[Part, ...]
    holder: object | None = None

    def refill(self) -> None:
        """Copy the weights' rows into the mirror, and then into the bytes-like object `holder`, if any."""
        for part in self.parts:
            part.refill()
        if self.holder is not None:
            data = bytes(self.parts[0].target.untyped_storage())
            if (held := bytes_in(self.holder)) is not None:
                held[:] = np.frombuffer(data, np.uint8)


@final
@dataclass(frozen=True, slots=True)
class Found:
    """Values of an engine that were computed from weights.

    Attributes:
        mirrors: mirrors by name, which an update can refill.
        derived: name of a value that an update cannot refill -> how the value depends on a weight.
    """

    mirrors: Mapping[str, Mirror]
    derived: Mapping[str, str]

    def require_refilled(self) -> None:
        """Raise UnsupportedLayout if `derived` is not empty; the message names the values in `derived`."""
        if self.derived:
            name, how = next(iter(self.derived.items()))
            refuse(
                self.derived,
                f"these values depend on weights ({name} {how}), but neither a load nor an update changes them; change "
                "the engine's code to compute them in its loader or at every step, or to delete them when weights "
                "change",
            )


def find_mirrors(
    targets: Iterable[Holding],
    weights: Iterable[Holding],
    numbers: Mapping[str, Number] | None = None,
) -> Found:
    """Find values of an engine that were computed from its weights.

    Args:
        targets: tensors that the engine's loader does not write.
        weights: tensors that the engine's loader writes.
        numbers: Python numbers of the engine, by path.

    Returns:
        `mirrors` has the tensors that copy elements of weights. `derived` has four kinds of values: tensors that correlate
        with a weight, mirrors in read-only memory, mirrors that may copy either of two weights, and numbers that equal
        the smallest or largest element of a weight.
    """
    sources = [h for h in weights if h.tensor.is_floating_point() and h.tensor.numel() >= FEW]
    mirrors: dict[str, Mirror] = {}
    derived: dict[str, str] = {}
    for holding in chain.from_iterable(_readings(target, sources) for target in targets):
        tensor = holding.tensor
        if (
            holding.name in mirrors
            or tensor.numel() < FEW
            or tensor.dtype is torch.bool
            or not _varies(tensor)
        ):
            continue
        mirror, source = _origin(holding, sources)
        if mirror is not None:
            mirrors[holding.name] = mirror = replace(mirror, holder=_holder(holding))
            derived.pop(holding.name, None)
            if holding.is_copy and mirror.holder is None:
                derived[holding.name] = f"is a copy of {mirror.sources[0]} in read-only memory"
            elif rival := _rival(holding, mirror, sources):
                derived[holding.name] = f"may be a copy of {mirror.sources[0]} or of {rival}"
        elif source is not None:
            derived[holding.name] = f"follows from {source}"
    return Found(mirrors, derived | _extremes(numbers or {}, sources))


def _origin(holding: Holding, sources: Sequence[Holding]) -> tuple[Mirror | None, str | None]:
    """Return (mirror, None) if a tensor is a mirror, and (None, name of a weight) if it only correlates with a weight.

    Otherwise return (None, None).
    """
    correlated: str | None = None
    for found, on in _on_devices(holding, sources):
        mirror = _mirror(found, on) if found.tensor.is_floating_point() else None
        if mirror is not None:
            parts = (_in_memory_of(part, found.tensor, holding.tensor) for part in mirror.parts)
            return replace(mirror, parts=tuple(parts)), None
        correlated = correlated or _correlated(found, on)
    return None, correlated


def _on_devices(
    holding: Holding, sources: Sequence[Holding]
) -> Iterator[tuple[Holding, list[Holding]]]:
    """For each device with weights, yield the tensor and the weights on this device. The tensor's own device is first.

    On another device, yield a copy of the tensor with the same strides. Skip a GPU if its free memory is too small for two
    copies.
    """
    tensor = holding.tensor.detach()
    by_device: dict[torch.device, list[Holding]] = {tensor.device: []}
    for source in sources:
        by_device.setdefault(source.tensor.device, []).append(source)
    for device, on in by_device.items():
        if device == tensor.device:
            yield holding, on
            continue
        if device.type == "cuda" and 2 * tensor.nbytes > torch.cuda.mem_get_info(device)[0]:
            continue
        copy = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )
        yield replace(holding, tensor=copy.copy_(tensor)), on


def _in_memory_of(part: Part, copy: torch.Tensor, tensor: torch.Tensor) -> Part:
    """Return a part that fills `tensor` in the same way as `part` fills `copy`.

    `copy` is a copy of `tensor` on another device, with the same shape and strides, or `tensor` itself.
    """
    if copy is tensor:
        return part
    at = part.target.storage_offset() - copy.storage_offset() + tensor.storage_offset()
    view = tensor.detach().as_strided(part.target.shape, part.target.stride(), at)
    return replace(part, target=view)


def _readings(target: Holding, sources: Sequence[Holding]) -> Iterator[Holding]:
    """Yield `target`. If it is an integer tensor, also yield its memory as floats: engines may store floats as bytes.

    View the memory as float32, and as each dtype of the sources. For each dtype, yield a vector, and a view in the shape
    of each source with the same number of elements.
    """
    tensor = _without_expanded_dims(target.tensor)
    yield target if tensor is target.tensor else replace(target, tensor=tensor)
    if tensor.dtype not in _INTEGERS or not tensor.is_contiguous():
        return
    shapes = {source.tensor.shape: source.tensor.numel() for source in sources}
    for dtype in dict.fromkeys([*(source.tensor.dtype for source in sources), torch.float32]):
        if (
            tensor.nbytes % dtype.itemsize
            or tensor.storage_offset() * tensor.element_size() % dtype.itemsize
        ):
            continue
        flat = tensor.detach().view(-1).view(torch.uint8).view(dtype)
        for shape in [
            *(shape for shape, numel in shapes.items() if numel == len(flat)),
            flat.shape,
        ]:
            yield replace(target, tensor=flat.view(shape))


def _without_expanded_dims(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor in which every expanded dim has size 1, so that no two elements share memory.

    torch refuses to write to an expanded tensor.
    """
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None) if step else slice(1) for step in tensor.stride())]


def _holder(holding: Holding) -> object | None:
    """Return the writable Python object (such as a bytearray) that contains the tensor's bytes, or None."""
    item = holding.node.item if holding.node is not None else None
    return item if isinstance(item, BUFFERS) else None


def _rival(holding: Holding, mirror: Mirror, sources: Sequence[Holding]) -> str | None:
    """Return the name of another weight that may be the mirror's source, or None.

    A rival has the same values as the source. Its path shares at least as many leading names with the mirror's path.
    """
    if len(mirror.sources) > 1:
        return None
    (name,) = mirror.sources
    of = next(source for source in sources if source.name == name)
    return next(
        (
            rival.name
            for rival in sources
            if rival.name != name
            and rival.tensor.shape == of.tensor.shape
            and rival.tensor.dtype is of.tensor.dtype
            and rival.tensor.device == of.tensor.device
            and _num_common_names(holding.name, rival.name) >= _num_common_names(holding.name, name)
            and torch.equal(rival.tensor, of.tensor)
        ),
        None,
    )


def _num_common_names(one: str, other: str) -> int:
    """Return the number of leading names (between dots) that two paths share.

    If two weights are equal, the search prefers the weight that shares more names with the mirror.
    """
    parts = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], parts))


def _nearest(holding: Holding, sources: Iterable[Holding]) -> list[Holding]:
    """Return the weights, sorted by similarity of their names to the tensor's name; see `_num_common_names`."""
    return sorted(sources, key=lambda source: -_num_common_names(holding.name, source.name))


def _varies(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has two different values. Read at most 65,536 elements of its first 64 rows."""
    some = tensor.detach()
    some = _comparable(some.reshape(1, 1) if not some.dim() else some[:64].reshape(-1)[: 1 << 16])
    return bool((some != some.reshape(-1)[0]).any())


def _comparable(values: torch.Tensor) -> torch.Tensor:
    """Return values that torch can compare: float8 as float32, and the real parts of complex values."""
    is_float8 = values.is_floating_point() and values.element_size() == 1
    if values.is_complex():
        return values.real
    return values.float() if is_float8 else values


def _equal(held: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Compare a tensor with a weight, element by element; return a bool tensor.

    Two elements are equal if they are equal in the tensor's dtype. If the tensor is float32 or float64, two elements
    are also equal if they are equal in the weight's dtype.
    """
    equal = _comparable(source.to(held.dtype)) == _comparable(held)
    if held.dtype in _WIDE and source.dtype is not held.dtype:
        equal |= _comparable(held.to(source.dtype)) == _comparable(source)
    return equal


def _forms(tensor: torch.Tensor, width: int | None = None) -> Iterator[torch.Tensor]:
    """Yield a tensor and its transposition, each as a matrix that shares memory with the tensor.

    If `width` is given, skip a matrix that does not have `width` columns.
    """
    if tensor.dim() == 0 or (width is not None and width not in tensor.shape[-2:]):
        return
    tensor = tensor.detach()
    if tensor.dim() == 1:
        yield tensor[None]
        return
    for matrix in (tensor, tensor.transpose(-1, -2)):
        if width is not None and matrix.shape[-1] != width:
            continue
        if matrix.dim() == 2:
            yield matrix
            continue
        try:
            yield matrix.view(-1, matrix.shape[-1])
        # The strides between the matrix's rows differ.
        except RuntimeError:
            continue


def _mirror(holding: Holding, sources: list[Holding]) -> Mirror | None:
    """Return the mirror that fills a tensor from weights, or None if the tensor is not a mirror.

    First compare whole rows with the rows of all weights. If this finds no mirror, use only the weights whose names are
    most similar to the tensor's name: compare a vector with pieces of these weights, and a matrix with their submatrices.
    """
    for rows in _forms(holding.tensor):
        if rows.shape[1] >= FEW and (found := _from_rows(holding, rows, sources)):
            return found
    near = _nearest(holding, sources)
    if holding.tensor.dim() == 1:
        return _from_pieces(holding, near)
    near = [source for source in near[:NUM_NEAR] if source.tensor.numel() <= NEAR_NUMEL]
    return next(filter(None, (_from_block(holding, source) for source in near)), None)


def _keys(row: torch.Tensor) -> torch.Tensor:
    """Return the column indices of at most `NUM_KEYS` nonzero elements of a row."""
    filled = (_comparable(row) != 0).nonzero().reshape(-1)
    return filled[_spread(len(filled), NUM_KEYS, row)] if len(filled) else filled


def _spread(size: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """Return `count` evenly spaced indices below `size`, on the device of `like`."""
    return torch.linspace(0, size - 1, count, device=like.device, dtype=torch.float64).long()


def _from_rows(holding: Holding, rows: torch.Tensor, sources: list[Holding]) -> Mirror | None:
    """Return a mirror if every nonzero row equals a row of a weight, and `_is_slice` accepts the rows; else None.

    Compare a few elements of three rows first, because most tensors are not mirrors.
    """
    width = rows.shape[1]
    alike = [(source, matrix) for source in sources for matrix in _forms(source.tensor, width)]
    samples = [rows[at] for at in sorted({0, len(rows) // 2, len(rows) - 1})]
    keyed = [(row[keys], keys) for row in samples if len(keys := _keys(row))] if alike else []
    if not keyed:
        return None
    hits = torch.stack(
        [
            torch.stack([_equal(held, matrix[:, keys]).all(1).any() for _, matrix in alike])
            for held, keys in keyed
        ]
    )
    if not bool(hits.any(1).all()):
        return None
    alike.sort(key=lambda pair: -_num_common_names(holding.name, pair[0].name))
    return _from_all_rows(holding.name, rows, alike)


def _from_all_rows(
    name: str, rows: torch.Tensor, alike: list[tuple[Holding, torch.Tensor]]
) -> Mirror | None:
    """Search matrices for every nonzero row of `rows`, and return the mirror.

    Each item of `alike` is a weight and a matrix view of this weight with the width of `rows`. Return None if a row is
    missing from all matrices, or if `_is_slice` refuses the rows found in one matrix.
    """
    missing = (_comparable(rows) != 0).any(1)
    parts: list[Part] = []
    names: dict[str, None] = {}
    for source, matrix in alike:
        places = missing.nonzero().reshape(-1)
        if not len(places):
            break
        found = _rows_in(rows, places, matrix)
        kept = found >= 0
        if not bool(kept.any()):
            continue
        places, found = places[kept], found[kept]
        if not _is_slice(places, found):
            return None
        parts.append(_part(rows, places, matrix, found))
        names[source.name] = None
        missing[places] = False
    return None if bool(missing.any()) else Mirror(name, tuple(names), tuple(parts))


def _is_slice(places: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether a copy of a weight's rows looks like a slice or a permutation.

    `found` has the row indices in the weight, and `places` the row indices in the copy. In a slice, the step between
    successive row indices rarely changes. A permutation contains every row of a contiguous range once. Rows that a
    forward pass has gathered from an embedding by token ids look like neither.
    """
    steps = torch.stack([places.diff(), found.diff()])
    changes = int((steps[:, 1:] != steps[:, :-1]).any(0).sum()) if len(found) > 2 else 0
    if changes <= max(4, len(found) // 4):
        return True
    numbers = found.unique()  # type: ignore[no-untyped-call]
    return len(numbers) == len(found) == int(numbers[-1] - numbers[0]) + 1


def _part(
    rows: torch.Tensor, places: torch.Tensor, matrix: torch.Tensor, found: torch.Tensor
) -> Part:
    """Return a `Part` that copies `matrix[found]` to `rows[places]`.

    If both ranges of rows are contiguous, return a part of two slices without row indices, because it copies faster.
    """
    first, start, size = int(places[0]), int(found[0]), len(places)
    if int(places[-1]) - first == int(found[-1]) - start == size - 1 and bool(
        (found.diff() == 1).all()
    ):
        return Part(rows[first : first + size], matrix[start : start + size])
    return Part(rows, matrix, places, found)


def _rows_in(rows: torch.Tensor, places: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Search `matrix` for each row of `rows[places]`. Return the row's index in `matrix`, or -1.

    Compare each row only with the first row of `matrix` that has the same hash of 8 columns. So the result may be -1
    although a later row of `matrix` is equal.
    """
    width = rows.shape[1]
    columns = _spread(width, min(width, 8), rows)
    kind = rows.dtype if rows.dtype not in _WIDE else matrix.dtype
    have = _hashes(rows[places][:, columns].to(kind))
    there, order = _hashes(matrix[:, columns].to(kind)).sort(stable=True)
    found = order[torch.searchsorted(there, have).clamp_(max=len(there) - 1)]
    step = max(1, (1 << 24) // width)
    for begin in range(0, len(places), step):
        part = slice(begin, begin + step)
        right = _equal(rows[places[part]], matrix[found[part]]).all(1)
        found[part] = found[part].where(right, -1)
    return found


def _hashes(values: torch.Tensor) -> torch.Tensor:
    """Return an int64 hash of each row's bytes, as a vector."""
    bits = values.contiguous().view(torch.uint8).view(len(values), -1).to(torch.int64)
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    return (bits * (places * 0x9E3779B97F4A7C1 + 0x5851F42D)).sum(1)


def _from_pieces(holding: Holding, near: list[Holding]) -> Mirror | None:
    """Return a mirror if a vector is a concatenation of pieces of weights, else None.

    If a weight has several rows, a piece of it must begin at the start of a row.
    """
    vector = holding.tensor.detach()
    at, parts = 0, list[Part]()
    names: dict[str, None] = {}
    matrices = [
        (source.name, matrix)
        for source in near[: NUM_NEAR * 4]
        for matrix in _forms(source.tensor)
        if matrix.shape[1] >= FEW
    ]
    while at < len(vector):
        rest = vector[at:]
        if not matrices or len(rest) < FEW or len(parts) == MAX_PIECES:
            return None
        piece, of = _longest(rest, matrices)
        if len(piece) < FEW:
            return None
        parts.append(Part(rest[: len(piece)], piece))
        names[of] = None
        at += len(piece)
    return Mirror(holding.name, tuple(names), tuple(parts))


def _longest(
    rest: torch.Tensor, matrices: list[tuple[str, torch.Tensor]]
) -> tuple[torch.Tensor, str]:
    """Return the longest piece of a weight that equals the beginning of `rest`, and the weight's name.

    `matrices` has pairs of a weight's name and a matrix view. The piece is empty if no weight has such a piece.
    """
    hits = [_starts(rest, matrix) for _, matrix in matrices]
    there = torch.stack([hit.any() for hit in hits]).tolist()
    piece, of = rest[:0], ""
    for (name, matrix), hit, is_there in zip(matrices, hits, there, strict=True):
        for start in hit.nonzero().reshape(-1)[:NUM_KEYS].tolist() if is_there else ():
            if len(matrix) == 1:
                flat = matrix[0, start:]
            elif matrix.is_contiguous():
                flat = matrix.view(-1)[start * matrix.shape[1] :]
            else:
                flat = matrix[start]
            size = min(len(flat), len(rest))
            wrong = (~_equal(rest[:size], flat[:size])).nonzero()
            equal = int(wrong[0]) if len(wrong) else size
            if equal > len(piece):
                piece, of = flat[:equal], name
    return piece, of


def _starts(rest: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return, for each position of a weight, whether the next `FEW` elements equal the first `FEW` elements of `rest`.

    In a weight with one row, every column is a position. In any other weight, only the starts of rows are positions.
    """
    windows = matrix[0].unfold(0, FEW, 1) if len(matrix) == 1 else matrix[:, :FEW]
    return _equal(rest[:FEW], windows).all(1)


def _from_block(holding: Holding, source: Holding) -> Mirror | None:
    """Return a mirror if a matrix equals a contiguous submatrix of a weight, else None."""
    held = holding.tensor.detach()
    if held.dim() != 2 or held.shape[1] < FEW:
        return None
    rows, columns = held.shape
    for matrix in _forms(source.tensor):
        if matrix.shape[0] < rows or matrix.shape[1] < columns:
            continue
        hits = _equal(held[0, :FEW], matrix.unfold(1, FEW, 1)).all(2).nonzero()
        for row, column in hits[:NUM_KEYS].tolist():
            block = matrix[row : row + rows, column : column + columns]
            if block.shape == held.shape and bool(_equal(held, block).all()):
                return Mirror(holding.name, (source.name,), (Part(held, block),))
    return None


def _correlated(holding: Holding, sources: list[Holding]) -> str | None:
    """Return the name of a weight that correlates with a tensor, or None.

    Compare only weights that have the tensor's shape or its transposed shape.
    """
    tensor = holding.tensor.detach()
    if tensor.numel() < LEAST_CORRELATED:
        return None
    pairs: list[tuple[str, torch.Tensor]] = []
    for source in sources:
        held = source.tensor.detach()
        if held.shape == tensor.shape:
            pairs.append((source.name, _correlation(tensor, held)))
        if held.dim() == 2 and held.T.shape == tensor.shape:
            pairs.append((source.name, _correlation(tensor, held.T)))
    if not pairs:
        return None
    found = torch.stack([value for _, value in pairs]).tolist()
    return next((n for (n, _), value in zip(pairs, found, strict=True) if value > CORRELATION), None)  # fmt: skip


def _correlation(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the larger of Pearson's correlation and Spearman's rank correlation of two tensors, as a tensor without dims.

    If `one` is sorted, ignore the rank correlation, because any other sorted tensor would have the same ranks.
    """
    count = min(one.numel(), NUM_SAMPLES)
    at = _places(_spread(one.numel(), count, one), one.shape)
    values = torch.stack([_comparable(one[at]).double(), _comparable(other[at]).double()])
    ranks = values.argsort(1).argsort(1).double()
    steps = values[0].diff()
    is_sorted = (steps >= 0).all() | (steps <= 0).all()
    return torch.maximum(_cosine(values), _cosine(ranks).masked_fill(is_sorted, 0.0))


def _places(flat: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return `torch.unravel_index(flat, shape)`. torch's function would import sympy, which takes seconds."""
    found: list[torch.Tensor] = []
    for size in reversed(shape):
        found.insert(0, flat % size)
        flat = flat // size
    return tuple(found)


def _cosine(both: torch.Tensor) -> torch.Tensor:
    """Return the absolute correlation of the two rows of `both`; 0 if a row is constant."""
    both = both - both.mean(1, keepdim=True)
    return ((both[0] @ both[1]).abs() / both.square().sum(1).prod().sqrt()).nan_to_num(0.0)


def _extremes(numbers: Mapping[str, Number], sources: list[Holding]) -> dict[str, str]:
    """Return path -> explanation for numbers that equal the minimum or maximum of a weight, up to the sign."""
    chosen = {path: found for path, value in numbers.items() if (found := _uncommon(value))}
    if not chosen or not sources:
        return {}
    extremes = torch.stack(
        [
            torch.stack([*_comparable(source.tensor.detach()).aminmax()]).double().cpu()
            for source in sources
        ]
    ).abs()
    by_value: dict[float, str] = {}
    for source, found in zip(sources, extremes.tolist(), strict=True):
        for value in found:
            by_value.setdefault(value, source.name)
    return {
        path: f"is an element of {by_value[abs(value)]}"
        for path, value in chosen.items()
        if abs(value) in by_value
    }


def _uncommon(value: Number) -> float | None:
    """Return a number if it is a finite float with more than five significant bits, else None.

    Any other number is probably a setting, such as 0.125 or 448. A setting may equal an element of a weight by chance.
    """
    if isinstance(value, bool | int | complex) or not 0 < abs(value) < float("inf"):
        return None
    (bits,) = struct.unpack("<Q", struct.pack("<d", float(value)))
    return float(value) if bits % (1 << 48) else None


_NUM_FULL_LOOKS = 2
"""Number of first calls of `Later.look` that also search tensors that existed at the capture and were written since.

An engine may allocate a tensor at its start and fill the tensor in its first forward passes.
"""
_TRIES = 3
_MOVED = "these tensors have moved since the layout was captured"


@final
class Later:
    """Mirrors and other derived values that an engine computes after the capture of its layout.

    The first forward pass after the start or after an update may copy weights. Call `look` before the next update
    changes these weights, because `look` compares values to find the copies. Call `refill` after the update.

    Args:
        watched: tensors of the model.
        written: names of the tensors that updates write.
        weights: names of all tensors that are loaded or computed from the checkpoint.
        mirrors: mirrors that the capture has found, by name.

    Attributes:
        mirrors: mirrors that `refill` fills, by name.
    """

    def __init__(
        self,
        watched: Watched,
        written: Collection[str],
        weights: Collection[str],
        mirrors: Mapping[str, Mirror],
    ) -> None:
        self._watched, self._weights = watched, frozenset(weights)
        held = watched()
        self._written = {name: (held[name].tensor, held[name].address) for name in written}
        self._known = {name: _state(holding) for name, holding in held.items()}
        self._numbers = watched.all_numbers()
        watched.changed()
        self._signature: Signature | None = None
        self._num_looks = 0
        self.mirrors = {**mirrors}

    def look(self) -> None:
        """Search for values that the engine has computed from weights since the capture or the previous call.

        Add the mirrors among these values to `mirrors`, and remove mirrors that no longer exist. Call this while the engine
        is quiesced, and before the next version writes into the weights.

        Raises:
            UnsupportedLayout: the engine has moved a tensor into which updates write, or an update cannot refill a
                value that depends on weights. The message names these tensors or values.
        """
        if self._is_unchanged():
            return
        self._num_looks += 1
        try:
            self._look(is_full=self._num_looks <= _NUM_FULL_LOOKS)
        finally:
            self._watched.changed()

    def check_places(self) -> None:
        """Check the addresses of the tensors into which updates write.

        Call this only if the model has the same tensors as at the last search.

        Raises:
            UnsupportedLayout: a tensor has moved.
        """
        refuse(self._moved(), _MOVED)

    def _moved(self) -> list[str]:
        """Return the names of the tensors with a new address, among the tensors into which updates write."""
        return [name for name, (tensor, at) in self._written.items() if tensor.data_ptr() != at]

    def _is_unchanged(self) -> bool:
        """Return whether `look` can skip the search, because the model references the same objects as at the last search.

        Also return False if a tensor into which updates write has moved, and after a full search, because a full search
        records no signature.
        """
        return self._signature is not None and self._signature.holds() and not self._moved()

    def _look(self, *, is_full: bool) -> None:
        """Search new tensors and numbers for copies of weights, and set `mirrors` to the mirrors that exist now.

        A tensor is new if it did not exist at the previous call, or if its memory has changed. If `is_full` is True, a tensor
        is also new if it was written since the previous call. Record the state of all tensors for the next call.
        """
        held = self._walk_again()
        moved = [
            name
            for name, (_, address) in self._written.items()
            if name not in held or held[name].address != address
        ]
        refuse(moved, _MOVED)
        now = {name: _state(holding) for name, holding in held.items()}
        new = {
            name: holding
            for name, holding in held.items()
            if name not in self._weights
            and holding.kind is not Kind.PARAMETER
            and _is_new(now[name], self._known.get(name), is_full=is_full)
        }
        new |= self._watched.copies()
        numbers = self._watched.all_numbers()
        found = find_mirrors(
            new.values(),
            [held[name] for name in self._weights & held.keys()],
            {path: n for path, n in numbers.items() if path not in self._numbers},
        )
        found.require_refilled()
        kept = {n: mirror for n, mirror in self.mirrors.items() if n in held and n not in new}
        self.mirrors = {**kept, **found.mirrors}
        self._known, self._numbers = now, numbers
        self._signature = None if is_full else Signature(self._watched.reach)

    def _walk_again(self) -> Mapping[str, Holding]:
        """Walk the model again, and return its current tensors by name.

        Raises:
            RuntimeError: another thread has changed a container during each of `_TRIES` walks over the model.
        """
        for number in range(_TRIES):
            self._watched.changed()
            try:
                return self._watched()
            except RuntimeError:
                if number == _TRIES - 1:
                    raise
        raise AssertionError

    def refill(self) -> None:
        """Copy weights into all mirrors, and wait until GPUs have finished the copies."""
        # torch forbids writes to inference tensors outside inference mode.
        with torch.inference_mode():
            for mirror in self.mirrors.values():
                mirror.refill()
        targets = (part.target for mirror in self.mirrors.values() for part in mirror.parts)
        for device in {target.device for target in targets if target.is_cuda}:
            # The engine's next step may run on another stream.
            torch.cuda.synchronize(device)


@final
@dataclass(frozen=True, slots=True)
class _State:
    """Identity of a tensor's memory, and of its value.

    Attributes:
        version: version counter that torch keeps for the tensor; None for an inference tensor, which has no counter.
        address: address of the tensor's first element.
        storage: weak reference to the tensor's storage; None if the walk through the model may have created the tensor,
            because the storage is then freed after the walk.
    """

    version: int | None
    address: int
    storage: StorageWeakRef | None


def _state(holding: Holding) -> _State:
    """Return the present state of a tensor of the model."""
    tensor, node = holding.tensor, holding.node
    is_owned = node is not None and node.is_model_tensor
    return _State(
        version=None if tensor.is_inference() else tensor._version,
        address=holding.address,
        storage=StorageWeakRef(tensor.untyped_storage()) if is_owned else None,  # type: ignore[no-untyped-call]
    )


def _is_new(now: _State, known: _State | None, *, is_full: bool) -> bool:
    """Return whether a tensor may have a new value. Compare version counters only if `is_full` is True.

    `known` is the tensor's earlier state, or None if the tensor did not exist. The same address is not enough: a new
    tensor may get the address of a freed tensor.
    """
    if known is None or now.address != known.address:
        return True
    if known.storage is not None and known.storage.expired():  # type: ignore[no-untyped-call]
        return True
    return is_full and (now.version is None or now.version != known.version)
