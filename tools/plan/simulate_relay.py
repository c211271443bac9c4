"""A discrete-event simulation of a relay: chunks down the stripes of one group, member by member.

The trainers' side is `simulate_wire` of the plan for one replica, and the members of a group take the
same time as their own first one would: groups use different NICs, so the slowest alone is simulated. A
member's NIC sends one chunk after another and receives one after another (FIFO per NIC and direction; a
chunk is short beside a link, so fair sharing would change little). A chunk that waits for a busy receiver
does not hold up the sender's other child, which has a thread of its own. A member checks a chunk before
it passes it on.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.errors import ConfigError
from windlass.planning.relay import RelayGroup

__all__ = ["SimulatedRelay", "simulate_relay"]

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRelay:
    """What came out. Times in seconds from the first byte that a trainer sends.

    Attributes:
        wire_s: when the last member has everything, verified.
        member_finish_s: (num_members,) when each has.
        num_chunks: per member.
    """

    wire_s: float
    member_finish_s: npt.NDArray[np.float64]
    num_chunks: int


def simulate_relay(
    group: RelayGroup,
    *,
    nbytes: int,
    fed_s: float,
    nic_gbytes_per_s: float,
    verify_gbytes_per_s: float,
    hop_s: float = 50e-6,
) -> SimulatedRelay:
    """Carry out one round.

    Args:
        group: who passes on to whom.
        nbytes: that every member receives.
        fed_s: in which the trainers can send all of it, `simulate_wire` of one replica; each stripe
            gets its share of that rate.
        nic_gbytes_per_s: of a member, per direction.
        verify_gbytes_per_s: at which a member hashes.
        hop_s: from the last byte of a chunk to the begin of its check: a write that returns, a
            message, a thread that wakes.

    Raises:
        ConfigError: a number that is not positive, or a group without stripes.
    """
    for name, value in (
        ("nbytes", nbytes),
        ("fed_s", fed_s),
        ("nic_gbytes_per_s", nic_gbytes_per_s),
        ("verify_gbytes_per_s", verify_gbytes_per_s),
        ("len(group.stripes)", len(group.stripes)),
    ):
        if not value > 0:
            raise ConfigError(f"simulate_relay: {name} must be > 0, got {value}")
    num_stripes, num_members = len(group.stripes), len(group.members)
    num_chunks = -(-nbytes // group.chunk_nbytes)
    children = _children(group)
    sizes = [group.chunk_nbytes] * num_chunks
    sizes[-1] = nbytes - group.chunk_nbytes * (num_chunks - 1)
    egress, ingress, checked = ([0.0] * num_members for _ in range(3))
    rate, check = nic_gbytes_per_s * _GB, verify_gbytes_per_s * _GB
    # (moment at which a chunk has landed, member, chunk): members take them as they come.
    landed: list[tuple[float, int, int]] = []
    sent = 0
    for chunk, size in enumerate(sizes):
        sent += size
        root = group.stripes[chunk % num_stripes].index(-1)
        at = max(fed_s * sent / nbytes, ingress[root])
        landed.append((at + hop_s, root, chunk))
    heapq.heapify(landed)
    while landed:
        now, member, chunk = heapq.heappop(landed)
        size = sizes[chunk]
        checked[member] = max(now, checked[member]) + size / check
        for child in children[chunk % num_stripes][member]:
            begin = max(checked[member], egress[member])
            egress[member] = begin + size / rate
            ingress[child] = max(begin, ingress[child]) + size / rate
            heapq.heappush(landed, (ingress[child] + hop_s, child, chunk))
    finish = np.array(checked)
    return SimulatedRelay(wire_s=float(finish.max()), member_finish_s=finish, num_chunks=num_chunks)


def _children(group: RelayGroup) -> list[list[list[int]]]:
    """Per stripe and member, whom it passes chunks on to."""
    found: list[list[list[int]]] = [[[] for _ in group.members] for _ in group.stripes]
    for stripe, parents in enumerate(group.stripes):
        for member, parent in enumerate(parents):
            if parent >= 0:
                found[stripe][parent].append(member)
    return found
