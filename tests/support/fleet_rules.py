"""Rules that a fleet must follow after every event, checked from outside."""

from __future__ import annotations

from windlass.control.engine_state import TRANSITIONS, EngineStatus
from windlass.control.fleet import Fleet, Group

NEED_NO_REASON = {EngineStatus.SERVING, EngineStatus.WAITING, EngineStatus.INCOMPLETE}


class FleetRules:
    """Checks the fleet of a controller each time that `broken` is called."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Group, EngineStatus]] = {}

    def broken(self, fleet: Fleet) -> list[str]:
        """Return the rules that the fleet breaks now or has broken since the last call."""
        found, seen = [], dict[str, tuple[Group, EngineStatus]]()
        for group, state in zip(fleet.engines(), fleet.states(), strict=True):
            name, status = group.name, state.status
            known, before = self._last.get(name, (group, status))
            if known is group and status not in TRANSITIONS[before]:
                found.append(f"{name}: {before} became {status}")
            if not group.agents:
                found.append(f"{name}: is known and has no rank")
            if any(fleet.find(agent.hello.worker) is not agent for agent in group.agents.values()):
                found.append(f"{name}: a rank is not found by its name")
            ranks = group.agents.values()
            works = len(ranks) == group.world_size
            works &= not any(rank.silent or rank.not_resumed for rank in ranks)
            holds = (group.version, group.lineage) == (fleet.published, fleet.lineage)
            if state.routable != (works and holds and fleet.published >= 0):
                found.append(f"{name}: is {status}, and works {works} and holds {holds}")
            if state.reason.startswith("internal error"):
                found.append(f"{name}: {state.reason}")
            if not state.reason and status not in NEED_NO_REASON:
                found.append(f"{name}: {status} without a reason")
            seen[name] = group, status
        self._last = seen
        return found
