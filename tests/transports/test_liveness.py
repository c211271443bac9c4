"""A liveness listener reports the end of a process, and not a broken connection to it."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from windlass.errors import PeerUnreachable
from windlass.net.clock import Deadline
from windlass.transports import liveness as liveness_module
from windlass.transports.base import PeerEndpoint
from windlass.transports.liveness import INCARNATION_NBYTES, LivenessListener, PeerLiveness

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


def break_connection(listener: LivenessListener, liveness: PeerLiveness) -> None:
    """Reset the connection while both ends live, as a middlebox that drops connections does."""
    until = time.monotonic() + SECONDS
    while not listener._clients:
        assert time.monotonic() < until
        threading.Event().wait(0.001)
    client = listener._clients.pop()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    while liveness._look() is liveness_module._State.OPEN:
        assert time.monotonic() < until
        threading.Event().wait(0.001)


def test_a_reset_connection_does_not_count_as_the_end_of_a_peer(listener: LivenessListener) -> None:
    liveness = enter(listener.port)
    for _ in range(3):
        break_connection(listener, liveness)
        assert not liveness.wait_ended(0.0)
        assert not liveness.has_ended()
    listener.close()
    assert liveness.wait_ended(SECONDS)
    liveness.close()


def test_a_peer_that_ends_after_a_reset_connection_is_detected(
    listener: LivenessListener,
) -> None:
    liveness = enter(listener.port)
    break_connection(listener, liveness)
    listener.close()
    assert liveness.has_ended()
    assert liveness.wait_ended(0.0)
    liveness.close()


def test_another_process_at_the_address_is_not_the_peer(
    listener: LivenessListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    liveness = enter(listener.port)
    break_connection(listener, liveness)
    monkeypatch.setattr(listener, "_incarnation", b"b" * INCARNATION_NBYTES)
    assert liveness.has_ended()
    liveness.close()
    with pytest.raises(PeerUnreachable, match=r"another process than 'a+' has this address"):
        enter(listener.port)


def test_a_peer_that_is_silent_after_a_reset_does_not_count_as_ended(
    listener: LivenessListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_module, "RECONNECT_S", 0.2)
    liveness = enter(listener.port)
    break_connection(listener, liveness)
    with monkeypatch.context() as patch:
        # The listener accepts and sends nothing.
        patch.setattr(listener, "_incarnation", b"")
        for _ in range(3):
            assert not liveness.wait_ended(0.05)
    ended: list[bool] = []

    def watch() -> None:
        while not liveness.wait_ended(SECONDS):
            pass
        ended.append(True)

    watching = threading.Thread(target=watch)
    watching.start()
    watching.join(0.5)
    assert watching.is_alive()
    used = os.times()
    # The thread waits and does not spin.
    watching.join(0.5)
    assert os.times().user - used.user < 0.4
    listener.close()
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
    assert liveness._socket.fileno() == -1


def test_a_watcher_does_not_wait_when_the_liveness_is_closed(
    listener: LivenessListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    liveness, wake = enter(listener.port), os.eventfd(0)
    look = PeerLiveness._look

    def look_and_close(found: PeerLiveness) -> object:
        state = look(found)
        found.close()
        return state

    monkeypatch.setattr(PeerLiveness, "_look", look_and_close)
    before = time.monotonic()
    assert liveness.wait_ended(SECONDS, wake)
    assert time.monotonic() - before < SECONDS / 2
    os.close(wake)
