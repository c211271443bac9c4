"""The run whose versions a controller publishes: what is out, what may be, and which round is the newest."""

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
"""By which agents may be ahead of what a controller knows: bindings are not recorded."""


@final
class Run:
    """What must neither be forgotten nor given twice, from the journal and from what agents say.

    Attributes:
        journal: of this run.
        fleet: who is connected, and which version is published.
        reserved: the highest version that some engine was told to serve.
        round_id: the newest.
        lineage: random, the same for as long as the journal is; see `Welcome`.
        has_bound: whether something was bound by this controller.

    Raises:
        ConfigError: the journal cannot be used.
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
        """Of the next attempt with the same binding."""
        self.round_id = RoundId(self.round_id.epoch, self.round_id.round + 1)
        return self.round_id

    def new_epoch(self) -> RoundId:
        """A round id above all that were used, of another binding than all before."""
        self.round_id = RoundId(self.round_id.epoch + 1, self.round_id.round + 1)
        return self.round_id

    def refusal(self, version: int) -> str:
        """Why a version must not be published; empty if it may."""
        newest = max(self.fleet.published, self.reserved)
        if version <= newest:
            return f"stale version: it must be > {newest}, which is or may have been published"
        return "" if version <= MAX_COUNT else f"version must be < 2^53, got {version}"

    # --- what agents say ---------------------------------------------------------------------

    def check_past(self, hello: Hello) -> None:
        """What an agent says of earlier controllers must be possible.

        Raises:
            ProtocolError: it is not, or it is of a trainer rank of another run.
        """
        for name, value, least in (
            ("epoch", hello.epoch, 0),
            ("round", hello.round, 0),
            ("served_version", hello.served_version, -1),
        ):
            if not least <= value <= MAX_COUNT:
                raise ProtocolError(
                    f"{hello.worker}: {name} must be in [{least}, 2^53), got {value}"
                )
        if hello.epoch > self.round_id.epoch + MAX_EPOCHS_AHEAD:
            raise ProtocolError(
                f"{hello.worker}: epoch must be at most {MAX_EPOCHS_AHEAD} above that of this "
                f"controller, {self.round_id.epoch}, got {hello.epoch}"
            )
        ours = hello.lineage in {"", self.lineage}
        if hello.role is Role.TRAINER and not ours and self.journal.is_kept:
            raise ProtocolError(
                f"{hello.worker}: has trained for run {hello.lineage}, the journal of this "
                f"controller is of run {self.lineage}: start the trainers anew, or the controller "
                "with the journal of that run"
            )

    def note_joined(self, hello: Hello) -> None:
        """An agent was let in; what it says of the past counts from here on.

        What may have been published in this run and is served was published. Nobody but its trainers
        is believed by a controller that has no journal, and those only until something is bound: an
        engine may be of any run.
        """
        # Agents refuse what is older than what they have seen, whoever sent it.
        epoch = max(self.round_id.epoch, hello.epoch)
        self.round_id = self.round_id._replace(epoch=epoch)
        version, fleet = hello.served_version, self.fleet
        if hello.lineage == self.lineage:
            known = version <= self.reserved and not hello.mixed_weights
        else:
            known = hello.role is Role.TRAINER and not (self.journal.is_kept or self.has_bound)
            known &= fleet.published < 0 or hello.lineage == fleet.lineage
        if known and version > fleet.published:
            _log.info("%s says that version %s is published", hello.worker, version)
            fleet.published, fleet.lineage = version, hello.lineage
            self.reserved = max(self.reserved, version)

    def forget_past(self) -> None:
        """What trainers of another run have said is not the past of those that replace them."""
        if self.fleet.lineage != self.lineage:
            self.fleet.published = self.reserved = -1
            self.fleet.lineage = self.lineage

    # --- on record ---------------------------------------------------------------------------

    def reserve(self, version: int) -> None:
        """Engines may be told to serve `version` from here on: on disk before any can.

        Raises:
            OSError: it cannot be recorded.
        """
        self.record(JournalKind.PUBLISHING, version)
        self.reserved = max(self.reserved, version)

    def record(
        self, kind: JournalKind, version: int, engines: tuple[str, ...] = (), detail: str = ""
    ) -> None:
        """Put a fact about the newest round on record.

        Raises:
            OSError: it cannot be written.
        """
        self.journal.append(JournalEntry(kind, *self.round_id, version, engines, detail))

    def record_outcome(
        self, kind: JournalKind, version: int, engines: tuple[str, ...] = (), detail: str = ""
    ) -> None:
        """As `record`: what is done cannot be undone for want of a disk; PUBLISHING is on it already."""
        try:
            self.record(kind, version, engines, detail)
        except OSError as error:
            _log.error("journal: %s of version %s is not recorded: %s", kind, version, error)

    def record_quarantine(self) -> None:
        """A controller that is started after this one must not have those written either."""
        for worker, incarnation in sorted(
            self.fleet.quarantined - self.journal.summary.quarantined.keys()
        ):
            self.record_outcome(JournalKind.QUARANTINED, self.reserved, (worker,), incarnation)
