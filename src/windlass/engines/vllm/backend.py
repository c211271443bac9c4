"""Name of Windlass's weight-transfer backend for vLLM."""

from __future__ import annotations

from typing import Any

BACKEND = "windlass"
"""Value for `--weight-transfer-config`."""


def is_backend_of(config: Any) -> bool:
    """Return whether vLLM's `VllmConfig` selects our weight-transfer backend."""
    transfer = vars(config).get("weight_transfer_config")
    return transfer is not None and bool(transfer.backend == BACKEND)
