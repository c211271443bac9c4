"""States of an engine, and the transitions between them. No I/O.

Every engine has one state, which only `fleet.Group.move` changes. The operations page, the terminal and the metrics
show it. Routers send requests only to engines in the state `SERVING`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class EngineStatus(StrEnum):
    """State of an engine.

    Attributes:
        SERVING: serves the published version and generates, so it may get traffic.
        WAITING: all ranks are connected and no fault is known, but the engine does not have the published version yet.
        INCOMPLETE: some of its ranks are not connected.
        NOT_RESUMED: has the published version, but did not resume after an update.
        LEFT_OUT: its last round left the engine out, for the reason in `EngineState.reason`.
        MIXED_WEIGHTS: its live weights may be of two versions; it stays paused.
        QUARANTINED: bytes of a write with an unknown outcome may still arrive in its memory, so no round writes to it.
        SILENT: a rank did not answer a command by the deadline.
        GONE: no rank is connected.
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


class HoldCause(StrEnum):
    """Reason why an engine stays paused after a round, or after the connection to the controller was lost.

    Attributes:
        MIXED: its live weights may be of two versions.
        EMPTY: its weights sleep or are lost.
        NO_VERSION: a round paused the engine, but published nothing. The engine has no version yet, and must not serve
            its initial weights.
        NOT_RESUMED: its weights are of one version, but the engine did not resume.
    """

    MIXED = "mixed"
    EMPTY = "empty"
    NO_VERSION = "no version"
    NOT_RESUMED = "not resumed"


_ALL = frozenset(EngineStatus)
TRANSITIONS: Mapping[EngineStatus, frozenset[EngineStatus]] = {
    EngineStatus.SERVING: _ALL,
    EngineStatus.WAITING: _ALL,
    EngineStatus.NOT_RESUMED: _ALL,
    # Rounds include only complete engines, so no round leaves out an incomplete engine.
    EngineStatus.INCOMPLETE: _ALL - {EngineStatus.LEFT_OUT},
    # An engine that was left out or silent keeps its reason while a rank is disconnected.
    EngineStatus.LEFT_OUT: _ALL - {EngineStatus.INCOMPLETE},
    EngineStatus.SILENT: _ALL - {EngineStatus.INCOMPLETE, EngineStatus.WAITING},
    # Only a round that publishes in the engine gives it weights of one version again.
    EngineStatus.MIXED_WEIGHTS: _ALL - {EngineStatus.LEFT_OUT, EngineStatus.INCOMPLETE},
    # A quarantine ends when a new process replaces the rank. The other ranks may then hold another version than the
    # new process, so the next state is MIXED_WEIGHTS. A quarantined engine may serve if the late write cannot reach its
    # live weights.
    EngineStatus.QUARANTINED: _ALL
    - {EngineStatus.LEFT_OUT, EngineStatus.INCOMPLETE, EngineStatus.WAITING},
    EngineStatus.GONE: _ALL - {EngineStatus.LEFT_OUT, EngineStatus.SILENT},
}
"""State -> allowed next states."""


class EngineState(msgspec.Struct, frozen=True):
    """State of one engine, for pages, metrics and routers.

    Attributes:
        name: name of the engine.
        url: address of its HTTP server.
        version: version of this run that the engine has (`Group.version`); -1 for none.
        status: its state.
        reason: cause of the state; empty if no fault is known.
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
