"""Commands of backends with groups of ranks (collectives)."""

from __future__ import annotations

import msgspec

from windlass.transfer.bindings import GroupOffer


class JoinGroups(msgspec.Struct, frozen=True, tag="join_groups"):
    """Command to enter these groups, agree on their tensors, and answer `Done`.

    The controller sends it to all members at once, with the groups in the same order.
    """

    offers: tuple[GroupOffer, ...]
    deadline_s: float


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """Command to an engine: receive in a collective, while the trainer carries out `Write`.

    The controller does not await the answer, because `Verify` checks the received bytes.

    Attributes:
        version: version that is written.
        groups: source -> all destinations that take part in its broadcasts. If a member of the group is missing, the
            engine does not take part.
        deadline_s: seconds to receive.
    """

    version: int
    groups: dict[str, tuple[str, ...]]
    deadline_s: float


GroupCommand = JoinGroups | Receive
