"""What was captured of one rank, as a manifest and what has to be done after every update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from windlass.engines.capture.boxes import PlacedBox, TooManyBoxes
from windlass.engines.capture.codes import Codes, bits_of, quantized_tensors
from windlass.engines.capture.element_ids import ElementIds, Parts, parts_of, scaled
from windlass.engines.capture.memory import Holding
from windlass.engines.capture.mirrors import Later
from windlass.engines.capture.recompute import Recompute
from windlass.errors import UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory.packing import copy_cast
from windlass.memory.torch_dtypes import dtype_of, torch_dtype

MAX_BOXES = 256
"""Boxes of one tensor in one parameter; what is more scattered is received apart and repacked."""


@dataclass(frozen=True, slots=True)
class Repack:
    """A parameter that no copy fills: filled from a buffer after every update.

    Its element order is no set of boxes, or the engine multiplies its elements while it loads.

    Attributes:
        target: the parameter's memory, (reach,).
        buffer: (n,) what updates write instead, in checkpoint order; of the type of `target`, or of
            the checkpoint if that has values which `target` cannot hold.
        places: (n,) index into `target` of every element of `buffer`[`elements`].
        elements: (n,) index into `buffer`.
        factor: of every element, multiplied in the type of `target`.
    """

    name: str
    target: torch.Tensor
    buffer: torch.Tensor
    places: torch.Tensor
    elements: torch.Tensor
    factor: float = 1.0

    def apply(self) -> None:
        """Put the buffer's elements where the engine wants them."""
        values = scaled(self.buffer.to(self.target.dtype), self.factor)
        bits_of(self.target)[self.places] = bits_of(values)[self.elements]


@dataclass(frozen=True, slots=True)
class Rounding:
    """Elements that an update leaves with more than their checkpoint's type holds.

    A fresh engine has loaded them from that type, so after every update they are rounded to it and
    cast to the engine's type, as its loader would.

    Attributes:
        dtype: of the checkpoint's tensors.
        received: views of the memory that updates write.
        targets: of the parameter, as many of the same shapes; the same views where the parameter's
            type holds every value that updates bring and the checkpoint's type besides.
    """

    name: str
    dtype: torch.dtype
    received: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]

    @property
    def in_place(self) -> bool:
        """Whether updates write the parameter itself."""
        return self.received is self.targets


_ROUNDED_AT_ONCE = 64 << 20
"""Bytes. A GPU is waited for once per so many, and not per tensor: engines have hundreds of small ones."""


def _round(roundings: Sequence[Rounding]) -> None:
    """Round what updates have written; raise TransferFailed for a finite value too large for its checkpoint's type."""
    nbytes = 0
    waiting: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for rounding in roundings:
        for received, target in zip(rounding.received, rounding.targets, strict=True):
            if not received.numel():
                continue
            rounded = received.to(rounding.dtype)
            waiting.append((rounding.name, target, received, rounded))
            nbytes += rounded.nbytes
            if nbytes >= _ROUNDED_AT_ONCE:
                _put(waiting)
                waiting, nbytes = [], 0
    _put(waiting)


