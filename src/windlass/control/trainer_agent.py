"""Agent of a trainer rank: carries out commands of the coordinator by calls of its sender."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import final

import numpy as np

from windlass.config import P2pBackend, UpdateBackend
from windlass.control.backend import ChangesLinks, backend_of, carry_out
from windlass.control.connect_messages import (
    ChangeLinks,
    ConnectTrainer,
    NotBound,
    Offered,
)
from windlass.control.held_weights import HeldWeights
from windlass.control.messages import (
    Abort,
    Command,
    Done,
    Prepare,
    Result,
    TrainerCommand,
    Write,
)
from windlass.errors import ConfigError, ProtocolError, RoundAborted
from windlass.net.messages import RoundId
from windlass.planning.plan import TransferPlan
from windlass.transfer.base import SenderBackend
from windlass.transfer.bindings import BindingsRefused, GroupOffer, Written
from windlass.transfer.sender import Sender

_log = logging.getLogger(__name__)


@final
class TrainerAgent:
    """`CommandHandler` of a trainer rank.

    Args:
        sender: sender of one-sided writes; other backends read the same parameters.
        host: address at which engines can reach this rank, for backends that listen.
        read: see `TrainerWeights`.
        watch: see `TrainerWeights`.
        changed: see `TrainerWeights`.

    Attributes:
        held: weights of the version that the trainer publishes now.
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
        self._note, self.held = read, HeldWeights(sender, watch, changed)
        self._backend: UpdateBackend = P2pBackend()
        self._sender: SenderBackend = sender
        self._read: set[int] = set()
        self.bound_in = 0
        """Epoch in which this rank was bound last; 0 if its binding is incomplete."""

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        """Carry out a command; see `CommandHandler.handle`.

        Raises:
            ProtocolError: the command is not for trainers.
        """
        if not isinstance(command, TrainerCommand):
            raise ProtocolError(f"a trainer cannot carry out {type(command).__name__}")
        match command:
            case ConnectTrainer() | ChangeLinks():
                return self._bind(command, epoch)
            case Prepare():
                self.held.note_changes()
                self.held.check_version(command.version)
                with self._one_sided.reading(), self._one_sided.parameters.once():
                    # Examine first: after `prepare` has taken the replica, the weights may change.
                    prepared = self.held.examine(command)
                    self._sender.prepare(command.version)
                replica = self._one_sided.replica
                if replica is not None and not replica.is_taken(command.version):
                    # The trainer may have changed the weights during the copy.
                    self.held.note_changes()
                    self.held.refuse_changed()
                return prepared
            case Write():
                write = self._sender.write
                return self.held.checked(
                    write(command.version, command.destinations, command.deadline_s)
                )
            case Abort():
                # Nothing to undo: the only state of a round in the sender is packed bytes.
                pass
            case _:
                result = carry_out(self._sender, command, RoundId(epoch, round_number))
                return (
                    self.held.checked(result) if isinstance(result, Written) else result or Done()
                )
        return Done()

    def _bind(self, command: ConnectTrainer | ChangeLinks, epoch: int) -> Result:
        """Bind a plan, or change links of the bound plan.

        After an error this rank counts as unbound, except after a refused change of links, which changes nothing.
        """
        before, self.bound_in = self.bound_in, 0
        offer: GroupOffer | None = None
        try:
            if isinstance(command, ConnectTrainer):
                offer = self._connect(command)
            else:
                self._change_links(command, before)
        except BindingsRefused as refused:
            if isinstance(command, ChangeLinks):
                self.bound_in = before
            return NotBound(refused.reasons)
        self.bound_in = epoch
        return Done() if offer is None else Offered(offer)

    def _connect(self, command: ConnectTrainer) -> GroupOffer | None:
        self._choose(command.backend)
        self.held.bind(command.replicated)
        plan = TransferPlan.decode(command.plan)
        self._read = set()
        self._note_read(plan)
        return self._sender.connect(plan, command.bindings)

    def _change_links(self, command: ChangeLinks, bound_in: int) -> None:
        if not 0 < command.since == bound_in:
            raise RoundAborted(
                f"since: must be {bound_in}, the epoch in which this rank was bound last (0: not "
                f"bound), got {command.since}"
            )
        plan = TransferPlan.decode(command.plan) if command.plan else None
        if plan is None:
            self.held.note_changes()
        else:
            self._note_read(plan)
        if not isinstance(self._sender, ChangesLinks):
            raise ProtocolError(f"{type(self._sender).__name__} cannot change single links")
        self._sender.change_links(plan, command.bindings, command.gone)

    def _note_read(self, plan: TransferPlan) -> None:
        """Record the parameters that a plan reads, and pass the indices of all recorded parameters to `read`."""
        self._read.update(np.unique(plan.ops.src_parameter).tolist())
        compared = self.held.note_read(self._read)
        if self._note is not None:
            self._note(self._read | compared)
        self.held.note_changes()

    def _choose(self, backend: UpdateBackend) -> None:
        if backend == self._backend:
            return
        found = backend_of(backend)
        if self._one_sided.replica is not None and (reason := found.refuse_replica()):
            raise ConfigError(f"replica: backend {type(backend).__name__} {reason}")
        self._leave()
        self._sender = found.sender(self._one_sided, self._host)
        self._backend = backend

    def _leave(self) -> None:
        if self._sender is not self._one_sided:
            self._sender.close()

    def close(self) -> None:
        """Close the digests and the backend's sender. The caller closes the one-sided sender. Idempotent."""
        self.held.close()
        self._leave()
