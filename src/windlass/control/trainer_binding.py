"""Binding of a trainer rank: the backend of the fleet, and the links of this rank."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import final

import numpy as np

from windlass.config import P2pBackend, UpdateBackend
from windlass.control.backend import ChangesLinks, backend_of
from windlass.control.connect_messages import ChangeLinks, ConnectTrainer, NotBound, Offered
from windlass.control.held_weights import HeldWeights
from windlass.control.messages import Done, Result
from windlass.errors import ConfigError, ProtocolError, RoundAborted
from windlass.planning.plan import TransferPlan
from windlass.transfer.base import SenderBackend
from windlass.transfer.bindings import BindingsRefused, GroupOffer
from windlass.transfer.sender import Sender


@final
class TrainerBinding:
    """Binding of a trainer rank. A controller binds a rank before its first round, and again when the fleet changes.

    Args:
        sender: sender of one-sided writes; other backends read the same parameters.
        held: weights of the rank.
        host: address at which engines can reach this rank, for backends that listen.
        read: see `TrainerWeights`.

    Attributes:
        sender: trainer half of the backend.
    """

    def __init__(
        self,
        sender: Sender,
        held: HeldWeights,
        *,
        host: str,
        read: Callable[[Collection[int]], None] | None,
    ) -> None:
        self._one_sided, self._held, self._host = sender, held, host
        self._backend: UpdateBackend = P2pBackend()
        self.sender: SenderBackend = sender
        self._note, self._read = read, set[int]()
        # Epoch in which this rank was bound last; 0 if its binding is incomplete.
        self._bound_in = 0

    def bind(self, command: ConnectTrainer | ChangeLinks, epoch: int) -> Result:
        """Bind a plan (`ConnectTrainer`), or change single links of the bound plan (`ChangeLinks`).

        After an error this rank counts as unbound. There is one exception: if this rank answers a `ChangeLinks` with
        `NotBound`, its old links stay bound.

        Args:
            command: the command.
            epoch: epoch of the command.

        Returns:
            `Done`, `Offered` with a collective group that the engines must join, or `NotBound` with the reasons.

        Raises:
            ConfigError: the sender of the backend cannot use the replica of this rank.
            ProtocolError: the backend cannot change single links, or the plan cannot be decoded.
            RoundAborted: `ChangeLinks.since` is not the epoch in which this rank was bound last.
            PlanError, TransferError: see `SenderBackend.connect`.
        """
        before, self._bound_in = self._bound_in, 0
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
        """Bind the command's plan with the command's backend. End all earlier links; see `SenderBackend.connect`.

        Record the parameters that the plan reads, and the boxes that this rank and other trainer ranks compare.
        """
        self._choose(command.backend)
        self._held.bind(command.replicated)
        plan = TransferPlan.decode(command.plan)
        self._read = set()
        self._note_read(plan)
        return self.sender.connect(plan, command.bindings)

    def _change_links(self, command: ChangeLinks, bound_in: int) -> None:
        """Change single links of the plan that was bound in epoch `bound_in`. For errors see `bind`."""
        if not 0 < command.since == bound_in:
            raise RoundAborted(
                f"since: must be the epoch in which this rank was bound, got {command.since}; this rank "
                + (f"was bound in epoch {bound_in}" if bound_in else "is not bound")
            )
        plan = TransferPlan.decode(command.plan) if command.plan else None
        if plan is None:
            self._held.note_changes()
        else:
            self._note_read(plan)
        if not isinstance(self.sender, ChangesLinks):
            raise ProtocolError(f"{type(self.sender).__name__} cannot change single links")
        self.sender.change_links(plan, command.bindings, command.gone)

    def _note_read(self, plan: TransferPlan) -> None:
        """Record the parameters that a plan reads.

        Then call `TrainerWeights.read` with the indices of all parameters that this rank sends or compares with other
        ranks.
        """
        self._read.update(np.unique(plan.ops.src_parameter).tolist())
        compared = self._held.note_read(self._read)
        if self._note is not None:
            self._note(self._read | compared)
        self._held.note_changes()

    def _choose(self, backend: UpdateBackend) -> None:
        """Make `sender` a sender of `backend`. If the backend changes, close the sender of the previous backend.

        Raises:
            ConfigError: the backend cannot use the replica of this rank (the copy of its parameters); see also
                `backend_of`.
        """
        if backend == self._backend:
            return
        found = backend_of(backend)
        if self._one_sided.replica is not None and (reason := found.refuse_replica()):
            raise ConfigError(f"replica: backend {type(backend).__name__} {reason}")
        self.close()
        self.sender = found.sender(self._one_sided, self._host)
        self._backend = backend

    def close(self) -> None:
        """Close the backend's sender, unless it is the one-sided sender, which the caller closes. Idempotent."""
        if self.sender is not self._one_sided:
            self.sender.close()
