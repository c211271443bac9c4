"""Tensors that an engine computes from checkpoint tensors, and that its own loader computes again after updates.

An update writes the checkpoint tensors that they depend on into buffers, whole and in checkpoint order.
After the update, while the engine is quiesced, the engine's loader gets exactly these tensors. At capture,
trial updates prove that direct writes plus this partial load give the same result as a load of the whole
checkpoint: every tensor of the model has the same bytes and stays at its address.
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
"""Bits of a NaN for each type that capture marks. It does not mark tensors of other types."""
PREFIX = "loader/"
"""Prefix of buffer names in the manifest."""


def surroundings(model: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager factory that applies this thread's torch settings in another thread.

    The settings are inference mode, the default device and, if `model` (the device of the weights) is a GPU, the
    current GPU. The context also disables gradients, and waits for GPU work at its end.
    """
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
    """Partial load by the engine's own loader after every update.

    A run succeeds if the loader took every buffer, wrote every tensor in `names` (marked with NaN before),
    and moved no tensor. After a failed run, the loader may privately keep tensors of that version. The next
    run therefore loads until two successive loads leave the same bytes in every tensor of the model. It also
    checks that tensors in `written` and constants have not changed.

    Attributes:
        names: names of the engine's tensors that the loader fills: computed tensors, and copies of the same
            checkpoint tensors.
        buffers: checkpoint tensors that the loader gets, in checkpoint order; updates write them.
        written: names of the engine's tensors that updates write directly.
        unwritten: elements that a load leaves as they are (padding), by name, for each tensor in `names`
            that may hold NaN before a load.
        load: see `capture`.
        held: current tensors of the model.
        entered: see `surroundings`; has the settings of the thread that captured.
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
        """Record the addresses that loads must keep, and the bytes of the constants outside `refilled`."""
        held = self.held()
        self._fixed = _places(held, self.written, self.names)
        self._constants = {
            name: fingerprint(h.memory())
            for name, h in held.items()
            if name not in self.written
            and name not in self.names
            and name not in refilled
            # Other kinds may be scratch memory that the engine's steps overwrite.
            and h.kind in (Kind.PARAMETER, Kind.BUFFER)
        }

    def run(self) -> None:
        """Load the buffers. The caller has quiesced the engine and may call this in any thread.

        Raises:
            UnsupportedLayout: the loader failed, did not take a buffer, did not write a tensor that it must
                fill, or moved or changed a tensor that must stay. The model then holds its own tensors
                at their addresses, with unknown bytes.
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
                f"{said(self.names)}: after a failure, the engine's loader leaves different bytes "
                f"with every load of the same tensors"
            )
        stale = sorted(n for n, p in {**before, **self._constants}.items() if found.get(n) != p)
        why = "tensors that must stay, but that the engine's loader has changed after an earlier failure"
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
        """Yield the same tensors and copy each into its buffer, if it has one."""
        buffers = {spec.name: buffer for spec, buffer in self.buffers}
        for name, tensor in weights:
            if name in buffers:
                buffers[name].copy_(tensor.reshape(-1))
            yield name, tensor


