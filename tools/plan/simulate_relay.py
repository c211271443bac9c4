"""Discrete-event simulation of a relay: the chunks of one group move along its stripes from member to member.

`simulate_wire` of the plan for one replica gives the time of the trainers. Groups use different NICs, so only the
slowest group is simulated. The NIC of a member sends one chunk at a time and receives one at a time (FIFO per NIC and
direction; chunks are short compared with a link, so fair sharing would change little). A chunk that waits for a busy
receiver does not delay the sender's other child, which has its own thread. A member verifies a chunk before it passes
the chunk on.
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
    """Result of a simulation. Times are in seconds from the first byte that a trainer sends.

    Attributes:
        wire_s: time at which the last member has verified all bytes.
        member_finish_s: (num_members,) the same time for each member.
        num_chunks: number of chunks per member.
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
    """Simulate one round.

    Args:
        group: members and stripes of the relay.
        nbytes: bytes that every member receives.
        fed_s: seconds that the trainers need to send `nbytes`, from `simulate_wire` of one replica. Each stripe
            gets its share of that rate.
        nic_gbytes_per_s: rate of a member's NIC, per direction.
        verify_gbytes_per_s: hash rate of a member.
        hop_s: seconds from the last byte of a chunk to the start of its verification: the write returns, a message
            is sent, a thread wakes up.

    Raises:
        ConfigError: a number is not positive, or the group has no stripes.
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
    # (arrival time of a chunk, member, chunk). Members process chunks in order of arrival.
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
    """Return the children of each member in each stripe."""
    found: list[list[list[int]]] = [[[] for _ in group.members] for _ in group.stripes]
    for stripe, parents in enumerate(group.stripes):
        for member, parent in enumerate(parents):
            if parent >= 0:
                found[stripe][parent].append(member)
    return found
