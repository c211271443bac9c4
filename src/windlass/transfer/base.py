"""The seam between the transaction and how bytes travel.

A backend is a pair: what a trainer rank does (`SenderBackend`) and what an engine rank does
(`ReceiverBackend`). Backends whose ranks form groups are `GroupMember`s
besides. The round machine drives every pair through the same phases; what verifies is always a digest per link, over the link's ops in plan order in the destination's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from windlass.config import UpdateMode
from windlass.planning.plan import TransferPlan
from windlass.transfer.bindings import DestinationBinding, GroupOffer, LinkOutcome

__all__ = [
    "LINKS_AT_ONCE",
    "GroupMember",
    "GroupReceiver",
    "ParameterMemory",
    "ReceiverBackend",
    "SendResult",
    "SenderBackend",
]

LINKS_AT_ONCE = 16
"""Links that a trainer rank has on the wire at a time: with fewer, ranks wait for the same receivers.

By `python -m tools.plan --simulate`, DeepSeek-V3 on 128 to 128 ranks loses 13 % with 4.
"""


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """Where a parameter lies now."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SendResult:
    """Outcome per link, and seconds spent packing and hashing, and inside transport writes."""

    links: tuple[LinkOutcome, ...]
    pack_s: float
    wire_s: float


class SenderBackend(Protocol):
    """One trainer rank. Called by the agent's command thread."""

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """Bind a plan part (`TransferPlan.for_source`); an offer where engines must join a group.

        Raises:
            PlanError: the plan was made for another layout, or a destination has no binding.
            TransferError: memory, a port or a folder cannot be had.
        """
        ...

    def prepare(self, version: int) -> None:
        """Do what can be done while engines still generate. The weights stand still from here on."""
        ...

    def write(self, version: int, destinations: Sequence[str], deadline_s: float) -> SendResult:
        """Move the bytes of the links to `destinations`. Idempotent.

        Raises:
            RoundAborted: a destination that this rank does not send to.
        """
        ...

    def close(self) -> None:
        """Free what the backend holds. Idempotent."""
        ...


class ReceiverBackend(Protocol):
    """One engine rank. Called by the agent's command thread."""

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Bind a plan part (`TransferPlan.for_destination`).

        Raises:
            PlanError: the plan is for another layout, or asks for the engine's own loader.
        """
        ...

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Sources whose bytes do not have the expected digest, or that send nothing here."""
        ...

    def apply(self) -> None:
        """Make verified bytes live. Idempotent. The engine must be quiesced."""
        ...

    def close(self) -> None:
        """Free what the backend holds. Idempotent."""
        ...


@runtime_checkable
class GroupMember(Protocol):
    """What either half of a backend also has whose ranks move bytes together."""

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:
        """Enter the groups that this rank belongs to.

        Raises:
            PlanError: another member means to send or receive something else.
            PeerTimeout: a member did not come within `deadline_s`.
        """
        ...


@runtime_checkable
class GroupReceiver(GroupMember, Protocol):
    """What the engine's half of such a backend has."""

    def receive(self, groups: Mapping[str, Sequence[str]], deadline_s: float) -> None:
        """Receive what a collective write brings.

        Args:
            groups: source -> all destinations that enter.
            deadline_s: for all of them.

        Raises:
            TransferError: some group did not deliver; `verify` says which links lack bytes.
        """
        ...
