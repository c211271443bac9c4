"""Stand-in for the part of AReaL's Archon engine that runs on GPUs only."""

from __future__ import annotations

from typing import Any


def archon_actor() -> type[Any]:
    """Return the class that `PPOTrainer` would use for `archon`, and let it run on a CPU."""
    from areal.experimental.engine import archon_engine

    # Micro-batches are padded to whole pages of a GPU, beyond the positions of the models of tests.
    vars(archon_engine)["DEFAULT_PAGE_SIZE_BYTES"] = 1
    found: type[Any] = archon_engine.ArchonPPOActor
    return found
