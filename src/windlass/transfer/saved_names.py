"""Maps a rank's part of a parameter to the boxes of checkpoint tensors that saving the model would write.

A model may have other parameters than its checkpoint has tensors. transformers 5 renames modules and fuses tensors when
it loads a checkpoint, and reverts this when it saves one (`core_model_loading.revert_weight_conversion`). This module
calls that function with tensors that have no elements (`_Watched`). They record which elements of the parameters become
which elements of the saved tensors, through views, copies and concatenations. So Windlass needs no table of
architectures. For stacked parameters of other frameworks, a `StackedRule` describes the checkpoint tensors.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from windlass.errors import ManifestError, UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.manifest import contiguous_strides
from windlass.layout.naming.place import PlacedShard
from windlass.layout.naming.stacked import StackedRule

MAX_PIECES = 1 << 16
"""Maximum number of boxes per tensor. The row permutation for a rotary embedding makes one box per two rows."""


WRAPPER_MARKS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts that torch.compile, activation checkpointing and FSDP1 insert into the names of parameters."""


def without_marks(name: str) -> str:
    """Return a name without `WRAPPER_MARKS`."""
    for mark in WRAPPER_MARKS:
        name = name.replace(mark, "")
    return name


_MARKS = re.compile(
    r"(\.token_adapter)?\.base_layer(?=\.|$)|\.modules_to_save\.[^.]+(?=\.)|\.original_module(?=\.)|"
    + "|".join(map(re.escape, WRAPPER_MARKS))
)
"""Pattern of `WRAPPER_MARKS` and of the parts that PEFT inserts into names."""


def without_peft(name: str) -> str:
    """Return a name without `WRAPPER_MARKS` and without the parts that PEFT inserts into the names of a base."""
    return _MARKS.sub("", name)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor object that contains this rank's elements; for a plain tensor, the tensor itself.

    This function does not call `DTensor.to_local`, because `to_local` returns a new object for a parameter (torch 2.13).
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def transformers_model(module: torch.nn.Module, *, inside: bool = False) -> torch.nn.Module | None:
    """Return the transformers 5 model inside the wrappers of `module`; None if `module` is another kind of model.

    With `inside`, search the submodules of `module` too, for example for the base of a PEFT model.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or "transformers.core_model_loading" not in sys.modules:
        return None
    unwrapped = _unwrapped(module)
    # `modules()` yields a module before its children, so the outermost model is found first.
    for child in unwrapped.modules() if inside else (unwrapped,):
        if isinstance(child, transformers.PreTrainedModel):
            return cast("torch.nn.Module", child)
    return None


def names_in(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of a model's tensors without the parts that PEFT and other wrappers insert."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return frozenset(without_peft(name) for name, _ in tensors)


@dataclass(frozen=True, slots=True)
class HeldPart:
    """This rank's part of a parameter.

    Attributes:
        name: name of the parameter without `WRAPPER_MARKS`, or the result of `name_map` for it.
        shape, dtype: shape and dtype of the whole parameter.
        box: elements of the parameter that this rank has.
        strides: strides of the local memory, in elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    strides: tuple[int, ...]


def saved_parts(
    model: torch.nn.Module, held: Sequence[HeldPart], owner: Sequence[int]
) -> list[list[PlacedShard]]:
    """Return, for each part, the boxes of the tensors that transformers would save from it.

    transformers converts the model's tensors when it saves them. This function runs the conversion on element ids.

    Args:
        model: transformers model, sharded or not. The parts have the names of its tensors.
        held: parts of all parameters. A tied parameter has one part per name.
        owner: (num_held,) for each part, the index in `held` of the first part of the same parameter.

    Returns:
        One list of boxes per part. Offsets and strides are in elements.

    Raises:
        UnsupportedLayout: the conversion fails, or it computes values instead of moving them.
    """
    model = _bare(model, {})
    once = [part for index, part in enumerate(held) if owner[index] == index]
    found = _reverted(model, once)
    if len(once) < len(held):
        # transformers saves a tied weight under one of its names only, so convert again with all names.
        found = {**_reverted(model, held), **found}
    return [found[part.name] for part in held]


