"""What transformers saves a model as: which checkpoint tensors lie where in its parameters.

transformers 5 renames modules and fuses tensors while it loads a checkpoint, and undoes that when it
saves one (`core_model_loading.revert_weight_conversion`, with the table of `conversion_mapping`). That function
is run here, on tensors that have shapes and no elements and keep account of where every element comes
from: views, copies, concatenations. So there is no second table of architectures and no reading of theirs.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from windlass.errors import UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.manifest import contiguous_strides
from windlass.layout.naming.place import PlacedShard

MAX_PIECES = 1 << 16
"""Boxes of one tensor: what a rotary embedding's permutation of rows takes is half the rows."""


def is_of_transformers(module: torch.nn.Module) -> bool:
    """Whether `module`, without what wraps it, is a model of transformers 5 that knows how to be saved."""
    transformers = sys.modules.get("transformers")
    if transformers is None or "transformers.core_model_loading" not in sys.modules:
        return False
    return isinstance(_unwrapped(module), transformers.PreTrainedModel)


def saved_parts(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[PlacedShard, ...]]:
    """Return what of saved tensors lies in each parameter, in elements of the whole one, contiguous.

    Args:
        module: for which `is_of_transformers` holds; wrapped or not, sharded or not.
        tensors: its parameters and persistent buffers by their names in the bare module, whole shapes.

    Raises:
        UnsupportedLayout: the conversion fails, or computes something.
    """
    model = _bare(_unwrapped(module), {})
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    found = _reverted(model, {name: tensors[name] for name in first.values()})
    if len(first) < len(tensors):  # a saved file has tied weights once
        found = {**_reverted(model, tensors), **found}
    return found


