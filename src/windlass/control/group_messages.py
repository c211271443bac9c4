"""Commands of backends that send weights by broadcasts. A broadcast group has one trainer rank and its destinations."""

from __future__ import annotations

import msgspec

from windlass.transfer.bindings import GroupOffer


class JoinGroups(msgspec.Struct, frozen=True, tag="join_groups"):
    """Command to a rank: join the groups in `offers` within `deadline_s` seconds, and answer `Done`.

    Joining is a collective, so the controller sends the command to all members of a group at the same time. The members
    check first that they agree about the tensors.
    """

    offers: tuple[GroupOffer, ...]
    deadline_s: float


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """Command to an engine rank: receive the broadcasts that trainer ranks send during `Write`.

    The controller does not wait for the answer, because `Verify` checks the received bytes.

    Attributes:
        version: version that the trainer ranks send.
        groups: source -> destinations that take part in the broadcasts of this source. If a member of the source's
            group is missing here, the broadcasts would never end, so the rank receives nothing from this source.
        deadline_s: seconds to receive all broadcasts.
    """

    version: int
    groups: dict[str, tuple[str, ...]]
    deadline_s: float


GroupCommand = JoinGroups | Receive
