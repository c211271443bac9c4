"""State that an engine computes from checkpoint tensors, computed anew by its own loader.

The checkpoint tensors that it depends on are received whole, in checkpoint order. After an update
the engine's own way of loading gets exactly these, while the engine is quiesced. At capture it is
proven, with updates on trial, that writing the copies and loading the part leaves what a load of
everything would: every tensor of the model, bit for bit, and at its address.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch

from windlass.engines.capture.codes import CheckpointSpec, Codes, Load, bits_of
from windlass.engines.capture.element_ids import ElementIds
from windlass.engines.capture.memory import (
    Holding,
    Kind,
    Watched,
    fingerprint,
    prints_of,
    refuse,
)
from windlass.errors import UnsupportedLayout, WindlassError
from windlass.layout.naming.patterns import NUMBER, patterns_of, said
from windlass.memory.torch_dtypes import torch_dtype

_SEEDS = (2, 3)
_TRIALS = 3
_MARKS = {
    torch.float64: 0x7FF5D5D5D5D5D5D5,
    torch.float32: 0x7FD5D5D5,
    torch.bfloat16: 0x7FD5,
    torch.float16: 0x7FD5,
    torch.float8_e4m3fn: 0xFF,
    torch.float8_e5m2: 0xFF,
}
"""Bits of a NaN; what has none, or another type, is not marked."""
PREFIX = "loader/"
"""Of the manifest's names of buffers."""


