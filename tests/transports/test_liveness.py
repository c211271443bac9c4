"""A door tells that a process has ended, and a broken connection to it does not."""

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
from windlass.transports import liveness as door_module
from windlass.transports.base import PeerEndpoint
from windlass.transports.liveness import INCARNATION_NBYTES, Door, Doorway

NAME = "a" * INCARNATION_NBYTES
SECONDS = 20.0


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door("127.0.0.1", NAME, "nixl")
    yield found
    found.close()


def enter(port: int) -> Doorway:
    return Doorway(PeerEndpoint("nixl", f"127.0.0.1:{port}", NAME), Deadline.after(SECONDS, "test"))


def break_connection(door: Door, doorway: Doorway) -> None:
    """As a box on the way does that forgets connections: reset, though both ends live."""
    until = time.monotonic() + SECONDS
    while not door._visitors:
        assert time.monotonic() < until
        threading.Event().wait(0.001)
    visitor = door._visitors.pop()
    visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    visitor.close()
    while doorway._look() is door_module._Line.WHOLE:
        assert time.monotonic() < until
        threading.Event().wait(0.001)


def test_a_peer_whose_connection_was_reset_has_not_ended(door: Door) -> None:
    doorway = enter(door.port)
    for _ in range(3):
        break_connection(door, doorway)
        assert not doorway.wait_ended(0.0)
        assert not doorway.has_ended()
    door.close()
    assert doorway.wait_ended(SECONDS)
    doorway.close()


def test_a_peer_that_ended_after_its_connection_was_reset_is_found_out(door: Door) -> None:
    doorway = enter(door.port)
    break_connection(door, doorway)
    door.close()
    assert doorway.has_ended()
    assert doorway.wait_ended(0.0)
    doorway.close()


def test_another_process_behind_the_door_is_not_the_peer(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    doorway = enter(door.port)
    break_connection(door, doorway)
    monkeypatch.setattr(door, "_incarnation", b"b" * INCARNATION_NBYTES)
    assert doorway.has_ended()
    doorway.close()
    with pytest.raises(PeerUnreachable, match=r"another process than 'a+' is there"):
        enter(door.port)


def test_silence_behind_a_connection_that_was_reset_is_no_end(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "KNOCK_S", 0.2)
    doorway = enter(door.port)
    break_connection(door, doorway)
    with monkeypatch.context() as patch:
        patch.setattr(door, "_incarnation", b"")  # lets in, and says nothing
        for _ in range(3):
            assert not doorway.wait_ended(0.05)
    ended: list[bool] = []

    def watch() -> None:
        doorway.watch()
        ended.append(True)

    watching = threading.Thread(target=watch)
    watching.start()
    watching.join(0.5)
    assert watching.is_alive()
    used = os.times()
    watching.join(0.5)  # waits, and does not spin
    assert os.times().user - used.user < 0.4
    door.close()
    watching.join(SECONDS)
    assert ended
    doorway.close()


def test_closing_a_doorway_ends_whoever_watches_it(door: Door) -> None:
    doorway = enter(door.port)
    watching = threading.Thread(target=doorway.watch)
    watching.start()
    doorway.close()
    watching.join(SECONDS)
    assert not watching.is_alive()
    assert doorway._socket.fileno() == -1
