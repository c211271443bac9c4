"""States of an engine, and the transitions between them. No I/O.

An engine of the fleet has one state, which `fleet.Group.move` changes. Page, terminal, metrics, events and routers show
it, and an engine gets traffic only in the state `SERVING`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class EngineStatus(StrEnum):
    """State of an engine.

    Attributes:
        SERVING: serves the published version and generates, so it may get traffic.
        WAITING: is connected without a known fault, and does not have the published version yet.
        INCOMPLETE: some of its ranks are not connected.
        NOT_RESUMED: has the published version, but did not resume after an update.
        LEFT_OUT: the last round that included the engine left it out.
        MIXED_WEIGHTS: its weights may be of two versions.
        QUARANTINED: bytes of a write with an unknown outcome may still arrive in its memory, so no round writes it.
        SILENT: a rank did not answer a command by its deadline.
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


_ALL = frozenset(EngineStatus)
TRANSITIONS: Mapping[EngineStatus, frozenset[EngineStatus]] = {
    EngineStatus.SERVING: _ALL,
    EngineStatus.WAITING: _ALL,
    EngineStatus.NOT_RESUMED: _ALL,
    # Rounds include only complete engines, so no round leaves out an incomplete engine.
    EngineStatus.INCOMPLETE: _ALL - {EngineStatus.LEFT_OUT},
    # The reason stays until the engine serves, also while a rank is away.
    EngineStatus.LEFT_OUT: _ALL - {EngineStatus.INCOMPLETE},
    EngineStatus.SILENT: _ALL - {EngineStatus.INCOMPLETE, EngineStatus.WAITING},
    # Only a round that publishes makes the weights whole again.
    EngineStatus.MIXED_WEIGHTS: _ALL - {EngineStatus.LEFT_OUT, EngineStatus.INCOMPLETE},
    # A quarantine ends when a new process replaces the rank; the other ranks may then hold other bytes than the new
    # one. A quarantined engine may still serve, if the late write cannot reach its live weights.
    EngineStatus.QUARANTINED: _ALL
    - {EngineStatus.LEFT_OUT, EngineStatus.INCOMPLETE, EngineStatus.WAITING},
    EngineStatus.GONE: _ALL - {EngineStatus.LEFT_OUT, EngineStatus.SILENT},
}
"""State -> possible next states."""


class EngineState(msgspec.Struct, frozen=True):
    """State of one engine, as pages, metrics and routers get it.

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