def _reverted(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[PlacedShard, ...]]:
    from transformers.core_model_loading import revert_weight_conversion

    whole = {
        name: watched(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    try:
        saved = revert_weight_conversion(model, whole)
    except UnsupportedLayout:
        raise
    except Exception as error:
        raise UnsupportedLayout(
            f"{type(model).__name__}: transformers must be able to save the model in the form of its checkpoint, "
            f"got {type(error).__name__}: {error}: pass `name_map` and `stacked`"
        ) from error
    found: dict[str, list[PlacedShard]] = {name: [] for name in tensors}
    for name, tensor in saved.items():
        for piece in tensor.pieces:
            shape = tuple(tensor.shape)
            placed = PlacedShard(name, shape, piece.box, piece.offset, piece.strides)
            found[piece.source].append(placed)
    return {name: tuple(parts) for name, parts in found.items()}


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside `torch.compile`, activation checkpointing and `DistributedDataParallel`."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module.get_submodule("_orig_mod")
        elif "_checkpoint_wrapped_module" in module._modules:
            module = module.get_submodule("_checkpoint_wrapped_module")
        else:
            return module


def _bare(module: torch.nn.Module, made: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """A module like this one that holds the same tensors, of the classes that it had before FSDP2's.

    transformers looks conversions up by the names of classes.
    """
    module = _unwrapped(module)
    if id(module) not in made:
        kinds = type(module).__mro__
        kind = next(base for base in kinds if not issubclass(base, FSDPModule))
        twin = made[id(module)] = cast("torch.nn.Module", kind.__new__(kind))
        twin.__dict__.update(vars(module))
        twin.__dict__["_modules"] = {
            name: None if child is None else _bare(child, made)
            for name, child in module._modules.items()
        }
    return made[id(module)]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a tensor, and where it lies in a parameter; offset and strides in its elements."""

    source: str
    box: Box
    offset: int
    strides: tuple[int, ...]

    def along(self, dim: int, ranges: Sequence[tuple[int, int, int]], skipped: int = 0) -> _Piece:
        """The piece with other dims in place of one: (start, size, stride) each."""
        offsets, sizes, strides = self.box.offsets, self.box.sizes, self.strides
        return _Piece(
            self.source,
            Box(
                (*offsets[:dim], *(one[0] for one in ranges), *offsets[dim + 1 :]),
                (*sizes[:dim], *(one[1] for one in ranges), *sizes[dim + 1 :]),
            ),
            self.offset + skipped * strides[dim],
            (*strides[:dim], *(one[2] for one in ranges), *strides[dim + 1 :]),
        )


class _Watched(torch.Tensor):
    """A tensor without elements that knows where they come from. Nothing changes it in place."""

    pieces: list[_Piece]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> object:
        follow = _FOLLOWED.get(func)
        if follow is None:
            raise UnsupportedLayout(
                f"transformers computes with {func} what it saves, which is no copy of parameters: pass "
                "`name_map` and `stacked`"
            )
        return follow(*args, **(kwargs or {}))

    def like(self, shape: Sequence[int], pieces: Iterable[_Piece]) -> _Watched:
        """Another tensor of the same dtype."""
        kept = list(itertools.islice(pieces, MAX_PIECES + 1))
        if len(kept) > MAX_PIECES:
            raise UnsupportedLayout(
                f"parameter {kept[0].source!r}: must be at most {MAX_PIECES} boxes of tensors that transformers saves"
            )
        return _made(tuple(shape), self.dtype, kept)


def _made(shape: tuple[int, ...], dtype: torch.dtype, pieces: list[_Piece]) -> _Watched:
    made: _Watched = torch.Tensor._make_wrapper_subclass(_Watched, shape, dtype=dtype)
    made.pieces = pieces
    return made


def watched(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Watched:
    """A whole parameter. Operators that move elements give tensors that know of it; others are refused."""
    whole = _Piece(name, Box.full(shape), 0, contiguous_strides(shape, 1))
    return _made(shape, dtype, [whole])


def _same(tensor: _Watched, *_: object, **__: object) -> _Watched:
    return tensor.like(tensor.shape, tensor.pieces)


def _sliced(
    tensor: _Watched,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> _Watched:
    dim %= tensor.dim()
    taken = range(tensor.shape[dim])[slice(start, end, step)]

    def pieces() -> Iterator[_Piece]:
        for piece in tensor.pieces:
            low, size = piece.box.offsets[dim], piece.box.sizes[dim]
            first = max(0, -(-(low - taken.start) // step))
            last = min(len(taken), -(-(low + size - taken.start) // step))
            if first < last:
                skipped = taken.start + first * step - low
                yield piece.along(dim, [(first, last - first, piece.strides[dim] * step)], skipped)

    shape = tensor.shape
    return tensor.like((*shape[:dim], len(taken), *shape[dim + 1 :]), pieces())


def _selected(tensor: _Watched, dim: int = 0, index: int = 0) -> _Watched:
    dim, index = dim % tensor.dim(), index % tensor.shape[dim]
    return _squeezed(_sliced(tensor, dim, index, index + 1), dim)


def _squeezed(tensor: _Watched, dims: int | Sequence[int] | None = None) -> _Watched:
    given = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % tensor.dim() for dim in given}
    shape = [s for d, s in enumerate(tensor.shape) if d not in gone or s != 1]
    return _reshaped(tensor, shape)


def _unsqueezed(tensor: _Watched, dim: int) -> _Watched:
    dim %= tensor.dim() + 1
    return _reshaped(tensor, (*tensor.shape[:dim], 1, *tensor.shape[dim:]))


def _permuted(tensor: _Watched, dims: Sequence[int]) -> _Watched:
    order = [dim % tensor.dim() for dim in dims]

    def turned(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in order)

    return tensor.like(
        turned(tensor.shape),
        (
            replace(
                piece,
                box=Box(turned(piece.box.offsets), turned(piece.box.sizes)),
                strides=turned(piece.strides),
            )
            for piece in tensor.pieces
        ),
    )


def _transposed(tensor: _Watched, first: int = 0, second: int = 1) -> _Watched:
    order = list(range(tensor.dim()))
    order[first], order[second] = order[second], order[first]
    return _permuted(tensor, order)


def _split(tensor: _Watched, size: int | Sequence[int], dim: int = 0) -> list[_Watched]:
    total = tensor.shape[dim]
    if isinstance(size, int):
        starts = range(0, total, size) if total else range(1)
        return [_sliced(tensor, dim, start, start + size) for start in starts]
    ends = list(itertools.accumulate(size))
    return [_sliced(tensor, dim, end - part, end) for part, end in zip(size, ends, strict=True)]


def _unbound(tensor: _Watched, dim: int = 0) -> list[_Watched]:
    return [_selected(tensor, dim, index) for index in range(tensor.shape[dim])]


def _joined(tensors: Sequence[_Watched], dim: int = 0) -> _Watched:
    first = tensors[0]
    dim %= first.dim()
    ends = list(itertools.accumulate(tensor.shape[dim] for tensor in tensors))
    return first.like(
        (*first.shape[:dim], ends[-1], *first.shape[dim + 1 :]),
        (
            piece.along(
                dim,
                [
                    (
                        piece.box.offsets[dim] + end - tensor.shape[dim],
                        piece.box.sizes[dim],
                        piece.strides[dim],
                    )
                ],
            )
            for tensor, end in zip(tensors, ends, strict=True)
            for piece in tensor.pieces
        ),
    )


def _stacked(tensors: Sequence[_Watched], dim: int = 0) -> _Watched:
    return _joined([_unsqueezed(tensor, dim) for tensor in tensors], dim)


def _reshaped(tensor: _Watched, sizes: Sequence[int]) -> _Watched:
    """Split dims until those of both shapes are made of the same ones, then join these."""
    old, new = tuple(tensor.shape), list(sizes)
    if -1 in new:
        known = math.prod(size for size in new if size != -1)
        new[new.index(-1)] = tensor.numel() // known
    units = {*contiguous_strides(old, 1), *contiguous_strides(tuple(new), 1), tensor.numel()}
    steps = sorted(units, reverse=True)
    if 0 in units or any(above % below for above, below in itertools.pairwise(steps)):
        raise UnsupportedLayout(
            f"transformers saves a tensor of shape {old} as {tuple(new)}, whose dims are not made of the same ones"
        )
    pieces: Iterable[_Piece] = tensor.pieces
    for dim in reversed(range(len(old))):
        pieces = [
            one for piece in pieces for one in _split_dim(piece, dim, _within(steps, old, dim))
        ]
    for dim in range(len(new)):
        factors = _within(steps, tuple(new), dim)
        pieces = [one for piece in pieces for one in _join_dims(piece, dim, factors)]
    return tensor.like(new, pieces)


def _within(steps: Sequence[int], shape: tuple[int, ...], dim: int) -> list[int]:
    """Sizes of the dims that one is made of; none for one of size 1."""
    low = math.prod(shape[dim + 1 :])
    inside = [step for step in steps if low <= step <= low * shape[dim]]
    return [above // below for above, below in itertools.pairwise(inside)]


def _split_dim(piece: _Piece, dim: int, factors: Sequence[int]) -> Iterator[_Piece]:
    start, size, stride = piece.box.offsets[dim], piece.box.sizes[dim], piece.strides[dim]
    for ranges in _mixed(start, size, factors):
        units = contiguous_strides(tuple(factors), 1)
        begin = sum(low * unit for (low, _), unit in zip(ranges, units, strict=True))
        split = [
            (low, count, stride * unit) for (low, count), unit in zip(ranges, units, strict=True)
        ]
        yield piece.along(dim, split, begin - start)


def _mixed(start: int, size: int, factors: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """A range of numbers as boxes of their digits: (first, count) of each digit."""
    if len(factors) < 2:
        yield [(start, size)] * len(factors)
        return
    inner, end = math.prod(factors[1:]), start + size
    while start < end:
        high, low = divmod(start, inner)
        if not low and end - start >= inner:
            count = (end - start) // inner
            yield [(high, count), *((0, factor) for factor in factors[1:])]
            start += count * inner
        else:
            stop = min(end, (high + 1) * inner)
            for rest in _mixed(low, stop - start, factors[1:]):
                yield [(high, 1), *rest]
            start = stop


def _join_dims(piece: _Piece, dim: int, factors: Sequence[int]) -> Iterator[_Piece]:
    """Make one dim of `len(factors)` dims from `dim` on, of one more for none."""
    if not factors:
        yield _Piece(
            piece.source,
            Box(
                (*piece.box.offsets[:dim], 0, *piece.box.offsets[dim:]),
                (*piece.box.sizes[:dim], 1, *piece.box.sizes[dim:]),
            ),
            piece.offset,
            (*piece.strides[:dim], 0, *piece.strides[dim:]),
        )
        return
    if len(factors) == 1:
        yield piece
        return
    inner = factors[-1]
    at = dim + len(factors) - 2
    (low, low2), (size, size2) = piece.box.offsets[at : at + 2], piece.box.sizes[at : at + 2]
    stride, stride2 = piece.strides[at : at + 2]
    whole = size2 == inner and (stride == inner * stride2 or inner == 1)
    step = stride if inner == 1 else stride2
    runs = [(low, size)] if whole else [(row, 1) for row in range(low, low + size)]
    for row, count in runs:
        joined = _Piece(
            piece.source,
            Box(
                (*piece.box.offsets[:at], row * inner + low2, *piece.box.offsets[at + 2 :]),
                (*piece.box.sizes[:at], count * size2, *piece.box.sizes[at + 2 :]),
            ),
            piece.offset + (row - low) * stride,
            (*piece.strides[:at], step, *piece.strides[at + 2 :]),
        )
        yield from _join_dims(joined, dim, [*factors[:-2], factors[-2] * inner])


_aten = torch.ops.aten
_FOLLOWED: Mapping[object, Callable[..., object]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten.slice.Tensor: _sliced,
    _aten.select.int: _selected,
    _aten.squeeze.default: _squeezed,
    _aten.squeeze.dim: _squeezed,
    _aten.squeeze.dims: _squeezed,
    _aten.unsqueeze.default: _unsqueezed,
    _aten.permute.default: _permuted,
    _aten.transpose.int: _transposed,
    _aten.t.default: _transposed,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: _unbound,
    _aten.cat.default: _joined,
    _aten.stack.default: _stacked,
    _aten.view.default: _reshaped,
    _aten._unsafe_view.default: _reshaped,
}
"""Operators that only move elements. Every tensor is as if contiguous, so that all reshaping is a view."""
