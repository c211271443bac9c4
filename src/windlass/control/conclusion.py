"""What a round leaves behind in the fleet. No I/O."""

from __future__ import annotations

from windlass.control.binding import Binding
from windlass.control.driver import RoundResult
from windlass.control.fleet import Fleet, Identity
from windlass.control.round_types import EngineFate

__all__ = ["note_fates"]


def note_fates(
    fleet: Fleet, binding: Binding, result: RoundResult, *, version: int, place: tuple[int, int]
) -> None:
    """Note who serves what, who may hold two versions, and whose bytes are still under way.

    Args:
        fleet: changed in place.
        binding: of the round.
        result: how it ended.
        version: of the round.
        place: its (epoch, round).
    """
    finish = result.finish
    for name, fate in finish.fates.items():
        bound = binding.identities_of(name)
        if fate is EngineFate.POISONED:
            fleet.poison(bound)
        group = fleet.group_of(name)
        # A process that came meanwhile under a name of the round took no part in it.
        if group is None or group.identities != bound:
            continue
        group.tainted |= name in finish.mixed
        if fate is EngineFate.PUBLISHED:
            group.version, group.tainted = version, False
    incarnations = dict(binding.signature)
    for source, engines in finish.unsettled.items():
        reached = frozenset[Identity]().union(*(binding.identities_of(e) for e in engines))
        fleet.hold((source, incarnations[source]), place, reached)
    for late in result.late:
        if late.worker in finish.unsettled:
            fleet.settle((late.worker, incarnations[late.worker]), place, late.result)
