"""Run the engine's own loader on coded tensors and read off what went where.

`load` is the engine's way from checkpoint tensors to memory that serves, post-processing
included. It runs once per digit of an element number and twice with ordinary values. The digits
say which checkpoint element lies at every place; the ordinary values prove it bit for bit. What
the loader permutes, pads, splits, fuses or repeats is a copy and is followed; what it computes
(a dequantised weight, `weight + 1`) fails the proof and is refused by name.

The idea of running a loader on tensors that remember where they came from is that of vLLM's
sharded weight transfer; carrying coordinates in the values needs no operator coverage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from windlass.engines.capture.boxes import PlacedBox, TooManyBoxes, boxes_of
from windlass.engines.capture.codes import BASE, CheckpointSpec, Codes
from windlass.engines.capture.memory import Holding, Kind, held_by
from windlass.errors import UnsupportedLayout
from windlass.frameworks.dtypes import dtype_of, torch_dtype
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest

__all__ = ["Captured", "Load", "Repack", "capture"]

Int64Array = npt.NDArray[np.int64]
Load = Callable[[Iterator[tuple[str, torch.Tensor]]], None]
"""Loads a checkpoint into the model; the tensors belong to it from then on."""

MAX_BOXES = 256
"""Boxes of one tensor in one parameter; what is more scattered is received apart and repacked."""


@dataclass(frozen=True, slots=True)
class Repack:
    """A parameter whose element order is no set of boxes: filled from a buffer after every update.

    Attributes:
        name: of the parameter.
        target: the parameter's memory, (reach,).
        buffer: (n,) what updates write instead, in checkpoint order.
        places: (n,) index into `target` of every element of `buffer`[`elements`].
        elements: (n,) index into `buffer`.
    """

    name: str
    target: torch.Tensor
    buffer: torch.Tensor
    places: torch.Tensor
    elements: torch.Tensor

    def apply(self) -> None:
        """Put the buffer's elements where the engine wants them."""
        self.target[self.places] = self.buffer[self.elements]


@dataclass(frozen=True, slots=True)
class Captured:
    """What was learnt of one rank.

    Attributes:
        manifest: of the rank. addresses: of its parameters, in order. extents: (address, bytes).
        repacks: to be applied after every update.
        constants: tensors that no checkpoint changes (rotary caches, scales of 1).
        unplaced: checkpoint tensors that left no trace on this rank (other ranks' experts, or a
            copy that the engine hides from its model).
    """

    manifest: ShardManifest
    addresses: tuple[int, ...]
    repacks: tuple[Repack, ...]
    constants: tuple[str, ...]
    unplaced: tuple[str, ...]

    @property
    def repacked(self) -> tuple[str, ...]:
        """Names of the parameters that updates do not reach directly."""
        return tuple(repack.name for repack in self.repacks)

    def finalise(self) -> None:
        """Bring state that is derived from received bytes up to date. Idempotent."""
        for repack in self.repacks:
            repack.apply()


