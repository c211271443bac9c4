"""Tests which connections a NIXL fence cuts, on sockets marked as UCX marks its own."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from windlass.errors import TransferFailed
from windlass.net.clock import Deadline
from windlass.transports.inbound import new_mark
from windlass.transports.nixl.native import TcpFence

SECONDS = 20.0
PEER = (
    "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
)


def test_a_fence_cuts_a_peer_of_an_agent_that_started_later() -> None:
    mark = new_mark()
    with ExitStack() as held:

        def listen() -> socket.socket:
            listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, mark)
            return listener

        def accept(listener: socket.socket) -> socket.socket:
            listener.settimeout(SECONDS)
            accepted = held.enter_context(listener.accept()[0])
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, mark)
            return accepted

        fence = TcpFence(mark)
        held.callback(fence.close)
        ours, of_another = listen(), listen()
        dialled = held.enter_context(socket.create_connection(ours.getsockname()))
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, mark)
        own = accept(ours)
        peer = held.enter_context(
            subprocess.Popen([sys.executable, "-c", PEER, str(of_another.getsockname()[1])])
        )
        held.callback(peer.kill)
        written = accept(of_another)
        fence.spare_own_connections()

        # No UCX reads here, so a cut connection stays until the deadline.
        with pytest.raises(TransferFailed, match="but 1 of 1 are open"):
            fence.cut(Deadline.after(0.1, "test"))
        assert written.recv(1) == b""
        dialled.send(b"1")
        assert own.recv(1) == b"1"
