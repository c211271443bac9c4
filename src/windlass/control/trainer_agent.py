"""An agent of a trainer rank: commands of the coordinator become calls of its sender."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import assert_never, final

import msgspec
import numpy as np

from windlass.config import P2pBackend, Reaction, UpdateBackend
from windlass.control.connect_messages import (
    ChangeLinks,
    ConnectTrainer,
    JoinGroups,
    NotBound,
    Offered,
)
from windlass.control.messages import (
    Abort,
    Command,
    Done,
    Prepare,
    Prepared,
    RelayWrite,
    Result,
    TrainerCommand,
    Write,
)
from windlass.errors import ConfigError, ProtocolError, RoundAborted, WindlassError
from windlass.layout.naming.patterns import said
from windlass.net.messages import RoundId
from windlass.planning.plan import TransferPlan
from windlass.transfer.backends import sender_for
from windlass.transfer.base import GroupMember, SenderBackend, failed_link
from windlass.transfer.bindings import BindingsRefused, GroupOffer, LinkStatus, Written
from windlass.transfer.finite import FiniteCheck
from windlass.transfer.replicated_digests import ReplicatedDigests
from windlass.transfer.sender import Sender

_log = logging.getLogger(__name__)


@final
class TrainerAgent:
    """`CommandHandler` of a trainer rank.

    Args:
        sender: one-sided writes; other backends read the same parameters.
        host: own address, that engines can reach, for backends that listen.
        read, watch, changed: see `TrainerWeights`.
    """

    def __init__(
        self,
        sender: Sender,
        *,
        host: str = "127.0.0.1",
        read: Callable[[Collection[int]], None] | None = None,
        watch: Callable[[], None] | None = None,
        changed: Callable[[], str] = str,
    ) -> None:
        self._one_sided, self._host = sender, host
        self._note, self._watch, self._changed = read, watch, changed
        self._backend: UpdateBackend = P2pBackend()
        self._sender: SenderBackend = sender_for(self._backend, sender, host)
        self._replicated = ReplicatedDigests(sender.manifest, sender.parameters)
        self._finite = FiniteCheck(sender.manifest, sender.parameters)
        self._non_finite: tuple[str, ...] = ()
        self._read: set[int] = set()
        self._bound_in = 0
        self._digested: tuple[Prepare, bytes] | None = None
        self._version: int | None = None
        self._is_released = self._is_watched = False
        # Of a parameter that has changed since this rank began to publish its version.
        self._changed_name = ""
        self._noting = threading.Lock()

    def hold(self, version: int) -> None:
        """Expect rounds of the version with which the trainer stands still from now on."""
        self._version = version
        with self._noting:
            self._is_released = self._is_watched = False
            self._changed_name = ""

    def watch(self) -> None:
        """Notice changes of the weights from now on; called in the trainer's thread, after `hold`."""
        if self._watch is not None:
            with self._noting:
                self._watch()
                self._is_watched = True

    def _note_changes(self) -> None:
        """Ask for changes; called before parameters are located again, since `changed` then starts from there."""
        with self._noting:
            if self._is_watched or self._is_released:
                self._changed_name = self._changed_name or self._changed()

    def release(self) -> None:
        """Expect that the trainer changes its weights: it waits for no round any more."""
        self._is_released = True

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        """Carry out a command; see `CommandHandler.handle`.

        Raises:
            ProtocolError: it is none of a trainer's.
        """
        if not isinstance(command, TrainerCommand):
            raise ProtocolError(f"a trainer cannot carry out {type(command).__name__}")
        match command:
            case ConnectTrainer() | ChangeLinks():
                return self._bind(command, epoch)
            case JoinGroups():
                self._group_member().join(command.offers, command.deadline_s)
            case Prepare():
                self._note_changes()
                self._check_version(command.version)
                with self._one_sided.reading(), self._one_sided.parameters.once():
                    # Before the replica is taken: the weights may change then.
                    prepared = self._compare(command) if command.period else Done()
                    self._check_finite(command)
                    self._sender.prepare(command.version)
                replica = self._one_sided.replica
                if replica is not None and not replica.is_taken(command.version):
                    # The trainer did not wait for the copy, so it may have changed what was copied.
                    self._note_changes()
                    self._refuse_changed()
                return prepared
            case Write():
                write = self._sender.write
                return self._written(
                    write(command.version, command.destinations, command.deadline_s)
                )
            case RelayWrite():
                round_id, relay_write = RoundId(epoch, round_number), self._writer().relay_write
                return self._written(
                    relay_write(round_id, command.destinations, command.deadline_s)
                )
            case Abort():
                pass  # nothing to undo: the sender keeps no state of a round but packed bytes
            case _:
                assert_never(command)
        return Done()

    def _check_version(self, version: int) -> None:
        """Refuse to send weights that may be others than those of `version`.

        The controller asks for a published version again when no engine serves it any more.

        Raises:
            RoundAborted: the trainer has not stood still since it began to publish `version`.
        """
        if self._version not in {None, version}:
            raise RoundAborted(
                f"prepare: version must be {self._version}, whose weights this rank holds, got {version}"
            )
        replica = self._one_sided.replica
        if (
            replica is not None
            and (not self._is_released or replica.holds(version))
            and replica.is_taken(version)
        ):
            return
        if not self._is_released:
            self._refuse_changed()
            return
        if self._changed_name:
            raise RoundAborted(
                f"prepare: weights must be those of version {version}, but they have changed since "
                "this rank published it; publish again"
            )
        self._one_sided.begin_version(version=version)

    def _check_finite(self, command: Prepare) -> None:
        """Look for NaN and infinity in what engines will get.

        Raises:
            RoundAborted: some parameter contains them, and the settings refuse that.
        """
        replica, self._non_finite = self._one_sided.replica, ()
        if command.non_finite is Reaction.OFF:
            return
        if replica is not None and replica.is_taken(command.version):
            return  # the weights may be those of a later step
        is_refused = command.non_finite is Reaction.REFUSE
        self._non_finite = self._finite.find(everywhere=is_refused)
        if self._non_finite and is_refused:
            raise RoundAborted(
                f"version {command.version}: {said(self._non_finite)} of this rank contain NaN or infinity; step with "
                "finite gradients, or publish them all the same by ControlConfig(non_finite='warn')"
            )

    def _refuse_changed(self) -> None:
        """Raise RoundAborted if a parameter has changed since this rank began to publish."""
        if self._changed_name:
            raise RoundAborted(_too_early(self._changed_name))

    def _bind(self, command: ConnectTrainer | ChangeLinks, epoch: int) -> Result:
        """Bind a plan, or change links of it; where that raises, nothing is bound any more."""
        before, self._bound_in = self._bound_in, 0  # of what fails half way nothing may be kept
        offer: GroupOffer | None = None
        try:
            if isinstance(command, ConnectTrainer):
                offer = self._connect(command)
            else:
                self._change_links(command, before)
        except BindingsRefused as refused:
            if isinstance(command, ChangeLinks):
                self._bound_in = before
            return NotBound(refused.reasons)
        self._bound_in = epoch
        return Done() if offer is None else Offered(offer)

    def _connect(self, command: ConnectTrainer) -> GroupOffer | None:
        self._choose(command.backend)
        self._replicated.bind(command.replicated)
        plan = TransferPlan.decode(command.plan)
        self._read = set()
        self._note_read(plan)
        offer = self._sender.connect(plan, command.bindings)
        if (relay := command.relay) is not None:
            self._writer().connect_relay(relay.groups, relay.bindings, relay.addresses)
        return offer

    def _change_links(self, command: ChangeLinks, bound_in: int) -> None:
        if not 0 < command.since == bound_in:
            raise RoundAborted(
                f"since: must be {bound_in}, the epoch in which this rank was bound last (0: it is "
                f"not), got {command.since}"
            )
        plan = TransferPlan.decode(command.plan) if command.plan else None
        if plan is None:
            self._note_changes()
        else:
            self._note_read(plan)
        self._writer().change_links(plan, command.bindings, command.gone)

    def _note_read(self, plan: TransferPlan) -> None:
        """Add the parameters that a part of a plan reads."""
        self._read.update(np.unique(plan.ops.src_parameter).tolist())
        self._finite.bind(self._read)
        if self._note is not None:
            self._note(self._read | self._replicated.read)
        self._note_changes()

    def _writer(self) -> Sender:
        """The sender, for what only one-sided writes can do."""
        if not isinstance(self._sender, Sender):
            raise ProtocolError(f"{type(self._sender).__name__} writes to no engine's memory")
        return self._sender

    def _group_member(self) -> GroupMember:
        if not isinstance(self._sender, GroupMember):
            raise ProtocolError(f"{type(self._sender).__name__} joins no groups")
        return self._sender

    def _choose(self, backend: UpdateBackend) -> None:
        if self._one_sided.replica is not None and not backend.traits.one_sided:
            raise ConfigError(
                f"replica: backend {type(backend).__name__} reads parameters where they lie; use p2p"
            )
        if backend != self._backend:
            self._leave()
            self._sender = sender_for(backend, self._one_sided, self._host)
            self._backend = backend

    def _leave(self) -> None:
        if self._sender is not self._one_sided:
            self._sender.close()

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
            digested = self._replicated.take(command.turn, command.period)
            self._digested = command, digested.tobytes()
            compare_s = self._replicated.compare_s
        return Prepared(self._digested[1], compare_s)

    def after_update(self) -> None:
        """Do ahead of time what the next update needs; nobody waits for it."""
        try:
            self._replicated.cut_ahead()
        except WindlassError as error:  # the next update tries again, and says it
            _log.debug("comparing: nothing is cut ahead: %s", error)

    def _written(self, sent: Written) -> Written:
        """Links count as failed if a parameter changed meanwhile: digests show only that what was read arrived."""
        sent = msgspec.structs.replace(sent, non_finite=self._non_finite)
        if self._one_sided.replica is not None or not (name := self._changed()):
            return sent
        reason = _too_early(name)
        links = tuple(
            failed_link(link.destination, reason)
            if link.status in (LinkStatus.OK, LinkStatus.FAILED)
            else link
            for link in sent.links
        )
        return msgspec.structs.replace(sent, links=links)

    def close(self) -> None:
        """Leave groups; the one-sided sender belongs to the caller. Idempotent."""
        self._replicated.close()
        self._leave()


def _too_early(name: str) -> str:
    return (
        f"parameter {name!r} changed while its version was published; step the optimizer and take merged adapters out "
        "once `publish_soon`'s future is done, or publish by `begin_publish` (`replica='auto'`), which copies"
    )
