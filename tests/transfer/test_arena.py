from __future__ import annotations

import numpy as np
import pytest
from memory_transport import MemoryFabric, MemoryTransport

from windlass.errors import ConfigError, RegionError, TransferFailed, TransferOutcomeUnknown
from windlass.observability.ceilings import measure_memcpy_gbps
from windlass.testing.faulty_transport import Fault, FaultKind, FaultyTransport
from windlass.transfer.arena import Arena
from windlass.transports.base import MemoryRegion, WriteBatch
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import TransportConfig, create_transport
from windlass.transports.shm import ShmConfig, ShmTransport


@pytest.mark.parametrize("config", [CmaConfig(), ShmConfig()])
def test_an_arena_is_zeroed_page_aligned_registered_and_withdrawn_at_close(
    config: TransportConfig,
) -> None:
    transport = create_transport(config)
    arena = Arena(transport, 10_001)
    assert (arena.nbytes, arena.address % 4096) == (10_001, 0)
    assert not arena.bytes.any()
    assert (arena.region.address, arena.region.nbytes) == (arena.address, 10_001)
    with pytest.raises(RegionError, match="overlap"):
        transport.register(arena.address + 10_000, 1)
    region = arena.region
    arena.close()
    arena.close()
    with pytest.raises(RegionError, match="not registered"):
        transport.unregister(region)
    transport.close()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_arena_is_refused(nbytes: int) -> None:
    with pytest.raises(ConfigError, match="nbytes must be >= 1"):
        Arena(MemoryTransport(MemoryFabric()), nbytes)


def test_views_of_a_mapped_arena_stay_valid_after_close() -> None:
    arena = Arena(MemoryTransport(MemoryFabric()), 4096)
    arena.bytes[:] = 7
    view = arena.bytes[100:200]
    arena.close()
    assert view.tolist() == [7] * 100


def test_memory_is_released_when_registration_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = ShmTransport()
    released: list[int] = []
    real = transport.release

    def refuse(address: int, nbytes: int) -> MemoryRegion:
        raise RegionError("scripted")

    monkeypatch.setattr(transport, "register", refuse)

    def release(address: int) -> None:
        released.append(address)
        real(address)

    monkeypatch.setattr(transport, "release", release)
    with pytest.raises(RegionError, match="scripted"):
        Arena(transport, 4096)
    assert len(released) == 1
    transport.close()


def test_the_memcpy_ceiling_is_a_plausible_rate() -> None:
    assert 0.1 < measure_memcpy_gbps(1 << 20, 3) < 1000


SIZES = np.array([10, 20, 30, 40], np.uint64)
OFFSETS = np.array([0, 100, 200, 300], np.uint64)


def landed(kind: FaultKind, error: type[Exception] | None, delay_s: float = 0.0) -> list[int]:
    """Return the number of bytes of each piece that arrive when the second of three writes fails."""
    fabric = MemoryFabric()
    fault = Fault(kind=kind, delay_s=delay_s)
    faulty: FaultyTransport = FaultyTransport(MemoryTransport(fabric), {1: fault})
    target_transport = MemoryTransport(fabric)
    with Arena(faulty, 4096) as source, Arena(target_transport, 4096) as target:
        source.bytes[:] = np.arange(4096) % 250 + 1
        batch = WriteBatch(
            endpoint=target_transport.endpoint(),
            local_addresses=np.uint64(source.address) + OFFSETS,
            remote_addresses=np.uint64(target.address) + OFFSETS,
            nbytes=SIZES,
            regions=(target.region.remote,),
        )
        faulty.write(batch, deadline_s=1.0)
        assert target.bytes[300:340].tobytes() == source.bytes[300:340].tobytes()
        target.bytes[:] = 0
        if error is None:
            faulty.write(batch, deadline_s=1.0)
        else:
            with pytest.raises(error, match="write 1"):
                faulty.write(batch, deadline_s=1.0)
        equal = target.bytes == source.bytes
        counts = [
            int(equal[o : o + n].sum())
            for o, n in zip(OFFSETS.tolist(), SIZES.tolist(), strict=True)
        ]
        faulty.write(batch, deadline_s=1.0)
        assert (target.bytes[300:340] == source.bytes[300:340]).all()
        assert faulty.num_writes == 3
    faulty.close()
    target_transport.close()
    return counts


@pytest.mark.parametrize(
    ("kind", "error", "expected"),
    [
        (FaultKind.FAIL_BEFORE, TransferFailed, [0, 0, 0, 0]),
        (FaultKind.FAIL_HALFWAY, TransferFailed, [10, 20, 0, 0]),
        (FaultKind.DROP_PIECE, None, [10, 20, 30, 0]),
        (FaultKind.FLIP_BYTE, None, [9, 20, 30, 40]),
        (FaultKind.UNKNOWN, TransferOutcomeUnknown, [0, 0, 0, 0]),
        (FaultKind.UNKNOWN_LANDED, TransferOutcomeUnknown, [10, 20, 30, 40]),
    ],
)
def test_a_scripted_fault_affects_only_the_named_write(
    kind: FaultKind, error: type[Exception] | None, expected: list[int]
) -> None:
    assert landed(kind, error) == expected


def test_a_scripted_delay_is_unknown_only_past_the_deadline() -> None:
    assert landed(FaultKind.DELAY, None, 0.01) == [10, 20, 30, 40]
    assert landed(FaultKind.DELAY, TransferOutcomeUnknown, 2.0) == [0, 0, 0, 0]


def test_only_a_delay_fault_has_a_delay() -> None:
    for kind, delay_s in (
        (FaultKind.DELAY, 0.0),
        (FaultKind.UNKNOWN, 1.0),
        (FaultKind.DELAY, -1.0),
    ):
        with pytest.raises(ConfigError, match="delay_s"):
            Fault(kind=kind, delay_s=delay_s)


def test_a_faulty_transport_allocates_only_if_its_inner_transport_does() -> None:
    shm = FaultyTransport(ShmTransport(), {})
    assert shm.allocator is not None
    Arena(shm, 4096).close()
    shm.close()
    assert FaultyTransport(MemoryTransport(MemoryFabric()), {}).allocator is None
