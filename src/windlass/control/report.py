"""Report of an update: outcome, times and bytes.

The terminal, the metrics and the web page iterate over the members of `Measure`.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from math import inf
from typing import Self, final

import msgspec

from windlass.control.links import Link
from windlass.errors import RoundAborted, WindlassError
from windlass.transfer.bindings import Carried
from windlass.wording import counted, listed

_log = logging.getLogger(__name__)

SLOWEST_LINKS = 4
"""Number of slowest links that a report names for each transport."""
TOLD_COSTS = 64
"""The report to trainer ranks contains bind costs and memory of at most this many ranks."""


class Measure(StrEnum):
    """A figure of a round, by its name on the wire.

    A rank may report a figure several times in a round, and the controller adds these values up. A figure in seconds is
    then the largest sum of any rank; a figure in bytes is the total of all ranks.

    Attributes:
        unit: "bytes" or "seconds".
        help: description in one line.
    """

    unit: str
    help: str

    def __new__(cls, name: str, unit: str, text: str) -> Self:
        """Create a member from its name, unit, and help."""
        member = str.__new__(cls, name)
        member._value_, member.unit, member.help = name, unit, text
        return member

    NBYTES = "nbytes", "bytes", "Bytes that travelled"
    WIRE_S = "wire_s", "seconds", "Time of the slowest rank in transport writes"
    UPDATE_S = "update_s", "seconds", "First command to last reply"
    PAUSE_S = "pause_s", "seconds", "Longest pause of an engine"
    PACK_S = "pack_s", "seconds", "Time of the slowest rank for packing; 0 if the writes pack"
    REGISTER_S = (
        "register_s",
        "seconds",
        "Time of the slowest rank for registering memory that has moved",
    )

    COMPARE_S = (
        "compare_s",
        "seconds",
        "Time of the slowest rank for digests of boxes that several ranks hold",
    )

    @property
    def label(self) -> str:
        """Short name for a table: `wire` for `wire_s`, and `bytes` for `nbytes`."""
        return self.removesuffix("_s") if self.unit == "seconds" else self.unit

    def text(self, value: float) -> str:
        """Return a value as the text of a table cell: milliseconds ("-" for 0), or a number of bytes."""
        if self.unit == "seconds":
            return f"{value * 1e3:.1f}" if value else "-"
        return f"{value:,.0f}"

    def of_ranks(self, by_rank: dict[str, float]) -> float:
        """Return the figure of a round: for seconds, the largest value in `by_rank`; for bytes, the sum of all values.

        `by_rank` maps each rank to the sum of the values that this rank has reported.
        """
        values = by_rank.values()
        return max(values, default=0.0) if self.unit == "seconds" else sum(values)


@final
class Figures:
    """Figures that ranks report during a round.

    Attributes:
        carried: link -> bytes and seconds, for links that were measured one by one.
        memory: rank -> largest number of bytes in use that it has reported.
    """

    def __init__(self) -> None:
        self._by_rank: dict[Measure, dict[str, float]] = {}
        self.carried: dict[Link, Carried] = {}
        self.memory: dict[str, int] = {}

    def note_memory(self, worker: str, nbytes: int) -> None:
        """Record the bytes in use that a rank has reported; ignore values that are not positive."""
        if nbytes > self.memory.get(worker, 0):
            self.memory[worker] = nbytes

    def measure(self, measure: Measure, worker: str, value: float) -> None:
        """Add `value`, as the rank `worker` reported it, to this rank's figure. Negative, infinite and NaN count as 0."""
        values = self._by_rank.setdefault(measure, {})
        values[worker] = values.get(worker, 0.0) + (value if 0 < value < inf else 0.0)

    def carry(self, link: Link, nbytes: int, wire_s: float) -> None:
        """Add bytes that a link carried, and the seconds of the writes. Add nothing unless both are positive and finite."""
        if nbytes > 0 and 0 < wire_s < inf:
            before = self.carried.get(link, Carried(0, 0.0))
            self.carried[link] = Carried(before.nbytes + nbytes, before.wire_s + wire_s)

    def of_round(self, others: Mapping[Measure, float]) -> dict[str, float]:
        """Return the round's figures by name, for `UpdateReport.measures`. `others` are figures that no rank reports."""
        found = {m: m.of_ranks(values) for m, values in self._by_rank.items()}
        return {measure.value: value for measure, value in (found | dict(others)).items()}


class RoundOutcome(StrEnum):
    """Outcome of a round."""

    PUBLISHED = "published"
    ABORTED = "aborted"
    FAILED = "failed"


class BindCost(msgspec.Struct, frozen=True):
    """Cost of connecting and binding one rank.

    Attributes:
        register_s: seconds of memory registration before the rank connected (`Hello.registered`).
        plan_s: seconds of planning, for all ranks of the binding together.
        bind_s: seconds from the bind command to the rank's answer.
    """

    register_s: float
    plan_s: float
    bind_s: float


class LinkWire(Carried, frozen=True):
    """Bytes and seconds of one link in an update, from one worker to another."""

    source: str
    destination: str


class TransportWire(Carried, frozen=True):
    """Bytes and seconds of all links of a transport in an update, added up even if links ran in parallel.

    Attributes:
        num_links: number of links that carried bytes.
        slowest: the few links that took longest, the slowest first.
    """

    num_links: int
    slowest: tuple[LinkWire, ...]


