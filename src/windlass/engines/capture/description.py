"""Turn the captured layout of one rank into a manifest, and into the computations that must follow every update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch

from windlass.element_ids.boxes import PlacedBox, TooManyBoxes
from windlass.element_ids.codes import Codes, bits_of
from windlass.element_ids.ids import ElementIds, Parts, parts_of, scaled
from windlass.engines.capture.checkpoint import quantized_tensors
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
"""Maximum number of boxes of one checkpoint tensor in one parameter.

If a parameter has more boxes, updates write a buffer, and `Repack` copies the buffer into the parameter.
"""


@dataclass(frozen=True, slots=True)
class Repack:
    """Copy of a buffer's elements into a parameter, made after every update.

    Updates cannot write such a parameter directly: the parameter has more than `MAX_BOXES` boxes, or the engine's loader
    multiplies the elements by a constant.

    Attributes:
        target: memory of the parameter, flat.
        buffer: memory that updates write, (n,), in checkpoint order.
        places: (m,) indices into `target`; `target[places]` gets `factor * buffer[elements]`.
        elements: (m,) indices into `buffer`.
        factor: constant of the engine's loader; the product is computed in the dtype of `target`.
    """

    name: str
    target: torch.Tensor
    buffer: torch.Tensor
    places: torch.Tensor
    elements: torch.Tensor
    factor: float = 1.0

    def apply(self) -> None:
        """Copy the buffer's elements into `target`, multiplied by `factor`."""
        values = scaled(self.buffer.to(self.target.dtype), self.factor)
        bits_of(self.target)[self.places] = bits_of(values)[self.elements]


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding of received values to the checkpoint's dtype, done after every update.

    Received values may be more precise than the checkpoint's dtype. A new engine that loads a checkpoint gets rounded
    values, so an updated engine must round the received values in the same way.

    Attributes:
        name: name of the parameter.
        parts: checkpoint tensor -> views of its elements in the memory that updates write.
        dtype: dtype of the checkpoint's tensors.
        received: views of the memory that updates write.
        targets: views of the parameter, of the same shapes. If updates write the parameter itself, `targets` is the
            same object as `received`.
    """

    name: str
    parts: Mapping[str, tuple[torch.Tensor, ...]]
    dtype: DType
    received: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]

    @property
    def in_place(self) -> bool:
        """True if updates write the parameter itself."""
        return self.received is self.targets

    def without(self, kept: Collection[str]) -> Rounding:
        """Return this rounding without the elements of the checkpoint tensors `kept`, because updates do not write them.

        A rounding that is not in place is returned unchanged: an engine cannot keep tensors of such a parameter.
        """
        if not self.in_place or self.parts.keys().isdisjoint(kept):
            return self
        written = (parts for name, parts in self.parts.items() if name not in kept)
        views = tuple(chain.from_iterable(written))
        return replace(self, received=views, targets=views)


_ROUNDED_AT_ONCE = 64 << 20
"""Number of bytes after which `_round` waits for the GPU. To wait for each of hundreds of tensors would be slow."""


def _round(roundings: Sequence[Rounding]) -> None:
    """Round the values that an update has written, and write the rounded values to the roundings' targets.

    Raises:
        TransferFailed: a finite value is too large for the dtype of the checkpoint.
    """
    nbytes = 0
    waiting: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for rounding in roundings:
        for received, target in zip(rounding.received, rounding.targets, strict=True):
            if not received.numel():
                continue
            rounded = received.to(torch_dtype(rounding.dtype))
            waiting.append((rounding.name, target, received, rounded))
            nbytes += rounded.nbytes
            if nbytes >= _ROUNDED_AT_ONCE:
                _write_rounded(waiting)
                waiting, nbytes = [], 0
    _write_rounded(waiting)


def _write_rounded(waiting: Sequence[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Write rounded values to their targets. Each item of `waiting` is (name, target, received, rounded).

    Raises:
        TransferFailed: rounding made a finite value infinite; see `copy_cast`.
    """
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
    """Captured layout of one rank.

    Attributes:
        manifest: manifest of the rank.
        addresses: addresses of the manifest's parameters, in order.
        repacks: copies from buffers into parameters, made after every update.
        constants: names of tensors that the engine's loader does not change (rotary caches, scales of 1).
        unplaced: names of checkpoint tensors that have no element in this rank's memory. Another rank may have them,
            or the engine keeps them in memory that the model's objects do not reference.
        unread: names in `unplaced` that the engine's loader did not read.
        recompute: partial load by the engine's own loader after every update; None if none is needed.
        roundings: roundings of received values, done after every update and before `repacks`.
        later: object that refills mirrors (the engine's own copies of weights) after every update, and searches for new
            mirrors.
        seconds: duration of each stage of the capture.
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
        """Names of the manifest's parameters for which updates write a buffer outside the model's memory."""
        received = () if self.recompute is None else self.recompute.parameters
        apart = (r.name for r in self.roundings if not r.in_place)
        return (*apart, *(repack.name for repack in self.repacks), *received)

    @property
    def rounded(self) -> dict[str, DType]:
        """Checkpoint tensor -> dtype to which this rank rounds its values after an update.

        Contains a tensor only if updates write its values directly into the parameter, not into a buffer
        (`Rounding.in_place`).
        """
        in_place = (rounding for rounding in self.roundings if rounding.in_place)
        return {tensor: found.dtype for found in in_place for tensor in found.parts}

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the engine's tensors that `recompute` loads after every update."""
        return () if self.recompute is None else self.recompute.names

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of all buffers outside the model's memory."""
        received = () if self.recompute is None else self.recompute.buffers
        buffers = [*(repack.buffer for repack in self.repacks), *(b for _, b in received)]
        buffers += [memory for r in self.roundings if not r.in_place for memory in r.received]
        return sum(buffer.nbytes for buffer in buffers)

    def finalise(self, kept: Collection[str] = ()) -> None:
        """Compute again all values that the engine derives from received bytes. Idempotent.

        Call this after every update, while the engine is quiesced.

        Args:
            kept: names of the checkpoint tensors that the update has not written.

        Raises:
            UnsupportedLayout: the engine's loader could not load the computed tensors again. The model's weights are
                then unknown.
            TransferFailed: a received value is too large for the dtype of the checkpoint.
        """
        # torch forbids writes to inference tensors outside inference mode.
        with torch.inference_mode():
            _round([rounding.without(kept) for rounding in self.roundings])
            for repack in self.repacks:
                repack.apply()
        touched = [repack.target for repack in self.repacks]
        touched += [target for rounding in self.roundings for target in rounding.targets]
        for device in {target.device for target in touched if target.is_cuda}:
            # The engine's next step may run on another stream.
            torch.cuda.synchronize(device)
        if self.recompute is not None:
            self.recompute.run()
        if self.later is not None:
            self.later.refill()

    def look(self) -> None:
        """Search for values that the engine has computed from weights since the capture or the previous search.

        Call this while the engine is quiesced, and before the next version writes into the weights.

        Raises:
            UnsupportedLayout: an update cannot refill such a value, or the engine has moved a tensor into which updates
                write.
        """
        if self.later is not None:
            self.later.look()

    def check_places(self) -> None:
        """Check that the tensors into which updates write still have the addresses that capture found. Read no values.

        Raises:
            UnsupportedLayout: the engine has moved a tensor.
        """
        if self.later is not None:
            self.later.check_places()


