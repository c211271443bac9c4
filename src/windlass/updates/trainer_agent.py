"""An agent of a trainer rank: commands of the coordinator become calls of its sender."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import assert_never, final

import msgspec

from windlass.errors import ProtocolError, RoundAborted, WindlassError
from windlass.net.messages import RoundId
from windlass.transfer.base import failed_link
from windlass.transfer.bindings import LinkStatus, Written
from windlass.transfer.sender import Sender
from windlass.updates.connect_messages import (
    ChangeLinks,
    ConnectTrainer,
    JoinGroups,
)
from windlass.updates.messages import (
    Abort,
    Command,
    Done,
    Prepare,
    Prepared,
    Result,
    TrainerCommand,
    Write,
)
from windlass.updates.relay_messages import RelayWrite
from windlass.updates.trainer_binding import TrainerBinding

_log = logging.getLogger(__name__)


@final
class TrainerAgent:
    """`CommandHandler` of a trainer rank.

    Args:
        sender: one-sided writes; other backends read the same parameters.
        host: own address, that engines can reach, for backends that listen.
        changed: see `TrainerClient`.
    """

    def __init__(
        self, sender: Sender, *, host: str = "127.0.0.1", changed: Callable[[], str] = str
    ) -> None:
        self._one_sided, self._changed = sender, changed
        self._bound = TrainerBinding(sender, host)
        self._digested: tuple[Prepare, bytes] | None = None

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        """Carry out a command; see `CommandHandler.handle`.

        Raises:
            ProtocolError: it is none of a trainer's.
        """
        if not isinstance(command, TrainerCommand):
            raise ProtocolError(f"a trainer cannot carry out {type(command).__name__}")
        match command:
            case ConnectTrainer() | ChangeLinks():
                return self._bound.bind(command, epoch)
            case JoinGroups():
                self._bound.group_member.join(command.offers, command.deadline_s)
            case Prepare():
                with self._one_sided.parameters.once():
                    # Before the replica is taken: the weights may change then.
                    prepared = self._compare(command) if command.period else Done()
                    self._bound.sender.prepare(command.version)
                return prepared
            case Write():
                write = self._bound.sender.write
                return self._written(
                    write(command.version, command.destinations, command.deadline_s)
                )
            case RelayWrite():
                round_id, relay_write = RoundId(epoch, round_number), self._bound.writer.relay_write
                return self._written(
                    relay_write(round_id, command.destinations, command.deadline_s)
                )
            case Abort():
                pass  # nothing to undo: the sender keeps no state of a round but packed bytes
            case _:
                assert_never(command)
        return Done()

    def _compare(self, command: Prepare) -> Prepared:
        """What this rank holds of boxes that others hold too; of a replica, what it was taken from."""
        compare_s = 0.0
        replica = self._one_sided.replica
        if replica is not None and replica.is_taken(command.version):
            if self._digested is None or self._digested[0] != command:
                raise RoundAborted(
                    "prepare: ranks must be compared anew since this version's weights were copied, and "
                    "they may have changed: publish again"
                )
        else:
            digested = self._bound.replicated.take(command.turn, command.period)
            self._digested = command, digested.tobytes()
            compare_s = self._bound.replicated.compare_s
        return Prepared(self._digested[1], compare_s)

    def after_update(self) -> None:
        """Do ahead of time what the next update needs; nobody waits for it."""
        try:
            self._bound.replicated.cut_ahead()
        except WindlassError as error:  # the next update tries again, and says it
            _log.debug("comparing: nothing is cut ahead: %s", error)

    def _written(self, sent: Written) -> Written:
        """Links count as failed if a parameter changed meanwhile: digests show only that what was read arrived."""
        if self._one_sided.replica is not None or not (name := self._changed()):
            return sent
        reason = f"parameter {name!r} changed while its version was published"
        links = tuple(
            failed_link(link.destination, reason)
            if link.status in (LinkStatus.OK, LinkStatus.FAILED)
            else link
            for link in sent.links
        )
        return msgspec.structs.replace(sent, links=links)

    def close(self) -> None:
        """Leave groups; the one-sided sender belongs to the caller. Idempotent."""
        self._bound.close()
