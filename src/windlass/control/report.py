"""How an update ended, and its figures: one line of `Measure` each, and whatever shows rounds shows it."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from typing import Self

import msgspec

from windlass.control.links import Link
from windlass.errors import RoundAborted, WindlassError
from windlass.transfer.bindings import Carried

_log = logging.getLogger(__name__)

SLOWEST_LINKS = 4
"""Of each transport, named in a report."""
TOLD_COSTS = 64
"""Ranks whose costs of connecting are in the report that every trainer rank gets."""


class Measure(StrEnum):
    """A figure of a round, by its name on the wire.

    Figures that ranks report add up for each rank; the round's is that of the slowest rank for
    seconds, and that of all together for everything else.

    Attributes:
        unit: "bytes", or "seconds". help: one line for a person.
    """

    unit: str
    help: str

    def __new__(cls, name: str, unit: str, text: str) -> Self:
        """A member from its line."""
        member = str.__new__(cls, name)
        member._value_, member.unit, member.help = name, unit, text
        return member

    NBYTES = "nbytes", "bytes", "Bytes that travelled"
    WIRE_S = "wire_s", "seconds", "The slowest rank's time inside transport writes"
    UPDATE_S = "update_s", "seconds", "First command to last reply"
    PAUSE_S = "pause_s", "seconds", "Longest pause of an engine"
    PACK_S = "pack_s", "seconds", "The slowest rank's time packing; 0 where writes pack"
    REGISTER_S = "register_s", "seconds", "The slowest rank's time registering what had moved"

    COMPARE_S = "compare_s", "seconds", "The slowest rank's time digesting what ranks share"

    @property
    def label(self) -> str:
        """Without its unit: `wire`, `bytes`."""
        return self.removesuffix("_s") if self.unit == "seconds" else self.unit

    def text(self, value: float) -> str:
        """A value of it, for a table: milliseconds, or a count."""
        if self.unit == "seconds":
            return f"{value * 1e3:.1f}" if value else "-"
        return f"{value:,.0f}"

    def of_ranks(self, by_rank: dict[str, float]) -> float:
        """The round's figure, from the sum of every rank that reported it."""
        values = by_rank.values()
        return max(values, default=0.0) if self.unit == "seconds" else sum(values)


class RoundOutcome(StrEnum):
    """How a round ended."""

    PUBLISHED = "published"
    ABORTED = "aborted"
    FAILED = "failed"


class BindCost(msgspec.Struct, frozen=True):
    """What it cost to connect one rank.

    Attributes:
        register_s: seconds in which it registered memory before it connected (`Hello.registered`).
        plan_s: seconds of planning, for all ranks of that binding together.
        bind_s: seconds from the command by which it was bound to its answer.
    """

    register_s: float
    plan_s: float
    bind_s: float


class LinkWire(Carried, frozen=True):
    """What one link carried in an update, from one worker to another."""

    source: str
    destination: str


class TransportWire(Carried, frozen=True):
    """What all links of a transport carried in an update; their seconds overlap where they work side by side.

    Attributes:
        num_links: links that carried anything.
        slowest: of these the few that took longest, the longest first.
    """

    num_links: int
    slowest: tuple[LinkWire, ...]


def wire_by_transport(
    carried: Mapping[Link, Carried], transports: Mapping[Link, str]
) -> dict[str, TransportWire]:
    """What each transport carried, of links that have one: as small for many links as for a few."""
    links: dict[str, list[tuple[float, int, Link]]] = {}
    for link, found in carried.items():
        if (transport := transports.get(link)) is not None:
            links.setdefault(transport, []).append((found.wire_s, found.nbytes, link))
    return {
        transport: TransportWire(
            sum([nbytes for _, nbytes, _ in of]),
            sum([wire_s for wire_s, _, _ in of]),
            len(of),
            tuple(LinkWire(n, s, *link) for s, n, link in heapq.nlargest(SLOWEST_LINKS, of)),
        )
        for transport, of in sorted(links.items())
    }