def _put(waiting: Sequence[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Write rounded values to their targets, unless one is infinite that was not."""
    bounds = defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]](list)
    for _, _, _, rounded in waiting:
        bounds[rounded.device, rounded.dtype] += rounded.aminmax()
    if not all(bool(torch.stack(found).isfinite().all()) for found in bounds.values()):
        for name, _, received, rounded in waiting:
            copy_cast(rounded, received, name)
    for _, target, _, rounded in waiting:
        target.copy_(rounded)


@dataclass(frozen=True, slots=True)
class Captured:
    """What was captured of one rank.

    Attributes:
        manifest: of the rank. addresses: of its parameters, in order.
        repacks: to be applied after every update.
        constants: tensors that no checkpoint changes (rotary caches, scales of 1).
        unplaced: checkpoint tensors that left no trace on this rank (other ranks' experts, or a
            copy that the engine hides from its model).
        unread: those of `unplaced` at whose elements the loader did not look.
        recompute: what the engine's own loader has to do after every update, if anything.
        roundings: to be applied after every update, before the repacks.
        later: fills copies of weights that no load refreshes, and finds new ones.
        seconds: that the stages of capture took.
    """

    manifest: ShardManifest
    addresses: tuple[int, ...]
    repacks: tuple[Repack, ...]
    constants: tuple[str, ...]
    unplaced: tuple[str, ...]
    unread: tuple[str, ...] = ()
    recompute: Recompute | None = None
    roundings: tuple[Rounding, ...] = ()
    later: Later | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def repacked(self) -> tuple[str, ...]:
        """Names of the manifest's parameters that are buffers, and no memory of the model."""
        received = () if self.recompute is None else self.recompute.parameters
        apart = (r.name for r in self.roundings if not r.in_place)
        return (*apart, *(repack.name for repack in self.repacks), *received)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the engine's tensors that its loader fills after every update."""
        return () if self.recompute is None else self.recompute.names

    @property
    def buffer_nbytes(self) -> int:
        """Return what the buffers take besides the model."""
        received = () if self.recompute is None else self.recompute.buffers
        buffers = [*(repack.buffer for repack in self.repacks), *(b for _, b in received)]
        buffers += [memory for r in self.roundings if not r.in_place for memory in r.received]
        return sum(buffer.nbytes for buffer in buffers)

    def finalise(self) -> None:
        """Bring state that is derived from received bytes up to date. Idempotent.

        Raises:
            UnsupportedLayout, TransferFailed: see `Recompute.run`; a value that is rounded overflows.
        """
        with torch.inference_mode():  # as tensors that were made in it demand
            _round(self.roundings)
            for repack in self.repacks:
                repack.apply()
        touched = [repack.target for repack in self.repacks]
        touched += [target for rounding in self.roundings for target in rounding.targets]
        for device in {target.device for target in touched if target.is_cuda}:
            torch.cuda.synchronize(device)  # the engine's next step may run on another stream
        if self.recompute is not None:
            self.recompute.run()
        if self.later is not None:
            self.later.refill()

    def look(self) -> None:
        """Look for values that the engine has derived from weights since its capture; see `Later.look`."""
        if self.later is not None:
            self.later.look()


@dataclass(frozen=True, slots=True)
class Seen:
    """Holdings, and per name of those that a load changes, what lies where.

    Attributes:
        unproven: their rows mislead: they are to be read place by place.
        computed: no copy of checkpoint elements; not in `numbers`.
    """

    holdings: Mapping[str, Holding]
    numbers: Mapping[str, ElementIds]
    factors: Mapping[str, float]
    constants: tuple[str, ...]
    unproven: frozenset[str]
    computed: frozenset[str]

    def boxes_of(self, name: str, codes: Codes) -> Parts | None:
        """Return the boxes of one tensor; None if they are too many."""
        return self.numbers[name].parts(codes, MAX_BOXES)

    def scattered(self, codes: Codes) -> frozenset[str]:
        """Return the names of the tensors that have to be read place by place."""
        in_rows = {name for name, numbers in self.numbers.items() if not numbers.by_place}
        return self.unproven | {
            name
            for name in in_rows - self.unproven
            if name in self.factors or self.boxes_of(name, codes) is None
        }

    def sources(self, name: str, codes: Codes) -> set[str]:
        """Return the checkpoint tensors of which an engine's tensor, not to be read by place any more, holds elements."""
        if (parts := self.boxes_of(name, codes)) is not None:
            return {spec.name for spec, _ in parts}
        tensors = np.unique(codes.tensor_of(self.numbers[name].placed()[0]))
        return {codes.specs[index].name for index in tensors}

    def samples(self, name: str, codes: Codes, num_places: int) -> list[tuple[str, int, int]]:
        """Return some elements of each of its `sources`, `num_places` or more: tensor, place in it, place in the memory."""
        if (parts := self.boxes_of(name, codes)) is not None:
            boxes = [(spec, placed) for spec, boxes in parts for placed in boxes]
            return [
                (spec.name, *placed.element(spec.shape, number))
                for spec, placed in boxes
                for number in _spread(placed.box.numel, -(-num_places // len(boxes)))
            ]
        numbers, places = self.numbers[name].placed()
        tensors = codes.tensor_of(numbers)
        chosen = {*np.unique(tensors, return_index=True)[1], *_spread(len(numbers), num_places)}
        return [
            (codes.specs[t].name, int(numbers[at] - codes.starts[t]), int(places[at]))
            for at in sorted(chosen)
            for t in (tensors[at],)
        ]

    def placed(self, codes: Codes, recompute: Recompute | None) -> frozenset[str]:
        """Return the checkpoint tensors of which the engine holds elements; see `sources`."""
        placed = set() if recompute is None else {spec.name for spec, _ in recompute.buffers}
        filled = () if recompute is None else recompute.names
        return frozenset(
            placed.union(*(self.sources(n, codes) for n in self.numbers if n not in filled))
        )


def _spread(length: int, num_places: int) -> Iterator[int]:
    """Yield numbers below `length`: multiples of the golden ratio, whose fractions are dense nowhere."""
    return (int((number * 0.6180339887498949) % 1 * length) for number in range(1, num_places + 1))


def describe(
    seen: Seen,
    codes: Codes,
    worker: str,
    recompute: Recompute | None,
    placed: frozenset[str],
    read: frozenset[str],
) -> Captured:
    """Return what was captured, none of which has to be read place by place.

    What `recompute` fills has no place of its own in the manifest: its buffers have. `placed`: see `Seen.placed`;
    `read`: of the other checkpoint tensors those at whose elements the loader looks.
    """
    builder = ManifestBuilder(worker, Role.ENGINE)
    addresses: list[int] = []
    roundings: list[Rounding] = []
    repacks: list[Repack] = []
    filled = () if recompute is None else recompute.names
    for name, numbers in seen.numbers.items():
        if name in filled:
            continue
        holding = seen.holdings[name]
        factor = seen.factors.get(name, 1.0)
        copied = seen.boxes_of(name, codes) if factor == 1.0 else None
        if copied is not None:
            parts, memory = copied, holding.memory()
            dtype = _received_dtype(name, holding, parts)
            if dtype is not dtype_of(name, memory):
                memory = torch.zeros_like(memory, dtype=torch_dtype(dtype))
        else:
            repack, parts = _repack(name, holding, codes, numbers, factor)
            repacks.append(repack)
            memory = repack.buffer
            dtype = dtype_of(name, memory)
        target = memory if copied is None else holding.memory()
        roundings += _roundings(name, memory, target, parts)
        _add_parameter(builder, name, dtype, len(memory), parts)
        addresses.append(memory.data_ptr())
    if recompute is not None:
        addresses += _add_buffers(builder, recompute)
    for quantized in quantized_tensors(codes.specs):
        if quantized.weight in placed and quantized.scale in placed:
            builder.add_quantized(quantized)
    unplaced = [s.name for s in codes.specs if s.name not in placed and s.numel]
    return Captured(
        manifest=builder.build(),
        addresses=tuple(addresses),
        roundings=tuple(roundings),
        repacks=tuple(repacks),
        constants=seen.constants,
        unplaced=tuple(unplaced),
        unread=tuple(name for name in unplaced if name not in read),
        recompute=recompute,
    )


_HALVES = (DType.BFLOAT16, DType.FLOAT16)
"""Types to which wider values are rounded; what is quantised has rules of its own."""


def _received_dtype(name: str, holding: Holding, parts: Parts) -> DType:
    """Return the type in which updates bring a tensor: its own, unless that cannot hold the checkpoint's one type."""
    own, stored = dtype_of(name, holding.tensor), {spec.dtype for spec, _ in parts}
    if own not in _HALVES or not stored & {*_HALVES} - {own}:
        return own
    if len(stored) > 1:
        raise UnsupportedLayout(
            f"{name}: its checkpoint tensors must be of one type, or the engine's tensor of float32, "
            f"got {sorted(stored)} for {own}"
        )
    return stored.pop()


def _roundings(
    name: str, memory: torch.Tensor, target: torch.Tensor, parts: Parts
) -> Iterator[Rounding]:
    """Yield what turns `memory`, which updates write, into what a load of the checkpoint leaves in `target`."""
    own = dtype_of(name, memory)
    apart = target.dtype is not memory.dtype
    for stored in sorted({spec.dtype for spec, _ in parts} & {*_HALVES}):
        if stored is own and not apart:
            continue
        boxes = [box for spec, boxes in parts if spec.dtype is stored for box in boxes]
        received = _views(memory, boxes)
        targets = _views(target, boxes) if apart else received
        yield Rounding(name, torch_dtype(stored), received, targets)


def _views(memory: torch.Tensor, boxes: Sequence[PlacedBox]) -> tuple[torch.Tensor, ...]:
    """Return views of boxes in a tensor's memory; one of all of it, if they are that."""
    if sum(placed.box.numel for placed in boxes) == len(memory):
        return (memory,)
    first = memory.storage_offset()
    return tuple(
        memory.as_strided(placed.box.sizes, placed.strides, first + placed.offset)
        for placed in boxes
    )


def _add_parameter(
    builder: ManifestBuilder, name: str, dtype: DType, numel: int, parts: Parts
) -> None:
    """Add a parameter of `numel` elements; what no part describes of it is padding."""
    described = sum(part.box.numel for _, boxes in parts for part in boxes)
    builder.add_parameter(
        name,
        nbytes=numel * dtype.itemsize,
        dtype=dtype,
        padding_nbytes=(numel - described) * dtype.itemsize,
    )
    for spec, boxes in parts:
        for part in boxes:
            builder.add_shard(
                spec.name,
                spec.shape,
                part.box,
                name,
                offset_bytes=part.offset * dtype.itemsize,
                strides_bytes=tuple(step * dtype.itemsize for step in part.strides),
            )


def _add_buffers(builder: ManifestBuilder, recompute: Recompute) -> list[int]:
    """Add buffers of whole checkpoint tensors; return their addresses."""
    for parameter, (spec, buffer) in zip(recompute.parameters, recompute.buffers, strict=True):
        builder.add_parameter(parameter, nbytes=buffer.nbytes, dtype=spec.dtype)
        builder.add_shard(spec.name, spec.shape, Box.full(spec.shape), parameter)
    return [buffer.data_ptr() for _, buffer in recompute.buffers]


def _repack(
    name: str, holding: Holding, codes: Codes, numbers: ElementIds, factor: float
) -> tuple[Repack, Parts]:
    """Make a buffer that holds the parameter's elements in checkpoint order, each once."""
    if not numbers.by_place:
        raise UnsupportedLayout(
            f"{name}: its checkpoint elements are scattered, and too many to be read one by one"
        )
    values, written = numbers.placed()
    unique, elements = np.unique(values, return_inverse=True)
    try:
        parts = parts_of(codes, unique, np.arange(len(unique)), MAX_BOXES)
    except TooManyBoxes as error:
        raise UnsupportedLayout(
            f"{name}: its checkpoint elements are scattered over more than {MAX_BOXES} boxes"
        ) from error
    device = holding.tensor.device
    dtype = torch_dtype(_received_dtype(name, holding, parts))
    repack = Repack(
        name=name,
        target=holding.memory(),
        buffer=torch.zeros(len(unique), dtype=dtype, device=device),
        places=torch.from_numpy(written).to(device),
        elements=torch.from_numpy(elements.reshape(-1)).to(device),
        factor=factor,
    )
    return repack, parts
