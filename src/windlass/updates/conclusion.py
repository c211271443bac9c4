"""What a round leaves behind in the fleet, and whether another attempt is worth it. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from windlass.config import ControlConfig, XcclBackend
from windlass.updates.binding import Binding
from windlass.updates.driver import RoundResult
from windlass.updates.fleet import Fleet, Identity
from windlass.updates.messages import RoundOutcome, UpdateReport
from windlass.updates.round_types import EngineFate, Phase

__all__ = ["attempt_until_whole", "note_fates"]

_log = logging.getLogger(__name__)


async def attempt_until_whole(
    attempt: Callable[[], Awaitable[UpdateReport]],
    forget_binding: Callable[[], None],
    config: ControlConfig,
) -> UpdateReport:
    """A broken group serves nobody: form it anew from whoever is left, and send again.

    Trainers stand still all the while. One-sided writes and files need no second attempt: there
    an engine that fails takes no other one with it.
    """
    report = await attempt()
    if not isinstance(config.backend, XcclBackend):
        return report
    for _ in range(config.max_rewrites):
        if report.outcome is RoundOutcome.PUBLISHED or Phase.PUBLISH in report.phase_s:
            break
        _log.warning("version %s: group formed anew: %s", report.version, report.reason)
        forget_binding()
        report = await attempt()
    if report.outcome is not RoundOutcome.PUBLISHED or report.left_out:
        forget_binding()
    return report


def note_fates(
    fleet: Fleet,
    binding: Binding,
    result: RoundResult,
    *,
    version: int,
    lineage: str,
    place: tuple[int, int],
) -> None:
    """Note who serves what, who may hold two versions, and whose bytes are still under way.

    Args:
        fleet: changed in place.
        binding: of the round.
        result: how it ended.
        version: of the round.
        lineage: of the run that the version belongs to.
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
            group.version, group.lineage, group.tainted = version, lineage, False
    incarnations = dict(binding.signature)
    for source, engines in finish.unsettled.items():
        reached = frozenset[Identity]().union(*(binding.identities_of(e) for e in engines))
        fleet.hold((source, incarnations[source]), place, reached)
    for late in result.late:
        if late.worker in finish.unsettled:
            fleet.settle((late.worker, incarnations[late.worker]), place, late.seq, late.result)