def _reverted(model: torch.nn.Module, held: Sequence[HeldPart]) -> dict[str, list[PlacedShard]]:
    """Convert these parts as transformers does when it saves the model. Return part name -> boxes of saved tensors.

    Raises:
        UnsupportedLayout: see `saved_parts`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    try:
        saved = revert_weight_conversion(model, {part.name: watched(part) for part in held})
    except UnsupportedLayout:
        raise
    except Exception as error:
        raise UnsupportedLayout(
            f"{type(model).__name__}: transformers failed to convert the parameters to the tensors of the checkpoint "
            f"({type(error).__name__}: {error}); pass `name_map` and `stacked`"
        ) from error
    found: dict[str, list[PlacedShard]] = {part.name: [] for part in held}
    for source, placed in placed_pieces(saved):
        found[source].append(placed)
    return found


def unstack(rules: Sequence[StackedRule], part: HeldPart) -> list[PlacedShard]:
    """Return the boxes of checkpoint tensors that a part of a parameter contains.

    The first rule that matches the parameter's name says how the parameter is stacked from checkpoint tensors. Without
    a matching rule, the parameter is a checkpoint tensor of the same name. Offsets and strides are in elements.

    Raises:
        ManifestError: a rule matches a parameter that does not have three dims, or that cannot be divided into as many
            equal parts as the rule stacks tensors.
    """
    for rule in rules:
        layer = rule.match(part.name)
        if layer is None:
            continue
        count, dim = len(rule.tensors), 2 if rule.transposed else 1
        if len(part.shape) != 3 or part.shape[dim] % count:
            raise ManifestError(
                f"parameter {part.name!r}: shape must have three dims, and dim {dim} must be divisible by {count}, the "
                f"number of tensors that its rule stacks, got {part.shape}"
            )
        matrices = watched(part).transpose(1, dim).unbind()
        saved = {
            tensor.format(layer=layer, expert=expert): rows
            for expert, matrix in enumerate(matrices)
            for tensor, rows in zip(rule.tensors, matrix.chunk(count), strict=True)
        }
        return [placed for _, placed in placed_pieces(saved)]
    return [PlacedShard(part.name, part.shape, part.box, 0, part.strides)]


def placed_pieces(saved: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, PlacedShard]]:
    """Yield (name of a parameter, box of a saved tensor in this parameter) for each piece of each saved tensor.

    `saved`: name of a saved tensor -> `_Watched` tensor.
    """
    for name, tensor in saved.items():
        for piece in cast("_Watched", tensor).pieces:
            shape, view = tuple(tensor.shape), piece.view
            offset = int(view.storage_offset())
            yield piece.source, PlacedShard(name, shape, piece.box, offset, view.stride())


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside `torch.compile`, activation checkpointing, FSDP1 and `DistributedDataParallel`."""
    while True:
        mark = next((m for m in WRAPPER_MARKS if m.removesuffix(".") in module._modules), "")
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif mark:
            module = module.get_submodule(mark.removesuffix("."))
        else:
            return module


