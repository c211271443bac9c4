"""Commands of backends that send weights by collectives, in groups of one trainer rank and its destinations."""

from __future__ import annotations

import msgspec

from windlass.transfer.bindings import GroupOffer


class JoinGroups(msgspec.Struct, frozen=True, tag="join_groups"):
    """Command to a rank: join the groups in `offers`, and answer `Done`.

    Joining is a collective, so the controller sends the command to all members of a group at once. The members first
    check that they expect the same tensors.
    """

    offers: tuple[GroupOffer, ...]
    deadline_s: float


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """Command to an engine rank: receive the broadcasts that trainer ranks send while they carry out `Write`.

    The controller does not await the answer, because `Verify` checks the received bytes.

    Attributes:
        version: version that the trainer ranks send.
        groups: source -> destinations that take part in this source's broadcasts. If a member of the source's group is
            not among them, the rank receives nothing from this source, because the broadcast would never finish.
        deadline_s: seconds to receive all broadcasts.
    """

    version: int
    groups: dict[str, tuple[str, ...]]
    deadline_s: float


GroupCommand = JoinGroups | Receive