@dataclass(frozen=True, slots=True)
class Seen:
    """Tensors of the model, and the checkpoint elements in the tensors that a load changes.

    Attributes:
        holdings: tensors of the model, by name.
        numbers: numbers of the checkpoint elements in each tensor that a load changes, by name.
        factors: constant by which the engine's loader multiplies a tensor, by name; 1 for a missing name.
        constants: names of tensors that a load does not change.
        unproven: names of tensors that did not have the expected values after a load of random values. Capture must
            read every place of these tensors.
        computed: names of computed tensors; they are not in `numbers`.
    """

    holdings: Mapping[str, Holding]
    numbers: Mapping[str, ElementIds]
    factors: Mapping[str, float]
    constants: tuple[str, ...]
    unproven: frozenset[str]
    computed: frozenset[str]

    def boxes_of(self, name: str, codes: Codes) -> Parts | None:
        """Return the checkpoint tensors that have elements in the engine's tensor `name`, with the boxes of these elements.

        Return None if a checkpoint tensor has more than `MAX_BOXES` boxes.
        """
        return self.numbers[name].parts(codes, MAX_BOXES)

    def scattered(self, codes: Codes) -> frozenset[str]:
        """Return the names of the tensors that capture must read again, at every place.

        The result contains each tensor whose captured elements failed the check. If capture has read a tensor only in
        rows, the result contains it in two more cases: the loader multiplies the tensor by a factor, or one checkpoint
        tensor has more than `MAX_BOXES` boxes in it.
        """
        in_rows = {name for name, numbers in self.numbers.items() if not numbers.by_place}
        return self.unproven | {
            name
            for name in in_rows - self.unproven
            if name in self.factors or self.boxes_of(name, codes) is None
        }

    def sources(self, name: str, codes: Codes) -> set[str]:
        """Return the names of the checkpoint tensors that have elements in the engine's tensor `name`.

        `scattered` must not contain `name`.
        """
        if (parts := self.boxes_of(name, codes)) is not None:
            return {spec.name for spec, _ in parts}
        tensors = np.unique(codes.tensor_of(self.numbers[name].placed()[0]))
        return {codes.specs[index].name for index in tensors}

    def samples(self, name: str, codes: Codes, num_places: int) -> list[tuple[str, int, int]]:
        """Return about `num_places` sample elements of the engine's tensor `name`.

        The samples include at least one element of each checkpoint tensor in `sources`. Each sample is a tuple: the
        checkpoint tensor's name, the flat index in the checkpoint tensor, and the place in the engine's tensor.
        """
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
        """Return the names of the checkpoint tensors that have elements in this rank's tensors or in buffers of `recompute`."""
        placed = set() if recompute is None else {spec.name for spec, _ in recompute.buffers}
        filled = () if recompute is None else recompute.names
        return frozenset(
            placed.union(*(self.sources(n, codes) for n in self.numbers if n not in filled))
        )


