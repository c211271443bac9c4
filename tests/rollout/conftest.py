"""Fixtures of the tests of the endpoint for agents: a checkpoint, and an engine that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_checkpoint import write_agent_checkpoint
from chat_fleet import serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the agent's checkpoint. A module may override this fixture to serve another checkpoint."""
    return write_agent_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[str]:
    """Serve the checkpoint by an embedded engine, and yield the engine's URL."""
    with serving(folder) as (url, _):
        yield url
