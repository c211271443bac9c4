from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from windlass.errors import RegionError, TransportUnavailable
from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import NBYTES, ProcessConformance, Rig
from windlass.transfer.arena import Arena
from windlass.transports.base import RemoteRegion, WriteBatch
from windlass.transports.shm import ShmConfig, ShmTransport


def segments_of(pid: int) -> list[str]:
    pattern = re.compile(rf"windlass-\d+-{pid}-\d+-[0-9a-f]+")
    return [name for name in os.listdir("/dev/shm") if pattern.fullmatch(name)]


def one_piece(
    source: Arena, start: int, region: RemoteRegion, offset: int, nbytes: int
) -> WriteBatch:
    return WriteBatch(
        endpoint=region.endpoint,
        local_addresses=np.array([source.address + start], np.uint64),
        remote_addresses=np.array([region.address + offset], np.uint64),
        nbytes=np.array([nbytes], np.uint64),
        regions=(region,),
    )


class TestShm(ProcessConformance):
    config: ClassVar[ShmConfig] = ShmConfig()

    def test_memory_that_the_transport_did_not_allocate_is_a_source_and_no_target(
        self, rig: Rig
    ) -> None:
        keyless = msgspec.structs.replace(rig.peer.region, key="")
        message = rig.refused(rig.batch([0], [0], [16], regions=(keyless,)), RegionError)
        assert "not allocated" in message

    @pytest.mark.parametrize(
        "key", ["x", "../../etc/passwd:0", "windlass-1-1-1-0123456789abcdef:0", ":", "a:b"]
    )
    def test_a_forged_key_opens_nothing(self, rig: Rig, key: str) -> None:
        forged = msgspec.structs.replace(rig.peer.region, key=key)
        rig.refused(rig.batch([0], [0], [16], regions=(forged,)), RegionError)

    def test_a_region_larger_than_its_segment_is_refused(self, rig: Rig) -> None:
        wide = msgspec.structs.replace(rig.peer.region, nbytes=NBYTES + 4096)
        rig.refused(rig.batch([0], [NBYTES - 8], [16], regions=(wide,)), RegionError)

    def test_released_memory_is_refused_even_when_it_is_still_mapped_here(self) -> None:
        sender, receiver = ShmTransport(), ShmTransport()
        source, target = Arena(sender, 4096), Arena(receiver, 4096)
        batch = one_piece(source, 0, target.region.remote, 0, 16)
        sender.write(batch, deadline_s=5.0)
        target.close()
        with pytest.raises(RegionError, match="released"):
            sender.write(batch, deadline_s=5.0)
        source.close()
        sender.close()
        receiver.close()

    def test_segments_are_private_zeroed_and_gone_after_close(self) -> None:
        transport = ShmTransport()
        before = len(segments_of(os.getpid()))
        with Arena(transport, 10_000) as arena:
            assert not arena.bytes.any()
            (name,) = {n.partition(":")[0] for n in [arena.region.remote.key]}
            assert (Path("/dev/shm") / name).stat().st_mode & 0o777 == 0o600
            assert len(segments_of(os.getpid())) == before + 1
            with pytest.raises(RegionError, match="unregistered first"):
                transport.release(arena.address)
        assert len(segments_of(os.getpid())) == before
        transport.allocate(4096)
        transport.close()
        assert len(segments_of(os.getpid())) == before

    def test_segments_of_a_killed_owner_are_removed_by_the_next_transport(self) -> None:
        with PeerProcess(ShmConfig(), 4096) as peer:
            assert len(segments_of(peer.pid)) == 1
            peer.kill()
            assert len(segments_of(peer.pid)) == 1
            ShmTransport().close()
            assert segments_of(peer.pid) == []

    def test_a_process_that_ends_by_itself_leaves_no_segment(self) -> None:
        with PeerProcess(ShmConfig(), 4096) as peer:
            assert len(segments_of(peer.pid)) == 1
            peer.close()
            assert segments_of(peer.pid) == []

    def test_more_than_there_is_room_for_is_an_error_and_no_bus_error(self) -> None:
        before = segments_of(os.getpid())
        transport = ShmTransport()
        room = os.statvfs("/dev/shm")
        with pytest.raises(TransportUnavailable, match="shm-size"):
            transport.allocate(room.f_blocks * room.f_frsize * 2)
        transport.close()
        assert segments_of(os.getpid()) == before

    def test_a_part_of_an_allocation_can_be_registered_by_itself(self) -> None:
        sender, receiver = ShmTransport(), ShmTransport()
        source = Arena(sender, 8192)
        source.bytes[:] = np.arange(8192) % 251
        address = receiver.allocate(8192)
        region = receiver.register(address + 4096, 4096)
        there = np.ctypeslib.as_array((ctypes.c_uint8 * 8192).from_address(address))
        sender.write(one_piece(source, 10, region.remote, 100, 500), deadline_s=5.0)
        assert there[4196:4696].tobytes() == source.bytes[10:510].tobytes()
        assert not there[:4196].any()
        assert not there[4696:].any()
        receiver.unregister(region)
        source.close()
        sender.close()
        receiver.close()
