"""A liveness listener reports the end of a process, and not a broken connection to it."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from open_sockets import connected_sockets, remote_ports

from windlass.errors import PeerUnreachable
from windlass.net.clock import Deadline
from windlass.transports import liveness as liveness_module
from windlass.transports.liveness import INCARNATION_NBYTES, LivenessListener, PeerLiveness
from windlass.transports.peers import PeerEndpoint

NAME = "a" * INCARNATION_NBYTES
SECONDS = 20.0


@pytest.fixture
def listener() -> Iterator[LivenessListener]:
    found = LivenessListener("127.0.0.1", NAME, "nixl")
    yield found
    found.close()


def enter(port: int) -> PeerLiveness:
    return PeerLiveness(
        PeerEndpoint("nixl", f"127.0.0.1:{port}", NAME), Deadline.after(SECONDS, "test")
    )


def break_connection(port: int) -> None:
    """Reset the connection to the listener while both ends live, as a middlebox that drops connections does."""
    no_address = bytes(16)
    for accepted, here, _ in connected_sockets():
        if here == port:
            # Connecting to no address (AF_UNSPEC) makes the kernel reset the connection.
            assert ctypes.CDLL(None).connect(accepted.fileno(), no_address, len(no_address)) == 0
    for connected, _, there in connected_sockets():
        if there == port:
            broken = select.poll()
            broken.register(connected, 0)
            assert broken.poll(SECONDS * 1e3)


@contextmanager
def answering(port: int, answer: bytes) -> Iterator[None]:
    """Answer every connection to the port with `answer`; close the connections at the end of the block."""
    clients: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                clients.append(server.accept()[0])
                clients[-1].sendall(answer)

    with socket.create_server(("127.0.0.1", port)) as server:
        serving = threading.Thread(target=serve)
        serving.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        serving.join(SECONDS)
    for client in clients:
        client.close()


def test_a_reset_connection_does_not_count_as_the_end_of_a_peer(listener: LivenessListener) -> None:
    liveness = enter(listener.port)
    for _ in range(3):
        break_connection(listener.port)
        assert not liveness.wait_ended(0.0)
        assert not liveness.has_ended()
    listener.close()
    assert liveness.wait_ended(SECONDS)
    liveness.close()


def test_a_peer_that_ends_after_a_reset_connection_is_detected(
    listener: LivenessListener,
) -> None:
    liveness = enter(listener.port)
    break_connection(listener.port)
    listener.close()
    assert liveness.has_ended()
    assert liveness.wait_ended(0.0)
    liveness.close()


def test_another_process_at_the_address_is_not_the_peer(listener: LivenessListener) -> None:
    liveness = enter(listener.port)
    break_connection(listener.port)
    listener.close()
    with answering(listener.port, b"b" * INCARNATION_NBYTES):
        assert liveness.has_ended()
        liveness.close()
        with pytest.raises(
            PeerUnreachable, match=r"must have the incarnation 'a+', got another one"
        ):
            enter(listener.port)


def test_a_peer_that_is_silent_after_a_reset_does_not_count_as_ended(
    listener: LivenessListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_module, "RECONNECT_S", 0.2)
    liveness = enter(listener.port)
    break_connection(listener.port)
    listener.close()
    with answering(listener.port, b""):
        for _ in range(3):
            assert not liveness.wait_ended(0.05)
    ended: list[bool] = []

    def watch() -> None:
        while not liveness.wait_ended(SECONDS):
            pass
        ended.append(True)

    watching = threading.Thread(target=watch)
    with answering(listener.port, NAME.encode()):
        watching.start()
        watching.join(0.5)
        assert watching.is_alive()
        used = os.times()
        # The thread waits and does not spin.
        watching.join(0.5)
        assert os.times().user - used.user < 0.4
    watching.join(SECONDS)
    assert ended
    liveness.close()


def test_closing_a_peers_liveness_ends_its_watcher(listener: LivenessListener) -> None:
    liveness = enter(listener.port)
    watching = threading.Thread(target=liveness.wait_ended, args=(SECONDS,))
    watching.start()
    liveness.close()
    watching.join(SECONDS)
    assert not watching.is_alive()
    assert listener.port not in remote_ports()


def test_a_watcher_does_not_wait_when_the_liveness_is_closed(
    listener: LivenessListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    liveness, wake = enter(listener.port), os.eventfd(0)
    new_poll = select.poll

    class ClosingPoll:
        """`select.poll` that closes the liveness before its socket is registered."""

        def __init__(self) -> None:
            self.poll_object = new_poll()
            self.poll = self.poll_object.poll

        def register(self, waited_for: object, events: int) -> None:
            if waited_for != wake:
                liveness.close()
            self.poll_object.register(waited_for, events)  # type: ignore[arg-type]

    monkeypatch.setattr(select, "poll", ClosingPoll)
    before = time.monotonic()
    assert liveness.wait_ended(SECONDS, wake)
    assert time.monotonic() - before < SECONDS / 2
    os.close(wake)
