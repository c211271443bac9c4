"""Run the engine's own loader on coded tensors and read the layout from the engine's memory.

The loader turns checkpoint tensors into the tensors that the engine computes with. It may permute, pad, split, fuse or
repeat checkpoint tensors. Every checkpoint element has a number (`Codes`). Capture works in two steps:

1. Load digits of the element numbers, one digit per load, and read from memory which checkpoint element is at every
   place (index into a tensor's memory). Capture loads digits into one layer of each group of identical layers, and
   assumes the same layout for the other layers of the group (`Layers`).
2. Load random values, and check that every place has the random value of its checkpoint element. If the check fails
   for an assumed layout, repeat both steps with digits in all layers.

A tensor that the loader computes (a dequantised weight, `weight + 1`) fails the check. The engine's loader computes such
a tensor again after each update (`recompute`).

One load of random values is enough if all of these conditions are true; otherwise capture makes a second load:

- Every place of every tensor that changed has the expected value. A place with a wrong element has the expected
  value by chance with probability 1/768 in bfloat16 and 2^-24 in float32. A tensor must therefore have at least `FEW`
  elements. Of fewer elements, the loader may also drop the sign: the second load has values of the other sign.
- Padding has the same bytes after the load of digits and after the load of random values. This shows that padding does
  not depend on the checkpoint. A tensor that was read with digits is computed if its padding differs.
- Every parameter has other bytes after the load of random values than after the load of digits. Before a second load,
  capture fills the other parameters with a constant, to see whether the loader writes these parameters at all.

vLLM's sharded weight transfer also runs a loader on tensors that record their origin. Capture stores the origin in
the values, so that capture does not depend on the torch operators that the loader uses.
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

from windlass.element_ids.codes import CheckpointSpec, Codes, Load
from windlass.element_ids.ids import Check, ElementIds, scaled
from windlass.element_ids.memory import fingerprint
from windlass.engines.capture.checkpoint import StoredCheckpoint
from windlass.engines.capture.description import Captured, Seen, describe
from windlass.engines.capture.layers import Layers
from windlass.engines.capture.memory import (
    Held,
    Holding,
    Kind,
    Watched,
    differing,
    prints_of,
    refuse,
    tied_names,
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
"""Default of `exact_numel` in `capture`."""
FEW = 4
"""Minimum number of elements for which one load of random values proves an assumed layout.

