"""Sender and receiver of one-sided writes, behind the seam that all backends share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from windlass.config import UpdateMode
from windlass.errors import ProtocolError
from windlass.planning.plan import TransferPlan
from windlass.planning.relay import RelayGroup
from windlass.transfer.base import SendResult
from windlass.transfer.bindings import DestinationBinding, GroupOffer
from windlass.transfer.receiver import Receiver
from windlass.transfer.relay_wire import Place, RelayAddress
from windlass.transfer.sender import Sender

__all__ = ["OneSidedReceiver", "OneSidedSender"]


@final
class OneSidedSender:
    """`SenderBackend` of `p2p`: no version in the bytes, no group."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """See `Sender.connect`."""
        self._sender.connect(plan, bindings)
        return None

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:  # noqa: ARG002
        """No groups here."""
        raise ProtocolError("p2p: one-sided writes have no groups to join")

    def prepare(self, version: int) -> None:
        """See `Sender.prepare`."""
        self._sender.prepare(version)

    def write(
        self,
        version: int,  # noqa: ARG002
        destinations: Sequence[str],
        deadline_s: float,
    ) -> SendResult:
        """See `Sender.write`."""
        return self._sender.write(destinations, deadline_s)

    def connect_relay(
        self,
        groups: Sequence[RelayGroup],
        bindings: Sequence[DestinationBinding],
        addresses: Sequence[RelayAddress],
    ) -> None:
        """See `Sender.connect_relay`."""
        self._sender.connect_relay(groups, bindings, addresses)

    def feed(self, place: Place, destinations: Sequence[str], deadline_s: float) -> SendResult:
        """See `Sender.feed`."""
        return self._sender.feed(place, destinations, deadline_s)

    def close(self) -> None:
        """The sender belongs to whoever made it."""


@final
class OneSidedReceiver:
    """`ReceiverBackend` of `p2p`: while bytes arrive it does nothing."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """See `Receiver.connect`."""
        return self._receiver.connect(plan, mode)

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:  # noqa: ARG002
        """No groups here."""
        raise ProtocolError("p2p: one-sided writes have no groups to join")

    def receive(self, groups: Mapping[str, Sequence[str]], deadline_s: float) -> None:  # noqa: ARG002
        """Nothing to receive: peers write."""
        raise ProtocolError("p2p: one-sided writes have no receiving half")

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:  # noqa: ARG002
        """See `Receiver.verify`."""
        return self._receiver.verify(expected)

    def apply(self) -> None:
        """See `Receiver.apply`."""
        self._receiver.apply()

    def close(self) -> None:
        """The receiver belongs to whoever made it."""
