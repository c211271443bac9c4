"""What was learnt of one rank, as a manifest and what has to be done after every update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from windlass.engines.capture.boxes import TooManyBoxes
from windlass.engines.capture.codes import Codes, bits_of, quantized_tensors
from windlass.engines.capture.factors import scaled
from windlass.engines.capture.memory import Holding
from windlass.engines.capture.numbers import Exact, Numbers, Parts, parts_of
from windlass.engines.capture.recompute import Recompute
from windlass.errors import UnsupportedLayout
from windlass.frameworks.dtypes import dtype_of
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest

__all__ = ["Captured", "Repack", "Seen", "describe"]

MAX_BOXES = 256
"""Boxes of one tensor in one parameter; what is more scattered is received apart and repacked."""


@dataclass(frozen=True, slots=True)
class Repack:
    """A parameter that no copy fills: filled from a buffer after every update.

    Its element order is no set of boxes, or the engine multiplies its elements while it loads.

    Attributes:
        name: of the parameter.
        target: the parameter's memory, (reach,).
        buffer: (n,) what updates write instead, in checkpoint order.
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
        values = scaled(self.buffer, self.factor)
        bits_of(self.target)[self.places] = bits_of(values)[self.elements]


@dataclass(frozen=True, slots=True)
class Captured:
    """What was learnt of one rank.

    Attributes:
        manifest: of the rank. addresses: of its parameters, in order.
        repacks: to be applied after every update.
        constants: tensors that no checkpoint changes (rotary caches, scales of 1).
        unplaced: checkpoint tensors that left no trace on this rank (other ranks' experts, or a
            copy that the engine hides from its model).
        recompute: what the engine's own loader has to do after every update, if anything.
    """

    manifest: ShardManifest
    addresses: tuple[int, ...]
    repacks: tuple[Repack, ...]
    constants: tuple[str, ...]
    unplaced: tuple[str, ...]
    recompute: Recompute | None = None

    @property
    def repacked(self) -> tuple[str, ...]:
        """Names of the manifest's parameters that are buffers, and no memory of the model."""
        received = () if self.recompute is None else self.recompute.parameters
        return (*(repack.name for repack in self.repacks), *received)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the engine's tensors that its loader fills after every update."""
        return () if self.recompute is None else self.recompute.names

    @property
    def buffer_nbytes(self) -> int:
        """What the buffers take besides the model."""
        received = () if self.recompute is None else self.recompute.buffers
        buffers = [*(repack.buffer for repack in self.repacks), *(b for _, b in received)]
        return sum(buffer.nbytes for buffer in buffers)

    def finalise(self) -> None:
        """Bring state that is derived from received bytes up to date. Idempotent.

        Raises:
            UnsupportedLayout: see `Recompute.run`.
        """
        for repack in self.repacks:
            repack.apply()
        for device in {repack.target.device for repack in self.repacks if repack.target.is_cuda}:
            torch.cuda.synchronize(device)  # the engine's next step may run on another stream
        if self.recompute is not None:
            self.recompute.run()

    def filling(
        self, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors; those that the loader recomputes from are kept on the way."""
        return weights if self.recompute is None else self.recompute.filling(weights)


@dataclass(frozen=True, slots=True)
class Seen:
    """Holdings, and per name of those that a load changes, what lies where.

    Attributes:
        unproven: their rows mislead: they are to be read place by place.
        computed: no copy of checkpoint elements; not in `numbers`.
    """

    holdings: Mapping[str, Holding]
    numbers: Mapping[str, Numbers]
    factors: Mapping[str, float]
    constants: tuple[str, ...]
    unproven: frozenset[str]
    computed: frozenset[str]


def describe(
    seen: Seen, codes: Codes, worker: str, recompute: Recompute | None = None
) -> Captured | frozenset[str]:
    """What was learnt, or the names of the tensors that have to be read place by place.

    What `recompute` fills has no place of its own in the manifest: its buffers have.
    """
    builder = ManifestBuilder(worker, Role.ENGINE)
    addresses: list[int] = []
    repacks: list[Repack] = []
    placed: set[str] = set()
    scattered = set(seen.unproven)
    filled = () if recompute is None else recompute.names
    for name, numbers in seen.numbers.items():
        if name in scattered or name in filled:
            continue
        holding = seen.holdings[name]
        factor = seen.factors.get(name, 1.0)
        copied = _boxes(numbers, codes) if factor == 1.0 else None
        if copied is not None:
            parts = copied
            address, extent = holding.address, holding.reach
        else:
            if not isinstance(numbers, Exact):
                scattered.add(name)
                continue
            repack, parts = _repack(name, holding, codes, numbers, factor)
            repacks.append(repack)
            address, extent = repack.buffer.data_ptr(), len(repack.buffer)
        placed.update(spec.name for spec, _ in parts)
        _add_parameter(builder, name, dtype_of(name, holding.tensor), extent, parts)
        addresses.append(address)
    if scattered:
        return frozenset(scattered)
    if recompute is not None:
        addresses += _add_buffers(builder, recompute)
        placed.update(spec.name for spec, _ in recompute.buffers)
    for quantized in quantized_tensors(codes.specs):
        if quantized.weight in placed and quantized.scale in placed:
            builder.add_quantized(quantized)
    return Captured(
        manifest=builder.build(),
        addresses=tuple(addresses),
        repacks=tuple(repacks),
        constants=seen.constants,
        unplaced=tuple(s.name for s in codes.specs if s.name not in placed and s.numel),
        recompute=recompute,
    )


def _add_parameter(
    builder: ManifestBuilder, name: str, dtype: DType, numel: int, parts: Parts
) -> None:
    """A parameter of `numel` elements; what no part describes of it is padding."""
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
    """Whole checkpoint tensors; their addresses."""
    for parameter, (spec, buffer) in zip(recompute.parameters, recompute.buffers, strict=True):
        builder.add_parameter(parameter, nbytes=buffer.nbytes, dtype=spec.dtype)
        builder.add_shard(spec.name, spec.shape, Box.full(spec.shape), parameter)
    return [buffer.data_ptr() for _, buffer in recompute.buffers]


def _boxes(numbers: Numbers, codes: Codes) -> Parts | None:
    try:
        return numbers.parts(codes, MAX_BOXES)
    except TooManyBoxes:
        return None


def _repack(
    name: str, holding: Holding, codes: Codes, numbers: Exact, factor: float
) -> tuple[Repack, Parts]:
    """A buffer that holds the parameter's elements in checkpoint order, each once."""
    values, written = numbers.placed()
    unique, elements = np.unique(values, return_inverse=True)
    try:
        parts = parts_of(codes, unique, np.arange(len(unique)), MAX_BOXES)
    except TooManyBoxes as error:
        raise UnsupportedLayout(
            f"{name}: its checkpoint elements are scattered over more than {MAX_BOXES} boxes"
        ) from error
    device = holding.tensor.device
    repack = Repack(
        name=name,
        target=holding.memory(),
        buffer=torch.zeros(len(unique), dtype=holding.tensor.dtype, device=device),
        places=torch.from_numpy(written).to(device),
        elements=torch.from_numpy(elements.reshape(-1)).to(device),
        factor=factor,
    )
    return repack, parts