Four wrong bfloat16 elements all have the expected value with probability 768^-4.
"""
NUM_SEEDS = 64
"""Number of seeds among which `_opposite_seed` chooses."""
NUM_SAMPLES = 8
"""Number of sampled places per tensor. A wrong layout matches all samples with probability of about 100^-8."""
_NOT_REPEATED = (
    "a second load of the engine's own checkpoint gives other bytes than the engine had at its start: the "
    "loader does not repeat its post-processing, or the engine was started from another checkpoint"
)
_SEEDS = itertools.count(4)
"""Seeds of random values. Each load uses a new seed, so that no load repeats the values of an earlier load."""
CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""dtypes between which updates cast."""
MAX_EXACT_NUMEL = 1 << 30
"""Maximum number of elements of a tensor that capture reads at every place: the element numbers need 8 GiB."""


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
    """Capture the layout of a model, and restore the model afterwards, also after an error.

    The engine must be quiesced. This function calls no collective. It restores the tensors' bytes and addresses, and the
    contents of the engine's objects (`Snapshot`). Memory: a copy of every tensor, on the tensor's device if there is
    room, else on the host; and 8 bytes per element for tensors of up to `exact_numel` elements.

    Args:
        model: model of this rank.
        specs: all tensors of the checkpoint.
        load: the engine's loader, see `Load`. If the loader raises, it must itself restore all state that `Snapshot`
            does not record.
        worker: identity of the rank.
        ignored: addresses of storages to skip, such as KV caches.
        reference: checkpoint that the engine loaded when it started. Capture loads this checkpoint again, and checks
            that the model then has the same bytes as before the capture. If the loader skips a step in a second load,
            for example repacking for a kernel, this check fails. Capture loads only one layer of each group of identical
            layers, and compares `NUM_SAMPLES` places per tensor of the other layers with the checkpoint. If `reference`
            is None, capture makes no such check.
        exact_numel: number of elements up to which capture reads every place of a tensor. In a larger tensor, capture
            first reads only the first place of each row, and whole sample rows (see `ElementIds`).
        factors: constants by which the engine's loader may multiply a tensor. For such a tensor, updates write a buffer,
            and `Captured.finalise` writes the multiplied values into the tensor. If a factor is not 1, capture needs
            one more load.
        recompute: whether `Captured.finalise` may call `load` with a part of the checkpoint, so that the engine computes
            the computed tensors again. False if `load` always needs the whole checkpoint; capture then refuses computed
            tensors.
        made_up: whether the engine started with random weights and has served no request. Capture then does not
            restore the values of parameters.

    Raises:
        UnsupportedLayout: the loader failed, or the model has one of these tensors. The message has the reason or the name
            of the tensor.

            - a computed tensor that no partial load computes again
            - a parameter (other than a scalar) that the loader does not write
            - a tensor that moves with every load
            - a tensor that only exists after a load
            - a tensor with other bytes after a second load of `reference`
            - a value that depends on weights, but that an update cannot refill
            - a tensor that `describe` refuses
    """
    held = Watched(model, ignored)
    seconds: dict[str, float] = {}
    codes = Codes(specs, _device(held()))
    guarded = undone_if_it_fails(load, held)
    held.settle()
    early = None
    if made_up:
        with _timed(seconds, "copies of weights"):
            early = _find_mirrors_before_loads(held)
    with _timed(seconds, "copies"):
        before = Snapshot(held, copies=True, parameters=not made_up)
    try:
        start = _Start(held.all_numbers(), before.prints if reference is not None else {})
        with _timed(seconds, "digits"):
            factors_of = _find_multiplied(codes, guarded, held, factors)
        loads = _Loads(codes, guarded, held, factors_of, start, seconds)
        seen, part = _observe_every_tensor(loads, exact_numel, recompute=recompute)
        apart: frozenset[str] = frozenset()
        if reference is not None:
            with _timed(seconds, "own checkpoint"):
                layers = Layers.alike(codes, held()) if recompute else None
                apart = _require_repeated(loads, reference, seen, part, layers)
        with _timed(seconds, "description"):
            placed = seen.placed(codes, part)
            read = _find_read_tensors(loads, placed)
    except WindlassError:
        raise
    except Exception as error:
        raise UnsupportedLayout(
            f"{worker}: the engine's loader failed during the capture of the layout: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        with _timed(seconds, "putting back"):
            before.restore()
            held.changed()
    # Describe the tensors of the restored model, because a load may have replaced tensors.
    now = held()
    made = [n for n in seen.numbers if n not in now or now[n].reach != seen.holdings[n].reach]
    refuse(
        made,
        "these tensors did not exist before the capture; the engine's loader creates them only in a later load",
    )
    if reference is not None:
        with _timed(seconds, "own checkpoint"):
            _require_samples(reference, codes, replace(seen, holdings=now), apart)
    with _timed(seconds, "copies of weights"):
        found = _find_unloaded_mirrors(loads, seen, now, early)
    if part is not None:
        part.fix_addresses(found.keys())
    with _timed(seconds, "description"):
        tied = tied_names(model)
        captured = describe(replace(seen, holdings=now), codes, worker, part, placed, read, tied)
        written = {p.name for p in captured.manifest.parameters} - {*captured.repacked}
        weights = seen.numbers.keys() | seen.computed
        later = Later(Watched(model, ignored), written, weights, found)
    held.changed()
    return replace(captured, later=later, seconds=seconds)


def _find_mirrors_before_loads(watched: Watched) -> Found:
    """Search the model for mirrors (tensors that are copies of parameters) and other values computed from parameters.

    Call this before the first load if `capture` does not restore parameters. A load overwrites the parameters with coded
    values, so a later search could not find the copies by their values.
    """
    held, copies = watched().values(), watched.copies().values()
    weights = [h for h in held if h.kind is Kind.PARAMETER]
    return find_mirrors([*(h for h in held if h.kind is not Kind.PARAMETER), *copies], weights)


def _find_unloaded_mirrors(
    loads: _Loads, seen: Seen, now: Mapping[str, Holding], early: Found | None
) -> Mapping[str, Mirror]:
    """Return the mirrors (copies of weights) among the tensors that no load changed, by name.

    `now` has the tensors of the restored model. `early` is the result of `_find_mirrors_before_loads`. If `early` is
    None, this function searches the restored model.

    Raises:
        UnsupportedLayout: a value depends on weights, but an update cannot refill it; the message names these values.
    """
    weights = seen.numbers.keys() | seen.computed
    constants = {
        name
        for name, holding in now.items()
        if name not in weights and holding.kind not in (Kind.PARAMETER, Kind.NUMBER)
    }
    copies = loads.held.copies()
    if early is None:
        early = find_mirrors(
            [*(now[name] for name in constants), *copies.values()],
            [now[name] for name in weights & now.keys()],
            {path: n for path, n in loads.held.all_numbers().items() if path not in loads.counted},
        )
    found = Found(
        {
            name: mirror
            for name, mirror in early.mirrors.items()
            if name in constants or name in copies
        },
        {name: how for name, how in early.derived.items() if name in constants or name not in now},
    )
    found.require_refilled()
    return found.mirrors


def capture_on_every_rank(
    capture: Callable[[], _Found], is_on_every_rank: Callable[[bool], bool]
) -> _Found:
    """Capture and return this rank's layout. If the capture fails on one rank, raise an error on every rank. Collective.

    If only the failed rank raised an error, then only this rank would capture again at the next join. Its loader might
    wait for the loaders of the other ranks, but these ranks would reuse their layouts and load nothing.

    Args:
        capture: function that captures this rank's layout.
        is_on_every_rank: collective function that returns whether its argument is True on every rank.

    Raises:
        RefusedByOtherRank: another rank failed to capture its layout.
        UnsupportedLayout: this rank failed to capture its layout.
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
    """Return whether `mine` is True on every rank of a process group (None for the default group). Collective.

    The group's backend must be able to reduce a tensor on `device`. The group's timeout is the deadline.
    """
    least = torch.tensor([int(mine)], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return bool(least.item())


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the seconds of the `with` block, including its GPU work, to a stage of the capture."""
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
        numbers: Python numbers of the model, by path.
        prints: fingerprints of the model's tensors, by name; empty if capture has no checkpoint to compare with.
    """

    numbers: Mapping[str, Number]
    prints: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Loads:
    """Inputs and state that the steps of one capture share.

    Attributes:
        codes: coded checkpoint tensors.
        load: the engine's loader.
        held: current tensors of the model.
        factors: name of a tensor -> constant factor of the engine's loader for this tensor.
        start: state of the model before the first load.
        seconds: stage of the capture -> seconds spent so far.
        counted: paths of Python numbers that a load has changed.
    """

    codes: Codes
    load: Load
    held: Watched
    factors: Mapping[str, float]
    start: _Start
    seconds: dict[str, float]
    counted: set[str] = field(default_factory=set)

    def random(self, seed: int) -> None:
        """Load the values `codes.random(seed)` into the model, and add the duration to `seconds`."""
        with _timed(self.seconds, "random values"):
            self.load(self.codes.random(seed))


def _find_multiplied(
    codes: Codes, load: Load, held: Held, factors: Sequence[float]
) -> dict[str, float]:
    """Return name -> factor for the tensors that the loader multiplies by one of `factors`.

    To find these tensors, load a checkpoint in which every element is 1. A multiplied tensor then contains only its factor,
    or its factor and zeros.
    """
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


def _observe_every_tensor(
    loads: _Loads, exact_numel: int, *, recompute: bool
) -> tuple[Seen, Recompute | None]:
    """Find out whether each tensor that a load changes is a copy of checkpoint elements or a computed tensor.

    Call `_observe_once` until this is known for every tensor. Each call after the first reads more tensors at every
    place, or loads test values into every layer instead of only one layer per group of identical layers.

    Returns:
        The layout of every tensor, and a `Recompute` (None if there is no computed tensor). After an update, the `Recompute`
        loads a part of the checkpoint again, and the loader then computes the tensors in `Seen.computed` again.

    Raises:
        UnsupportedLayout: a tensor is computed, and `recompute` is False.
    """
    scattered = frozenset(loads.factors)
    layers = Layers.alike(loads.codes, loads.held()) if not loads.factors else None
    while True:
        try:
            seen = _observe_once(loads, exact_numel, scattered, layers)
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
        refuse(
            seen.computed,
            "the engine computes these tensors, and its loader cannot compute them again after an update",
        )
    with _timed(loads.seconds, "computed tensors"):
        part = plan_recompute(seen.computed, seen.numbers, loads.codes, loads.load, loads.held)
    return replace(seen, computed=seen.computed & frozenset(part.names if part else ())), part


def _observe_once(
    loads: _Loads, exact_numel: int, scattered: frozenset[str], layers: Layers | None
) -> Seen:
    """Load digits to read the layout, then load random values once or twice to check the layout. Return the layout.

    Add the paths of changed Python numbers to `loads.counted` and to `loads.held.numbers`. Afterwards the model contains the
    random values.

    `scattered` has the names of tensors that must be read at every place although they have more than `exact_numel`
    elements. If `layers` is given, load digits only for the checkpoint tensors in `layers.loaded`.

    Raises:
        _PartRefused: the loader failed, and it got only the tensors in `layers.loaded`.
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
    with _timed(seconds, "comparison"):
        read = {n: ids for n, ids in numbers.items() if n in held}
        paddings = {
            id(ids): ids.check(held[n].tensor, codes, None).padding for n, ids in read.items()
        }
        if layers is not None:
            numbers = layers.all_of(numbers, held, codes)
    loads.random(seed := next(_SEEDS))
    held = loads.held()
    with _timed(seconds, "fingerprints"):
        constants = [n for n, h in held.items() if prints.get(n) == fingerprint(h.memory())]
    changing = [name for name in held if name not in constants]
    checks = _compare_values(loads, held, {n: numbers[n] for n in changing if n in numbers}, seed)
    right = {
        n
        for n, check in checks.items()
        if check.is_right and check.padding == paddings.get(id(numbers[n]), check.padding)
    }
    if layers is None or not (
        right.issuperset(changing)
        and not any(_is_weight(held[n]) for n in constants)
        and all(_is_certain(numbers[n], check, paddings) for n, check in checks.items())
    ):
        idle = {n: held[n].memory().clone() for n in constants if _is_weight(held[n])}
        for name in idle:
            # torch forbids writes to inference tensors outside inference mode.
            with torch.inference_mode():
                held[name].memory().view(torch.uint8).fill_(0x55)
        few = [numbers[n] for n in right if checks[n].numel < FEW]
        loads.random(seed := _opposite_seed(few, codes, seed))
        held = loads.held()
        again = _compare_values(loads, held, {n: numbers[n] for n in right}, seed)
        right = {n for n in right if again[n] == checks[n]}
        unwritten = [n for n, constant in idle.items() if not _same(held[n].memory(), constant)]
        refuse(unwritten, "the engine's loader does not write these parameters")
    loads.held.numbers |= (changed := _changed_numbers(counted, loads))
    loads.counted.update(changed)
    moved = [n for n in changing if held[n].address != places.get(n) and _must_stay(held[n])]
    refuse(moved, "the engine's loader moves these tensors with every load")
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
    # These tensors kept their bytes during the load of random values, but an earlier load changed their initial bytes. So
    # the loader computes them from the checkpoint.
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


def _changed_numbers(before: Mapping[str, Number], loads: _Loads) -> frozenset[str]:
    """Return the paths of Python numbers that a load changed, and of the same numbers in all other layers.

    `before` has the numbers of the model before the load, by path.
    """
    changed = patterns_of(differing(before, loads.held.all_numbers()))
    if not changed:
        return frozenset()
    every = patterns_of(loads.start.numbers)
    return frozenset(path for pattern in changed for path in every.get(pattern, ()))


def _compare_values(
    loads: _Loads, held: Mapping[str, Holding], numbers: Mapping[str, ElementIds], seed: int
) -> dict[str, Check]:
    """Compare tensors with the values that a load of `random(seed)` should have written; return each result by name.

    `numbers` has the element numbers of the tensors to compare, and `held` has all tensors of the model.
    """
    with _timed(loads.seconds, "comparison"):
        return {
            n: ids.check(held[n].tensor, loads.codes, seed, loads.factors.get(n, 1.0))
            for n, ids in numbers.items()
        }


def _is_certain(numbers: ElementIds, check: Check, paddings: Mapping[int, int]) -> bool:
    """Return whether one successful check proves a tensor's layout.

    The padding must have the same bytes as after the load of digits, and the tensor must have at least `FEW` checkpoint
    elements.

    `paddings` maps the `id` of a tensor's `ElementIds` to the fingerprint of the tensor's padding after the load of
    digits.
    """
    return check.padding == paddings.get(id(numbers.origin)) and check.numel >= FEW


def _opposite_seed(few: Sequence[ElementIds], codes: Codes, seed: int) -> int:
    """Return a new seed, with which most checkpoint elements in `few` have the other sign than with `seed`.

    A tensor of one element would have the expected value in both loads, although the loader drops the sign.
    """
    found = [numbers for ids in few for _, numbers in ids.chunks()]
    if not found:
        return next(_SEEDS)
    numbers = torch.cat(found)
    numbers = numbers[numbers >= 0]

    def signs(of: int) -> torch.Tensor:
        return codes.expected(numbers, of, torch.float32) < 0

    first, seeds = signs(seed), [next(_SEEDS) for _ in range(NUM_SEEDS)]
    return max(seeds, key=lambda of: int((signs(of) != first).sum()))


class _PartRefused(Exception):
    """Raised if the loader fails on a part of the checkpoint's tensors."""


def _load_digit(loads: _Loads, position: int, chosen: frozenset[str] | None) -> None:
    """Load one digit of the element numbers. If `chosen` is given, load only the checkpoint tensors with these names.

    Raises:
        _PartRefused: `chosen` is given, and the loader failed.
    """
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
    """Load all digits, and return the element numbers of the tensors in `held`, by name.

    The caller has already loaded the digits at position 0.
    """
    numbers = {
        name: ElementIds(
            h.tensor, by_place=h.reach <= (MAX_EXACT_NUMEL if name in scattered else exact_numel)
        )
        for name, h in held.items()
    }
    for position in range(loads.codes.num_digits):
        if position:
            _load_digit(loads, position, chosen)
        for name, holding in loads.held().items():
            if name in numbers and holding.reach == held[name].reach:
                factor = loads.factors.get(name, 1.0)
                numbers[name].observe(holding.tensor, loads.codes, position, factor)
    return numbers


def _find_read_tensors(loads: _Loads, placed: frozenset[str]) -> frozenset[str]:
    """Return the names of the checkpoint tensors outside `placed` that the loader reads.

    To find these tensors, load checkpoint tensors and record the loader's reads.

    `placed` has the names of the checkpoint tensors with elements in the model.
    """
    others = frozenset(spec.name for spec in loads.codes.specs if spec.numel) - placed
    if not others:
        return frozenset()
    # Also load a tensor that the loader certainly reads. If `_Reading` does not record even this read, its record is useless.
    try:
        return _record_reads(loads, others.union(sorted(placed)[:1])).read(others)
    except Exception:  # noqa: BLE001 - a loader may raise anything if tensors are missing
        return _record_reads(loads, others | placed).read(others)


def _record_reads(loads: _Loads, names: frozenset[str]) -> _Reading:
    """Load only the checkpoint tensors in `names`. Return a `_Reading` with the names that the loader has read."""
    with (reading := _Reading()):
        loads.load(reading.over(loads.codes.some(names, 0)))
    return reading


def _must_stay(holding: Holding) -> bool:
    """Return whether capture must refuse the engine if every load moves this tensor.

    `Snapshot` restores HELD tensors and CPU attributes, so these may move. The tensor of a Python number has no fixed
    address, because every walk through the model makes a new tensor for the number.
    """
    if holding.kind in (Kind.HELD, Kind.NUMBER):
        return False
    return holding.kind is not Kind.ATTRIBUTE or holding.tensor.device.type != "cpu"


def _is_received(holding: Holding, codes: Codes) -> bool:
    """Return whether updates can write a tensor directly; otherwise the engine's loader must write it.

    The loader must write integers: all random values become the integer 0, which does not show how the loader rounds.
    """
    is_module = holding.kind in (Kind.PARAMETER, Kind.BUFFER)
    is_known = holding.tensor.dtype in (*codes.dtypes, *CAST_DTYPES)
    return is_known or (is_module and holding.tensor.is_floating_point())


def _is_weight(holding: Holding) -> bool:
    """Return whether every load must write a tensor, because it is a parameter. A scalar parameter may be a setting."""
    return holding.kind is Kind.PARAMETER and holding.tensor.dim() > 0


_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "nbytes", "itemsize", "is_meta")
_METHODS = ("size", "dim", "numel", "nelement", "element_size", "stride")
_TENSOR: Mapping[str, Any] = vars(torch._C.TensorBase)
_QUESTIONS = frozenset(
    {*(_TENSOR[name].__get__ for name in _ATTRIBUTES), *(_TENSOR[name] for name in _METHODS)}
)
"""Attributes and methods of `torch.Tensor` that read no element."""


