"""Backend `p2p`: one-sided writes, from the trainer rank that has the bytes to the engine rank that needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, final

from windlass.backends.relay import (
    EngineCopies,
    RelayDelivery,
    RelayingReceiver,
    RelayingSender,
    find_relay_groups,
)
from windlass.config import BackendEntry, P2pBackend, RelayShape
from windlass.control.backend import Backend, LinkCopies
from windlass.control.binding import Binding
from windlass.control.delivery import Delivery
from windlass.control.fleet import Group
from windlass.transfer.base import RankReceiver, RankSender, ReceiverBackend, SenderBackend
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender


@final
class P2p(Backend):
    """One-sided writes. With a relay, engines pass verified bytes on to other engines."""

    def __init__(self, options: P2pBackend) -> None:
        self._options = options
        self._relays = options.relay is not RelayShape.OFF

    def sender(self, sender: RankSender, host: str) -> SenderBackend:  # noqa: ARG002
        """Return the rank's sender of one-sided writes.

        With relays, return a wrapper that sends each byte to only one engine of a relay group. The group's engines pass
        the bytes on to each other.
        """
        return RelayingSender(cast("Sender", sender)) if self._relays else sender

    def receiver(self, receiver: RankReceiver, host: str) -> ReceiverBackend:
        """Return the rank's receiver of one-sided writes. With a relay, return a wrapper that also passes bytes on."""
        return RelayingReceiver(cast("Receiver", receiver), host) if self._relays else receiver

    def kept_part(self, held: Binding, trainers: Group, engines: Sequence[Group]) -> Binding | None:
        """Return a copy of `held` without the links to changed engines.

        Return None if `held` has relay groups, or if the new binding will have them. A relay group spans several engines,
        so all ranks must bind again.
        """
        if held.relay or find_relay_groups(trainers, engines, self._options):
            return None
        return held.part_for(
            trainers.identities, {engine.name: engine.identities for engine in engines}
        )

    def copies(self, trainers: Group, engines: Sequence[Group]) -> LinkCopies:
        """Return the copies between engine ranks. Only members of relay groups have such copies."""
        return EngineCopies(find_relay_groups(trainers, engines, self._options))

    def delivery(self, binding: Binding) -> Delivery:
        """Return the delivery of a round, with a relay if the binding has relay groups."""
        return RelayDelivery(binding.relay) if binding.relay else Delivery()


BACKEND = BackendEntry(P2p)
