"""State of a run that a restart of the controller must not lose: versions, the newest round id, and the journal."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import final

from windlass.control.connect_messages import Hello
from windlass.control.fleet import Fleet
from windlass.control.journal import Journal, JournalEntry, JournalKind
from windlass.control.messages import MAX_COUNT
from windlass.errors import ProtocolError
from windlass.layout.manifest import Role
from windlass.net.messages import RoundId

_log = logging.getLogger(__name__)
MAX_EPOCHS_AHEAD = 1 << 20
"""Largest difference between an agent's epoch and a lower epoch of the controller. Agents can be ahead after a restart
of the controller, because binding raises the epoch without a journal entry."""


@final
class Run:
    """Versions and round ids that a restart must neither lose nor reuse, from the journal and from the agents.

    Attributes:
        journal: journal of this run.
        fleet: connected agents, and the published version.
        reserved: the highest version that an engine may have been told to serve.
        round_id: the newest round id.
        lineage: random identity of the run, constant as long as the journal is kept; see `Welcome`.
        has_bound: whether this controller has bound a plan.

    Raises:
        ConfigError: the controller cannot use the journal.
    """

    def __init__(self, journal_path: Path | None) -> None:
        self.journal = Journal(journal_path)
        known = self.journal.summary
        self.reserved = known.reserved
        self.round_id = RoundId(self.journal.start(), known.round)
        self.lineage = known.lineage
        self.fleet = Fleet(known.quarantined, known.published, known.lineage)
        self.has_bound = False

    def new_round(self) -> RoundId:
        """Make and return the id of the next round, which uses the present binding: the epoch stays the same."""
        self.round_id = RoundId(self.round_id.epoch, self.round_id.round + 1)
        return self.round_id

    def new_epoch(self) -> RoundId:
        """Make and return a round id with a new epoch, for a new binding. The id is above all earlier ids."""
        self.round_id = RoundId(self.round_id.epoch + 1, self.round_id.round + 1)
        return self.round_id

    def refusal(self, version: int) -> str:
        """Return the reason why a version must not be published; empty if it may be published."""
        newest = max(self.fleet.published, self.reserved)
        if version <= newest:
            return f"stale version {version}: must be > {newest}, the newest version that is or may be published"
        return "" if version <= MAX_COUNT else f"version must be < 2^53, got {version}"

    # --- reports of agents -------------------------------------------------------------------

    def check_past(self, hello: Hello) -> None:
        """Check the version and the round id that a connecting agent got from earlier controllers.

        Raises:
            ProtocolError: a value is out of range. Or the agent is a trainer rank of another run, and this controller has
                a journal file.
        """
        for name, value, least in (
            ("epoch", hello.epoch, 0),
            ("round", hello.round, 0),
            ("received_epoch", hello.received_epoch, hello.epoch),
            ("served_version", hello.served_version, -1),
        ):
            if not least <= value <= MAX_COUNT:
                raise ProtocolError(
                    f"{hello.worker}: {name} must be in [{least}, 2^53), got {value}"
                )
        if hello.received_epoch > self.round_id.epoch + MAX_EPOCHS_AHEAD:
            raise ProtocolError(
                f"{hello.worker}: received_epoch must be at most {MAX_EPOCHS_AHEAD} above this "
                f"controller's epoch {self.round_id.epoch}, got {hello.received_epoch}"
            )
        ours = hello.lineage in {"", self.lineage}
        if hello.role is Role.TRAINER and not ours and self.journal.is_kept:
            raise ProtocolError(
                f"{hello.worker} has trained for run {hello.lineage}, but the journal of this "
                f"controller belongs to run {self.lineage}; start the trainers again, or start the "
                "controller with the journal of their run"
            )

    def note_joined(self, hello: Hello) -> None:
        """Update epoch and published version from the Hello of an admitted agent.

        If an agent of this run serves a newer version that is not above `reserved`, record that this version is published.
        A controller without a journal file also accepts a version of another run from a trainer, until the controller has
        bound a plan. It never accepts such a version from an engine, because the engine may have served an unrelated run.
        """
        # Agents never accept a lower epoch than before, even from a new controller. Calls of this controller must also differ
        # from calls that an agent has not begun, because the agent may still answer those.
        epoch = max(self.round_id.epoch, hello.received_epoch)
        self.round_id = self.round_id._replace(epoch=epoch)
        version, fleet = hello.served_version, self.fleet
        if hello.lineage == self.lineage:
            known = version <= self.reserved and not hello.mixed_weights
        else:
            known = hello.role is Role.TRAINER and not (self.journal.is_kept or self.has_bound)
            known &= fleet.published < 0 or hello.lineage == fleet.lineage
        if known and version > fleet.published:
            _log.info("%s reports that version %s is published", hello.worker, version)
            fleet.publish(version, hello.lineage)
            self.reserved = max(self.reserved, version)

    def forget_past(self) -> None:
        """Clear the record of the published version if this version belongs to a previous run. Otherwise do nothing."""
        if self.fleet.lineage != self.lineage:
            self.reserved = -1
            self.fleet.publish(-1, self.lineage)

    # --- entries of the journal --------------------------------------------------------------

    def reserve(self, version: int) -> None:
        """Record in the journal that engines may serve `version`.

        Called before the first engine gets the command to serve it.

        Raises:
            OSError: the journal cannot be written.
        """
        self.record(JournalKind.PUBLISHING, version)
        self.reserved = max(self.reserved, version)

    def record(
        self, kind: JournalKind, version: int, engines: tuple[str, ...] = (), detail: str = ""
    ) -> None:
        """Append an entry about the newest round to the journal.

        Raises:
            OSError: the journal cannot be written.
        """
        self.journal.append(JournalEntry(kind, *self.round_id, version, engines, detail))

    def record_outcome(
        self, kind: JournalKind, version: int, engines: tuple[str, ...] = (), detail: str = ""
    ) -> None:
        """Append an entry about the outcome of a round. If the journal cannot be written, only log an error.

        The outcome cannot be undone, so the missing entry must not fail the round. After a restart, the PUBLISHING entry
        of this version still ensures that no other weights get the same version.
        """
        try:
            self.record(kind, version, engines, detail)
        except OSError as error:
            _log.error("journal: %s of version %s is not recorded: %s", kind, version, error)

    def record_quarantine(self) -> None:
        """Record all quarantined processes in the journal, so that the next controller does not write to them either."""
        for worker, incarnation in sorted(
            self.fleet.quarantined - self.journal.summary.quarantined.keys()
        ):
            self.record_outcome(JournalKind.QUARANTINED, self.reserved, (worker,), incarnation)