@final
class _Reading(TorchFunctionMode):
    """Torch function mode that records which checkpoint tensors a loader reads.

    A checkpoint tensor without elements in the model has one of two reasons. Either the loader skipped the tensor (a
    layer for multi-token prediction, a tied output matrix, a vision tower that was not built), or the loader stored the
    elements where capture does not see them. This record distinguishes the two: a loader that skips a tensor at most
    asks for its shape, dtype and other properties (`_QUESTIONS`), and keeps no reference to the tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._read: set[str] = set()
        self._given: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    def over(
        self, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the items of `weights` (name, tensor) unchanged.

        Store a weak reference to each tensor, so that `__torch_function__` can recognise the tensors that the loader
        reads.
        """
        while True:
            # `weights` generates the tensor with torch calls, which do not count as reads by the loader.
            with torch._C.DisableTorchFunction():
                name, tensor = next(weights, ("", None))
            if tensor is None:
                return
            self._given[id(tensor)] = weakref.ref(tensor), name
            yield name, tensor
            del tensor

    def read(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names among `names` that the loader read or still references.

        If no read was recorded, return all `names`, because the loader may read in another thread, where a torch function
        mode records nothing.
        """
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
    """Yield the tensors among `values`, and the tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _device(held: Mapping[str, Holding]) -> torch.device:
    """Return the device of the parameters; the CPU if the parameters are on several devices."""
    devices = {h.tensor.device for h in held.values() if h.kind is Kind.PARAMETER}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and the same bytes. NaNs with the same bytes are equal."""
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _require_repeated(
    loads: _Loads,
    reference: StoredCheckpoint,
    seen: Seen,
    part: Recompute | None,
    layers: Layers | None,
) -> frozenset[str]:
    """Load the engine's own checkpoint again, and check that the model has the same bytes as before the capture.

    If `layers` is given, load only one layer of each group of identical layers; if the loader fails without the other
    layers, load the whole checkpoint. If `part` is given, also recompute the computed tensors, as an update does, and
    check the bytes of these tensors.

    Returns:
        Names of the tensors that were not compared, because their layers were not loaded.

    Raises:
        UnsupportedLayout: a tensor has other bytes than before the capture; the message names these tensors. Or a Python
            number depends on the checkpoint, but all loads of random values gave it the same value (`_refuse_numbers`).
    """
    computed = frozenset() if part is None else frozenset(part.names)
    buffers = frozenset() if part is None else frozenset(spec.name for spec, _ in part.buffers)
    apart = frozenset[str]()
    before = loads.held.all_numbers()
    if layers is not None:
        given = layers.loaded | buffers
        try:
            _load_reference(loads, reference.tensors(given), part)
        except Exception:  # noqa: BLE001 - a loader may raise anything if tensors are missing
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
    """Raise UnsupportedLayout if a Python number depends on the checkpoint in a way that loads of random weights cannot show.

    All loads of random weights gave such a number the same value. The engine's own checkpoint gives it another value, both
    at the start and now. `before` has the numbers after the last load of random weights, by path.
    """
    start, now = loads.start.numbers, loads.held.all_numbers()
    hidden = differing(start, before) - differing(start, now) - loads.counted
    refuse(
        sorted(hidden & now.keys()),
        "these numbers depend on the checkpoint, but random weights do not change them, so capture cannot observe how "
        "they depend on it; change the engine's code to compute them from its weights at every step",
    )


def _load_reference(
    loads: _Loads, weights: Iterator[tuple[str, torch.Tensor]], part: Recompute | None
) -> None:
    """Load checkpoint tensors. If `part` is given, also copy the sources of computed tensors into its buffers."""
    loads.load(weights if part is None else part.filling(weights))


def _require_start(loads: _Loads, ignored: Collection[str]) -> None:
    """Raise UnsupportedLayout if a tensor outside `ignored` has other bytes than before the capture."""
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
    """Raise UnsupportedLayout if a sampled element of a tensor in `names` differs from the engine's own checkpoint."""
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
