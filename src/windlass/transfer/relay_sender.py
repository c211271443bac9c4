"""The writer's end of a relay: chunks written, and a connection that says so; see `relay_wire`."""

from __future__ import annotations

import socket
import threading
from typing import final

import numpy as np

from windlass.errors import PeerUnreachable
from windlass.memory.ops import UInt64Array
from windlass.net.clock import Deadline
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.payload import Payload
from windlass.transfer.relay_wire import (
    ACCEPTED,
    End,
    Frame,
    Open,
    Place,
    RelayAddress,
    encode_frame,
)
from windlass.transports.base import OneSidedTransport, WriteBatch

__all__ = ["WRITES_AT_ONCE", "RelaySender", "write_chunk"]

WRITES_AT_ONCE = 4
"""Chunks on their way to one engine: the next one is written while the last is acknowledged."""


@final
class RelaySender:
    """The writer's end of one connection.

    Raises:
        PeerUnreachable: nobody listens there, or it does not take part in this round.
    """

    def __init__(
        self, address: RelayAddress, upstream: str, place: Place, deadline: Deadline
    ) -> None:
        self._peer = address.worker
        self._lock = threading.Lock()
        self._deadline = deadline
        try:
            self._socket = socket.create_connection(
                (address.host, address.port), timeout=self._left_s()
            )
        except OSError as error:
            raise PeerUnreachable(f"relay: {self._peer} does not listen: {error}") from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.send(Open(address.token, upstream, *place))
            answer = self._socket.recv(1)
        except OSError as error:
            self.close()
            raise PeerUnreachable(f"relay: {self._peer} did not answer: {error}") from error
        except PeerUnreachable:
            self.close()
            raise
        if answer != ACCEPTED:
            self.close()
            raise PeerUnreachable(f"relay: {self._peer} takes no part in round {place}")

    def send(self, frame: Frame) -> None:
        """Send one frame. Thread-safe.

        Raises:
            PeerUnreachable: the connection is gone or the deadline has passed.
        """
        try:
            with self._lock:
                self._socket.settimeout(self._left_s())
                self._socket.sendall(encode_frame(frame))
        except OSError as error:
            raise PeerUnreachable(f"relay: {self._peer} is gone: {error}") from error

    def end(self, *, unknown: bool) -> None:
        """Say that nothing more will be written, and close."""
        try:
            self.send(End(unknown))
        except PeerUnreachable:
            pass  # the end of the connection says the same, but for `unknown`, which is reported
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _left_s(self) -> float:
        return max(self._deadline.remaining_s, 0.01)


def write_chunk(
    transport: OneSidedTransport,
    binding: DestinationBinding,
    payload: Payload,
    chunk: int,
    local: UInt64Array,
    remote: UInt64Array,
    deadline: Deadline,
) -> None:
    """Write one chunk; returns once it is visible to the peer.

    Raises:
        TransferError: see `OneSidedTransport.write`.
    """
    deadline.check_before_more()
    pieces = payload.pieces_of(chunk)
    transport.write(
        WriteBatch(
            endpoint=binding.endpoint,
            local_addresses=local[pieces],
            remote_addresses=remote[pieces],
            nbytes=payload.nbytes[pieces].astype(np.uint64),
            regions=binding.regions,
        ),
        deadline_s=max(deadline.remaining_s, 0.001),
    )
