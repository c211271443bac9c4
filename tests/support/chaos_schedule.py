"""What goes wrong and when: generated from a seed, small enough to be printed and read."""

from __future__ import annotations

import random
from enum import StrEnum

import msgspec

from windlass.config import UpdateMode


class Kind(StrEnum):
    """One thing that goes wrong. `who` is a process; seconds are simulated.

    KILL: SIGKILL, started again after `amount` seconds. STALL: SIGSTOP for `amount` seconds.
    PART: `who` and `other` do not reach each other for `amount` seconds. RESET: their connections
    are cut. MESSAGE: the next `count` messages from `who` to `other` suffer `fault`. WIRE: the next
    writes of trainer `who` into engine rank `other` suffer `fault`. SLOW: jobs of `who` take up to
    `amount` seconds, for five seconds. DISK_FULL: the journal cannot be written for `amount`
    seconds. NO_DESCRIPTORS: `who` can open no connection for `amount` seconds.
    """

    KILL = "kill"
    STALL = "stall"
    PART = "part"
    RESET = "reset"
    MESSAGE = "message"
    WIRE = "wire"
    SLOW = "slow"
    DISK_FULL = "disk_full"
    NO_DESCRIPTORS = "no_descriptors"


class WireFault(StrEnum):
    """What happens to one write of weights.

    FAIL: nothing is sent. HALF: half of it, then failure. FLIP: one bit arrives wrong, success.
    SHORT: the end is not sent, success. UNKNOWN: nothing is sent, outcome unknown.
    LATE: outcome unknown, and it lands up to three seconds later. DIE: half of it, and the trainer
    is killed.
    """

    FAIL = "fail"
    HALF = "half"
    FLIP = "flip"
    SHORT = "short"
    UNKNOWN = "unknown"
    LATE = "late"
    DIE = "die"


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """See `Kind`."""

    at_s: float
    kind: Kind
    who: str
    other: str = ""
    fault: str = ""
    amount: float = 0.0
    count: int = 1


class Schedule(msgspec.Struct, frozen=True):
    """Everything that a run depends on."""

    seed: int
    mode: UpdateMode
    duration_s: float
    events: tuple[Event, ...]


CONTROLLER = "controller"
TRAINERS = ("trainer/0", "trainer/1")
ENGINES = {"a": 1, "b": 2, "c": 1}
"""Engine -> ranks."""
ENGINE_RANKS = tuple(f"{name}/{rank}" for name, ranks in ENGINES.items() for rank in range(ranks))
WORKERS = ("worker/0", "worker/1")
EVERYBODY = (CONTROLLER, *TRAINERS, *ENGINE_RANKS, *WORKERS)
MESSAGE_FAULTS = ("lose", "cut", "double", "delay", "corrupt")

_WEIGHTS = {
    Kind.KILL: 4,
    Kind.STALL: 3,
    Kind.PART: 3,
    Kind.RESET: 3,
    Kind.MESSAGE: 8,
    Kind.WIRE: 8,
    Kind.SLOW: 2,
    Kind.DISK_FULL: 1,
    Kind.NO_DESCRIPTORS: 1,
}


def generate(seed: int, *, duration_s: float = 8.0) -> Schedule:
    """The schedule of a seed."""
    draw = random.Random(seed)
    num_events = draw.randint(2, 14)
    events = sorted(
        (_event(draw, duration_s) for _ in range(num_events)), key=lambda event: event.at_s
    )
    return Schedule(seed, draw.choice(list(UpdateMode)), duration_s, tuple(events))


def _event(draw: random.Random, duration_s: float) -> Event:
    kind = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    at_s = round(draw.uniform(0.0, duration_s), 4)
    amount = round(draw.choice([0.05, 0.5, 3.0, 12.0]) * draw.uniform(0.5, 1.5), 3)
    match kind:
        case Kind.KILL | Kind.STALL | Kind.NO_DESCRIPTORS:
            return Event(at_s, kind, draw.choice(EVERYBODY), amount=amount)
        case Kind.SLOW:
            return Event(
                at_s, kind, draw.choice((*TRAINERS, *ENGINE_RANKS)), amount=min(amount, 4.0)
            )
        case Kind.PART | Kind.RESET:
            agent = draw.choice((*TRAINERS, *ENGINE_RANKS, *WORKERS))
            return Event(at_s, kind, agent, other=CONTROLLER, amount=amount)
        case Kind.MESSAGE:
            pair = [CONTROLLER, draw.choice((*TRAINERS, *ENGINE_RANKS))]
            draw.shuffle(pair)
            return Event(
                at_s,
                kind,
                pair[0],
                other=pair[1],
                fault=draw.choice(MESSAGE_FAULTS),
                count=draw.choice([1, 1, 2, 5]),
            )
        case Kind.WIRE:
            return Event(
                at_s,
                kind,
                draw.choice(TRAINERS),
                other=draw.choice(ENGINE_RANKS),
                fault=draw.choice(list(WireFault)).value,
                count=draw.choice([1, 1, 1, 4]),
            )
        case Kind.DISK_FULL:
            return Event(at_s, kind, CONTROLLER, amount=amount)
