"""Copies of weights that no load refreshes: the engine makes them when it starts, or at its first forward pass.

A load does not change such a tensor, so only the tensor's values show their source. If every row of it equals a row of a weight, after a cast to the
tensor's type, then it is a copy, cast, slice, transposition or concatenation of weights, and every update fills it from
these weights again. A tensor that only correlates with a weight of its shape (a product, a quantised copy) also depends on
the weight, but only the engine's code knows how. Capture refuses such a tensor.

The search compares a few elements of a row, on the device that holds them. It compares whole rows only where these elements are equal.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import final

import torch

from windlass.engines.capture.memory import Holding, Kind, Watched, refuse
from windlass.engines.capture.reach import Number, Signature

FEW = 4
"""Least length of a row or piece that the search looks for. Shorter ones would match some weight by chance."""
NUM_KEYS = 4
"""Elements of a row that the search compares first."""
NUM_SAMPLES = 4096
"""Elements of a tensor that enter a correlation."""
LEAST_CORRELATED = 16
"""Least number of elements of a tensor for a correlation; fewer may correlate by chance."""
CORRELATION = 0.99
MAX_PIECES = 64
NUM_NEAR, NEAR_NUMEL = 16, 1 << 22
"""Weights that are searched element by element, and their largest size."""
_WIDE = (torch.float32, torch.float64)


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Rows `places` of `target`, which equal rows `rows` of the weight `source`; None stands for all rows."""

    target: torch.Tensor
    source: torch.Tensor
    places: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def refill(self) -> None:
        """Copy the weight's rows into the target."""
        if self.places is None or self.rows is None:
            self.target.copy_(self.source)
        else:
            self.target[self.places] = self.source[self.rows].to(self.target.dtype)


@final
@dataclass(frozen=True, slots=True)
class Mirror:
    """A tensor that consists of rows of weights. `sources` has the names of these weights."""

    name: str
    sources: tuple[str, ...]
    parts: tuple[Part, ...]


@final
@dataclass(frozen=True, slots=True)
class Found:
    """Values that follow from weights.

    Attributes:
        mirrors: tensors that can be filled again, by name.
        derived: name of each other value -> how it depends on a weight.
    """

    mirrors: Mapping[str, Mirror]
    derived: Mapping[str, str]

    def require_refilled(self) -> None:
        """Raise UnsupportedLayout that names all values that cannot be filled again, if there are any."""
        if self.derived:
            name, how = next(iter(self.derived.items()))
            refuse(
                self.derived,
                "values that depend on weights, but that neither a load nor an update changes "
                f"({name} {how}); change the engine's code to compute them in its loader or at every step, or "
                "delete them when weights change",
            )


def find_mirrors(
    targets: Iterable[Holding],
    weights: Iterable[Holding],
    numbers: Mapping[str, Number] | None = None,
) -> Found:
    """Find state of an engine that was computed from its weights.

    Args:
        targets: tensors that no load fills.
        weights: tensors that a load fills.
        numbers: Python numbers of the engine, by path.

    Returns:
        Tensors that consist of rows of weights (`Mirror`), tensors that correlate with a weight, and numbers that are the
        smallest or largest element of a weight.
    """
    sources = [h for h in weights if h.tensor.is_floating_point() and h.tensor.numel() >= FEW]
    mirrors: dict[str, Mirror] = {}
    derived: dict[str, str] = {}
    for holding in targets:
        tensor = holding.tensor
        if tensor.numel() < FEW or tensor.dtype is torch.bool or not _varies(tensor):
            continue
        here = [source for source in sources if source.tensor.device == tensor.device]
        mirror = _mirror(holding, here) if tensor.is_floating_point() else None
        if mirror is not None:
            mirrors[holding.name] = mirror
            if rival := _rival(holding, mirror, here):
                derived[holding.name] = f"may be a copy of {mirror.sources[0]} or of {rival}"
        elif source := _correlated(holding, here):
            derived[holding.name] = f"follows from {source}"
    return Found(mirrors, derived | _extremes(numbers or {}, sources))


def _rival(holding: Holding, mirror: Mirror, sources: list[Holding]) -> str | None:
    """Return a second weight that the mirror may copy instead: with equal values and an equally near name; else None."""
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
            and _common(holding.name, rival.name) >= _common(holding.name, name)
            and torch.equal(rival.tensor, of.tensor)
        ),
        None,
    )


def _common(one: str, other: str) -> int:
    """Return the number of leading parts that two paths share. Of equal weights, the search takes the one with most."""
    parts = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], parts))


