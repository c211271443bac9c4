"""Rules that a fleet must follow after every event, checked from outside."""

from __future__ import annotations

from windlass.control.connect_messages import Identity
from windlass.control.engine_state import TRANSITIONS, EngineStatus
from windlass.control.fleet import Fleet


class FleetRules:
    """Checks the fleet of a controller each time that `broken` is called."""

    def __init__(self) -> None:
        self._fleet: Fleet | None = None
        self._last: dict[str, tuple[frozenset[Identity], EngineStatus]] = {}

    def broken(self, fleet: Fleet) -> list[str]:
        """Return the rules that the fleet breaks now or has broken since the last call."""
        # A new fleet belongs to another controller.
        if fleet is not self._fleet:
            self._fleet, self._last = fleet, {}
        found, seen = [], dict[str, tuple[frozenset[Identity], EngineStatus]]()
        for group, state in zip(fleet.engines(), fleet.states(), strict=True):
            status, processes = state.status, group.identities
            known, before = self._last.get(group.name, (processes, status))
            if known == processes and status not in TRANSITIONS[before]:
                found.append(f"{group.name}: {before} became {status}")
            if not processes:
                found.append(f"{group.name}: is known and has no rank")
            if any(fleet.find(agent.hello.worker) is not agent for agent in group.agents.values()):
                found.append(f"{group.name}: a rank is not found by its name")
            whole = group.complete and not (group.mixed_weights or group.silent)
            current = fleet.published >= 0 and state.version == fleet.published
            if state.routable and not (whole and current and not group.not_resumed):
                found.append(f"{group.name}: is routable and not whole, current and resumed")
            silent = {EngineStatus.SERVING, EngineStatus.WAITING, EngineStatus.INCOMPLETE}
            if not state.reason and status not in {*silent, EngineStatus.MIXED_WEIGHTS}:
                found.append(f"{group.name}: {status} without a reason")
            seen[group.name] = processes, status
        self._last = seen
        return found
