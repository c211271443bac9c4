"""Memory that a process without Windlass has registered with its own Mooncake engine.

A second process, with Windlass, publishes this memory to peers in the owner's place. While the liveness listener of the
second process is open, peers may write the memory. The second process cannot unregister the memory, and cannot close the
owner's connections.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import final

from windlass.errors import RegionError
from windlass.net.addresses import join_host_port
from windlass.transports.liveness import INCARNATION_NBYTES, LivenessListener
from windlass.transports.mooncake.transport import TOKEN_NBYTES, MooncakeConfig, MooncakeTransport
from windlass.transports.peers import PeerEndpoint, RemoteRegion

SETTLE_S = 2.0
"""Seconds that `fence` waits over TCP. A thread of the owner's engine stores received bytes at once, so these bytes are in
memory after the wait. Bytes that the network delays longer can still arrive."""


@final
class MooncakeWindow(MooncakeTransport):
    """Transport of the second process. Peers get the owner's endpoint from it, and write the owner's memory.

    The second process registers local memory only to read the owner's memory into it (`read`).

    Args:
        config: configuration of the local engine, with a host (`MooncakeConfig.placed`).
        session: `host:port` of the owner's engine.
        spans: (address, nbytes) of the memory that the owner has registered.

    Attributes:
        owner: endpoint of the owner's engine, with the liveness listener of this process.
        remote: regions of the owner's memory, for the peers that write them.

    Raises:
        RegionError: no span has at least `TOKEN_NBYTES` bytes, which peers read before they write.
        TransportUnavailable: see `MooncakeTransport`.
    """

    def __init__(
        self, config: MooncakeConfig, session: str, spans: Sequence[tuple[int, int]]
    ) -> None:
        probe, nbytes = max(spans, key=lambda span: span[1], default=(0, 0))
        if nbytes < TOKEN_NBYTES:
            raise RegionError(
                f"mooncake: the largest region of {session} must have at least {TOKEN_NBYTES} bytes, got {nbytes}"
            )
        super().__init__(config)
        token = secrets.token_hex(TOKEN_NBYTES)
        self._watched = LivenessListener(config.host, token[:INCARNATION_NBYTES], "mooncake")
        listener = join_host_port(config.host, self._watched.port)
        self.owner = PeerEndpoint("mooncake", session, f"{token}@{probe:x}:{listener}")
        self.remote = tuple(RemoteRegion(self.owner, *span) for span in spans)

    def endpoint(self) -> PeerEndpoint:
        """Return the endpoint of the owner's engine, with the liveness listener of this process."""
        return self.owner

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`. Over TCP, wait `SETTLE_S`. Over RDMA, return: writes end with the writing process."""
        if self.report().protocol != "rdma":
            threading.Event().wait(min(SETTLE_S, deadline_s))

    def close(self) -> None:
        """Close the liveness listener of this process, then the transport."""
        self._watched.close()
        super().close()