class UpdateReport(msgspec.Struct, frozen=True, tag="update_report", kw_only=True):
    """Sent to every trainer rank when its announced version is published or given up.

    Attributes:
        version: the announced version; -1 where the trainer drove the update itself and had not
            named one when it ended.
        outcome: published, aborted (old weights serve) or failed.
        reason: one line when not published.
        engines: engines that serve `version` now.
        left_out: engines that do not: dead, with mixed weights, or joining; name -> why.
        measures: the figures of the round that were taken, by the name of a `Measure`.
        phase_s: seconds per phase, by name.
        digest_ok: every written range had the sender's digest on the receiving side.
        attempt: the `Announce.attempt` that this answers; 0 where the controller's own process has asked
            for the update.
        transports: name -> links that took it, where bytes travel by one-sided writes; `/v1/status` says
            of each link what it took, and why.
        wire: name of a transport -> what its links carried, relayed bytes among them, and which were the
            slowest; `/v1/status` says it of each link that the last update went by.
        bound: rank -> what it cost to connect it, of those that were bound since the last update: all of
            them in the first one, nobody where the fleet has not changed. Trainers are told of the 64 that
            took longest, the controller's own process of all.
        unused: pattern of names -> number of trainer tensors that no engine takes.
        kept: pattern of names -> number of engine tensors that no trainer has and that engines keep (`keep` of
            `connect_trainer`).
        unchanged: how many versions in a row changed nothing, up to this one; 0 where it changed something, or where
            it is the first of these trainers.
        non_finite: pattern of names -> number of trainer parameters that contain NaN or infinity, as far as they were
            looked at (`ControlConfig`).
    """

    version: int
    outcome: RoundOutcome
    reason: str = ""
    engines: tuple[str, ...] = ()
    left_out: dict[str, str] = {}
    measures: dict[str, float] = {}
    phase_s: dict[str, float] = {}
    digest_ok: bool = True
    attempt: int = 0
    transports: dict[str, int] = {}
    wire: dict[str, TransportWire] = {}
    bound: dict[str, BindCost] = {}
    unused: dict[str, int] = {}
    kept: dict[str, int] = {}
    unchanged: int = 0
    non_finite: dict[str, int] = {}

    def measure(self, measure: Measure) -> float:
        """A figure of the round; 0 where it was not measured."""
        return self.measures.get(measure, 0.0)

    @property
    def nbytes(self) -> int:
        """Bytes that travelled."""
        return int(self.measure(Measure.NBYTES))

    @property
    def wire_s(self) -> float:
        """The slowest rank's seconds inside transport writes."""
        return self.measure(Measure.WIRE_S)

    @property
    def update_s(self) -> float:
        """Seconds from the first command to the last reply."""
        return self.measure(Measure.UPDATE_S)

    @property
    def pause_s(self) -> float:
        """The longest time that an engine was paused, in seconds."""
        return self.measure(Measure.PAUSE_S)

    @property
    def compared(self) -> bool:
        """Whether trainer ranks that hold the same boxes were compared."""
        return Measure.COMPARE_S in self.measures

    @property
    def compare_s(self) -> float:
        """The slowest trainer rank's seconds digesting what was compared."""
        return self.measure(Measure.COMPARE_S)


def told_to_trainers(report: UpdateReport) -> UpdateReport:
    """Without what connecting most of many ranks cost: told to each of them it grows with their square."""
    slowest = sorted(report.bound, key=lambda worker: -report.bound[worker].bind_s)
    told = {worker: report.bound[worker] for worker in slowest[:TOLD_COSTS]}
    return msgspec.structs.replace(report, bound=told)


def failed_report(version: int, reason: str) -> UpdateReport:
    """The report of a version for which no round was begun, or whose round could not go on."""
    return UpdateReport(version=version, outcome=RoundOutcome.FAILED, reason=reason)


async def report_of(
    version: Callable[[], int], round_: Coroutine[object, object, UpdateReport]
) -> UpdateReport:
    """Return how a round ended, whatever went wrong: trainers must not wait for their deadline.

    `version` is asked when it went wrong; a push names its own while it runs.
    """
    try:
        return await round_
    # The boundary of a round.
    except Exception as error:  # noqa: BLE001
        if not isinstance(error, WindlassError):
            _log.exception("version %s", version())
        kind = "" if type(error) is RoundAborted else f"{type(error).__name__}: "
        return failed_report(version(), f"{kind}{error}")