def surroundings(model: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return what enters, in any thread, what torch keeps per thread as it is in this one; `model`: where weights are."""
    inference, default = torch.is_inference_mode_enabled(), torch.get_default_device()
    cuda = torch.cuda.current_device() if model.type == "cuda" else None

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            if cuda is not None:
                stack.enter_context(torch.cuda.device(cuda))
            stack.enter_context(default)
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.inference_mode(inference))
            yield
            if cuda is not None:
                torch.cuda.synchronize()

    return entered


@final
@dataclass(kw_only=True, slots=True, eq=False)
class Recompute:
    """What the engine's loader does after every update.

    A run is right if the loader has taken every buffer, written all that it is to fill (which holds
    NaN before), and moved nothing. After one that failed the loader may have kept tensors of that
    version, which nobody sees: runs are then repeated until two following ones leave the same bytes
    in every tensor of the model, and have left alone what updates write themselves and what no
    checkpoint changes.

    Attributes:
        names: of the engine's tensors that it fills: the computed ones, and copies of the same
            checkpoint tensors.
        buffers: the checkpoint tensors that it is given, in checkpoint order; updates write them.
        written: names of the engine's tensors that updates write themselves.
        unwritten: of those of `names` that may hold NaN before a load, how many elements a load
            leaves as they are (padding).
        load: see `capture`. held: what the model holds now.
        entered: see `surroundings`; of the thread that captures.
    """

    names: tuple[str, ...]
    buffers: tuple[tuple[CheckpointSpec, torch.Tensor], ...]
    written: frozenset[str]
    unwritten: Mapping[str, int]
    load: Load
    held: Watched
    entered: Callable[[], AbstractContextManager[None]]
    _fixed: Mapping[str, int] = field(default_factory=dict)
    _constants: Mapping[str, int] = field(default_factory=dict)
    _is_proven: bool = True

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the manifest's names of the buffers."""
        return tuple(PREFIX + spec.name for spec, _ in self.buffers)

    def fix_addresses(self, refilled: Collection[str]) -> None:
        """Record the addresses of the model's tensors, which must not change, and its constants, without `refilled`."""
        held = self.held()
        self._fixed = _places(held, self.written, self.names)
        self._constants = {
            name: fingerprint(h.memory())
            for name, h in held.items()
            if name not in self.written
            and name not in self.names
            and name not in refilled
            # Others may be scratch memory of steps.
            and h.kind in (Kind.PARAMETER, Kind.BUFFER)
        }

    def run(self) -> None:
        """Load the buffers. The engine is quiesced; called in any thread.

        Raises:
            UnsupportedLayout: the loader failed, left out what it should have taken or written, or
                moved or changed what must stay. The model holds its own tensors at their addresses,
                with bytes of which nothing is known.
        """
        was_proven, self._is_proven = self._is_proven, False
        self.held.changed()
        try:
            with self.entered():
                if was_proven:
                    self._load_once()
                else:
                    self._load_until_repeated()
        finally:
            self.held.changed()
        self._is_proven = True

    def _load_until_repeated(self) -> None:
        before = {n: p for n, p in prints_of(self.held()).items() if n in self.written}
        earlier: Mapping[str, int] = {}
        for _ in range(_TRIALS):
            self._load_once()
            found = prints_of(self.held())
            if found == earlier:
                break
            earlier = found
        else:
            raise UnsupportedLayout(
                f"{said(self.names)}: the engine's loader, which failed before, leaves other bytes "
                f"with every load of the same tensors"
            )
        stale = sorted(n for n, p in {**before, **self._constants}.items() if found.get(n) != p)
        why = "tensors that the engine's loader, which failed before, has changed and must not"
        refuse(stale, why)

    def _load_once(self) -> None:
        taken: list[str] = []
        marks = _Marks(self.held(), self.unwritten)
        try:
            self.load(self._received(taken))
        except WindlassError:
            raise
        except Exception as error:
            raise UnsupportedLayout(
                f"{said(self.names)}: the engine's loader failed: {type(error).__name__}: {error}"
            ) from error
        held = self.held()
        moved = [n for n, at in self._fixed.items() if n not in held or held[n].address != at]
        refuse(moved, "tensors that the engine's loader has moved")
        unwritten = sorted(n for n, c in marks.clear(held).items() if c != self.unwritten[n])
        refuse(unwritten, "tensors that the engine's loader has not written")
        missing = [s.name for s, _ in self.buffers if s.name not in taken]
        refuse(missing, "tensors that the engine's loader has not taken")

    def _received(self, taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec, buffer in self.buffers:
            taken.append(spec.name)
            yield spec.name, buffer.clone().reshape(spec.shape)

    def filling(
        self, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors; those that have a buffer are copied there on the way."""
        buffers = {spec.name: buffer for spec, buffer in self.buffers}
        for name, tensor in weights:
            if name in buffers:
                buffers[name].copy_(tensor.reshape(-1))
            yield name, tensor


@final
@dataclass(frozen=True, slots=True)
class Search:
    """A search for the checkpoint tensors from which an engine computes what is no copy of any.

    Loads that differ in some tensors only are compared. Names that differ in their numbers alone (the
    same tensor of every layer) are changed together, and the groups that matter are found by halving;
    then every tensor of the engine tells which of the numbers it depends on, one binary digit of them
    per two loads, all layers at once. A last load changes everything else: nothing computed may follow.

    Takes about 2 log2 of the number of kinds of names per kind that matters, and 2 log2 of the
    number of layers (or layers times experts), in loads.

    Attributes:
        prints: fingerprints of the computed tensors, now.
        base: the same after a load of `codes.random(0)`.
    """

    codes: Codes
    load: Load
    prints: Callable[[], Mapping[str, int]]
    base: Mapping[str, int]

    def sources(self) -> frozenset[str]:
        """Return the checkpoint tensors that change one of the computed tensors.

        Raises:
            UnsupportedLayout: tensors whose sources cannot be told; names them.
        """
        every = frozenset(spec.name for spec in self.codes.specs)
        deaf = sorted(self.base.keys() - self._changed(every))
        refuse(deaf, "tensors that the engine computes, and not from the checkpoint alone")
        patterns = patterns_of(spec.name for spec in self.codes.specs)
        kinds = [tuple(names) for names in patterns.values()]
        members = frozenset().union(*self._mattering(kinds, known=True))
        found = self._numbered(members)
        if not self._changed(every - found):
            return found
        if members == found or self._changed(every - members):
            why = (
                "tensors that the engine computes from checkpoint tensors that cannot be told apart"
            )
            refuse(self.base, why)
        return members

    def _changed(self, names: frozenset[str]) -> frozenset[str]:
        """Return the computed tensors that differ once these checkpoint tensors do."""
        if not names:
            return frozenset()
        self.load(self.codes.mixed(names, _SEEDS[0]))
        now = self.prints()
        return frozenset(name for name, value in self.base.items() if now.get(name) != value)

    def _mattering(
        self, groups: Sequence[tuple[str, ...]], *, known: bool
    ) -> Iterator[tuple[str, ...]]:
        """Groups that change something; `known`: one of them does."""
        if not known and not self._changed(frozenset().union(*groups)):
            return
        if len(groups) == 1:
            yield groups[0]
            return
        half = len(groups) // 2
        first = list(self._mattering(groups[:half], known=False))
        yield from first
        yield from self._mattering(groups[half:], known=not first)

    def _numbered(self, members: frozenset[str]) -> frozenset[str]:
        """Return those whose numbers a computed tensor may depend on, by every digit of them."""
        keys = sorted({_numbers(name) for name in members})
        index = {key: at for at, key in enumerate(keys)}
        possible = [set(range(len(keys))) for _ in self.base]
        for digit in range((len(keys) - 1).bit_length()):
            with_digit = {at for at in range(len(keys)) if at >> digit & 1}
            ones = frozenset(name for name in members if index[_numbers(name)] in with_digit)
            by_ones, by_zeros = self._changed(ones), self._changed(members - ones)
            for tensor, numbers in zip(self.base, possible, strict=True):
                if tensor not in by_ones:
                    numbers.difference_update(with_digit)
                if tensor not in by_zeros:
                    numbers.intersection_update(with_digit)
        mattering = set[int]().union(*possible)
        return frozenset(name for name in members if index[_numbers(name)] in mattering)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in NUMBER.findall(name))


def plan_recompute(
    computed: frozenset[str],
    numbers: Mapping[str, ElementIds],
    codes: Codes,
    load: Load,
    held: Watched,
) -> Recompute | None:
    """Find what the loader has to be given, and prove that it can be given that alone.

    Where a load of a part leaves other tensors wrong (a layer that is made anew as a whole), it is
    given theirs too: first of the tensors themselves, then of everything in their modules, then in
    the modules around these.

    Raises:
        UnsupportedLayout: tensors whose sources cannot be told, or that no load of a part fills
            right, or that the same load fills otherwise; names them.
    """

    def prints() -> dict[str, int]:
        return {n: p for n, p in prints_of(held()).items() if n in computed}

    load(codes.random(0))
    base = prints()
    load(codes.random(0))
    unsteady = sorted(name for name, value in prints().items() if base.get(name) != value)
    refuse({*unsteady} - held.numbers, "tensors that the engine computes, and otherwise each time")
    # A number that differs after two equal loads counts something. It does not follow from weights.
    ignored = {*unsteady} | _saturated(base, codes, load, held)
    held.numbers -= ignored
    computed -= ignored
    if not computed:
        return None
    load(codes.random(0))
    base = prints()
    part = _Part(computed, numbers, codes, load, held)
    sources = Search(codes, load, prints, base).sources()
    bad = part.disturbed(sources)
    for level in range(part.depth + 1):
        wider = sources | part.sources_near(bad, level)
        if bad and wider != sources:
            sources = wider
            bad = part.disturbed(sources)
    wrong = "tensors that the engine's loader does not leave right when it computes"
    refuse(bad, f"{wrong} {said(computed)} again")
    return part.recompute(sources)


def _saturated(base: Mapping[str, int], codes: Codes, load: Load, held: Watched) -> frozenset[str]:
    """Return numbers that no values change any more: they count up to a limit.

    Raises:
        UnsupportedLayout: digits change a number, and the values of a search do not; names all of them.
    """
    if not held.numbers:
        return frozenset()
    load(codes.mixed(frozenset(spec.name for spec in codes.specs), _SEEDS[0]))
    now = prints_of(held())
    deaf = frozenset(n for n in held.numbers & base.keys() if now.get(n) == base[n])
    if deaf:
        load(codes.digits(0))
        now = prints_of(held())
        hidden = sorted(n for n in deaf if now.get(n) != base[n])
        refuse(hidden, "numbers that the engine takes from weights, in a way that few values show")
    return deaf


@final
@dataclass(frozen=True)
class _Part:
    """Loads of some checkpoint tensors, compared with loads of all; see `plan_recompute`."""

    computed: frozenset[str]
    numbers: Mapping[str, ElementIds]
    codes: Codes
    load: Load
    held: Watched

    @cached_property
    def copied(self) -> Mapping[str, frozenset[str]]:
        """The checkpoint tensors in every tensor of the engine that holds copies."""
        return {name: _tensors_in(found, self.codes) for name, found in self.numbers.items()}

    @property
    def depth(self) -> int:
        """How many modules lie around one, at most."""
        return max(len(name.split(".")) for name in [*self.computed, *self.copied])

    def disturbed(self, sources: frozenset[str]) -> frozenset[str]:
        """Return what is wrong, or was moved though updates write it, after two updates on trial."""
        self.load(self.codes.random(0))
        before = self._fixed(sources)
        try:
            with _nothing_left_over():
                for seed in _SEEDS:
                    self._write(self._written(sources), seed)
                    self.load(self.codes.some(sources, seed))
        except Exception:  # noqa: BLE001 - an engine's loader raises what it likes where it misses tensors
            return self.computed
        found = prints_of(self.held())
        after = self._fixed(sources)
        moved = {name for name, at in before.items() if after.get(name) != at}
        self.load(self.codes.mixed(frozenset(s.name for s in self.codes.specs), _SEEDS[-1]))
        wrong = {name for name, value in prints_of(self.held()).items() if found.get(name) != value}
        return frozenset(wrong | moved)

    def _write(self, names: Iterable[str], seed: int) -> None:
        """Write what an update writes itself, as it lies once it is finalised."""
        held = self.held()
        for name in names:
            memory = held[name].memory()
            for begin, numbers in self.numbers[name].chunks():
                filled = numbers >= 0
                values = self.codes.expected(numbers[filled], seed, memory.dtype, loud=True)
                part = bits_of(memory[begin : begin + len(numbers)])
                with torch.inference_mode():  # as tensors that were made in it demand
                    part[filled] = bits_of(values)

    def sources_near(self, names: frozenset[str], level: int) -> frozenset[str]:
        """Return the sources of the tensors themselves (level 0), or of all in the modules that many levels up."""
        if level == 0:
            chosen = names & self.copied.keys()
        else:
            modules = tuple({_module(name, level) for name in names})
            chosen = frozenset(name for name in self.copied if name.startswith(modules))
        return frozenset().union(*(self.copied[name] for name in chosen))

    def recompute(self, sources: frozenset[str]) -> Recompute:
        """Return what has been proven."""
        return Recompute(
            names=tuple(sorted(self._filled(sources))),
            buffers=tuple(
                (s, torch.zeros(s.numel, dtype=torch_dtype(s.dtype), device=self.codes.device))
                for s in self.codes.specs
                if s.name in sources
            ),
            written=self._written(sources),
            unwritten=self._unwritten(sources),
            load=self.load,
            held=self.held,
            entered=surroundings(self.codes.device),
        )

    def _unwritten(self, sources: frozenset[str]) -> dict[str, int]:
        """See `Recompute`; without tensors from whose old values the loader computes something."""
        held = self.held()
        names = {
            n
            for n in self._filled(sources)
            if held[n].tensor.dtype in _MARKS and held[n].kind is not Kind.NUMBER
        }
        self.load(self.codes.some(sources, _SEEDS[0]))
        plain = prints_of(self.held())
        while names:
            # What is put back where a mark is left is another value than `plain` has, unless no
            # load writes it: a mark that came through arithmetic is not taken for padding.
            self.load(self.codes.some(sources, _SEEDS[1]))
            marks = _Marks(self.held(), dict.fromkeys(names, -1))
            try:
                self.load(self.codes.some(sources, _SEEDS[0]))
            except Exception:  # noqa: BLE001 - a loader that looks at what is there
                return {}
            left = marks.clear(self.held())
            found = prints_of(self.held())
            differing = {name for name, value in plain.items() if found.get(name) != value}
            if not differing:
                return left
            if not names & differing:
                return {}
            names -= differing
        return {}

    def _filled(self, sources: frozenset[str]) -> frozenset[str]:
        """Return what such a load fills: all of it comes from these checkpoint tensors."""
        return self.computed | {n for n, found in self.copied.items() if found <= sources}

    def _written(self, sources: frozenset[str]) -> frozenset[str]:
        """Return what updates write directly."""
        return frozenset(self.copied.keys() - self._filled(sources))

    def _fixed(self, sources: frozenset[str]) -> dict[str, int]:
        """Return addresses that must stay; see `Recompute.fix_addresses`."""
        written, filled = self._written(sources), self._filled(sources)
        return _places(self.held(), written, filled)


def _places(
    held: Mapping[str, Holding], written: Collection[str], filled: Collection[str]
) -> dict[str, int]:
    """Return addresses of what updates write, and on GPUs, whose graphs know them, of what is filled."""
    return {
        name: h.address
        for name, h in held.items()
        if name in written or (name in filled and h.tensor.is_cuda)
    }


@final
class _Marks:
    """Floating-point tensors filled with a NaN that no weight is, to see what a load writes.

    `left`: by name, how many elements a load leaves unwritten, -1 where that is not known.
    """

    def __init__(self, held: Mapping[str, Holding], left: Mapping[str, int]) -> None:
        self._names = tuple(left)
        self._before: dict[str, torch.Tensor] = {}
        with torch.inference_mode():  # as tensors that were made in it demand
            for name in left.keys() & held.keys():
                memory = bits_of(held[name].memory())
                if left[name]:
                    self._before[name] = memory.clone()
                memory.fill_(_MARKS[held[name].tensor.dtype])

    def clear(self, held: Mapping[str, Holding]) -> dict[str, int]:
        """Return how many elements were not written, by name, -1 of a tensor that is gone; put old values back there."""
        found = dict.fromkeys(self._names, -1)
        with torch.inference_mode():
            memories = {n: bits_of(held[n].memory()) for n in found.keys() & held.keys()}
            marks = {n: _MARKS[held[n].tensor.dtype] for n in memories}
            counts = [(memory == marks[n]).sum() for n, memory in memories.items()]
            if counts:  # read as one: a GPU is waited for once, in every pause
                on = counts[0].device
                found |= zip(
                    memories, torch.stack([c.to(on) for c in counts]).tolist(), strict=True
                )
            for name, before in self._before.items():
                memory = memories.get(name, before[:0])
                if found[name] and len(before) == len(memory):
                    left = memory == marks[name]
                    memory[left] = before[left]
        return found


def _module(name: str, level: int) -> str:
    """Return a tensor's module, with its last dot, so that nothing else begins like it."""
    parts = name.split(".")[:-level]
    return "".join(f"{part}." for part in parts)


def _tensors_in(numbers: ElementIds, codes: Codes) -> frozenset[str]:
    """Return the checkpoint tensors of which a tensor of the engine holds elements."""
    bounds = torch.from_numpy(codes.starts[1:-1])
    found: set[int] = set()
    for _, part in numbers.chunks():
        filled = part[part >= 0]
        tensors = torch.searchsorted(bounds.to(filled.device), filled, right=True)
        found.update(torch.unique(tensors).tolist())
    return frozenset(codes.specs[index].name for index in found)


@contextmanager
def _nothing_left_over() -> Iterator[None]:
    """Have what is made without values hold NaN, not what lay there before, which may be right."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