def wire_by_transport(
    carried: Mapping[Link, Carried], transports: Mapping[Link, str]
) -> dict[str, TransportWire]:
    """Add up the traffic of the links per transport. Return name of the transport -> traffic.

    Args:
        carried: link -> its bytes and seconds. Links without a transport are ignored.
        transports: link -> name of its transport.
    """
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
    """Report of an update, which every trainer rank gets when its announced version is published or has failed.

    Attributes:
        version: the announced version; -1 if the trainer drove the update itself and ended it without a version.
        outcome: published, aborted (engines serve the old weights) or failed.
        reason: reason in one line; empty if published.
        engines: engines that serve `version` now.
        left_out: name -> reason, for engines that do not serve `version`: dead, with mixed weights, or joining.
        measures: name of a `Measure` -> figure of the round, for figures that were measured.
        phase_s: name of a phase -> its seconds.
        digest_ok: False if links still failed, or still had wrong digests, after the last rewrite.
        attempt: the `Announce.attempt` that this report answers; 0 if the controller's own process requested the
            update.
        transports: name of a transport -> number of its links, if bytes travel by one-sided writes. `/v1/status` shows
            the transport of each link and the reason for its choice.
        wire: name of a transport -> traffic of its links, including relayed bytes, and its slowest links. `/v1/status`
            shows the traffic of each link in the last update.
        bound: rank -> its bind cost, for ranks bound since the last update: all ranks in the first update, none if the
            fleet has not changed. Trainers get the 64 highest costs, the controller's own process gets all.
        unused: pattern of names -> number of trainer tensors that no engine has.
        kept: pattern of names -> number of engine tensors that no trainer has and that engines keep (`keep` of
            `connect_trainer`).
        unchanged: number of successive versions, up to this one, that changed no byte; 0 if this version changed bytes
            or is the first of these trainers.
        non_finite: pattern of names -> number of checked trainer parameters that contain NaN or infinity
            (`ControlConfig`).
        memory: rank -> largest number of bytes in use at the end of its commands in the round; for an engine that cannot
            sleep, the bytes in use after it has resumed. For a rank on a GPU, these are the bytes of the GPU that all processes use; for a rank in host memory, the resident bytes of its process.
            Trainers get the 64 highest figures, the controller's own process gets all.
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
    memory: dict[str, int] = {}

    def __str__(self) -> str:
        """Return the result in one line, for people: outcome, engines, bytes and times. `repr` has all fields."""
        if self.outcome is not RoundOutcome.PUBLISHED:
            return f"version {self.version}: {self.outcome}: {self.reason}"
        left = f", without {listed(sorted(self.left_out))}" if self.left_out else ""
        return (
            f"version {self.version}: published to {counted(len(self.engines), 'engine')}{left}, "
            f"{self.nbytes:,} bytes in {self.update_s:.3f} s, longest pause {self.pause_s:.3f} s"
        )

    def measure(self, measure: Measure) -> float:
        """Return a figure of the round; 0 if it was not measured."""
        return self.measures.get(measure, 0.0)

    @property
    def nbytes(self) -> int:
        """Number of bytes that all ranks together sent in the round."""
        return int(self.measure(Measure.NBYTES))

    @property
    def wire_s(self) -> float:
        """Seconds that the slowest rank spent in transport writes."""
        return self.measure(Measure.WIRE_S)

    @property
    def update_s(self) -> float:
        """Seconds from the first command to the last reply."""
        return self.measure(Measure.UPDATE_S)

    @property
    def pause_s(self) -> float:
        """Seconds of the longest pause of an engine."""
        return self.measure(Measure.PAUSE_S)

    @property
    def compared(self) -> bool:
        """Whether the round compared the bytes of boxes that several trainer ranks hold."""
        return Measure.COMPARE_S in self.measures

    @property
    def compare_s(self) -> float:
        """Seconds that the slowest trainer rank needed to compute the digests of the compared boxes."""
        return self.measure(Measure.COMPARE_S)


def told_to_trainers(report: UpdateReport) -> UpdateReport:
    """Return the report that trainer ranks get, with the figures of only a few ranks.

    These are the `TOLD_COSTS` ranks that took longest to bind, and the `TOLD_COSTS` ranks that used most memory. If
    each rank got the figures of all ranks, the traffic would grow with the square of the number of ranks.
    """
    slowest = sorted(report.bound, key=lambda worker: -report.bound[worker].bind_s)
    told = {worker: report.bound[worker] for worker in slowest[:TOLD_COSTS]}
    largest = sorted(report.memory, key=lambda worker: -report.memory[worker])[:TOLD_COSTS]
    memory = {worker: report.memory[worker] for worker in largest}
    return msgspec.structs.replace(report, bound=told, memory=memory)


def failed_report(version: int, reason: str) -> UpdateReport:
    """Return a report with outcome FAILED, for a version whose round did not begin or ended with an exception."""
    return UpdateReport(version=version, outcome=RoundOutcome.FAILED, reason=reason)


async def report_of(
    version: Callable[[], int], round_: Coroutine[object, object, UpdateReport]
) -> UpdateReport:
    """Await a round and return its report; after an exception, return a report with outcome FAILED.

    This gives trainers a report in any case, so that they need not wait until their deadline.

    Args:
        version: function that returns the version, called after an exception. It is a function because the controller
            learns the version of a driven round only while the round runs.
        round_: coroutine that runs the round.
    """
    try:
        return await round_
    # An unexpected exception fails this round only.
    except Exception as error:  # noqa: BLE001
        if not isinstance(error, WindlassError):
            _log.exception("version %s: unexpected error", version())
        kind = "" if type(error) is RoundAborted else f"{type(error).__name__}: "
        return failed_report(version(), f"{kind}{error}")