def _bare(module: torch.nn.Module, made: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """Return a copy of the module tree with the same tensors, without wrappers.

    transformers finds conversions by class name, but FSDP2 (`fully_shard`) replaces the class of a module. Each copy
    therefore has the original class. `made`: `id` of a module -> its copy.
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
    """A box of a `_Watched` tensor, and the elements of a parameter that become this box.

    Attributes:
        source: name of the parameter.
        box: the box in the `_Watched` tensor.
        view: tensor on the meta device, a view of this rank's part of the parameter. Its offset and strides locate the
            elements.
    """

    source: str
    box: Box
    view: torch.Tensor


class _Watched(torch.Tensor):
    """A tensor without elements. It records the parameter elements that it consists of, in `pieces`.

    It accepts operators that only move elements (`_FOLLOWED`), but not in place, and refuses all other operators.
    """

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
                f"transformers must only copy and rearrange parameters when it saves the model, got {func}; pass "
                "`name_map` and `stacked`"
            )
        return follow(*args, **(kwargs or {}))

    def like(self, shape: Sequence[int], pieces: Iterable[_Piece]) -> _Watched:
        """Return a tensor of the same dtype with this shape and these pieces.

        Raises:
            UnsupportedLayout: there are more than `MAX_PIECES` pieces.
        """
        kept = list(itertools.islice(pieces, MAX_PIECES + 1))
        if len(kept) > MAX_PIECES:
            raise UnsupportedLayout(
                f"parameter {kept[0].source!r}: must consist of at most {MAX_PIECES} boxes of checkpoint tensors, got more; "
                "pass `name_map` and `stacked`"
            )
        return _made(tuple(shape), self.dtype, kept)


def _made(shape: tuple[int, ...], dtype: torch.dtype, pieces: list[_Piece]) -> _Watched:
    made: _Watched = torch.Tensor._make_wrapper_subclass(_Watched, shape, dtype=dtype)
    made.pieces = pieces
    return made


def watched(part: HeldPart) -> _Watched:
    """Return a `_Watched` tensor in place of a whole parameter. Its only piece is this rank's part."""
    if not part.box.numel:
        return _made(part.shape, part.dtype, [])
    view = torch.empty_strided(part.box.sizes, part.strides, dtype=part.dtype, device="meta")
    return _made(part.shape, part.dtype, [_Piece(part.name, part.box, view)])


def _same(tensor: _Watched, *_: object, **__: object) -> _Watched:
    return tensor.like(tensor.shape, tensor.pieces)


def _with(values: Sequence[int], dim: int, *others: int, num_dims: int = 1) -> tuple[int, ...]:
    """Return `values` with `others` in place of the `num_dims` values that begin at index `dim`."""
    return (*values[:dim], *others, *values[dim + num_dims :])


def _sliced(
    tensor: _Watched,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> _Watched:
    """Slice dim `dim` from `start` to `end` in steps of `step`, and cut the pieces in the same way."""
    dim %= tensor.dim()
    taken = range(tensor.shape[dim])[slice(start, end, step)]

    def pieces() -> Iterator[_Piece]:
        for piece in tensor.pieces:
            low, size = piece.box.offsets[dim], piece.box.sizes[dim]
            first = max(0, -(-(low - taken.start) // step))
            last = min(len(taken), -(-(low + size - taken.start) // step))
            if first < last:
                here = slice(
                    taken.start + first * step - low, taken.start + last * step - low, step
                )
                view = piece.view[(*(slice(None),) * dim, here)]
                box = Box(_with(piece.box.offsets, dim, first), tuple(view.shape))
                yield _Piece(piece.source, box, view)

    return tensor.like(_with(tensor.shape, dim, len(taken)), pieces())


def _selected(tensor: _Watched, dim: int = 0, index: int = 0) -> _Watched:
    dim, index = dim % tensor.dim(), index % tensor.shape[dim]
    return _squeezed(_sliced(tensor, dim, index, index + 1), dim)


def _squeezed(tensor: _Watched, dims: int | Sequence[int] | None = None) -> _Watched:
    given = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % tensor.dim() for dim in given}
    shape = [s for d, s in enumerate(tensor.shape) if d not in gone or s != 1]
    return _reshaped(tensor, shape)


def _unsqueezed(tensor: _Watched, dim: int) -> _Watched:
    return _reshaped(tensor, _with(tensor.shape, dim % (tensor.dim() + 1), 1, num_dims=0))


def _permuted(tensor: _Watched, dims: Sequence[int]) -> _Watched:
    order = [dim % tensor.dim() for dim in dims]

    def turned(piece: _Piece) -> _Piece:
        view, offsets = piece.view.permute(order), piece.box.offsets
        box = Box(tuple(offsets[dim] for dim in order), tuple(view.shape))
        return _Piece(piece.source, box, view)

    return tensor.like([tensor.shape[dim] for dim in order], map(turned, tensor.pieces))


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
    """Return the concatenation of tensors along dim `dim`, with all their pieces at new offsets."""
    first = tensors[0]
    dim %= first.dim()
    ends = list(itertools.accumulate(tensor.shape[dim] for tensor in tensors))

    def pieces() -> Iterator[_Piece]:
        for tensor, end in zip(tensors, ends, strict=True):
            for piece in tensor.pieces:
                at = piece.box.offsets[dim] + end - tensor.shape[dim]
                box = Box(_with(piece.box.offsets, dim, at), piece.box.sizes)
                yield _Piece(piece.source, box, piece.view)

    return first.like(_with(first.shape, dim, ends[-1]), pieces())


def _stacked(tensors: Sequence[_Watched], dim: int = 0) -> _Watched:
    return _joined([_unsqueezed(tensor, dim) for tensor in tensors], dim)


def _reshaped(tensor: _Watched, sizes: Sequence[int]) -> _Watched:
    old, new = tuple(tensor.shape), list(sizes)
    if -1 in new:
        known = math.prod(size for size in new if size != -1)
        new[new.index(-1)] = tensor.numel() // known
    pieces = tensor.pieces if tensor.numel() else []
    for dim, of, others in reversed(_regrouped(old, tuple(new)) if pieces else []):
        pieces = [one for piece in pieces for one in _reflowed(piece, dim, of, others)]
    return tensor.like(new, pieces)


def _regrouped(
    old: tuple[int, ...], new: tuple[int, ...]
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Group adjacent dims of two shapes, so that the old and the new sizes of a group have the same product.

    The groups are as small as possible. For (4, 6) -> (4, 2, 3), they are (4,) -> (4,) and (6,) -> (2, 3).

    Returns:
        (index of the first old dim, old sizes, new sizes) of each group.
    """
    groups = []
    end = other_end = 0
    while end < len(old) or other_end < len(new):
        begin, other = end, other_end
        have = want = 1
        while have != want or (begin, other) == (end, other_end):
            if end < len(old) and have <= want:
                have *= old[end]
                end += 1
            else:
                want *= new[other_end]
                other_end += 1
        groups.append((begin, old[begin:end], new[other:other_end]))
    return groups


def _reflowed(
    piece: _Piece, dim: int, old: tuple[int, ...], new: tuple[int, ...]
) -> Iterator[_Piece]:
    """Reshape a piece: from dim `dim` on, the tensor has the sizes `new` instead of `old`. Yield the resulting pieces.

    Usually the result is one piece. If the piece is not a box in the new shape, or if torch cannot view it in this shape,
    cut the piece along an old dim, and reshape each part.
    """
    offsets, sizes, num_dims = piece.box.offsets, piece.box.sizes, len(old)
    low, held = offsets[dim : dim + num_dims], sizes[dim : dim + num_dims]
    first = next((at for at, size in enumerate(held) if size > 1), num_dims)
    if held[first + 1 :] == old[first + 1 :]:
        start = sum(i * step for i, step in zip(low, contiguous_strides(old, 1), strict=True))
        found = _box_of_range(start, math.prod(held), new)
        with suppress(RuntimeError):
            # torch raises if it cannot merge these dims into a view.
            if found is not None:
                view = piece.view.view(_with(sizes, dim, *found.sizes, num_dims=num_dims))
                at = _with(offsets, dim, *found.offsets, num_dims=num_dims)
                yield _Piece(piece.source, Box(at, tuple(view.shape)), view)
                return
    for index in range(held[first]):
        view = piece.view.narrow(dim + first, index, 1)
        at = _with(offsets, dim + first, low[first] + index)
        part = _Piece(piece.source, Box(at, tuple(view.shape)), view)
        yield from _reflowed(part, dim, old, new)


def _box_of_range(start: int, count: int, shape: tuple[int, ...]) -> Box | None:
    """Return elements [start, start + count) of a row-major array as a box; None if they do not form a box."""
    offsets, sizes = list[int](), list[int]()
    for size in reversed(shape):
        start, at = divmod(start, size)
        here = min(count, size)
        if at + here > size or count % here:
            return None
        count //= here
        offsets.insert(0, at)
        sizes.insert(0, here)
    return Box(tuple(offsets), tuple(sizes))


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
"""Operator that only moves elements -> function that moves the pieces. All `_Watched` tensors count as contiguous, so
that every reshape is a view."""