def _nearest(holding: Holding, sources: Iterable[Holding]) -> list[Holding]:
    return sorted(sources, key=lambda source: -_common(holding.name, source.name))


def _varies(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's first rows contain more than one value."""
    some = tensor.detach()
    some = _comparable(some.reshape(1, 1) if not some.dim() else some[:64].reshape(-1)[: 1 << 16])
    return bool((some != some.reshape(-1)[0]).any())


def _comparable(values: torch.Tensor) -> torch.Tensor:
    """Cast float8 values to float32, because torch cannot compare float8."""
    is_float8 = values.is_floating_point() and values.element_size() == 1
    return values.float() if is_float8 else values


def _equal(held: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Compare a tensor with a weight, element by element, after a cast of the weight to the tensor's dtype.

    If the tensor has a wider dtype, an element also counts as equal if it is equal after a cast to the weight's dtype.
    """
    equal = _comparable(source.to(held.dtype)) == _comparable(held)
    if held.dtype in _WIDE and source.dtype is not held.dtype:
        equal |= _comparable(held.to(source.dtype)) == _comparable(source)
    return equal


def _forms(tensor: torch.Tensor, width: int | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensor and its transposition as matrices that share its memory; with `width`, only those of this width."""
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
        except RuntimeError:  # the steps between its rows differ
            continue


def _mirror(holding: Holding, sources: list[Holding]) -> Mirror | None:
    for rows in _forms(holding.tensor):
        if rows.shape[1] >= FEW and (found := _from_rows(holding, rows, sources)):
            return found
    near = _nearest(holding, sources)
    if holding.tensor.dim() == 1:
        return _from_pieces(holding, near)
    near = [source for source in near[:NUM_NEAR] if source.tensor.numel() <= NEAR_NUMEL]
    return next(filter(None, (_from_block(holding, source) for source in near)), None)


def _keys(row: torch.Tensor) -> torch.Tensor:
    """Return places of some nonzero elements of a row, as search keys."""
    filled = (_comparable(row) != 0).nonzero().reshape(-1)
    return filled[_spread(len(filled), NUM_KEYS, row)] if len(filled) else filled


def _spread(size: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """Return evenly spread indices below a size."""
    return torch.linspace(0, size - 1, count, device=like.device, dtype=torch.float64).long()


def _from_rows(holding: Holding, rows: torch.Tensor, sources: list[Holding]) -> Mirror | None:
    """Return a mirror if every nonzero row is a row of a weight and the row numbers are in the order of a slice."""
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
    alike.sort(key=lambda pair: -_common(holding.name, pair[0].name))
    return _from_all_rows(holding.name, rows, alike)


def _from_all_rows(
    name: str, rows: torch.Tensor, alike: list[tuple[Holding, torch.Tensor]]
) -> Mirror | None:
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
    """Return whether row numbers rise in few different steps, or are a permutation of a contiguous block.

    A forward pass gathers rows of an embedding in any order. Such rows are not a slice of it.
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
    first, start, size = int(places[0]), int(found[0]), len(places)
    if int(places[-1]) - first == int(found[-1]) - start == size - 1 and bool(
        (found.diff() == 1).all()
    ):
        return Part(rows[first : first + size], matrix[start : start + size])
    return Part(rows, matrix, places, found)


def _rows_in(rows: torch.Tensor, places: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return, for each row in `places`, the number of an equal row of the matrix; -1 if there is none."""
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
    bits = values.contiguous().view(torch.uint8).view(len(values), -1).to(torch.int64)
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    return (bits * (places * 0x9E3779B97F4A7C1 + 0x5851F42D)).sum(1)


def _from_pieces(holding: Holding, near: list[Holding]) -> Mirror | None:
    """Return a mirror if a vector consists of pieces of weights; in a matrix, a piece starts at the start of a row."""
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
    """Return the longest piece of a weight that equals the beginning of a vector, and the weight's name."""
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
    """Return where the first elements of `rest` occur: anywhere in a weight of one row, else at the start of a row."""
    windows = matrix[0].unfold(0, FEW, 1) if len(matrix) == 1 else matrix[:, :FEW]
    return _equal(rest[:FEW], windows).all(1)


def _from_block(holding: Holding, source: Holding) -> Mirror | None:
    """Return a mirror if a matrix is a block of a weight, with fewer rows and fewer columns."""
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
    """Return a weight of the same shape, perhaps transposed, that correlates with a tensor; None if there is none."""
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
    """Return the larger of the correlations of values and of ranks. For a sorted tensor, only values count."""
    count = min(one.numel(), NUM_SAMPLES)
    at = _places(_spread(one.numel(), count, one), one.shape)
    values = torch.stack([_comparable(one[at]).double(), _comparable(other[at]).double()])
    ranks = values.argsort(1).argsort(1).double()
    steps = values[0].diff()
    is_sorted = (steps >= 0).all() | (steps <= 0).all()
    return torch.maximum(_cosine(values), _cosine(ranks).masked_fill(is_sorted, 0.0))


def _places(flat: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return `torch.unravel_index` of flat indices, without the import of sympy, which takes seconds."""
    found: list[torch.Tensor] = []
    for size in reversed(shape):
        found.insert(0, flat % size)
        flat = flat // size
    return tuple(found)


def _cosine(both: torch.Tensor) -> torch.Tensor:
    both = both - both.mean(1, keepdim=True)
    return ((both[0] @ both[1]).abs() / both.square().sum(1).prod().sqrt()).nan_to_num(0.0)


def _extremes(numbers: Mapping[str, Number], sources: list[Holding]) -> dict[str, str]:
    """Return numbers that equal the smallest or largest element of a weight, up to the sign, with the weight's name."""
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
    """Return a float with more than five significant bits; None for settings such as 0.125 and 448, and for others."""
    if isinstance(value, bool | int | complex) or not 0 < abs(value) < float("inf"):
        return None
    (bits,) = struct.unpack("<Q", struct.pack("<d", float(value)))
    return float(value) if bits % (1 << 48) else None


_NUM_FULL_LOOKS = 2
"""Calls of `look` that also search tensors that already existed, because the engine may have filled them later."""
_TRIES = 3


@final
class Later:
    """Values that an engine derives from weights after the capture of its layout.

    The first forward pass, and the first one after an update, may make copies of weights. `look` finds them while the
    weights still hold the values that were copied.

    Args:
        watched: the model.
        written: names of the tensors that updates write.
        weights: names of all tensors that follow from the checkpoint.
        mirrors: copies of weights that the capture has found, by name.
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
        """Search for new values. The caller has quiesced the engine, and no byte of the next version is written yet.

        Raises:
            UnsupportedLayout: a tensor that updates write has moved; or a value depends on weights in a way that only
                the engine's code knows. The message names all of them.
        """
        if self._is_unchanged():
            return
        self._num_looks += 1
        try:
            self._look(is_full=self._num_looks <= _NUM_FULL_LOOKS)
        finally:
            self._watched.changed()

    def _is_unchanged(self) -> bool:
        return (
            self._signature is not None
            and self._signature.holds()
            and all(tensor.data_ptr() == at for tensor, at in self._written.values())
        )

    def _look(self, *, is_full: bool) -> None:
        held = self._walked()
        moved = [
            name
            for name, (_, address) in self._written.items()
            if name not in held or held[name].address != address
        ]
        refuse(moved, "tensors that moved since the layout was captured")
        now = {name: _state(holding) for name, holding in held.items()}
        new = {
            name: holding
            for name, holding in held.items()
            if name not in self._weights
            and holding.kind is not Kind.PARAMETER
            and _is_new(now[name], self._known.get(name), is_full=is_full)
        }
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

    def _walked(self) -> Mapping[str, Holding]:
        """Walk the model. Try again if another thread of the engine changes a container during the walk."""
        for number in range(_TRIES):
            self._watched.changed()
            try:
                return self._watched()
            except RuntimeError:
                if number == _TRIES - 1:
                    raise
        raise AssertionError

    def refill(self) -> None:
        """Fill the mirrors from weights, and wait until GPUs have done so."""
        with torch.inference_mode():  # tensors made in inference mode can be written only in it
            for mirror in self.mirrors.values():
                for part in mirror.parts:
                    part.refill()
        targets = (part.target for mirror in self.mirrors.values() for part in mirror.parts)
        for device in {target.device for target in targets if target.is_cuda}:
            torch.cuda.synchronize(device)  # the engine's next step may run on another stream


_State = tuple[int | None, int]


def _state(holding: Holding) -> _State:
    """Return torch's count of writes to a tensor (None for inference tensors, which have no count) and its address."""
    is_counted = not holding.tensor.is_inference()
    return (holding.tensor._version if is_counted else None), holding.address


def _is_new(now: _State, known: _State | None, *, is_full: bool) -> bool:
    if known is None or now[1] != known[1]:
        return True
    return is_full and (now[0] is None or now[0] != known[0])
