"""A calling thread's own GPU is current again after this library used another GPU there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from windlass.errors import TransferFailed
from windlass.memory.cuda import driver
from windlass.memory.cuda.driver import Device, Event, Stream

THEIRS = 1000
"""Context of the thread's own GPU. GPU i of this library has context i + 1."""


class Library:
    """Driver with the contexts of one thread. Every other call records the current context."""

    def __init__(self) -> None:
        self.contexts = [THEIRS]
        self.called: list[tuple[str, int]] = []
        self.failing = ""

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:  # noqa: N802
        context._obj.value = device.value + 1
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.contexts[-1] = context.value or 0
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.contexts.append(context.value or 0)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.contexts.pop()
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_: Any) -> int:
            self.called.append((name, self.contexts[-1]))
            return 1 if name == self.failing else 0

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
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
    "cuStreamDestroy_v2": stream_and_event,
    "cuCtxSynchronize": Device.synchronize,
    "cuMemAlloc_v2": lambda device: device.allocate(64),
    "cuMemFree_v2": lambda device: device.free(64),
    "cuMemGetAddressRange_v2": lambda device: device.allocation(64),
    "cuIpcGetMemHandle": lambda device: device.export(64),
    "cuMemHostRegister_v2": lambda device: device.pin(4096, 4096),
    "cuModuleLoadData": lambda device: device.load(b""),
    "cuStreamSynchronize": lambda device: device.download(64, 16, Stream(device)),
    "cuCtxEnablePeerAccess": lambda device: device.enable_peer(Device(0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_on_its_own_gpu_and_keeps_the_current_gpu(library: Library, name: str) -> None:
    CALLS[name](Device(1))
    assert (name, 2) in library.called
    assert library.contexts == [THEIRS]


def test_a_failed_call_keeps_the_current_gpu(library: Library) -> None:
    library.failing = "cuEventRecord"
    with pytest.raises(TransferFailed, match="cuEventRecord failed with 1"):
        Device(1).record(12345)
    assert ("cuEventRecord", 2) in library.called
    assert library.contexts == [THEIRS]
