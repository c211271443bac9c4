"""Plan how engines that need the same bytes pass chunks on to each other. No I/O.

Two engines have the same layout if their ranks hold the same boxes at the same places of the same
parameters. The plan is made for one of these engines and is valid, op for op, for the others. The ranks
with the same number in these engines form a *group*; they are the *members* of the group. The bytes for a
group are divided into *stripes*: each stripe has every num_stripes-th chunk and its own tree of members.
Trainers write the chunks of a stripe to the root of its tree.

With two binary trees, the inner nodes of one tree are leaves of the other tree. So every member sends
about as much as it receives, at logarithmic depth (Sanders, Speck, Traeff, "Two-tree algorithms for
full bandwidth broadcast", 2009). The nodes are numbered as in NCCL's `trees.cc`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from windlass.config import RelayShape
from windlass.layout.manifest import ShardManifest

LONGEST_CHAIN = 4
"""Maximum number of members for which `AUTO` uses a chain. The last of n members waits for n - 1
chunks in a chain, and for about 4 log2(n) in trees."""


class RelayGroup(msgspec.Struct, frozen=True):
    """Ranks that need the same bytes, and the trees over which they pass the bytes on.

    Attributes:
        members: worker names; the plan is made for the first member.
        stripes: per stripe the parent of each member: an index in `members`, or -1 for the
            trainers.
        chunk_nbytes: maximum bytes that are written, verified and passed on at a time.
    """

    members: tuple[str, ...]
    stripes: tuple[tuple[int, ...], ...]
    chunk_nbytes: int

    def roots(self) -> tuple[str, ...]:
        """Return, per stripe, the member that the trainers write to."""
        return tuple(self.members[parents.index(-1)] for parents in self.stripes)


def depths_of(group: RelayGroup) -> tuple[tuple[int, ...], ...]:
    """Return the depth of each member in the tree of each stripe: 1 for the root, 2 for its children, and so on."""
    found = []
    for parents in group.stripes:
        depths = [0] * len(parents)
        for member in range(len(parents)):
            at = member
            while at >= 0:
                depths[member] += 1
                at = parents[at]
        found.append(tuple(depths))
    return tuple(found)


def find_replicas(engines: Mapping[str, Sequence[ShardManifest]]) -> tuple[tuple[str, ...], ...]:
    """Return the sets of engines that have the same layout, as tuples of engine names.

    Leave out engines with a unique layout. `engines` has the manifests of each engine's ranks. The result keeps the
    order of `engines`.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for name, manifests in engines.items():
        found.setdefault(tuple(m.layout_digest for m in manifests), []).append(name)
    return tuple(tuple(names) for names in found.values() if len(names) > 1)


def stripes_of(shape: RelayShape, num_members: int) -> tuple[tuple[int, ...], ...]:
    """Return, per stripe, the index of each member's parent; -1 for the root. See `RelayGroup.stripes`.

    Return no stripes if `shape` is `OFF` or the group has one member, because no member then relays.
    """
    if shape is RelayShape.OFF or num_members < 2:
        return ()
    if shape is RelayShape.CHAIN or (shape is RelayShape.AUTO and num_members <= LONGEST_CHAIN):
        return (tuple(range(-1, num_members - 1)),)
    first = tuple(_parent(member, num_members) for member in range(num_members))
    if num_members % 2:
        # Give each member the place that the member before it has in the first tree. Then odd members relay only in
        # the second tree, and even members from 2 on relay only in the first tree.
        second = tuple(
            -1 if (p := first[(member - 1) % num_members]) < 0 else (p + 1) % num_members
            for member in range(num_members)
        )
    else:
        second = tuple(
            -1 if (p := first[num_members - 1 - member]) < 0 else num_members - 1 - p
            for member in range(num_members)
        )
    return first, second


def _parent(member: int, num_members: int) -> int:
    """Return the parent of a member, -1 for the root. Member 0 is the root, and odd members are leaves."""
    if member == 0:
        return -1
    bit = member & -member
    up = (member ^ bit) | (bit << 1)
    return up if up < num_members else member ^ bit


def children_of(group: RelayGroup, member: str) -> tuple[tuple[str, ...], ...]:
    """Return, per stripe, the members to which `member` sends chunks."""
    index = group.members.index(member)
    return tuple(
        tuple(group.members[child] for child, parent in enumerate(parents) if parent == index)
        for parents in group.stripes
    )
