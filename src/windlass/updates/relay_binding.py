"""Relay groups of a fleet: found before the plan is made, bound after every rank has bound it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from windlass.config import P2pBackend, RelayShape, UpdateBackend
from windlass.layout.manifest import ShardManifest
from windlass.planning.relay import RelayGroup, children_of, find_replicas, stripes_of
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.relay_wire import RelayAddress
from windlass.updates.fleet import Group
from windlass.updates.messages import ConnectRelay, OpenRelay

__all__ = ["RelayPlan", "plan_relay"]


@dataclass(frozen=True, slots=True)
class RelayPlan:
    """The groups of a binding; empty where every engine is written by the trainers.

    Attributes:
        groups: disjoint; each has at least two members, one per engine.
    """

    groups: tuple[RelayGroup, ...] = ()

    @property
    def copies(self) -> dict[str, str]:
        """Member that the plan leaves out -> the first member of its group."""
        return {name: group.members[0] for group in self.groups for name in group.members[1:]}

    @property
    def children(self) -> dict[str, tuple[str, ...]]:
        """Every member -> those that it passes on to, in any stripe."""
        return {
            member: tuple(dict.fromkeys(c for stripe in children_of(group, member) for c in stripe))
            for group in self.groups
            for member in group.members
        }

    def planned(self, manifests: Sequence[ShardManifest]) -> list[ShardManifest]:
        """The destinations that the plan is made for."""
        copies = self.copies
        return [manifest for manifest in manifests if manifest.worker not in copies]

    def direct(self, bindings: Iterable[DestinationBinding]) -> tuple[DestinationBinding, ...]:
        """Of the destinations that the plan is made for."""
        copies = self.copies
        return tuple(binding for binding in bindings if binding.worker not in copies)

    def openings(self) -> dict[str, OpenRelay]:
        """The first command, to every member."""
        return {member: OpenRelay() for group in self.groups for member in group.members}

    def connections(
        self,
        trainers: Sequence[str],
        bindings: Mapping[str, DestinationBinding],
        addresses: Mapping[str, RelayAddress],
    ) -> dict[str, ConnectRelay]:
        """The second command, to every member and every trainer."""
        found: dict[str, ConnectRelay] = {}
        for group in self.groups:
            for member in group.members:
                names = dict.fromkeys(c for stripe in children_of(group, member) for c in stripe)
                found[member] = ConnectRelay(
                    (group,),
                    tuple(bindings[name] for name in names),
                    tuple(addresses[name] for name in names),
                )
        members = tuple(name for group in self.groups for name in group.members)
        roots = dict.fromkeys(root for group in self.groups for root in group.roots())
        feeding = ConnectRelay(
            self.groups,
            tuple(bindings[name] for name in members),
            tuple(addresses[name] for name in roots),
        )
        return found | dict.fromkeys(trainers, feeding)


def plan_relay(trainers: Group, engines: Sequence[Group], backend: UpdateBackend) -> RelayPlan:
    """Which engines pass on to which others.

    Only engines that can send, and whose ranks hold the same boxes at the same places, box for box; on GPUs
    those that a network writes. Kernels that store into peers relay nothing.

    Args:
        trainers: that will be bound.
        engines: likewise.
        backend: says whether and how.
    """
    if _stores_by_kernels(trainers):
        return RelayPlan()
    if not isinstance(backend, P2pBackend) or backend.relay is RelayShape.OFF:
        return RelayPlan()
    able = {
        engine.name: engine
        for engine in engines
        if not _stores_by_kernels(engine)
        and all(agent.hello.can_send for agent in engine.agents.values())
    }
    groups = []
    for names in find_replicas({name: engine.manifests for name, engine in able.items()}):
        stripes = stripes_of(backend.relay, len(names))
        groups += [
            RelayGroup(members, stripes, backend.relay_chunk_nbytes)
            for members in zip(*(able[name].workers for name in names), strict=True)
        ]
    return RelayPlan(tuple(groups))


def _stores_by_kernels(group: Group) -> bool:
    return any(
        offer.traits.strided_stores
        for agent in group.agents.values()
        for offer in agent.hello.offers
    )
