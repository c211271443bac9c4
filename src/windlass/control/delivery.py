"""Delivery of a round's bytes, as the round machine sees it. No I/O.

`Delivery` is the usual way: each source writes its links, one by one, into memory of the engines. A backend that needs
other steps in a round has a subclass. The machine asks it for the commands of PREPARE and WRITE, passes on the answers
to these commands, and reports who has failed.
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


def reply_budget_s(deadline_s: float) -> float:
    """Return the part of a deadline, in seconds, that a peer may use before it must answer.

    The rest is for its answer. A trainer then answers by the deadline even if an unreachable engine used up its
    time; a missing answer would end the round for all engines.
    """
    return deadline_s - max(0.1 * deadline_s, min(0.3 * deadline_s, ANSWER_S))


@dataclass(frozen=True, slots=True)
class Order:
    """Command that the round sends to a rank.

    Attributes:
        worker: the rank.
        command: the command.
        expects_reply: whether the phase lasts until the rank has answered.
        destinations: for a source, the destinations of the links that it writes; it answers with `Written`.
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
        unknown: rank that bytes may still reach -> reason.
        orders: commands that follow.
    """

    measures: Mapping[Measure, float] = field(default_factory=dict)
    carried: Mapping[Link, Carried] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    orders: tuple[Order, ...] = ()


class Delivery:
    """Delivery of one round: each source writes its links into memory of the engines.

    Attributes:
        reserves_in: phase that begins with the reservation of the version. If it cannot record the version, the phase does
            not begin.
        notices: kinds of commands that a rank still needs after the round has ended.
    """

    reserves_in: ClassVar[Phase] = Phase.PUBLISH
    notices: ClassVar[tuple[type, ...]] = ()

    def prepare(self, engines: Collection[str]) -> tuple[Order, ...]:  # noqa: ARG002
        """Return the commands to engine ranks in PREPARE, in addition to the machine's own."""
        return ()

    def unlinked(self, engines: Collection[str]) -> Collection[str]:  # noqa: ARG002
        """Return the engine ranks that verify although no link leads to them."""
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
            missing: source -> destinations of its links that are not complete.
            ledger: state of all links.
            active: engine ranks that are part of the round.
            version: version that is written.
            deadline_s: seconds for a source's command.
        """
        return [
            Order(source, Write(version, to, deadline_s), destinations=to)
            for source, to in staggered(missing).items()
        ]

    @property
    def is_complete(self) -> bool:
        """Whether WRITE may end; otherwise it lasts until `sent`."""
        return True

    def sent(self) -> None:
        """Record that the trainer, which drives the update, has sent all bytes."""

    def changes_live(self, mode: UpdateMode) -> bool:
        """Return whether live weights may change before they are verified."""
        return mode is UpdateMode.IN_PLACE

    def survives_failure(self, phase: Phase) -> bool:  # noqa: ARG002
        """Return whether the round continues without an engine that answers with a failure in `phase`."""
        return True

    def answered(self, worker: str, command: Command, result: Result) -> Findings | None:  # noqa: ARG002
        """Return the contents of an answer to a command of `prepare` or `write`; None if the answer does not fit."""
        return None

    def ended(self, worker: str, command: Command) -> None:
        """Record that an engine rank has answered `command` with a failure, or after the round has left it out."""

    def link_failed(self, link: Link) -> tuple[Order, ...]:  # noqa: ARG002
        """Record that a source could not complete a link that it was told to write; return the commands that follow."""
        return ()

    def left(self, worker: str, *, lost: bool) -> tuple[Order, ...]:  # noqa: ARG002
        """Record that an engine rank has left the round; return the commands that follow. `lost`: its process has ended."""
        return ()

    def pop_incomplete(self) -> tuple[bool, frozenset[Link]]:
        """Return the links that must be written again, and whether writing them again is free.

        A free repetition does not count as a rewrite.
        """
        return False, frozenset()

    def unsettled(self) -> dict[str, tuple[str, ...]]:
        """Return the engine ranks that may still be writing, each with the ranks that it writes to."""
        return {}
