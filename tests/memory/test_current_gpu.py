"""A calling thread's own GPU is current again after this library used another GPU there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from recorded_driver import THEIRS, RecordedDriver

from windlass.errors import TransferFailed
from windlass.memory.cuda import driver
from windlass.memory.cuda.driver import IPC_HANDLE_NBYTES, Device, Event, Stream


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedDriver:
    found = RecordedDriver()
    monkeypatch.setattr(driver, "driver", lambda: found)
    return found


def stream_and_event(device: Device) -> None:
    stream = Stream(device)
    event: Event = stream.record()
    event.wait()
    stream.close()


CALLS: dict[str, Callable[[Device], object]] = {
    "cuEventRecord": lambda device: device.record(12345),
    "cuEventSynchronize": stream_and_event,
    "cuStreamDestroy": stream_and_event,
    "cuCtxSynchronize": Device.synchronize,
    "cuMemAlloc": lambda device: device.allocate(64),
    "cuMemFree": lambda device: device.free(64),
    "cuMemGetAddressRange": lambda device: device.allocation(64),
    "cuIpcGetMemHandle": lambda device: device.export(64),
    "cuIpcOpenMemHandle": lambda device: device.open(bytes(IPC_HANDLE_NBYTES)),
    "cuIpcCloseMemHandle": lambda device: device.close_handle(64),
    "cuMemHostRegister": lambda device: device.pin(4096, 4096),
    "cuMemHostGetDevicePointer": lambda device: device.device_pointer(4096),
    "cuMemHostUnregister": lambda device: device.unpin(4096),
    "cuMemcpyAsync": lambda device: device.copy(4096, 8192, 64, Stream(device)),
    "cuMemsetD8Async": lambda device: device.clear(4096, 64, Stream(device)),
    "cuModuleLoadData": lambda device: device.load(b""),
    "cuLaunchKernel": lambda device: device.launch(object(), 1, 32, (), 0),
    "cuStreamSynchronize": lambda device: device.download(64, 16, Stream(device)),
    "cuMemcpyDtoH": lambda device: device.download(64, 16),
    "cuCtxEnablePeerAccess": lambda device: device.enable_peer(Device(0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_on_its_own_gpu_and_keeps_the_current_gpu(
    recorded: RecordedDriver, name: str
) -> None:
    CALLS[name](Device(1))
    assert (name, 2) in [(called, context) for called, context, _ in recorded.calls]
    assert recorded.contexts == [THEIRS]


def test_a_failed_call_keeps_the_current_gpu(recorded: RecordedDriver) -> None:
    recorded.failing = "cuEventRecord"
    with pytest.raises(TransferFailed, match="cuEventRecord failed with 1: as the test wants"):
        Device(1).record(12345)
    assert ("cuEventRecord", 2) in [(called, context) for called, context, _ in recorded.calls]
    assert recorded.contexts == [THEIRS]
