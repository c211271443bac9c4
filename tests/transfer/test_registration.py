"""Registration covers allocations, not parameters, while any tensor in them is wanted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import pytest
import torch
from memory_transport import MemoryFabric, MemoryTransport
from numpy_gpu import numpy_gpu
from offers import GPU_TRAITS

import windlass
from windlass.control.report import Measure
from windlass.engines.client import EngineClient, EngineWeights
from windlass.engines.engine_rank import allocation_of
from windlass.errors import RegionError
from windlass.layout.manifest import Role
from windlass.memory.device import CudaMemory
from windlass.memory.host import HostMemory
from windlass.testing.resting_engine import RestingEngine
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.trainers.client import TrainerClient
from windlass.trainers.fsdp import describe_trainer
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transfer.dtensor import LiveTensors, describe_module, own_tensors
from windlass.transfer.registration import RegisteredMemory, stretches
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

TOKEN = "secret of the test"
NUM_PARAMETERS = 24
ROWS, COLUMNS = 3, 8
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Recording(WrappedTransport):
    """Transport that records registrations in order."""

    def __init__(self, inner: OneSidedTransport | None = None) -> None:
        super().__init__(create_transport(CmaConfig()) if inner is None else inner)
        self.calls: list[tuple[str, int, int]] = []

    def register_all(self, spans: Sequence[tuple[int, int]]) -> tuple[MemoryRegion, ...]:
        regions = super().register_all(spans)
        self.calls += [("register", *span) for span in spans]
        return regions

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        self.calls.append(("unregister", region.address, region.nbytes))
        super().unregister(region, released)

    @property
    def registered(self) -> set[tuple[int, int]]:
        held: set[tuple[int, int]] = set()
        for what, *span in self.calls:
            (held.add if what == "register" else held.remove)(cast("tuple[int, int]", tuple(span)))
        return held


@pytest.fixture
def transport() -> Iterator[Recording]:
    made = Recording()
    yield made
    made.close()


def covering(transport: Recording, by_owner: Sequence[MemoryRegion] = ()) -> RegisteredMemory:
    return RegisteredMemory("trainer/0", transport, HostMemory(), by_owner)


def flat_module(num_parameters: int = NUM_PARAMETERS) -> torch.nn.Module:
    """Return a module with parameters that are views of one buffer, as in Megatron-core."""
    buffer = torch.arange(num_parameters * ROWS * COLUMNS, dtype=torch.float32)
    module = torch.nn.Module()
    for index, part in enumerate(buffer.view(num_parameters, ROWS, COLUMNS)):
        module.register_parameter(f"w{index}", torch.nn.Parameter(part))
    return module


def located(module: torch.nn.Module) -> LiveTensors:
    return LiveTensors((module,), lambda: own_tensors(module))


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def test_parameters_of_one_storage_share_a_registration(
    transport: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    module, own = flat_module(), torch.nn.Parameter(torch.ones(5))
    storage = storage_of(module.get_parameter("w0"))
    module.register_parameter("own", own)
    found, memory = located(module), covering(transport)
    with caplog.at_level(logging.INFO, "windlass"):
        assert memory.cover(found.locate()) > 0
    assert transport.registered == {storage, (own.data_ptr(), own.nbytes)}
    nbytes = NUM_PARAMETERS * ROWS * COLUMNS * 4 + 20
    assert f"trainer/0: registered 25 parameters in 2 regions ({nbytes} bytes)" in caplog.text
    assert memory.cover(found.locate()) == 0.0
    assert len(transport.calls) == 2
    memory.cover(())
    assert transport.registered == set()


def test_only_the_wanted_part_of_a_storage_is_registered(transport: Recording) -> None:
    """Nothing before the first or after the last wanted byte may be registered: others may own it."""
    every = located(flat_module()).locate()
    covering(transport).cover(every[5:9])
    size = ROWS * COLUMNS * 4
    assert transport.registered == {(every[5].address, 4 * size)}


def test_swapped_data_is_registered_at_its_new_address(transport: Recording) -> None:
    module = flat_module()
    found, memory = located(module), covering(transport)
    memory.cover(found.locate())
    (flat,) = transport.registered
    moved = module.get_parameter("w7")
    moved.data = moved.data.clone()
    assert memory.cover(found.locate()) > 0
    # The other parameters have not moved, and their storage lives.
    assert transport.registered == {flat, (moved.data_ptr(), moved.nbytes)}
    swapped = flat_module()
    for name, parameter in module.named_parameters():
        parameter.data = swapped.get_parameter(name).data
    memory.cover(found.locate())
    assert transport.registered == {storage_of(swapped.get_parameter("w0"))}


def test_a_parameter_is_registered_again_when_its_storage_changes() -> None:
    """A new allocation may start at the old address.

    The other parameter's move shows that the old one ended.
    """
    buffer = np.arange(4096, dtype=np.uint8)
    address = int(buffer.ctypes.data)
    transport = Recording()
    memory = covering(transport)
    memory.cover(ParameterMemory(address + at, 64, (address, 1024)) for at in (0, 512))
    assert transport.registered == {(address, 576)}
    memory.cover(ParameterMemory(address + at, 64, (address + at, 64)) for at in (0, 2048))
    assert transport.registered == {(address, 64), (address + 2048, 64)}
    transport.close()


def test_freed_memory_is_registered_again_at_the_same_address(transport: Recording) -> None:
    """A NIC would read the pages of the freed memory. The storage of the other parameter was not freed."""
    buffer = np.arange(256, dtype=np.float32)
    module, other = torch.nn.Module(), torch.nn.Parameter(torch.ones(5))
    module.register_parameter("moved", torch.nn.Parameter(torch.from_numpy(buffer)))
    module.register_parameter("other", other)
    found, memory = located(module), covering(transport)
    address = int(buffer.ctypes.data)
    memory.cover(found.locate())
    transport.calls.clear()
    before = found.locate()
    for _ in range(2):
        module.get_parameter("moved").data = torch.empty(0)
        module.get_parameter("moved").data = torch.from_numpy(buffer)
        assert memory.cover(found.locate()) > 0
        assert transport.calls == [("unregister", address, 1024), ("register", address, 1024)]
        transport.calls.clear()
    assert memory.cover(found.locate()) == 0.0
    assert found.locate() is found.locate()
    assert found.locate()[1] == before[1]


def test_an_old_region_is_removed_before_an_overlapping_one_is_added(transport: Recording) -> None:
    buffer = np.arange(4096, dtype=np.uint8)
    address = int(buffer.ctypes.data)
    memory = covering(transport)
    memory.cover([ParameterMemory(address, 64), ParameterMemory(address + 1024, 64)])
    memory.cover([ParameterMemory(address + 32, 64), ParameterMemory(address + 1024, 64)])
    assert transport.calls == [
        ("register", address, 64),
        ("register", address + 1024, 64),
        ("unregister", address, 64),
        ("register", address + 32, 64),
    ]
    memory.cover(())
    assert sorted(transport.calls[4:]) == [
        ("unregister", address + 32, 64),
        ("unregister", address + 1024, 64),
    ]


def test_overlapping_views_of_any_allocator_share_a_region(transport: Recording) -> None:
    """To torch, two arrays of one memory are two storages."""
    buffer = np.arange(256, dtype=np.uint8)
    views = [
        torch.from_numpy(buffer[:160]),
        torch.from_numpy(buffer[96:]),
        torch.from_numpy(buffer[8:40]),
    ]
    memory = covering(transport)
    spans = [ParameterMemory(v.data_ptr(), v.nbytes, storage_of(v)) for v in views]
    memory.cover(spans)
    assert transport.registered == {(int(buffer.ctypes.data), 256)}
    memory.cover(spans[1:])
    assert transport.registered == {
        (spans[1].address, 160),
        (spans[2].address, 32),
    }


def test_regions_of_the_owner_stay_and_are_not_overlapped(
    transport: Recording,
) -> None:
    buffer = np.arange(4096, dtype=np.uint8)
    address = int(buffer.ctypes.data)
    storage = address, buffer.nbytes
    by_owner = [transport.register(address + at, 512) for at in (2048, 1024)]
    transport.calls.clear()
    memory = covering(transport, by_owner)
    offsets = (0, 256, 1024, 1400, 1536, 1600, 2048, 2560, 4032)
    memory.cover(ParameterMemory(address + at, 64, storage) for at in offsets)
    assert transport.registered == {
        (address, 320),
        (address + 1536, 128),
        (address + 2560, 1536),
    }
    memory.cover(())
    for region in by_owner:
        transport.inner.unregister(region)


def test_refused_memory_is_named_and_the_next_registration_succeeds(
    transport: Recording,
) -> None:
    buffer = np.arange(4096, dtype=np.uint8)
    address = int(buffer.ctypes.data)
    foreign = transport.inner.register(address + 1000, 8)
    memory = covering(transport)
    wanted = [ParameterMemory(address, 64), ParameterMemory(address + 960, 64)]
    with pytest.raises(RegionError, match=rf"{address + 960:#x}.*overlaps registered .*{address + 1000:#x}"):  # fmt: skip
        memory.cover(wanted)
    assert transport.registered == set()
    transport.inner.unregister(foreign)
    assert memory.cover(wanted) > 0
    assert transport.registered == {(address, 64), (address + 960, 64)}


def test_parameters_of_one_allocation_of_a_gpu_are_registered_once() -> None:
    class GpuTransport(MemoryTransport):
        traits = GPU_TRAITS

    gpu = numpy_gpu()
    transport = Recording(GpuTransport(MemoryFabric()))
    memory = RegisteredMemory("trainer/0", transport, CudaMemory(gpu), ())
    segments = [gpu.device.allocate(65536) for _ in range(2)]
    # Torch's storages do not count: a block lives as long as its segment.
    lies = [ParameterMemory(s + at, 256, (s + at, 256)) for s in segments for at in (0, 512, 4096)]
    memory.cover(lies)
    assert transport.registered == {(segment, 4096 + 256) for segment in segments}
    calls = len(transport.calls)
    moved = [ParameterMemory(s + at, 256) for s in segments for at in (1024, 2048)]
    # This memory is inside a registered region.
    memory.cover(moved)
    assert len(transport.calls) == calls
    memory.cover(moved[:2])
    assert transport.registered == {(segments[0], 4096 + 256)}
    with pytest.raises(RegionError, match="register: 0x40 must be in memory of GPU 0"):
        memory.cover([ParameterMemory(64, 64)])
    assert transport.registered == {(segments[0], 4096 + 256)}
    # A refused parameter must not count as covered.
    memory.cover(())
    assert transport.registered == set()
    transport.close()


@pytest.mark.gpu
@needs_gpu
def test_tensors_of_one_segment_of_torchs_allocator_share_one_handle() -> None:
    from windlass.memory.cuda.gpu import shared_gpu
    from windlass.transports.cuda_ipc import CudaIpcTransport

    torch.cuda.empty_cache()
    tensors = [torch.full((4096,), float(index), device="cuda:0") for index in range(32)]
    transport = Recording(CudaIpcTransport(0))
    memory = RegisteredMemory("trainer/0", transport, CudaMemory(shared_gpu(0)), ())
    segments = {allocation_of(t.data_ptr()) for t in tensors}
    spans = [ParameterMemory(t.data_ptr(), t.nbytes, storage_of(t)) for t in tensors]
    memory.cover(spans)
    assert len(transport.registered) == len(segments) < len(tensors)
    for span in spans:
        assert any(a <= span.address and span.address + span.nbytes <= a + n for a, n in transport.registered)  # fmt: skip
    with pytest.raises(RegionError, match="must be in memory of GPU 0"):
        memory.cover([*spans, ParameterMemory(np.zeros(64).ctypes.data, 64)])
    memory.cover(())
    assert transport.registered == set()
    transport.close()


async def test_an_update_reports_registration_time_and_serves_moved_weights() -> None:
    def work(url: str) -> None:
        trained, served = flat_module(), flat_module()
        described = describe_trainer(trained, group="trainer", name_map=None)
        module = torch.nn.Module()
        for name, parameter in served.named_parameters():
            module.register_parameter(name, torch.nn.Parameter(torch.zeros_like(parameter)))
        engine_side = create_transport(CmaConfig())
        places = located(module).locate()
        engine = EngineClient(
            EngineWeights(
                manifest=describe_module(module, "engine/0", Role.ENGINE),
                addresses=[place.address for place in places],
                regions=[engine_side.register(p.address, p.nbytes) for p in places],
            ),
            transport=engine_side,
            hooks=RestingEngine(),
            controller=url,
            token=TOKEN,
        )
        transport = Recording()
        with (
            engine,
            TrainerClient(
                TrainerWeights(manifest=described.manifest, parameters=described.parameters),
                transport=transport,
                controller=url,
                token=TOKEN,
            ) as trainer,
        ):
            took = []
            for version in range(4):
                with torch.no_grad():
                    for parameter in trained.parameters():
                        parameter.add_(version + 0.5)
                    if version == 2:
                        for parameter in trained.parameters():
                            parameter.data = parameter.data.clone()
                took.append(trainer.publish(version).result().measure(Measure.REGISTER_S))
                for name, parameter in trained.named_parameters():
                    assert torch.equal(parameter, module.get_parameter(name)), (version, name)
                if version < 2:
                    assert len(transport.registered) == 1
            assert took[0] > 0 == took[1] < took[2]
            assert took[3] == 0
            assert len(transport.registered) == NUM_PARAMETERS
        assert transport.registered == set()

    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(work, controller.url)


def test_overlapping_spans_share_a_stretch() -> None:
    assert stretches([(100, 50), (120, 10), (140, 20), (160, 5)]) == [(100, 60), (160, 5)]


def test_parameters_of_one_allocation_are_registered_once() -> None:
    blocks = {0: (0, 1000), 2000: (2000, 500), 2500: (2500, 500)}

    def allocation(address: int) -> tuple[int, int]:
        return next(b for b in blocks.values() if b[0] <= address < sum(b))

    spans = [(0, 10), (400, 100), (900, 100), (2000, 100), (2400, 100), (2500, 100)]
    assert stretches(spans, allocation) == [(0, 1000), (2000, 500), (2500, 100)]


def test_a_span_beyond_its_allocation_is_not_joined_with_the_next() -> None:
    assert stretches([(0, 150), (160, 10)], lambda address: (address // 100 * 100, 100)) == [
        (0, 150),
        (160, 10),
    ]


def test_host_memory_is_joined_where_parameters_touch() -> None:
    assert allocation_of(4096) is None
    assert stretches([(0, 64), (64, 64), (132, 4)], allocation_of) == [(0, 128), (132, 4)]