@final
@dataclass(frozen=True, slots=True)
class Search:
    """Search for the sources of computed tensors: checkpoint tensors that the engine uses to compute others.

    The search compares loads that differ in some checkpoint tensors. First it groups names that differ only in
    their numbers (the same tensor of every layer), changes each group as a whole, and finds the relevant
    groups by bisection. Then it finds the layer numbers that each computed tensor depends on: two loads per
    binary digit of the number, for all layers at once. A last load changes all other checkpoint tensors; no
    computed tensor may change.

    The number of loads is about 2 log2(groups) per relevant group, plus 2 log2(layers), or 2 log2(layers x
    experts) for a mixture of experts.

    Attributes:
        prints: function that returns the current fingerprints of the computed tensors.
        base: their fingerprints after a load of `codes.random(0)`.
    """

    codes: Codes
    load: Load
    prints: Callable[[], Mapping[str, int]]
    base: Mapping[str, int]

    def sources(self) -> frozenset[str]:
        """Return the checkpoint tensors that change one of the computed tensors.

        Raises:
            UnsupportedLayout: the search cannot find the sources of some tensors; the message names them.
        """
        every = frozenset(spec.name for spec in self.codes.specs)
        deaf = sorted(self.base.keys() - self._changed(every))
        refuse(deaf, "tensors that the engine does not compute from the checkpoint alone")
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
        """Return the computed tensors that change if these checkpoint tensors change."""
        if not names:
            return frozenset()
        self.load(self.codes.mixed(names, _SEEDS[0]))
        now = self.prints()
        return frozenset(name for name, value in self.base.items() if now.get(name) != value)

    def _mattering(
        self, groups: Sequence[tuple[str, ...]], *, known: bool
    ) -> Iterator[tuple[str, ...]]:
        """Yield the groups that change a computed tensor. `known` is True if at least one of `groups` does."""
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
        """Return the `members` that a computed tensor may depend on, found digit by digit of their numbers."""
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
    """Find the checkpoint tensors that the loader needs, and prove that a load of only these is enough.

    A partial load may leave other tensors wrong (the loader may rebuild a whole layer). The plan then adds
    their sources: first of these tensors, then of all tensors in their modules, then of the enclosing modules.

    Returns:
        The plan, or None if the only computed values are numbers that do not depend on weights.

    Raises:
        UnsupportedLayout: the search cannot find the sources of a tensor, no partial load fills it
            correctly, or two equal loads fill it differently. The message names all of them.
    """

    def prints() -> dict[str, int]:
        return {n: p for n, p in prints_of(held()).items() if n in computed}

    load(codes.random(0))
    base = prints()
    load(codes.random(0))
    unsteady = sorted(name for name, value in prints().items() if base.get(name) != value)
    refuse(
        {*unsteady} - held.numbers,
        "tensors that the engine computes differently in two equal loads",
    )
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
    wrong = "tensors with wrong values after the engine's loader computes"
    refuse(bad, f"{wrong} {said(computed)} again")
    return part.recompute(sources)


def _saturated(base: Mapping[str, int], codes: Codes, load: Load, held: Watched) -> frozenset[str]:
    """Return the computed numbers that stay the same for other checkpoint values, such as counters at their limit.

    Raises:
        UnsupportedLayout: digits change a number, but the values of a search do not. The message names
            all of them.
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
        refuse(hidden, "numbers that depend on weights, but that most weight values do not change")
    return deaf


@final
@dataclass(frozen=True)
class _Part:
    """Comparison of partial loads with loads of the whole checkpoint; see `plan_recompute`."""

    computed: frozenset[str]
    numbers: Mapping[str, ElementIds]
    codes: Codes
    load: Load
    held: Watched

    @cached_property
    def copied(self) -> Mapping[str, frozenset[str]]:
        """Checkpoint tensors in each of the engine's tensors that holds copies."""
        return {name: _tensors_in(found, self.codes) for name, found in self.numbers.items()}

    @property
    def depth(self) -> int:
        """Largest number of parts in a tensor's name, which bounds the number of nested modules."""
        return max(len(name.split(".")) for name in [*self.computed, *self.copied])

    def disturbed(self, sources: frozenset[str]) -> frozenset[str]:
        """Return the tensors that two trial updates leave wrong, or move although their address must stay."""
        self.load(self.codes.random(0))
        before = self._fixed(sources)
        try:
            with _nothing_left_over():
                for seed in _SEEDS:
                    self._write(self._written(sources), seed)
                    self.load(self.codes.some(sources, seed))
        except Exception:  # noqa: BLE001 - a loader may raise anything if tensors are missing
            return self.computed
        found = prints_of(self.held())
        after = self._fixed(sources)
        moved = {name for name, at in before.items() if after.get(name) != at}
        self.load(self.codes.mixed(frozenset(s.name for s in self.codes.specs), _SEEDS[-1]))
        wrong = {name for name, value in prints_of(self.held()).items() if found.get(name) != value}
        return frozenset(wrong | moved)

    def _write(self, names: Iterable[str], seed: int) -> None:
        """Write the tensors that an update writes directly, with their values after `finalise`."""
        held = self.held()
        for name in names:
            memory = held[name].memory()
            for begin, numbers in self.numbers[name].chunks():
                filled = numbers >= 0
                values = self.codes.expected(numbers[filled], seed, memory.dtype, loud=True)
                part = bits_of(memory[begin : begin + len(numbers)])
                # Tensors that were made in inference mode can be written only in it.
                with torch.inference_mode():
                    part[filled] = bits_of(values)

    def sources_near(self, names: frozenset[str], level: int) -> frozenset[str]:
        """Return the sources of these tensors (level 0), or of all tensors in the modules `level` levels above."""
        if level == 0:
            chosen = names & self.copied.keys()
        else:
            modules = tuple({_module(name, level) for name in names})
            chosen = frozenset(name for name in self.copied if name.startswith(modules))
        return frozenset().union(*(self.copied[name] for name in chosen))

    def recompute(self, sources: frozenset[str]) -> Recompute:
        """Return the plan for these sources, which trial updates have proven."""
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
        """Return `Recompute.unwritten`, except for tensors whose old values the loader reads."""
        held = self.held()
        names = {
            n
            for n in self._filled(sources)
            if held[n].tensor.dtype in _MARKS and held[n].kind is not Kind.NUMBER
        }
        self.load(self.codes.some(sources, _SEEDS[0]))
        plain = prints_of(self.held())
        while names:
            # `clear` restores values of this load where marks remain. They differ from `plain` unless no load
            # writes the place, so a NaN that the loader computed from a mark does not count as padding.
            self.load(self.codes.some(sources, _SEEDS[1]))
            marks = _Marks(self.held(), dict.fromkeys(names, -1))
            try:
                self.load(self.codes.some(sources, _SEEDS[0]))
            except Exception:  # noqa: BLE001 - a loader that reads old values may raise anything
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
        """Return the tensors that a load of `sources` fills: computed ones, and copies of `sources` only."""
        return self.computed | {n for n, found in self.copied.items() if found <= sources}

    def _written(self, sources: frozenset[str]) -> frozenset[str]:
        """Return the tensors that updates write directly."""
        return frozenset(self.copied.keys() - self._filled(sources))

    def _fixed(self, sources: frozenset[str]) -> dict[str, int]:
        """Return addresses that must stay; see `Recompute.fix_addresses`."""
        written, filled = self._written(sources), self._filled(sources)
        return _places(self.held(), written, filled)


