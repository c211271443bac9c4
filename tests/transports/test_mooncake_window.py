"""A process writes and reads memory of another process through a window, until the window is closed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from windlass.errors import PeerUnreachable, RegionError, TransferError, TransportUnavailable
from windlass.testing.peer_process import PeerProcess
from windlass.transfer.arena import Arena
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.mooncake.native import MooncakeProtocol
from windlass.transports.mooncake.transport import MooncakeConfig
from windlass.transports.mooncake.window import MooncakeWindow
from windlass.transports.registry import create_transport

NBYTES = 1 << 16
GUARD = 0xEE
DEADLINE_S = 5.0
TCP = MooncakeConfig(host="127.0.0.1", protocol=MooncakeProtocol.TCP)

try:
    create_transport(TCP).close()
except TransportUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture
def owner() -> Iterator[PeerProcess]:
    with PeerProcess(TCP, NBYTES) as peer:
        yield peer


@pytest.fixture
def window(owner: PeerProcess) -> Iterator[MooncakeWindow]:
    window = MooncakeWindow(TCP, owner.region.endpoint.address, [(owner.region.address, NBYTES)])
    yield window
    window.close()


@pytest.fixture
def writer() -> Iterator[OneSidedTransport]:
    transport = create_transport(TCP)
    yield transport
    transport.close()


def batch(window: MooncakeWindow, arena: Arena, nbytes: int = NBYTES) -> WriteBatch:
    """Return a batch between the beginnings of an arena and of the owner's memory."""
    (region,) = window.remote
    return WriteBatch(
        endpoint=window.endpoint(),
        local_addresses=np.array([arena.address], np.uint64),
        remote_addresses=np.array([region.address], np.uint64),
        nbytes=np.array([nbytes], np.uint64),
        regions=window.remote,
    )


def test_what_a_peer_writes_is_read_back(window: MooncakeWindow, writer: OneSidedTransport) -> None:
    written, copies = Arena(writer, NBYTES), Arena(window, NBYTES)
    window.read(batch(window, copies), deadline_s=DEADLINE_S)
    assert (copies.bytes == GUARD).all()
    written.bytes[:] = np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)
    writer.write(batch(window, written, NBYTES - 8), deadline_s=DEADLINE_S)
    window.read(batch(window, copies), deadline_s=DEADLINE_S)
    assert (copies.bytes[:-8] == written.bytes[:-8]).all()
    assert (copies.bytes[-8:] == GUARD).all()


def test_a_peer_writes_nothing_after_the_window_has_closed(
    window: MooncakeWindow, writer: OneSidedTransport, owner: PeerProcess
) -> None:
    arena = Arena(writer, NBYTES)
    writer.write(batch(window, arena), deadline_s=DEADLINE_S)
    before, again = owner.digest(), batch(window, arena)
    window.close()
    arena.bytes[:] = 7
    with pytest.raises(PeerUnreachable, match="has ended"):
        writer.write(again, deadline_s=DEADLINE_S)
    assert owner.digest() == before


def test_memory_of_a_killed_owner_cannot_be_read(
    window: MooncakeWindow, owner: PeerProcess
) -> None:
    copies = Arena(window, NBYTES)
    window.read(batch(window, copies), deadline_s=DEADLINE_S)
    os.kill(owner.pid, signal.SIGKILL)
    with pytest.raises(TransferError):
        window.read(batch(window, copies), deadline_s=DEADLINE_S)


def test_an_owner_without_memory_to_probe_is_refused() -> None:
    with pytest.raises(RegionError, match="must have at least 16 bytes, got 8"):
        MooncakeWindow(TCP, "127.0.0.1:1", [(4096, 8)])
