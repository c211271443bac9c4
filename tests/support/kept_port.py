"""A port for a server that is killed and restarted at the same address."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]


def free_port() -> int:
    """Return a port outside the range that the system assigns, so that it stays free between kills."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1000):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("no port is free")