def capture(
    model: torch.nn.Module,
    specs: Sequence[CheckpointSpec],
    load: Load,
    *,
    worker: str,
    ignored: frozenset[int] = frozenset(),
    reference: Callable[[], Iterator[tuple[str, torch.Tensor]]] | None = None,
) -> Captured:
    """Learn the layout of a model that serves nobody yet. Its weights are restored at the end.

    Memory: a copy of every tensor of the model, and 8 bytes per element of it.

    Args:
        model: of this rank.
        specs: the whole checkpoint.
        load: see `Load`.
        worker: identity of the rank.
        ignored: see `held_by`.
        reference: reads the checkpoint that the model was first loaded from. An engine's way of
            loading again may skip what it did at the start (repacking for a kernel); where the
            bytes after it are not those of the first load, the layout is refused.

    Raises:
        UnsupportedLayout: a tensor that is computed and not copied, a parameter that the loader
            does not write, memory that moves with every load; names all of them.
    """
    before = {name: h.memory().clone() for name, h in held_by(model, ignored).items()}
    try:
        seen = _observe(model, Codes(specs), load, ignored)
        if reference is not None:
            load(reference())
            _require_repeated(held_by(model, ignored), before)
    finally:
        _restore(held_by(model, ignored), before)
    return _describe(seen, Codes(specs), worker)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Holdings, and per name the element number at every place: -1 where no element lies."""

    holdings: Mapping[str, Holding]
    numbers: Mapping[str, Int64Array]
    constants: tuple[str, ...]


def _observe(model: torch.nn.Module, codes: Codes, load: Load, ignored: frozenset[int]) -> _Seen:
    numbers: dict[str, Int64Array] = {}
    first: dict[str, torch.Tensor] = {}
    load(codes.random(0))
    first.update({name: h.memory().clone() for name, h in held_by(model, ignored).items()})
    load(codes.random(1))
    held = held_by(model, ignored)
    second = {name: h.memory().clone() for name, h in held.items()}
    changing = [n for n, t in second.items() if n not in first or not _same(t, first[n])]
    constants = tuple(n for n in held if n not in changing)
    idle = [n for n in constants if held[n].kind is Kind.PARAMETER]
    if idle:
        _require_written(model, codes, load, idle, ignored)
    held = held_by(model, ignored)
    places = {name: h.address for name, h in held.items()}
    for position in range(codes.num_digits):
        load(codes.digits(position))
        held = held_by(model, ignored)
        for name in changing:
            digit = _digit(held[name])
            numbers[name] = numbers.get(name, 0) + np.where(digit < 0, 0, digit) * BASE**position
            numbers[name][digit < 0] = np.iinfo(np.int64).min // 2
    moved = [
        name
        for name in changing
        if held[name].address != places[name]
        and (held[name].kind is not Kind.ATTRIBUTE or held[name].tensor.device.type != "cpu")
    ]
    if moved:
        raise UnsupportedLayout(f"{moved}: tensors that move with every load")
    computed = [
        name
        for name in changing
        if not _proven(held[name], numbers[name], codes, (first.get(name), second[name]))
    ]
    if computed:
        raise UnsupportedLayout(f"{computed}: tensors that the engine computes from the checkpoint")
    return _Seen(held, {n: np.maximum(numbers[n], -1) for n in changing}, constants)


def _require_written(
    model: torch.nn.Module, codes: Codes, load: Load, idle: Sequence[str], ignored: frozenset[int]
) -> None:
    """A parameter that is all padding on this rank is written too, always with the same."""
    held = held_by(model, ignored)
    constant = {name: held[name].memory().clone() for name in idle}
    for name in idle:
        held[name].memory().view(torch.uint8).fill_(0x55)
    load(codes.random(1))
    held = held_by(model, ignored)
    unwritten = [name for name in idle if not _same(held[name].memory(), constant[name])]
    if unwritten:
        raise UnsupportedLayout(f"{unwritten}: parameters that the engine's loader does not write")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _digit(holding: Holding) -> Int64Array:
    """The digit at every place, -1 for none."""
    values = holding.memory().double().cpu().numpy()
    digit = np.rint(np.nan_to_num(values, nan=-1.0, posinf=-1.0, neginf=-1.0)).astype(np.int64) - 1
    return np.where((digit >= BASE) | (values != digit + 1), -1, digit)


def _proven(
    holding: Holding,
    numbers: Int64Array,
    codes: Codes,
    loads: tuple[torch.Tensor | None, torch.Tensor],
) -> bool:
    """Whether both loads of ordinary values lie where the numbers say, and nothing else changed."""
    if numbers.max(initial=-1) >= codes.starts[-1]:
        return False
    if loads[0] is None or loads[0].shape != loads[1].shape:
        return False
    dtype = holding.tensor.dtype
    written = np.flatnonzero(numbers >= 0)
    tensors = codes.tensor_of(numbers[written])
    for seed, got in enumerate((loads[0], loads[1])):
        expected = loads[0].clone()
        for index in np.unique(tensors).tolist():
            chosen = written[tensors == index]
            flat = codes.random_tensor(index, seed).reshape(-1).to(dtype)
            element = torch.from_numpy(numbers[chosen] - codes.starts[index])
            expected[torch.from_numpy(chosen)] = flat[element].to(expected.device)
        if not _same(expected, got):
            return False
    return True


def _require_repeated(held: Mapping[str, Holding], before: Mapping[str, torch.Tensor]) -> None:
    changed = [n for n, h in held.items() if n in before and not _same(h.memory(), before[n])]
    if changed:
        raise UnsupportedLayout(
            f"{changed}: loading the engine's own checkpoint again gives other bytes than its start "
            f"gave: the engine does not repeat its post-processing, or was not started from it"
        )


def _restore(held: Mapping[str, Holding], before: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, holding in held.items():
            if name in before and before[name].shape == (holding.reach,):
                holding.memory().copy_(before[name])


def _describe(seen: _Seen, codes: Codes, worker: str) -> Captured:
    builder = ManifestBuilder(worker, Role.ENGINE)
    addresses: list[int] = []
    repacks: list[Repack] = []
    placed: set[int] = set()
    for name, numbers in seen.numbers.items():
        holding = seen.holdings[name]
        written = np.flatnonzero(numbers >= 0)
        placed.update(np.unique(codes.tensor_of(numbers[written])).tolist())
        itemsize = holding.tensor.element_size()
        dtype = dtype_of(holding.tensor)
        try:
            parts = _parts(codes, numbers[written], written)
            address, extent = holding.address, holding.reach
        except TooManyBoxes:
            repack, parts = _repack(name, holding, codes, numbers, written)
            repacks.append(repack)
            address, extent = repack.buffer.data_ptr(), len(repack.buffer)
        described = sum(part.box.numel for _, boxes in parts for part in boxes)
        builder.add_parameter(
            name,
            nbytes=extent * itemsize,
            dtype=dtype,
            padding_nbytes=(extent - described) * itemsize,
        )
        addresses.append(address)
        for spec, boxes in parts:
            for part in boxes:
                builder.add_shard(
                    spec.name,
                    spec.shape,
                    part.box,
                    name,
                    offset_bytes=part.offset * itemsize,
                    strides_bytes=tuple(step * itemsize for step in part.strides),
                )
    return Captured(
        manifest=builder.build(),
        addresses=tuple(addresses),
        repacks=tuple(repacks),
        constants=seen.constants,
        unplaced=tuple(s.name for i, s in enumerate(codes.specs) if i not in placed and s.numel),
    )


_Parts = list[tuple[CheckpointSpec, tuple[PlacedBox, ...]]]


def _parts(codes: Codes, numbers: Int64Array, places: Int64Array) -> _Parts:
    tensors = codes.tensor_of(numbers)
    parts: _Parts = []
    for index in np.unique(tensors).tolist():
        chosen = tensors == index
        spec = codes.specs[index]
        flat = numbers[chosen] - codes.starts[index]
        parts.append((spec, boxes_of(spec.shape, flat, places[chosen], limit=MAX_BOXES)))
    return parts


def _repack(
    name: str, holding: Holding, codes: Codes, numbers: Int64Array, written: Int64Array
) -> tuple[Repack, _Parts]:
    """A buffer that holds the parameter's elements in checkpoint order, each once."""
    unique, elements = np.unique(numbers[written], return_inverse=True)
    try:
        parts = _parts(codes, unique, np.arange(len(unique)))
    except TooManyBoxes as error:
        raise UnsupportedLayout(
            f"{name}: its checkpoint elements are scattered over more than {MAX_BOXES} boxes"
        ) from error
    device = holding.tensor.device
    repack = Repack(
        name=name,
        target=holding.memory(),
        buffer=torch.zeros(len(unique), dtype=torch_dtype(dtype_of(holding.tensor)), device=device),
        places=torch.from_numpy(written).to(device),
        elements=torch.from_numpy(elements.reshape(-1)).to(device),
    )
    return repack, parts
