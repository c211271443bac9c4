from __future__ import annotations

from typing import ClassVar

import numpy as np
from memory_transport import MemoryConfig, MemoryFabric, MemoryTransport

from windlass.errors import PeerUnreachable, RegionError
from windlass.testing.peer_process import digest_of
from windlass.testing.transport_conformance import NBYTES, Peer, Rig, TransportConformance
from windlass.transfer.arena import Arena
from windlass.transports.base import OneSidedTransport
from windlass.transports.peers import RemoteRegion


class LocalPeer:
    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._arena = Arena(transport, NBYTES)
        self._region = self._arena.region
        self._dead = False
        self.fill(0xEE)

    @property
    def region(self) -> RemoteRegion:
        return self._region.remote

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._arena.bytes[offset : offset + nbytes].tobytes()

    def digest(self) -> str:
        return digest_of(self._arena.bytes.data)

    def fill(self, value: int) -> None:
        self._arena.bytes[:] = value

    def unregister(self) -> None:
        self._transport.unregister(self._region)

    def register(self) -> None:
        self._region = self._transport.register(self._arena.address, self._arena.nbytes)

    def fence(self) -> None:
        self._transport.fence(deadline_s=1.0)

    def kill(self) -> None:
        self._transport.close()

    def close(self) -> None:
        self.kill()


class TestMemory(TransportConformance):
    config: ClassVar[MemoryConfig] = MemoryConfig()

    def start_peer(self, transport: OneSidedTransport) -> Peer:
        return LocalPeer(MemoryTransport())

    def test_a_write_into_withdrawn_memory_is_refused_by_the_target(self, rig: Rig) -> None:
        rig.peer.unregister()
        rig.refused(rig.batch([0], [0], [16]), RegionError)
        rig.peer.register()
        rig.check_untouched("unregistered memory")

    def test_endpoints_of_two_fabrics_do_not_reach_each_other(self, rig: Rig) -> None:
        stranger = LocalPeer(MemoryTransport(MemoryFabric()))
        there = Rig(rig.transport, rig.arena, stranger)
        there.refused(there.batch([0], [0], [16]), PeerUnreachable)
        stranger.close()

    def test_a_successor_under_the_same_name_is_another_peer(self, rig: Rig) -> None:
        fabric = MemoryFabric()
        transport = MemoryTransport(fabric)
        arena = Arena(transport, NBYTES)
        arena.bytes[:] = np.arange(NBYTES, dtype=np.uint32).astype(np.uint8)
        first = LocalPeer(MemoryTransport(fabric, "engine-0"))
        before = Rig(transport, arena, first)
        batch = before.batch([0], [0], [16])
        first.kill()
        second = LocalPeer(MemoryTransport(fabric, "engine-0"))
        before.refused(batch, PeerUnreachable)
        after = Rig(transport, arena, second)
        after.check_untouched("the successor")
        after.write(after.batch([0], [0], [16]))
        second.close()
        transport.close()
