"""Steps of a round that depend on the backend. No I/O.

The round machine (`rounds.RoundMachine`) gets the commands that write bytes from a `Delivery`. It passes the answers to
these commands, and failures of ranks, to the delivery. `Delivery` itself is for one-sided writes: each source writes
its links into memory of the engines. A backend with other steps has a subclass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from windlass.config import UpdateMode
from windlass.control.links import Link, LinkLedger
from windlass.control.messages import Command, Result, Write
from windlass.control.report import Measure
from windlass.control.round_state import Phase
from windlass.planning.order import staggered
from windlass.transfer.bindings import Carried

ANSWER_S = 2.0
"""Seconds that `reply_budget_s` reserves for an answer, but at least 10 % and at most 30 % of the deadline."""


def reply_budget_s(deadline_s: float) -> float:
    """Return the seconds within which a peer must end its work, if the controller waits `deadline_s` for the answer.

    The peer sends its answer in the remaining seconds. A trainer then answers in time even if its writes to an
    unreachable engine time out. If a trainer did not answer, the round would end for all engines.
    """
    return deadline_s - max(0.1 * deadline_s, min(0.3 * deadline_s, ANSWER_S))


@dataclass(frozen=True, slots=True)
class Order:
    """Command that the round machine must send to a rank.

    Attributes:
        worker: the rank.
        command: the command.
        expects_reply: whether the phase waits for the rank's answer.
        destinations: for a command that writes links, the destinations; the source answers with `Written`.
    """

    worker: str
    command: Command
    expects_reply: bool = True
    destinations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Contents of an answer to a command of the delivery.

    Attributes:
        measures: figures of the rank that answered.
        carried: link -> bytes and seconds of its writes.
        unknown: rank -> reason why bytes may still arrive in its memory. The round quarantines its engine.
        orders: commands that must be sent because of this answer.
    """

    measures: Mapping[Measure, float] = field(default_factory=dict)
    carried: Mapping[Link, Carried] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    orders: tuple[Order, ...] = ()


class Delivery:
    """Delivery of one round by one-sided writes: each source writes its links into memory of the engines.

    Attributes:
        reserves_in: phase before which the controller records the version in the journal (`Run.reserve`). If this
            fails, the phase does not begin.
        notices: types of commands that the machine still sends after an internal error (`RoundMachine.abandon`).
    """

    reserves_in: ClassVar[Phase] = Phase.PUBLISH
    notices: ClassVar[tuple[type, ...]] = ()

    def prepare(self, engines: Collection[str]) -> tuple[Order, ...]:  # noqa: ARG002
        """Return commands that the round machine sends to engine ranks in PREPARE, in addition to its own commands."""
        return ()

    def unlinked(self, engines: Collection[str]) -> Collection[str]:  # noqa: ARG002
        """Return the engine ranks that must verify although the plan has no link to them."""
        return ()

    def write(
        self,
        missing: Mapping[str, tuple[str, ...]],
        *,
        ledger: LinkLedger,  # noqa: ARG002
        active: Collection[str],  # noqa: ARG002
        version: int,
        deadline_s: float,
    ) -> list[Order]:
        """Return the commands that write links.

        Args:
            missing: source -> destinations that still need its bytes.
            ledger: state of all links.
            active: engine ranks that are still part of the round.
            version: version that is written.
            deadline_s: seconds that a source may use for its command.
        """
        return [
            Order(source, Write(version, to, deadline_s), destinations=to)
            for source, to in staggered(missing).items()
        ]

    @property
    def awaited(self) -> str:
        """Reason to report if WRITE ends at its deadline; empty if WRITE does not wait for `sent` (any more)."""
        return ""

    def sent(self) -> None:
        """Record that the caller of a driven round has sent all bytes, so that `awaited` is empty from now on."""

    @property
    def measures(self) -> Mapping[Measure, float]:
        """Figures of the round that no rank reports."""
        return {}

    def changes_live(self, mode: UpdateMode) -> bool:
        """Return whether the writes of the round change live weights, before the engine has verified the bytes."""
        return mode is UpdateMode.IN_PLACE

    def survives_failure(self, phase: Phase) -> bool:  # noqa: ARG002
        """Return whether the round continues for the other engines after a failure of one engine in `phase`."""
        return True

    def answered(self, worker: str, command: Command, result: Result) -> Findings | None:  # noqa: ARG002
        """Return the contents of an answer to a command of this delivery; None if the answer has the wrong type.

        The rank may have left the round before it answered.
        """
        return None

    def ended(self, worker: str, command: Command) -> None:
        """Record that an engine rank no longer carries out `command`. By default, do nothing.

        The round calls this when the rank answers with a failure, or answers after its engine was left out.
        """

    def link_failed(self, link: Link) -> tuple[Order, ...]:  # noqa: ARG002
        """Record that a source could not write a link. Return the commands that ranks must get for this reason."""
        return ()

    def left(self, worker: str, *, lost: bool) -> tuple[Order, ...]:  # noqa: ARG002
        """Record that an engine rank has left the round. Return the commands that other ranks must get for this reason.

        `lost`: whether the rank has lost its connection.
        """
        return ()

    def pop_incomplete(self) -> tuple[bool, frozenset[Link]]:
        """Return the links that the delivery has recorded as incomplete, and clear this record.

        The round calls this when all commands of WRITE or VERIFY are answered, and then writes these links again.

        Returns:
            (is_free, links). `is_free` is True if the next write of these links must not count towards
            `ControlConfig.max_rewrites`.
        """
        return False, frozenset()

    def unsettled(self) -> dict[str, tuple[str, ...]]:
        """Return the engine ranks that may still write when the round ends: rank -> ranks that it writes to."""
        return {}