def _spread(length: int, num_places: int) -> Iterator[int]:
    """Return `num_places` evenly spread indices below `length`, from fractional parts of multiples of the golden ratio."""
    return (int((number * 0.6180339887498949) % 1 * length) for number in range(1, num_places + 1))


def describe(
    seen: Seen,
    codes: Codes,
    worker: str,
    recompute: Recompute | None,
    placed: frozenset[str],
    read: frozenset[str],
    tied: Mapping[str, frozenset[str]],
) -> Captured:
    """Return the captured layout.

    The manifest does not contain tensors that the loader computes again after an update. In their place, it contains the
    buffers of `recompute`.

    `placed` has the names of the checkpoint tensors that have elements on this rank. `read` has the names of other
    checkpoint tensors that the engine's loader reads. `tied` maps each name of a tied parameter to all its names.

    Raises:
        UnsupportedLayout: the checkpoint elements in a tensor are scattered over too many boxes. Or they are scattered, and
            the tensor is too large to read every place. Or updates must send the checkpoint's dtype for a tensor, but the
            tensor's elements come from checkpoint tensors of several dtypes.
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
        if len(parts) == 1:
            for alias in _aliases(name, parts[0][0].name, tied.get(name, frozenset())) - placed:
                builder.add_alias(alias, parts[0][0].name)
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
"""Checkpoint dtypes to which received values are rounded. Quantised tensors are not rounded."""


def _received_dtype(name: str, holding: Holding, parts: Parts) -> DType:
    """Return the dtype that updates send for a tensor.

    Usually this is the dtype of the engine's tensor. If the engine's tensor is bfloat16 and its checkpoint tensor is
    float16, the engine's loader rounds each value to float16 and then to bfloat16 (or the reverse). So updates send the
    checkpoint's dtype, and the engine rounds the received values to its own.

    Raises:
        UnsupportedLayout: the checkpoint's dtype is needed, but the checkpoint tensors have several dtypes; or Windlass does
            not know the dtype of the engine's tensor.
    """
    own, stored = dtype_of(name, holding.tensor), {spec.dtype for spec, _ in parts}
    if own not in _HALVES or not stored & {*_HALVES} - {own}:
        return own
    if len(stored) > 1:
        raise UnsupportedLayout(
            f"{name}: the checkpoint tensors of this {own} parameter must have one dtype, got {sorted(stored)}; "
            "otherwise the engine must store the parameter in float32"
        )
    return stored.pop()


def _roundings(
    name: str, memory: torch.Tensor, target: torch.Tensor, parts: Parts
) -> Iterator[Rounding]:
    """Yield one `Rounding` for each half-precision checkpoint dtype of a parameter that has another dtype.

    An engine that loads the checkpoint has values of this dtype. So an update must round the trainer's values to it too.

    `memory` is the memory that updates write, and `target` is the memory of the parameter; both may be the same. `parts`
    contains the checkpoint tensors in the parameter, with their boxes.
    """
    own = dtype_of(name, memory)
    apart = target.dtype is not memory.dtype
    for stored in sorted({spec.dtype for spec, _ in parts} & {*_HALVES}):
        if stored is own and not apart:
            continue
        given = defaultdict[str, list[PlacedBox]](list)
        for spec, placed in parts:
            if spec.dtype is stored:
                given[spec.name] += placed
        boxes = [*chain.from_iterable(given.values())]
        received = _views(memory, boxes)
        targets = _views(target, boxes) if apart else received
        views = {tensor: _boxes_in(memory, own_boxes) for tensor, own_boxes in given.items()}
        yield Rounding(name, views, stored, received, targets)


def _views(memory: torch.Tensor, boxes: Sequence[PlacedBox]) -> tuple[torch.Tensor, ...]:
    """Return one view of the memory per box, or a single view if the boxes fill all of the memory."""
    if sum(placed.box.numel for placed in boxes) == len(memory):
        return (memory,)
    return _boxes_in(memory, boxes)


def _boxes_in(memory: torch.Tensor, boxes: Sequence[PlacedBox]) -> tuple[torch.Tensor, ...]:
    """Return one view of the memory per box."""
    first = memory.storage_offset()
    return tuple(
        memory.as_strided(placed.box.sizes, placed.strides, first + placed.offset)
        for placed in boxes
    )


def _add_parameter(
    builder: ManifestBuilder, name: str, dtype: DType, numel: int, parts: Parts
) -> None:
    """Add a parameter of `numel` elements to the manifest. Elements outside all boxes of `parts` are padding."""
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


def _aliases(name: str, tensor: str, tied: frozenset[str]) -> set[str]:
    """Return the other names under which a checkpoint may have a tied parameter, such as the output matrix.

    The engine and the checkpoint use different prefixes. Use the parameter's other names in the engine, and replace the
    engine's prefix with the checkpoint's. For example, `name` is `model.embed.weight`, `tensor` is `embed.weight`, and
    `tied` also has `model.head.weight`. The engine's prefix is then `model.`, and the checkpoint's prefix is empty, so
    return `head.weight`.

    Args:
        name: name of the parameter in the engine.
        tensor: name of its tensor in the checkpoint.
        tied: all names of the parameter in the engine.
    """
    # Compare whole components of both names, from the end.
    mine, stored = name.split("."), tensor.split(".")
    while mine and stored and mine[-1] == stored[-1]:
        mine.pop()
        stored.pop()
    own, other = (f"{'.'.join(each)}." if each else "" for each in (mine, stored))
    found = {f"{other}{alias.removeprefix(own)}" for alias in tied if alias.startswith(own)}
    return found - {tensor}


def _add_buffers(builder: ManifestBuilder, recompute: Recompute) -> list[int]:
    """Add the buffers of `recompute` to the manifest and return the buffers' addresses."""
    for parameter, (spec, buffer) in zip(recompute.parameters, recompute.buffers, strict=True):
        builder.add_parameter(parameter, nbytes=buffer.nbytes, dtype=spec.dtype)
        builder.add_shard(spec.name, spec.shape, Box.full(spec.shape), parameter)
    return [buffer.data_ptr() for _, buffer in recompute.buffers]


def _repack(
    name: str, holding: Holding, codes: Codes, numbers: ElementIds, factor: float
) -> tuple[Repack, Parts]:
    """Return how an update fills a parameter from a buffer (`Repack`), and the boxes of the checkpoint tensors in the buffer.

    The buffer contains each element once, in checkpoint order.

    Raises:
        UnsupportedLayout: capture has not read every place of the parameter. Or a checkpoint tensor has more than
            `MAX_BOXES` boxes in the buffer. Or updates must send the checkpoint's dtype, but the parameter's
            checkpoint tensors have several dtypes.
    """
    if not numbers.by_place:
        raise UnsupportedLayout(
            f"{name}: checkpoint elements are scattered in this tensor, which is too large for capture to read every "
            "element"
        )
    values, written = numbers.placed()
    unique, elements = np.unique(values, return_inverse=True)
    try:
        parts = parts_of(codes, unique, np.arange(len(unique)), MAX_BOXES)
    except TooManyBoxes as error:
        raise UnsupportedLayout(
            f"{name}: checkpoint elements in this tensor are scattered over more than {MAX_BOXES} boxes"
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
