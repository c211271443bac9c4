"""NIXL's own agent on GPU memory, in its usual way: descriptors are prepared once, then used repeatedly."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np


class NixlAgent:
    """Agent of one process, with UCX.

    Raises:
        ImportError, OSError, RuntimeError: NIXL is not installed or does not start.
    """

    def __init__(self, ordinal: int) -> None:
        os.environ.setdefault("UCX_MODULES", "^ib")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        api: Any = import_module("nixl_cu13._api")
        self.ordinal = ordinal
        self.agent = api.nixl_agent(f"gpu{ordinal}", api.nixl_agent_config(backends=["UCX"]))
        self.peer = ""
        self.peer_ordinal = 0

    def register(self, address: int, nbytes: int) -> bytes:
        """Register memory of this GPU and return metadata for the peer."""
        self.agent.register_memory([(address, nbytes, self.ordinal, "")], "VRAM", ["UCX"])
        metadata: bytes = self.agent.get_agent_metadata()
        return metadata

    def join(self, metadata: bytes, ordinal: int) -> None:
        """Add the peer, with memory of GPU `ordinal`."""
        name = self.agent.add_remote_agent(metadata)
        self.peer = name.decode() if isinstance(name, bytes) else name
        self.peer_ordinal = ordinal

    def put(self, sources: Any, targets: Any, nbytes: int) -> Callable[[], None]:
        """Return a prepared transfer of pieces of equal size from this process to the peer."""
        sizes = np.full(len(sources), nbytes, np.uint64)

        def descriptors(addresses: Any, ordinal: int) -> Any:
            device = np.full(len(addresses), ordinal, np.uint64)
            table = np.stack([np.asarray(addresses, np.uint64), sizes, device], axis=1)
            return self.agent.get_xfer_descs(table, "VRAM")

        handle = self.agent.initialize_xfer(
            "WRITE",
            descriptors(sources, self.ordinal),
            descriptors(targets, self.peer_ordinal),
            self.peer,
        )

        def call() -> None:
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            assert state == "DONE", state

        return call
