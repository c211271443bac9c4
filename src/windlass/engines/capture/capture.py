"""Run the engine's own loader on coded tensors and read off what went where.

`load` is the engine's way from checkpoint tensors to memory that serves, post-processing
included. It runs once per digit of an element number, and then with random values. The digits
say which checkpoint element lies at every place; the random values prove it bit for bit. Of layers
that are alike one is loaded with digits, and the others are taken to lie as it does; where the proof
does not bear that out, all are. What the loader permutes, pads, splits, fuses or repeats is a copy and
is followed; what it computes (a dequantised weight, `weight + 1`) fails the proof, and is left to the
loader itself (`recompute`).

One load of random values is enough where these things are so; where one is not, there is a second one:

- Every tensor that changes holds at every place the value of its element. No load before, nor the engine's
  start, had these values: the place was written by this load, from that element. A place that holds another
  element passes by chance, once in 768 in bfloat16 and in 2^24 in float32, independently of others, and a
  wrong layout is wrong in rows and whole tensors. So tensors of fewer than `FEW` elements, of which nothing
  was read, need the second load.
- What a copy of some values is might be none of others. The loads before were of digits, which lie where the
  random values do in all that was read: one layer of each kind, which the same code loads as its likes.
- Where no element lies, what was read holds the same after digits as after random values, and its likes hold
  that, too: it depends on no value.
- The loads have changed every parameter. Of one that they have not, the second load shows whether it is written
  at all: its memory is marked before.

The idea of running a loader on tensors that remember where they came from is that of vLLM's
sharded weight transfer; carrying coordinates in the values needs no operator coverage.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from windlass.engines.capture.codes import CheckpointSpec, Codes, Load, StoredCheckpoint
from windlass.engines.capture.description import Captured, Seen, describe
from windlass.engines.capture.element_ids import Check, ElementIds, scaled
from windlass.engines.capture.layers import Layers
from windlass.engines.capture.memory import (
    Held,
    Holding,
    Kind,
    Watched,
    differing,
    fingerprint,
    prints_of,
    refuse,
)
from windlass.engines.capture.mirrors import Found, Later, Mirror, find_mirrors
from windlass.engines.capture.reach import Number
from windlass.engines.capture.recompute import Recompute, plan_recompute
from windlass.engines.capture.snapshot import Snapshot, undone_if_it_fails
from windlass.engines.rank_reports import RefusedByOtherRank
from windlass.errors import UnsupportedLayout, WindlassError
from windlass.layout.naming.patterns import patterns_of

_Found = TypeVar("_Found")
EXACT_NUMEL = 1 << 20
FEW = 4
"""As many elements by chance hold, in bfloat16, what they should with a probability of 768^-4."""
NUM_SAMPLES = 8
"""Places of a tensor: in so many, what lies otherwise holds the same by chance with a probability of some 100^-8."""
_NOT_REPEATED = (
    "loading the engine's own checkpoint again gives other bytes than its start gave: the engine "
    "does not repeat its post-processing, or was not started from it"
)
_SEEDS = itertools.count(4)
"""Of random values: no two loads of this process have the same, so that what an earlier one left is never taken for
what a later one has written."""
CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types that updates cast into one another."""
MAX_EXACT_NUMEL = 1 << 30
"""Read place by place if need be: 8 GiB of numbers."""


