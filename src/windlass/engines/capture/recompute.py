"""Computed tensors: an engine's tensors that its loader computes from checkpoint tensors, instead of copying them.

An update writes the sources of a computed tensor (the checkpoint tensors that it is computed from) into buffers. After
the update, while the engine is quiesced, the engine's own loader gets the buffers and computes the tensor again. This
is a partial load: the loader gets no other checkpoint tensors.

Capture makes trial updates to check that the partial load is enough. Direct writes plus the partial load must leave the
same bytes in every tensor of the model, at the same addresses, as a load of the whole checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch

from windlass.element_ids.codes import CheckpointSpec, Codes, Load, bits_of
from windlass.element_ids.ids import ElementIds
from windlass.element_ids.memory import fingerprint
from windlass.engines.capture.memory import Holding, Kind, Watched, prints_of, refuse
from windlass.errors import UnsupportedLayout, WindlassError
from windlass.layout.naming.patterns import NUMBER, patterns_of, said
from windlass.memory.torch_dtypes import torch_dtype

_SEEDS = (2, 3)
"""Seeds of random values. A trial update writes and loads values of the first seed, then of the second."""
_TRIALS = 3
"""Number of loads, after a failed run, within which two successive loads must leave the same bytes."""
_MARKS = {
    torch.float64: 0x7FF5D5D5D5D5D5D5,
    torch.float32: 0x7FD5D5D5,
    torch.bfloat16: 0x7FD5,
    torch.float16: 0x7FD5,
    torch.float8_e4m3fn: 0xFF,
    torch.float8_e5m2: 0xFF,
}
"""dtype -> bits of the NaN that `_Marks` writes into tensors. Tensors of other dtypes are not filled."""
PREFIX = "loader/"
"""Prefix of the names of the loader's buffers in the manifest."""


