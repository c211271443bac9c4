"""States of an engine, and the transitions between them. No I/O.

The fleet has one state per engine. Page, terminal, metrics, events and routers show it, and an engine gets traffic only
in the state `SERVING`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class EngineStatus(StrEnum):
    """State of an engine.

    Attributes:
        SERVING: serves the published version and generates: it may get traffic.
        WAITING: connected and in order, and does not serve the published version yet.
        INCOMPLETE: some of its ranks are not connected.
        NOT_RESUMED: did not generate again after an update.
        LEFT_OUT: the last round that included it left it out.
        MIXED_WEIGHTS: its weights may be of two versions.
        QUARANTINED: bytes of a write with an unknown outcome may still arrive in its memory.
        SILENT: a rank has not answered by a deadline.
        GONE: no rank is connected any more.
    """

    SERVING = "serving"
    WAITING = "waiting"
    INCOMPLETE = "incomplete"
    NOT_RESUMED = "not resumed"
    LEFT_OUT = "left out"
    MIXED_WEIGHTS = "mixed weights"
    QUARANTINED = "quarantined"
    SILENT = "silent"
    GONE = "gone"


_COMPLETE = frozenset(EngineStatus) - {EngineStatus.INCOMPLETE, EngineStatus.GONE}
TRANSITIONS: Mapping[EngineStatus, frozenset[EngineStatus]] = {
    EngineStatus.SERVING: _COMPLETE,
    EngineStatus.WAITING: _COMPLETE,
    EngineStatus.NOT_RESUMED: _COMPLETE,
    EngineStatus.LEFT_OUT: _COMPLETE,
    # Only a new process makes an engine complete.
    EngineStatus.INCOMPLETE: frozenset(EngineStatus)
    - {EngineStatus.SERVING, EngineStatus.WAITING, EngineStatus.GONE},
    # Only a round that publishes makes the weights whole again.
    EngineStatus.MIXED_WEIGHTS: _COMPLETE - {EngineStatus.LEFT_OUT},
    # A quarantine lasts as long as the process. The engine may serve, with weights that the write cannot reach.
    EngineStatus.QUARANTINED: frozenset(
        {EngineStatus.QUARANTINED, EngineStatus.SILENT, EngineStatus.SERVING}
    ),
    EngineStatus.SILENT: frozenset(EngineStatus) - {EngineStatus.GONE},
    EngineStatus.GONE: frozenset(EngineStatus),
}
"""State -> possible next states while the engine's processes stay the same. When a process joins or leaves, the engine
may be in any state afterwards."""


class EngineState(msgspec.Struct, frozen=True):
    """An engine with its state.

    Attributes:
        name: name of the engine.
        url: address of its HTTP server.
        version: the version that the engine serves; -1 for none of this run.
        status: its state; only `SERVING` gets traffic.
        reason: cause of the state; empty while nothing is known to be wrong.
    """

    name: str
    url: str
    version: int
    status: EngineStatus
    reason: str

    @property
    def routable(self) -> bool:
        """Whether the engine may get traffic."""
        return self.status is EngineStatus.SERVING
