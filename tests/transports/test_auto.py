"""The transports that `auto` starts, uses for registration and writes, and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
from memory_transport import MemoryFabric, MemoryTransport
from needs import need_transport

from windlass.errors import RegionError, TransportUnavailable
from windlass.testing.transport_conformance import ProcessConformance
from windlass.transfer.arena import Arena
from windlass.transports import auto
from windlass.transports.auto import AutoConfig, TransportSet
from windlass.transports.base import MemoryRegion, OneSidedTransport, WriteBatch
from windlass.transports.cma import CmaConfig, CmaTransport
from windlass.transports.registry import create_transport, parse_transport
from windlass.transports.shm import ShmTransport


class TestAuto(ProcessConformance):
    """A set of two transports passes the suite as each alone does. A set of one is that transport."""

    config: ClassVar[AutoConfig] = AutoConfig(offers=("cma", "shm"))


def batch_to(region: MemoryRegion, transport: str, source: MemoryRegion) -> WriteBatch:
    (remote,) = (r for r in region.remotes if r.endpoint.transport == transport)
    one = np.array([source.nbytes], np.uint64)
    return WriteBatch(
        endpoint=remote.endpoint,
        local_addresses=np.array([source.address], np.uint64),
        remote_addresses=np.array([remote.address], np.uint64),
        nbytes=one,
        regions=(remote,),
    )


def test_auto_within_a_host_offers_only_cma() -> None:
    transport = create_transport(parse_transport("auto"), towards="http://127.0.0.1:8000")
    assert [offer.transport for offer in transport.offers()] == ["cma"]
    assert transport.allocator is None, "any memory can be written"
    transport.close()


def test_auto_offers_shared_memory_where_the_kernel_refuses_cma(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> OneSidedTransport:
        raise TransportUnavailable("cma: refused by a test")

    monkeypatch.setattr(CmaConfig, "create", refuse)
    transport = create_transport(parse_transport("auto"), towards="http://127.0.0.1:8000")
    assert [offer.transport for offer in transport.offers()] == ["shm"]
    transport.close()


def test_a_rank_with_remote_peers_offers_local_and_network_transports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_transport("mooncake")
    monkeypatch.setattr(auto, "is_loopback", lambda _: False)
    transport = create_transport(parse_transport("auto"), towards="http://127.0.0.1:8000")
    offers = transport.offers()
    assert {"cma", "mooncake"} <= {offer.transport for offer in offers}
    speeds = [offer.traits.ceiling_bytes_per_s for offer in offers]
    assert speeds == sorted(speeds, reverse=True)
    transport.close()


def test_a_requested_transport_must_start_and_leaves_nothing_open_on_failure() -> None:
    with pytest.raises(TransportUnavailable):
        create_transport(AutoConfig(offers=("cma", '{"type": "shm"}', "cuda_ipc")))


def test_a_write_uses_the_transport_of_its_endpoint() -> None:
    fabric = MemoryFabric()
    here, there = (TransportSet([MemoryTransport(fabric), CmaTransport()]) for _ in range(2))
    with Arena(here, 4096) as source, Arena(there, 4096) as target:
        for number, name in enumerate(("memory", "cma"), 1):
            source.bytes[:] = number
            here.write(batch_to(target.region, name, source.region), deadline_s=5.0)
            assert (target.bytes == number).all(), name
        foreign = ShmTransport()
        with Arena(foreign, 4096) as other, pytest.raises(RegionError, match="must be one of"):
            here.write(batch_to(other.region, "shm", source.region), deadline_s=5.0)
        foreign.close()
    here.close()
    there.close()


class Late(MemoryTransport):
    """Transport that releases memory when the test says so."""

    def __init__(self) -> None:
        super().__init__(MemoryFabric())
        self.pending: list[Callable[[], None]] = []

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        super().unregister(region)
        if released is not None:
            self.pending.append(released)


def test_memory_is_released_after_its_last_transport_releases_it() -> None:
    late, freed = Late(), list[str]()
    both = TransportSet([late, CmaTransport()])
    memory = np.zeros(4096, np.uint8)
    region = both.register(int(memory.ctypes.data), memory.nbytes)
    both.unregister(region, lambda: freed.append("memory"))
    assert not freed
    late.pending.pop()()
    assert freed == ["memory"]
    with pytest.raises(RegionError, match="not registered"):
        both.unregister(region)
    both.close()


def test_ranges_that_one_transport_refuses_are_offered_by_the_other_transport(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = MemoryTransport(MemoryFabric())
    both = TransportSet([other, CmaTransport()])
    memory = np.zeros(4096, np.uint8)
    spans = [(int(memory.ctypes.data) + at, 64) for at in (0, 1024, 2048)]
    taken = other.register(spans[1][0] + 60, 8)
    regions = both.register_all(spans)
    offered = [{remote.endpoint.transport for remote in region.remotes} for region in regions]
    assert offered == [{"memory", "cma"}, {"cma"}, {"memory", "cma"}]
    assert caplog.text.count("memory does not register 64 bytes") == 1
    for region in regions:
        both.unregister(region)
    other.unregister(taken)
    for region in both.register_all(spans):
        assert len(region.remotes) == 2
        both.unregister(region)
    both.close()


def test_a_range_refused_by_every_transport_is_an_error_and_leaves_no_region() -> None:
    members = MemoryTransport(MemoryFabric()), CmaTransport()
    both = TransportSet(members)
    memory = np.zeros(4096, np.uint8)
    spans = [(int(memory.ctypes.data) + at, 64) for at in (0, 1024)]
    taken = [member.register(*spans[1]) for member in members]
    with pytest.raises(RegionError, match=rf"{spans[1][0]:#x}.*overlaps registered"):
        both.register_all(spans)
    for member, region in zip(members, taken, strict=True):
        member.unregister(region)
        member.unregister(member.register(*spans[0]))
    both.close()


def test_memory_that_peers_cannot_map_is_offered_only_by_other_transports() -> None:
    both = TransportSet([ShmTransport(), CmaTransport()])
    memory = np.zeros(4096, np.uint8)
    region = both.register(int(memory.ctypes.data), memory.nbytes)
    assert [remote.endpoint.transport for remote in region.remotes] == ["cma"]
    both.unregister(region)
    with Arena(both, 4096) as arena:
        assert {remote.endpoint.transport for remote in arena.region.remotes} == {"shm", "cma"}
    both.close()
