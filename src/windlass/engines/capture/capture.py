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
from typing import final

import numpy as np
import torch

from windlass.engines.capture.boxes import TooManyBoxes
from windlass.engines.capture.codes import CheckpointSpec, Codes, bits_of, quantized_tensors
from windlass.engines.capture.factors import factors_of, scaled
from windlass.engines.capture.memory import Holding, Kind, fingerprint, held_by
from windlass.engines.capture.numbers import Exact, Numbers, Parts, Rows, parts_of, rows_of
from windlass.errors import UnsupportedLayout
from windlass.frameworks.dtypes import dtype_of, torch_dtype
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest

__all__ = ["Captured", "Load", "Repack", "capture"]

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], None]
"""Loads a checkpoint into the model; the tensors belong to it from then on."""

EXACT_NUMEL = 1 << 20
MAX_EXACT_NUMEL = 1 << 30
"""Read place by place if need be: 8 GiB of numbers."""

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
    exact_numel: int = EXACT_NUMEL,
    multiplied: bool = False,
) -> Captured:
    """Learn the layout of a model that serves nobody yet. Its weights are restored at the end.

    Memory: a copy of every tensor of the model (on its device where that has room, else on the
    host), and what `exact_numel` says.

    Args:
        model: of this rank.
        specs: the whole checkpoint.
        load: see `Load`.
        worker: identity of the rank.
        ignored: see `held_by`.
        reference: reads the checkpoint that the model was first loaded from. An engine's way of
            loading again may skip what it did at the start (repacking for a kernel); where the
            bytes after it are not those of the first load, the layout is refused.
        exact_numel: tensors of more elements are read row by row first, and place by place (8
            bytes each) only if that does not prove right. The proof visits every place of all.
        multiplied: look for tensors that the engine multiplies by a factor of their own; those
            are received in a buffer and multiplied by `finalise`. A few loads more.

    Raises:
        UnsupportedLayout: a tensor that is computed and not copied, a parameter (other than a
            scalar) that the loader does not write, memory that moves with every load; names all of them.
    """
    held = held_by(model, ignored)
    before = _copies(held)
    codes = Codes(specs, _device(held))
    try:
        factors = factors_of(codes, load, lambda: held_by(model, ignored)) if multiplied else {}
        scattered = frozenset(factors)
        while True:
            seen = _observe(model, codes, load, ignored, exact_numel, scattered, factors)
            described = _describe(seen, codes, worker)
            if isinstance(described, Captured):
                break
            scattered |= described
        if reference is not None:
            load(reference())
            _require_repeated(held_by(model, ignored), before)
    finally:
        _restore(held_by(model, ignored), before)
    return described


@dataclass(frozen=True, slots=True)
class _Seen:
    """Holdings, and per name of those that a load changes, what lies where.

    `unproven` names those whose rows mislead: they are to be read place by place.
    """

    holdings: Mapping[str, Holding]
    numbers: Mapping[str, Numbers]
    factors: Mapping[str, float]
    constants: tuple[str, ...]
    unproven: frozenset[str]


def _observe(
    model: torch.nn.Module,
    codes: Codes,
    load: Load,
    ignored: frozenset[int],
    exact_numel: int,
    scattered: frozenset[str],
    factors: Mapping[str, float],
) -> _Seen:
    load(codes.random(0))
    held = held_by(model, ignored)
    prints = {name: fingerprint(h.memory()) for name, h in held.items()}
    places = {name: h.address for name, h in held.items()}
    numbers = {
        name: _numbers_for(h, MAX_EXACT_NUMEL if name in scattered else exact_numel)
        for name, h in held.items()
    }
    for position in range(codes.num_digits):
        load(codes.digits(position))
        for name, holding in held_by(model, ignored).items():
            if name in numbers and holding.reach == held[name].reach:
                numbers[name].observe(holding, codes, position, factors.get(name, 1.0))
    load(codes.random(1))
    held = held_by(model, ignored)
    constants = tuple(n for n, h in held.items() if prints.get(n) == fingerprint(h.memory()))
    changing = [name for name in held if name not in constants]
    proofs = {n: _Proof(codes, numbers[n], factors.get(n, 1.0)) for n in changing if n in numbers}
    right = {n for n, proof in proofs.items() if proof.holds(held[n], 1)}
    idle = {n: held[n].memory().clone() for n in constants if _is_weight(held[n])}
    for name in idle:
        held[name].memory().view(torch.uint8).fill_(0x55)
    load(codes.random(0))
    held = held_by(model, ignored)
    right = {n for n in right if proofs[n].holds(held[n], 0)}
    unwritten = [n for n, constant in idle.items() if not _same(held[n].memory(), constant)]
    if unwritten:
        raise UnsupportedLayout(f"{unwritten}: parameters that the engine's loader does not write")
    moved = [
        name
        for name in changing
        if held[name].address != places.get(name)
        and (held[name].kind is not Kind.ATTRIBUTE or held[name].tensor.device.type != "cpu")
    ]
    if moved:
        raise UnsupportedLayout(f"{moved}: tensors that move with every load")
    unproven = frozenset(
        n for n in proofs if n not in right and isinstance(numbers[n], Rows) and n not in scattered
    )
    too_large = [n for n in unproven if held[n].reach > MAX_EXACT_NUMEL]
    computed = [n for n in changing if n not in right and n not in unproven] + too_large
    if computed:
        raise UnsupportedLayout(f"{computed}: tensors that the engine computes from the checkpoint")
    return _Seen(held, {n: numbers[n] for n in changing}, factors, constants, unproven)


