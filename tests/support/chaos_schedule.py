"""Faults and their times: generated from a seed, small enough to print and read."""

from __future__ import annotations

import random
from enum import StrEnum

import msgspec

from windlass.config import UpdateMode


class Kind(StrEnum):
    """Kind of an event. `who` is a process; seconds are simulated.

    KILL: SIGKILL, and a restart after `amount` seconds. STALL: SIGSTOP for `amount` seconds. PART:
    `who` and `other` cannot reach each other for `amount` seconds. RESET: their connections are
    cut. MESSAGE: `fault` hits the next `count` messages from `who` to `other`. WIRE: `fault` hits
    the next `count` writes of trainer `who` into engine rank `other`. SLOW: jobs of `who` take up
    to `amount` seconds, for five seconds. DISK_FULL: the journal cannot be written for `amount`
    seconds. NO_DESCRIPTORS: `who` can open no connection for `amount` seconds. INTRUDE: an
    intruder or a misfit does `fault` (`Intrusion`, `Misfit`). FOREIGN: engine rank `who` is killed
    and restarts after `amount` seconds as a process that has served another run. RIVAL: trainer
    rank `who` is killed for `amount` seconds, while a rank of another start of the job tries to
    take its place; with `fault` "run", a rank of another run.
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
    INTRUDE = "intrude"
    FOREIGN = "foreign"
    RIVAL = "rival"


class Intrusion(StrEnum):
    """Attack by an intruder, or by a member that sends false statements.

    CROWD: more connections than the limit for strangers; they send nothing or half a request.
    TOKENS: requests without a token, with a wrong token, with the token of another role. LURK: a
    session without a first frame. HELLO: Hellos that each break one rule. FIRST: first frames that
    are no Hello. ROLE: a trainer's name with an engine's token, while that rank is away. FUTURE:
    an engine that claims a version of this run that does not exist. REPLIES: a member answers for
    others. PREDECESSOR: the controller is killed, and a member reports to the next controller its
    writes for the previous one. CANNOT_JOIN: notices of engines that do not exist. WORKER:
    registrations that break a rule, and outdated ones. COMPLETIONS: outcomes of attempts that have
    ended or never began.
    """

    CROWD = "crowd"
    TOKENS = "tokens"
    LURK = "lurk"
    HELLO = "hello"
    FIRST = "first"
    ROLE = "role"
    FUTURE = "future"
    REPLIES = "replies"
    PREDECESSOR = "predecessor"
    CANNOT_JOIN = "cannot_join"
    WORKER = "worker"
    COMPLETIONS = "completions"


class Misfit(StrEnum):
    """Misbehaviour of an engine that is admitted and stays for the rest of the run.

    BIND_*: its answer to ConnectEngine: none, another type, another plan, another rank's name or
    memory, regions too small, too few addresses, another kind of digest. SILENT: it answers
    nothing after binding. MISMATCH: it reports all bytes as wrong. STRANGER: it reports wrong
    bytes from a rank that sends it nothing. NO_VERDICT: it answers Verify with Done. NO_PAUSE,
    NO_APPLY: it refuses that command. UNKNOWN: it fails, outcome unknown. RELAYED: it answers
    Verify with the end of a relay that never ran.
    """

    BIND_SILENT = "bind_silent"
    BIND_TYPE = "bind_type"
    BIND_PLAN = "bind_plan"
    BIND_WORKER = "bind_worker"
    BIND_MEMORY = "bind_memory"
    BIND_SMALL = "bind_small"
    BIND_FEW = "bind_few"
    BIND_DIGEST = "bind_digest"
    SILENT = "silent"
    MISMATCH = "mismatch"
    STRANGER = "stranger"
    NO_VERDICT = "no_verdict"
    NO_PAUSE = "no_pause"
    NO_APPLY = "no_apply"
    UNKNOWN = "unknown"
    RELAYED = "relayed"


class WireFault(StrEnum):
    """Fault of one write of weights.

    FAIL: nothing is sent. HALF: half of it is sent, then failure. FLIP: one bit arrives wrong,
    success. SHORT: the end is not sent, success. UNKNOWN: nothing is sent, outcome unknown. LATE:
    outcome unknown, and the write arrives up to three seconds later. DIE: half of it is sent, and
    the trainer is killed.
    """

    FAIL = "fail"
    HALF = "half"
    FLIP = "flip"
    SHORT = "short"
    UNKNOWN = "unknown"
    LATE = "late"
    DIE = "die"


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event; see `Kind`."""

    at_s: float
    kind: Kind
    who: str
    other: str = ""
    fault: str = ""
    amount: float = 0.0
    count: int = 1


