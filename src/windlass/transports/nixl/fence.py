"""Ends what NIXL agents of this process receive over TCP, but leaves each agent its own connection.

An agent connects to itself when it starts, and once only: every registration goes through that
connection (NIXL loads the key of what it registers as a peer would). An agent that had lost it
could register nothing any more, and would say no more than NIXL_ERR_BACKEND (1.5.1, 2026-11-22).
"""

from __future__ import annotations

import threading
from typing import final

from windlass.net.clock import Deadline
from windlass.transports.inbound import Connection, connections_to, cut_marked, listening_ports

_LOCK = threading.Lock()
_OF_AGENTS_WITH_THEMSELVES: dict[TcpFence, frozenset[Connection]] = {}


@final
class TcpFence:
    """Of one agent. To be made before the agent starts.

    Args:
        mark: of the agents' sockets (`new_mark`), the same for all of this process.
    """

    def __init__(self, mark: int) -> None:
        self._mark = mark
        self._listened = listening_ports()

    def spare_own_connections(self) -> None:
        """Once the agent has registered memory, and before a peer is told where it listens.

        Both ends of such a connection are of this process. One that a peer has begun is not spared:
        another agent of this process may have started meanwhile, and have been found already.
        """
        found = connections_to(listening_ports() - self._listened)
        with _LOCK:
            _OF_AGENTS_WITH_THEMSELVES[self] = found | {(peer, own) for own, peer in found}

    def cut(self, deadline: Deadline) -> int:
        """End every other connection of this process's agents; returns how many.

        Raises:
            TransferFailed: UCX still reads one after `deadline`.
        """
        with _LOCK:
            spared = frozenset[Connection]().union(*_OF_AGENTS_WITH_THEMSELVES.values())
        return cut_marked(self._mark, deadline, spared)

    def close(self) -> None:
        """The agent has ended. Idempotent."""
        with _LOCK:
            _OF_AGENTS_WITH_THEMSELVES.pop(self, None)
