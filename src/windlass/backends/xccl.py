"""Backend `xccl`: every trainer rank broadcasts to the engine ranks that need its bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import final

from windlass.config import BackendEntry, XcclBackend
from windlass.control.backend import OwnPathBackend
from windlass.control.binding import Binding
from windlass.control.delivery import Delivery, Order
from windlass.control.group_messages import JoinGroups, Receive
from windlass.control.links import LinkLedger
from windlass.control.messages import Command, Result, Write
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.errors import ProtocolError
from windlass.net.messages import RoundId
from windlass.planning.plan import TransferPlan
from windlass.transfer.base import RankReceiver, RankSender, ReceiverBackend, SenderBackend
from windlass.transfer.collective import CollectiveReceiver, CollectiveSender


@final
class Xccl(OwnPathBackend):
    """Collectives: sender and receivers take part in each write, so a rank that fails breaks the group."""

    def __init__(self, options: XcclBackend) -> None:
        self._options = options

    def sender(self, sender: RankSender, host: str) -> SenderBackend:
        """Return the root of a group."""
        return GroupSender(self._options, sender.manifest, sender.parameters, host)

    def receiver(self, receiver: RankReceiver, host: str) -> ReceiverBackend:
        """Return a member of the groups of the sources."""
        return GroupReceiver(self._options, receiver.manifest, receiver.live_addresses, host)

    def parts(self, plan: TransferPlan, *, sending: bool) -> dict[str, TransferPlan]:
        """Return parts with the names of all tensors, because the members of a group compare their name tables."""
        return plan.parts(sending=sending, all_names=True)

    def delivery(self, binding: Binding) -> Delivery:  # noqa: ARG002
        """Return a delivery to engines that receive while sources write."""
        return GroupDelivery()

    def is_spent(self, report: UpdateReport) -> bool:
        """Return whether a rank has failed: its groups are broken, and the survivors form new ones."""
        return report.outcome is not RoundOutcome.PUBLISHED or bool(report.left_out)


@final
class GroupDelivery(Delivery):
    """Delivery by collectives: each source sends to all its engine ranks at once, and these receive at the same time."""

    def write(
        self,
        missing: Mapping[str, tuple[str, ...]],
        *,
        ledger: LinkLedger,
        active: Collection[str],
        version: int,
        deadline_s: float,
    ) -> list[Order]:
        """Tell engines to receive before the trainers write, because engines have nothing to pack.

        The round does not await the engines' answers, because VERIFY checks the bytes.
        """
        links = ledger.among(missing, active)
        groups: dict[str, dict[str, tuple[str, ...]]] = {}
        for source, destinations in links.items():
            for worker in destinations:
                groups.setdefault(worker, {})[source] = destinations
        return [
            *(
                Order(worker, Receive(version, own, deadline_s), expects_reply=False)
                for worker, own in groups.items()
            ),
            *(
                Order(source, Write(version, to, deadline_s), destinations=to)
                for source, to in links.items()
            ),
        ]


@final
class GroupSender(CollectiveSender):
    """Trainer half."""

    def carry_out(self, command: Command, round_id: RoundId) -> Result | None:  # noqa: ARG002
        """Join the group that this rank offered."""
        if not isinstance(command, JoinGroups):
            raise ProtocolError(f"a group's source cannot carry out {type(command).__name__}")
        self.join(command.offers, command.deadline_s)
        return None


@final
class GroupReceiver(CollectiveReceiver):
    """Engine half."""

    def carry_out(self, command: Command, round_id: RoundId) -> Result | None:  # noqa: ARG002
        """Join groups, or receive from them."""
        match command:
            case JoinGroups():
                self.join(command.offers, command.deadline_s)
            case Receive():
                self.receive(command.groups, command.deadline_s)
            case _:
                raise ProtocolError(f"a group's member cannot carry out {type(command).__name__}")
        return None


BACKEND = BackendEntry(Xccl)