class Schedule(msgspec.Struct, frozen=True):
    """Everything that determines a run."""

    seed: int
    mode: UpdateMode
    duration_s: float
    events: tuple[Event, ...]

    @property
    def only_intruders(self) -> bool:
        """Return whether all members are healthy: every version must then be published to every engine."""
        return self.keeps_writes and all(e.fault != Intrusion.PREDECESSOR for e in self.events)

    @property
    def keeps_writes(self) -> bool:
        """Return whether no write can have an unknown outcome: no engine may then be quarantined."""
        return all(event.kind is Kind.INTRUDE for event in self.events)


CONTROLLER = "controller"
TRAINERS = ("trainer/0", "trainer/1")
ENGINES = {"a": 1, "b": 2, "c": 1}
"""Number of ranks per engine."""
ENGINE_RANKS = tuple(f"{name}/{rank}" for name, ranks in ENGINES.items() for rank in range(ranks))
WORKERS = ("worker/0", "worker/1")
EVERYBODY = (CONTROLLER, *TRAINERS, *ENGINE_RANKS, *WORKERS)
MESSAGE_FAULTS = ("lose", "cut", "double", "delay", "corrupt")
INTRUDERS = (*Intrusion, *Misfit)
ATTACKED_FROM = 100_000
"""First seed of schedules with intruders, members of other runs, and replayed frames."""

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
    """Return the schedule of a seed."""
    draw = random.Random(seed)
    if seed >= ATTACKED_FROM:
        return _attacked(seed, draw, duration_s)
    num_events = draw.randint(2, 14)
    events = sorted(
        (_event(draw, duration_s) for _ in range(num_events)), key=lambda event: event.at_s
    )
    return Schedule(seed, draw.choice(list(UpdateMode)), duration_s, tuple(events))


def _attacked(seed: int, draw: random.Random, duration_s: float) -> Schedule:
    """Return a schedule with intruders. Half of these schedules have no other event, so no member
    may be harmed."""
    mode = draw.choice(list(UpdateMode))
    # Engines are connected by then. Without engines, the controller may refuse a version.
    begins_s = 1.5
    events = [_intruder(draw, begins_s, duration_s) for _ in range(draw.randint(1, 4))]
    if draw.random() < 0.5:
        events += [_foreign(draw, begins_s, duration_s) for _ in range(draw.randint(1, 3))]
        events += [_event(draw, duration_s) for _ in range(draw.randint(0, 4))]
    return Schedule(seed, mode, duration_s, tuple(sorted(events, key=lambda event: event.at_s)))


def _intruder(draw: random.Random, from_s: float, to_s: float) -> Event:
    at_s = round(draw.uniform(from_s, to_s), 4)
    return Event(at_s, Kind.INTRUDE, "", fault=draw.choice(INTRUDERS).value)


def _foreign(draw: random.Random, from_s: float, to_s: float) -> Event:
    at_s = round(draw.uniform(from_s, to_s), 4)
    amount = round(draw.uniform(0.3, 4.0), 3)
    match draw.choice((Kind.FOREIGN, Kind.RIVAL, Kind.MESSAGE)):
        case Kind.FOREIGN:
            return Event(at_s, Kind.FOREIGN, draw.choice(ENGINE_RANKS), amount=amount)
        case Kind.RIVAL:
            of = draw.choice(("start", "run"))
            return Event(at_s, Kind.RIVAL, draw.choice(TRAINERS), fault=of, amount=amount)
        case _:
            pair = [CONTROLLER, draw.choice((*TRAINERS, *ENGINE_RANKS))]
            draw.shuffle(pair)
            return Event(at_s, Kind.MESSAGE, pair[0], other=pair[1], fault="replay", count=20)


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
        case Kind.INTRUDE | Kind.FOREIGN | Kind.RIVAL:
            raise ValueError(f"{kind} is drawn by itself")