def capture(
    model: torch.nn.Module,
    specs: Sequence[CheckpointSpec],
    load: Load,
    *,
    worker: str,
    ignored: frozenset[int] = frozenset(),
    reference: StoredCheckpoint | None = None,
    exact_numel: int = EXACT_NUMEL,
    factors: Sequence[float] = (),
    recompute: bool = True,
    made_up: bool = False,
) -> Captured:
    """Capture the layout of a model, which then holds what it held before, in whatever way this ends.

    That is: bytes, tensors at their addresses, and what modules, tensors and objects of the engine
    beside them hold (`Snapshot`). What else `load` changes is its own to put back when it fails.
    The engine is quiesced; no collective of ours. Memory: a copy of every tensor of the model (on its
    device where that has room, else on the host), and what `exact_numel` says.

    Args:
        model: of this rank.
        specs: the whole checkpoint.
        load: see `Load`.
        worker: identity of the rank.
        ignored: see `held_by`.
        reference: the checkpoint that the model was first loaded from. An engine's way of
            loading again may skip what it did at the start (repacking for a kernel). So layers of
            each kind are loaded from it once more, and where the bytes are not those of the first
            load, or those of the other layers' tensors not the checkpoint's in `NUM_SAMPLES` places
            or more, at least one of every checkpoint tensor, the layout is refused.
        exact_numel: tensors of more elements are read row by row first, and place by place (8
            bytes each) only if that does not prove right. The proof visits every place of all.
        factors: by one of which the engine may multiply a tensor while it loads it; those that it
            does are received in a buffer and multiplied by `finalise`. One load more.
        recompute: have `finalise` call `load` with the checkpoint tensors from which the engine
            computes others, for as long as the engine lives; if not, because `load` replaces all that
            it ever loaded, computed tensors are refused, and all of `reference` is loaded.
        made_up: the engine was started without weights and has served nobody: what its parameters
            hold is not put back.

    Raises:
        UnsupportedLayout: the loader failed, with its reason; or a tensor that is computed and that
            no load of a part computes again, a parameter (other than a scalar) that the loader does
            not write, memory that moves with every load, or that only loads make; names all of them.
    """
    held = Watched(model, ignored)
    seconds: dict[str, float] = {}
    codes = Codes(specs, _device(held()))
    guarded = undone_if_it_fails(load, held)
    held.settle()
    early = None
    if made_up:
        with _timed(seconds, "copies of weights"):
            early = _early(held())
    with _timed(seconds, "copies"):
        before = Snapshot(held, copies=True, parameters=not made_up)
    try:
        start = _Start(held.all_numbers(), before.prints if reference is not None else {})
        with _timed(seconds, "digits"):
            factors_of = _multiplied(codes, guarded, held, factors)
        loads = _Loads(codes, guarded, held, factors_of, start, seconds)
        seen, part = _observed(loads, exact_numel, recompute=recompute)
        apart: frozenset[str] = frozenset()
        if reference is not None:
            with _timed(seconds, "own checkpoint"):
                layers = Layers.alike(codes, held()) if recompute else None
                apart = _require_repeated(loads, reference, seen, part, layers)
        with _timed(seconds, "description"):
            placed = seen.placed(codes, part)
            read = _read(loads, placed)
    except WindlassError:
        raise
    except Exception as error:
        raise UnsupportedLayout(
            f"{worker}: the engine's loader failed while its layout was captured: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        with _timed(seconds, "putting back"):
            before.restore()
            held.changed()
    # Where tensors lie is told of those that are there again, not of what the last load has made.
    now = held()
    made = [n for n in seen.numbers if n not in now or now[n].reach != seen.holdings[n].reach]
    refuse(made, "tensors that the engine had not before its loader made them")
    if reference is not None:
        with _timed(seconds, "own checkpoint"):
            _require_samples(reference, codes, replace(seen, holdings=now), apart)
    with _timed(seconds, "copies of weights"):
        found = _mirrors(loads, seen, now, early)
    if part is not None:
        part.fix_addresses(found.keys())
    with _timed(seconds, "description"):
        captured = describe(replace(seen, holdings=now), codes, worker, part, placed, read)
        written = {p.name for p in captured.manifest.parameters} - {*captured.repacked}
        weights = seen.numbers.keys() | seen.computed
        later = Later(Watched(model, ignored), written, weights, found)
    held.changed()
    return replace(captured, later=later, seconds=seconds)


def _early(held: Mapping[str, Holding]) -> Found:
    weights = [h for h in held.values() if h.kind is Kind.PARAMETER]
    return find_mirrors([h for h in held.values() if h.kind is not Kind.PARAMETER], weights)


def _mirrors(
    loads: _Loads, seen: Seen, now: Mapping[str, Holding], early: Found | None
) -> Mapping[str, Mirror]:
    """Return mirrors of the constants that are copies of weights.

    `early`: result of a search before the first load, if the parameters have lost the values of the start.

    Raises:
        UnsupportedLayout: a constant follows from weights in another way; names all of them.
    """
    weights = seen.numbers.keys() | seen.computed
    constants = {
        name
        for name, holding in now.items()
        if name not in weights and holding.kind not in (Kind.PARAMETER, Kind.NUMBER)
    }
    if early is None:
        early = find_mirrors(
            [now[name] for name in constants],
            [now[name] for name in weights & now.keys()],
            {path: n for path, n in loads.held.all_numbers().items() if path not in loads.counted},
        )
    found = Found(
        {name: mirror for name, mirror in early.mirrors.items() if name in constants},
        {name: how for name, how in early.derived.items() if name in constants or name not in now},
    )
    found.require_refilled()
    return found.mirrors


def capture_on_every_rank(
    capture: Callable[[], _Found], is_on_every_rank: Callable[[bool], bool]
) -> _Found:
    """Capture a layout, unless another rank could not: a retry captures on every rank then.

    Loaders of tensor-parallel ranks may wait for each other, so that one must not load alone. All of them are
    in this call; `is_on_every_rank` is collective.

    Raises:
        RefusedByOtherRank: another rank could not.
        UnsupportedLayout: see `capture`.
    """
    try:
        captured = capture()
    except BaseException:
        is_on_every_rank(False)
        raise
    if not is_on_every_rank(True):
        raise RefusedByOtherRank("another rank of this engine could not capture its layout")
    return captured


def all_ranks(mine: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `mine` is true on every rank of a group, each of which is in the same call.

    The group (None: all of the world) reduces tensors of `device`; its timeout is the deadline.
    """
    least = torch.tensor([int(mine)], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return bool(least.item())


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Within it a stage of the capture goes on; what it has queued on a GPU counts, and is waited for."""
    begun = time.perf_counter()
    seconds.setdefault(stage, 0.0)
    try:
        yield
    finally:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        seconds[stage] += time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class _Start:
    """State of the model when its capture began.

    Attributes:
        numbers: its Python numbers, by path.
        prints: fingerprints of its tensors; empty unless the loader filled them from a known checkpoint.
    """

    numbers: Mapping[str, Number]
    prints: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Loads:
    """The loads of a capture, and the model that they fill.

    `seconds`: see `Captured`. `counted`: paths of Python numbers that a load has changed.
    """

    codes: Codes
    load: Load
    held: Watched
    factors: Mapping[str, float]
    start: _Start
    seconds: dict[str, float]
    counted: set[str] = field(default_factory=set)

    def random(self, seed: int) -> None:
        with _timed(self.seconds, "random values"):
            self.load(self.codes.random(seed))


def _multiplied(codes: Codes, load: Load, held: Held, factors: Sequence[float]) -> dict[str, float]:
    """Return the factor of every tensor that shows one of `factors`; the proof decides."""
    found: dict[str, float] = {}
    if others := [factor for factor in factors if factor != 1.0]:
        load(codes.constant(1.0))
        for name, holding in held().items():
            memory = holding.memory()
            if not memory.is_floating_point() or memory.element_size() < 2:
                continue
            for factor in others:
                product = scaled(torch.ones_like(memory[:1]), factor)
                if (memory == product).any() and ((memory == product) | (memory == 0)).all():
                    found.setdefault(name, factor)
    return found


def _observed(loads: _Loads, exact_numel: int, *, recompute: bool) -> tuple[Seen, Recompute | None]:
    """Observe until everything is understood."""
    scattered = frozenset(loads.factors)
    layers = Layers.alike(loads.codes, loads.held()) if not loads.factors else None
    while True:
        try:
            seen = _observe(loads, exact_numel, scattered, layers)
        except _PartRefused:
            layers = None
            continue
        if layers is not None and (seen.computed - loads.held.numbers or seen.unproven):
            layers = None
            continue
        if not (more := seen.scattered(loads.codes) - scattered):
            break
        scattered |= more
    if not seen.computed:
        return seen, None
    if not recompute:
        refuse(seen.computed, "tensors that the engine computes from the checkpoint")
    with _timed(loads.seconds, "computed tensors"):
        part = plan_recompute(seen.computed, seen.numbers, loads.codes, loads.load, loads.held)
    return replace(seen, computed=seen.computed & frozenset(part.names if part else ())), part


def _observe(
    loads: _Loads, exact_numel: int, scattered: frozenset[str], layers: Layers | None
) -> Seen:
    """Load digits, from which the places are read, and then random values, which prove them, once or twice.

    Raises:
        _PartRefused: the loader takes no part of a checkpoint, if it is given one: digits of `layers`.
    """
    codes, seconds = loads.codes, loads.seconds
    with _timed(seconds, "fingerprints"):
        before = prints_of(loads.held()) if layers is not None else {}
    chosen = None if layers is None else layers.loaded
    with _timed(seconds, "digits"):
        _load_digit(loads, 0, chosen)
    held = loads.held()
    with _timed(seconds, "fingerprints"):
        prints = prints_of(held)
    places = {name: h.address for name, h in held.items()}
    counted = loads.held.all_numbers()
    loaded = {n: h for n, h in held.items() if prints[n] != before.get(n)}
    with _timed(seconds, "digits"):
        numbers = _read_digits(loads, loaded, exact_numel, scattered, chosen)
    held = loads.held()
    paddings: dict[int, int] = {}
    if layers is not None:
        with _timed(seconds, "comparison"):
            read = {n: ids for n, ids in numbers.items() if n in held}
            paddings = {id(ids): ids.check(held[n], codes, None).padding for n, ids in read.items()}
            numbers = layers.all_of(numbers, held, codes)
    loads.random(seed := next(_SEEDS))
    held = loads.held()
    with _timed(seconds, "fingerprints"):
        constants = [n for n, h in held.items() if prints.get(n) == fingerprint(h.memory())]
    changing = [name for name in held if name not in constants]
    checks = _checks(loads, held, {n: numbers[n] for n in changing if n in numbers}, seed)
    right = {n for n, check in checks.items() if check.is_right}
    if layers is None or not (
        right.issuperset(changing)
        and not any(_is_weight(held[n]) for n in constants)
        and all(_is_certain(numbers[n], check, paddings) for n, check in checks.items())
    ):
        idle = {n: held[n].memory().clone() for n in constants if _is_weight(held[n])}
        for name in idle:
            with torch.inference_mode():  # as tensors that were made in it demand
                held[name].memory().view(torch.uint8).fill_(0x55)
        loads.random(seed := next(_SEEDS))
        held = loads.held()
        again = _checks(loads, held, {n: numbers[n] for n in right}, seed)
        right = {n for n in right if again[n] == checks[n]}
        unwritten = [n for n, constant in idle.items() if not _same(held[n].memory(), constant)]
        refuse(unwritten, "parameters that the engine's loader does not write")
    loads.held.numbers |= (changed := _counted(counted, loads))
    loads.counted.update(changed)
    moved = [n for n in changing if held[n].address != places.get(n) and _must_stay(held[n])]
    refuse(moved, "tensors that move with every load")
    unproven = frozenset(
        n
        for n in checks
        if n not in right
        and not numbers[n].by_place
        and n not in scattered
        and held[n].reach <= MAX_EXACT_NUMEL
    )
    derived_numbers = loads.held.numbers
    right = {n for n in right if _is_received(held[n], loads.codes)} - derived_numbers
    # What random values do not change, but the checkpoint of the start did, depends on it too.
    hidden = {
        n for n in constants if n in loads.start.prints and prints[n] != loads.start.prints[n]
    }
    return Seen(
        holdings=held,
        numbers={n: numbers[n] for n in changing if n in right or n in unproven},
        factors=loads.factors,
        constants=tuple(n for n in constants if n not in hidden and n not in derived_numbers),
        unproven=unproven,
        computed=frozenset(n for n in changing if n not in right and n not in unproven)
        | hidden
        | derived_numbers,
    )


def _counted(before: Mapping[str, Number], loads: _Loads) -> frozenset[str]:
    """Return the numbers that a load has changed, and the same numbers of all other layers."""
    changed = patterns_of(differing(before, loads.held.all_numbers()))
    if not changed:
        return frozenset()
    every = patterns_of(loads.start.numbers)
    return frozenset(path for pattern in changed for path in every.get(pattern, ()))


def _checks(
    loads: _Loads, held: Mapping[str, Holding], numbers: Mapping[str, ElementIds], seed: int
) -> dict[str, Check]:
    """Compare tensors, just loaded from `random(seed)`, with what their numbers say."""
    with _timed(loads.seconds, "comparison"):
        return {
            n: ids.check(held[n], loads.codes, seed, loads.factors.get(n, 1.0))
            for n, ids in numbers.items()
        }


def _is_certain(numbers: ElementIds, check: Check, paddings: Mapping[int, int]) -> bool:
    """Return whether one load of random values proves a tensor that is right after it; see the module.

    `paddings`: fingerprints of the padding of what was read, after a load of other values.
    """
    origin = numbers.origin
    is_read = numbers is origin
    return check.padding == paddings.get(id(origin)) and (is_read or check.numel >= FEW)


class _PartRefused(Exception):
    """The loader failed with part of a checkpoint."""


def _load_digit(loads: _Loads, position: int, chosen: frozenset[str] | None) -> None:
    """Load a digit of every element, or of those of the chosen tensors."""
    try:
        loads.load(loads.codes.digits(position, chosen))
    except Exception as error:
        if chosen is None:
            raise
        raise _PartRefused from error


def _read_digits(
    loads: _Loads,
    held: Mapping[str, Holding],
    exact_numel: int,
    scattered: frozenset[str],
    chosen: frozenset[str] | None,
) -> dict[str, ElementIds]:
    """Which checkpoint element lies at each place of what is `held`, which has the first digits."""
    numbers = {
        name: ElementIds(
            h, by_place=h.reach <= (MAX_EXACT_NUMEL if name in scattered else exact_numel)
        )
        for name, h in held.items()
    }
    for position in range(loads.codes.num_digits):
        if position:
            _load_digit(loads, position, chosen)
        for name, holding in loads.held().items():
            if name in numbers and holding.reach == held[name].reach:
                factor = loads.factors.get(name, 1.0)
                numbers[name].observe(holding, loads.codes, position, factor)
    return numbers


def _read(loads: _Loads, placed: frozenset[str]) -> frozenset[str]:
    """Return the checkpoint tensors beside `placed` at whose elements the loader looks, by a load that is watched."""
    others = frozenset(spec.name for spec in loads.codes.specs if spec.numel) - placed
    if not others:
        return frozenset()
    # One that is surely read is among them: where no read is seen, another thread does it.
    try:
        return _watched(loads, others.union(sorted(placed)[:1])).read(others)
    except Exception:  # noqa: BLE001 - an engine's loader raises what it likes where it misses tensors
        return _watched(loads, others | placed).read(others)


def _watched(loads: _Loads, names: frozenset[str]) -> _Reading:
    with (reading := _Reading()):
        loads.load(reading.over(loads.codes.some(names, 0)))
    return reading


def _must_stay(holding: Holding) -> bool:
    """Return whether a tensor is refused if every load moves it. HELD tensors are put back instead."""
    if holding.kind is Kind.HELD:
        return False
    return holding.kind is not Kind.ATTRIBUTE or holding.tensor.device.type != "cpu"


def _is_received(holding: Holding, codes: Codes) -> bool:
    """Return whether updates can write a copy that lies there. The loader makes others: of other types, and numbers."""
    is_module = holding.kind in (Kind.PARAMETER, Kind.BUFFER)
    return is_module or holding.tensor.dtype in (*codes.dtypes, *CAST_DTYPES)


def _is_weight(holding: Holding) -> bool:
    """Return whether loads must write this: a parameter, but no scalar, from which engines take settings as numbers."""
    return holding.kind is Kind.PARAMETER and holding.tensor.dim() > 0


_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "nbytes", "itemsize", "is_meta")
_METHODS = ("size", "dim", "numel", "nelement", "element_size", "stride")
_TENSOR: Mapping[str, Any] = vars(torch._C.TensorBase)
_QUESTIONS = frozenset(
    {*(_TENSOR[name].__get__ for name in _ATTRIBUTES), *(_TENSOR[name] for name in _METHODS)}
)
"""What is known of a tensor whose elements nobody has seen."""


@final
class _Reading(TorchFunctionMode):
    """Entered for a load, takes note of the tensors with which torch's functions are called.

    Engines skip what they do not serve: layers that predict further tokens, an output matrix that is tied, a
    tower that was not built. A tensor that left no trace may have been skipped, or lie where capture does not
    see it. It was skipped if the loader called nothing with it but questions of its shape, and let it go.
    """

    def __init__(self) -> None:
        super().__init__()
        self._read: set[str] = set()
        self._given: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    def over(
        self, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors, watched from then on."""
        while True:
            with torch._C.DisableTorchFunction():  # making them is not reading them
                name, tensor = next(weights, ("", None))
            if tensor is None:
                return
            self._given[id(tensor)] = weakref.ref(tensor), name
            yield name, tensor
            del tensor

    def read(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of `names` that were read, or are still there. All of them if none was: another thread did it."""
        kept = {name for tensor, name in self._given.values() if tensor() is not None}
        found = self._read | kept
        return frozenset(name for name in names if not self._read or name in found)

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _QUESTIONS:
            for tensor in _tensors_in((*args, *(kwargs or {}).values())):
                given = self._given.get(id(tensor))
                if given is not None and given[0]() is tensor:
                    self._read.add(given[1])
        return func(*args, **(kwargs or {}))


def _tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _device(held: Mapping[str, Holding]) -> torch.device:
    """Return where the parameters are; loads made there need no way over the host."""
    devices = {h.tensor.device for h in held.values() if h.kind is Kind.PARAMETER}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _require_repeated(
    loads: _Loads,
    reference: StoredCheckpoint,
    seen: Seen,
    part: Recompute | None,
    layers: Layers | None,
) -> frozenset[str]:
    """Load what the engine started from, of `layers` one of each kind if it takes that; fill the buffers of `part`.

    Returns the tensors of which that tells nothing.

    Raises:
        UnsupportedLayout: the bytes are not those of the start.
    """
    computed = frozenset() if part is None else frozenset(part.names)
    buffers = frozenset() if part is None else frozenset(spec.name for spec, _ in part.buffers)
    apart = frozenset[str]()
    before = loads.held.all_numbers()
    if layers is not None:
        given = layers.loaded | buffers
        try:
            _load_reference(loads, reference.tensors(given), part)
        except Exception:  # noqa: BLE001 - an engine's loader raises what it likes where it misses tensors
            layers = None
        else:
            apart = frozenset(
                name
                for name in seen.numbers.keys() - computed
                if not seen.sources(name, loads.codes) <= given
            )
    if layers is None:
        _load_reference(loads, reference.tensors(), part)
    _refuse_numbers(loads, before)
    _require_start(loads, apart | computed)
    if part is not None:
        part.run()
        _require_start(loads, apart)
    return apart


def _refuse_numbers(loads: _Loads, before: Mapping[str, Number]) -> None:
    """Raise UnsupportedLayout if only the own checkpoint gives numbers their values of the start."""
    start, now = loads.start.numbers, loads.held.all_numbers()
    hidden = differing(start, before) - differing(start, now) - loads.counted
    refuse(
        sorted(hidden & now.keys()),
        "numbers that the engine takes from its checkpoint, and that random values do not change; have the engine "
        "compute them from its weights at every step",
    )


def _load_reference(
    loads: _Loads, weights: Iterator[tuple[str, torch.Tensor]], part: Recompute | None
) -> None:
    loads.load(weights if part is None else part.filling(weights))


def _require_start(loads: _Loads, ignored: Collection[str]) -> None:
    """Raise UnsupportedLayout if tensors, but for those ignored, hold what they did not at the start."""
    changed = [
        n
        for n, h in loads.held().items()
        if n in loads.start.prints
        and n not in ignored
        and fingerprint(h.memory()) != loads.start.prints[n]
    ]
    refuse(changed, _NOT_REPEATED)


def _require_samples(
    reference: StoredCheckpoint, codes: Codes, seen: Seen, names: Collection[str]
) -> None:
    """Raise UnsupportedLayout if tensors that hold what they did at the start differ from its checkpoint in some places."""
    changed: list[str] = []
    samples = {name: seen.samples(name, codes, NUM_SAMPLES) for name in sorted(names)}
    stored = reference.elements((t, at) for found in samples.values() for t, at, _ in found)
    for name, found in samples.items():
        memory, factor = seen.holdings[name].memory(), seen.factors.get(name, 1.0)
        places = torch.tensor([place for _, _, place in found], device=memory.device)
        held = memory[places].cpu()
        wanted = [scaled(next(stored).to(held.dtype), factor) for _ in found]
        if not _same(held, torch.cat(wanted)):
            changed.append(name)
    refuse(changed, _NOT_REPEATED)