def _is_weight(holding: Holding) -> bool:
    """A parameter that loads must write.

    Not a scalar: engines have some that are settings (scales of key-value caches), from which they
    take plain numbers, so that these must not be changed for a trial.
    """
    return holding.kind is Kind.PARAMETER and holding.tensor.dim() > 0


def _numbers_for(holding: Holding, exact_numel: int) -> Numbers:
    rows = rows_of(holding) if holding.reach > exact_numel else None
    return rows if rows is not None else Exact(holding.reach, holding.tensor.device)


@final
class _Proof:
    """Whether loads of ordinary values lie where the numbers say, and nothing else changes."""

    def __init__(self, codes: Codes, numbers: Numbers, factor: float) -> None:
        self._codes, self._numbers, self._factor = codes, numbers, factor
        self._padding: dict[int, torch.Tensor] = {}

    def holds(self, holding: Holding, seed: int) -> bool:
        """Compare every place of a tensor, just loaded from `random(seed)`."""
        if not self._numbers.is_consistent():
            return False
        dtype, end = holding.tensor.dtype, int(self._codes.starts[-1])
        memory = bits_of(holding.memory())
        for begin, numbers in self._numbers.chunks():
            found = memory[begin : begin + len(numbers)]
            empty = numbers < 0
            if len(found) != len(numbers) or bool((numbers >= end).any()):
                return False
            copied = self._codes.expected(numbers.clamp(min=0), seed, dtype)
            expected = bits_of(scaled(copied, self._factor))
            if bool(empty.any()):
                padding = found[empty]
                if not torch.equal(self._padding.setdefault(begin, padding), padding):
                    return False
                expected[empty] = padding
            if not torch.equal(expected, found):
                return False
        return True


def _copies(held: Mapping[str, Holding]) -> dict[str, torch.Tensor]:
    nbytes = sum(holding.nbytes for holding in held.values() if holding.tensor.is_cuda)
    roomy = not nbytes or nbytes < torch.cuda.mem_get_info()[0] // 2
    return {n: h.memory().clone() if roomy else h.memory().cpu() for n, h in held.items()}


def _device(held: Mapping[str, Holding]) -> torch.device:
    """Where the parameters are; loads made there need no way over the host."""
    devices = {h.tensor.device for h in held.values() if h.kind is Kind.PARAMETER}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _require_repeated(held: Mapping[str, Holding], before: Mapping[str, torch.Tensor]) -> None:
    changed = [
        n
        for n, h in held.items()
        if n in before and not _same(h.memory().to(before[n].device), before[n])
    ]
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


def _describe(seen: _Seen, codes: Codes, worker: str) -> Captured | frozenset[str]:
    """What was learnt, or the names of the tensors that have to be read place by place."""
    builder = ManifestBuilder(worker, Role.ENGINE)
    addresses: list[int] = []
    repacks: list[Repack] = []
    placed: set[str] = set()
    scattered = set(seen.unproven)
    for name, numbers in seen.numbers.items():
        if name in scattered:
            continue
        holding = seen.holdings[name]
        itemsize = holding.tensor.element_size()
        dtype = dtype_of(holding.tensor)
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
    if scattered:
        return frozenset(scattered)
    for quantized in quantized_tensors(codes.specs):
        if quantized.weight in placed and quantized.scale in placed:
            builder.add_quantized(quantized)
    return Captured(
        manifest=builder.build(),
        addresses=tuple(addresses),
        repacks=tuple(repacks),
        constants=seen.constants,
        unplaced=tuple(s.name for s in codes.specs if s.name not in placed and s.numel),
    )


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
        buffer=torch.zeros(len(unique), dtype=torch_dtype(dtype_of(holding.tensor)), device=device),
        places=torch.from_numpy(written).to(device),
        elements=torch.from_numpy(elements.reshape(-1)).to(device),
        factor=factor,
    )
    return repack, parts