def _places(
    held: Mapping[str, Holding], written: Collection[str], filled: Collection[str]
) -> dict[str, int]:
    """Return addresses that must stay: of `written` tensors, and of `filled` ones on GPUs, which CUDA graphs use."""
    return {
        name: h.address
        for name, h in held.items()
        if name in written or (name in filled and h.tensor.is_cuda)
    }


@final
class _Marks:
    """Floating-point tensors filled with a NaN that no weight has, to find the elements that a load writes.

    `left` has the number of elements that a load leaves unwritten, by name; -1 if it is unknown.
    """

    def __init__(self, held: Mapping[str, Holding], left: Mapping[str, int]) -> None:
        self._names = tuple(left)
        self._before: dict[str, torch.Tensor] = {}
        # Tensors that were made in inference mode can be written only in it.
        with torch.inference_mode():
            for name in left.keys() & held.keys():
                memory = bits_of(held[name].memory())
                if left[name]:
                    self._before[name] = memory.clone()
                memory.fill_(_MARKS[held[name].tensor.dtype])

    def clear(self, held: Mapping[str, Holding]) -> dict[str, int]:
        """Return the number of unwritten elements by name, and restore their old values.

        The number is -1 for a tensor that no longer exists.
        """
        found = dict.fromkeys(self._names, -1)
        with torch.inference_mode():
            memories = {n: bits_of(held[n].memory()) for n in found.keys() & held.keys()}
            marks = {n: _MARKS[held[n].tensor.dtype] for n in memories}
            counts = [(memory == marks[n]).sum() for n, memory in memories.items()]
            # Stack the counts: this runs in every pause, and one transfer waits for the GPU only once.
            if counts:
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
    """Return the name of the module `level` levels up, with a final dot so that it is an exact prefix."""
    parts = name.split(".")[:-level]
    return "".join(f"{part}." for part in parts)


def _tensors_in(numbers: ElementIds, codes: Codes) -> frozenset[str]:
    """Return the checkpoint tensors that have elements in a tensor of the engine."""
    bounds = torch.from_numpy(codes.starts[1:-1])
    found: set[int] = set()
    for _, part in numbers.chunks():
        filled = part[part >= 0]
        tensors = torch.searchsorted(bounds.to(filled.device), filled, right=True)
        found.update(torch.unique(tensors).tolist())
    return frozenset(codes.specs[index].name for index in found)


@contextmanager
def _nothing_left_over() -> Iterator[None]:
    """Fill uninitialised tensors with NaN inside the block: old memory may hold correct values by chance."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
