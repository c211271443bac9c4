"""What a trainer rank, or an engine as the source of another's weights, is bound to: a backend and its links."""

from __future__ import annotations

from typing import final

from windlass.config import P2pBackend, UpdateBackend
from windlass.errors import ConfigError, ProtocolError, RoundAborted
from windlass.planning.plan import TransferPlan
from windlass.transfer.backends import sender_for
from windlass.transfer.base import GroupMember, SenderBackend
from windlass.transfer.bindings import BindingsRefused, GroupOffer
from windlass.transfer.replicated_digests import ReplicatedDigests
from windlass.transfer.sender import Sender
from windlass.updates.connect_messages import ChangeLinks, ConnectTrainer, NotBound, Offered
from windlass.updates.messages import Done, Result


@final
class TrainerBinding:
    """The first clock at a source.

    Args:
        sender: one-sided writes; other backends read the same parameters.
        host: own address, that engines can reach, for backends that listen.

    Attributes:
        sender: of the backend that is bound now.
        replicated: what this rank holds and others hold too.
    """

    def __init__(self, sender: Sender, host: str) -> None:
        self._one_sided, self._host = sender, host
        self._backend: UpdateBackend = P2pBackend()
        self.sender: SenderBackend = sender_for(self._backend, sender, host)
        self.replicated = ReplicatedDigests(sender.manifest, sender.parameters)
        self._bound_in = 0

    @property
    def writer(self) -> Sender:
        """The sender, for what only one-sided writes can do.

        Raises:
            ProtocolError: another backend is bound.
        """
        if not isinstance(self.sender, Sender):
            raise ProtocolError(f"{type(self.sender).__name__} writes to no engine's memory")
        return self.sender

    @property
    def group_member(self) -> GroupMember:
        """The sender, for backends with groups.

        Raises:
            ProtocolError: another backend is bound.
        """
        if not isinstance(self.sender, GroupMember):
            raise ProtocolError(f"{type(self.sender).__name__} joins no groups")
        return self.sender

    def bind(self, command: ConnectTrainer | ChangeLinks, epoch: int) -> Result:
        """Bind a plan, or change links of it.

        Raises:
            WindlassError: nothing is bound any more; see `Sender.connect`.
        """
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
        self.replicated.bind(command.replicated)
        offer = self.sender.connect(TransferPlan.decode(command.plan), command.bindings)
        if (relay := command.relay) is not None:
            self.writer.connect_relay(relay.groups, relay.bindings, relay.addresses)
        return offer

    def _change_links(self, command: ChangeLinks, bound_in: int) -> None:
        if not 0 < command.since == bound_in:
            raise RoundAborted(
                f"since: must be {bound_in}, the epoch in which this rank was bound last (0: it is "
                f"not), got {command.since}"
            )
        plan = TransferPlan.decode(command.plan) if command.plan else None
        self.writer.change_links(plan, command.bindings, command.gone)

    def _choose(self, backend: UpdateBackend) -> None:
        if self._one_sided.replica is not None and not backend.traits.one_sided:
            raise ConfigError(
                f"replica: backend {type(backend).__name__} reads parameters where they lie; use p2p"
            )
        if backend != self._backend:
            self._leave()
            self.sender = sender_for(backend, self._one_sided, self._host)
            self._backend = backend

    def _leave(self) -> None:
        if self.sender is not self._one_sided:
            self.sender.close()

    def close(self) -> None:
        """Leave groups; the one-sided sender belongs to the caller. Idempotent."""
        self.replicated.close()
        self._leave()