def surroundings(model: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Record this thread's torch settings, and return a function that makes contexts with these settings.

    `with function():` applies the settings in any thread. The settings are inference mode, the default device and, if
    `model` (the device of the weights) is a GPU, the current GPU. The context also disables gradients. When
    the `with` block ends, the context waits for GPU work.
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

    A run succeeds if the loader reads every buffer, writes every tensor in `names` (filled with NaN before), and moves
    no tensor. After a failed run, the loader may still keep tensors of the failed version in its own objects. The
    next run therefore repeats the load until two successive loads leave the same bytes in every tensor of the model,
    and checks that tensors in `written` and constants have not changed.

    Attributes:
        names: names of the engine's tensors that the loader writes: computed tensors, and tensors that have copies
            of elements of `buffers` only.
        buffers: sources of the computed tensors, each with a flat buffer that updates write; in checkpoint order.
        written: names of the engine's tensors that updates write directly.
        unwritten: name -> number of elements (padding) that a load does not write, for each tensor in `names` that a
            run fills with NaN before the load.
        load: the engine's loader.
        held: current tensors of the model.
        entered: result of `surroundings` in the thread that captured the layout.
        _fixed, _constants: see `fix_addresses`.
        _is_proven: False from the beginning of a run until the run succeeds.
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
        """Names of the buffers in the manifest."""
        return tuple(PREFIX + spec.name for spec, _ in self.buffers)

    def fix_addresses(self, refilled: Collection[str]) -> None:
        """Record the addresses that a load must not change, and the fingerprints of constants.

        A constant is a parameter or buffer that neither updates nor loads write. Mirrors are not constants; `refilled` has
        their names.
        """
        held = self.held()
        self._fixed = _places(held, self.written, self.names)
        self._constants = {
            name: fingerprint(h.memory())
            for name, h in held.items()
            if name not in self.written
            and name not in self.names
            and name not in refilled
            # Tensors of other kinds may be scratch memory, which the engine's steps overwrite.
            and h.kind in (Kind.PARAMETER, Kind.BUFFER)
        }

    def run(self) -> None:
        """Compute the computed tensors again: pass the buffers, which the update has written, to the engine's loader.

        The engine must be quiesced; any thread may call this.

        Raises:
            UnsupportedLayout: the loader failed, did not read a buffer, did not write a tensor in `names`, moved a
                tensor, or changed a tensor outside `names`. The model's weights are then unknown.
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
        """Load until two successive loads leave the same bytes, and check that no tensor outside `names` has changed.

        Raises:
            UnsupportedLayout: a load failed, no two successive loads leave the same bytes, or another tensor has changed.
        """
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
                f"{said(self.names)}: since a load failed, every load of the same checkpoint tensors gives these "
                "tensors other bytes; restart the engine"
            )
        stale = sorted(n for n, p in {**before, **self._constants}.items() if found.get(n) != p)
        refuse(
            stale,
            "the engine's loader must not change these tensors, but has changed them after an earlier failure; restart "
            "the engine",
        )

    def _load_once(self) -> None:
        """Load the buffers once, and check what the loader has read, written and moved.

        Raises:
            UnsupportedLayout: the engine's loader failed, moved a tensor, or left a tensor unread or unwritten.
        """
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
        refuse(moved, "the engine's loader has moved these tensors")
        unwritten = sorted(n for n, c in marks.clear(held).items() if c != self.unwritten[n])
        refuse(unwritten, "the engine's loader has not written these tensors")
        missing = [s.name for s, _ in self.buffers if s.name not in taken]
        refuse(missing, "the engine's loader has not read these tensors")

    def _received(self, taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, copy) for each buffer, and add each yielded name to `taken`. The loader may keep the copies."""
        for spec, buffer in self.buffers:
            taken.append(spec.name)
            yield spec.name, buffer.clone().reshape(spec.shape)

    def filling(
        self, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `weights` unchanged. Before yielding a source of a computed tensor, copy the source into its buffer."""
        buffers = {spec.name: buffer for spec, buffer in self.buffers}
        for name, tensor in weights:
            if name in buffers:
                buffers[name].copy_(tensor.reshape(-1))
            yield name, tensor


@final
@dataclass(frozen=True, slots=True)
class Search:
    """Search for the sources of computed tensors (the checkpoint tensors that they are computed from).

    Each load changes the values of some checkpoint tensors; the search observes which computed tensors change. It has
    three steps:

    1. Group names that differ only in their numbers (the same tensor of every layer). Find the groups with sources by
       bisection: about 2 log2(groups) loads per such group.
    2. Find the layer numbers of the sources: two loads per binary digit of the number, which is 2 log2(layers) loads,
       or 2 log2(layers x experts) for a mixture of experts.
    3. Change all checkpoint tensors that are not sources. No computed tensor may change.

    Attributes:
        prints: function that returns the current fingerprints of the computed tensors, by name.
        base: fingerprints of the computed tensors after a load of `codes.random(0)`.
    """

    codes: Codes
    load: Load
    prints: Callable[[], Mapping[str, int]]
    base: Mapping[str, int]

    def sources(self) -> frozenset[str]:
        """Return the names of the sources of all computed tensors.

        Raises:
            UnsupportedLayout: the search cannot find the sources of some tensors; the message names these tensors.
        """
        every = frozenset(spec.name for spec in self.codes.specs)
        unaffected = sorted(self.base.keys() - self._changed_by(every))
        refuse(
            unaffected,
            "the engine computes these tensors, but other checkpoint values do not change them, so capture cannot find "
            "the checkpoint tensors that they depend on",
        )
        patterns = patterns_of(spec.name for spec in self.codes.specs)
        kinds = [tuple(names) for names in patterns.values()]
        members = frozenset().union(*self._groups_with_sources(kinds, known=True))
        found = self._possible_sources(members)
        if not self._changed_by(every - found):
            return found
        if members == found or self._changed_by(every - members):
            refuse(
                self.base,
                "capture cannot find all checkpoint tensors from which the engine computes these tensors",
            )
        return members

    def _changed_by(self, names: frozenset[str]) -> frozenset[str]:
        """Return the names of the computed tensors that change if the checkpoint tensors in `names` change.

        Load new values for these checkpoint tensors, and the values that led to `base` for all other checkpoint
        tensors. Then compare the fingerprints with `base`.
        """
        if not names:
            return frozenset()
        self.load(self.codes.mixed(names, _SEEDS[0]))
        now = self.prints()
        return frozenset(name for name, value in self.base.items() if now.get(name) != value)

    def _groups_with_sources(
        self, groups: Sequence[tuple[str, ...]], *, known: bool
    ) -> Iterator[tuple[str, ...]]:
        """Yield the groups that contain sources. `known` is True if the caller knows that one of `groups` contains sources."""
        if not known and not self._changed_by(frozenset().union(*groups)):
            return
        if len(groups) == 1:
            yield groups[0]
            return
        half = len(groups) // 2
        first = list(self._groups_with_sources(groups[:half], known=False))
        yield from first
        yield from self._groups_with_sources(groups[half:], known=not first)

    def _possible_sources(self, members: frozenset[str]) -> frozenset[str]:
        """Return the names in `members` that may be sources.

        Names with the same numbers (layer, expert) share an index. For each binary digit of the index, first change the
        values of the tensors with digit 1, then of the tensors with digit 0, and observe which computed tensors change.
        """
        keys = sorted({_numbers(name) for name in members})
        index = {key: at for at, key in enumerate(keys)}
        possible = [set(range(len(keys))) for _ in self.base]
        for digit in range((len(keys) - 1).bit_length()):
            with_digit = {at for at in range(len(keys)) if at >> digit & 1}
            ones = frozenset(name for name in members if index[_numbers(name)] in with_digit)
            by_ones, by_zeros = self._changed_by(ones), self._changed_by(members - ones)
            for tensor, numbers in zip(self.base, possible, strict=True):
                if tensor not in by_ones:
                    numbers.difference_update(with_digit)
                if tensor not in by_zeros:
                    numbers.intersection_update(with_digit)
        mattering = set[int]().union(*possible)
        return frozenset(name for name in members if index[_numbers(name)] in mattering)


def _numbers(name: str) -> tuple[int, ...]:
    """Return the numbers in a tensor's name, such as (3, 17) for layer 3 and expert 17."""
    return tuple(int(number) for number in NUMBER.findall(name))


def plan_recompute(
    computed: frozenset[str],
    numbers: Mapping[str, ElementIds],
    codes: Codes,
    load: Load,
    held: Watched,
) -> Recompute | None:
    """Find the sources of the computed tensors, and check by trial updates that a load of only the sources is enough.

    A partial load may leave other tensors wrong, because the loader may rebuild a whole layer. If so, this function adds
    checkpoint tensors to the partial load until no tensor is wrong. It first adds the checkpoint tensors that are copied
    into the wrong tensors. If tensors are still wrong, it adds the checkpoint tensors that are copied into any tensor of
    the same modules, then of the enclosing modules.

    `computed` has the names of computed tensors and computed Python numbers. `numbers` has the element numbers of each
    tensor that is a copy of checkpoint elements.

    Returns:
        The partial load, or None if no computed value depends on weights.

    Raises:
        UnsupportedLayout: the search cannot find the sources of a tensor, no partial load gives a tensor the right
            values, or two equal loads give a tensor different values. The message names these tensors.
    """

    def prints() -> dict[str, int]:
        return {n: p for n, p in prints_of(held()).items() if n in computed}

    load(codes.random(0))
    base = prints()
    load(codes.random(0))
    unsteady = sorted(name for name, value in prints().items() if base.get(name) != value)
    refuse(
        {*unsteady} - held.numbers,
        "the engine computes these tensors differently in two equal loads",
    )
    # A number that differs after two equal loads is a counter. It does not depend on weights.
    ignored = {*unsteady} | _find_unaffected_numbers(base, codes, load, held)
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
    wrong = "these tensors have wrong values after the engine's loader computes"
    refuse(bad, f"{wrong} {said(computed)} again")
    return part.recompute(sources)


def _find_unaffected_numbers(
    base: Mapping[str, int], codes: Codes, load: Load, held: Watched
) -> frozenset[str]:
    """Return the names of computed Python numbers that do not depend on weights, such as counters that reached a limit.

    Make one or two loads to find these numbers. `base` has fingerprints after a load of `codes.random(0)`.

    Raises:
        UnsupportedLayout: a load of digits changes a number, but a load of random values does not. So `Search` could not
            find the sources of this number. The message names these numbers.
    """
    if not held.numbers:
        return frozenset()
    load(codes.mixed(frozenset(spec.name for spec in codes.specs), _SEEDS[0]))
    now = prints_of(held())
    unaffected = frozenset(n for n in held.numbers & base.keys() if now.get(n) == base[n])
    if unaffected:
        load(codes.digits(0))
        now = prints_of(held())
        hidden = sorted(n for n in unaffected if now.get(n) != base[n])
        refuse(hidden, "these numbers depend on weights, but most weight values do not change them")
    return unaffected


@final
@dataclass(frozen=True)
class _Part:
    """Trial updates, and the partial load that results from them; see `plan_recompute` for the attributes."""

    computed: frozenset[str]
    numbers: Mapping[str, ElementIds]
    codes: Codes
    load: Load
    held: Watched

    @cached_property
    def copied(self) -> Mapping[str, frozenset[str]]:
        """Name of an engine tensor that is a copy -> names of the checkpoint tensors that it was copied from."""
        return {name: _tensors_in(found, self.codes) for name, found in self.numbers.items()}

    @property
    def depth(self) -> int:
        """Maximum number of nested modules, from the dots in the tensors' names."""
        return max(len(name.split(".")) for name in [*self.computed, *self.copied])

    def disturbed(self, sources: frozenset[str]) -> frozenset[str]:
        """Make two trial updates; return the names of tensors that have wrong bytes afterwards or have moved.

        In a trial update, the partial load gets only the tensors in `sources`. The right bytes are the bytes after a
        load of the whole checkpoint. If the loader raises in a partial load, return all computed tensors. If it raises
        in a load of the whole checkpoint, raise that error.
        """
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
        """Write the values of a trial update into the tensors in `names`, as an update followed by `finalise` would."""
        held = self.held()
        for name in names:
            memory = held[name].memory()
            for begin, numbers in self.numbers[name].chunks():
                filled = numbers >= 0
                values = self.codes.expected(numbers[filled], seed, memory.dtype, loud=True)
                part = bits_of(memory[begin : begin + len(numbers)])
                # torch forbids writes to inference tensors outside inference mode.
                with torch.inference_mode():
                    part[filled] = bits_of(values)

    def sources_near(self, names: frozenset[str], level: int) -> frozenset[str]:
        """Return the names of the checkpoint tensors that are copied into the engine's tensors in `names`.

        If `level` is above 0, use all tensors in the modules that are `level` levels above the tensors in `names`.
        """
        if level == 0:
            chosen = names & self.copied.keys()
        else:
            modules = tuple({_module(name, level) for name in names})
            chosen = frozenset(name for name in self.copied if name.startswith(modules))
        return frozenset().union(*(self.copied[name] for name in chosen))

    def recompute(self, sources: frozenset[str]) -> Recompute:
        """Return the partial load of `sources`. Call this after trial updates have shown that this load is enough."""
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
        """Return name -> number of elements that a load of `sources` does not write. See `Recompute.unwritten`.

        Fill tensors with NaN and load `sources`, to count the elements that are still NaN. Leave out tensors that the
        loader reads before it writes them, because NaN would spread from them to other tensors.
        """
        held = self.held()
        names = {
            n
            for n in self._filled(sources)
            if held[n].tensor.dtype in _MARKS and held[n].kind is not Kind.NUMBER
        }
        self.load(self.codes.some(sources, _SEEDS[0]))
        plain = prints_of(self.held())
        while names:
            # Load values of another seed before the marks. `clear` replaces each remaining mark (NaN) by the value that it
            # overwrote. If the loader has copied a mark to an element that is not padding, this element then has a value
            # of the other seed, so the tensor differs from `plain`.
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
        """Return the names of tensors that a load of `sources` fills: computed tensors, and copies that need only `sources`."""
        return self.computed | {n for n, found in self.copied.items() if found <= sources}

    def _written(self, sources: frozenset[str]) -> frozenset[str]:
        """Return the names of the tensors that updates write directly."""
        return frozenset(self.copied.keys() - self._filled(sources))

    def _fixed(self, sources: frozenset[str]) -> dict[str, int]:
        """Return name -> address for the tensors that a load of `sources` must not move."""
        written, filled = self._written(sources), self._filled(sources)
        return _places(self.held(), written, filled)


def _places(
    held: Mapping[str, Holding], written: Collection[str], filled: Collection[str]
) -> dict[str, int]:
    """Return name -> address for tensors that a load must not move.

    These are the tensors that updates write, and the GPU tensors that a load writes, because CUDA graphs contain the
    addresses of GPU tensors.
    """
    return {
        name: h.address
        for name, h in held.items()
        if name in written or (name in filled and h.tensor.is_cuda)
    }


@final
class _Marks:
    """Marks (a NaN that no weight has) in floating-point tensors, to find the elements that a load writes.

    Args:
        held: tensors of the model, by name.
        left: name of a tensor to fill -> number of its elements that a load does not write; -1 if unknown.
    """

    def __init__(self, held: Mapping[str, Holding], left: Mapping[str, int]) -> None:
        self._names = tuple(left)
        self._before: dict[str, torch.Tensor] = {}
        # torch forbids writes to inference tensors outside inference mode.
        with torch.inference_mode():
            for name in left.keys() & held.keys():
                memory = bits_of(held[name].memory())
                if left[name]:
                    self._before[name] = memory.clone()
                memory.fill_(_MARKS[held[name].tensor.dtype])

    def clear(self, held: Mapping[str, Holding]) -> dict[str, int]:
        """Restore the old values of elements that still have a mark, and return the number of these elements by name.

        `held` has the model's tensors after the load. The number is -1 for a tensor that no longer
        exists.
        """
        found = dict.fromkeys(self._names, -1)
        with torch.inference_mode():
            memories = {n: bits_of(held[n].memory()) for n in found.keys() & held.keys()}
            marks = {n: _MARKS[held[n].tensor.dtype] for n in memories}
            counts = [(memory == marks[n]).sum() for n, memory in memories.items()]
            # Stack the counts, to wait for the GPU only once: this function runs in every pause.
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
    """Return the name of the module `level` levels above a tensor, with a final dot (for `startswith`)."""
    parts = name.split(".")[:-level]
    return "".join(f"{part}." for part in parts)


def _tensors_in(numbers: ElementIds, codes: Codes) -> frozenset[str]:
    """Return the names of the checkpoint tensors that have elements in a tensor of the engine."""
    bounds = torch.from_numpy(codes.starts[1:-1])
    found: set[int] = set()
    for _, part in numbers.chunks():
        filled = part[part >= 0]
        tensors = torch.searchsorted(bounds.to(filled.device), filled, right=True)
        found.update(torch.unique(tensors).tolist())
    return frozenset(codes.specs[index].name for index in found)


@contextmanager
def _nothing_left_over() -> Iterator[None]:
    """Make torch fill new uninitialised tensors with NaN in the `with` block.

    Otherwise, a new tensor might get freed memory of an earlier load, and this memory might contain the right values.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
